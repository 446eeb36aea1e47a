"""The dialect of `/v1/responses`."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.openai.chunks import StreamReader
from proxy.openai.dialects import Dialect
from proxy.openai.plain import PlainAnswer
from proxy.openai.requests import Call
from proxy.openai.responses.answer import PlainResponse, ResponseReader
from proxy.openai.responses.request import parse_responses


@dataclass(frozen=True, slots=True)
class Responses(Dialect):
    @property
    def upstream_path(self) -> bytes:
        return b"/chat/completions"

    def plain(self, request_id: str, call: Call, body: bytes) -> PlainAnswer:
        return PlainResponse(request_id, call, body)

    def reader(self, request_id: str, call: Call) -> StreamReader:
        return ResponseReader(request_id, call)


RESPONSES = Responses("/responses", parse_responses, "choices", is_chat=True)
