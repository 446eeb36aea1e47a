"""The statements of one batch. Bulk goes through the raw drivers: `executemany` on SQLite, COPY and unnest on
PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from typing import Any

import asyncpg
import msgspec
import structlog
from sqlalchemy import delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.database import driver
from ledger.entries import ROLLUP_KEYS, ROLLUP_SUMS, USAGE_COLUMNS, AccountInfo, Entries, RefusedRecord
from ledger.journal.format import SETTLE, Frame
from ledger.records import Settle, decode
from ledger.schema import accounts, epochs, idempotency_claims, leases, seals, suspense, usage

log = structlog.get_logger(__name__)

TRANSFER_COLUMNS = (
    "id",
    "batch_id",
    "at_ms",
    "kind",
    "source",
    "destination",
    "amount_pico",
    "currency",
    "team_id",
    "period",
)
UNBELIEVED = "usage not believed"
"""The reason of a suspense row that keeps what the upstream reported; the request itself is posted."""

_REFUSALS = (
    IntegrityError,
    DataError,
    sqlite3.IntegrityError,
    sqlite3.DataError,
    sqlite3.InterfaceError,
    OverflowError,
    asyncpg.exceptions.IntegrityConstraintViolationError,
    asyncpg.exceptions.DataError,
    msgspec.DecodeError,
    ValueError,  # a driver that cannot encode what a record holds
)


def is_refusal(error: Exception) -> bool:
    """Whether the database (or a driver) said no to what a record contains, so that trying again cannot help."""
    if isinstance(error, DBAPIError):
        sqlstate = str(getattr(error.orig, "sqlstate", None) or "")
        if sqlstate.startswith(("22", "23")) or isinstance(getattr(error.orig, "__cause__", None), _REFUSALS):
            return True
    return isinstance(error, _REFUSALS)


def is_outage(error: BaseException) -> bool:
    """Whether a driver failed for a reason that lies outside the records: try again later."""
    return isinstance(
        error,
        (
            DBAPIError,
            OSError,
            sqlite3.OperationalError,
            asyncpg.exceptions.PostgresError,
            asyncpg.exceptions.InterfaceError,
            asyncpg.exceptions.InternalClientError,
        ),
    )


async def account_infos(c: AsyncConnection, account_ids: Collection[str]) -> dict[str, AccountInfo]:
    query = select(accounts.c.id, accounts.c.kind, accounts.c.currency).where(accounts.c.id.in_(account_ids))
    return {row.id: AccountInfo(row.kind, row.currency) for row in await c.execute(query)}


async def insert_rows(c: AsyncConnection, table: str, columns: Sequence[str], rows: list[tuple[Any, ...]]) -> None:
    """In the caller's transaction. Raises what `is_refusal` knows."""
    raw = await driver(c)
    bulk = _PostgreSQL(raw) if c.dialect.name == "postgresql" else _SQLite(raw)
    await bulk.insert(table, columns, rows)


async def write_entries(c: AsyncConnection, entries: Entries, now_ms: int) -> None:
    """Everything a batch means, in the caller's transaction. Raises what `is_refusal` knows, or RefusedRecord."""
    raw = await driver(c)
    bulk = _PostgreSQL(raw) if c.dialect.name == "postgresql" else _SQLite(raw)
    if entries.rows:
        await bulk.insert("usage", USAGE_COLUMNS, entries.rows)
        await bulk.insert("transfers", TRANSFER_COLUMNS, _transfer_rows(entries, now_ms))
        await _debit(bulk, entries)
        await bulk.add_up("rollups", ROLLUP_KEYS, ROLLUP_SUMS, [(*key, *v) for key, v in entries.rollups.items()])
    for seq, request_id, received in entries.unbelieved:
        await _put_in_suspense(c, entries.slot_id, entries.epoch, seq, request_id, UNBELIEVED, received, now_ms)
    await _end_claims(c, entries)
    await _note_seals(c, entries)


