"""What a request used: the upstream's word where it can be believed, our own count where not. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ledger.gate import Receipt, Tokens
from ledger.money import format_amount
from proxy.openai.usage import Counts, usage_object


def measured(
    told: Counts | None,
    *,
    prompt_tokens: Callable[[], int],
    generated_tokens: Callable[[], int],
    reason: str,
    absurd: bytes | None = None,
    unreported: int = 0,
) -> Tokens:
    """The tokens to settle. What `told` leaves open is counted by the callables, and the result marked as estimated.

    reason: why the upstream did not say. absurd: the usage object that was not believed. unreported: generated tokens
    that came after `told`; a stream that breaks off has often told only how it began.
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
    estimated = prompt is None or generated is None or unreported > 0
    prompt = prompt_tokens() if prompt is None else prompt
    generated = generated_tokens() if generated is None else generated + unreported
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


class Settled:
    """A settled request as the client is told of it."""

    __slots__ = ("cost_cny", "cost_usd", "draft_model", "receipt", "tokens")

    def __init__(self, tokens: Tokens, receipt: Receipt, draft_model: str | None) -> None:
        self.tokens = tokens
        self.receipt = receipt
        self.draft_model = draft_model
        self.cost_usd = format_amount(receipt.cost_usd_pico).encode()
        self.cost_cny = format_amount(receipt.cost_cny_pico).encode()

    def usage(self, *, generates: bool = True) -> bytes:
        """The usage object: what was settled, and nothing else."""
        return usage_object(
            self.tokens,
            self.draft_model,
            billed_tokens=self.receipt.billed_tokens,
            cost_usd=self.cost_usd,
            cost_cny=self.cost_cny,
            price_version=self.receipt.price_version,
            generates=generates,
        )


def without_generation(told: Counts | None) -> Counts | None:
    """Embeddings: the whole usage is prompt."""
    return None if told is None else msgspec.structs.replace(told, generated_tokens=0, reasoning_tokens=0)
