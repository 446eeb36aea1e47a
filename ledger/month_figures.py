"""The figures of a team's month, read from the ledger's rows into one exact statement.

They come from the hourly rollups, which the poster writes in the transaction of the usage rows that they sum.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, func, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.billing import tokens_by_meter
from ledger.errors import NotFound
from ledger.merkle import MerkleTree
from ledger.money import Currency
from ledger.movements import moved_before, moved_where, movements, not_invoiced, paid_by
from ledger.periods import period_bounds
from ledger.prices import DEFAULT_SCOPE, METERS
from ledger.records import Usage
from ledger.schema import fx_rates, invoices, price_items, price_versions, rollups, teams, topups, transfers, usage
from ledger.statements import FxLine, Line, Party, Statement, TokenTotals, TopupLine, build_statement
from ledger.sums import exact_sum, read_sum

_TOKEN_COLUMNS = tuple(field for field in TokenTotals.__struct_fields__ if field != "requests")
_AMOUNTS = ("cost_usd_pico", "cost_cny_pico", "loss_pico")
UnitPrices = dict[str, tuple[int, int]]
"""Per meter (USD pico, CNY pico) a token."""


@dataclass(frozen=True, slots=True)
class Used:
    """What a month bills, added up and sealed. Of a closed month it stays the same until a correction is approved."""

    lines: list[Line]
    tokens: TokenTotals
    merkle_root: str


async def used_in(c: AsyncConnection, team_id: str, period: str) -> Used:
    """Reads every request of the month: some 15 s for a million. Raises NotFound for the team."""
    currency = (await c.execute(select(teams.c.billing_currency).where(teams.c.id == team_id))).scalar_one_or_none()
    if currency is None:
        raise NotFound(_no_team(team_id))
    lines, tokens = await _usage_lines(c, team_id, period, currency)
    return Used(lines, tokens, await merkle_root(c, team_id, period))


async def draft_statement(c: AsyncConnection, team_id: str, period: str, used: Used | None = None) -> Statement:
    """The month as the ledger knows it now. Raises NotFound for the team, Invalid for the month.

    used: of the same month, when it is known already.
    """
    team = (await c.execute(select(teams).where(teams.c.id == team_id))).mappings().one_or_none()
    if team is None:
        raise NotFound(_no_team(team_id))
    start_ms, end_ms = period_bounds(period, team["timezone"])
    currency: Currency = team["billing_currency"]
    used = used or await used_in(c, team_id, period)
    paid = await paid_by(c, team_id, period)
    return build_statement(
        period=period,
        timezone=team["timezone"],
        period_start_ms=start_ms,
        period_end_ms=end_ms,
        currency=currency,
        party=Party(
            team_id=team_id,
            name=team["name"],
            invoice_title=team["invoice_title"],
            tax_id=team["tax_id"],
            tax_rate_bp=team["tax_rate_bp"],
        ),
        lines=used.lines,
        topups=await _topup_lines(c, team_id, currency, start_ms, end_ms),
        fx=await _fx_lines(c, {line.price_version for line in used.lines}),
        tokens=used.tokens,
        opening_pico=await _opening(c, team_id, currency, period, start_ms),
        carry_in_pico=await _carry_in(c, team_id, period),
        merkle_root=used.merkle_root,
        movements=await movements(c, team_id, currency, start_ms, end_ms),
        promo_pico=paid.get("grant", 0),
        on_credit_pico=paid.get("credit_line", 0),
        not_invoiced_pico=await not_invoiced(c, team_id, period),
    )


def _no_team(team_id: str) -> str:
    return f"no team {team_id}: see `tallygate team list`"


def rollup_billed_in(period: str) -> ColumnElement[bool]:
    """The condition for what a month bills: its own usage that came in time, and late usage of closed months."""
    r = rollups.c
    return or_(and_(r.period == period, r.billed_in == ""), r.billed_in == period)


async def merkle_root(c: AsyncConnection, team_id: str, period: str) -> str:
    """Hex root over the month's canonical records, sorted by request_id; streams, so a million rows need no memory."""
    tree = MerkleTree()
    async for record in records_of(c, team_id, period):
        tree.add(record)
    return tree.root().hex()


