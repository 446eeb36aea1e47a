"""Upstreams that speak a dialect themselves: everything passes as it is, and the bill is ours all the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from proxy.anthropic.native import NativeMessage, NativeMessageReader
from proxy.anthropic.request import parse_messages
from proxy.openai.responses.native import NativeResponseReader
from proxy.openai.responses.request import parse_responses
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.proxy_dialects.test_money import BODIES, DELTAS, events, read_some, request_id
from tests.upstream.process import FakeUpstream

ASK: Any = [{"role": "user", "content": "say hello to the ledger"}]


@pytest.fixture(scope="module")
def native_gateway(tmp_path_factory: pytest.TempPathFactory, upstream_process: FakeUpstream) -> Iterator[Gateway]:
    """`m` on an upstream that speaks both dialects; `mixed` on one that does not, falling back to the other."""
    on = {"deployments": [{"to": "native", "model": "gpt-4"}], "price": PRICE, "max_output_tokens": 1_000}
    models: dict[str, Any] = {"m": on}
    for fault in ("fifty-chunks", "endless"):
        models[f"m@{fault}"] = {"deployments": [{"to": "native", "model": f"gpt-4@{fault}"}], "price": PRICE}
    models["mixed"] = {"deployments": [{"to": "dead", "model": "x"}], "fallback": ["native"], "price": PRICE}
    urls = {"native": upstream_process.base_url, "dead": "http://127.0.0.1:9/v1"}
    config = configuration(urls, **models)
    config["upstreams"]["native"]["native"] = ["responses", "messages"]
    with Gateway(tmp_path_factory.mktemp("native"), config) as gateway:
        yield gateway


@pytest.fixture
def gateway(native_gateway: Gateway, upstream: FakeUpstream) -> Gateway:
    return native_gateway


def test_messages_pass_as_they_are_with_our_key_our_usage_and_our_cost(
    gateway: Gateway, claude: anthropic.Anthropic, upstream: FakeUpstream
) -> None:
    system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    raw = claude.messages.with_raw_response.create(
        model="m", max_tokens=7, system=system, messages=ASK, extra_body={"x_fault": "cached"}
    )
    told = json.loads(raw.text())
    entry = upstream.entry(raw.headers["request-id"])
    assert (entry["path"], entry["headers"]["x-api-key"]) == ("/v1/messages", "sk-upstream")
    assert "authorization" not in entry["headers"]
    assert entry["headers"]["anthropic-version"] == raw.http_request.headers["anthropic-version"]
    assert (entry["body"]["system"], entry["body"]["model"]) == (system, "gpt-4")
    assert (told["stop_reason"], told["x_provider"]) == ("max_tokens", {"kept": "as it is"})
    row = gateway.row(raw.headers["request-id"])
    usage = told["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (3, 4, 1)
    assert (row["prompt_tokens"], row["cached_tokens"], row["generated_tokens"]) == (8, 4, 7)
    assert (usage["service_tier"], usage["tallygate"]["billed_tokens"]) == ("standard", 15)


@pytest.mark.parametrize("surcharged", [{"speed": "fast"}, {"service_tier": "priority"}])
@pytest.mark.parametrize("path", ["messages", "responses"])
def test_what_costs_a_surcharge_does_not_reach_an_upstream_that_is_sent_the_request_as_written(
    gateway: Gateway, upstream: FakeUpstream, path: str, surcharged: dict[str, str]
) -> None:
    ask = {"messages": {"messages": ASK, "max_tokens": 5}, "responses": {"input": "hi", "max_output_tokens": 5}}[path]
    with gateway.http() as http:
        refused = http.post(f"/{path}", json={"model": "m", **ask, **surcharged})
        passed = http.post(f"/{path}", json={"model": "m", **ask, **dict.fromkeys(surcharged)})
    assert (refused.status_code, passed.status_code) == (400, 200)
    assert f"`{next(iter(surcharged))}`" in refused.json()["error"]["message"]
    assert [entry["id"] for entry in upstream.wait_for_entries(1)] == [passed.headers["x-request-id"]]


def test_responses_pass_as_they_are_and_are_never_stored(
    gateway: Gateway, client: openai.OpenAI, upstream: FakeUpstream
) -> None:
    raw = client.responses.with_raw_response.create(model="m", input="hi there", max_output_tokens=7)
    told = json.loads(raw.text)
    entry = upstream.entry(raw.headers["x-request-id"])
    assert (entry["path"], entry["body"]["input"], entry["body"]["store"]) == ("/v1/responses", "hi there", False)
    assert entry["headers"]["authorization"] == "Bearer sk-upstream"
    assert (told["status"], told["x_provider"]) == ("incomplete", {"kept": "as it is"})
    row = gateway.row(raw.headers["x-request-id"])
    assert (told["usage"]["input_tokens"], told["usage"]["output_tokens"]) == (row["prompt_tokens"], 7) == (2, 7)
    assert told["usage"]["tallygate"]["billed_tokens"] == row["billed_tokens"] == 9


def test_the_sdks_follow_native_streams_to_a_settled_end(
    gateway: Gateway, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    with claude.messages.stream(model="m", max_tokens=100, messages=ASK, extra_body={"x_fault": "cached"}) as stream:
        message = stream.get_final_message()
        asked = stream.response.headers["request-id"]
    usage, row = message.usage, gateway.row(asked)
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 4, 16)
    assert (row["prompt_tokens"], row["cached_tokens"], row["generated_tokens"], row["estimated"]) == (8, 4, 16, 0)
    with client.responses.stream(model="m", input="hi there") as responses:
        response = responses.get_final_response()
    assert response.output_text.startswith("the bill is")
    assert response.usage is not None
    assert response.usage.model_extra is not None
    assert (response.usage.output_tokens, response.usage.model_extra["tallygate"]["billed_tokens"]) == (16, 18)


@pytest.mark.parametrize("path", BODIES)
async def test_a_hangup_bills_what_was_delivered(gateway: Gateway, upstream: FakeUpstream, path: str) -> None:
    asked, delivered = await read_some(gateway, path, "m@fifty-chunks", 7)
    row = await asyncio.to_thread(gateway.row, asked)
    entry = await asyncio.to_thread(upstream.entry, asked)
    assert delivered <= row["generated_tokens"] <= entry["produced_tokens"]
    assert (row["status"], bool(row["estimated"])) == ("cancelled", True)


@pytest.mark.parametrize("path", BODIES)
def test_a_spent_balance_ends_a_native_stream_too(gateway: Gateway, path: str) -> None:
    body = {"model": "m@endless", "stream": True, **BODIES[path]}
    if path == "/messages":
        body["max_tokens"] = 100_000
    with gateway.http(gateway.new_key(money="0.0003")) as http:
        answer = http.post(path, json=body)
    told = events(answer.text)
    row = gateway.row(request_id(answer))
    assert row["generated_tokens"] == sum(event["type"] in DELTAS for event in told)
    if path == "/messages":
        assert [event["type"] for event in told[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
        assert told[-2]["delta"]["stop_reason"] == "max_tokens"
        assert told[-2]["usage"]["output_tokens"] == row["generated_tokens"]
    else:
        assert told[-1]["type"] == "response.incomplete"
        assert told[-1]["response"]["usage"]["output_tokens"] == row["generated_tokens"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fault", "status", "row_status"),
    [
        ("cut", 200, "failed"),
        ("error-midway", 200, "failed"),
        ("usage-none", 200, "completed"),
        ("many-packets-an-event", 200, "completed"),
        ("500", 502, None),
        ("200-html", 502, None),
        ("200-error-event", 502, None),
        ("429", 429, None),
    ],
)
def test_native_streams_that_misbehave_are_settled_by_what_came(
    gateway: Gateway, upstream: FakeUpstream, path: str, fault: str, status: int, row_status: str | None
) -> None:
    for deployment in gateway.app.state.worker.routes["m"].deployments:
        deployment.fitness.succeeded()
    with gateway.http() as http:
        answer = http.post(path, json={"model": "m", "stream": True, "x_fault": fault, **BODIES[path]})
    assert answer.status_code == status
    if row_status is not None:
        row = gateway.row(request_id(answer))
        assert row["status"] == row_status
        assert row["generated_tokens"] == sum(event["type"] in DELTAS for event in events(answer.text))
        if row_status == "failed":
            assert "upstream_error" in answer.text


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_repeated_idempotency_key_gives_the_same_native_answer_again(
    gateway: Gateway, upstream: FakeUpstream, path: str, streamed: bool
) -> None:
    headers = {"idempotency-key": f"native-{path}-{streamed}"}
    body = {"model": "m", "stream": streamed, **BODIES[path]}
    with gateway.http() as http:
        first = http.post(path, json=body, headers=headers)
        gateway.row(request_id(first))
        again = http.post(path, json=body, headers=headers)
    assert (again.headers["idempotent-replayed"], again.text) == ("true", first.text)
    assert len(upstream.entries()) == 1


@pytest.mark.parametrize("path", BODIES)
def test_a_fallback_may_speak_another_dialect(gateway: Gateway, upstream: FakeUpstream, path: str) -> None:
    with gateway.http() as http:
        answer = http.post(path, json={"model": "mixed", **BODIES[path]})
    assert (answer.status_code, upstream.entries()[-1]["path"]) == (200, f"/v1{path}")


def test_a_local_tokenizer_can_count_what_native_upstreams_do_not_report() -> None:
    responses = NativeResponseReader(parse_responses(b'{"model":"m","input":"x"}'))
    messages = NativeMessageReader(
        parse_messages(b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}]}')
    )
    deltas: list[tuple[Any, list[dict[str, Any]]]] = [
        (responses, [{"type": "response.output_text.delta", "delta": word} for word in ("one ", "two")]),
        (messages, [{"type": "content_block_delta", "delta": {"text": word}} for word in ("one ", "two")]),
    ]
    for reader, told in deltas:
        reader.keep_text()
        for event in told:
            reader.accept(reader.read(b"data: " + json.dumps(event).encode() + b"\n\n"))
        assert (reader.text(), reader.delivered_deltas) == ("one two", 2)
    content = [{"type": "text", "text": "one "}, {"type": "tool_use", "name": "two", "input": {"n": 1}}]
    assert NativeMessage(json.dumps({"type": "message", "content": content}).encode()).text() == 'one two{"n":1}'
