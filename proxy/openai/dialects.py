"""The routes that generate, each as one value: how to read its requests and where its answers keep what they say.

A new route (or another vendor's shape) is one more `Dialect`; the gate before and the ledger behind it stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from proxy.asgi import Headers
from proxy.auth import bearer
from proxy.openai.chunks import StreamReader
from proxy.openai.errors import ApiError
from proxy.openai.plain import PlainAnswer
from proxy.openai.requests import Call, forward_body, parse_chat, parse_completion, parse_embedding


@dataclass(frozen=True, slots=True)
class Dialect:
    """path: below `/v1` here. results: the field of an upstream's answer that holds what was generated."""

    path: str
    parse: Callable[[bytes], Call]
    results: str
    is_chat: bool = False
    generates: bool = True
    id_header: bytes = b"x-request-id"
    """Which header carries the request id, beside `x-request-id`."""
    native: str = ""
    """The name under which an upstream's `native` list has it; "" for what is spoken without being listed."""
    sends_x_api_key: bool = False
    """Whether an upstream's key goes out as `x-api-key`, not as a bearer token."""

    def at(self, natively: frozenset[str]) -> Dialect:
        """How this dialect is spoken to an upstream that has these natively."""
        return self

    def forward(self, call: Call, model: str, output_tokens: int | None, *, continuous_usage: bool) -> bytes:
        """The body for an upstream that knows the model as `model`. output_tokens: a lowered limit per choice."""
        return forward_body(call, model, output_tokens, continuous_usage=continuous_usage)

    def forward_headers(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Header lines of the client that belong to the dialect."""
        return b""

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

    def head(self, headers: Headers) -> Headers:
        """The fields of a response's head, with those that only clients of this dialect read."""
        return headers

    def error_body(self, error: ApiError) -> bytes:
        return error.body()

    def error_event(self, error: ApiError) -> bytes:
        return error.event()


CHAT = Dialect("/chat/completions", parse_chat, "choices", is_chat=True)
COMPLETIONS = Dialect("/completions", parse_completion, "choices")
EMBEDDINGS = Dialect("/embeddings", parse_embedding, "data", generates=False)
DIALECTS = (CHAT, COMPLETIONS, EMBEDDINGS)
