"""Publishing prices and FX rates: how the next price version comes about.

A version is published at least LEAD_MS before it takes effect, so that every worker knows it in time. The first one is
exempt, and so is one that only adds models which had no price: nobody can have been charged anything else for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from hashlib import sha256

import msgspec
from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.audit import By
from ledger.errors import Conflict, Invalid
from ledger.money import CURRENCIES, MAX_SQL_PICO, Currency, FxRate, format_price, parse_price
from ledger.prices import DEFAULT_SCOPE, METERS, Meters, PriceItem, PriceVersion, items_of, latest_version
from ledger.schema import fx_rates, price_items, price_versions

LEAD_MS = 60_000
MAX_PRICE_PICO = MAX_SQL_PICO // 200_000_000
"""Per token: 100M prompt and 100M generated tokens, the most one request may report, still fit 64 bits."""


class Quote(msgspec.Struct, frozen=True):
    """What a model costs, in pico of `currency` per token. What is None costs as much as plain input or output."""

    model: str
    input: int
    output: int
    cache_read: int | None = None
    cache_write: int | None = None
    output_reasoning: int | None = None
    currency: Currency = "USD"
    scope: str = DEFAULT_SCOPE
    """default, plan:NAME or team:ID."""

    @classmethod
    def parse(
        cls,
        model: str,
        *,
        input: str,
        output: str,
        cache_read: str | None = None,
        cache_write: str | None = None,
        output_reasoning: str | None = None,
        currency: Currency = "USD",
        scope: str = DEFAULT_SCOPE,
        markup_bp: int = 0,
    ) -> Quote:
        """From prices per 1M tokens such as "0.42", marked up by basis points. Raises MoneyError."""

        def price(text: str | None) -> int | None:
            return None if text is None else round(Fraction(parse_price(text) * (10_000 + markup_bp), 10_000))

        plain_input, plain_output = price(input), price(output)
        assert plain_input is not None
        assert plain_output is not None
        rest = (price(cache_read), price(cache_write), price(output_reasoning))
        return cls(model, plain_input, plain_output, *rest, currency=currency, scope=scope)

    def meters(self) -> Meters:
        return Meters(
            self.input,
            self.input if self.cache_read is None else self.cache_read,
            self.input if self.cache_write is None else self.cache_write,
            self.output,
            self.output if self.output_reasoning is None else self.output_reasoning,
        )


async def publish_prices(
    c: AsyncConnection,
    by: By,
    quotes: Sequence[Quote],
    *,
    effective_from_ms: int | None = None,
    withdrawn: Iterable[tuple[str, str]] = (),
    note: str | None = None,
) -> PriceVersion:
    """The last version with these quotes put in (per scope and model) and the withdrawn (scope, model) pairs left out.

    effective_from_ms: the earliest time allowed, if None. Raises Invalid for a bad quote or too early a time, Conflict
    when another version is already published for that time or a later one, or when no FX rate is there yet.
    """
    await audit.lock(c)
    last = await latest_version(c)
    if last is None:
        raise Conflict("no FX rate is published yet: set one first (`tallygate fx set USD_CNY 7.3`)")
    gone = set(withdrawn)
    changed = {(quote.scope, quote.model) for quote in quotes} | gone
    kept = [item for item in await items_of(c, last.id) if (item.scope, item.model) not in changed]
    items = kept + _items(quotes, FxRate("USD", "CNY", Fraction(last.fx_numerator, last.fx_denominator)))
    start = effective_from_ms if effective_from_ms is not None else _earliest(by, last)
    same = await _published_already(c, last, start, last.fx_rate_id, items)
    if same:
        return last
    _check_start(by, start, last)
    return await _append(c, by, last, start, last.fx_rate_id, items, note)


async def publish_fx(
    c: AsyncConnection, by: By, rate: FxRate, *, effective_from_ms: int | None = None, note: str | None = None
) -> PriceVersion:
    """A new USD_CNY rate, and the price version that follows from it: prices keep the currency they were quoted in.

    The first one takes effect at once. Errors as in `publish_prices`.
    """
    await audit.lock(c)
    last = await latest_version(c)
    if (rate.base, rate.quote) != ("USD", "CNY"):
        raise Invalid(f"only USD_CNY is kept, not {rate.base}_{rate.quote}", "fx")
    if rate.ratio <= 0 or max(rate.ratio.numerator, rate.ratio.denominator) >= 10**18:
        raise Invalid("an FX rate must be positive and have at most 18 digits", "fx")
    start = effective_from_ms if effective_from_ms is not None else _earliest(by, last)
    if last is not None:
        if last.effective_from_ms == start and Fraction(last.fx_numerator, last.fx_denominator) == rate.ratio:
            return last
        _check_start(by, start, last)
    rate_id = await _insert_fx(c, by, rate, start)
    items = [] if last is None else [requote(item, rate) for item in await items_of(c, last.id)]
    return await _append(c, by, last, start, rate_id, items, note)


async def seed(c: AsyncConnection, by: By, quotes: Sequence[Quote], rate: FxRate) -> PriceVersion | None:
    """The first version, in force at once; later only the models that have no price yet are added, also at once.

    What is already priced is left alone, so this may run at every start. Returns the version it made, if any.
    """
    await audit.lock(c)
    last = await latest_version(c)
    if last is None:
        rate_id = await _insert_fx(c, by, rate, by.at_ms)
        return await _append(c, by, None, by.at_ms, rate_id, _items(quotes, rate), "from the configuration")
    known = await items_of(c, last.id)
    priced = {(item.scope, item.model) for item in known}
    new = [quote for quote in quotes if (quote.scope, quote.model) not in priced]
    if not new:
        return None
    in_force = FxRate("USD", "CNY", Fraction(last.fx_numerator, last.fx_denominator))
    start = max(by.at_ms, last.effective_from_ms + 1)
    items = known + _items(new, in_force)
    return await _append(c, by, last, start, last.fx_rate_id, items, "models added to the configuration")


async def verify_versions(c: AsyncConnection) -> tuple[int, str | None]:
    """(versions checked, what is wrong first or None): each hash follows from the content and the hash before."""
    rows = await c.execute(
        select(price_versions, fx_rates.c.numerator, fx_rates.c.denominator)
        .join(fx_rates, fx_rates.c.id == price_versions.c.fx_rate_id)
        .order_by(price_versions.c.effective_from_ms)
    )
    previous, count = "", 0
    for row in rows.all():
        ratio = Fraction(row.numerator, row.denominator)
        expected = _hash(row.id, row.effective_from_ms, ratio, await items_of(c, row.id), previous)
        if row.hash != expected:
            return count, f"price version {row.id} was changed after it was published"
        previous, count = row.hash, count + 1
    return count, None


def requote(item: PriceItem, rate: FxRate) -> PriceItem:
    """The same price at another rate: the quoted currency stays, the other one is converted, half to even."""
    if item.currency == "USD":
        cny, exact = rate.convert(item.usd_pico)
        return msgspec.structs.replace(item, cny_pico=_price(cny, item.model), fx_exact=exact)
    usd = item.cny_pico / rate.ratio
    return msgspec.structs.replace(item, usd_pico=_price(round(usd), item.model), fx_exact=usd.denominator == 1)


def _items(quotes: Sequence[Quote], rate: FxRate) -> list[PriceItem]:
    places = [(quote.scope, quote.model) for quote in quotes]
    if len(set(places)) < len(places):
        raise Invalid("a model is priced twice in the same scope", "model")
    items = []
    for quote in quotes:
        _check_quote(quote)
        for meter, pico in zip(METERS, quote.meters(), strict=True):
            price = _price(pico, quote.model)
            items.append(requote(PriceItem(quote.scope, quote.model, meter, price, price, True, quote.currency), rate))
    return items


def _check_quote(quote: Quote) -> None:
    if not quote.model:
        raise Invalid("a price needs the name of a model", "model")
    if quote.currency not in CURRENCIES:
        raise Invalid(f"unknown currency {quote.currency!r}: use USD or CNY", "currency")
    kind, _, name = quote.scope.partition(":")
    if quote.scope != DEFAULT_SCOPE and not (kind in ("plan", "team") and name):
        raise Invalid(f"unknown scope {quote.scope!r}: use default, plan:NAME or team:ID", "scope")


def _price(pico: int, model: str) -> int:
    if not 0 <= pico <= MAX_PRICE_PICO:
        raise Invalid(f"a price of {model} is out of range: 0 to {format_price(MAX_PRICE_PICO)} per 1M tokens", "price")
    return pico


def _earliest(by: By, last: PriceVersion | None) -> int:
    return by.at_ms if last is None else max(by.at_ms + LEAD_MS, last.effective_from_ms + 1)


def _check_start(by: By, start: int, last: PriceVersion) -> None:
    if start < by.at_ms + LEAD_MS:
        raise Invalid(
            f"a price version is published at least {LEAD_MS // 1000} s before it takes effect", "effective_from"
        )
    if start <= last.effective_from_ms:
        raise Conflict(f"price version {last.id} is already published for that time or later; choose a time after it")


async def _published_already(
    c: AsyncConnection, last: PriceVersion, start: int, fx_rate_id: str, items: list[PriceItem]
) -> bool:
    if (last.effective_from_ms, last.fx_rate_id) != (start, fx_rate_id):
        return False
    return sorted(await items_of(c, last.id), key=_place) == sorted(items, key=_place)


async def _insert_fx(c: AsyncConnection, by: By, rate: FxRate, start: int) -> str:
    rate_id = f"fx_{await _count(c, fx_rates.c.id) + 1}"
    values = {"base": rate.base, "quote": rate.quote, "effective_from_ms": start, "published_ms": by.at_ms}
    ratio = {"numerator": rate.ratio.numerator, "denominator": rate.ratio.denominator}
    await c.execute(insert(fx_rates).values(id=rate_id, **values, **ratio))
    await audit.record(c, by, "fx.publish", "fx_rate", rate_id, after={**values, **ratio})
    return rate_id


async def _append(
    c: AsyncConnection,
    by: By,
    last: PriceVersion | None,
    start: int,
    fx_rate_id: str,
    items: list[PriceItem],
    note: str | None,
) -> PriceVersion:
    version_id = f"pv_{await _count(c, price_versions.c.id) + 1}"
    rate = (await c.execute(select(fx_rates).where(fx_rates.c.id == fx_rate_id))).one()
    ratio = Fraction(rate.numerator, rate.denominator)
    version = PriceVersion(
        id=version_id,
        effective_from_ms=start,
        effective_to_ms=None,
        published_ms=by.at_ms,
        fx_rate_id=fx_rate_id,
        fx_numerator=ratio.numerator,
        fx_denominator=ratio.denominator,
        approved_by=by.actor,
        note=note,
        hash=_hash(version_id, start, ratio, items, "" if last is None else last.hash),
    )
    values = {name: getattr(version, name) for name in price_versions.c.keys()}  # noqa: SIM118
    await c.execute(insert(price_versions).values(values))
    if items:
        rows = [{"version_id": version_id, **msgspec.structs.asdict(i), "fx_exact": int(i.fx_exact)} for i in items]
        await c.execute(insert(price_items), rows)
    after = {"effective_from_ms": start, "fx": version.fx_text, "hash": version.hash, "note": note}
    before = None if last is None else {"version": last.id, "hash": last.hash}
    await audit.record(c, by, "price.publish", "price_version", version_id, before=before, after=after)
    return version


def _hash(version_id: str, start: int, ratio: Fraction, items: Sequence[PriceItem], previous: str) -> str:
    content = [version_id, start, ratio.numerator, ratio.denominator, sorted(items, key=_place), previous]
    return sha256(msgspec.json.encode(content)).hexdigest()


def _place(item: PriceItem) -> tuple[str, str, str]:
    return item.scope, item.model, item.meter


async def _count(c: AsyncConnection, column: object) -> int:
    count: int = (await c.execute(select(func.count(column)))).scalar_one()  # type: ignore[arg-type]
    return count
