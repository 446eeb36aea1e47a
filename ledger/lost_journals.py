"""Epochs that are not closed, what their leases lock, and an operator's word that a journal will never come back."""

from __future__ import annotations

from sqlalchemy import and_, delete, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.audit import By
from ledger.errors import Conflict, NotFound
from ledger.leases import HEARTBEAT_FRESH_MS
from ledger.schema import accounts, epochs, idempotency_claims, leases, slots


async def list_open_epochs(c: AsyncConnection) -> list[tuple[str, int, bool]]:
    """(slot, epoch, whether a worker that says it lives writes it) of the epochs that are not closed."""
    live = and_(slots.c.id == epochs.c.slot_id, slots.c.epoch == epochs.c.epoch, slots.c.live == 1)
    query = (
        select(epochs.c.slot_id, epochs.c.epoch, slots.c.id.is_not(None).label("live"))
        .outerjoin(slots, live)
        .where(epochs.c.state == "open")
        .order_by(epochs.c.slot_id, epochs.c.epoch)
    )
    return [(row.slot_id, row.epoch, bool(row.live)) for row in await c.execute(query)]


async def open_leases(c: AsyncConnection, slot_id: str, epoch: int) -> list[tuple[str, str, int]]:
    """(account, currency, pico) that an epoch still has leased: the most that its loss can cost."""
    outstanding = leases.c.taken_pico - leases.c.returned_pico - leases.c.posted_pico
    query = (
        select(leases.c.account_id, accounts.c.currency, outstanding.label("pico"))
        .join(accounts, accounts.c.id == leases.c.account_id)
        .where(leases.c.slot_id == slot_id, leases.c.epoch == epoch, outstanding > 0)
        .order_by(leases.c.account_id)
    )
    return [(row.account_id, row.currency, int(row.pico)) for row in await c.execute(query)]


async def declare_lost(c: AsyncConnection, by: By, slot_id: str, epoch: int) -> list[tuple[str, str, int]]:
    """An operator's word that an epoch's journal will never come back: its leases return, unposted usage is given up.

    Returns what was freed. A process that still runs in that epoch all the same is fenced: it can lease nothing more.
    Raises NotFound; Conflict for an epoch that is closed, or whose process has been heard of within 10 s.
    """
    await audit.lock(c)
    mine = (epochs.c.slot_id == slot_id, epochs.c.epoch == epoch)
    row = (await c.execute(select(epochs).where(*mine).with_for_update())).one_or_none()
    if row is None:
        raise NotFound(f"no epoch {epoch} of slot {slot_id!r}")
    running = (slots.c.id == slot_id, slots.c.epoch == epoch, slots.c.live == 1)
    heard_ms = (await c.execute(select(slots.c.heartbeat_ms).where(*running).with_for_update())).scalar_one_or_none()
    in_use = heard_ms is not None and heard_ms >= by.at_ms - HEARTBEAT_FRESH_MS
    if row.state != "open" or in_use:
        raise Conflict(f"epoch {epoch} of slot {slot_id} is {'in use' if in_use else row.state}: it cannot be lost")
    await c.execute(update(slots).where(*running).values(live=0, journal_uuid=f"lost {row.journal_uuid}"))
    freed = await open_leases(c, slot_id, epoch)
    for account_id, _, amount in freed:
        a, lease = accounts.c, leases.c
        await c.execute(update(accounts).where(a.id == account_id).values(leased_pico=a.leased_pico - amount))
        await c.execute(
            update(leases)
            .where(lease.slot_id == slot_id, lease.epoch == epoch, lease.account_id == account_id)
            .values(returned_pico=lease.returned_pico + amount)
        )
    await c.execute(update(epochs).where(*mine).values(state="lost"))
    claims = idempotency_claims.c  # of requests whose end nobody will ever tell: who asks again is answered
    ended = (claims.slot_id == slot_id, claims.epoch == epoch, claims.state == "running")
    await c.execute(delete(idempotency_claims).where(*ended))
    subject = f"{slot_id}:{epoch}"
    await audit.record(c, by, "epoch.declare_lost", "epoch", subject, before={"leased": freed}, after={"leased": []})
    return freed
