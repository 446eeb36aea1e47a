"""The figures of a team's month, read from the ledger's rows into one exact statement.

They come from the hourly rollups, which the poster writes in the transaction of the usage rows that they sum.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from sqlalchemy import RowMapping, Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.errors import NotFound
from ledger.merkle import MerkleTree
from ledger.money import Currency
from ledger.periods import period_bounds
from ledger.schema import fx_rates, invoices, price_items, price_versions, rollups, teams, topups, usage
from ledger.statements import METERS, FxLine, Line, Party, Statement, TokenTotals, TopupLine, build_statement
from ledger.sums import exact_sum, read_sum

_TOKEN_COLUMNS = tuple(field for field in TokenTotals.__struct_fields__ if field != "requests")


async def draft_statement(c: AsyncConnection, team_id: str, period: str) -> Statement:
    """The month as the ledger knows it now. Raises NotFound for the team, Invalid for the month."""
    team = (await c.execute(select(teams).where(teams.c.id == team_id))).mappings().one_or_none()
    if team is None:
        raise NotFound(f"no team {team_id}: see `tallygate team list`")
    start_ms, end_ms = period_bounds(period, team["timezone"])
    currency: Currency = team["billing_currency"]
    lines, tokens = await _usage_lines(c, team_id, period)
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
        lines=lines,
        topups=await _topup_lines(c, team_id, currency, start_ms, end_ms),
        fx=await _fx_lines(c, {line.price_version for line in lines}),
        tokens=tokens,
        opening_pico=await _opening(c, team_id, currency, period, start_ms),
        carry_in_pico=await _carry_in(c, team_id, period),
        merkle_root=await merkle_root(c, team_id, period),
    )


async def merkle_root(c: AsyncConnection, team_id: str, period: str) -> str:
    """Hex root over the month's canonical records, sorted by request_id; streams, so a million rows need no memory."""
    tree = MerkleTree()
    async for record in records_of(c, team_id, period):
        tree.add(record)
    return tree.root().hex()


async def _usage_lines(c: AsyncConnection, team_id: str, period: str) -> tuple[list[Line], TokenTotals]:
    keys = (rollups.c.model, rollups.c.price_version)
    summed = [func.sum(rollups.c[name]).label(name) for name in ("requests", *_TOKEN_COLUMNS)]
    query: Select[Any] = (
        select(*keys, *summed, *exact_sum(rollups.c.cost_usd_pico), *exact_sum(rollups.c.cost_cny_pico))
        .where(rollups.c.team_id == team_id, rollups.c.period == period)
        .group_by(*keys)
        .order_by(*keys)
    )
    lines: list[Line] = []
    totals = dict.fromkeys(("requests", *_TOKEN_COLUMNS), 0)
    for row in (await c.execute(query)).mappings().all():
        for name in totals:
            totals[name] += int(row[name])
        unit_prices = await _unit_prices(c, row["price_version"], row["model"], team_id)
        lines += _model_lines(row, unit_prices)
    return lines, TokenTotals(**totals)


def _model_lines(row: RowMapping, unit_prices: Mapping[str, tuple[int, int]]) -> list[Line]:
    """One line a meter at its unit price, and one negative line for what was used and waived."""
    prompt, cached, written = int(row["prompt_tokens"]), int(row["cached_tokens"]), int(row["cache_write_tokens"])
    generated, reasoning = int(row["generated_tokens"]), int(row["reasoning_tokens"])
    metered = dict(
        zip(METERS, (prompt - cached - written, cached, written, generated - reasoning, reasoning), strict=True)
    )
    lines = []
    for meter, tokens in metered.items():
        if not tokens:
            continue
        usd, cny = unit_prices[meter]
        lines.append(
            Line(
                kind="usage",
                model=row["model"],
                meter=meter,
                price_version=row["price_version"],
                tokens=tokens,
                usd_pico_per_token=usd,
                cny_pico_per_token=cny,
                usd_pico=tokens * usd,
                cny_pico=tokens * cny,
            )
        )
    waived_usd = read_sum(row, "cost_usd_pico") - sum(line.usd_pico for line in lines)
    waived_cny = read_sum(row, "cost_cny_pico") - sum(line.cny_pico for line in lines)
    waived_tokens = prompt + generated - int(row["billed_tokens"])
    if waived_tokens or waived_usd or waived_cny:
        lines.append(
            Line(
                kind="waived",
                model=row["model"],
                price_version=row["price_version"],
                tokens=waived_tokens,
                usd_pico=waived_usd,
                cny_pico=waived_cny,
            )
        )
    return lines


async def _unit_prices(c: AsyncConnection, version_id: str, model: str, team_id: str) -> dict[str, tuple[int, int]]:
    """Per meter (USD pico, CNY pico) a token; the team's own price goes before the default."""
    query = select(price_items).where(
        price_items.c.version_id == version_id,
        price_items.c.model == model,
        price_items.c.scope.in_(["default", f"team:{team_id}"]),
    )
    rows = sorted((await c.execute(query)).mappings().all(), key=lambda row: row["scope"] != "default")
    prices = {row["meter"]: (row["usd_pico"], row["cny_pico"]) for row in rows}
    for meter in ("cache_read", "cache_write"):
        prices.setdefault(meter, prices["input_uncached"])
    prices.setdefault("output_reasoning", prices["output_text"])
    return prices


async def _topup_lines(
    c: AsyncConnection, team_id: str, currency: Currency, start_ms: int, end_ms: int
) -> list[TopupLine]:
    query = (
        select(topups)
        .where(topups.c.team_id == team_id, topups.c.currency == currency)
        .where(topups.c.at_ms >= start_ms, topups.c.at_ms < end_ms)
        .order_by(topups.c.at_ms, topups.c.id)
    )
    return [
        TopupLine(
            at_ms=row["at_ms"], amount_pico=row["amount_pico"], provider=row["provider"], reference=row["reference"]
        )
        for row in (await c.execute(query)).mappings().all()
    ]


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
    """Top-ups before the month less what earlier months consumed: negative when a post-paid team owes."""
    paid_in = select(*exact_sum(topups.c.amount_pico)).where(
        topups.c.team_id == team_id, topups.c.currency == currency, topups.c.at_ms < start_ms
    )
    cost = rollups.c.cost_usd_pico if currency == "USD" else rollups.c.cost_cny_pico
    consumed = select(*exact_sum(cost)).where(rollups.c.team_id == team_id, rollups.c.period < period)
    credited = (await c.execute(paid_in)).mappings().one()
    debited = (await c.execute(consumed)).mappings().one()
    return read_sum(credited, "amount_pico") - read_sum(debited, cost.name)


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
    """The month's SETTLE records as they were journalled, by request_id: the leaves of the Merkle tree."""
    query = (
        select(usage.c.record)
        .where(usage.c.team_id == team_id, usage.c.period == period)
        .order_by(usage.c.request_id)
        .execution_options(yield_per=5_000)
    )
    async with c.stream_scalars(query) as records:
        async for record in records:
            yield bytes(record)
