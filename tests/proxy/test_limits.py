"""Limits and money at the gate: exact waits, small balances, streams that end when the money does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ledger import keys, quotas, topups
from ledger.audit import By
from ledger.keys import KeyHasher
from ledger.quotas import Limit, Scope
from proxy.secrets import key_secret
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import wait_until
from tests.upstream.process import FakeUpstream

HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def limited(tmp_path: Path, upstream: FakeUpstream) -> Iterator[Gateway]:
    long = {"deployments": [{"to": "legacy", "model": "gpt-4@endless"}], "price": PRICE}
    capped = {"max_output_tokens": 1_000}
    with Gateway(tmp_path, configuration({"legacy": upstream.base_url}, m={}, long=long, capped=capped)) as gateway:
        yield gateway


def by() -> By:
    return By("test", time.time_ns() // 1_000_000)


def set_limits(gateway: Gateway, secret: str, *limits: Limit) -> str:
    """Limit a key; returns its id. The worker sees it within a second."""

    async def change(c: Any) -> str:
        record = await keys.find_by_hash(c, KeyHasher(key_secret(gateway.settings))(secret))
        assert record is not None
        await quotas.replace_quotas(c, by(), Scope.of_key(record.key_id), limits)
        return record.key_id

    key_id: str = gateway.ledger(change)
    return key_id


def test_requests_per_minute_refuse_with_the_exact_wait_and_the_callers_numbers(limited: Gateway) -> None:
    secret = limited.new_key()
    set_limits(limited, secret, Limit("requests", "minute", 2))
    create = limited.client(secret).chat.completions.with_raw_response.create
    raw = create(model="m", messages=HELLO)
    assert raw.headers["x-ratelimit-limit-requests"] == "2"
    assert raw.headers["x-ratelimit-remaining-requests"] == "1"
    create(model="m", messages=HELLO)
    with pytest.raises(openai.RateLimitError) as caught:
        create(model="m", messages=HELLO)
    headers = caught.value.response.headers
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")
    assert headers["x-should-retry"] == "true"
    assert 0 < int(headers["retry-after-ms"]) <= 60_000
    assert int(headers["retry-after"]) == -(-int(headers["retry-after-ms"]) // 1000)
    assert headers["x-ratelimit-remaining-requests"] == "0"


def test_a_request_refused_for_money_uses_up_no_request_quota(limited: Gateway) -> None:
    secret = limited.new_key(money="0")
    set_limits(limited, secret, Limit("requests", "hour", 1))
    for _ in range(3):
        with pytest.raises(openai.RateLimitError) as caught:
            limited.client(secret).chat.completions.create(model="m", messages=HELLO)
        assert caught.value.code == "insufficient_quota"


def test_tokens_are_corrected_to_what_was_used(limited: Gateway) -> None:
    secret = limited.new_key()
    set_limits(limited, secret, Limit("tokens", "day", 5_000))
    create = limited.client(secret).chat.completions.with_raw_response.create
    for _ in range(3):  # 4 500 asked each time, 20 used
        create(model="m", messages=HELLO, max_tokens=4_500)
    raw = create(model="m", messages=HELLO)
    assert 4_800 < int(raw.headers["x-ratelimit-remaining-tokens"]) < 4_950


def test_concurrent_streams_of_a_key_are_limited_and_their_places_return(limited: Gateway) -> None:
    secret = limited.new_key()
    set_limits(limited, secret, Limit("concurrency", None, 1))
    client = limited.client(secret)
    with client.chat.completions.create(model="long", messages=HELLO, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            client.chat.completions.create(model="m", messages=HELLO)
    wait_until(lambda: bool(try_create(client)), 30, "the place")


def try_create(client: openai.OpenAI) -> bool:
    try:
        return bool(client.chat.completions.create(model="m", messages=HELLO).choices)
    except openai.RateLimitError:
        return False


def test_a_stream_ends_with_length_when_the_money_does(limited: Gateway, upstream: FakeUpstream) -> None:
    secret = limited.new_key(money="0.001")  # about 2 300 tokens
    with limited.http(secret) as http:
        answer = http.post(
            "/chat/completions",
            json={"model": "long", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}},
        )
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    usage = json.loads(events[-2])["usage"]
    assert json.loads(events[-3])["choices"][0]["finish_reason"] == "length"
    delivered = sum(bool(choice["delta"].get("content")) for e in events[:-3] for choice in json.loads(e)["choices"])
    row = limited.row(answer.headers["x-request-id"])
    assert delivered == usage["completion_tokens"] == row["generated_tokens"]
    assert 2_000 < delivered < 2_500
    assert row["cost_usd_pico"] <= 10**9
    assert row["loss_pico"] == 0
    assert upstream.entry(answer.headers["x-request-id"])["outcome"] == "client_gone"


def test_a_small_balance_still_buys_a_small_plain_answer(limited: Gateway, upstream: FakeUpstream) -> None:
    secret = limited.new_key(money="0.0001")
    raw = limited.client(secret).chat.completions.with_raw_response.create(model="m", messages=HELLO, max_tokens=4_000)
    sent = upstream.entry(raw.headers["x-request-id"])["body"]["max_tokens"]
    assert 50 < sent < 240
    row = limited.row(raw.headers["x-request-id"])
    assert row["cost_usd_pico"] <= 10**8


def test_what_cannot_be_cut_is_asked_for_no_more_than_is_held(limited: Gateway, upstream: FakeUpstream) -> None:
    """Else an upstream generates what was never set aside, and what the money then does not reach is given away."""
    create = limited.client().chat.completions.with_raw_response.create
    raw = create(model="capped", messages=HELLO, max_tokens=50_000)
    assert upstream.entry(raw.headers["x-request-id"])["body"]["max_tokens"] == 1_000
    raw = create(model="m", messages=HELLO, max_tokens=20_000)  # nothing is configured: held in full
    assert upstream.entry(raw.headers["x-request-id"])["body"]["max_tokens"] == 20_000


def test_a_blocked_key_is_refused_within_a_second_and_topping_up_helps_as_fast(limited: Gateway) -> None:
    secret = limited.new_key(money="0")
    client = limited.client(secret)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="m", messages=HELLO)

    async def pay(c: Any) -> str:
        record = await keys.find_by_hash(c, KeyHasher(key_secret(limited.settings))(secret))
        assert record is not None
        await topups.top_up(c, by(), record.team_id, 10**12, currency="USD", reference="paid")
        return record.key_id

    key_id = limited.ledger(pay)
    wait_until(lambda: try_create(client), 30, "the money")

    async def block(c: Any) -> None:
        await keys.block_key(c, by(), key_id)

    limited.ledger(block)

    def refused() -> bool:
        try:
            client.chat.completions.create(model="m", messages=HELLO)
        except openai.PermissionDeniedError as error:
            return error.code == "key_blocked"
        return False

    wait_until(refused, 30, "the block")  # within a second on a machine that is not busy with other tests


def test_a_body_above_the_limit_is_413(tmp_path: Path, upstream: FakeUpstream) -> None:
    config = configuration({"legacy": upstream.base_url}) | {"server": {"max_body_mb": 1}}
    with Gateway(tmp_path, config) as gateway:
        with pytest.raises(openai.APIStatusError) as caught:
            gateway.client().chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 2_000_000}])
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")
        assert caught.value.request_id


def test_large_bodies_pass_unchanged(limited: Gateway, upstream: FakeUpstream) -> None:
    image = "data:image/png;base64," + "A" * 3_000_000
    content: Any = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": image}}]
    raw = limited.client().chat.completions.with_raw_response.create(
        model="m", messages=[{"role": "user", "content": content}]
    )
    assert limited.row(raw.headers["x-request-id"])["prompt_tokens"] < 100


def test_rows_survive_a_restart_in_the_middle(tmp_path: Path, upstream: FakeUpstream) -> None:
    config = configuration({"legacy": upstream.base_url})
    seen: list[str] = []
    for _ in range(3):
        with Gateway(tmp_path, config) as gateway:
            create = gateway.client().chat.completions.with_raw_response.create
            seen += [create(model="m", messages=HELLO).headers["x-request-id"] for _ in range(3)]
    assert sorted(row["request_id"] for row in gateway.rows()) == sorted(seen)


def test_every_answer_of_every_route_has_a_request_id_and_openais_error_shape(limited: Gateway) -> None:
    root = f"http://127.0.0.1:{limited.port}"
    with httpx.Client() as http:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/v1/chat/completions", 405),
            ("DELETE", "/v1/models", 405),
            ("GET", "/v1/models", 401),
            ("GET", "/v1/balance", 401),
            ("POST", "/v1/chat/completions", 401),
            ("GET", "/admin/v1/teams", 401),
        ):
            answer = http.request(method, root + path)
            assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), path
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]
        for path in ("/health/live", "/health/ready", "/metrics"):
            answer = http.get(root + path)
            assert (answer.status_code, bool(answer.headers["x-request-id"])) == (200, True)


def test_metrics_count_what_was_settled(limited: Gateway) -> None:
    limited.client().chat.completions.create(model="m", messages=HELLO)
    text = httpx.get(f"http://127.0.0.1:{limited.port}/metrics").text
    assert 'tallygate_requests_total{model="m",deployment="legacy",status="completed"} 1' in text
    assert 'tallygate_generated_tokens_total{model="m",deployment="legacy",status="completed"} 16' in text
