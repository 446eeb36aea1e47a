"""The real anthropic SDK on `/v1/messages`: answers, events, tools, errors, and the ledger rows behind them."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest

from tests.proxy.serving import Gateway
from tests.upstream.process import FakeUpstream

ASK: Any = [{"role": "user", "content": "say hello to the ledger"}]
TOOL: Any = {
    "name": "weather",
    "description": "the weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
}


def fault(name: Any) -> dict[str, Any]:
    return {"x_fault": name}


def test_a_plain_message_carries_usage_and_cost_as_the_ledger_has_them(
    gateway: Gateway, claude: anthropic.Anthropic
) -> None:
    raw = claude.messages.with_raw_response.create(model="m", messages=ASK, max_tokens=7, metadata={"user_id": "ann"})
    message = raw.parse()
    assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "max_tokens")
    assert message.content[0].text == "the bill is what was used, not "  # type: ignore[union-attr]
    row = gateway.row(raw.headers["request-id"])
    assert (message.usage.input_tokens, message.usage.output_tokens) == (8, 7)
    assert (row["prompt_tokens"], row["generated_tokens"], row["end_user"]) == (8, 7, "ann")
    block = json.loads(raw.text())["usage"]["tallygate"]
    assert (block["billed_tokens"], block["cost_usd"]) == (row["billed_tokens"], "0.00000518")
    assert raw.headers["x-tallygate-cost-usd"] == "0.00000518"


def test_cached_tokens_are_counted_apart_from_input_tokens_and_billed_as_cached(
    gateway: Gateway, claude: anthropic.Anthropic
) -> None:
    for streamed in (False, True):
        raw = claude.messages.with_raw_response.create(
            model="m", messages=ASK, max_tokens=30, stream=streamed, extra_body=fault("thinks")
        )
        if streamed:
            usage = [event.usage for event in raw.parse() if event.type == "message_delta"][-1]  # type: ignore[union-attr]
        else:
            usage = raw.parse().usage  # type: ignore[union-attr]
        assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (3, 4, 1)
        assert usage.output_tokens == 21
        row = gateway.row(raw.headers["request-id"])
        assert (row["prompt_tokens"], row["cached_tokens"], row["reasoning_tokens"]) == (8, 4, 5)


def test_a_stream_tells_every_event_in_order(gateway: Gateway, claude: anthropic.Anthropic) -> None:
    raw = claude.messages.with_raw_response.create(model="m", messages=ASK, max_tokens=100, stream=True)
    events = list(raw.parse())
    kinds = [event.type for event in events]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    row = gateway.row(raw.headers["request-id"])
    last = events[-2]
    assert last.type == "message_delta"
    assert (last.delta.stop_reason, last.usage.output_tokens) == ("end_turn", 16)
    assert row["generated_tokens"] == deltas == 16


def test_streams_ping(gateway: Gateway) -> None:
    body = {"model": "m", "messages": ASK, "max_tokens": 5, "stream": True}
    with gateway.http() as http:
        text = http.post("/messages", json=body).text
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in text
    assert text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')


def test_the_sdks_own_accumulator_follows_text_thoughts_and_calls(claude: anthropic.Anthropic) -> None:
    wanted = {"calls": 2, "tokens": 3, "reasoning": 2}
    with claude.messages.stream(
        model="m", messages=ASK, max_tokens=100, tools=[TOOL], extra_body=fault(wanted)
    ) as stream:
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[1].text == "the bill is "  # type: ignore[union-attr]
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Berlin"}] * 2
    assert len({call.id for call in calls}) == 2
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", 11)
    assert message.usage.input_tokens == 8


def test_a_conversation_with_tools_goes_round(
    gateway: Gateway, claude: anthropic.Anthropic, upstream: FakeUpstream
) -> None:
    conversation: list[Any] = [{"role": "user", "content": "how is Berlin?"}]
    first = claude.messages.create(
        model="m",
        max_tokens=100,
        messages=conversation,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        extra_body=fault({"calls": 2, "tokens": 2, "reasoning": 2}),
    )
    sent = upstream.entries()[-1]["body"]
    assert (sent["tool_choice"], sent["parallel_tool_calls"]) == ("required", False)
    assert sent["tools"][0]["function"]["parameters"] == TOOL["input_schema"]
    calls = [block for block in first.content if block.type == "tool_use"]
    conversation.append({"role": "assistant", "content": first.content})
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "sunny"}, picture]},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "no such city", "is_error": True},
        {"type": "text", "text": "and now?"},
    ]
    conversation.append({"role": "user", "content": results})
    system: Any = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    claude.messages.create(model="m", max_tokens=10, system=system, messages=conversation, tools=[TOOL])
    messages = upstream.entries()[-1]["body"]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert messages[0]["content"] == "be\nbrief"
    assert (messages[2]["content"], len(messages[2]["tool_calls"])) == ("the bill ", 2)
    assert json.loads(messages[2]["tool_calls"][0]["function"]["arguments"]) == {"city": "Berlin"}
    assert [message["content"] for message in messages[3:5]] == ["sunny", "Error: no such city"]
    assert messages[5]["content"][0]["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="
    assert messages[5]["content"][1] == {"type": "text", "text": "and now?"}


def test_what_shapes_the_answer_reaches_the_upstream_under_its_names_there(
    claude: anthropic.Anthropic, upstream: FakeUpstream
) -> None:
    claude.messages.create(
        model="m",
        max_tokens=9,
        messages=ASK,
        stop_sequences=["END"],
        thinking={"type": "enabled", "budget_tokens": 2_000},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        extra_body={"seed": 7, "temperature": 0.5, "top_k": 3},
    )
    sent = upstream.entries()[-1]["body"]
    assert (sent["stop"], sent["max_tokens"], sent["reasoning_effort"]) == (["END"], 9, "low")
    assert (sent["seed"], sent["temperature"], sent["top_k"]) == (7, 0.5, 3)
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert sent.keys().isdisjoint({"stop_sequences", "thinking", "output_config", "metadata", "system"})


def test_a_stop_sequence_is_told_where_the_upstream_tells_it(claude: anthropic.Anthropic) -> None:
    choice = {"index": 0, "message": {"content": "x"}, "finish_reason": "stop", "stop_reason": "END"}
    body = json.dumps({"id": "c", "choices": [choice]})
    message = claude.messages.create(
        model="m", max_tokens=9, messages=ASK, stop_sequences=["END"], extra_body=fault({"body": body})
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_either_header_may_carry_the_key(gateway: Gateway) -> None:
    bearer = anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{gateway.port}", api_key=None, auth_token=gateway.key, max_retries=0
    )
    assert bearer.messages.create(model="m", max_tokens=3, messages=ASK).content


def test_count_tokens_asks_nobody_and_costs_nothing(
    gateway: Gateway, claude: anthropic.Anthropic, upstream: FakeUpstream
) -> None:
    claude = claude.copy(api_key=gateway.new_key(money="0"))
    short = claude.messages.count_tokens(model="m", messages=ASK).input_tokens
    longer = claude.messages.count_tokens(model="m", messages=ASK, system="be brief", tools=[TOOL]).input_tokens
    assert 5 <= short < longer
    assert upstream.entries() == []
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.count_tokens(model="unknown", messages=ASK)
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.count_tokens(model="m", messages=[{"role": "robot", "content": "x"}])  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "sometimes"}}, "tool_choice.type"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "telepathy"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": [3]}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"metadata": {"user_id": "x" * 600}}, "metadata.user_id"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_what_cannot_be_served_is_400_and_names_the_field(
    claude: anthropic.Anthropic, upstream: FakeUpstream, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model="m", max_tokens=9, messages=ASK, extra_body=fields)
    error: Any = caught.value.body
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert f"`{param}`" in error["error"]["message"]
    assert caught.value.request_id
    assert upstream.entries() == []


def test_refusals_are_the_sdks_exceptions_with_our_codes_in_their_messages(gateway: Gateway) -> None:
    def ask(key: str, model: str = "m", **body: Any) -> Any:
        client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{gateway.port}", api_key=key, max_retries=0)
        return client.messages.create(model=model, max_tokens=9, messages=ASK, extra_body=body)

    key = gateway.key
    cases: list[tuple[type[anthropic.APIStatusError], str, str, dict[str, Any]]] = [
        (anthropic.AuthenticationError, "authentication_error", "invalid_api_key", {"key": "sk-tg-wrong"}),
        (anthropic.NotFoundError, "not_found_error", "model_not_found", {"key": key, "model": "unknown"}),
        (anthropic.PermissionDeniedError, "permission_error", "price_not_found", {"key": key, "model": "free"}),
        (anthropic.RateLimitError, "rate_limit_error", "insufficient_quota", {"key": gateway.new_key(money="0")}),
        (anthropic.InternalServerError, "api_error", "upstream_error", {"key": key, "x_fault": "500"}),
        (anthropic.RateLimitError, "rate_limit_error", "Rate limit reached", {"key": key, "x_fault": "429"}),
        (anthropic.BadRequestError, "invalid_request_error", "unknown_parameter", {"key": key, "x_fault": "400"}),
        (anthropic.APIStatusError, "timeout_error", "upstream_timeout", {"key": key, "x_fault": "hang"}),
    ]  # fmt: skip
    for exception, kind, said, options in cases:
        with pytest.raises(exception) as caught:
            ask(**options) if kind != "timeout_error" else ask(**options, stream=True)
        error: Any = caught.value.body
        assert (error["type"], error["error"]["type"]) == ("error", kind)
        assert said in error["error"]["message"]
        headers = caught.value.response.headers
        assert caught.value.request_id == headers["request-id"] == headers["x-request-id"]


def test_a_spent_balance_is_not_to_be_retried(gateway: Gateway) -> None:
    with gateway.http(gateway.new_key(money="0")) as http:
        answer = http.post("/messages", json={"model": "m", "max_tokens": 9, "messages": ASK})
    assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")


def test_other_methods_and_bodies_are_refused_in_the_same_dialect(gateway: Gateway) -> None:
    with gateway.http() as http:
        for answer in (
            http.get("/messages"),
            http.get("/messages/count_tokens"),
            http.post("/messages", content=b"{"),
            http.post("/messages/count_tokens", content=b"\xff"),
        ):
            assert answer.json()["type"] == "error"
            assert answer.headers["request-id"]


def test_an_upstream_that_breaks_off_is_an_error_event_and_bills_what_came(
    gateway: Gateway, claude: anthropic.Anthropic
) -> None:
    raw = claude.messages.with_raw_response.create(
        model="m", messages=ASK, max_tokens=100, stream=True, extra_body=fault("cut")
    )
    seen: list[Any] = []
    with pytest.raises(anthropic.APIStatusError) as caught:
        seen.extend(raw.parse())
    assert "upstream_error" in caught.value.message
    row = gateway.row(raw.headers["request-id"])
    assert (row["status"], row["generated_tokens"]) == ("failed", 3)


def test_a_repeated_idempotency_key_gives_the_same_message_again(gateway: Gateway, upstream: FakeUpstream) -> None:
    for streamed in (False, True):
        body = {"model": "m", "max_tokens": 20, "messages": ASK, "stream": streamed, "x_fault": "two-calls"}
        headers = {"idempotency-key": f"messages-{streamed}"}
        with gateway.http() as http:
            first = http.post("/messages", json=body, headers=headers)
            gateway.row(first.headers["request-id"])
            again = http.post("/messages", json=body, headers=headers)
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers["request-id"] == first.headers["request-id"]
        assert again.text == first.text
    assert len(upstream.entries()) == 2