async def _usage_lines(
    c: AsyncConnection, team_id: str, period: str, currency: Currency
) -> tuple[list[Line], TokenTotals]:
    keys = (rollups.c.period, rollups.c.model, rollups.c.price_version)
    summed = [func.sum(rollups.c[name]).label(name) for name in ("requests", *_TOKEN_COLUMNS)]
    amounts = [part for name in _AMOUNTS for part in exact_sum(rollups.c[name])]
    query: Select[Any] = (
        select(*keys, *summed, *amounts)
        .where(rollups.c.team_id == team_id, rollup_billed_in(period))
        .group_by(*keys)
        .order_by(rollups.c.period != period, *keys)
    )
    lines: list[Line] = []
    totals = dict.fromkeys(("requests", *_TOKEN_COLUMNS), 0)
    for row in (await c.execute(query)).mappings().all():
        model, version, used_in = row["model"], row["price_version"], row["period"]
        late_of = "" if used_in == period else used_in
        sums = {name: int(row[name]) for name in totals} | {name: read_sum(row, name) for name in _AMOUNTS}
        for name in totals:
            totals[name] += sums[name]
        known = await _prices(c, version, model, team_id)
        prices = _price_of(sums, known, currency)
        if prices is not None:
            lines += _model_lines(model, version, late_of, sums, prices)
        else:  # the team changed its plan while the version was in force: some requests had one price, some another
            billed_in = usage.c.billed_in == period if late_of else usage.c.billed_in.is_(None)
            where = (usage.c.team_id == team_id, usage.c.period == used_in, billed_in)
            for index, part in (await _by_price(c, where, model, version, currency, known)).items():
                lines += _model_lines(model, version, late_of, part, known[index])
    return lines, TokenTotals(**totals)


def _metered(sums: Mapping[str, int]) -> dict[str, int]:
    used = Usage(
        prompt_tokens=sums["prompt_tokens"],
        cached_tokens=sums["cached_tokens"],
        cache_write_tokens=sums["cache_write_tokens"],
        generated_tokens=sums["generated_tokens"],
        reasoning_tokens=sums["reasoning_tokens"],
    )
    return dict(zip(METERS, tokens_by_meter(used), strict=True))


def _price_of(sums: Mapping[str, int], known: Sequence[UnitPrices], currency: Currency) -> UnitPrices | None:
    """The prices at which the used tokens come to what was billed and what was waived, to the pico."""
    at, cost = (0, "cost_usd_pico") if currency == "USD" else (1, "cost_cny_pico")
    metered, due = _metered(sums), sums[cost] + sums["loss_pico"]
    fitting = (
        prices for prices in known if sum(tokens * prices[meter][at] for meter, tokens in metered.items()) == due
    )
    return next(fitting, None)


async def _by_price(
    c: AsyncConnection,
    where: Sequence[ColumnElement[bool]],
    model: str,
    version: str,
    currency: Currency,
    known: Sequence[UnitPrices],
) -> dict[int, dict[str, int]]:
    """The sums of the requests that each of the `known` prices was charged for, by its place among them."""
    names = (*_TOKEN_COLUMNS, *_AMOUNTS)
    u = usage.c
    query = (
        select(*(u[name] for name in names))
        .where(*where, u.model == model, u.price_version == version)
        .execution_options(yield_per=5_000)
    )
    parts: dict[int, dict[str, int]] = {}
    async with c.stream(query) as rows:
        async for row in rows:
            sums = {name: int(value) for name, value in zip(names, row, strict=True)}
            prices = _price_of(sums, known, currency)
            index = 0 if prices is None else known.index(prices)
            part = parts.setdefault(index, dict.fromkeys(names, 0))
            for name, value in sums.items():
                part[name] += value
    return dict(sorted(parts.items()))


def _model_lines(
    model: str, version: str, late_of: str, sums: Mapping[str, int], unit_prices: UnitPrices
) -> list[Line]:
    """One line a meter at its unit price, and one negative line for what was used and waived."""
    lines = []
    for meter, tokens in _metered(sums).items():
        if not tokens:
            continue
        usd, cny = unit_prices[meter]
        lines.append(
            Line(
                kind="usage",
                late_of=late_of,
                model=model,
                meter=meter,
                price_version=version,
                tokens=tokens,
                usd_pico_per_token=usd,
                cny_pico_per_token=cny,
                usd_pico=tokens * usd,
                cny_pico=tokens * cny,
            )
        )
    waived_usd = sums["cost_usd_pico"] - sum(line.usd_pico for line in lines)
    waived_cny = sums["cost_cny_pico"] - sum(line.cny_pico for line in lines)
    waived_tokens = sums["prompt_tokens"] + sums["generated_tokens"] - sums["billed_tokens"]
    if waived_tokens or waived_usd or waived_cny:
        lines.append(
            Line(
                kind="waived",
                late_of=late_of,
                model=model,
                price_version=version,
                tokens=waived_tokens,
                usd_pico=waived_usd,
                cny_pico=waived_cny,
            )
        )
    return lines


