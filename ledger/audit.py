"""Who changed what: a hash chain of administrative acts, which is also the change feed that workers poll.

Every administrative transaction takes the chain's head first (`lock`), so these transactions happen one after another:
`seq` has no gaps, and whoever has read up to seq n has missed nothing before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.errors import LedgerUnavailable
from ledger.paging import Page, page
from ledger.schema import audit, chain_heads

CHAIN = "audit"
GENESIS = "0" * 64


@dataclass(frozen=True, slots=True)
class By:
    """Who acts, when (UTC ms) and, if told, why. Every change of the books takes one."""

    actor: str
    at_ms: int
    reason: str | None = None


class Change(msgspec.Struct, frozen=True):
    """What a worker needs to know to refresh: this subject changed."""

    seq: int
    subject_kind: str
    subject_id: str
    team_id: str | None
    action: str = ""


class Entry(msgspec.Struct, frozen=True):
    """One act as it was recorded. `before` and `after` are JSON texts."""

    seq: int
    at_ms: int
    actor: str
    action: str
    subject_kind: str
    subject_id: str
    team_id: str | None
    reason: str | None
    before: str | None
    after: str | None
    previous_hash: str
    hash: str


async def lock(c: AsyncConnection, *, share: bool = False) -> tuple[int, str]:
    """(seq, hash) of the chain's head, locked until this transaction ends. Call it before reading what will change.

    share: keeps acts out, not others who share.
    """
    query = select(chain_heads.c.seq, chain_heads.c.hash).where(chain_heads.c.name == CHAIN)
    query = query.with_for_update(read=share)
    row = (await c.execute(query)).one_or_none()
    if row is None:
        raise LedgerUnavailable("the database has no audit chain: run `tallygate migrate` first")
    return row.seq, row.hash


async def record(
    c: AsyncConnection,
    by: By,
    action: str,
    subject_kind: str,
    subject_id: str,
    *,
    team_id: str | None = None,
    before: Any = None,
    after: Any = None,
) -> int:
    """Appends one act to the chain, in the caller's transaction; returns its seq.

    `before` and `after` are anything that msgspec can write as JSON; never a secret.
    """
    seq, previous_hash = await lock(c)
    entry = {
        "seq": seq + 1,
        "at_ms": by.at_ms,
        "actor": by.actor,
        "action": action,
        "subject_kind": subject_kind,
        "subject_id": subject_id,
        "team_id": team_id,
        "reason": by.reason,
        "before": _json(before),
        "after": _json(after),
        "previous_hash": previous_hash,
    }
    entry["hash"] = entry_hash(entry)
    await c.execute(insert(audit).values(entry))
    await c.execute(update(chain_heads).where(chain_heads.c.name == CHAIN).values(seq=entry["seq"], hash=entry["hash"]))
    return seq + 1


def entry_hash(entry: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of all fields but the hash itself; `previous_hash` is among them."""
    fields = {name: entry[name] for name in Entry.__struct_fields__ if name != "hash"}
    return sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()


async def latest_seq(c: AsyncConnection) -> int:
    """Where the feed stands; 0 before the first act."""
    seq: int = (await c.execute(select(chain_heads.c.seq).where(chain_heads.c.name == CHAIN))).scalar_one()
    return seq


async def changes_since(c: AsyncConnection, seq: int, limit: int = 1_000) -> list[Change]:
    """The next changes after `seq`, oldest first; empty when there are none. Ask again after the last one's seq."""
    columns = (audit.c.seq, audit.c.subject_kind, audit.c.subject_id, audit.c.team_id, audit.c.action)
    query = select(*columns).where(audit.c.seq > seq).order_by(audit.c.seq).limit(limit)
    return [Change(*row) for row in await c.execute(query)]


async def list_entries(
    c: AsyncConnection,
    *,
    team_id: str | None = None,
    subject_kind: str | None = None,
    subject_id: str | None = None,
    cursor: str | None = None,
    limit: int = 100,
) -> Page[Entry]:
    """The newest acts first."""
    query = select(audit)
    if team_id is not None:
        query = query.where(audit.c.team_id == team_id)
    if subject_kind is not None:
        query = query.where(audit.c.subject_kind == subject_kind)
    if subject_id is not None:
        query = query.where(audit.c.subject_id == subject_id)
    make = _entry
    return await page(c, query, [audit.c.seq], make, cursor=cursor, limit=limit, newest_first=True)


async def verify_chain(c: AsyncConnection) -> tuple[int, str | None]:
    """(acts checked, what is wrong first or None): no gap, every hash right, and the head is the last of them."""
    seq, previous_hash = 0, GENESIS
    while True:
        query = select(audit).where(audit.c.seq > seq).order_by(audit.c.seq).limit(1_000)
        entries = [_entry(row) for row in await c.execute(query)]
        for entry in entries:
            wrong = _wrong_with(entry, seq + 1, previous_hash)
            if wrong:
                return seq, wrong
            seq, previous_hash = entry.seq, entry.hash
        if not entries:
            break
    head = (await c.execute(select(chain_heads).where(chain_heads.c.name == CHAIN))).one()
    if (head.seq, head.hash) != (seq, previous_hash):
        return seq, f"the audit chain ends at {seq}, its head says {head.seq}"
    return seq, None


def _wrong_with(entry: Entry, seq: int, previous_hash: str) -> str | None:
    if entry.seq != seq:
        return f"audit entry {seq} is missing"
    if entry.previous_hash != previous_hash:
        return f"audit entry {seq} does not follow the one before it"
    if entry_hash(msgspec.structs.asdict(entry)) != entry.hash:
        return f"audit entry {seq} was changed after it was written"
    return None


def _entry(row: Any) -> Entry:
    return Entry(**row._mapping)


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(value, order="sorted").decode()
