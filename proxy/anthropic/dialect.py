"""The dialect of `/v1/messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.anthropic import errors
from proxy.anthropic.answer import MessageReader, PlainMessage
from proxy.anthropic.limits import limit_headers
from proxy.anthropic.native import NativeMessage, NativeMessageReader, native_body
from proxy.anthropic.request import parse_messages
from proxy.asgi import Headers, text
from proxy.auth import bearer
from proxy.ids import now_ms
from proxy.openai.chunks import StreamReader
from proxy.openai.dialects import Dialect
from proxy.openai.errors import ApiError
from proxy.openai.plain import PlainAnswer
from proxy.openai.requests import Call


@dataclass(frozen=True, slots=True)
class SpokenMessages(Dialect):
    """What our clients see of it, whatever the upstream speaks."""

    def token(self, headers: Mapping[bytes, bytes]) -> str | None:
        """`x-api-key`, or a bearer token."""
        return text(headers.get(b"x-api-key")) or bearer(headers.get(b"authorization"))

    def head(self, headers: Headers) -> Headers:
        return [*headers, *limit_headers(headers, now_ms())]

    def error_body(self, error: ApiError) -> bytes:
        return errors.error_body(error)

    def error_event(self, error: ApiError) -> bytes:
        return errors.error_event(error)


@dataclass(frozen=True, slots=True)
class Messages(SpokenMessages):
    """As chat completions know it."""

    def at(self, natively: frozenset[str]) -> Dialect:
        return NATIVE_MESSAGES if NATIVE_MESSAGES.native in natively else self

    @property
    def upstream_path(self) -> bytes:
        return b"/chat/completions"

    def plain(self, request_id: str, call: Call, body: bytes) -> PlainAnswer:
        return PlainMessage(request_id, call, body)

    def reader(self, request_id: str, call: Call) -> StreamReader:
        return MessageReader(request_id, call)


@dataclass(frozen=True, slots=True)
class NativeMessages(SpokenMessages):
    """As it is, for upstreams that have it."""

    def forward(self, call: Call, model: str, output_tokens: int | None, *, continuous_usage: bool) -> bytes:
        return native_body(call, model, output_tokens)

    def forward_headers(self, headers: Mapping[bytes, bytes]) -> bytes:
        version = headers.get(b"anthropic-version", b"2023-06-01")
        beta = headers.get(b"anthropic-beta")
        return b"anthropic-version: %b\r\n" % version + (b"anthropic-beta: %b\r\n" % beta if beta else b"")

    def plain(self, request_id: str, call: Call, body: bytes) -> PlainAnswer:
        return NativeMessage(body)

    def reader(self, request_id: str, call: Call) -> StreamReader:
        return NativeMessageReader(call)


NATIVE_MESSAGES = NativeMessages(
    "/messages",
    parse_messages,
    "content",
    is_chat=True,
    id_header=b"request-id",
    native="messages",
    sends_x_api_key=True,
)
MESSAGES = Messages("/messages", parse_messages, "choices", is_chat=True, id_header=b"request-id")
