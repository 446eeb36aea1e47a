"""The real openai SDK on `/v1/responses`: answers, events, tools, errors, and the ledger rows behind them."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pydantic
import pytest

from tests.proxy.serving import Gateway
from tests.upstream.process import FakeUpstream

ASK = "say hello to the ledger"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
FILED_IMAGE = {"type": "input_image", "file_id": "file-1"}


def fault(name: Any) -> dict[str, Any]:
    return {"x_fault": name}


def test_a_plain_answer_carries_usage_and_cost_as_the_ledger_has_them(gateway: Gateway, client: openai.OpenAI) -> None:
    raw = client.responses.with_raw_response.create(model="m", input=ASK, max_output_tokens=7, user="ann")
    answer = raw.parse()
    assert answer.output_text == "the bill is what was used, not "
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.max_output_tokens, answer.store, answer.parallel_tool_calls) == (7, False, True)
    usage = json.loads(raw.text)["usage"]
    row = gateway.row(raw.headers["x-request-id"])
    assert (usage["input_tokens"], usage["output_tokens"]) == (row["prompt_tokens"], row["generated_tokens"]) == (8, 7)
    assert usage["total_tokens"] == usage["tallygate"]["billed_tokens"] == row["billed_tokens"] == 15
    assert usage["tallygate"]["cost_usd"] == raw.headers["x-tallygate-cost-usd"] == "0.00000518"
    assert row["end_user"] == "ann"


def test_cached_and_reasoning_tokens_are_told_within_their_sums(gateway: Gateway, client: openai.OpenAI) -> None:
    answer = client.responses.create(model="m", input=ASK, extra_body=fault("thinks"))
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (8, 4)
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (21, 5)
    thought, said = answer.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "the bill is what was "
    assert said.type == "message"


def test_a_stream_tells_every_event_in_order_and_ends_with_the_settled_usage(
    gateway: Gateway, client: openai.OpenAI
) -> None:
    raw = client.responses.with_raw_response.create(model="m", input=ASK, stream=True)
    events = list(raw.parse())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    row = gateway.row(raw.headers["x-request-id"])
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == row["generated_tokens"] == deltas == 16
    assert last.response.id == events[0].response.id  # type: ignore[union-attr]
    assert last.response.output_text == "".join(e.delta for e in events if e.type == "response.output_text.delta")


def test_the_sdks_own_accumulator_follows_text_reasoning_and_calls(client: openai.OpenAI) -> None:
    wanted = {"calls": 2, "tokens": 3, "reasoning": 2}
    with client.responses.stream(model="m", input=ASK, tools=[TOOL], extra_body=fault(wanted)) as stream:
        answer = stream.get_final_response()
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output_text == "the bill is "
    calls = [item for item in answer.output if item.type == "function_call"]
    assert {call.name for call in calls} == {"weather"}
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Berlin"}] * 2
    assert len({call.call_id for call in calls}) == 2


def test_a_conversation_with_tools_goes_round(gateway: Gateway, client: openai.OpenAI, upstream: FakeUpstream) -> None:
    conversation: list[Any] = [{"role": "user", "content": "how is Berlin?"}]
    first = client.responses.create(
        model="m", input=conversation, tools=[TOOL], tool_choice="required", extra_body=fault("two-calls")
    )
    conversation += [item.model_dump(exclude_none=True) for item in first.output]
    calls = [item for item in first.output if item.type == "function_call"]
    for call in calls:
        conversation.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    raw = client.responses.with_raw_response.create(
        model="m", instructions="be brief", input=conversation, tools=[TOOL]
    )
    assert raw.parse().output_text
    sent = upstream.entry(raw.headers["x-request-id"])["body"]
    assert [message["role"] for message in sent["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert [call["id"] for call in sent["messages"][2]["tool_calls"]] == [call.call_id for call in calls]
    assert sent["tools"][0]["function"]["strict"] is True
    assert "tool_choice" not in sent
    assert "input" not in sent


def test_a_schema_is_asked_for_and_parsed(client: openai.OpenAI, upstream: FakeUpstream) -> None:
    class City(pydantic.BaseModel):
        city: str

    said = json.dumps({"city": "Berlin"})
    message = {"role": "assistant", "content": said}
    body = json.dumps({"id": "c", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    parsed = client.responses.parse(model="m", input="a city", text_format=City, extra_body=fault({"body": body}))
    assert parsed.output_parsed == City(city="Berlin")
    sent = upstream.entries()[-1]["body"]["response_format"]
    assert (sent["type"], sent["json_schema"]["name"]) == ("json_schema", "City")
    assert sent["json_schema"]["schema"]["properties"]["city"]["type"] == "string"


def test_images_and_unknown_fields_reach_the_upstream_as_they_are(
    client: openai.OpenAI, upstream: FakeUpstream
) -> None:
    image = "data:image/png;base64,iVBORw0KGgo="
    content: Any = [{"type": "input_text", "text": "what is it?"}, {"type": "input_image", "image_url": image}]
    client.responses.create(
        model="m",
        input=[{"role": "user", "content": content}],
        temperature=0.5,
        reasoning={"effort": "low"},
        extra_body={"seed": 7, "chat_template_kwargs": {"enable_thinking": False}},
    )
    sent = upstream.entries()[-1]["body"]
    assert sent["messages"][0]["content"] == [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": image}},
    ]
    assert (sent["temperature"], sent["seed"], sent["reasoning_effort"]) == (0.5, 7, "low")
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [FILED_IMAGE]}]}, "input[0].content[0].file_id"),
        ({"input": [{"role": "user", "content": [3]}]}, "input[0].content[0]"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "7"}, "max_output_tokens"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_400_and_names_the_field(
    client: openai.OpenAI, upstream: FakeUpstream, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="m", input=ASK, extra_body=fields)
    assert caught.value.param == param
    assert upstream.entries() == []


def test_numbers_out_of_range_are_the_callers_mistake(gateway: Gateway, upstream: FakeUpstream) -> None:
    with gateway.http() as http:
        body = b'{"model":"m","input":"hi","x":123456789012345678901234567890}'
        assert http.post("/responses", content=body).status_code == 200
        body = b'{"model":"m","input":"hi","metadata":{"x":123456789012345678901234567890}}'
        assert http.post("/responses", content=body).status_code in (200, 400)
        assert http.post("/responses", content=b"[" * 100_000).status_code == 400


def test_refusals_are_the_sdks_exceptions(gateway: Gateway, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="unknown", input=ASK)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        gateway.client("sk-tg-wrong").responses.create(model="m", input=ASK)
    poor = gateway.client(gateway.new_key(money="0"))
    with pytest.raises(openai.RateLimitError) as broke:
        poor.responses.create(model="m", input=ASK)
    assert broke.value.code == "insufficient_quota"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", ["502-html", "200-error", "200-not-json"])
def test_an_upstream_that_fails_before_it_answers_is_502(
    gateway: Gateway, client: openai.OpenAI, name: str, streamed: bool
) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.responses.create(model="m", input=ASK, stream=streamed, extra_body=fault(name))
    assert (caught.value.status_code, caught.value.code) == (502, "upstream_error")


def test_an_upstream_that_breaks_off_is_an_error_event_and_bills_what_came(
    gateway: Gateway, client: openai.OpenAI
) -> None:
    raw = client.responses.with_raw_response.create(model="m", input=ASK, stream=True, extra_body=fault("cut"))
    seen: list[Any] = []
    with pytest.raises(openai.APIError) as caught:
        seen.extend(raw.parse())
    assert caught.value.code == "upstream_error"
    row = gateway.row(raw.headers["x-request-id"])
    assert (row["status"], row["generated_tokens"]) == ("failed", 3)
    assert sum(event.type == "response.output_text.delta" for event in seen) == 3


def test_a_repeated_idempotency_key_gives_the_same_response_again(gateway: Gateway, upstream: FakeUpstream) -> None:
    bodies: list[Any] = [{"model": "m", "input": ASK}, {"model": "m", "input": ASK, "stream": True}]
    for number, body in enumerate(bodies):
        headers = {"idempotency-key": f"responses-{number}"}
        with gateway.http() as http:
            first = http.post("/responses", json=body, headers=headers)
            gateway.row(first.headers["x-request-id"])
            again = http.post("/responses", json=body, headers=headers)
        assert again.headers["idempotent-replayed"] == "true"
        assert again.headers["x-request-id"] == first.headers["x-request-id"]
        assert without_times(again.text) == without_times(first.text)
    assert len(upstream.entries()) == 2


def without_times(text: str) -> str:
    return re.sub(r'"(created|completed)_at":\d+', "", text)
