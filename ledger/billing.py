"""What a request costs, what is set aside for it and what is billed: functions of token counts, rates and limits.

Nothing here reads a clock, a database or a journal. Rates and token counts by meter are tuples in the order of
prices.METERS.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from ledger.records import Progress, Usage

ByMeter = tuple[int, int, int, int, int]
"""Tokens, or pico per token, of each meter: input_uncached, cache_read, cache_write, output_text, output_reasoning."""

KEEP_ORDER = (1, 2, 0, 4, 3)
"""When not all is billed, tokens are billed in this order of meters: the prompt before the answer, text last."""

WINDOW_TOKENS = 1_024
"""A stream holds at most this many output tokens ahead of what it has delivered."""

Account = TypeVar("Account")


class Bill(NamedTuple):
    """What one request comes to. `usd_pico` and `cny_pico` price the billed tokens; the waived ones make the loss."""

    billed_tokens: int
    usd_pico: int
    cny_pico: int
    waived_usd_pico: int
    waived_cny_pico: int


class WorstCase(NamedTuple):
    """Pico per token at the dearest meter that a prompt or output token can turn out to be."""

    prompt_pico: int
    output_pico: int

    @classmethod
    def of(cls, rates: ByMeter) -> WorstCase:
        return cls(max(rates[0], rates[1], rates[2]), max(rates[3], rates[4]))


class Limit(NamedTuple):
    """What is available for a request in one place: an account, or all funding accounts together."""

    available_pico: int
    worst: WorstCase


def tokens_by_meter(usage: Usage) -> ByMeter:
    """The used tokens, each in exactly one meter: they sum to prompt + generated."""
    return (
        usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        usage.cached_tokens,
        usage.cache_write_tokens,
        usage.generated_tokens - usage.reasoning_tokens,
        usage.reasoning_tokens,
    )


def billed_by_meter(usage: Usage) -> ByMeter:
    """The billed tokens by meter: the first `billed_tokens` of the used ones in KEEP_ORDER."""
    return keep(tokens_by_meter(usage), usage.billed_tokens)


def keep(tokens: ByMeter, count: int) -> ByMeter:
    """The first `count` tokens in KEEP_ORDER."""
    kept = [0, 0, 0, 0, 0]
    for meter in KEEP_ORDER:
        kept[meter] = min(tokens[meter], count)
        count -= kept[meter]
    return (kept[0], kept[1], kept[2], kept[3], kept[4])


def cost(tokens: ByMeter, rates: ByMeter) -> int:
    """Σ tokens × rate, exact."""
    return (
        tokens[0] * rates[0] + tokens[1] * rates[1] + tokens[2] * rates[2] + tokens[3] * rates[3] + tokens[4] * rates[4]
    )


def bill(
    tokens: ByMeter, usd: ByMeter, cny: ByMeter, limit_usd_pico: int | None = None, limit_cny_pico: int | None = None
) -> Bill:
    """Bill all tokens if that stays within both limits (None: no limit), else as many whole tokens as do."""
    full_usd, full_cny = cost(tokens, usd), cost(tokens, cny)
    if (limit_usd_pico is None or full_usd <= limit_usd_pico) and (
        limit_cny_pico is None or full_cny <= limit_cny_pico
    ):
        return Bill(sum(tokens), full_usd, full_cny, 0, 0)
    count = 0
    limits = ((usd, limit_usd_pico), (cny, limit_cny_pico))
    left = [(rates, max(0, limit)) for rates, limit in limits if limit is not None]
    for meter in KEEP_ORDER:
        fitting = min([tokens[meter], *(limit // rates[meter] for rates, limit in left if rates[meter])])
        count += fitting
        if fitting < tokens[meter]:
            break
        left = [(rates, limit - fitting * rates[meter]) for rates, limit in left]
    kept = keep(tokens, count)
    billed_usd, billed_cny = cost(kept, usd), cost(kept, cny)
    return Bill(count, billed_usd, billed_cny, full_usd - billed_usd, full_cny - billed_cny)


def waive_all(tokens: ByMeter, usd: ByMeter, cny: ByMeter) -> Bill:
    return Bill(0, 0, 0, cost(tokens, usd), cost(tokens, cny))


def affordable_output(prompt_tokens: int, wanted_tokens: int, limits: Iterable[Limit]) -> int | None:
    """How many output tokens, at most `wanted_tokens`, every limit covers beside the prompt; None: not even the
    prompt."""
    tokens = wanted_tokens
    for available, worst in limits:
        left = available - prompt_tokens * worst.prompt_pico
        if left < 0:
            return None
        if worst.output_pico:
            tokens = min(tokens, left // worst.output_pico)
    return tokens


def next_window(delivered_tokens: int, max_output_tokens: int) -> int:
    """How many output tokens a stream should have covered once it has delivered that many."""
    return min(max_output_tokens, delivered_tokens + WINDOW_TOKENS)


def split(amount_pico: int, parts: Sequence[tuple[Account, int]]) -> list[tuple[Account, int]]:
    """Draw an amount from accounts in order, each up to what is there; parts of nothing are left out.

    Raises AssertionError when they do not hold enough: whoever calls this has made sure that they do.
    """
    drawn: list[tuple[Account, int]] = []
    for account, there in parts:
        if not amount_pico:
            break
        part = min(there, amount_pico)
        if part > 0:
            drawn.append((account, part))
            amount_pico -= part
    assert amount_pico == 0, "a charge is never larger than what is held for it"
    return drawn


def slice_size(needed_pico: int, free_pico: int, live_slots: int) -> int:
    """How much to lease from an account that has `free_pico` left, for a request short of `needed_pico`.

    Large when rich, so that one trip to SQL serves many requests; what is needed (or all that is left) when poor.
    """
    if free_pico <= 0:
        return 0
    return min(free_pico, max(needed_pico, free_pico // (2 * max(1, live_slots))))


def crash_usage(progress: Progress) -> Usage:
    """The usage of a request whose worker died: what was certainly delivered, never more."""
    return Usage(
        prompt_tokens=progress.prompt_tokens,
        generated_tokens=progress.generated_tokens,
        estimated=True,
        estimate_reason="crash",
    )
