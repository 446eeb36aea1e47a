"""Corrections: what the proof finds wrong and a new entry can put right. Nothing that was posted is ever rewritten.

The journal and the records in the usage rows are the evidence; transfers, rollups and balances follow from them. A
correction is proposed here, approved by an administrator, posted once and audited. What no new entry can mend (a usage
row that was altered, or that no journal knows) is not proposed: restore a backup; the journal brings it up to date.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec
from sqlalchemy import and_, case, exists, false, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.audit import By
from ledger.database import Database
from ledger.entries import (
    REVERSAL,
    ROLLUP_KEYS,
    ROLLUP_SUMS,
    USAGE_COLUMNS,
    AccountInfo,
    TransferKey,
    add_rollup,
    transfers_of,
    usage_row,
)
from ledger.errors import Conflict, NotFound
from ledger.money import format_amount
from ledger.movements import CORRECTION
from ledger.periods import DEFAULT_TIMEZONE, period_of
from ledger.posting_sql import insert_rows
from ledger.records import Settle, decode
from ledger.schema import accounts, batches, periods, rollups, teams, transfers
from ledger.schema import audit as audit_table
from ledger.verify_journal import LostRow, lost_rows
from ledger.verify_rows import PAGE, moved_out, outstanding, read_usage
from ledger.verify_sums import CORRECTED, reverse, rollup_differences, transfer_differences, words_of

ACTION = "correction.approve"
BATCH = "correction:"
"""The batch ids of what corrections post begin with this: they belong to no batch of the journal."""
UNEXPLAINED = "unexplained:balance"
"""The other side of what a balance was off by: it always comes to nothing."""
MOST = 1_000
"""So many are proposed at once."""
_HOW_TO_COVER = {
    "prepaid": "top up the team by that first, or ",
    "credit_line": "raise the team's credit limit first, or ",
    "budget": "raise the spend quota first, or ",
    "grant": "",
}
Kind = Literal["request", "transfer", "rollup", "balance"]
Known = Counter[bytes]
"""How often each was posted before."""
Booked = tuple[str, str, str, int]
"""(kind, source, destination, pico) of a transfer."""


class Correction(msgspec.Struct, frozen=True):
    """A new entry that would put one difference right. `id` follows from all of the rest.

    request: a usage row that the journal knows and the ledger lost · transfer: what was moved too little or too much ·
    rollup: what an hourly sum lacks · balance: what a balance is off from its entries, with the transfers that say so.
    """

    id: str
    kind: Kind
    words: str
    entry: dict[str, Any]


async def propose(db: Database, journal_dir: Path | None) -> list[Correction]:
    """What could be posted now; empty when nothing is wrong, or nothing that a new entry can mend.

    One kind at a time, evidence first: sums can only be judged when the rows are there, balances when the sums are
    right. So look again after approving. Raises Conflict for a lost request when nothing says which month billed it.
    """
    async with db.snapshot() as c:
        known = await _posted_before(c)
        if journal_dir is not None:
            found = await _requests(c, await lost_rows(c, journal_dir, MOST), known)
            if found:
                return found
        sums = await read_usage(c, None)
        if sums.difference is not None:
            return []
        _, wrong = await transfer_differences(c, sums, None)
        found = [_transfer(key, should - moved, known) for key, (moved, should) in list(wrong.items())[:MOST]]
        missing = await rollup_differences(c, None, MOST)
        found += [_rollup(key, delta, known) for key, delta in missing.items()]
        return found or await _balances(c, known)


async def approve(db: Database, journal_dir: Path | None, by: By, correction_id: str) -> Correction:
    """Post one that is proposed. Again: the same answer, and nothing is posted twice. Raises NotFound, Conflict."""
    async with db.read() as c:
        done = await _approved(c, correction_id)
    if done is not None:
        return done
    found = next((item for item in await propose(db, journal_dir) if item.id == correction_id), None)
    if found is None:
        raise NotFound(f"no correction {correction_id!r} is proposed: see `tallygate verify --repair`")
    async with db.begin() as c:
        await audit.lock(c)
        done = await _approved(c, correction_id)
        if done is None:
            await _post(c, found, by.at_ms)
            await audit.record(c, by, ACTION, "correction", found.id, after=found)
    return found


async def check_corrections(c: AsyncConnection) -> tuple[int, str | None]:
    """Every transfer and rollup that corrects was approved by somebody, as it stands; no balance was corrected without
    transfers that say so.

    A row that came back bears no mark: other checks hold it against the journal.
    """
    approved = {correction.id: correction async for correction in _acts(c)}
    booked = {act.id: Counter(_booked(act)) for act in approved.values()}
    t = transfers.c
    query = select(t.batch_id, t.kind, t.source, t.destination, t.amount_pico).where(t.batch_id.startswith(BATCH))
    for row in await c.execute(query):
        act_id = row.batch_id.removeprefix(BATCH)
        posted = (row.kind, row.source, row.destination, int(row.amount_pico))
        if not booked.get(act_id, Counter())[posted]:
            return len(approved), f"{row.kind} of {row.amount_pico} pico corrects {row.source}, and nobody approved it"
        booked[act_id][posted] -= 1
    for balance in approved.values():
        if balance.kind == "balance" and booked[balance.id].total():
            return len(approved), f"correction {balance.id} of {balance.entry['account']} is not booked any more"
    r = rollups.c
    columns = [r.hour_ms, r.slot_id, *(r[name] for name in ROLLUP_SUMS)]
    for hour_ms, slot_id, *sums in await c.execute(select(*columns).where(r.slot_id.contains(CORRECTED))):
        act = approved.get(slot_id.rpartition(CORRECTED)[2])
        if act is None or [int(value) for value in sums] != act.entry.get("sums"):
            return len(approved), f"a rollup of hour {hour_ms} is a correction, and nobody approved it"
    return len(approved), None


# -- what is proposed --------------------------------------------------------------------------------------------------


def _new(kind: Kind, words: str, entry: dict[str, Any], known: Known) -> Correction:
    """The same thing that goes wrong again is another correction."""
    packed = _packed(kind, entry)
    digest = sha256(packed + b"%d" % known[packed]).hexdigest()
    return Correction(f"fix_{digest[:20]}", kind, words, entry)


async def _requests(c: AsyncConnection, lost: list[LostRow], known: Known) -> list[Correction]:
    """Those whose month is certain. Raises Conflict when there are only others."""
    found, uncertain = [], None
    for row in lost:
        try:
            billed_in = await _billed_in(c, row)
        except Conflict as why:
            uncertain = uncertain or why
        else:
            found.append(_request(row, billed_in, known))
    if uncertain is not None and not found:
        raise uncertain
    return found


def _request(row: LostRow, billed_in: str | None, known: Known) -> Correction:
    words = f"request {row.request_id} is in the journal (frame {row.seq} of epoch {row.epoch}) and not in the ledger"
    if billed_in is not None:
        words += f"; {billed_in} bills it"
    return _new("request", words, {**msgspec.to_builtins(row), "billed_in": billed_in}, known)


async def _billed_in(c: AsyncConnection, lost: LostRow) -> str | None:
    """The later month that billed the request; None: its own. Raises Conflict when nothing says which.

    In one batch all of a team's usage of a month is billed by the same month, its own unless that was closed; then by
    the next one that was open, and no transfer of the batch is of an earlier month. So the batch's transfers say it.
    """
    settle = decode(lost.record)
    assert isinstance(settle, Settle)
    closed = exists().where(periods.c.timezone == teams.c.timezone, periods.c.period >= settle.period)
    query = select(teams.c.id).where(teams.c.id == settle.team_id, closed.where(periods.c.state == "closed"))
    if (await c.execute(query)).first() is None:
        return None
    t = transfers.c
    own = or_(*(and_(t.kind == key.kind, t.source == key.source) for key in await _moved_by(c, settle)), false())
    query = select(t.period, func.max(case((own, 1), else_=0)).label("own")).group_by(t.period)
    query = query.where(t.batch_id == await _batch_of(c, lost), t.team_id == settle.team_id)
    rows = (await c.execute(query)).all()
    if any(row.period == settle.period for row in rows):
        return None
    later: list[str] = sorted(row.period for row in rows if row.own and row.period > settle.period)
    if later:
        return later[0]
    summed_in = await _summed_in(c, settle, lost.slot_id)  # nothing was moved for it, or that is lost, too
    if len(summed_in) == 1:
        return summed_in.pop() or None
    raise Conflict(
        f"request {lost.request_id} is in the journal (frame {lost.seq} of epoch {lost.epoch}) and not in the ledger; "
        f"{settle.period} is closed, and neither transfers nor rollups say which month billed it: restore a backup"
    )


async def _summed_in(c: AsyncConnection, settle: Settle, slot_id: str) -> set[str]:
    """The months ("": its own) of the rollups that the request may have gone into."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    add_rollup(sums, settle, slot_id)
    (key,) = sums
    here = [rollups.c[name] == value for name, value in zip(ROLLUP_KEYS, key, strict=True) if name != "billed_in"]
    return set((await c.execute(select(rollups.c.billed_in).where(*here))).scalars())