async def suspend(c: AsyncConnection, slot_id: str, epoch: int, frame: Frame, reason: str, now_ms: int) -> bool:
    """Sets one refused frame aside. True: it was posted before with the same bytes, so there was nothing to do."""
    request_id = None
    if frame.type == SETTLE:
        try:
            record = decode(frame.payload)
            assert isinstance(record, Settle)
            request_id = record.request_id
            same = select(usage.c.record).where(usage.c.request_id == request_id)
            async with c.begin_nested():
                posted = (await c.execute(same)).scalar_one_or_none()
            if posted is not None and bytes(posted) == frame.payload:
                return True
        except Exception as error:
            if not is_refusal(error):
                raise
    await _put_in_suspense(c, slot_id, epoch, frame.seq, request_id, reason[:500], frame.payload, now_ms)
    return False


async def cover_again(c: AsyncConnection, entries: Entries) -> None:
    """Take leases again that the database has forgotten, for what the entries charge to them, as far as the accounts
    still have it. Of epochs that are open: what was declared lost is given up."""
    e, lease = epochs.c, leases.c
    for (epoch, account_id), amount in sorted(entries.debits.items(), key=lambda debit: (debit[0][1], debit[0][0])):
        mine = (lease.slot_id == entries.slot_id, lease.epoch == epoch, lease.account_id == account_id)
        await c.execute(select(accounts.c.id).where(accounts.c.id == account_id).with_for_update())
        outstanding = select(lease.taken_pico - lease.returned_pico - lease.posted_pico).where(*mine)
        missing = amount - int((await c.execute(outstanding)).scalar_one_or_none() or 0)
        state = select(e.state).where(e.slot_id == entries.slot_id, e.epoch == epoch)
        if missing > 0 and (await c.execute(state)).scalar_one_or_none() == "open":
            await lease_again(c, entries.slot_id, epoch, account_id, missing)


async def lease_again(c: AsyncConnection, slot_id: str, epoch: int, account_id: str, missing_pico: int) -> int:
    """Returns how much of it the account still had."""
    a, lease = accounts.c, leases.c
    free = select(a.credits_pico - a.debits_pico - a.leased_pico).where(a.id == account_id).with_for_update()
    amount = max(0, min(missing_pico, int((await c.execute(free)).scalar_one_or_none() or 0)))
    log.error("the database is older than the journal", account=account_id, missing=missing_pico, leased_again=amount)
    if not amount:
        return 0
    await c.execute(update(accounts).where(a.id == account_id).values(leased_pico=a.leased_pico + amount))
    mine = (lease.slot_id == slot_id, lease.epoch == epoch, lease.account_id == account_id)
    again = {"taken_pico": lease.taken_pico + amount, "revision": lease.revision + 1}  # a gate that lives reads it anew
    done = await c.execute(update(leases).where(*mine).values(**again))
    if not done.rowcount:
        row = {"slot_id": slot_id, "epoch": epoch, "account_id": account_id, "taken_pico": amount}
        await c.execute(insert(leases).values(row))
    return amount


async def close_epoch(c: AsyncConnection, slot_id: str, epoch: int) -> None:
    """Return what is left of an epoch's leases, but for the amounts of its records in suspense; free its claims."""
    kept = await _suspended_amounts(c, slot_id, epoch)
    mine = (leases.c.slot_id == slot_id, leases.c.epoch == epoch)
    holding = select(leases.c.account_id).where(*mine)
    await c.execute(
        select(accounts.c.id).where(accounts.c.id.in_(holding)).order_by(accounts.c.id).with_for_update(key_share=True)
    )
    left = leases.c.taken_pico - leases.c.returned_pico - leases.c.posted_pico
    for row in (await c.execute(select(leases.c.account_id, left.label("left")).where(*mine, left > 0))).all():
        amount = int(row.left) - kept.get(row.account_id, 0)
        if amount <= 0:
            continue
        await c.execute(
            update(accounts).where(accounts.c.id == row.account_id).values(leased_pico=accounts.c.leased_pico - amount)
        )
        await c.execute(
            update(leases)
            .where(*mine, leases.c.account_id == row.account_id)
            .values(returned_pico=leases.c.returned_pico + amount)
        )
    this = (epochs.c.slot_id == slot_id, epochs.c.epoch == epoch, epochs.c.state == "open")  # what is lost stays lost
    await c.execute(update(epochs).where(*this).values(state="closed"))
    claims = idempotency_claims.c
    await c.execute(
        delete(idempotency_claims).where(claims.slot_id == slot_id, claims.epoch == epoch, claims.state == "running")
    )