async def _prices(c: AsyncConnection, version_id: str, model: str, team_id: str) -> list[UnitPrices]:
    """What a version may have charged the team: its own price, its plan's, the default, then those of other plans."""
    plan = (await c.execute(select(teams.c.plan).where(teams.c.id == team_id))).scalar_one()
    query = select(price_items).where(
        price_items.c.version_id == version_id,
        price_items.c.model == model,
        or_(price_items.c.scope == f"team:{team_id}", price_items.c.scope.not_like("team:%")),
    )
    scopes: dict[str, UnitPrices] = {}
    for row in (await c.execute(query.order_by(price_items.c.scope))).mappings():
        scopes.setdefault(row["scope"], {})[row["meter"]] = (row["usd_pico"], row["cny_pico"])
    first = [f"team:{team_id}", f"plan:{plan}", DEFAULT_SCOPE]
    return [scopes.pop(scope) for scope in first if scope in scopes] + list(scopes.values())


async def _topup_lines(
    c: AsyncConnection, team_id: str, currency: Currency, start_ms: int, end_ms: int
) -> list[TopupLine]:
    """What was paid in, and as negative lines what was paid back."""
    t, r = topups.c, transfers.c
    paid = select(t.at_ms, t.amount_pico, t.provider, t.reference).where(t.team_id == team_id, t.currency == currency)
    back = select(r.at_ms, r.amount_pico, r.reference).where(*moved_where(team_id, currency, ("refund",)))
    lines = [
        TopupLine(at_ms=row.at_ms, amount_pico=row.amount_pico, provider=row.provider, reference=row.reference)
        for row in await c.execute(paid.where(t.at_ms >= start_ms, t.at_ms < end_ms).order_by(t.at_ms, t.id))
    ]
    lines += [
        TopupLine(at_ms=row.at_ms, amount_pico=-row.amount_pico, provider="refund", reference=row.reference)
        for row in await c.execute(back.where(r.at_ms >= start_ms, r.at_ms < end_ms).order_by(r.at_ms, r.id))
    ]
    return sorted(lines, key=lambda line: line.at_ms)


async def _fx_lines(c: AsyncConnection, version_ids: set[str]) -> list[FxLine]:
    query = (
        select(price_versions.c.id, price_versions.c.effective_from_ms, fx_rates)
        .join(fx_rates, fx_rates.c.id == price_versions.c.fx_rate_id)
        .where(price_versions.c.id.in_(sorted(version_ids)))
        .order_by(price_versions.c.effective_from_ms)
    )
    return [
        FxLine(
            base=row.base,
            quote=row.quote,
            numerator=row.numerator,
            denominator=row.denominator,
            effective_from_ms=row.effective_from_ms,
            price_version=row[0],
        )
        for row in (await c.execute(query)).all()
    ]


async def _opening(c: AsyncConnection, team_id: str, currency: Currency, period: str, start_ms: int) -> int:
    """What came in and went out before the month, less what earlier months consumed: negative when a post-paid team
    owes."""
    paid_in = select(*exact_sum(topups.c.amount_pico)).where(
        topups.c.team_id == team_id, topups.c.currency == currency, topups.c.at_ms < start_ms
    )
    cost = rollups.c.cost_usd_pico if currency == "USD" else rollups.c.cost_cny_pico
    billed_in = func.coalesce(func.nullif(rollups.c.billed_in, ""), rollups.c.period)
    consumed = select(*exact_sum(cost)).where(rollups.c.team_id == team_id, billed_in < period)
    credited = (await c.execute(paid_in)).mappings().one()
    debited = (await c.execute(consumed)).mappings().one()
    moved = await moved_before(c, team_id, currency, start_ms)
    return read_sum(credited, "amount_pico") + moved - read_sum(debited, cost.name)


async def _carry_in(c: AsyncConnection, team_id: str, period: str) -> int:
    query = (
        select(invoices.c.carry_out_pico)
        .where(invoices.c.team_id == team_id, invoices.c.kind == "invoice", invoices.c.state != "void")
        .where(invoices.c.period < period)
        .order_by(invoices.c.period.desc())
        .limit(1)
    )
    return (await c.execute(query)).scalar_one_or_none() or 0


async def records_of(c: AsyncConnection, team_id: str, period: str) -> AsyncIterator[bytes]:
    """The SETTLE records that the month bills, as journalled, by request_id: the leaves of the Merkle tree."""
    u = usage.c
    of_team = select(u.request_id, u.record).where(u.team_id == team_id)
    in_time = of_team.where(u.period == period, u.billed_in.is_(None))
    both = union_all(in_time, of_team.where(u.billed_in == period)).subquery()  # each by an index of its own
    query = select(both.c.record).order_by(both.c.request_id).execution_options(yield_per=5_000)
    async with c.stream_scalars(query) as records:
        async for record in records:
            yield bytes(record)
