"""The routes that generate, each as one value: how to read its requests and where its answers keep what they say.

A new route (or another vendor's shape) is one more `Dialect`; the gate before and the ledger behind it stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.auth import bearer
from proxy.openai.chunks import StreamReader
from proxy.openai.errors import ApiError
from proxy.openai.plain import PlainAnswer
from proxy.openai.requests import Call, parse_chat, parse_completion, parse_embedding


@dataclass(frozen=True, slots=True)
class Dialect:
    """path: below `/v1` here. results: the field of an upstream's answer that holds what was generated."""

    path: str
    parse: Callable[[bytes], Call]
    results: str
    is_chat: bool = False
    generates: bool = True
    id_header: bytes = b"x-request-id"
    """Which header carries the request id."""

    @property
    def upstream_path(self) -> bytes:
        """Below an upstream's base URL."""
        return self.path.encode()

    def token(self, headers: Mapping[bytes, bytes]) -> str | None:
        """The API key that a request carries."""
        return bearer(headers.get(b"authorization"))

    def plain(self, request_id: str, call: Call, body: bytes) -> PlainAnswer:
        """An upstream's answer in one piece, which knows how to say itself to our client. Raises NoAnswer."""
        return PlainAnswer(body, self.results)

    def reader(self, request_id: str, call: Call) -> StreamReader:
        """For an upstream's stream: what it says, and what of it our client sees."""
        return StreamReader(call, is_chat=self.is_chat)

    def error_body(self, error: ApiError) -> bytes:
        return error.body()

    def error_event(self, error: ApiError) -> bytes:
        return error.event()


CHAT = Dialect("/chat/completions", parse_chat, "choices", is_chat=True)
COMPLETIONS = Dialect("/completions", parse_completion, "choices")
EMBEDDINGS = Dialect("/embeddings", parse_embedding, "data", generates=False)
DIALECTS = (CHAT, COMPLETIONS, EMBEDDINGS)
