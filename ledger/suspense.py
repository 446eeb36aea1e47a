"""Records that SQL refused and the poster set aside: an operator tries them again, or writes them off. Both are
audited.

Until then the amount of such a record stays locked in the lease that was to pay it, and `verify` fails.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import Select, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.audit import By
from ledger.entries import Entries, RefusedRecord
from ledger.errors import Conflict, NotFound
from ledger.months import late_for_teams
from ledger.posting_sql import UNBELIEVED, account_infos, write_entries
from ledger.records import Settle, decode
from ledger.schema import accounts, epochs, leases, suspense

RETRIED = "suspense:"
"""The batch ids of records that were posted by `retry` begin with this: they belong to no batch of the journal."""


class Suspended(msgspec.Struct, frozen=True):
    """One record in suspense: where it lies in the journal, and why it was refused."""

    slot_id: str
    epoch: int
    seq: int
    request_id: str | None
    reason: str
    at_ms: int
    resolved_ms: int | None


async def list_suspended(c: AsyncConnection, *, resolved: bool = False) -> list[Suspended]:
    """Oldest first; by default those that wait for a decision."""
    columns = [suspense.c[name] for name in Suspended.__struct_fields__]
    query: Select[Any] = select(*columns).where(suspense.c.reason != UNBELIEVED)
    if not resolved:
        query = query.where(suspense.c.resolved_ms.is_(None))
    rows = await c.execute(query.order_by(suspense.c.at_ms, suspense.c.slot_id, suspense.c.epoch, suspense.c.seq))
    return [Suspended(*row) for row in rows]


async def get_suspended(c: AsyncConnection, slot_id: str, epoch: int, seq: int) -> Suspended:
    """Raises NotFound."""
    s = suspense.c
    columns = [s[name] for name in Suspended.__struct_fields__]
    query = select(*columns).where(s.slot_id == slot_id, s.epoch == epoch, s.seq == seq, s.reason != UNBELIEVED)
    row = (await c.execute(query)).one_or_none()
    if row is None:
        raise _not_there(slot_id, epoch, seq)
    return Suspended(*row)


async def retry(c: AsyncConnection, by: By, slot_id: str, epoch: int, seq: int) -> None:
    """Post a record whose obstacle is gone, exactly as it stands.

    Raises NotFound; Conflict when it cannot be posted as it stands, or its epoch was declared lost. What the database
    itself refuses is raised as it comes; the caller's transaction is then of no more use.
    """
    await audit.lock(c)
    payload = await _locked(c, slot_id, epoch, seq)
    settle = _settle(payload)
    lease_epoch = epoch if settle.recovered_epoch is None else settle.recovered_epoch
    if await _state(c, slot_id, lease_epoch) == "lost":
        raise Conflict(f"epoch {lease_epoch} of slot {slot_id} was declared lost: nothing holds the amount any more")
    infos = await account_infos(c, {charge.account_id for charge in settle.charges})
    late = await late_for_teams(c, {(settle.team_id, settle.period)}, {})
    entries = Entries(slot_id, epoch, f"{RETRIED}{slot_id}:{epoch}:{seq}", infos, late)
    try:
        entries.add(seq, payload, settle)
        await write_entries(c, entries, by.at_ms)
    except RefusedRecord as error:
        raise Conflict(str(error)) from None
    await _resolve(c, by, "suspense.retry", slot_id, epoch, seq, settle.request_id)


async def write_off(c: AsyncConnection, by: By, slot_id: str, epoch: int, seq: int) -> None:
    """Give a record up: nobody is billed for it, and what was locked for it is free again. NotFound, Conflict."""
    await audit.lock(c)
    payload = await _locked(c, slot_id, epoch, seq)
    request_id = None
    try:
        settle = _settle(payload)
    except Conflict:
        pass  # it does not read: then nothing is known to be locked for it
    else:
        request_id = settle.request_id
        lease_epoch = epoch if settle.recovered_epoch is None else settle.recovered_epoch
        if await _state(c, slot_id, lease_epoch) == "closed":  # else the amounts return when the epoch closes
            for charge in settle.charges:
                await _free(c, slot_id, lease_epoch, charge.account_id, charge.amount_pico)
    await _resolve(c, by, "suspense.write_off", slot_id, epoch, seq, request_id)


async def _locked(c: AsyncConnection, slot_id: str, epoch: int, seq: int) -> bytes:
    s = suspense.c
    query = select(s.record, s.resolved_ms).where(s.slot_id == slot_id, s.epoch == epoch, s.seq == seq)
    row = (await c.execute(query.where(s.reason != UNBELIEVED).with_for_update())).one_or_none()
    if row is None:
        raise _not_there(slot_id, epoch, seq)
    if row.resolved_ms is not None:
        raise Conflict(f"frame {seq} of epoch {epoch} of slot {slot_id} is resolved already")
    return bytes(row.record)


def _not_there(slot_id: str, epoch: int, seq: int) -> NotFound:
    return NotFound(f"frame {seq} of epoch {epoch} of slot {slot_id!r} is not in suspense")


def _settle(payload: bytes) -> Settle:
    try:
        record = decode(payload)
    except msgspec.DecodeError as error:
        raise Conflict(f"the record does not read: {error}") from None
    if not isinstance(record, Settle):
        raise Conflict("only a settled request can be posted by hand")
    return record


async def _state(c: AsyncConnection, slot_id: str, epoch: int) -> str:
    query = select(epochs.c.state).where(epochs.c.slot_id == slot_id, epochs.c.epoch == epoch)
    return str((await c.execute(query)).scalar_one())


async def _free(c: AsyncConnection, slot_id: str, epoch: int, account_id: str, amount_pico: int) -> None:
    lease, a = leases.c, accounts.c
    mine = (lease.slot_id == slot_id, lease.epoch == epoch, lease.account_id == account_id)
    left = select(lease.taken_pico - lease.returned_pico - lease.posted_pico).where(*mine)
    amount = min(amount_pico, int((await c.execute(left)).scalar_one_or_none() or 0))
    if amount > 0:
        await c.execute(update(accounts).where(a.id == account_id).values(leased_pico=a.leased_pico - amount))
        await c.execute(update(leases).where(*mine).values(returned_pico=lease.returned_pico + amount))


async def _resolve(
    c: AsyncConnection, by: By, action: str, slot_id: str, epoch: int, seq: int, request_id: str | None
) -> None:
    s = suspense.c
    mine = (s.slot_id == slot_id, s.epoch == epoch, s.seq == seq)
    await c.execute(update(suspense).where(*mine).values(resolved_ms=by.at_ms))
    after = {"request_id": request_id}
    await audit.record(c, by, action, "suspense", f"{slot_id}:{epoch}:{seq}", after=after)