async def _suspended_amounts(c: AsyncConnection, slot_id: str, epoch: int) -> dict[str, int]:
    s = suspense.c
    query = select(s.epoch, s.record).where(
        s.slot_id == slot_id, s.epoch >= epoch, s.resolved_ms.is_(None), s.reason != UNBELIEVED
    )
    kept: dict[str, int] = {}
    for row in (await c.execute(query)).all():
        try:
            record = decode(bytes(row.record))
        except msgspec.DecodeError:
            continue
        if isinstance(record, Settle) and (record.recovered_epoch or row.epoch) == epoch:
            for charge in record.charges:
                kept[charge.account_id] = kept.get(charge.account_id, 0) + charge.amount_pico
    return kept


async def _put_in_suspense(
    c: AsyncConnection,
    slot_id: str,
    epoch: int,
    seq: int,
    request_id: str | None,
    reason: str,
    record: bytes,
    now_ms: int,
) -> None:
    row = {"slot_id": slot_id, "epoch": epoch, "seq": seq, "request_id": request_id}
    await c.execute(insert(suspense).values(**row, reason=reason, record=record, at_ms=now_ms))


async def _debit(bulk: _SQLite | _PostgreSQL, entries: Entries) -> None:
    """Charge the accounts, out of what the leases hold. Accounts go first and in order: so nobody waits in a circle."""
    by_account: dict[str, int] = {}
    for (_, account_id), amount in entries.debits.items():
        by_account[account_id] = by_account.get(account_id, 0) + amount
    await bulk.debit_accounts(sorted(by_account.items()))
    rows = [(amount, entries.slot_id, epoch, account_id) for (epoch, account_id), amount in entries.debits.items()]
    if await bulk.post_to_leases(sorted(rows, key=lambda row: row[1:])) != len(rows):
        raise RefusedRecord("a charge names an account on which its slot holds no lease")


async def _end_claims(c: AsyncConnection, entries: Entries) -> None:
    claims = idempotency_claims.c

    def this(team_id: str, key_id: str, key: str, request_id: str) -> Any:
        return (
            (claims.team_id == team_id)
            & (claims.key_id == key_id)
            & (claims.idempotency_key == key)
            & (claims.request_id == request_id)
        )

    for a in entries.answers:
        mine = this(a.team_id, a.key_id, a.idempotency_key, a.request_id)
        await c.execute(update(idempotency_claims).where(mine).values(answer=a.body))
    for expires_ms, *claim in entries.done_claims:
        done = {"state": "done", "answer_expires_ms": expires_ms}
        await c.execute(update(idempotency_claims).where(this(*claim)).values(done))
    for released in entries.released_claims:
        await c.execute(delete(idempotency_claims).where(this(*released)))


async def _note_seals(c: AsyncConnection, entries: Entries) -> None:
    """From now on the month's close knows that nothing of it is left in this epoch's journal."""
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    for period, timezone, seq in entries.seals:
        row = {"slot_id": entries.slot_id, "epoch": entries.epoch, "period": period, "timezone": timezone, "seq": seq}
        await c.execute(build(seals).values(row).on_conflict_do_nothing())