async def _moved_by(c: AsyncConnection, settle: Settle) -> list[TransferKey]:
    a = accounts.c
    query = select(a.id, a.kind, a.currency).where(a.id.in_([charge.account_id for charge in settle.charges]))
    infos = {row.id: AccountInfo(row.kind, row.currency) for row in await c.execute(query)}
    return [key for key, amount in transfers_of(settle, infos) if amount]


async def _batch_of(c: AsyncConnection, lost: LostRow) -> str:
    b = batches.c
    query = select(b.id).where(b.slot_id == lost.slot_id, b.epoch == lost.epoch)
    query = query.where(b.first_seq <= lost.seq, b.last_seq >= lost.seq)
    batch_id: str = (await c.execute(query)).scalar_one()
    return batch_id


def _transfer(key: TransferKey, missing_pico: int, known: Known) -> Correction:
    posted = key if missing_pico > 0 else reverse(key)
    entry = {**posted._asdict(), "amount_pico": abs(missing_pico)}
    words = f"{words_of(key)}: {abs(missing_pico)} pico too {'little' if missing_pico > 0 else 'much'} were moved"
    return _new("transfer", words, entry, known)


def _rollup(key: Sequence[Any], delta: tuple[int, ...], known: Known) -> Correction:
    off = {name: value for name, value in zip(ROLLUP_SUMS, delta, strict=True) if value}
    named = dict(zip(ROLLUP_KEYS, key, strict=True))
    words = f"the rollup of {named['model']} in hour {named['hour_ms']} lacks {off}"
    return _new("rollup", words, {"key": list(key), "sums": list(delta)}, known)


