"""Promises about requests: errors name the field, and what we need not touch is forwarded as it came."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.openai.chunks import StreamReader
from proxy.openai.errors import ApiError
from proxy.openai.requests import (
    forward_body,
    parse_chat,
    parse_completion,
    parse_embedding,
    refuse_surcharges,
)

MESSAGES = [{"role": "user", "content": "你好"}]


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES, **fields}, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"messages": []}', "model"),
        (b'{"model": "m"}', "messages"),
        (b'{"model": 3, "messages": [{}]}', "model"),
        (b'{"model": "m", "messages": {}}', "messages"),
        (b'{"model": "m", "messages": []}', "messages"),
        (chat(stream="yes"), "stream"),
        (chat(max_tokens="10"), "max_tokens"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_completion_tokens=-1), "max_completion_tokens"),
        (chat(max_tokens=10_000, max_completion_tokens=1), "max_tokens"),
        (chat(n=0), "n"),
        (chat(n=1000), "n"),
        (chat(user="x" * 600), "user"),
        (chat(user="a\0b"), "user"),
        (chat(stream_options={"include_usage": True}), "stream_options"),
        (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
        (b"{", None),
        (b"[]", None),
        (b"", None),
        (b"\xff\xfe", None),
        (b"[" * 100_000, None),
    ],
)
def test_a_wrong_request_is_400_and_names_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_chat(body)
    assert (caught.value.status, caught.value.type, caught.value.param) == (400, "invalid_request_error", param)


def test_unknown_fields_and_number_spellings_are_forwarded_byte_for_byte() -> None:
    body = (
        b'{"model":"m", "messages":[{"role":"user","content":"\\u4f60"}],'
        b' "x": 1.0, "y": 1e400, "z": 12345678901234567890123}'
    )
    forwarded = forward_body(parse_chat(body), "m", None, continuous_usage=False)
    for text in (b'"x":1.0', b'"y":1e400', b'"z":12345678901234567890123', b'[{"role":"user","content":"\\u4f60"}]'):
        assert text in forwarded


def test_a_field_named_twice_means_the_same_to_us_and_to_the_upstream() -> None:
    call = parse_chat(b'{"model":"dear","model":"cheap","messages":[{}],"max_tokens":1,"max_tokens":9}')
    forwarded = forward_body(call, "cheap", None, continuous_usage=False)
    assert (call.model, call.max_output_tokens) == ("cheap", 9)
    assert forwarded.count(b'"model"') == forwarded.count(b'"max_tokens"') == 1
    assert json.loads(forwarded)["model"] == "cheap"


def test_streams_always_ask_the_upstream_for_usage() -> None:
    call = parse_chat(chat(stream=True, stream_options={"include_usage": False, "other": 1}))
    forwarded = json.loads(forward_body(call, "m", None, continuous_usage=False))
    assert forwarded["stream_options"] == {"include_usage": True, "other": 1}
    assert not call.include_usage
    forwarded = json.loads(forward_body(parse_chat(chat(stream=True)), "m", None, continuous_usage=True))
    assert forwarded["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_a_lowered_limit_goes_where_the_client_wrote_it() -> None:
    call = parse_chat(chat(max_completion_tokens=100))
    assert json.loads(forward_body(call, "other", 7, continuous_usage=False)) == {
        "model": "other",
        "messages": MESSAGES,
        "max_completion_tokens": 7,
    }


def test_every_choice_of_every_prompt_counts() -> None:
    assert parse_completion(b'{"model":"m","prompt":["a","b"],"n":3}').choices == 6
    assert parse_completion(b'{"model":"m","prompt":[1,2,3]}').choices == 1
    assert parse_embedding(b'{"model":"m","input":["a"]}').max_output_tokens == 0


@given(st.text(max_size=200))
def test_the_prompt_bound_is_no_less_than_one_token_a_byte(text: str) -> None:
    body = chat(messages=[{"role": "user", "content": text}])
    assert parse_chat(body).prompt_tokens_bound >= len(text.encode(errors="replace"))


def image_part(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}


def test_inline_images_do_not_count_by_their_bytes() -> None:
    content = [image_part("A" * 1_000_000), image_part("B" * 1_000_000)]
    assert parse_chat(chat(messages=[{"role": "user", "content": content}])).prompt_tokens_bound < 10_000


@pytest.mark.parametrize(
    "part",
    [
        image_part("iVBORw0KGgo="),
        {"type": "image_url", "image_url": {"url": "https://example.com/large.png"}},
        {"type": "image_url", "image_url": "https://example.com/large.png"},
        {"image_url": {"url": "https://example.com/large.png"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    ],
)
def test_a_short_address_of_an_image_or_file_is_held_for_like_a_large_one(part: dict[str, Any]) -> None:
    body = chat(messages=[{"role": "user", "content": [part] * 10}])
    assert parse_chat(body).prompt_tokens_bound > 10 * 4_000
    assert (
        parse_chat(body.replace(b'"file', b'"\\u0066ile').replace(b'"image', b'"\\u0069mage')).prompt_tokens_bound
        > 40_000
    )


def test_text_that_looks_like_an_image_counts_as_text() -> None:
    text = "data:image/png;base64," + "A" * 200_000
    for content in (text, [{"type": "text", "text": text}], [image_part("A"), {"type": "text", "text": text}]):
        assert parse_chat(chat(messages=[{"role": "user", "content": content}])).prompt_tokens_bound > 200_000


@given(st.binary(max_size=300))
def test_no_bytes_make_parsing_fail_otherwise_than_with_400(body: bytes) -> None:
    for parse in (parse_chat, parse_completion, parse_embedding):
        with contextlib.suppress(ApiError):
            parse(body)


def test_what_is_around_a_prompt_is_not_taken_for_it() -> None:
    bare = parse_chat(chat())
    dressed = parse_chat(chat(tools=[{"type": "function", "function": {"name": "f" * 500}}], metadata={"a": "b" * 500}))
    assert bare.least_prompt_tokens() == dressed.least_prompt_tokens() == 1
    long = parse_chat(chat(messages=[{"role": "user", "content": "word " * 160}]))
    assert long.least_prompt_tokens() == 100


@pytest.mark.parametrize(
    ("field", "value", "refused"),
    [
        ("service_tier", '"priority"', True),
        ("service_tier", '"auto"', False),
        ("service_tier", "null", False),
        ("speed", '"fast"', True),
        ("speed", '"standard"', False),
        ("web_search_options", "{}", True),
        ("store", "true", False),
    ],
)
def test_what_costs_a_surcharge_that_no_price_covers_is_refused(field: str, value: str, refused: bool) -> None:
    call = parse_chat(f'{{"model":"m","messages":[{{}}],"{field}":{value}}}'.encode())
    if refused:
        with pytest.raises(ApiError) as caught:
            refuse_surcharges(call)
        assert (caught.value.status, caught.value.param) == (400, field)
    else:
        refuse_surcharges(call)


def test_calls_of_a_stream_count_where_a_tokenizer_counts() -> None:
    reader = StreamReader(parse_chat(b'{"model":"m","messages":[{}],"stream":true}'))
    reader.keep_text()
    for part in ('"name":"weather","arguments":""', '"arguments":"{\\"city\\":"', '"arguments":" 1}"'):
        event = f'data: {{"choices":[{{"delta":{{"tool_calls":[{{"index":0,"function":{{{part}}}}}]}}}}]}}\n\n'
        reader.accept(reader.read(event.encode()))
    assert reader.text() == 'weather{"city": 1}'