def _transfer_rows(entries: Entries, now_ms: int) -> list[tuple[Any, ...]]:
    return [
        (
            f"{entries.batch_id}:{n}",
            entries.batch_id,
            now_ms,
            key.kind,
            key.source,
            key.destination,
            amount,
            key.currency,
            key.team_id,
            key.period,
        )
        for n, (key, amount) in enumerate(entries.transfers.items())
        if amount
    ]


class _SQLite:
    """`raw` is an aiosqlite.Connection, inside the transaction of the batch."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    async def insert(self, table: str, columns: Sequence[str], rows: list[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(columns))
        await self._many(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})", rows)

    async def add_up(self, table: str, keys: Sequence[str], sums: Sequence[str], rows: list[tuple[Any, ...]]) -> None:
        await self._many(_upsert(table, keys, sums, ["?"] * (len(keys) + len(sums))), rows)

    async def debit_accounts(self, rows: list[tuple[str, int]]) -> None:
        statement = "UPDATE accounts SET debits_pico = debits_pico + ?, leased_pico = leased_pico - ? WHERE id = ?"
        await self._many(statement, [(amount, amount, account_id) for account_id, amount in rows])

    async def post_to_leases(self, rows: list[tuple[int, str, int, str]]) -> int:
        return await self._many(
            "UPDATE leases SET posted_pico = posted_pico + ? WHERE slot_id = ? AND epoch = ? AND account_id = ?", rows
        )

    async def _many(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> int:
        if not rows:
            return 0
        cursor = await self._raw.executemany(statement, rows)
        changed: int = cursor.rowcount
        await cursor.close()
        return changed


class _PostgreSQL:
    """`raw` is an asyncpg.Connection, inside the transaction of the batch."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    async def insert(self, table: str, columns: Sequence[str], rows: list[tuple[Any, ...]]) -> None:
        if rows:
            await self._raw.copy_records_to_table(table, records=rows, columns=columns)

    async def add_up(self, table: str, keys: Sequence[str], sums: Sequence[str], rows: list[tuple[Any, ...]]) -> None:
        if rows:
            marks = [f"${n}" for n in range(1, len(keys) + len(sums) + 1)]
            await self._raw.executemany(_upsert(table, keys, sums, marks), rows)

    async def debit_accounts(self, rows: list[tuple[str, int]]) -> None:
        if not rows:
            return
        ids, amounts = [row[0] for row in rows], [row[1] for row in rows]
        await self._raw.execute("SELECT 1 FROM accounts WHERE id = ANY($1::text[]) ORDER BY id FOR NO KEY UPDATE", ids)
        await self._raw.execute(
            "UPDATE accounts a SET debits_pico = a.debits_pico + d.amount, leased_pico = a.leased_pico - d.amount "
            "FROM unnest($1::text[], $2::numeric[]) AS d(id, amount) WHERE a.id = d.id",
            ids,
            amounts,
        )

    async def post_to_leases(self, rows: list[tuple[int, str, int, str]]) -> int:
        if not rows:
            return 0
        amounts, slots, epoch_numbers, ids = (list(column) for column in zip(*rows, strict=True))
        status: str = await self._raw.execute(
            "UPDATE leases l SET posted_pico = l.posted_pico + d.amount "
            "FROM unnest($1::numeric[], $2::text[], $3::int[], $4::text[]) AS d(amount, slot_id, epoch, account_id) "
            "WHERE l.slot_id = d.slot_id AND l.epoch = d.epoch AND l.account_id = d.account_id",
            amounts,
            slots,
            epoch_numbers,
            ids,
        )
        return int(status.rsplit(" ", 1)[1])


def _upsert(table: str, keys: Sequence[str], sums: Sequence[str], marks: Sequence[str]) -> str:
    added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in sums)
    return (
        f"INSERT INTO {table} ({', '.join((*keys, *sums))}) VALUES ({', '.join(marks)}) "
        f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {added}"
    )