async def _balances(c: AsyncConnection, known: Known) -> list[Correction]:
    found: list[Correction] = []
    last = ""
    while True:
        query = select(accounts).where(accounts.c.id > last).order_by(accounts.c.id).limit(PAGE)
        page = (await c.execute(query)).all()
        if not page:
            return found
        ids = [row.id for row in page]
        moved, held = await moved_out(c, ids), await outstanding(c, ids)
        for row in page:
            off = {"debits": moved[row.id] - int(row.debits_pico), "leased": held.get(row.id, 0) - int(row.leased_pico)}
            if any(off.values()):
                words = f"the balance of account {row.id} is off by {off} pico from its entries"
                entry = {"account": row.id, **off, "transfers": [list(move) for move in _moves(row, off["debits"])]}
                found.append(_new("balance", words, entry, known))
        last = ids[-1]


def _moves(account: Any, off_pico: int) -> list[Booked]:
    """Double entry of what a balance's debits are off by: first what the row says and nothing explains, then what takes
    that back. What is only leased is no money that moved."""
    if not off_pico:
        return []
    kind = f"budget_{CORRECTION}" if account.kind == "budget" else CORRECTION
    out = (kind, account.id, UNEXPLAINED, abs(off_pico))
    back = (f"{kind}{REVERSAL}", UNEXPLAINED, account.id, abs(off_pico))
    return [back, out] if off_pico > 0 else [out, back]


# -- what is posted ----------------------------------------------------------------------------------------------------


