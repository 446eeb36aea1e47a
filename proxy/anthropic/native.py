"""`/v1/messages` at upstreams that have it: everything passes as it is, but the usage, which is what was settled."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from proxy.anthropic.answer import event_of, usage_of
from proxy.anthropic.errors import error_event
from proxy.anthropic.request import Asked
from proxy.openai.chunks import Piece, StreamReader
from proxy.openai.errors import ApiError
from proxy.openai.plain import PlainAnswer
from proxy.openai.requests import Call, Fields
from proxy.openai.sse import data_of
from proxy.openai.translation import Object
from proxy.openai.usage import AbsurdUsage, Counts, read_usage

_INPUTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


def native_body(call: Call, model: str, output_tokens: int | None) -> bytes:
    """The request as it was written, under the upstream's name for the model, with the limit lowered."""
    asked: Asked = call.asked
    changed: Fields = {"model": Raw(msgspec.json.encode(model))}
    if output_tokens is not None:
        changed["max_tokens"] = Raw(b"%d" % output_tokens)
    return msgspec.json.encode({**asked.written, **changed})


def read_message_usage(usage: Object, *, final: bool = True) -> Counts:
    """Cached tokens are told beside `input_tokens`; here they are part of the prompt. Raises AbsurdUsage.

    final: False for what a stream tells at its start, before anything was generated.
    """
    read, cached, written = (usage.get(name) for name in _INPUTS)
    for value in (read, cached, written):
        if value is not None and (type(value) is not int or value < 0):
            raise AbsurdUsage(f"{value!r} is no count of tokens")
    details = usage.get("output_tokens_details")
    thought = details.get("thinking_tokens") if isinstance(details, dict) else None
    told = {
        "prompt_tokens": None if read is None else read + (cached or 0) + (written or 0),
        "completion_tokens": usage.get("output_tokens") if final else None,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }
    return read_usage(msgspec.json.encode(told))


class NativeMessage(PlainAnswer):
    """Raises NoAnswer."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body, "content", may_be_empty=True)
        self._told: Object = {}
        raw = self._fields.get("usage", Raw(b"null"))
        try:
            told = msgspec.json.decode(raw)
            self.usage = None
            if isinstance(told, dict):
                self._told = told
                self.usage = read_message_usage(told)
        except (AbsurdUsage, msgspec.MsgspecError, OverflowError):
            self.absurd = bytes(raw)

    def text(self) -> str:
        blocks = msgspec.json.decode(self._fields["content"])
        return "".join(_said(block) for block in blocks) if isinstance(blocks, list) else ""

    def body(self, usage: bytes) -> bytes:
        return super().body(msgspec.json.encode({**self._told, **usage_of(usage)}))


class NativeMessageReader(StreamReader):
    """The last two events are held back until the message is settled."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'
        self._told: Object = {}
        self._last: Object = {}
        self._open: int | None = None
        self._at_start: Counts | None = None

    def read(self, event: bytes) -> Piece:
        payload = data_of(event)
        if not payload:
            return Piece(event)
        try:
            told = msgspec.json.decode(payload, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return Piece(event, read=False)
        self._last_payload = payload
        match told.get("type", "error" if "error" in told else None):
            case "error":
                return Piece(b"", error=payload)
            case "message_stop":
                return Piece(b"", done=True)
            case "message_start":
                message = told.get("message")
                usage = message.get("usage") if isinstance(message, dict) else None
                self._at_start = self._counts_of(usage, final=False)
            case "content_block_start":
                self._open = told.get("index")
            case "content_block_stop":
                self._open = None
            case "content_block_delta":
                return Piece(event, 1, self._at_start)
            case "message_delta":
                self._last = told
                return Piece(b"", 0, self._counts_of(told.get("usage"), final=True), 1)
        return Piece(event)

    def accept(self, piece: Piece) -> bytes:
        out = super().accept(piece)
        self.usage_is_final = bool(piece.finishes)
        return out

    def tail(self, usage: bytes, *, cut: bool) -> bytes:
        stop = b"" if self._open is None else event_of("content_block_stop", index=self._open)
        delta = {"stop_reason": "max_tokens" if cut else "end_turn", "stop_sequence": None}
        last = {"delta": delta, **({} if cut else self._last)}
        last |= {"type": "message_delta", "usage": {**self._told, **usage_of(usage)}}
        return stop + b"event: message_delta\ndata: " + msgspec.json.encode(last) + b"\n\n" + event_of("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        return error_event(error)

    def text(self) -> str:
        return "".join(_said(msgspec.json.decode(payload).get("delta")) for payload in self._kept or ())

    def _counts_of(self, usage: Any, *, final: bool) -> Counts | None:
        """Later events tell only what has changed."""
        if not isinstance(usage, dict):
            return None
        self._told |= {name: value for name, value in usage.items() if value is not None}
        try:
            return read_message_usage(self._told, final=final)
        except (AbsurdUsage, OverflowError):
            self.absurd = msgspec.json.encode(usage)
            return None


def _said(block: Any) -> str:
    """What a block or a delta says, as text."""
    if not isinstance(block, dict):
        return ""
    given = msgspec.json.encode(block["input"]).decode() if isinstance(block.get("input"), dict) else None
    parts = (block.get("text"), block.get("thinking"), block.get("name"), block.get("partial_json"), given)
    return "".join(part for part in parts if isinstance(part, str))
