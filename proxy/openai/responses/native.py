"""`/v1/responses` at upstreams that have it: everything passes as it is, but the usage, which is what was settled.

Nothing is stored there either: all our clients are one customer to the upstream, and could read each other's.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from proxy.openai.chunks import Piece, StreamReader
from proxy.openai.errors import ApiError
from proxy.openai.plain import NoAnswer, PlainAnswer
from proxy.openai.requests import Call, Fields
from proxy.openai.responses.answer import usage_of
from proxy.openai.responses.request import Asked
from proxy.openai.sse import data_of
from proxy.openai.translation import Object
from proxy.openai.usage import AbsurdUsage, Counts, read_usage

_LAST = ("response.completed", "response.incomplete")


def native_body(call: Call, model: str, output_tokens: int | None) -> bytes:
    """The request as it was written, under the upstream's name for the model, with the limit lowered."""
    asked: Asked = call.asked
    changed: Fields = {"model": Raw(msgspec.json.encode(model)), "store": Raw(b"false")}
    if output_tokens is not None:
        changed["max_output_tokens"] = Raw(b"%d" % output_tokens)
    return msgspec.json.encode({**asked.written, **changed})


def read_response_usage(usage: Any) -> Counts | None:
    """The counts under their names here. Raises AbsurdUsage."""
    if usage is None:
        return None
    if not isinstance(usage, dict):
        raise AbsurdUsage("it is no object")
    told = {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "total_tokens": usage.get("total_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
        "completion_tokens_details": usage.get("output_tokens_details"),
    }
    return read_usage(msgspec.json.encode(told))


class NativeResponse(PlainAnswer):
    """Raises NoAnswer, also for a response that failed."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body, "output", may_be_empty=True)
        if bytes(self._fields.get("status", b"")) in (b'"failed"', b'"cancelled"', b'"queued"', b'"in_progress"'):
            raise NoAnswer("the response is not complete")
        raw = self._fields.get("usage", Raw(b"null"))
        self.usage = None
        try:
            self.usage = read_response_usage(msgspec.json.decode(raw))
        except (AbsurdUsage, msgspec.MsgspecError, OverflowError):
            self.absurd = bytes(raw)

    def body(self, usage: bytes) -> bytes:
        return super().body(msgspec.json.encode(usage_of(usage)))


class NativeResponseReader(StreamReader):
    """The last event is held back until the response is settled."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._last: Object = {}
        self._response: Object = {}
        self._items: list[Any] = []
        self._number = -1
        self._next: Object | None = None

    def read(self, event: bytes) -> Piece:
        self._next = None
        payload = data_of(event)
        if not payload:
            return Piece(event)
        if payload == b"[DONE]":
            return Piece(b"", done=True)
        try:
            told = msgspec.json.decode(payload, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            return Piece(event, read=False)
        self._last_payload = payload
        kind = told.get("type")
        if kind in ("error", "response.failed") or (kind is None and "error" in told):
            return Piece(b"", error=payload)
        if kind in _LAST:
            self._last = told
            return Piece(b"", 0, self._counts_of(told), 1)
        self._next = told
        return Piece(event, int(isinstance(kind, str) and kind.endswith(".delta")))

    def accept(self, piece: Piece) -> bytes:
        if self._next is not None:
            self._remember(self._next)
        return super().accept(piece)

    def tail(self, usage: bytes, *, cut: bool) -> bytes:
        last, response = self._last, self._last.get("response")
        if cut or not isinstance(response, dict):
            response = {**self._response, "output": self._items}
            if cut:
                response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            last = {"type": f"response.{response.get('status', 'completed')}", "sequence_number": self._number + 1}
        return _event({**last, "response": {**response, "usage": usage_of(usage)}})

    def error_event(self, error: ApiError) -> bytes:
        told = {"error": error.object(), "code": error.code, "message": error.message, "param": error.param}
        failed = {**self._response, "status": "failed", "output": self._items}
        failed["error"] = {"code": error.code or error.type, "message": error.message}
        first = {"type": "error", "sequence_number": self._number + 1, **told}
        return _event(first) + _event(
            {"type": "response.failed", "sequence_number": self._number + 2, "response": failed}
        )

    def text(self) -> str:
        deltas = (msgspec.json.decode(payload).get("delta") for payload in self._kept or ())
        return "".join(delta for delta in deltas if isinstance(delta, str))

    def _remember(self, told: Object) -> None:
        """What an end of our own would have to tell."""
        if isinstance(told.get("sequence_number"), int):
            self._number = told["sequence_number"]
        if told.get("type") == "response.created" and isinstance(told.get("response"), dict):
            self._response = told["response"]
        if told.get("type") == "response.output_item.done":
            self._items.append(told.get("item"))

    def _counts_of(self, told: Object) -> Counts | None:
        response = told.get("response")
        usage = response.get("usage") if isinstance(response, dict) else None
        try:
            return read_response_usage(usage)
        except (AbsurdUsage, OverflowError):
            self.absurd = msgspec.json.encode(usage)
            return None


def _event(told: Object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(told["type"]).encode(), msgspec.json.encode(told))
