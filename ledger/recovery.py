"""What a slot's next process does with the epochs before it: finish what they left open, so that their leases can
return.

An INTENT without an end is an orphan. With PROGRESS it is settled as estimated, for what was delivered and never more;
without, it is voided. Both go into the new epoch's journal, under EPOCH_CLOSED; the poster does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
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
from ledger.posting_sql import lease_again
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


class Behind(NamedTuple):
    """What the older epochs of a slot left behind, as SQL and their journals had it at one moment. It stays true while
    a poster goes on: what it posts leaves the leases and what is unposted alike."""

    found: Findings
    left: dict[Lease, int]
    """What each lease still covers once all that is journalled is posted. Less than nothing: the database was restored
    from before it was taken."""
    missing: frozenset[int]
    """Epochs that are open in SQL and have no journal here that is usable."""
    short: dict[str, str]
    """Those whose journal ends before what SQL knows of it: "slot:epoch" → in words."""


async def look_behind(db: Database, slot_id: str, slot_dir: Path) -> Behind:
    """Reads the slot's older epochs, which are ended on disk. Call it with the slot's lock held, before SQL issues
    another epoch: each try on what does not read would leave one more there. Raises JournalDamaged."""
    outstanding = leases.c.taken_pico - leases.c.returned_pico - leases.c.posted_pico
    query = select(leases.c.epoch, leases.c.account_id, outstanding.label("pico")).where(leases.c.slot_id == slot_id)
    async with db.snapshot() as c:
        known = {row.epoch: row for row in await c.execute(select(epochs).where(epochs.c.slot_id == slot_id))}
        still_open = {epoch for epoch, row in known.items() if row.state == "open"}
        held = await c.execute(query.where(leases.c.epoch.in_(still_open)))
        left = {(row.epoch, row.account_id): int(row.pico) for row in held}
    here: list[tuple[EpochInfo, int]] = []
    short: dict[str, str] = {}
    for info in list_epochs(slot_dir):
        row = known.get(info.epoch)
        if row is not None and (row.state != "open" or row.journal_uuid != info.journal_uuid):
            continue
        cursor = 0 if row is None else row.cursor_seq  # SQL does not know it yet: the database is an older one
        end = await asyncio.to_thread(_end, info)
        if end < cursor:
            words = f"the journal of epoch {info.epoch} of slot {slot_id} ends at {end}, SQL has {cursor}"
            short[f"{slot_id}:{info.epoch}"] = words
            continue
        here.append((info, cursor))
    found = await asyncio.to_thread(read_epochs, slot_id, here)
    for lease, charged in found.unposted.items():
        left[lease] = left.get(lease, 0) - charged
    return Behind(found, left, frozenset(still_open - {info.epoch for info, _ in here}), short)


async def recover(db: Database, journal: JournalWriter, slot_id: str, behind: Behind, now_ms: int) -> dict[str, str]:
    """Settles or voids every orphan of the slot's older epochs and closes those, durably, in the new journal.

    Returns what could not be recovered, "slot:epoch" → in words: epochs whose journal is not here, or ends before what
    SQL knows of it.
    """
    found = behind.found
    async with db.begin() as c:
        lost = await _missing(c, slot_id, behind.missing)
        left = await _covered_again(c, slot_id, behind.left)
        await _finish(c, journal, found, left, now_ms)
    for epoch in found.left_open:
        journal.append(EpochClosed(epoch))
    await journal.flush()
    lost |= behind.short
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


async def _covered_again(c: AsyncConnection, slot_id: str, left: dict[Lease, int]) -> dict[Lease, int]:
    """What each lease still covers. Those that are short are taken again, as far as the accounts still have it; what
    they have not goes to suspense when it is posted. An epoch that a poster has closed meanwhile needs nothing."""
    short = {epoch for (epoch, _), amount in left.items() if amount < 0}
    mine = (epochs.c.slot_id == slot_id, epochs.c.epoch.in_(short), epochs.c.state == "open")
    still_open = set((await c.execute(select(epochs.c.epoch).where(*mine).with_for_update())).scalars())
    covered = {}
    for (epoch, account_id), amount in sorted(left.items(), key=lambda item: (item[0][1], item[0][0])):
        if amount < 0 and epoch in still_open:
            amount += await lease_again(c, slot_id, epoch, account_id, -amount)
        covered[epoch, account_id] = max(0, amount)
    return covered


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
