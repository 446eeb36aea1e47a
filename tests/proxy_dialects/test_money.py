"""Both dialects, where it costs money: hang-ups, spent balances, limits, and no way around the ledger."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.proxy.serving import Gateway
from tests.upstream.process import FakeUpstream

BODIES: dict[str, dict[str, Any]] = {
    "/responses": {"input": "hi there"},
    "/messages": {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 1_000},
}
DELTAS = ("response.output_text.delta", "content_block_delta")


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


def request_id(answer: httpx.Response) -> str:
    found: str = answer.headers.get("x-request-id") or answer.headers["request-id"]
    return found


async def read_some(gateway: Gateway, path: str, model: str, tokens: int) -> tuple[str, int]:
    """Read so many tokens of a stream and hang up: (request id, tokens read)."""
    body = {"model": model, "stream": True, **BODIES[path]}
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with (
        httpx.AsyncClient(timeout=20) as http,
        http.stream("POST", f"{gateway.base_url}{path}", json=body, headers=headers) as answer,
    ):
        seen = 0
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                seen += json.loads(line[6:])["type"] in DELTAS
            if seen >= tokens:
                break
        return request_id(answer), seen


@pytest.mark.parametrize("path", BODIES)
async def test_a_hangup_bills_between_what_was_delivered_and_produced(
    gateway: Gateway, upstream: FakeUpstream, path: str
) -> None:
    for model in ("m@fifty-chunks", "deepseek-v3.2@fifty-chunks"):
        for tokens in (1, 7, 33):
            asked, delivered = await read_some(gateway, path, model, tokens)
            row = await asyncio.to_thread(gateway.row, asked)
            entry = await asyncio.to_thread(upstream.entry, asked)
            assert delivered <= row["generated_tokens"] <= entry["produced_tokens"]
            assert row["billed_tokens"] == row["prompt_tokens"] + row["generated_tokens"]
            assert (row["prompt_tokens"], bool(row["estimated"])) == (entry["prompt_tokens"], False)


@pytest.mark.parametrize("path", BODIES)
def test_a_spent_balance_ends_a_stream_as_the_token_limit_does(gateway: Gateway, path: str) -> None:
    key = gateway.new_key(money="0.0003")  # some 700 generated tokens
    body = {"model": "m@endless", "stream": True, **BODIES[path], "max_tokens": 100_000}
    if path == "/responses":
        del body["max_tokens"]
    with gateway.http(key) as http:
        answer = http.post(path, json=body)
    told = events(answer.text)
    if path == "/responses":
        assert told[-1]["type"] == "response.incomplete"
        response = told[-1]["response"]
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
        usage, generated = response["usage"], response["usage"]["output_tokens"]
    else:
        assert told[-2]["delta"]["stop_reason"] == "max_tokens"
        usage, generated = told[-2]["usage"], told[-2]["usage"]["output_tokens"]
    row = gateway.row(request_id(answer))
    assert row["generated_tokens"] == generated == sum(event["type"] in DELTAS for event in told)
    assert float(usage["tallygate"]["cost_usd"]) <= 0.0003


@pytest.mark.parametrize("path", BODIES)
def test_a_plain_answer_is_limited_to_what_the_money_covers(
    gateway: Gateway, upstream: FakeUpstream, path: str
) -> None:
    with gateway.http(gateway.new_key(money="0.0001")) as http:
        answer = http.post(path, json={"model": "m", **BODIES[path]})
    assert answer.status_code == 200
    assert upstream.entry(request_id(answer))["body"]["max_tokens"] < 1_000
    assert gateway.row(request_id(answer))["cost_usd_pico"] <= 100_000_000


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "fault", ["usage-none", "usage-absurd", "usage-each", "no-done", "crlf", "byte-by-byte", "gzip"]
)
def test_odd_streams_are_translated_and_counted(
    gateway: Gateway, upstream: FakeUpstream, path: str, fault: str
) -> None:
    with gateway.http() as http:
        answer = http.post(path, json={"model": f"m@{fault}", "stream": True, **BODIES[path]})
    told = events(answer.text)
    text = "".join(
        event["delta"] if isinstance(event["delta"], str) else event["delta"]["text"]
        for event in told
        if event["type"] in DELTAS
    )
    row, entry = gateway.row(request_id(answer)), upstream.entry(request_id(answer))
    assert text == entry["text"]
    assert row["generated_tokens"] == entry["produced_tokens"]
    assert row["status"] == "completed"
    assert told[-1]["type"] in ("response.completed", "message_stop")


@pytest.mark.parametrize("path", [*BODIES, "/messages/count_tokens"])
def test_nobody_passes_without_a_key(gateway: Gateway, upstream: FakeUpstream, path: str) -> None:
    body = {"model": "m", **BODIES.get(path, BODIES["/messages"])}
    for prefix in ("/v1", ""):
        answer = httpx.post(f"http://127.0.0.1:{gateway.port}{prefix}{path}", json=body)
        assert answer.status_code == 401
    assert upstream.entries() == []


@pytest.mark.parametrize("path", BODIES)
def test_a_key_for_other_models_is_refused(gateway: Gateway, path: str) -> None:
    with gateway.http(gateway.new_key(models=["other"])) as http:
        answer = http.post(path, json={"model": "m", **BODIES[path]})
    assert answer.status_code == 403
    assert "model_not_allowed" in answer.text


@pytest.mark.parametrize("path", BODIES)
def test_drafts_are_chosen_and_refused_as_for_chat(gateway: Gateway, upstream: FakeUpstream, path: str) -> None:
    body = {"model": "deepseek-v3.2", **BODIES[path]}
    with gateway.http() as http:
        good = http.post(path, json=body, headers={"x-draft-model": "gpt2-small"})
        bad = http.post(path, json=body, headers={"x-draft-model": "nonsense"})
    assert upstream.entry(request_id(good))["headers"]["x-draft-model"] == "gpt2-small"
    assert (bad.status_code, "speculative_model_not_supported" in bad.text) == (400, True)
    assert len(upstream.entries()) == 1
