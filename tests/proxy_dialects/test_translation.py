"""Promises about translating: no body fails otherwise than with 400, and any chunks become ordered events."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.anthropic.answer import MessageReader, PlainMessage
from proxy.anthropic.request import parse_messages
from proxy.openai.errors import ApiError, upstream_error
from proxy.openai.plain import NoAnswer
from proxy.openai.responses.answer import PlainResponse, ResponseReader
from proxy.openai.responses.request import parse_responses
from proxy.openai.usage import Counts, usage_object

REQUEST_ID = "01a22da3-cf70-7000-abab-dd620b6ddf5d"
RESPONSES_CALL = parse_responses(b'{"model":"m","input":"x"}')
MESSAGES_CALL = parse_messages(b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"x"}]}')
USAGE = usage_object(Counts(9, 4, 2), None, billed_tokens=13, cost_usd=b"0.1", cost_cny=b"0.73", price_version="v1")

words = st.sampled_from(["role", "type", "text", "content", "input", "name", "id", "user", "assistant", "function"])
kinds = st.sampled_from(
    [
        "message",
        "input_text",
        "input_image",
        "function_call",
        "function_call_output",
        "reasoning",
        "text",
        "image",
        "tool_use",
        "tool_result",
        "document",
        "thinking",
        "base64",
        "url",
        "function",
        "custom",
        "json_schema",
        "tool",
        "auto",
        "allowed_tools",
        "content",
        "search_result",
    ]
)
fields = words | st.sampled_from(["call_id", "arguments", "output", "source", "data", "tool_use_id", "image_url"])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | words | kinds,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=4),
    max_leaves=12,
)
top = ["input", "messages", "system", "instructions", "tools", "tool_choice", "text", "reasoning", "metadata", "stream"]
top += [
    "thinking",
    "output_config",
    "stop_sequences",
    "include",
    "max_output_tokens",
    "store",
    "stream_options",
    "user",
]


@given(st.dictionaries(st.sampled_from(top), json_values, max_size=4))
def test_no_body_fails_otherwise_than_with_400(body: dict[str, Any]) -> None:
    for parse, more in ((parse_responses, {}), (parse_messages, {"max_tokens": 5})):
        with contextlib.suppress(ApiError):
            parse(json.dumps({"model": "m", "input": "x", **more, **body}).encode())


@given(st.binary(max_size=200))
def test_no_bytes_fail_otherwise_than_with_400(body: bytes) -> None:
    for parse in (parse_responses, parse_messages):
        with contextlib.suppress(ApiError):
            parse(body)


@given(json_values)
def test_no_answer_fails_otherwise_than_as_no_answer(message: Any) -> None:
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    with contextlib.suppress(NoAnswer):
        json.loads(PlainResponse(REQUEST_ID, RESPONSES_CALL, body).body(USAGE))
        json.loads(PlainMessage(REQUEST_ID, MESSAGES_CALL, body).body(USAGE))


calls = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 2) | st.none(),
        "id": st.sampled_from(["a", "b", ""]),
        "function": st.fixed_dictionaries(
            {}, optional={"name": st.just("f"), "arguments": st.sampled_from(["", "{", "}"])}
        ),
    },
)
said = st.sampled_from(["", "one ", "two "]) | st.none()
deltas = st.fixed_dictionaries(
    {},
    optional={
        "content": said,
        "reasoning_content": said,
        "refusal": said,
        "tool_calls": st.lists(calls, max_size=2) | st.none(),
    },
)
chunks = st.fixed_dictionaries({"choices": st.lists(st.fixed_dictionaries({"delta": deltas}), max_size=1)})


@given(st.lists(chunks, max_size=12), st.sampled_from(["stop", "length", "tool_calls"]), st.booleans())
def test_any_chunks_become_a_response_whose_deltas_add_up(sent: list[dict[str, Any]], finish: str, fails: bool) -> None:
    events = told(ResponseReader(REQUEST_ID, RESPONSES_CALL), sent, finish, fails)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1]["response"]
    grown: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            grown[event["output_index"]] = grown.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(response["output"]):
        if item["type"] == "function_call":
            assert item["arguments"] == grown.get(index, "")
        else:
            assert (item["content"][0].get("text") or item["content"][0].get("refusal")) == grown[index]
    if events[-1]["type"] != "response.failed":
        done = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
        assert done == list(range(len(response["output"])))
        assert response["usage"]["total_tokens"] == 13


@given(st.lists(chunks, max_size=12), st.sampled_from(["stop", "length", "tool_calls"]), st.booleans())
def test_any_chunks_become_a_message_with_one_block_open_at_a_time(
    sent: list[dict[str, Any]], finish: str, fails: bool
) -> None:
    events = told(MessageReader(REQUEST_ID, MESSAGES_CALL), sent, finish, fails)
    assert events[0]["type"] == "message_start"
    is_open, count = None, 0
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert (is_open, event["index"]) == (None, count)
                is_open, count = count, count + 1
            case "content_block_delta":
                assert event["index"] == is_open
            case "content_block_stop":
                assert event["index"] == is_open
                is_open = None
    if events[-1]["type"] != "error":
        assert is_open is None
        usage = events[-2]["usage"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (7, 2, 4)


def told(
    reader: ResponseReader | MessageReader, sent: list[dict[str, Any]], finish: str, fails: bool
) -> list[dict[str, Any]]:
    """The events that a client gets for these chunks."""
    end = {"choices": [{"delta": {}, "finish_reason": finish}]}
    out = reader.start()
    for chunk in [*sent, end]:
        piece = reader.read(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        if piece.error is not None:
            fails = True
            break
        out += reader.accept(piece)
    out += reader.error_event(upstream_error("it broke")) if fails else reader.tail(USAGE, cut=False)
    events = [json.loads(line[6:]) for line in out.split(b"\n") if line.startswith(b"data: ")]
    return [event for event in events if event["type"] != "ping"]


@pytest.mark.parametrize(
    "reader", [ResponseReader(REQUEST_ID, RESPONSES_CALL), MessageReader(REQUEST_ID, MESSAGES_CALL)]
)
def test_a_chunk_that_was_cut_off_by_the_money_is_not_told_at_the_end(reader: Any) -> None:
    first = reader.accept(reader.read(b'data: {"choices":[{"delta":{"content":"paid"}}]}\n\n'))
    reader.read(b'data: {"choices":[{"delta":{"content":"unpaid"}}]}\n\n')
    assert b"unpaid" not in first + reader.tail(USAGE, cut=True)


def test_logprobs_are_shown_where_they_were_asked_for() -> None:
    asked = parse_responses(b'{"model":"m","input":"x","include":["message.output_text.logprobs"],"top_logprobs":2}')
    assert (bytes(asked.fields["logprobs"]), bytes(asked.fields["top_logprobs"])) == (b"true", b"2")
    one = {"token": "hi", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    choice = {"message": {"content": "hi"}, "finish_reason": "stop", "logprobs": {"content": [one]}}
    body = PlainResponse(REQUEST_ID, asked, json.dumps({"choices": [choice]}).encode()).body(USAGE)
    assert json.loads(body)["output"][0]["content"][0]["logprobs"] == [one]
    streamed = {"choices": [{"delta": {"content": "hi"}, "logprobs": {"content": [one]}}]}
    reader = ResponseReader(REQUEST_ID, asked)
    out = reader.accept(reader.read(b"data: " + json.dumps(streamed).encode() + b"\n\n"))
    deltas = [json.loads(line[6:]) for line in out.split(b"\n") if line.startswith(b"data: ")]
    assert deltas[-1]["logprobs"] == [one]


def test_arguments_that_are_no_object_are_handed_over_as_they_are() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "[1"}}
    body = json.dumps({"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "stop"}]}).encode()
    message = json.loads(PlainMessage(REQUEST_ID, MESSAGES_CALL, body).body(USAGE))
    assert message["content"][0]["input"] == {"invalid_arguments": "[1"}
    assert message["stop_reason"] == "tool_use"


def test_what_a_translation_leaves_out_still_counts_for_the_hold() -> None:
    """An upstream that speaks the dialect reads thoughts too; pictures count by piece in either wording."""
    thought = {"type": "thinking", "thinking": "x" * 5_000, "signature": ""}
    said: list[Any] = [{"role": "assistant", "content": [thought, {"type": "text", "text": "hi"}]}]
    source = {"type": "base64", "media_type": "image/png", "data": "A" * 1_000_000}
    shown: list[Any] = [{"role": "user", "content": [{"type": "image", "source": source}]}]

    def bound(messages: list[Any]) -> int:
        body = json.dumps({"model": "m", "max_tokens": 5, "messages": messages})
        return parse_messages(body.encode()).prompt_tokens_bound

    assert bound(said) >= 5_000
    assert bound(shown) < 10_000
