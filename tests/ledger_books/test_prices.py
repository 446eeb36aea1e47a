from __future__ import annotations

from fractions import Fraction

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import insert, text
from sqlalchemy.exc import DBAPIError

from ledger.audit import By
from ledger.database import Database
from ledger.errors import Conflict, Invalid, PriceNotFound
from ledger.money import FxRate, format_amount
from ledger.prices import (
    METERS,
    Meters,
    PriceBook,
    PriceItem,
    get_version,
    items_of,
    latest_version,
    list_fx,
    list_items,
    list_versions,
    pinned,
)
from ledger.publishing import LEAD_MS, MAX_PRICE_PICO, Quote, publish_fx, publish_prices, requote, seed, verify_versions
from ledger.records import Usage
from ledger.schema import teams
from tests.ledger_books.conftest import NOW_MS, tampering

DEEPSEEK = Quote.parse("deepseek-v3.2", input="0.28", cache_read="0.028", output="0.42")
RATE = FxRate.parse("USD", "CNY", "7.3")


@pytest.fixture
async def seeded(db: Database, by: By) -> Database:
    async with db.begin() as c:
        await seed(c, by, [DEEPSEEK], RATE)
    return db


async def book(db: Database, now_ms: int = NOW_MS) -> PriceBook:
    async with db.read() as c:
        return await PriceBook.load(c, now_ms)


def later(ms: int = 0) -> By:
    return By("ada", NOW_MS + ms)


async def test_12_8M_output_tokens_of_deepseek_cost_5_376_USD_and_39_2448_CNY(seeded: Database) -> None:
    price = (await book(seeded)).pin("deepseek-v3.2", NOW_MS, "any")
    usage = Usage(generated_tokens=12_800_000)
    assert format_amount(price.usd.cost(usage)) == "5.376"
    assert format_amount(price.cny.cost(usage)) == "39.2448"
    one_by_one = sum(price.cny.cost(Usage(generated_tokens=1)) for _ in range(1000))
    assert one_by_one * 12_800 == price.of("CNY").cost(usage)


@given(
    st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)
)
def test_meters_partition_the_tokens(uncached: int, read: int, write: int, text_: int, reasoning: int) -> None:
    usage = Usage(uncached + read + write, read, write, text_ + reasoning, reasoning)
    assert Meters(1, 1, 1, 1, 1).cost(usage) == usage.prompt_tokens + usage.generated_tokens
    assert Meters(2, 3, 5, 7, 11).cost(usage) == 2 * uncached + 3 * read + 5 * write + 7 * text_ + 11 * reasoning


async def test_cache_and_reasoning_prices_default_to_plain_input_and_output(seeded: Database) -> None:
    price = (await book(seeded)).pin("deepseek-v3.2", NOW_MS, "any")
    assert price.usd == Meters(280_000, 28_000, 280_000, 420_000, 420_000)
    assert price.cny == Meters(2_044_000, 204_400, 2_044_000, 3_066_000, 3_066_000)


async def test_the_first_version_takes_effect_at_once_and_seeding_again_changes_nothing(seeded: Database) -> None:
    async with seeded.begin() as c:
        assert await seed(c, later(5000), [Quote.parse("deepseek-v3.2", input="9", output="9")], RATE) is None
        version = await latest_version(c)
    assert version is not None
    assert (version.id, version.effective_from_ms, version.fx_text) == ("pv_1", NOW_MS, "7.3")
    with pytest.raises(PriceNotFound):
        (await book(seeded)).pin("deepseek-v3.2", NOW_MS - 1, "any")


async def test_a_model_new_in_the_configuration_is_priced_at_once_and_moves_no_other_price(seeded: Database) -> None:
    other = Quote.parse("other", input="1", output="2")
    async with seeded.begin() as c:
        made = await seed(c, later(5000), [Quote.parse("deepseek-v3.2", input="9", output="9"), other], RATE)
    assert made is not None
    prices = await book(seeded)
    assert prices.pin("other", NOW_MS + 5000, "any").usd.output_text == 2_000_000
    assert prices.pin("deepseek-v3.2", NOW_MS + 5000, "any").usd.output_text == 420_000
    assert prices.models(NOW_MS + 5000) == ["deepseek-v3.2", "other"]


async def test_a_model_without_a_price_is_refused_and_a_free_one_costs_an_explicit_zero(seeded: Database) -> None:
    with pytest.raises(PriceNotFound, match="nothing"):
        (await book(seeded)).pin("nothing", NOW_MS, "any")
    async with seeded.begin() as c:
        await seed(c, later(1), [Quote.parse("free", input="0", output="0")], RATE)
    assert (await book(seeded)).pin("free", NOW_MS + 1, "any").usd == Meters(0, 0, 0, 0, 0)


