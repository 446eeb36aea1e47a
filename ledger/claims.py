"""Idempotency keys: claimed in SQL before the request begins, so that no two workers run the same one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.database import Database
from ledger.errors import AlreadyAnswered, IdempotencyExpired, IdempotencyInProgress, IdempotencyMismatch
from ledger.periods import still_ahead
from ledger.requests import Ask
from ledger.schema import idempotency_claims

DOUBTED_FOR_MS = 600_000
"""No server still commits for a connection that has been gone for so long."""
LOOK_EACH_MS = 2_000


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


class DoubtfulClaims:
    """Claims whose COMMIT nobody saw, of requests that do not begin. One that arrives later than the poster freed its
    key would keep it; so they are looked for again."""

    def __init__(self, slot_id: str, epoch: int, clock: Callable[[], int]) -> None:
        self._mine = (idempotency_claims.c.slot_id == slot_id, idempotency_claims.c.epoch == epoch)
        self._clock = clock
        self._until_ms: dict[str, int] = {}
        self._next_look_ms = 0

    def add(self, request_id: str) -> None:
        self._until_ms[request_id] = self._clock() + DOUBTED_FOR_MS

    async def release(self, db: Database) -> None:
        """Free the keys of those that have arrived. LedgerUnavailable."""
        now_ms = self._clock()
        if not self._until_ms or still_ahead(self._next_look_ms, now_ms, LOOK_EACH_MS):
            return
        self._next_look_ms = now_ms + LOOK_EACH_MS
        claims = idempotency_claims.c
        late = (claims.request_id.in_(list(self._until_ms)), claims.state == "running")
        async with db.begin() as c:
            await c.execute(delete(idempotency_claims).where(*self._mine, *late))
        self._until_ms = {request_id: until for request_id, until in self._until_ms.items() if until > now_ms}


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
