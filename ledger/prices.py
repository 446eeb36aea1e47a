"""Prices: immutable, dated versions, and the book of them that a worker keeps in memory.

A version is complete: all models and scopes, per token and meter, in USD and CNY, with the FX rate that ties the two.
One is in force from its `effective_from_ms` until the next one's. Publishing prices or an FX rate copies the last
version, changes what was asked and appends the result (`ledger.publishing`); nothing published is ever changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.errors import NotFound, PriceNotFound
from ledger.money import Currency, format_ratio
from ledger.paging import Page, page
from ledger.schema import fx_rates, price_items, price_versions, teams

DEFAULT_SCOPE = "default"
KEPT_MS = 86_400_000
"""A book keeps the versions of the last day: a request is never admitted further back."""


class TokenCounts(Protocol):
    """Anything with the token counts of a request, such as `records.Usage`."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def cache_write_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...


class Meters(NamedTuple):
    """Pico per token, by meter. The meters partition the tokens of a request."""

    input_uncached: int
    cache_read: int
    cache_write: int
    output_text: int
    output_reasoning: int

    def cost(self, usage: TokenCounts) -> int:
        """Pico of all tokens that were used; exact."""
        uncached = usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens
        return (
            uncached * self.input_uncached
            + usage.cached_tokens * self.cache_read
            + usage.cache_write_tokens * self.cache_write
            + (usage.generated_tokens - usage.reasoning_tokens) * self.output_text
            + usage.reasoning_tokens * self.output_reasoning
        )


METERS = Meters._fields


class PinnedPrice(NamedTuple):
    """The price of one request, fixed at its admission: the version and what it says in both currencies."""

    version_id: str
    usd: Meters
    cny: Meters
    scope: str = DEFAULT_SCOPE
    """Which of the version's prices it is."""

    def of(self, currency: Currency) -> Meters:
        return self.usd if currency == "USD" else self.cny


class PriceItem(msgspec.Struct, frozen=True, array_like=True):
    """One price of a version. `fx_exact`: whether the other currency's price needed no rounding."""

    scope: str
    model: str
    meter: str
    usd_pico: int
    cny_pico: int
    fx_exact: bool
    currency: Currency
    """The one it was quoted in: a new FX rate keeps this price and moves the other."""


class PriceVersion(msgspec.Struct, frozen=True):
    """A version as published; `effective_to_ms` is derived from the next one (None: none is published)."""

    id: str
    effective_from_ms: int
    effective_to_ms: int | None
    published_ms: int
    fx_rate_id: str
    fx_numerator: int
    fx_denominator: int
    approved_by: str
    note: str | None
    hash: str

    @property
    def fx_text(self) -> str:
        """CNY per USD: "7.3", or "22/7" when that has no short decimal form."""
        return format_ratio(self.fx_numerator, self.fx_denominator)


class PublishedFx(msgspec.Struct, frozen=True):
    """A dated rate: one unit of `base` is numerator/denominator units of `quote`."""

    id: str
    base: str
    quote: str
    numerator: int
    denominator: int
    effective_from_ms: int
    published_ms: int


PriceTable = Mapping[tuple[str, str], PinnedPrice]
"""(scope, model) → price, within one version."""


class PriceBook:
    """A snapshot of the price versions, for lookups without SQL. Load a new one when the change feed tells of a
    `price_version`, or of a `team` (its plan may have changed)."""

    def __init__(self, versions: Sequence[tuple[int, PriceTable]], plans: Mapping[str, str]) -> None:
        """versions: (effective_from_ms, table), oldest first; plans: team id → plan, for teams that have one."""
        self._starts = [start for start, _ in versions]
        self._tables = [table for _, table in versions]
        self._plans = plans

    @classmethod
    async def load(cls, c: AsyncConnection, now_ms: int) -> PriceBook:
        """The versions in force within the last day, and all that are published for later."""
        first = select(func.max(price_versions.c.effective_from_ms)).where(
            price_versions.c.effective_from_ms <= now_ms - KEPT_MS
        )
        start = (await c.execute(first)).scalar_one() or 0
        wanted = (
            select(price_versions.c.id, price_versions.c.effective_from_ms)
            .where(price_versions.c.effective_from_ms >= start)
            .order_by(price_versions.c.effective_from_ms)
        )
        found = (await c.execute(wanted)).all()
        versions = [(row.effective_from_ms, _table(row.id, await items_of(c, row.id))) for row in found]
        plans = await c.execute(select(teams.c.id, teams.c.plan).where(teams.c.plan.is_not(None)))
        return cls(versions, {row.id: row.plan for row in plans})

    def pin(self, model: str, at_ms: int, team_id: str) -> PinnedPrice:
        """The price in force at that time: the team's own, else its plan's, else the default. Raises PriceNotFound."""
        index = bisect_right(self._starts, at_ms) - 1
        price = _lookup(self._tables[index], model, team_id, self._plans.get(team_id)) if index >= 0 else None
        if price is None:
            raise PriceNotFound(f"no price is in force for model {model!r}: publish one (`tallygate price publish`)")
        return price

    def next_start(self, at_ms: int) -> int | None:
        """When the version after the one in force at that time takes over; None: none is published."""
        index = bisect_right(self._starts, at_ms)
        return self._starts[index] if index < len(self._starts) else None

    def models(self, at_ms: int) -> list[str]:
        """The models that have any price at that time, sorted."""
        index = bisect_right(self._starts, at_ms) - 1
        return sorted({model for _, model in self._tables[index]}) if index >= 0 else []


