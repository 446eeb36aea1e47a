"""Properties of the pure core."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ledger.billing import (
    KEEP_ORDER,
    Limit,
    WorstCase,
    affordable_output,
    bill,
    billed_by_meter,
    cost,
    keep,
    next_window,
    slice_size,
    split,
    tokens_by_meter,
    waive_all,
)
from ledger.records import Usage

counts = st.integers(0, 10_000)
rates = st.tuples(*[st.integers(0, 1_000_000)] * 5)
tokens = st.tuples(*[counts] * 5)
limits = st.none() | st.integers(0, 10**10)


@given(tokens, rates, rates, limits, limits)
def test_a_bill_stays_within_its_limits_and_loses_no_token(used, usd, cny, limit_usd, limit_cny):
    paid = bill(used, usd, cny, limit_usd, limit_cny)
    assert 0 <= paid.billed_tokens <= sum(used)
    assert limit_usd is None or paid.usd_pico <= limit_usd
    assert limit_cny is None or paid.cny_pico <= limit_cny
    assert paid.usd_pico + paid.waived_usd_pico == cost(used, usd)
    assert paid.cny_pico + paid.waived_cny_pico == cost(used, cny)
    assert paid.usd_pico == cost(keep(used, paid.billed_tokens), usd)


@given(tokens, rates, rates, limits, limits)
def test_a_bill_takes_all_that_the_limits_give(used, usd, cny, limit_usd, limit_cny):
    paid = bill(used, usd, cny, limit_usd, limit_cny)
    if paid.billed_tokens < sum(used):
        more = keep(used, paid.billed_tokens + 1)
        over_usd = limit_usd is not None and cost(more, usd) > limit_usd
        over_cny = limit_cny is not None and cost(more, cny) > limit_cny
        assert over_usd or over_cny


@given(tokens, rates, rates)
def test_a_waived_request_bills_nothing_and_books_its_price(used, usd, cny):
    paid = waive_all(used, usd, cny)
    assert (paid.billed_tokens, paid.usd_pico, paid.cny_pico) == (0, 0, 0)
    assert paid.waived_usd_pico == cost(used, usd)


@given(counts, counts, counts, counts, counts, st.integers(0, 100_000))
def test_meters_partition_the_tokens(uncached, cached, written, text, reasoning, billed):
    usage = Usage(
        prompt_tokens=uncached + cached + written,
        cached_tokens=cached,
        cache_write_tokens=written,
        generated_tokens=text + reasoning,
        reasoning_tokens=reasoning,
        billed_tokens=min(billed, uncached + cached + written + text + reasoning),
    )
    assert tokens_by_meter(usage) == (uncached, cached, written, text, reasoning)
    kept = billed_by_meter(usage)
    assert sum(kept) == usage.billed_tokens
    short = [meter for meter in KEEP_ORDER if kept[meter] < tokens_by_meter(usage)[meter]]
    assert all(kept[meter] == 0 for meter in short[1:])


@given(counts, counts, st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**6), st.integers(0, 10**6))))
def test_affordable_output_is_the_most_that_every_limit_covers(prompt, wanted, places):
    places = [Limit(available, WorstCase(p, o)) for available, p, o in places]

    def covered(output: int) -> bool:
        return all(available >= prompt * w.prompt_pico + output * w.output_pico for available, w in places)

    tokens = affordable_output(prompt, wanted, places)
    if tokens is None:
        assert not covered(0)
    else:
        assert covered(tokens)
        assert tokens == wanted or not covered(tokens + 1)


@given(st.lists(st.integers(0, 1000)), st.data())
def test_a_charge_is_split_exactly_and_in_order(there, data):
    amount = data.draw(st.integers(0, sum(there)))
    parts = split(amount, list(enumerate(there)))
    assert sum(part for _, part in parts) == amount
    assert all(part == there[account] for account, part in parts[:-1])
    assert [account for account, _ in parts] == sorted({account for account, _ in parts})


@given(st.integers(0, 10**15), st.integers(-(10**6), 10**15), st.integers(0, 64))
def test_a_slice_is_no_more_than_is_free_and_what_is_needed_if_it_is_there(needed, free, slots):
    size = slice_size(needed, free, slots)
    assert 0 <= size <= max(0, free)
    assert size >= min(needed, max(0, free))
    assert size <= max(needed, free // 2, 0)


@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_a_window_never_passes_the_most_that_was_asked_for(delivered, most):
    assert next_window(delivered, most) <= most
    assert next_window(delivered, most) - delivered <= 1_024