async def test_a_version_is_published_60_s_before_it_takes_effect(seeded: Database) -> None:
    dearer = Quote.parse("deepseek-v3.2", input="1", output="2")
    async with seeded.begin() as c:
        with pytest.raises(Invalid, match="60 s"):
            await publish_prices(c, later(), [dearer], effective_from_ms=NOW_MS + LEAD_MS - 1)
        version = await publish_prices(c, later(), [dearer], effective_from_ms=NOW_MS + LEAD_MS)
    prices = await book(seeded)
    assert prices.pin("deepseek-v3.2", version.effective_from_ms - 1, "any").version_id == "pv_1"
    assert prices.pin("deepseek-v3.2", version.effective_from_ms, "any").version_id == "pv_2"


async def test_effective_to_is_where_the_next_version_starts(seeded: Database) -> None:
    async with seeded.begin() as c:
        second = await publish_prices(c, later(), [Quote.parse("deepseek-v3.2", input="1", output="2")])
        assert (await get_version(c, "pv_1")).effective_to_ms == second.effective_from_ms == NOW_MS + LEAD_MS
        assert (await get_version(c, second.id)).effective_to_ms is None


async def test_versions_never_overlap_or_go_back(seeded: Database) -> None:
    quote = Quote.parse("deepseek-v3.2", input="1", output="2")
    async with seeded.begin() as c:
        version = await publish_prices(c, later(), [quote], effective_from_ms=NOW_MS + 10 * LEAD_MS)
        other = msgspec.structs.replace(quote, input=7)
        for start in (NOW_MS + 10 * LEAD_MS, NOW_MS + 5 * LEAD_MS):
            with pytest.raises(Conflict, match="pv_2 is already published"):
                await publish_prices(c, later(), [other], effective_from_ms=start)
        again = await publish_prices(c, later(), [quote], effective_from_ms=NOW_MS + 10 * LEAD_MS)
    assert again.id == version.id


async def test_a_new_fx_rate_publishes_a_new_version_that_moves_only_the_other_currency(seeded: Database) -> None:
    async with seeded.begin() as c:
        await seed(c, later(1), [Quote.parse("domestic", input="2", output="8", currency="CNY")], RATE)
        version = await publish_fx(c, later(2), FxRate.parse("USD", "CNY", "8"))
        assert [rate.numerator for rate in (await list_fx(c)).items] == [8, 73]
    before = (await book(seeded)).pin("domestic", NOW_MS + 1, "any")
    prices = await book(seeded)
    dollar = prices.pin("deepseek-v3.2", version.effective_from_ms, "any")
    yuan = prices.pin("domestic", version.effective_from_ms, "any")
    assert (dollar.usd.output_text, dollar.cny.output_text) == (420_000, 3_360_000)
    assert (yuan.usd.output_text, yuan.cny.output_text) == (1_000_000, 8_000_000)
    assert before.usd.output_text == round(8_000_000 / 7.3)


@given(st.integers(0, 10**9), st.fractions(min_value=Fraction(1, 100), max_value=100).filter(bool))
def test_an_fx_rate_that_does_not_divide_is_rounded_half_to_even_and_flagged(pico: int, ratio: Fraction) -> None:
    item = requote(PriceItem("default", "m", "output_text", pico, 0, True, "USD"), FxRate("USD", "CNY", ratio))
    assert item.cny_pico == round(pico * ratio)
    assert item.fx_exact == ((pico * ratio).denominator == 1)


async def test_inexact_prices_are_flagged_in_the_published_version(seeded: Database) -> None:
    async with seeded.begin() as c:
        version = await publish_fx(c, later(), FxRate("USD", "CNY", Fraction(22, 7)))
        assert version.fx_text == "22/7"
        flags = {(item.meter, item.usd_pico): item.fx_exact for item in await items_of(c, version.id)}
    assert flags[("output_text", 420_000)] is True
    async with seeded.begin() as c:
        version = await publish_fx(c, later(), FxRate("USD", "CNY", Fraction(1, 11)))
        items = [item for item in await items_of(c, version.id) if item.meter == "output_text"]
    assert [(item.cny_pico, item.fx_exact) for item in items] == [(38_182, False)]


