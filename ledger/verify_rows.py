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
    ROLLUP_KEYS,
    ROLLUP_SUMS,
    USAGE_COLUMNS,
    AccountInfo,
    RefusedRecord,
    TransferKey,
    add_transfers,
    usage_row,
)
from ledger.periods import HOUR_MS
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


async def check_transfers(c: AsyncConnection, sums: UsageSums, month: str | None) -> Result:
    """What the poster moved between accounts is what the usage rows add up to, by every key."""
    keys = [transfers.c[name] for name in TransferKey._fields]
    query = select(*keys, *exact_sum(transfers.c.amount_pico)).where(transfers.c.batch_id.is_not(None)).group_by(*keys)
    if month is not None:
        query = query.where(transfers.c.period == month)
    expected = {key: amount for key, amount in sums.transfers.items() if amount}
    counted = 0
    for row in (await c.execute(query)).mappings():
        key = TransferKey(*(row[name] for name in TransferKey._fields))
        counted += 1
        moved, should = read_sum(row, "amount_pico"), expected.pop(key, 0)
        if moved != should:
            return counted, f"{_words(key)}: {moved} pico were moved, usage comes to {should}"
    for key, should in expected.items():
        return counted, f"{_words(key)}: nothing was moved, usage comes to {should}"
    return counted, None


def _words(key: TransferKey) -> str:
    return f"{key.kind} {key.source} → {key.destination} in {key.period}"


async def check_rollups(c: AsyncConnection, month: str | None) -> Result:
    """The hourly sums are the sums of the rows, compared by the database, in both directions."""
    hour = f"created_ms - created_ms % {HOUR_MS}"
    derived = {"hour_ms": hour, "draft_model": "coalesce(draft_model, '')", "billed_in": "coalesce(billed_in, '')"}
    keys = ", ".join(ROLLUP_KEYS)
    rows = ", ".join(derived.get(name, name) for name in ROLLUP_KEYS)
    added = ", ".join("count(*)" if name == "requests" else f"sum({name})" for name in ROLLUP_SUMS)
    rows_where = "" if month is None else f" WHERE {_billed_in(':month')}"
    where = "" if month is None else " WHERE (period = :month AND billed_in = '' OR billed_in = :month)"
    groups = ", ".join(str(n) for n in range(1, len(ROLLUP_KEYS) + 1))
    from_usage = f"SELECT {rows}, {added} FROM usage{rows_where} GROUP BY {groups}"
    from_rollups = f"SELECT {keys}, {', '.join(ROLLUP_SUMS)} FROM rollups{where}"
    bound = {} if month is None else {"month": month}
    counted = (await c.execute(text(f"SELECT count(*) FROM rollups{where}"), bound)).scalar_one()
    for left, right, words in (
        (from_rollups, from_usage, "the rollup is not the sum of its rows"),
        (from_usage, from_rollups, "the rows have no such rollup"),
    ):
        difference = f"SELECT * FROM ({left}) AS a EXCEPT SELECT * FROM ({right}) AS b LIMIT 1"
        row = (await c.execute(text(difference), bound)).one_or_none()
        if row is not None:
            names = zip(ROLLUP_KEYS, row[: len(ROLLUP_KEYS)], strict=True)
            return counted, f"{words}: {', '.join(f'{name}={value}' for name, value in names)}"
    return counted, None


async def check_accounts(c: AsyncConnection) -> Result:
    """Each balance is the sum of its transfers, what is leased is the sum of its leases, nothing is overspent."""
    counted, last = 0, ""
    while True:
        query = select(accounts).where(accounts.c.id > last).order_by(accounts.c.id).limit(PAGE)
        page = (await c.execute(query)).all()
        if not page:
            return counted, None
        ids = [row.id for row in page]
        out_of = await _sums(c, transfers.c.source, transfers.c.amount_pico, ids)
        into = await _sums(c, transfers.c.destination, transfers.c.amount_pico, ids)
        held = await _outstanding(c, ids)
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


async def _sums(c: AsyncConnection, key: Any, amount: Any, ids: list[str]) -> dict[str, int]:
    query = select(key.label("id"), *exact_sum(amount)).where(key.in_(ids)).group_by(key)
    return {row["id"]: read_sum(row, amount.name) for row in (await c.execute(query)).mappings()}


async def _outstanding(c: AsyncConnection, ids: list[str]) -> dict[str, int]:
    left = leases.c.taken_pico - leases.c.returned_pico - leases.c.posted_pico
    query = (
        select(leases.c.account_id, func.sum(left).label("held"))
        .where(leases.c.account_id.in_(ids))
        .group_by(leases.c.account_id)
    )
    return {row.account_id: int(row.held) for row in await c.execute(query)}


def _billed_in(month: str) -> str:
    """The condition for the usage rows that a month bills."""
    return f"(period = {month} AND billed_in IS NULL OR billed_in = {month})"


async def _usage_pages(c: AsyncConnection, month: str | None) -> AsyncIterator[list[tuple[Any, ...]]]:
    """Rows of USAGE_COLUMNS through the raw driver, some at a time."""
    columns = ", ".join("CAST(request_id AS TEXT)" if name == "request_id" else name for name in USAGE_COLUMNS)
    raw = await driver(c)
    if c.dialect.name == "sqlite":
        where = "" if month is None else f" WHERE {_billed_in('?1')}"
        cursor = await raw.execute(f"SELECT {columns} FROM usage{where}", () if month is None else (month,))
        try:
            while rows := await cursor.fetchmany(PAGE):
                yield rows
        finally:
            await cursor.close()
    else:
        where = "" if month is None else f" WHERE {_billed_in('$1')}"
        cursor = await raw.cursor(f"SELECT {columns} FROM usage{where}", *([] if month is None else [month]))
        while rows := await cursor.fetch(PAGE):
            yield [tuple(row) for row in rows]