async def _post(c: AsyncConnection, correction: Correction, now_ms: int) -> None:
    entry, batch_id = correction.entry, f"{BATCH}{correction.id}"
    match correction.kind:
        case "request":
            await _post_request(c, msgspec.convert(entry, LostRow), entry["billed_in"])
        case "transfer":
            row = {**entry, "id": f"{batch_id}:0", "batch_id": batch_id, "at_ms": now_ms}
            await c.execute(insert(transfers).values(row))
        case "rollup":
            key = dict(zip(ROLLUP_KEYS, entry["key"], strict=True))
            key["slot_id"] = f"{key['slot_id']}{CORRECTED}{correction.id}"
            await c.execute(insert(rollups).values(key | dict(zip(ROLLUP_SUMS, entry["sums"], strict=True))))
        case "balance":
            await _post_balance(c, correction, now_ms)


async def _post_balance(c: AsyncConnection, correction: Correction, now_ms: int) -> None:
    """Raises Conflict while the account would hold less than what left it."""
    a, entry = accounts.c, correction.entry
    row = (await c.execute(select(accounts).where(a.id == entry["account"]).with_for_update())).one()
    debits, leased = int(row.debits_pico) + entry["debits"], int(row.leased_pico) + entry["leased"]
    missing = debits + leased - int(row.credits_pico)
    if missing > 0:
        raise Conflict(
            f"account {row.id} was charged {format_amount(missing)} {row.currency} more than it ever held, so its "
            f"balance cannot be put right yet: {_HOW_TO_COVER[row.kind]}restore a backup"
        )
    await c.execute(update(accounts).where(a.id == row.id).values(debits_pico=debits, leased_pico=leased))
    query = select(teams.c.timezone).where(teams.c.id == row.team_id)
    timezone = (await c.execute(query)).scalar_one_or_none() or DEFAULT_TIMEZONE  # a global budget has no team
    for number, (kind, source, destination, amount_pico) in enumerate(_booked(correction)):
        transfer = {
            "id": f"{BATCH}{correction.id}:{number}",
            "batch_id": f"{BATCH}{correction.id}",
            "at_ms": now_ms,
            "kind": kind,
            "source": source,
            "destination": destination,
            "amount_pico": amount_pico,
            "currency": row.currency,
            "team_id": row.team_id,
            "period": period_of(now_ms, timezone),
            "reference": correction.id,
        }
        await c.execute(insert(transfers).values(transfer))


def _booked(correction: Correction) -> list[Booked]:
    """The transfers that it posts; of a balance that an earlier version corrected there are none."""
    entry = correction.entry
    if correction.kind == "transfer":
        return [(entry["kind"], entry["source"], entry["destination"], entry["amount_pico"])]
    return [(kind, source, destination, pico) for kind, source, destination, pico in entry.get("transfers", ())]


async def _post_request(c: AsyncConnection, lost: LostRow, billed_in: str | None) -> None:
    """The row as it was posted, in the batch that it was in: its other effects are there."""
    settle = decode(lost.record)
    assert isinstance(settle, Settle)
    batch_id = await _batch_of(c, lost)
    row = usage_row(settle, lost.slot_id, lost.epoch, lost.seq, batch_id, lost.record, billed_in)
    await insert_rows(c, "usage", USAGE_COLUMNS, [row])


async def _posted_before(c: AsyncConnection) -> Known:
    return Counter([_packed(correction.kind, correction.entry) async for correction in _acts(c)])


def _packed(kind: Kind, entry: dict[str, Any]) -> bytes:
    return msgspec.json.encode([kind, entry], order="sorted")


async def _approved(c: AsyncConnection, correction_id: str) -> Correction | None:
    a = audit_table.c
    query = select(a.after).where(a.action == ACTION, a.subject_id == correction_id)
    after = (await c.execute(query)).scalar_one_or_none()
    return None if after is None else msgspec.json.decode(after, type=Correction)


async def _acts(c: AsyncConnection) -> AsyncIterator[Correction]:
    a = audit_table.c
    for (after,) in (await c.execute(select(a.after).where(a.action == ACTION).order_by(a.seq))).all():
        yield msgspec.json.decode(after, type=Correction)
