"""Prices and FX rates: dated versions that nobody changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ledger import audit, publishing
from ledger import prices as book
from ledger.errors import Invalid
from ledger.money import Currency, FxRate, format_price, format_ratio
from ledger.prices import Meters, PriceItem, PriceVersion
from ledger.publishing import Quote
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Paging, Strict
from proxy.admin.times import Instant, iso, parse_instant, required_iso

_SPECIAL = (
    ("cache_read", "cache_read", "input_uncached"),
    ("cache_write", "cache_write", "input_uncached"),
    ("output_reasoning", "output_reasoning", "output_text"),
)
"""Field, its meter, and the meter that it costs as much as where nobody said otherwise."""


def _quoted(item: PriceItem) -> int:
    return item.usd_pico if item.currency == "USD" else item.cny_pico


class NewPrice(Strict, frozen=True, kw_only=True):
    """Per 1M tokens, as decimal strings. What is not named keeps its price; what cost as much as `input` (reasoning: as
    `output`), or never had a price, goes on costing as much."""

    model: str
    input: str
    output: str
    cache_read: str | None = None
    cache_write: str | None = None
    output_reasoning: str | None = None
    currency: Currency = "USD"
    scope: str = book.DEFAULT_SCOPE
    markup_bp: int = 0

    def quote(self, last: Mapping[str, PriceItem]) -> Quote:
        """last: meter → the price that the last version has for this model and scope, if any. Raises Invalid."""
        if not -10_000 <= self.markup_bp <= 1_000_000:
            raise Invalid("markup_bp is in basis points, -10000 to 1000000", "markup_bp")
        quote = Quote.parse(**{name: getattr(self, name) for name in self.__struct_fields__})
        kept = {
            name: self._kept(name, last[meter])
            for name, meter, base in _SPECIAL
            if getattr(self, name) is None and last and _quoted(last[meter]) != _quoted(last[base])
        }
        return msgspec.structs.replace(quote, **kept)

    def _kept(self, name: str, item: PriceItem) -> int:
        if item.currency != self.currency:
            raise Invalid(
                f"{name} costs {format_price(_quoted(item))} {item.currency}: name it too where the currency changes",
                name,
            )
        return _quoted(item)


class Withdrawn(Strict, frozen=True, kw_only=True):
    model: str
    scope: str = book.DEFAULT_SCOPE


class NewVersion(Strict, frozen=True, kw_only=True):
    """One price at the top level, or several in `prices`. Models not named keep theirs."""

    prices: list[NewPrice] = msgspec.field(default_factory=list)
    withdrawn: list[Withdrawn] = msgspec.field(default_factory=list)
    effective_from: Instant | None = None
    note: str | None = None
    model: str | None = None
    input: str | None = None
    output: str | None = None
    cache_read: str | None = None
    cache_write: str | None = None
    output_reasoning: str | None = None
    currency: Currency = "USD"
    scope: str = book.DEFAULT_SCOPE
    markup_bp: int = 0

    def all_prices(self) -> list[NewPrice]:
        """Raises Invalid when there is nothing to publish or half a price."""
        if self.model is None:
            if not self.prices and not self.withdrawn:
                raise Invalid("give a model with input and output, or a list of prices", "prices")
            return self.prices
        if self.input is None or self.output is None:
            missing = "input" if self.input is None else "output"
            raise Invalid(f"the price of {self.model} needs `{missing}`", missing)
        given = {name: getattr(self, name) for name in NewPrice.__struct_fields__}
        return [*self.prices, NewPrice(**given)]


class MeterPrices(msgspec.Struct, frozen=True):
    input: str
    cache_read: str
    cache_write: str
    output: str
    output_reasoning: str

    @classmethod
    def of(cls, meters: Meters) -> MeterPrices:
        return cls(*(format_price(pico) for pico in meters))


class ModelPrice(msgspec.Struct, frozen=True):
    """Per 1M tokens in both currencies; `currency` is the one it was quoted in."""

    model: str
    scope: str
    currency: str
    usd: MeterPrices
    cny: MeterPrices
    fx_exact: bool

    def of(self, currency: str) -> MeterPrices:
        return self.usd if currency == "USD" else self.cny


class Version(msgspec.Struct, frozen=True):
    id: str
    effective_from: str
    effective_to: str | None
    published_at: str
    fx_rate_id: str
    usd_cny: str
    approved_by: str
    note: str | None
    hash: str
    prices: list[ModelPrice]


class NewFx(Strict, frozen=True, kw_only=True):
    rate: str
    base: Literal["USD"] = "USD"
    quote: Literal["CNY"] = "CNY"
    effective_from: Instant | None = None
    note: str | None = None


class Fx(msgspec.Struct, frozen=True):
    id: str
    base: str
    quote: str
    rate: str
    effective_from: str
    published_at: str


def model_prices(items: list[PriceItem]) -> list[ModelPrice]:
    """The items of a version, one line for each scope and model."""
    return [
        ModelPrice(
            model,
            scope,
            next(iter(meters.values())).currency,
            MeterPrices.of(Meters(*(meters[name].usd_pico for name in book.METERS))),
            MeterPrices.of(Meters(*(meters[name].cny_pico for name in book.METERS))),
            all(item.fx_exact for item in meters.values()),
        )
        for (scope, model), meters in _by_model(items).items()
    ]


def _by_model(items: list[PriceItem]) -> dict[tuple[str, str], dict[str, PriceItem]]:
    grouped: dict[tuple[str, str], dict[str, PriceItem]] = {}
    for item in items:
        grouped.setdefault((item.scope, item.model), {})[item.meter] = item
    return grouped


def version_answer(version: PriceVersion, items: list[PriceItem]) -> Version:
    return Version(
        version.id,
        required_iso(version.effective_from_ms),
        iso(version.effective_to_ms),
        required_iso(version.published_ms),
        version.fx_rate_id,
        version.fx_text,
        version.approved_by,
        version.note,
        version.hash,
        model_prices(items),
    )


async def publish(call: Call) -> Version:
    body: NewVersion = call.body
    await audit.lock(call.c)  # no other version comes between what is read here and what is published
    last = await last_meters(call)
    version = await publishing.publish_prices(
        call.c,
        call.by,
        [price.quote(last.get((price.scope, price.model), {})) for price in body.all_prices()],
        effective_from_ms=parse_instant(
            body.effective_from, "effective_from", call.installation.settings.billing.timezone
        ),
        withdrawn=[(item.scope, item.model) for item in body.withdrawn],
        note=body.note,
    )
    return version_answer(version, await book.items_of(call.c, version.id))


async def last_meters(call: Call) -> dict[tuple[str, str], dict[str, PriceItem]]:
    """(scope, model) → meter → price, of the version that is published last."""
    last = await book.latest_version(call.c)
    return {} if last is None else _by_model(await book.items_of(call.c, last.id))


async def list_prices(call: Call) -> Listing[Version]:
    found = await book.list_versions(call.c, cursor=call.query.cursor, limit=call.query.limit)
    answers = [version_answer(version, await book.items_of(call.c, version.id)) for version in found.items]
    return Listing(answers, found.next_cursor)


async def publish_fx(call: Call) -> Version:
    body: NewFx = call.body
    start = parse_instant(body.effective_from, "effective_from", call.installation.settings.billing.timezone)
    rate = FxRate.parse(body.base, body.quote, body.rate)
    version = await publishing.publish_fx(call.c, call.by, rate, effective_from_ms=start, note=body.note)
    return version_answer(version, await book.items_of(call.c, version.id))


async def list_fx(call: Call) -> Listing[Fx]:
    found = await book.list_fx(call.c, cursor=call.query.cursor, limit=call.query.limit)
    answers = [
        Fx(
            item.id,
            item.base,
            item.quote,
            format_ratio(item.numerator, item.denominator),
            required_iso(item.effective_from_ms),
            required_iso(item.published_ms),
        )
        for item in found.items
    ]
    return Listing(answers, found.next_cursor)


ENDPOINTS = [
    Endpoint("POST", "/prices", "Publish a price version", publish, Version, body=NewVersion, status=201),
    Endpoint("GET", "/prices", "List price versions", list_prices, Listing[Version], EVERYONE, query=Paging),
    Endpoint("POST", "/fx-rates", "Publish an FX rate", publish_fx, Version, body=NewFx, status=201),
    Endpoint("GET", "/fx-rates", "List FX rates", list_fx, Listing[Fx], EVERYONE, query=Paging),
]
