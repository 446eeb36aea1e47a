"""What a slot's next process does with the epochs before it: finish what they left open, so that their leases can
return.

An INTENT without an end is an orphan. With PROGRESS it is settled as estimated, for what was delivered and never more;
without, it is voided. Both go into the new epoch's journal, under EPOCH_CLOSED; the poster does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from uuid import uuid4

import msgspec
import structlog
from sqlalchemy import and_, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.accounts import FUNDING, drawing_order, read_account
from ledger.audit import By
from ledger.billing import Bill, bill, crash_usage, split, tokens_by_meter, waive_all
from ledger.database import Database
from ledger.entries import AccountInfo
from ledger.errors import Conflict, NotFound
from ledger.journal import INTENT, PROGRESS, SETTLE, VOID, EpochInfo, JournalReader, JournalWriter, list_epochs
from ledger.journal.format import EPOCH_CLOSED
from ledger.leases import HEARTBEAT_FRESH_MS
from ledger.money import Currency, format_amount
from ledger.prices import PinnedPrice, pinned
from ledger.records import Charge, EpochClosed, Intent, Progress, Settle, Void, decode
from ledger.schema import accounts, epochs, leases, slots, teams

log = structlog.get_logger(__name__)

Lease = tuple[int, str]
"""(epoch, account)."""


class Orphan(msgspec.Struct):
    """A request that was running when its worker died."""

    epoch: int
    intent: Intent
    progress: Progress | None = None


class Findings(msgspec.Struct):
    """What the older journals of a slot say."""

    orphans: dict[str, Orphan]
    unposted: dict[Lease, int]
    """Charges that are not in SQL yet, by the lease that pays them."""
    left_open: list[int]
    """Epochs that need an EPOCH_CLOSED."""


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


async def recover(db: Database, journal: JournalWriter, slot_id: str, slot_dir: Path, now_ms: int) -> list[str]:
    """Settles or voids every orphan of the slot's older epochs and closes those, durably, in the new journal.

    Returns what could not be recovered, in words: epochs whose journal is not here, or ends before what SQL knows of
    it.
    """
    query = select(epochs).where(epochs.c.slot_id == slot_id, epochs.c.epoch < journal.epoch, epochs.c.state == "open")
    async with db.read() as c:
        open_epochs = {row.epoch: row for row in await c.execute(query.order_by(epochs.c.epoch))}
    here: list[tuple[EpochInfo, int]] = []
    lost: list[str] = []
    for info in list_epochs(slot_dir):
        row = open_epochs.get(info.epoch)
        if row is None or row.journal_uuid != info.journal_uuid:
            continue
        end = await asyncio.to_thread(_end, info)
        if end < row.cursor_seq:
            lost.append(f"the journal of epoch {info.epoch} of slot {slot_id} ends at {end}, SQL has {row.cursor_seq}")
            continue
        here.append((info, row.cursor_seq))
    found = await asyncio.to_thread(read_epochs, here)
    async with db.begin() as c:
        lost += await _missing(c, slot_id, open_epochs.keys() - {info.epoch for info, _ in here})
        left = await _left_on_leases(c, slot_id, found)
        await _finish(c, journal, found, left, now_ms)
    for epoch in found.left_open:
        journal.append(EpochClosed(epoch))
    await journal.flush()
    for words in lost:
        log.error("leases stay locked", reason=words)
    return lost


def read_epochs(infos: Sequence[tuple[EpochInfo, int]]) -> Findings:
    """Reads the epochs, oldest first; with each comes SQL's cursor in it. Raises JournalDamaged."""
    found = Findings({}, {}, [])
    for info, cursor in infos:
        reader = JournalReader(info.path)
        try:
            closed_itself = False
            for frame in reader.frames(reader.start().seq, durable_only=False):
                if frame.type in (INTENT, PROGRESS, SETTLE, VOID):
                    _note(found, info.epoch, decode(frame.payload), frame.seq > cursor)
                elif frame.type == EPOCH_CLOSED:
                    closed_itself = frame.record == EpochClosed(info.epoch)
            if not closed_itself:
                found.left_open.append(info.epoch)
        finally:
            reader.close()
    return found


def _note(found: Findings, epoch: int, record: object, unposted: bool) -> None:
    match record:
        case Intent():
            found.orphans[record.request_id] = Orphan(epoch, record)
        case Progress():
            if record.request_id in found.orphans:
                found.orphans[record.request_id].progress = record
        case Void():
            found.orphans.pop(record.request_id, None)
        case Settle():
            found.orphans.pop(record.request_id, None)
            if unposted:
                lease_epoch = epoch if record.recovered_epoch is None else record.recovered_epoch
                for charge in record.charges:
                    lease = (lease_epoch, charge.account_id)
                    found.unposted[lease] = found.unposted.get(lease, 0) + charge.amount_pico


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
            journal.append(_void(orphan, now_ms))
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


