"""Idempotency keys: claimed in SQL before the request begins, so that no two workers run the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.database import Database
from ledger.errors import AlreadyAnswered, IdempotencyExpired, IdempotencyInProgress, IdempotencyMismatch
from ledger.schema import idempotency_claims

if TYPE_CHECKING:
    from ledger.hold import Ask


async def claim(db: Database, ask: Ask, slot_id: str, epoch: int, now_ms: int) -> None:
    """Returns when the key is this request's. Raises AlreadyAnswered, IdempotencyInProgress, IdempotencyMismatch,
    IdempotencyExpired, LedgerUnavailable."""
    values = {
        "team_id": ask.spender.team_id,
        "key_id": ask.spender.key_id,
        "idempotency_key": ask.idempotency_key,
        "request_id": ask.request_id,
        "body_hash": ask.body_hash or "",
        "state": "running",
        "at_ms": now_ms,
        "slot_id": slot_id,
        "epoch": epoch,
    }
    build = postgresql.insert if db.dialect == "postgresql" else sqlite.insert
    while True:
        async with db.begin() as c:
            done = await c.execute(build(idempotency_claims).values(values).on_conflict_do_nothing())
            if done.rowcount == 1:
                return
            held = await _find(c, ask)
        if held is not None:  # None: released in between
            _answer(held, ask, now_ms)
            return


async def _find(c: AsyncConnection, ask: Ask) -> Any:
    k = idempotency_claims.c
    query = select(k.request_id, k.body_hash, k.state, k.answer, k.answer_expires_ms).where(
        k.team_id == ask.spender.team_id,
        k.key_id == ask.spender.key_id,
        k.idempotency_key == ask.idempotency_key,
    )
    return (await c.execute(query)).one_or_none()


def _answer(held: Any, ask: Ask, now_ms: int) -> None:
    if held.request_id == ask.request_id:  # ours after all: a COMMIT whose end we had not seen
        return
    if held.body_hash != (ask.body_hash or ""):
        raise IdempotencyMismatch("this Idempotency-Key was used with another request body; use a new one")
    if held.state == "running":
        raise IdempotencyInProgress(f"request {held.request_id} of this key still runs", held.request_id)
    if held.answer_expires_ms is not None and held.answer_expires_ms < now_ms:
        raise IdempotencyExpired(f"the answer of {held.request_id} is no longer kept", held.request_id)
    if held.answer is None:
        raise IdempotencyInProgress(
            f"request {held.request_id} is done and billed; its answer was not kept", held.request_id
        )
    raise AlreadyAnswered(held.request_id, bytes(held.answer))
