"""What a request used: the upstream's word where it can be believed, our own count where not. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ledger.gate import Receipt, Tokens
from proxy.openai.usage import Counts, usage_object


def measured(
    told: Counts | None,
    *,
    prompt_tokens: Callable[[], int],
    generated_tokens: Callable[[], int],
    reason: str,
    absurd: bytes | None = None,
) -> Tokens:
    """The tokens to settle. What `told` leaves open is counted by the callables, and the result marked as estimated.

    reason: why the upstream did not say. absurd: the usage object that was not believed.
    """
    if told is None:
        why = "absurd_usage" if absurd is not None else reason
        return Tokens(
            prompt_tokens=prompt_tokens(),
            generated_tokens=generated_tokens(),
            estimated=True,
            estimate_reason=why,
            raw=absurd,
        )
    prompt, generated = told.prompt_tokens, told.generated_tokens
    estimated = prompt is None or generated is None
    prompt = prompt_tokens() if prompt is None else prompt
    generated = generated_tokens() if generated is None else generated
    return Tokens(
        prompt_tokens=prompt,
        cached_tokens=told.cached_tokens,
        cache_write_tokens=told.cache_write_tokens,
        generated_tokens=generated,
        reasoning_tokens=told.reasoning_tokens,
        draft_tokens=told.draft_tokens,
        accepted_tokens=told.accepted_tokens,
        target_passes=told.target_passes,
        estimated=estimated,
        estimate_reason="partial_usage" if estimated else None,
        raw=absurd,
    )


def shown(tokens: Tokens, receipt: Receipt, draft_model: str | None, *, generates: bool) -> bytes:
    """The usage object that the client gets: what was settled, and nothing else."""
    counts = Counts(
        tokens.prompt_tokens,
        tokens.generated_tokens,
        tokens.cached_tokens,
        tokens.cache_write_tokens,
        tokens.reasoning_tokens,
        draft_model,
        tokens.draft_tokens,
        tokens.accepted_tokens,
        tokens.target_passes,
    )
    return usage_object(
        counts,
        billed_tokens=receipt.billed_tokens,
        cost_usd_pico=receipt.cost_usd_pico,
        cost_cny_pico=receipt.cost_cny_pico,
        price_version=receipt.price_version,
        embeddings=not generates,
    )


def without_generation(told: Counts | None) -> Counts | None:
    """Embeddings: the whole usage is prompt."""
    return None if told is None else msgspec.structs.replace(told, generated_tokens=0, reasoning_tokens=0)