def _void(orphan: Orphan, now_ms: int) -> Void:
    intent = orphan.intent
    return Void(
        intent.request_id,
        now_ms,
        "crash",
        orphan.epoch,
        intent.idempotency_key,
        intent.team_id,
        intent.key_id,
    )


def settle_orphan(
    orphan: Orphan,
    price: PinnedPrice,
    currency: Currency,
    infos: dict[str, AccountInfo],
    payers: Sequence[str],
    left: dict[Lease, int],
    now_ms: int,
) -> Settle:
    """The estimated settlement of a request that had delivered something: at most that, and at most what was leased.

    What the INTENT held pays first; then `payers`, the team's other funding accounts, from which a stream was extended.

    With an Idempotency-Key all of it is waived: the client will ask again, and pays then.
    """
    intent, progress = orphan.intent, orphan.progress
    assert progress is not None
    usage = crash_usage(progress)
    tokens = tokens_by_meter(usage)
    held = [charge.account_id for charge in intent.held if _funds(charge, infos)]
    order = [*held, *(account_id for account_id in payers if account_id not in held)]
    funding = [(account_id, left.get((orphan.epoch, account_id), 0)) for account_id in order]
    budgets = [c.account_id for c in intent.held if c.account_id in infos and not _funds(c, infos)]
    if intent.idempotency_key is not None:
        paid, reason = waive_all(tokens, price.usd, price.cny), "crash"
    else:
        paid, reason = _bill_within(tokens, price, currency, orphan.epoch, funding, budgets, infos, left), "overrun"
    amount = paid.usd_pico if currency == "USD" else paid.cny_pico
    charges = [Charge(account_id, part) for account_id, part in split(amount, funding)]
    for account_id in budgets:
        part = paid.usd_pico if infos[account_id].currency == "USD" else paid.cny_pico
        if part:
            charges.append(Charge(account_id, part))
    used = usage.prompt_tokens + usage.generated_tokens
    usage = msgspec.structs.replace(
        usage, billed_tokens=paid.billed_tokens, waiver_reason=reason if paid.billed_tokens < used else None
    )
    return Settle(
        request_id=intent.request_id,
        admitted_ms=intent.at_ms,
        settled_ms=now_ms,
        period=intent.period,
        team_id=intent.team_id,
        key_id=intent.key_id,
        end_user=intent.end_user,
        model=intent.model,
        deployment=intent.deployment or "unknown",
        draft_model=None,
        status="crashed",
        usage=usage,
        price_version=intent.price_version,
        cost_usd_pico=paid.usd_pico,
        cost_cny_pico=paid.cny_pico,
        provider_cost_usd_pico=0,
        charges=charges,
        loss_pico=paid.waived_usd_pico if currency == "USD" else paid.waived_cny_pico,
        recovered_epoch=orphan.epoch,
        idempotency_key=intent.idempotency_key,
        billing_currency=currency,
        price_scope=intent.price_scope,
    )


def _bill_within(
    tokens: tuple[int, int, int, int, int],
    price: PinnedPrice,
    currency: Currency,
    epoch: int,
    funding: Iterable[tuple[str, int]],
    budgets: Iterable[str],
    infos: dict[str, AccountInfo],
    left: dict[Lease, int],
) -> Bill:
    limits: dict[Currency, list[int]] = {"USD": [], "CNY": []}
    limits[currency].append(sum(there for _, there in funding))
    for account_id in budgets:
        limits[infos[account_id].currency].append(left.get((epoch, account_id), 0))
    return bill(tokens, price.usd, price.cny, min(limits["USD"], default=None), min(limits["CNY"], default=None))


def _funds(charge: Charge, infos: dict[str, AccountInfo]) -> bool:
    return charge.account_id in infos and infos[charge.account_id].kind != "budget"


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


async def _missing(c: AsyncConnection, slot_id: str, numbers: Iterable[int]) -> list[str]:
    """Epochs that SQL has open and whose journal is not usable here. One that never leased anything is just closed."""
    words = []
    for epoch in sorted(numbers):
        amounts = await open_leases(c, slot_id, epoch)
        if not amounts:
            mine = (epochs.c.slot_id == slot_id, epochs.c.epoch == epoch)
            await c.execute(update(epochs).where(*mine).values(state="closed"))
            continue
        worth = ", ".join(f"{format_amount(amount)} {currency} of {name}" for name, currency, amount in amounts)
        words.append(f"the journal of epoch {epoch} of slot {slot_id} is lost; locked until declared so: {worth}")
    return words


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
    subject = f"{slot_id}:{epoch}"
    await audit.record(c, by, "epoch.declare_lost", "epoch", subject, before={"leased": freed}, after={"leased": []})
    return freed


def _end(info: EpochInfo) -> int:
    """The last frame of an epoch that has been closed."""
    reader = JournalReader(info.path)
    try:
        mark = reader.mark()
        return mark.seq if mark is not None else 0
    finally:
        reader.close()
