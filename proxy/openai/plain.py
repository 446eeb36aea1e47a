"""Answers in one piece: read their usage, put ours in its place, keep everything else."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from proxy.openai.requests import Fields
from proxy.openai.usage import AbsurdUsage, Counts, read_usage

_NULL = frozenset({b"", b"null"})
_cut = msgspec.json.Decoder(Fields)


class NoAnswer(ValueError):
    """A body that is no answer, whatever its status said."""


class PlainAnswer:
    """The body of a successful answer. Raises NoAnswer when it is an error, or no JSON object with results."""

    def __init__(self, body: bytes, results: str, *, may_be_empty: bool = False) -> None:
        try:
            self._fields = _cut.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            raise NoAnswer("it is not a JSON object") from None
        if bytes(self._fields.get("error", b"")) not in _NULL:
            raise NoAnswer("it is an error object")
        said = bytes(self._fields.get(results, b"")).strip()
        if said in _NULL or (said == b"[]" and not may_be_empty):
            raise NoAnswer(f"it has no `{results}`")
        self._results = results
        self.usage: Counts | None = None
        self.absurd: bytes | None = None
        usage = bytes(self._fields.get("usage", b""))
        if usage not in _NULL:
            try:
                self.usage = read_usage(usage)
            except AbsurdUsage:
                self.absurd = usage

    def text(self) -> str:
        """All that was generated, joined, for upstreams that do not count it."""
        texts: list[str] = []
        try:
            _gather(msgspec.json.decode(self._fields[self._results]), texts)
        except (msgspec.MsgspecError, RecursionError):
            return ""
        return "".join(texts)

    def body(self, usage: bytes) -> bytes:
        """The answer with this usage object."""
        self._fields["usage"] = Raw(usage)
        return msgspec.json.encode(self._fields)


_TOLD = (
    "message",
    "text",
    "content",
    "reasoning_content",
    "reasoning",
    "refusal",
    "tool_calls",
    "function",
    "name",
    "arguments",
)


def _gather(value: Any, texts: list[str]) -> None:
    match value:
        case str():
            texts.append(value)
        case list():
            for item in value:
                _gather(item, texts)
        case dict():
            for name in _TOLD:
                _gather(value.get(name), texts)
