"""Requests that were running when their worker died, as its journal tells of them, and what becomes of each.

With PROGRESS an orphan is settled as estimated, for what was delivered and never more; without, it is voided.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ledger.billing import Bill, bill, crash_usage, split, tokens_by_meter, waive_all
from ledger.entries import AccountInfo
from ledger.errors import JournalDamaged
from ledger.journal import INTENT, PROGRESS, SETTLE, VOID, EpochInfo, JournalReader
from ledger.journal.format import EPOCH_CLOSED
from ledger.money import Currency
from ledger.prices import PinnedPrice
from ledger.records import Charge, EpochClosed, Intent, Progress, Settle, Void, decode

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


def read_epochs(slot_id: str, infos: Sequence[tuple[EpochInfo, int]]) -> Findings:
    """Reads the epochs of a slot, oldest first; with each comes SQL's cursor in it. Raises JournalDamaged."""
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
        except JournalDamaged as damage:
            raise JournalDamaged(
                f"{damage}. Restore the file from a copy; if there is none, give up what is not posted of this epoch: "
                f"`tallygate journal declare-lost {slot_id} {info.epoch}`"
            ) from damage
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


def void_orphan(orphan: Orphan, now_ms: int) -> Void:
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
