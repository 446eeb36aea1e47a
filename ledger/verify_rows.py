"""The equations between rows: usage against its own records and prices, transfers, rollups, accounts and leases."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec
from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.billing import ByMeter, billed_by_meter, cost, tokens_by_meter
from ledger.database import driver
from ledger.entries import (
    REVERSAL,
    USAGE_COLUMNS,
    AccountInfo,
    RefusedRecord,
    TransferKey,
    add_transfers,
    usage_row,
)
from ledger.prices import METERS, items_of
from ledger.records import Settle, decode
from ledger.schema import accounts, leases, transfers
from ledger.sums import exact_sum, read_sum

PAGE = 2_000
_BILLED_IN = USAGE_COLUMNS.index("billed_in")
Result = tuple[int, str | None]
"""How many things were compared, and the first that differs."""


class UsageSums:
    """What the usage rows add up to, by keys whose number does not grow with the number of requests."""

    def __init__(self) -> None:
        self.rows = 0
        self.difference: str | None = None
        self.transfers: dict[TransferKey, int] = {}
        self.posted: dict[tuple[str, int, str], int] = {}
        """(slot, epoch, account) → pico."""


async def read_usage(c: AsyncConnection, month: str | None) -> UsageSums:
    """Every usage row must be exactly what its journalled record says, priced by the version that it names."""
    sums = UsageSums()
    infos = {
        row.id: AccountInfo(row.kind, row.currency)
        for row in await c.execute(select(accounts.c.id, accounts.c.kind, accounts.c.currency))
    }
    prices = _Prices(c)
    async for page in _usage_pages(c, month):
        for row in page:
            wrong = await _check_row(row, infos, prices, sums)
            sums.rows += 1
            if wrong is not None:
                sums.difference = f"request {row[0]}: {wrong}"
                return sums
    return sums


async def _check_row(
    row: tuple[Any, ...], infos: dict[str, AccountInfo], prices: _Prices, sums: UsageSums
) -> str | None:
    slot_id, epoch, seq, batch_id, payload = row[-5:]
    try:
        settle = decode(payload)
    except msgspec.DecodeError as error:
        return f"its record does not read: {error}"
    if not isinstance(settle, Settle):
        return "its record is no SETTLE"
    billed_in = row[_BILLED_IN]
    expected = usage_row(settle, slot_id, epoch, seq, batch_id, payload, billed_in)
    if expected != row:
        column = next(i for i, (is_, should) in enumerate(zip(row, expected, strict=True)) if is_ != should)
        return f"{USAGE_COLUMNS[column]} is {row[column]!r}, its record says {expected[column]!r}"
    wrong = _wrong_price(settle, await prices.of(settle)) or _wrong_charges(settle, infos)
    if wrong is not None:
        return wrong
    try:
        add_transfers(sums.transfers, settle, infos, billed_in)
    except RefusedRecord as error:
        return str(error)
    lease_epoch = epoch if settle.recovered_epoch is None else settle.recovered_epoch
    for charge in settle.charges:
        lease = (slot_id, lease_epoch, charge.account_id)
        sums.posted[lease] = sums.posted.get(lease, 0) + charge.amount_pico
    return None


def _wrong_price(s: Settle, prices: Iterable[tuple[ByMeter, ByMeter]]) -> str | None:
    """The cost is what the billed tokens cost, the loss what the waived ones would have."""
    used, billed = tokens_by_meter(s.usage), billed_by_meter(s.usage)
    for usd, cny in prices:
        if cost(billed, usd) == s.cost_usd_pico and cost(billed, cny) == s.cost_cny_pico:
            rates, paid = (usd, s.cost_usd_pico) if s.billing_currency == "USD" else (cny, s.cost_cny_pico)
            if cost(used, rates) - paid != s.loss_pico:
                return f"loss is {s.loss_pico} pico, the waived tokens cost {cost(used, rates) - paid}"
            return None
    return f"its tokens do not cost {s.cost_usd_pico} pico USD at price version {s.price_version}"


def _wrong_charges(s: Settle, infos: dict[str, AccountInfo]) -> str | None:
    """Funding accounts pay the cost once, together; each budget counts it once."""
    costs = {"USD": s.cost_usd_pico, "CNY": s.cost_cny_pico}
    paid = 0
    for charge in s.charges:
        info = infos.get(charge.account_id)
        if info is None:
            return f"charges account {charge.account_id}, which does not exist"
        if info.kind != "budget":
            paid += charge.amount_pico
        elif charge.amount_pico != costs[info.currency]:
            return f"budget {charge.account_id} counts {charge.amount_pico} pico of {costs[info.currency]}"
    if paid != costs[s.billing_currency]:
        return f"funding accounts pay {paid} pico of {costs[s.billing_currency]}"
    return None


class _Prices:
    """What a version charges for a model in the scope that was pinned; for records that do not say which, what it may
    have charged: the default's price, a plan's, or the team's own."""

    def __init__(self, c: AsyncConnection) -> None:
        self._c = c
        self._found: dict[tuple[str, str, str, str | None], list[tuple[ByMeter, ByMeter]]] = {}
        self._versions: dict[str, Any] = {}

    async def of(self, s: Settle) -> list[tuple[ByMeter, ByMeter]]:
        key = (s.price_version, s.model, s.team_id, s.price_scope)
        found = self._found.get(key)
        if found is None:
            if s.price_version not in self._versions:
                self._versions[s.price_version] = await items_of(self._c, s.price_version)
            found = self._found[key] = self._candidates(s)
        return found

    def _candidates(self, s: Settle) -> list[tuple[ByMeter, ByMeter]]:
        scopes: dict[str, dict[str, Any]] = {}
        for item in self._versions[s.price_version]:
            if item.model != s.model or (s.price_scope is not None and item.scope != s.price_scope):
                continue
            if not item.scope.startswith("team:") or item.scope == f"team:{s.team_id}":
                scopes.setdefault(item.scope, {})[item.meter] = item
        return [
            (_by_meter(meters, "usd_pico"), _by_meter(meters, "cny_pico"))
            for meters in scopes.values()
            if len(meters) == len(METERS)
        ]


