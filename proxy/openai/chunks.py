"""Streams of `chat.completion.chunk` and `text_completion` events: what each one says, and which bytes may pass.

Only chunks with a non-null `usage` are rewritten or held back; everything else passes byte for byte.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from proxy.openai.errors import ApiError
from proxy.openai.requests import Call, Fields
from proxy.openai.sse import DONE, DONE_EVENT, KEEP_ALIVE, data_event, data_of
from proxy.openai.usage import AbsurdUsage, Counts, read_usage

_SAYS_NOTHING = frozenset({b"", b"null", b'""', b"[]", b"{}"})
_NOTHING = Raw(b"")


class _Delta(msgspec.Struct):
    content: Raw = _NOTHING
    reasoning_content: Raw = _NOTHING
    reasoning: Raw = _NOTHING
    tool_calls: Raw = _NOTHING
    function_call: Raw = _NOTHING
    refusal: Raw = _NOTHING
    audio: Raw = _NOTHING


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: Raw = _NOTHING
    finish_reason: Raw = _NOTHING


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Raw = _NOTHING
    error: Raw = _NOTHING


_decoder = msgspec.json.Decoder(_Chunk)
_cut = msgspec.json.Decoder(Fields)


class Piece(NamedTuple):
    """One event, read. Nothing of it counts before `StreamReader.accept`."""

    out: bytes
    """What the client may see of it; b"" when it is held back."""
    tokens: int = 0
    """Choices that it brings something for: at least one token each."""
    usage: Counts | None = None
    finishes: int = 0
    done: bool = False
    error: bytes | None = None
    """The error object of an upstream that fails in the middle."""
    read: bool = True
    """False: it carries a payload that is no chunk."""


class StreamReader:
    """What a stream has said so far, and how its end is told to the client. A dialect that translates extends it."""

    keep_alive = KEEP_ALIVE
    """What a quiet stream sends, so that nobody between takes it for dead."""

    is_whole = False
    """It comes in one piece, so that deltas say nothing about how much it is."""

    def __init__(self, call: Call, *, is_chat: bool = True) -> None:
        self._is_chat = is_chat
        self._include_usage = call.include_usage
        self._keep_usage = call.continuous_usage
        self._choices = max(1, call.choices)
        self._delivered = 0
        self._finishes = 0
        self._last_payload = b""
        self._kept: list[bytes] | None = None
        self.usage: Counts | None = None
        self.unreported = 0
        """What was delivered since the upstream last said what it has used, counted as `delivered_deltas`."""
        self.absurd: bytes | None = None
        """A usage object that was not believed, as received."""
        self.usage_is_final = False

    def read(self, event: bytes) -> Piece:
        """Tell what an event says. Events that are no JSON object pass through and say nothing."""
        payload = data_of(event)
        if payload is None or not payload:
            return Piece(event)
        if payload == DONE:
            return Piece(b"", done=True)
        try:
            chunk = _decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError):
            return Piece(event, read=False)
        self._last_payload = payload
        if bytes(chunk.error) not in _SAYS_NOTHING:
            return Piece(b"", error=bytes(chunk.error))
        tokens = finishes = 0
        for choice in chunk.choices or ():
            tokens += _says_something(choice)
            finishes += bytes(choice.finish_reason) not in _SAYS_NOTHING
        usage = bytes(chunk.usage)
        if usage in _SAYS_NOTHING:
            return Piece(event, tokens, None, finishes)
        return Piece(self._without_usage(event, payload, chunk), tokens, self._counts(usage), finishes)

    def accept(self, piece: Piece) -> bytes:
        """Count a piece as delivered (or as read, when nothing of it is). Returns the bytes for the client."""
        self._delivered += piece.tokens
        self._finishes += piece.finishes
        if self._kept is not None and piece.tokens:
            self._kept.append(self._last_payload)
        if piece.usage is None:
            self.unreported += piece.tokens
        else:
            self.usage = piece.usage
            self.unreported = 0
            self.usage_is_final = not piece.out
        return piece.out

    def generated_with(self, piece: Piece) -> int:
        """Generated tokens once `piece` is delivered."""
        if piece.usage is not None and piece.usage.generated_tokens is not None:
            return piece.usage.generated_tokens
        return self.generated_tokens + piece.tokens

    @property
    def has_spoken(self) -> bool:
        """Whether one chunk was understood."""
        return bool(self._last_payload)

    def keep_text(self) -> None:
        """From now on keep what is delivered, so that `text` can tell it."""
        self._kept = []

    def text(self) -> str:
        """All that was delivered, joined; "" unless it was kept."""
        pieces = (choice for payload in self._kept or () for choice in _decoder.decode(payload).choices or ())
        return "".join(_text_of(choice) for choice in pieces)

    @property
    def delivered_deltas(self) -> int:
        """The count of last resort: one token per delta that says something."""
        return self._delivered

    @property
    def generated_tokens(self) -> int:
        """As far as is known while it runs."""
        if self.usage is not None and self.usage.generated_tokens is not None:
            return max(self.usage.generated_tokens + self.unreported, self._delivered)
        return self._delivered

    @property
    def finished(self) -> bool:
        """Whether every choice has told why it ended."""
        return self._finishes >= self._choices

    def tail(self, usage: bytes, *, cut: bool) -> bytes:
        """What follows once the answer is settled. usage: the settled usage object. cut: the money ended it."""
        tail = self.cut_event(self._is_chat) if cut else b""
        if self._include_usage:
            tail += self.usage_event(usage)
        return tail + DONE_EVENT

    def error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return error.event()

    def usage_event(self, usage: bytes) -> bytes:
        """The last chunk before `[DONE]`, for clients that asked: no choices, the usage."""
        return data_event(msgspec.json.encode({**self._frame(), "choices": Raw(b"[]"), "usage": Raw(usage)}))

    def cut_event(self, chat: bool) -> bytes:
        """A chunk that ends every choice with `finish_reason: "length"`."""
        content = '"delta":{}' if chat else '"text":""'
        choices = ",".join(
            f'{{"index":{index},{content},"logprobs":null,"finish_reason":"length"}}' for index in range(self._choices)
        )
        return data_event(msgspec.json.encode({**self._frame(), "choices": Raw(f"[{choices}]".encode())}))

    def _frame(self) -> Fields:
        try:
            fields = _cut.decode(self._last_payload)
        except msgspec.MsgspecError:
            return {}
        kept = ("id", "object", "created", "model", "service_tier", "system_fingerprint")
        return {name: fields[name] for name in kept if name in fields}

    def _counts(self, usage: bytes) -> Counts | None:
        try:
            return read_usage(usage)
        except AbsurdUsage:
            self.absurd = usage
            return None

    def _without_usage(self, event: bytes, payload: bytes, chunk: _Chunk) -> bytes:
        if not chunk.choices:
            return b""
        if self._keep_usage:
            return event
        fields = _cut.decode(payload)
        del fields["usage"]
        end = event[len(event.rstrip(b"\r\n")) :]
        return b"data: " + msgspec.json.encode(fields) + (end or b"\n\n")


def _text_of(choice: _Choice) -> str:
    delta = choice.delta
    raws = (choice.text,) if delta is None else (delta.content, delta.reasoning_content, delta.reasoning, delta.refusal)
    values = [msgspec.json.decode(raw) for raw in raws if bytes(raw) not in _SAYS_NOTHING]
    said = "".join(value for value in values if isinstance(value, str))
    if delta is None or bytes(delta.tool_calls) in _SAYS_NOTHING:
        return said
    return said + _text_of_calls(msgspec.json.decode(delta.tool_calls))


def _text_of_calls(calls: Any) -> str:
    """Names and arguments: what was generated of calls."""
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    parts = (
        function.get(part) for function in functions if isinstance(function, dict) for part in ("name", "arguments")
    )
    return "".join(part for part in parts if isinstance(part, str))


def _says_something(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bytes(choice.text) not in _SAYS_NOTHING
    return (
        bytes(delta.content) not in _SAYS_NOTHING
        or bytes(delta.reasoning_content) not in _SAYS_NOTHING
        or bytes(delta.tool_calls) not in _SAYS_NOTHING
        or bytes(delta.reasoning) not in _SAYS_NOTHING
        or bytes(delta.function_call) not in _SAYS_NOTHING
        or bytes(delta.refusal) not in _SAYS_NOTHING
        or bytes(delta.audio) not in _SAYS_NOTHING
    )