async def pinned(
    c: AsyncConnection, version_id: str, model: str, team_id: str, scope: str | None = None
) -> PinnedPrice:
    """What a version, of any age, says for a model in that scope; None: in the one that the team has today.

    Raises PriceNotFound."""
    table = _table(version_id, await items_of(c, version_id))
    if scope is not None:
        price = table.get((scope, model))
    else:
        plan = (await c.execute(select(teams.c.plan).where(teams.c.id == team_id))).scalar_one_or_none()
        price = _lookup(table, model, team_id, plan)
    if price is None:
        raise PriceNotFound(f"price version {version_id!r} has no price for model {model!r}")
    return price


async def items_of(c: AsyncConnection, version_id: str) -> list[PriceItem]:
    """All prices of a version, sorted by scope, model and meter."""
    columns = [price_items.c[name] for name in PriceItem.__struct_fields__]
    rows = await c.execute(select(*columns).where(price_items.c.version_id == version_id))
    return sorted(map(_item, rows), key=lambda item: (item.scope, item.model, item.meter))


async def list_items(
    c: AsyncConnection, version_id: str, *, cursor: str | None = None, limit: int = 100
) -> Page[PriceItem]:
    """The prices of a version in pages, by scope, model and meter."""
    columns = [price_items.c[name] for name in PriceItem.__struct_fields__]
    query = select(*columns).where(price_items.c.version_id == version_id)
    key = [price_items.c.scope, price_items.c.model, price_items.c.meter]
    return await page(c, query, key, _item, cursor=cursor, limit=limit)


async def get_version(c: AsyncConnection, version_id: str) -> PriceVersion:
    """Raises NotFound."""
    numbered = _versions().subquery()
    row = (await c.execute(select(numbered).where(numbered.c.id == version_id))).one_or_none()
    if row is None:
        raise NotFound(f"no price version {version_id!r}")
    return PriceVersion(**row._mapping)


async def latest_version(c: AsyncConnection) -> PriceVersion | None:
    """The one published last, which is also the one in force last."""
    row = (await c.execute(_versions().order_by(price_versions.c.effective_from_ms.desc()).limit(1))).one_or_none()
    return None if row is None else PriceVersion(**row._mapping)


async def list_versions(c: AsyncConnection, *, cursor: str | None = None, limit: int = 100) -> Page[PriceVersion]:
    """Newest first."""
    numbered = _versions().subquery()
    key = [numbered.c.effective_from_ms]
    return await page(c, select(numbered), key, _version, cursor=cursor, limit=limit, newest_first=True)


async def list_fx(c: AsyncConnection, *, cursor: str | None = None, limit: int = 100) -> Page[PublishedFx]:
    """Newest first."""
    columns = [fx_rates.c[name] for name in PublishedFx.__struct_fields__]
    key = [fx_rates.c.effective_from_ms, fx_rates.c.id]
    return await page(c, select(*columns), key, _fx, cursor=cursor, limit=limit, newest_first=True)


def _versions() -> Select[Any]:
    following = func.lead(price_versions.c.effective_from_ms).over(order_by=price_versions.c.effective_from_ms)
    return select(
        *(price_versions.c[name] for name in ("id", "effective_from_ms", "published_ms", "fx_rate_id")),
        following.label("effective_to_ms"),
        fx_rates.c.numerator.label("fx_numerator"),
        fx_rates.c.denominator.label("fx_denominator"),
        *(price_versions.c[name] for name in ("approved_by", "note", "hash")),
    ).join(fx_rates, fx_rates.c.id == price_versions.c.fx_rate_id)


def _version(row: Any) -> PriceVersion:
    return PriceVersion(**row._mapping)


def _item(row: Any) -> PriceItem:
    return PriceItem(**{**row._mapping, "fx_exact": bool(row.fx_exact)})


def _fx(row: Any) -> PublishedFx:
    return PublishedFx(**row._mapping)


def _table(version_id: str, items: Sequence[PriceItem]) -> PriceTable:
    found: dict[tuple[str, str], dict[str, PriceItem]] = {}
    for item in items:
        found.setdefault((item.scope, item.model), {})[item.meter] = item
    return {
        place: PinnedPrice(
            version_id,
            Meters(*(meters[name].usd_pico for name in METERS)),
            Meters(*(meters[name].cny_pico for name in METERS)),
            place[0],
        )
        for place, meters in found.items()
    }


def _lookup(table: PriceTable, model: str, team_id: str, plan: str | None) -> PinnedPrice | None:
    return (
        table.get((f"team:{team_id}", model))
        or (table.get((f"plan:{plan}", model)) if plan else None)
        or table.get((DEFAULT_SCOPE, model))
    )
