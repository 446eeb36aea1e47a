"""The dialect of `/v1/messages`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.anthropic import errors
from proxy.anthropic.answer import MessageReader, PlainMessage
from proxy.anthropic.request import parse_messages
from proxy.asgi import text
from proxy.auth import bearer
from proxy.openai.chunks import StreamReader
from proxy.openai.dialects import Dialect
from proxy.openai.errors import ApiError
from proxy.openai.plain import PlainAnswer
from proxy.openai.requests import Call


@dataclass(frozen=True, slots=True)
class Messages(Dialect):
    @property
    def upstream_path(self) -> bytes:
        return b"/chat/completions"

    def token(self, headers: Mapping[bytes, bytes]) -> str | None:
        """`x-api-key`, or a bearer token."""
        return text(headers.get(b"x-api-key")) or bearer(headers.get(b"authorization"))

    def plain(self, request_id: str, call: Call, body: bytes) -> PlainAnswer:
        return PlainMessage(request_id, call, body)

    def reader(self, request_id: str, call: Call) -> StreamReader:
        return MessageReader(request_id, call)

    def error_body(self, error: ApiError) -> bytes:
        return errors.error_body(error)

    def error_event(self, error: ApiError) -> bytes:
        return errors.error_event(error)


MESSAGES = Messages("/messages", parse_messages, "choices", is_chat=True, id_header=b"request-id")
