"""No bytes from a client or a provider make us fail: seeded, short here, long in `make soak`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.asgi import Reply
from proxy.http1 import ConnectionLost
from proxy.openai.chunks import StreamReader
from proxy.openai.errors import ApiError
from proxy.openai.plain import NoAnswer, PlainAnswer
from proxy.openai.requests import forward_body, parse_chat, prompt_text
from proxy.openai.sse import EventCutter
from proxy.relay import Ending, Relay
from proxy.upstream import Patience, UpstreamFailed
from proxy.watch import Watch

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
USAGE = st.dictionaries(
    st.sampled_from(["prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details", "tallygate"]), JSON
)
CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 2), "delta": st.dictionaries(st.sampled_from(["content", "tool_calls", "role"]), JSON)},
    optional={"finish_reason": st.none() | st.just("stop")},
)
CHUNK = st.fixed_dictionaries(
    {}, optional={"choices": st.lists(CHOICE, max_size=2) | JSON, "usage": USAGE | JSON, "error": JSON, "id": JSON}
)
EVENT = st.one_of(
    CHUNK.map(lambda chunk: b"data: " + json.dumps(chunk).encode() + b"\n\n"),
    st.just(b"data: [DONE]\n\n"),
    st.just(b": comment\r\n\r\n"),
    st.binary(max_size=30),
)
CALL = parse_chat(b'{"model":"m","messages":[{}],"stream":true,"stream_options":{"include_usage":true}}')


class Scripted:
    """An upstream that sends these packets and then ends, or breaks off."""

    status = 200

    def __init__(self, packets: list[bytes], breaks: bool) -> None:
        self.headers: dict[bytes, bytes] = {}
        self._packets = [packet for packet in packets if packet]
        self._breaks = breaks

    async def chunk(self) -> bytes:
        if self._packets:
            return self._packets.pop(0)
        if self._breaks:
            raise ConnectionLost("scripted")
        return b""

    def close(self) -> None: ...
    def leave(self) -> None: ...


class RichHold:
    """A hold that always covers; it counts what it was told."""

    def covers(self, generated_tokens: int) -> bool:
        return True

    async def extend(self, generated_tokens: int) -> bool:
        return True

    def progress(self, prompt_tokens: int, generated_tokens: int) -> None:
        assert prompt_tokens >= 0 <= generated_tokens


async def relayed(packets: list[bytes], breaks: bool) -> tuple[Ending | None, StreamReader]:

    async def send(message: Any) -> None:
        assert message["type"].startswith("http.response.")

    async def receive() -> Any:
        await asyncio.sleep(3600)

    watch = Watch(receive, 5)
    reader = StreamReader(CALL)
    relay = Relay("fuzz", Scripted(packets, breaks), reader, watch, Patience())
    try:
        await relay.open()
        ending = await relay.run(RichHold(), Reply(send, "id"), [], 1)  # type: ignore[arg-type]
    except UpstreamFailed:
        ending = None
    finally:
        relay.leave()
        watch.close()
    return ending, reader


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENT, max_size=8), st.booleans(), st.integers(1, 64))
def test_any_upstream_stream_ends_and_is_counted(events: list[bytes], breaks: bool, size: int) -> None:
    stream = b"".join(events)
    packets = [stream[at : at + size] for at in range(0, len(stream), size)]
    ending, reader = asyncio.run(relayed(packets, breaks))
    assert reader.generated_tokens >= 0
    if ending is not None and ending.how == "done":
        reader.usage_event(b"{}")


@settings(max_examples=400, deadline=None)
@given(st.lists(EVENT, max_size=8))
def test_what_passes_a_stream_is_what_came_less_usage_and_done(events: list[bytes]) -> None:
    cutter, reader = EventCutter(), StreamReader(CALL)
    for event in cutter.feed(b"".join(events)):
        piece = reader.read(event)
        reader.accept(piece)
        assert piece.done or piece.error or piece.usage is not None or reader.absurd or piece.out in (event, b"")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60) | CHUNK.map(lambda chunk: json.dumps(chunk).encode()))
def test_any_plain_body_is_an_answer_or_none(body: bytes) -> None:
    with contextlib.suppress(NoAnswer):
        answer = PlainAnswer(body, "choices")
        assert isinstance(answer.text(), str)
        json.loads(answer.body(b'{"prompt_tokens":1}'))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["stream", "max_tokens", "n", "user", "stream_options", "messages"]), JSON))
def test_any_request_is_forwarded_or_refused_with_400(fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}).encode()
    try:
        call = parse_chat(body)
    except ApiError as error:
        refused = error.status
    else:
        refused = 400
        assert json.loads(forward_body(call, "other", 3, continuous_usage=True))["model"] == "other"
        assert isinstance(prompt_text(call.fields), str)
    assert refused == 400