def _by_meter(meters: dict[str, Any], column: str) -> ByMeter:
    a, b, c, d, e = (getattr(meters[name], column) for name in METERS)
    return (a, b, c, d, e)


async def check_accounts(c: AsyncConnection) -> Result:
    """Each balance is the sum of its transfers, what is leased is the sum of its leases, nothing is overspent."""
    counted, last = 0, ""
    while True:
        query = select(accounts).where(accounts.c.id > last).order_by(accounts.c.id).limit(PAGE)
        page = (await c.execute(query)).all()
        if not page:
            return counted, None
        ids = [row.id for row in page]
        out_of, into = await moved_out(c, ids), await _sums(c, transfers.c.destination, ids, back=False)
        held = await outstanding(c, ids)
        for row in page:
            counted += 1
            wrong = _wrong_account(row, out_of.get(row.id, 0), into.get(row.id, 0), held.get(row.id, 0))
            if wrong is not None:
                return counted, f"account {row.id}: {wrong}"
        last = page[-1].id


def _wrong_account(row: Any, moved_out: int, moved_in: int, held: int) -> str | None:
    credits, debits, leased = int(row.credits_pico), int(row.debits_pico), int(row.leased_pico)
    if debits != moved_out:
        return f"debits are {debits} pico, its transfers come to {moved_out}"
    if leased != held:
        return f"{leased} pico are leased, its leases come to {held}"
    if row.kind in ("prepaid", "grant") and credits != moved_in:
        return f"credits are {credits} pico, what was paid in comes to {moved_in}"
    if debits < 0 or leased < 0 or debits + leased > credits:
        return f"overspent: debits {debits} + leased {leased} of {credits} pico"
    return None


