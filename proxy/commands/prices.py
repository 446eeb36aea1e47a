"""`tallygate price …` and `tallygate fx …`: publish dated versions, look at them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from proxy.commands.options import (
    HERE,
    ConfigOption,
    CursorOption,
    DataDirOption,
    Fail,
    JsonOption,
    LimitOption,
    act,
    currency_of,
    print_json,
    print_more,
    print_table,
    say,
    settings_in_use,
)

if TYPE_CHECKING:
    from proxy.admin.endpoints import Call
    from proxy.admin.prices import ModelPrice, Version

price = typer.Typer(no_args_is_help=True, help="Prices: dated, immutable versions.")
fx = typer.Typer(no_args_is_help=True, help="Exchange rates: dated, immutable.")

FromOption = Annotated[str | None, typer.Option("--from", help="When it takes effect; default: as soon as allowed.")]
NoteOption = Annotated[str | None, typer.Option(help="Why; kept with the version.")]
PRICE_COLUMNS = (
    "version",
    "from",
    "model",
    "scope",
    "in USD",
    "cached USD",
    "out USD",
    "in CNY",
    "cached CNY",
    "out CNY",
)


@price.command("publish", epilog="Example: tallygate price publish deepseek-v3.2 --input 0.28 --output 0.42")
def publish(
    model: Annotated[str, typer.Argument(help="The model's name.")],
    input: Annotated[str, typer.Option(help="Per 1M prompt tokens.")],
    output: Annotated[str, typer.Option(help="Per 1M generated tokens.")],
    cache_read: Annotated[str | None, typer.Option(help="Per 1M cached prompt tokens; default: stays.")] = None,
    cache_write: Annotated[str | None, typer.Option(help="Per 1M tokens written to a cache; default: stays.")] = None,
    reasoning: Annotated[str | None, typer.Option(help="Per 1M reasoning tokens; default: stays.")] = None,
    currency: Annotated[str, typer.Option(help="USD or CNY; the other one follows from the FX rate.")] = "USD",
    scope: Annotated[str, typer.Option(help="default, plan:NAME or team:ID.")] = "default",
    start: FromOption = None,
    note: NoteOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Publish a new version with this price; the other models keep theirs.

    So does what is not named: a cache price that differs from --input stays, one that is equal follows it; reasoning
    and --output likewise. A first price takes them from --input and --output.
    """
    from proxy.admin import prices

    new = prices.NewPrice(
        model=model,
        input=input,
        output=output,
        cache_read=cache_read,
        cache_write=cache_write,
        output_reasoning=reasoning,
        currency=currency_of(currency),
        scope=scope,
    )
    body = prices.NewVersion(prices=[new], effective_from=start, note=note)
    version, before = act(settings_in_use(config, data_dir, json_), _publish, body=body, writes=True)
    if json_:
        print_json(version)
    else:
        _show_change(version, before, model, scope)


async def _publish(call: Call) -> tuple[Version, list[ModelPrice]]:
    """The new version, and the prices of the one before it."""
    from ledger import audit
    from ledger.prices import items_of, latest_version
    from proxy.admin import prices

    await audit.lock(call.c)
    last = await latest_version(call.c)
    before = [] if last is None else prices.model_prices(await items_of(call.c, last.id))
    return await prices.publish(call), before


def _show_change(version: Version, before: list[ModelPrice], model: str, scope: str) -> None:
    """Each meter of the model, in the currency it is quoted in: as it was, and as it will be."""
    (new,) = (item for item in version.prices if (item.model, item.scope) == (model, scope))
    old = next((item for item in before if (item.model, item.scope) == (model, scope)), None)
    rows = []
    for meter in new.usd.__struct_fields__:
        was, now = (None if item is None else getattr(item.of(new.currency), meter) for item in (old, new))
        rows.append((meter, was or "none", now, "" if was == now else "changed" if was else "new"))
    print_table(("meter", "was", "now", "change"), rows, "")
    say(f"{version.id}: {model}, {scope}, {new.currency} per 1M tokens, in force from {version.effective_from}")


@price.command("list", epilog="Example: tallygate price list --json")
def list_(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """List price versions, the newest first."""
    from proxy.admin import prices
    from proxy.admin.endpoints import Paging

    query = Paging(limit=limit, cursor=cursor)
    found = act(settings_in_use(config, data_dir, json_), prices.list_prices, query=query)
    if json_:
        print_json(found)
    else:
        _show(found.data)
        print_more(found.next_cursor)


def _show(versions: list[Version]) -> None:
    rows = [
        (
            version.id,
            version.effective_from,
            item.model,
            item.scope,
            *(item.usd.input, item.usd.cache_read, item.usd.output),
            *(item.cny.input, item.cny.cache_read, item.cny.output),
        )
        for version in versions
        for item in version.prices
    ]
    print_table(PRICE_COLUMNS, rows, "no prices yet: tallygate price publish MODEL --input 0.28 --output 0.42")


@fx.command("set", epilog="Example: tallygate fx set USD_CNY 7.3")
def set_(
    pair: Annotated[str, typer.Argument(help="USD_CNY.")],
    rate: Annotated[str, typer.Argument(help="How many CNY one USD is worth.")],
    start: FromOption = None,
    note: NoteOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """Publish an exchange rate, and with it a price version in which the other currency follows."""
    from proxy.admin import prices

    if pair.upper() != "USD_CNY":
        raise Fail(f"only USD_CNY is kept, not {pair}", 2)
    body = prices.NewFx(rate=rate, effective_from=start, note=note)
    version = act(settings_in_use(config, data_dir, json_), prices.publish_fx, body=body, writes=True)
    if json_:
        print_json(version)
    else:
        print_table(("rate", "from", "version"), [(version.usd_cny, version.effective_from, version.id)], "")


@fx.command("list", epilog="Example: tallygate fx list")
def list_fx(
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    json_: JsonOption = False,
) -> None:
    """List exchange rates, the newest first."""
    from proxy.admin import prices
    from proxy.admin.endpoints import Paging

    found = act(settings_in_use(config, data_dir, json_), prices.list_fx, query=Paging(limit=limit, cursor=cursor))
    if json_:
        print_json(found)
        return
    rows = [(item.id, f"{item.base}_{item.quote}", item.rate, item.effective_from) for item in found.data]
    print_table(("id", "pair", "rate", "from"), rows, "no rate yet: tallygate fx set USD_CNY 7.3")
    print_more(found.next_cursor)
