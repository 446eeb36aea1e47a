"""Who pays for a key's requests to a model: price, funding accounts and budgets, worked out once and kept in memory.

A plan is what makes a warm hold free of SQL. It is thrown away when the change feed says so, and by itself when a
window, a month, a grant or a price version ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import accounts
from ledger.billing import Limit, WorstCase
from ledger.budgets import budget_period, ensure_budgets
from ledger.leases import Leases
from ledger.periods import period_bounds, period_of, window_bounds
from ledger.prices import PinnedPrice, PriceBook
from ledger.quotas import Quota, applicable
from ledger.requests import Spender
from ledger.schema import accounts as accounts_table
from ledger.schema import quotas
from ledger.sealing import BillingMonth, BillingMonths
from ledger.slices import Slice
from ledger.spending import budget_id

Part = tuple[Slice, int]
"""An amount of pico drawn from a slice."""


class Plan:
    """Funding accounts are any-of, in order; budgets are all-of, each in its own currency."""

    __slots__ = (
        "budgets",
        "from_ms",
        "funding",
        "funding_in_usd",
        "month",
        "output_cny",
        "output_usd",
        "price",
        "prompt_cny",
        "prompt_usd",
        "team_id",
        "until_ms",
    )

    def __init__(
        self,
        price: PinnedPrice,
        funding: Sequence[Slice],
        funding_in_usd: bool,
        budgets: Sequence[Slice],
        month: BillingMonth,
        from_ms: int,
        until_ms: int,
        team_id: str,
    ) -> None:
        self.price = price
        self.funding = tuple(funding)
        self.funding_in_usd = funding_in_usd
        self.budgets = tuple((slice, slice.currency == "USD") for slice in budgets)
        self.month = month
        self.from_ms = from_ms
        self.until_ms = until_ms
        self.team_id = team_id
        self.prompt_usd, self.output_usd = WorstCase.of(price.usd)
        self.prompt_cny, self.output_cny = WorstCase.of(price.cny)

    def draw(self, usd_pico: int, cny_pico: int, *, past_dry: bool = False) -> list[Part] | None:
        """Take a cost out of the slices' free amounts: all budgets, and funding accounts in order. None: not enough
        here.

        A funding account that may have more in SQL is not passed over for a later one, unless `past_dry`.
        """
        for slice, in_usd in self.budgets:
            part = usd_pico if in_usd else cny_pico
            if slice.free < part and part:  # of nothing there is enough also where a lost lease left less than nothing
                return None
        need = usd_pico if self.funding_in_usd else cny_pico
        parts: list[Part] = []
        for slice in self.funding:
            if not need:
                break
            free = slice.free
            if free >= need:
                parts.append((slice, need))
                need = 0
                break
            if not (past_dry or slice.dry):
                return None
            if free > 0:
                parts.append((slice, free))
                need -= free
        if need:
            return None
        for slice, amount in parts:
            slice.free -= amount
        for slice, in_usd in self.budgets:
            slice.free -= usd_pico if in_usd else cny_pico
        return parts

    def give_back(self, parts: Sequence[Part], usd_pico: int, cny_pico: int) -> None:
        """Undo a draw."""
        for slice, amount in parts:
            slice.free += amount
        for slice, in_usd in self.budgets:
            slice.free += usd_pico if in_usd else cny_pico

    def free_funding(self) -> int:
        return sum(slice.free for slice in self.funding if slice.free > 0)

    def limits(self) -> list[Limit]:
        """What the slices could cover now: the funding accounts together, and each budget."""
        usd, cny = WorstCase(self.prompt_usd, self.output_usd), WorstCase(self.prompt_cny, self.output_cny)
        limits = [Limit(self.free_funding(), usd if self.funding_in_usd else cny)]
        limits += [Limit(slice.free, usd if in_usd else cny) for slice, in_usd in self.budgets]
        return limits

    def short_budgets(self, usd_pico: int, cny_pico: int) -> list[tuple[Slice, int]]:
        """Budgets that do not cover the cost from what is here, and how much each should hold."""
        needs = [(slice, usd_pico if in_usd else cny_pico) for slice, in_usd in self.budgets]
        return [(slice, need) for slice, need in needs if slice.free < need]

    def needing_more(self) -> list[Slice]:
        """Slices that are running low, to be refilled before anybody has to wait for it; not those that owe."""
        low = [slice for slice in self.funding if slice.free < slice.low_water and not slice.owed]
        low += [slice for slice, _ in self.budgets if slice.free < slice.low_water and not slice.owed]
        return low


async def make_plan(
    c: AsyncConnection,
    leases: Leases,
    months: BillingMonths,
    book: PriceBook,
    spender: Spender,
    model: str,
    at_ms: int,
    *,
    per_end_user: bool,
    writing: bool,
) -> Plan | None:
    """Works a plan out from SQL. None: a budget needs its account of this period first; call again in a write
    transaction with `writing`. Raises PriceNotFound.
    """
    price = book.pin(model, at_ms, spender.team_id)
    funding = await accounts.funding(c, spender.team_id, at_ms)
    end_user = spender.end_user if per_end_user else None
    limits = [
        quota
        for quota in await applicable(c, spender.team_id, spender.key_id, end_user)
        if quota.metric == "spend" and quota.hard and quota.model in (None, model)
    ]
    if writing:
        await ensure_budgets(c, limits, at_ms, spender.timezone)
    budgets = await _budget_slices(c, leases, limits, spender, at_ms)
    if len(budgets) < len(limits) and not writing:
        return None
    from_ms, until_ms = _valid(limits, funding, book, spender, at_ms)
    return Plan(
        price,
        [leases.slice(a.id, a.kind, a.currency) for a in funding if _worth_asking(a, leases)],
        spender.billing_currency == "USD",
        budgets,
        months.at(period_of(at_ms, spender.timezone), spender.timezone),
        from_ms,
        until_ms,
        spender.team_id,
    )


async def _budget_slices(
    c: AsyncConnection, leases: Leases, limits: Sequence[Quota], spender: Spender, at_ms: int
) -> list[Slice]:
    """Of those budgets whose account of this period is there."""
    ids = [budget_id(quota.id, budget_period(quota, at_ms, spender.timezone)) for quota in limits]
    if not ids:
        return []
    query = select(accounts_table.c.id, accounts_table.c.currency).where(accounts_table.c.id.in_(ids))
    return [leases.slice(row.id, "budget", row.currency) for row in await c.execute(query.order_by("id"))]


def _valid(
    limits: Sequence[Quota], funding: Sequence[accounts.Account], book: PriceBook, spender: Spender, at_ms: int
) -> tuple[int, int]:
    """[from, until) around `at_ms` in which no month, window, grant or price version begins or ends."""
    start, end = period_bounds(period_of(at_ms, spender.timezone), spender.timezone)
    starts, ends = [start], [end, *(a.expires_at_ms for a in funding if a.expires_at_ms is not None)]
    for quota in limits:
        assert quota.window is not None
        opened, closes = window_bounds(quota.window, at_ms, quota.timezone or spender.timezone)
        starts.append(opened)
        ends += [] if closes is None else [closes]
    following = book.next_start(at_ms)
    return max(starts), min(ends if following is None else [*ends, following])


def _worth_asking(account: accounts.Account, leases: Leases) -> bool:
    """Whether an account holds or may get anything to spend: one that is used up would be asked in vain each time."""
    return account.target_pico > account.debits_pico or account.id in leases.slices


async def has_end_user_budgets(c: AsyncConnection, team_id: str) -> bool:
    query = select(quotas.c.id).where(
        quotas.c.scope == "end_user", quotas.c.team_id == team_id, quotas.c.metric == "spend", quotas.c.hard == 1
    )
    return (await c.execute(query.limit(1))).one_or_none() is not None
