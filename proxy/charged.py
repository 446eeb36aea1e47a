"""What a model costs now, beside what the configuration says: once a price version is published, it is what counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ledger.errors import PriceNotFound
from ledger.money import Currency, format_price
from ledger.prices import Meters, PriceBook
from ledger.publishing import Quote

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

    from proxy.settings import Model, Settings

_FOR_EVER_MS = 1 << 62


@dataclass(frozen=True)
class Prices:
    """`charged`: model → the price in force for teams without one of their own, in words. `warnings`: a line for each
    configured price that neither is in force nor is published for later."""

    charged: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


async def prices_in_force(c: AsyncConnection, settings: Settings, now_ms: int) -> Prices:
    book, found = await PriceBook.load(c, now_ms), Prices()
    for name, model in settings.models.items():
        currency: Currency = "USD" if model.price is None else model.price.currency
        try:
            now = book.pin(name, now_ms, "")
        except PriceNotFound:
            continue
        meters, version = now.of(currency), now.version_id
        found.charged[name] = f"{in_words(meters)}, {currency} per 1M tokens (version {version})"
        wanted = _configured(name, model)
        if wanted is not None and wanted not in (meters, book.pin(name, _FOR_EVER_MS, "").of(currency)):
            found.warnings.append(
                f"{name}: the configured price ({in_words(wanted)}) is not charged; in force is {version} "
                f"({in_words(meters)}, {currency} per 1M tokens). Publish it with `tallygate price publish {name}`, or "
                "correct the configuration"
            )
    return found


def in_words(meters: Meters) -> str:
    """Input and output, and each other meter that costs something else than those."""
    texts = [f"{format_price(meters.input_uncached)} in"]
    texts += [
        f"{format_price(pico)} {name}"
        for name, pico in (("cached", meters.cache_read), ("cache write", meters.cache_write))
        if pico != meters.input_uncached
    ]
    texts.append(f"{format_price(meters.output_text)} out")
    if meters.output_reasoning != meters.output_text:
        texts.append(f"{format_price(meters.output_reasoning)} reasoning")
    return ", ".join(texts)


def _configured(name: str, model: Model) -> Meters | None:
    if model.price is None:
        return None
    fields = {item: getattr(model.price, item) for item in model.price.__struct_fields__}
    return Quote.parse(name, **fields).meters()
