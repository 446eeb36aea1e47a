"""What a slot's next process does with the epochs before it: finish what they left open, so that their leases can
return.

An INTENT without an end is an orphan. With PROGRESS it is settled as estimated, for what was delivered and never more;
without, it is voided. Both go into the new epoch's journal, under EPOCH_CLOSED; the poster does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

import structlog
from sqlalchemy import and_, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.accounts import FUNDING, drawing_order, read_account
from ledger.database import Database
from ledger.entries import AccountInfo
from ledger.journal import EpochInfo, JournalReader, JournalWriter, list_epochs
from ledger.lost_journals import open_leases
from ledger.money import Currency, format_amount
from ledger.orphans import Findings, Lease, read_epochs, settle_orphan, void_orphan
from ledger.prices import PinnedPrice, pinned
from ledger.records import EpochClosed
from ledger.schema import accounts, epochs, leases, slots, teams

log = structlog.get_logger(__name__)


async def begin_epoch(db: Database, slot_id: str, slot_dir: Path, now_ms: int) -> tuple[int, str]:
    """A new epoch for the slot, fenced in SQL before its journal exists. Call it with the slot's lock held.

    Epochs that are on disk and not in SQL (the database was restored from before them) are entered again, to be posted.
    """
    on_disk = list_epochs(slot_dir)
    async with db.begin() as c:
        await audit.lock(c, share=True)  # a close sees this epoch, or we see that close
        row = (await c.execute(select(slots).where(slots.c.id == slot_id).with_for_update())).one_or_none()
        epoch = max([row.epoch if row is not None else 0, *(info.epoch for info in on_disk)]) + 1
        journal_uuid = str(uuid4())
        slot = {"epoch": epoch, "journal_uuid": journal_uuid, "heartbeat_ms": now_ms, "live": 1}
        if row is None:
            await c.execute(insert(slots).values(id=slot_id, **slot))
        else:
            await c.execute(update(slots).where(slots.c.id == slot_id).values(slot))
        known = {n for (n,) in await c.execute(select(epochs.c.epoch).where(epochs.c.slot_id == slot_id))}
        for info in on_disk:
            if info.epoch not in known:
                await c.execute(insert(epochs).values(_epoch(slot_id, info.epoch, info.journal_uuid, now_ms)))
        await c.execute(insert(epochs).values(_epoch(slot_id, epoch, journal_uuid, now_ms)))
    return epoch, journal_uuid


def _epoch(slot_id: str, epoch: int, journal_uuid: str, now_ms: int) -> dict[str, object]:
    values = {"slot_id": slot_id, "epoch": epoch, "journal_uuid": journal_uuid, "opened_ms": now_ms}
    return {**values, "cursor_seq": 0, "chain_hash": "", "state": "open"}


async def recover(db: Database, journal: JournalWriter, slot_id: str, slot_dir: Path, now_ms: int) -> dict[str, str]:
    """Settles or voids every orphan of the slot's older epochs and closes those, durably, in the new journal.

    Returns what could not be recovered, "slot:epoch" → in words: epochs whose journal is not here, or ends before what
    SQL knows of it.
    """
    query = select(epochs).where(epochs.c.slot_id == slot_id, epochs.c.epoch < journal.epoch, epochs.c.state == "open")
    async with db.read() as c:
        open_epochs = {row.epoch: row for row in await c.execute(query.order_by(epochs.c.epoch))}
    here: list[tuple[EpochInfo, int]] = []
    short: dict[str, str] = {}
    for info in list_epochs(slot_dir):
        row = open_epochs.get(info.epoch)
        if row is None or row.journal_uuid != info.journal_uuid:
            continue
        end = await asyncio.to_thread(_end, info)
        if end < row.cursor_seq:
            words = f"the journal of epoch {info.epoch} of slot {slot_id} ends at {end}, SQL has {row.cursor_seq}"
            short[f"{slot_id}:{info.epoch}"] = words
            continue
        here.append((info, row.cursor_seq))
    found = await asyncio.to_thread(read_epochs, here)
    async with db.begin() as c:
        lost = await _missing(c, slot_id, open_epochs.keys() - {info.epoch for info, _ in here})
        left = await _left_on_leases(c, slot_id, found)
        await _finish(c, journal, found, left, now_ms)
    for epoch in found.left_open:
        journal.append(EpochClosed(epoch))
    await journal.flush()
    lost |= short
    for words in lost.values():
        log.error("leases stay locked", reason=words)
    return lost


async def _finish(
    c: AsyncConnection, journal: JournalWriter, found: Findings, left: dict[Lease, int], now_ms: int
) -> None:
    account_ids = {charge.account_id for orphan in found.orphans.values() for charge in orphan.intent.held}
    team_ids = {orphan.intent.team_id for orphan in found.orphans.values()}
    paying = and_(accounts.c.team_id.in_(team_ids), accounts.c.kind.in_(FUNDING))
    rows = [
        read_account(row) for row in await c.execute(select(accounts).where(accounts.c.id.in_(account_ids) | paying))
    ]
    infos = {row.id: AccountInfo(row.kind, row.currency) for row in rows}
    funding: dict[str | None, list[str]] = {}
    for row in sorted((row for row in rows if row.kind in FUNDING), key=drawing_order):
        funding.setdefault(row.team_id, []).append(row.id)
    prices: dict[tuple[str, str, str, str | None], PinnedPrice] = {}
    currencies: dict[str, Currency] = {}
    for orphan in found.orphans.values():
        intent = orphan.intent
        if orphan.progress is None:
            journal.append(void_orphan(orphan, now_ms))
            continue
        key = (intent.price_version, intent.model, intent.team_id, intent.price_scope)
        if key not in prices:
            prices[key] = await pinned(c, *key)
        currency = intent.billing_currency or currencies.get(intent.team_id)
        if currency is None:
            query = select(teams.c.billing_currency).where(teams.c.id == intent.team_id)
            currency = currencies[intent.team_id] = (await c.execute(query)).scalar_one()
        payers = funding.get(intent.team_id, [])
        settle = settle_orphan(orphan, prices[key], currency, infos, payers, left, now_ms)
        for charge in settle.charges:
            left[(orphan.epoch, charge.account_id)] -= charge.amount_pico
        journal.append(settle)
    if found.orphans:
        log.warning("orphans ended", slot=journal.path.parent.name, requests=len(found.orphans))


async def _left_on_leases(c: AsyncConnection, slot_id: str, found: Findings) -> dict[Lease, int]:
    """What each lease still covers once all that is journalled is posted.

    Less than nothing happens only when the database was restored from before the leases were taken: they are then taken
    again, as far as the accounts still have it. What they have not goes to suspense when it is posted.
    """
    outstanding = leases.c.taken_pico - leases.c.returned_pico - leases.c.posted_pico
    query = select(leases.c.epoch, leases.c.account_id, outstanding.label("outstanding")).where(
        leases.c.slot_id == slot_id, leases.c.epoch.in_({*found.left_open, *(e for e, _ in found.unposted)})
    )
    left = {(row.epoch, row.account_id): int(row.outstanding) for row in await c.execute(query)}
    for lease, charged in sorted(found.unposted.items()):
        left[lease] = left.get(lease, 0) - charged
        if left[lease] < 0:
            left[lease] += await _lease_again(c, slot_id, lease, -left[lease])
    return {lease: max(0, amount) for lease, amount in left.items()}


async def _lease_again(c: AsyncConnection, slot_id: str, lease: Lease, missing: int) -> int:
    epoch, account_id = lease
    a = accounts.c
    row = (
        await c.execute(
            select(a.credits_pico, a.debits_pico, a.leased_pico).where(a.id == account_id).with_for_update()
        )
    ).one_or_none()
    amount = 0 if row is None else max(0, min(missing, int(row.credits_pico - row.debits_pico - row.leased_pico)))
    log.error("the database is older than the journal", account=account_id, missing=missing, leased_again=amount)
    if not amount:
        return 0
    await c.execute(update(accounts).where(a.id == account_id).values(leased_pico=a.leased_pico + amount))
    mine = and_(leases.c.slot_id == slot_id, leases.c.epoch == epoch, leases.c.account_id == account_id)
    done = await c.execute(update(leases).where(mine).values(taken_pico=leases.c.taken_pico + amount))
    if not done.rowcount:
        row_values = {"slot_id": slot_id, "epoch": epoch, "account_id": account_id, "taken_pico": amount}
        await c.execute(insert(leases).values(row_values))
    return amount


async def _missing(c: AsyncConnection, slot_id: str, numbers: Iterable[int]) -> dict[str, str]:
    """Epochs that SQL has open and whose journal is not usable here. One that never leased anything is just closed."""
    found = {}
    for epoch in sorted(numbers):
        amounts = await open_leases(c, slot_id, epoch)
        if not amounts:
            mine = (epochs.c.slot_id == slot_id, epochs.c.epoch == epoch)
            await c.execute(update(epochs).where(*mine).values(state="closed"))
            continue
        worth = ", ".join(f"{format_amount(amount)} {currency} of {name}" for name, currency, amount in amounts)
        words = f"the journal of epoch {epoch} of slot {slot_id} is lost; locked until declared so: {worth}"
        found[f"{slot_id}:{epoch}"] = words
    return found


def _end(info: EpochInfo) -> int:
    """The last frame of an epoch that has been closed."""
    reader = JournalReader(info.path)
    try:
        mark = reader.mark()
        return mark.seq if mark is not None else 0
    finally:
        reader.close()
