"""The dialect of `/v1/responses`."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.openai.chunks import StreamReader
from proxy.openai.dialects import Dialect
from proxy.openai.plain import PlainAnswer
from proxy.openai.requests import Call
from proxy.openai.responses.answer import PlainResponse, ResponseReader
from proxy.openai.responses.native import NativeResponse, NativeResponseReader, native_body
from proxy.openai.responses.request import parse_responses


@dataclass(frozen=True, slots=True)
class Responses(Dialect):
    """As chat completions know it."""

    def at(self, natively: frozenset[str]) -> Dialect:
        return NATIVE_RESPONSES if NATIVE_RESPONSES.native in natively else self

    @property
    def upstream_path(self) -> bytes:
        return b"/chat/completions"

    def plain(self, request_id: str, call: Call, body: bytes) -> PlainAnswer:
        return PlainResponse(request_id, call, body)

    def reader(self, request_id: str, call: Call) -> StreamReader:
        return ResponseReader(request_id, call)


@dataclass(frozen=True, slots=True)
class NativeResponses(Dialect):
    """As it is, for upstreams that have it."""

    def forward(self, call: Call, model: str, output_tokens: int | None, *, continuous_usage: bool) -> bytes:
        return native_body(call, model, output_tokens)

    def plain(self, request_id: str, call: Call, body: bytes) -> PlainAnswer:
        return NativeResponse(body)

    def reader(self, request_id: str, call: Call) -> StreamReader:
        return NativeResponseReader(call)


NATIVE_RESPONSES = NativeResponses("/responses", parse_responses, "output", is_chat=True, native="responses")
RESPONSES = Responses("/responses", parse_responses, "choices", is_chat=True)
