"""Token counts as providers report them, made one; and the usage object that our clients get, written from the ledger.

Families: OpenAI, vLLM, SGLang, llama.cpp and Ollama (`prompt_tokens_details.cached_tokens`), DeepSeek
(`prompt_cache_hit_tokens`), xAI (reasoning beside `completion_tokens`, told by `total_tokens`), and our backend
(`tallygate.speculative`).
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

MAX_BELIEVED_TOKENS = 100_000_000


class AbsurdUsage(ValueError):
    """Counts that cannot be: negative, not an integer, above 100 000 000, or no object at all."""


class Counts(msgspec.Struct, frozen=True):
    """What an upstream says it used so far. None: it does not say (an explicit zero is said)."""

    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    draft_model: str | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    target_passes: int = 0


class _PromptDetails(msgspec.Struct):
    cached_tokens: Any = None
    cache_creation_tokens: Any = None
    cache_write_tokens: Any = None


class _CompletionDetails(msgspec.Struct):
    reasoning_tokens: Any = None


class _Speculative(msgspec.Struct):
    draft_model: Any = None
    draft_tokens: Any = None
    accepted_tokens: Any = None
    target_passes: Any = None


class _TallyGate(msgspec.Struct):
    speculative: _Speculative | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Any = None
    completion_tokens: Any = None
    total_tokens: Any = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None
    prompt_cache_hit_tokens: Any = None
    tallygate: _TallyGate | None = None


_decoder = msgspec.json.Decoder(_Usage)


def read_usage(raw: bytes | msgspec.Raw) -> Counts:
    """The counts of a usage object that is not null. Raises AbsurdUsage."""
    try:
        usage = _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise AbsurdUsage(str(error)) from None
    prompt = _count(usage.prompt_tokens)
    generated = _count(usage.completion_tokens)
    total = _count(usage.total_tokens)
    details = usage.prompt_tokens_details or _PromptDetails()
    cached = _count(details.cached_tokens)
    if cached is None:
        cached = _count(usage.prompt_cache_hit_tokens) or 0
    written = _count(details.cache_creation_tokens) or _count(details.cache_write_tokens) or 0
    reasoning = 0
    if usage.completion_tokens_details is not None:
        reasoning = _count(usage.completion_tokens_details.reasoning_tokens) or 0
    if reasoning and prompt is not None and generated is not None and total == prompt + generated + reasoning:
        generated += reasoning
    cached = min(cached, prompt or 0)
    speculative = usage.tallygate.speculative if usage.tallygate else None
    if speculative is None:
        return Counts(prompt, generated, cached, min(written, (prompt or 0) - cached), min(reasoning, generated or 0))
    drafted = _count(speculative.draft_tokens) or 0
    return Counts(
        prompt,
        generated,
        cached,
        min(written, (prompt or 0) - cached),
        min(reasoning, generated or 0),
        speculative.draft_model if isinstance(speculative.draft_model, str) else None,
        drafted,
        min(_count(speculative.accepted_tokens) or 0, drafted),
        _count(speculative.target_passes) or 0,
    )


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_BELIEVED_TOKENS:
        raise AbsurdUsage(f"{value!r} is no count of tokens")
    return value


class Used(Protocol):
    """Settled counts: `Counts` without a None, or the ledger's `Tokens`."""

    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def generated_tokens(self) -> int | None: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def cache_write_tokens(self) -> int: ...
    @property
    def reasoning_tokens(self) -> int: ...
    @property
    def draft_tokens(self) -> int: ...
    @property
    def accepted_tokens(self) -> int: ...
    @property
    def target_passes(self) -> int: ...


def usage_object(
    used: Used,
    draft_model: str | None,
    *,
    billed_tokens: int,
    cost_usd: bytes,
    cost_cny: bytes,
    price_version: str,
    generates: bool = True,
) -> bytes:
    """The usage object of an answer, as JSON, from what the ledger settled. `total_tokens` is what is billed.

    cost_*: decimal texts. generates: False for embeddings, whose usage has no `completion_tokens`.
    """
    generated = b'"completion_tokens":%d,' % (used.generated_tokens or 0) if generates else b""
    written = b',"cache_write_tokens":%d' % used.cache_write_tokens if used.cache_write_tokens else b""
    reasoning = b""
    if used.reasoning_tokens:
        reasoning = b'"completion_tokens_details":{"reasoning_tokens":%d},' % used.reasoning_tokens
    return (
        b'{"prompt_tokens":%d,%b"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d%b},%b'
        b'"tallygate":{"billed_tokens":%d,"cost_usd":"%b","cost_cny":"%b","price_version":%b,"speculative":%b}}'
        % (
            used.prompt_tokens or 0,
            generated,
            billed_tokens,
            used.cached_tokens,
            written,
            reasoning,
            billed_tokens,
            cost_usd,
            cost_cny,
            msgspec.json.encode(price_version),
            b"null" if draft_model is None else _speculative(used, draft_model),
        )
    )


def acceptance_rate(used: Used) -> str | None:
    """Accepted of drafted tokens, to four places; None when nothing was drafted."""
    return f"{used.accepted_tokens / used.draft_tokens:.4f}" if used.draft_tokens else None


def _speculative(used: Used, draft_model: str) -> bytes:
    return b'{"draft_model":%b,"draft_tokens":%d,"accepted_tokens":%d,"acceptance_rate":%b,"target_passes":%d}' % (
        msgspec.json.encode(draft_model),
        used.draft_tokens,
        used.accepted_tokens,
        (acceptance_rate(used) or "null").encode(),
        used.target_passes,
    )