async def check_leases(c: AsyncConnection, sums: UsageSums | None) -> Result:
    """What each lease has paid is what its slot's requests were charged. `sums` None: only count them."""
    found = {
        (row.slot_id, row.epoch, row.account_id): int(row.posted_pico)
        for row in await c.execute(
            select(leases.c.slot_id, leases.c.epoch, leases.c.account_id, leases.c.posted_pico).where(
                leases.c.posted_pico > 0
            )
        )
    }
    if sums is None:
        return len(found), None
    for lease in sorted(found.keys() | sums.posted.keys()):
        paid, charged = found.get(lease, 0), sums.posted.get(lease, 0)
        if paid != charged:
            slot_id, epoch, account_id = lease
            words = f"the lease of epoch {epoch} of slot {slot_id} on {account_id}"
            return len(found), f"{words} paid {paid} pico, usage charges {charged}"
    return len(found), None


async def check_topups(c: AsyncConnection) -> Result:
    """Every payment was credited exactly once."""
    payments = "SELECT id, account_id, amount_pico, currency FROM topups"
    moved = "SELECT id, destination, amount_pico, currency FROM transfers WHERE kind = 'topup'"
    counted = (await c.execute(text("SELECT count(*) FROM topups"))).scalar_one()
    for left, right, words in ((payments, moved, "was not credited"), (moved, payments, "was credited and not paid")):
        row = (await c.execute(text(f"{left} EXCEPT {right} LIMIT 1"))).one_or_none()
        if row is not None:
            return counted, f"top-up {row[0]} of {row[2]} pico {row[3]} {words}"
    return counted, None


async def moved_out(c: AsyncConnection, ids: list[str]) -> dict[str, int]:
    """What left each account, less what corrections took back."""
    out_of, back = await _sums(c, transfers.c.source, ids), await _sums(c, transfers.c.destination, ids, back=True)
    return {account_id: out_of.get(account_id, 0) - back.get(account_id, 0) for account_id in ids}


async def _sums(c: AsyncConnection, key: Any, ids: list[str], *, back: bool | None = None) -> dict[str, int]:
    """back: only what corrections took back, or only what they did not."""
    amount = transfers.c.amount_pico
    query = select(key.label("id"), *exact_sum(amount)).where(key.in_(ids)).group_by(key)
    if back is not None:
        reversal = transfers.c.kind.endswith(REVERSAL, autoescape=True)
        query = query.where(reversal if back else ~reversal)
    return {row["id"]: read_sum(row, amount.name) for row in (await c.execute(query)).mappings()}


async def outstanding(c: AsyncConnection, ids: list[str]) -> dict[str, int]:
    left = leases.c.taken_pico - leases.c.returned_pico - leases.c.posted_pico
    query = (
        select(leases.c.account_id, func.sum(left).label("held"))
        .where(leases.c.account_id.in_(ids))
        .group_by(leases.c.account_id)
    )
    return {row.account_id: int(row.held) for row in await c.execute(query)}


def billed_in_month(month: str) -> str:
    """The condition for the usage rows that a month bills."""
    return f"(period = {month} AND billed_in IS NULL OR billed_in = {month})"


async def _usage_pages(c: AsyncConnection, month: str | None) -> AsyncIterator[list[tuple[Any, ...]]]:
    """Rows of USAGE_COLUMNS through the raw driver, some at a time."""
    columns = ", ".join("CAST(request_id AS TEXT)" if name == "request_id" else name for name in USAGE_COLUMNS)
    raw = await driver(c)
    if c.dialect.name == "sqlite":
        where = "" if month is None else f" WHERE {billed_in_month('?1')}"
        cursor = await raw.execute(f"SELECT {columns} FROM usage{where}", () if month is None else (month,))
        try:
            while rows := await cursor.fetchmany(PAGE):
                yield rows
        finally:
            await cursor.close()
    else:
        where = "" if month is None else f" WHERE {billed_in_month('$1')}"
        cursor = await raw.cursor(f"SELECT {columns} FROM usage{where}", *([] if month is None else [month]))
        while rows := await cursor.fetch(PAGE):
            yield [tuple(row) for row in rows]
