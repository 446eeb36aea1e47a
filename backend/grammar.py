"""Answers that must follow a grammar: JSON, a JSON schema, a tool call. Masks by llguidance.

A mask depends on the tokens before it and on nothing else, so it is one more logit processor: draft and target see the
same mask at the same place, and speculation stays exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backend.errors import BadRequest
from backend.text import Tokenizer

_OPTIONS = {"whitespace_pattern": "[ \\n\\t]{0,12}", "coerce_one_of": True}  # no model may pad for ever


class GrammarCompiler:
    """Makes matchers for one model. vocabulary: width of the model's logits; stop_tokens may end an answer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_tokens: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_tokens = sorted(stop_tokens)
        self._compiled: Any = None  # takes a second to build, so only when the first grammar arrives

    def start(self, grammar: str, field: str) -> MatcherGrammar:
        """A matcher at the beginning of an answer. Raises BadRequest, naming `field`, for an unusable grammar."""
        from llguidance import LLMatcher

        if self._compiled is None:
            from llguidance.hf import from_tokenizer

            self._compiled = from_tokenizer(
                self._tokenizer.fast, n_vocab=self._vocabulary, eos_token=self._stop_tokens or None
            )
        matcher = LLMatcher(self._compiled, grammar, log_level=0)
        if matcher.is_error():
            raise BadRequest(f"this grammar cannot be used: {matcher.get_error()}", param=field)
        return MatcherGrammar(matcher, self._vocabulary)


class MatcherGrammar:
    """The state of one answer. Drafted tokens are tried and taken back; only generated tokens stay."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def allowed(self, drafted: Sequence[int]) -> Tensor:
        """bool [vocabulary]. After drafted tokens that the grammar forbids anything goes: they are rejected anyway."""
        key = tuple(drafted)
        if key not in self._masks:
            self._masks[key] = self._mask_after(key)
        return self._masks[key]

    def advance(self, token: int) -> None:
        self._matcher.try_consume_tokens([token])
        self._masks.clear()

    def _mask_after(self, drafted: tuple[int, ...]) -> Tensor:
        tried = self._matcher.try_consume_tokens(list(drafted)) if drafted else 0
        try:
            if tried < len(drafted):
                return torch.ones(self._vocabulary, dtype=torch.bool)
            packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        finally:
            if tried:
                self._matcher.rollback(tried)
        bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.flatten()[: self._vocabulary].bool()


def grammar_of_format(response_format: Mapping[str, Any] | None) -> str | None:
    """The grammar that `response_format` asks for; None for plain text. Raises BadRequest."""
    from llguidance import LLMatcher

    kind = (response_format or {"type": "text"}).get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema({"type": "object", "x-guidance": _OPTIONS}))
    if kind == "json_schema":
        assert response_format is not None
        schema = (response_format.get("json_schema") or {}).get("schema")
        if not isinstance(schema, dict):
            raise BadRequest("`json_schema` needs a `schema`", param="response_format.json_schema.schema")
        return str(LLMatcher.grammar_from_json_schema({"x-guidance": _OPTIONS, **schema}))
    raise BadRequest(
        f"`response_format.type` must be text, json_object or json_schema, not {kind!r}", param="response_format.type"
    )


def grammar_of_calls(functions: Sequence[Mapping[str, Any]], open_tag: str, close_tag: str) -> str:
    """One call of one of these functions, between the tags, as JSON with `name` and `arguments`."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                "arguments": function.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    schema = json.dumps({"x-guidance": _OPTIONS, **({"anyOf": calls} if len(calls) > 1 else calls[0])})
    return f'start: {json.dumps(open_tag)} "\\n" call "\\n" {json.dumps(close_tag)}\ncall: %json {schema}\n'
