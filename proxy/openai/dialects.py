"""The routes that generate, each as one value: how to read its requests and where its answers keep what they say.

A new route (or another vendor's shape) is one more `Dialect`; the gate before and the ledger behind it stay the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from proxy.openai.errors import ApiError
from proxy.openai.requests import Call, parse_chat, parse_completion, parse_embedding


@dataclass(frozen=True, slots=True)
class Dialect:
    """path: below `/v1` here and below an upstream's base URL. results: the field that holds what was generated."""

    path: str
    parse: Callable[[bytes], Call]
    results: str
    is_chat: bool = False
    generates: bool = True

    @property
    def upstream_path(self) -> bytes:
        return self.path.encode()

    def error_body(self, error: ApiError) -> bytes:
        return error.body()

    def error_event(self, error: ApiError) -> bytes:
        return error.event()


CHAT = Dialect("/chat/completions", parse_chat, "choices", is_chat=True)
COMPLETIONS = Dialect("/completions", parse_completion, "choices")
EMBEDDINGS = Dialect("/embeddings", parse_embedding, "data", generates=False)
DIALECTS = (CHAT, COMPLETIONS, EMBEDDINGS)
