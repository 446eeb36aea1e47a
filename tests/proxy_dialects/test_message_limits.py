"""`/v1/messages` tells the caller's limits under the names that Anthropic's clients read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import anthropic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.quotas import Limit
from policies.quotas import format_duration
from proxy.anthropic.limits import duration_ms, limit_headers
from tests.proxy.serving import Gateway
from tests.proxy.test_limits import set_limits
from tests.proxy_dialects.test_messages import ASK


def instant(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_callers_limits_are_told_with_every_message_and_refusal(gateway: Gateway, streamed: bool) -> None:
    key = gateway.new_key()
    set_limits(gateway, key, Limit("requests", "minute", 2), Limit("tokens", "minute", 50_000))
    address = f"http://127.0.0.1:{gateway.port}"
    with anthropic.Anthropic(base_url=address, api_key=key, max_retries=0) as client:
        ask = client.messages.with_raw_response.create
        began = datetime.now(UTC)
        raw = ask(model="m", messages=ASK, max_tokens=7, stream=streamed)
        list(raw.parse())
        headers = raw.headers
        for metric, limit in (("requests", 2), ("tokens", 50_000)):
            assert headers[f"anthropic-ratelimit-{metric}-limit"] == str(limit)
            remaining = headers[f"anthropic-ratelimit-{metric}-remaining"]
            assert remaining == headers[f"x-ratelimit-remaining-{metric}"]
            assert 0 < int(remaining) < limit
            reset = instant(headers[f"anthropic-ratelimit-{metric}-reset"])
            assert began <= reset <= datetime.now(UTC) + timedelta(seconds=61)
        list(ask(model="m", messages=ASK, max_tokens=7, stream=streamed).parse())
        with pytest.raises(anthropic.RateLimitError) as refusal:
            ask(model="m", messages=ASK, max_tokens=7, stream=streamed)
    headers = refusal.value.response.headers
    assert headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert instant(headers["anthropic-ratelimit-requests-reset"]) > began
    assert int(headers["retry-after"]) > 0


def test_who_has_no_limits_and_who_speaks_another_dialect_is_told_none(gateway: Gateway) -> None:
    key = gateway.new_key()
    with gateway.http(key) as http:
        unlimited = http.post("/messages", json={"model": "m", "max_tokens": 7, "messages": ASK})
        set_limits(gateway, key, Limit("requests", "day", 100))
        chat = http.post("/chat/completions", json={"model": "m", "max_tokens": 7, "messages": ASK})
    for answer in (unlimited, chat):
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("anthropic-")]


@given(st.integers(0, 40 * 86_400_000))
def test_a_reset_reads_back_to_the_millisecond(ms: int) -> None:
    assert duration_ms(format_duration(ms).encode()) == ms


def test_a_reset_is_the_next_whole_second_in_utc() -> None:
    told = limit_headers([(b"x-ratelimit-reset-requests", b"1m0.5s"), (b"x-other", b"1")], 1_796_040_000_000)
    assert told == [(b"anthropic-ratelimit-requests-reset", b"2026-11-30T12:01:01Z")]
