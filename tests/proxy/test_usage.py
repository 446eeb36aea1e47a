"""Promises about counting: every family's usage is read alike, and what cannot be is not believed."""

from __future__ import annotations

import json

import pytest

from proxy.openai.usage import AbsurdUsage, Counts, read_usage, usage_object


@pytest.mark.parametrize(
    ("usage", "counts"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}, Counts(9, 4)),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 8},
                "completion_tokens_details": {"reasoning_tokens": 3},
            },
            Counts(9, 4, cached_tokens=8, reasoning_tokens=3),
        ),
        (
            {"prompt_tokens": 9, "completion_tokens": 4, "prompt_cache_hit_tokens": 6, "prompt_cache_miss_tokens": 3},
            Counts(9, 4, cached_tokens=6),
        ),
        ({"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": None}, Counts(9, 4)),
        ({"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}, Counts(0, 0)),
        ({"prompt_tokens": 9, "total_tokens": 9}, Counts(9, None)),
        ({"prompt_tokens": 9, "completion_tokens": None}, Counts(9, None)),
        (
            {
                "prompt_tokens": 10,
                "completion_tokens": 4,
                "total_tokens": 21,
                "completion_tokens_details": {"reasoning_tokens": 7},
            },
            Counts(10, 11, reasoning_tokens=7),
        ),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 8,
                "tallygate": {
                    "speculative": {
                        "draft_model": "qwen-0.5b",
                        "draft_tokens": 10,
                        "accepted_tokens": 6,
                        "acceptance_rate": 0.6,
                        "target_passes": 3,
                    }
                },
            },
            Counts(5, 8, draft_model="qwen-0.5b", draft_tokens=10, accepted_tokens=6, target_passes=3),
        ),
    ],
)
def test_each_family_of_providers_is_understood(usage: object, counts: Counts) -> None:
    assert read_usage(json.dumps(usage).encode()) == counts


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -1, "completion_tokens": 4},
        {"prompt_tokens": 1, "completion_tokens": 4.5},
        {"prompt_tokens": "1", "completion_tokens": 4},
        {"prompt_tokens": 1, "completion_tokens": 100_000_001},
        {"prompt_tokens": True, "completion_tokens": 1},
        [1, 2, 3],
        "many",
        10**40,
    ],
)
def test_absurd_usage_is_not_believed(usage: object) -> None:
    with pytest.raises(AbsurdUsage):
        read_usage(json.dumps(usage).encode())


def test_parts_never_exceed_the_whole() -> None:
    counts = read_usage(
        b'{"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 9},'
        b' "completion_tokens_details": {"reasoning_tokens": 7}}'
    )
    assert (counts.cached_tokens, counts.reasoning_tokens) == (3, 2)


def test_the_usage_object_is_openais_plus_one_block() -> None:
    counts = Counts(5, 8, 2, 1, 3, "qwen-0.5b", 10, 7, 3)
    usage = json.loads(
        usage_object(counts, "qwen-0.5b", billed_tokens=13, cost_usd=b"5.376", cost_cny=b"39.2448", price_version="v1")
    )
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 8,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 3},
        "tallygate": {
            "billed_tokens": 13,
            "cost_usd": "5.376",
            "cost_cny": "39.2448",
            "price_version": "v1",
            "speculative": {
                "draft_model": "qwen-0.5b",
                "draft_tokens": 10,
                "accepted_tokens": 7,
                "acceptance_rate": 0.7,
                "target_passes": 3,
            },
        },
    }
