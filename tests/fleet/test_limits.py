"""Limits hold across workers and hosts: two hosts with two workers each, many clients, one limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fleet.hosts import Fleet
from tests.fleet.load import BODY, Tally, load
from tests.upstream.process import FakeUpstream

CLIENTS = 200


EXPECTED = {"200", "429 rate_limit_exceeded", "503 limits_unavailable"}


def never() -> bool:
    return False


def span_s(tally: Tally) -> float:
    return max(o.at + o.took_s for o in tally.outcomes) - min(o.at for o in tally.outcomes)


async def use_up(fleet: Fleet, key: str, requests: int, **options: Any) -> Tally:
    """So many requests from all clients, and then, one by one, what is left of the limit."""
    tally = await load(fleet.ports, [key], CLIENTS, never, requests=requests, **options)
    refused = tally.count(429)
    await load(fleet.ports, [key], 1, lambda: tally.count(429) > refused, requests=5_000, tally=tally, **options)
    assert set(tally.statuses()) <= EXPECTED, tally.statuses()
    return tally


async def test_200_clients_on_two_hosts_get_a_minutes_limit_and_what_refills_meanwhile(fleet: Fleet) -> None:
    key = fleet.new_key({"metric": "requests", "window": "minute", "limit": 1_000})
    tally = await use_up(fleet, key, 1_200)
    assert 1_000 <= tally.count(200) <= 1_000 * (1 + span_s(tally) / 60)


async def test_a_burst_gets_exactly_the_limit(fleet: Fleet) -> None:
    """An hour's limit, of which a request comes back in 3.6 s."""
    key = fleet.new_key({"metric": "requests", "window": "hour", "limit": 1_000})
    tally = await use_up(fleet, key, 1_150)
    assert 1_000 <= tally.count(200) <= 1_000 + span_s(tally) / 3.6


@pytest.mark.parametrize("window", ["month", "total"])
async def test_calendar_limits_are_exact_to_the_request(fleet: Fleet, window: str) -> None:
    key = fleet.new_key({"metric": "requests", "window": window, "limit": 150})
    tally = await use_up(fleet, key, 250)
    assert tally.count(200) == 150


async def test_of_eight_concurrent_requests_there_are_never_nine(fleet: Fleet, upstream: FakeUpstream) -> None:
    """The oracle is the provider: from its own log, how many it was answering at once."""
    key = fleet.new_key({"metric": "concurrency", "limit": 8})
    fault = {"x_fault": {"first_chunk_delay_ms": 40}}
    tally = await load(fleet.ports, [key], CLIENTS, never, requests=700, body=fault)
    assert set(tally.statuses()) <= EXPECTED, tally.statuses()
    entries = upstream.wait_for_entries(tally.count(200))
    assert 4 < most_at_once(entries) <= 8


async def test_tokens_end_within_one_requests_estimate_of_the_limit(fleet: Fleet, upstream: FakeUpstream) -> None:
    limit, most_tokens = 6_000, 16
    key = fleet.new_key({"metric": "tokens", "window": "total", "limit": limit})
    tally = await use_up(fleet, key, 350, body={"max_tokens": most_tokens})
    used = sum(outcome.billed_tokens for outcome in tally.outcomes)
    produced = sum(entry["prompt_tokens"] + entry["produced_tokens"] for entry in upstream.entries())
    last = tally.outcomes[-1]
    assert last.status == 429
    assert used == produced == limit - int(last.headers["x-ratelimit-remaining-tokens"])
    estimate = len(json.dumps(BODY)) // 4 + most_tokens  # what admission charges: a token for four bytes
    assert limit - estimate < used <= limit


def most_at_once(entries: list[dict[str, Any]]) -> int:
    changes = sorted([(e["started"], 1) for e in entries] + [(e["ended"], -1) for e in entries])
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