async def test_a_team_price_wins_over_its_plan_and_that_over_the_default(seeded: Database) -> None:
    async with seeded.begin() as c:
        row = {"name": "t", "billing_currency": "USD", "timezone": "UTC", "created_ms": NOW_MS}
        await c.execute(insert(teams), [{"id": team, "plan": "gold", **row} for team in ("acme", "bolt")])
        gold = Quote.parse("deepseek-v3.2", input="0.28", output="0.42", scope="plan:gold", markup_bp=-1000)
        acme = Quote.parse("deepseek-v3.2", input="0.28", output="0.42", scope="team:acme", markup_bp=2500)
        start = (await publish_prices(c, later(), [gold, acme])).effective_from_ms
        assert (await pinned(c, "pv_2", "deepseek-v3.2", "bolt")).usd.output_text == 378_000
    prices = await book(seeded)
    outputs = [prices.pin("deepseek-v3.2", start, team).usd.output_text for team in ("acme", "bolt", "city")]
    assert outputs == [525_000, 378_000, 420_000]
    async with seeded.begin() as c:
        start = (await publish_prices(c, later(), [], withdrawn=[("team:acme", "deepseek-v3.2")])).effective_from_ms
    assert (await book(seeded)).pin("deepseek-v3.2", start, "acme").usd.output_text == 378_000


@pytest.mark.parametrize("table", ["price_versions", "price_items", "fx_rates"])
async def test_what_is_published_cannot_be_changed_or_deleted(seeded: Database, table: str) -> None:
    column = {"price_versions": "hash", "price_items": "model", "fx_rates": "base"}[table]
    for statement in (f"UPDATE {table} SET {column} = 'x'", f"DELETE FROM {table}"):
        with pytest.raises(DBAPIError, match="append-only"):
            async with seeded.begin() as c:
                await c.execute(text(statement))


async def test_a_price_changed_behind_our_back_is_found(seeded: Database) -> None:
    async with seeded.begin() as c:
        await publish_fx(c, later(), FxRate.parse("USD", "CNY", "7.2"))
        assert await verify_versions(c) == (2, None)
    async with tampering(seeded, "price_items") as c:
        await c.execute(text("UPDATE price_items SET cny_pico = 1 WHERE version_id = 'pv_1' AND meter = 'cache_read'"))
        assert await verify_versions(c) == (0, "price version pv_1 was changed after it was published")


@pytest.mark.parametrize(
    ("quote", "message"),
    [
        (Quote("", 1, 1), "name of a model"),
        (Quote("m", -1, 1), "out of range"),
        (Quote("m", 1, MAX_PRICE_PICO + 1), "out of range"),
        (Quote("m", 1, 1, scope="planet:mars"), "unknown scope"),
        (Quote("m", 1, 1, scope="team:"), "unknown scope"),
        (Quote("m", 1, 1, currency="EUR"), "unknown currency"),  # type: ignore[arg-type]
    ],
)
async def test_a_bad_quote_is_refused(seeded: Database, quote: Quote, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        async with seeded.begin() as c:
            await publish_prices(c, later(), [quote])


async def test_the_dearest_price_times_the_most_tokens_fits_64_bits() -> None:
    usage = Usage(prompt_tokens=100_000_000, generated_tokens=100_000_000)
    assert Meters(*[MAX_PRICE_PICO] * 5).cost(usage) < 2**63


async def test_prices_need_an_fx_rate_first(db: Database, by: By) -> None:
    with pytest.raises(Conflict, match="fx set"):
        async with db.begin() as c:
            await publish_prices(c, by, [DEEPSEEK])
    async with db.begin() as c:
        assert (await publish_fx(c, by, RATE)).effective_from_ms == NOW_MS
        await publish_prices(c, by, [DEEPSEEK])


async def test_versions_are_listed_newest_first_in_pages(seeded: Database) -> None:
    async with seeded.begin() as c:
        for rate in ("7.1", "7.2", "7.25"):
            await publish_fx(c, later(), FxRate.parse("USD", "CNY", rate))
        first = await list_versions(c, limit=2)
        second = await list_versions(c, limit=2, cursor=first.next_cursor)
    assert [version.fx_text for version in first.items] == ["7.25", "7.2"]
    assert [version.fx_text for version in second.items] == ["7.1", "7.3"]
    assert second.items[0].effective_to_ms == first.items[-1].effective_from_ms
    assert second.next_cursor is None


async def test_a_book_leaves_out_versions_that_ended_more_than_a_day_ago(seeded: Database) -> None:
    async with seeded.begin() as c:
        await publish_fx(c, later(), FxRate.parse("USD", "CNY", "7.1"))
    much_later = NOW_MS + 3 * 86_400_000
    prices = await book(seeded, much_later)
    assert prices.pin("deepseek-v3.2", much_later, "any").version_id == "pv_2"
    with pytest.raises(PriceNotFound):
        prices.pin("deepseek-v3.2", NOW_MS, "any")


async def test_the_prices_of_a_version_are_listed_in_pages(seeded: Database) -> None:
    found: list[PriceItem] = []
    cursor = None
    async with seeded.read() as c:
        while True:
            some = await list_items(c, "pv_1", cursor=cursor, limit=2)
            found += some.items
            cursor = some.next_cursor
            if cursor is None:
                break
        assert found == await items_of(c, "pv_1")
    assert len(found) == len(METERS)
