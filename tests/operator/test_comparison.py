"""Percentiles of a histogram are those of the values themselves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ledger.comparison import percentile


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=200), st.integers(1, 100))
def test_a_percentile_is_the_nearest_rank_of_the_sorted_values(values: list[int], percent: int) -> None:
    rank = -(-len(values) * percent // 100)
    assert percentile(sorted(Counter(values).items()), percent) == sorted(values)[rank - 1]


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 50) is None
