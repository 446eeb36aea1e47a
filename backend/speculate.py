"""The mathematics of speculation: pure functions of tokens, tensors and numbers.

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192) for the
expected number of tokens; arXiv 2408.07978 for acceptance by equality under shared noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def accept(drafted: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """The tokens one verified row yields: what the target drew, up to and including its first disagreement.

    drawn[j] is the target's token after drafted[:j]; it holds one token more than `drafted`. Never empty.
    """
    assert len(drawn) == len(drafted) + 1
    for j, token in enumerate(drafted):
        if token != drawn[j]:
            return list(drawn[: j + 1])
    return list(drawn)


def accepted_counts(drafted: Tensor, drawn: Tensor, lengths: Tensor) -> Tensor:
    """`accept` for padded rows, without leaving the device: how many drafted tokens each row keeps.

    drafted int64 [rows, K], drawn int64 [rows, K + 1], lengths int64 [rows] (how much of a row is not padding).
    """
    steps = drafted.shape[1]
    real = torch.arange(steps, device=drafted.device)[None, :] < lengths[:, None]
    return ((drafted == drawn[:, :steps]) & real).to(torch.int64).cumprod(1).sum(1)


def expected_tokens(acceptance: float, length: float) -> float:
    """Tokens per target pass, each drafted token accepted with probability `acceptance`: (1 - a^(K+1)) / (1 - a)."""
    if acceptance >= 1.0:
        return length + 1.0
    return float((1.0 - acceptance ** (length + 1)) / (1.0 - acceptance))


def closed_form_speedup(acceptance: float, length: float, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Speed-up over plain decoding; costs in units of one plain target step: E(K) / (K c + v)."""
    return expected_tokens(acceptance, length) / (length * draft_cost + verify_cost)


class Rates(NamedTuple):
    """How probably a drafted token is accepted: the first of a block, and a later one when all before it were."""

    first: float
    later: float


class Choice(NamedTuple):
    """Draft lengths by row, and how many times faster than plain decoding the round should be with them."""

    lengths: list[int]
    gain: float


def best_lengths(
    rates: Sequence[Rates],
    caps: Sequence[int],
    plain_rows: int,
    draft_seconds: Callable[[int], float],
    target_seconds: Callable[[int], float],
    gain: float = 1.0,
) -> Choice:
    """Draft lengths for rows that share one draft: maximises tokens per second of the whole round.

    Tokens are handed out one by one to the row where the next is most likely to be accepted; the best stop of that
    walk wins. `plain_rows` are verified in the same pass and draft nothing. draft_seconds(rows) is the time of one
    draft step, target_seconds(tokens) that of one pass over packed tokens. Speculation has to beat plain decoding by
    the factor `gain`; otherwise every length is 0.
    """
    rows = len(rates)
    step = [0.0, *(draft_seconds(n) for n in range(1, rows + 1))]
    walk = sorted(
        (-rate.first * rate.later**depth, depth, row)
        for row, (rate, cap) in enumerate(zip(rates, caps, strict=True))
        for depth in range(cap)
    )
    tokens, drafting = float(rows + plain_rows), 0.0
    at_depth = [0] * max(caps, default=0)
    plain = tokens / target_seconds(rows + plain_rows)
    best_rate, best = gain * plain, 0
    for count, (likely, depth, _) in enumerate(walk, 1):
        tokens -= likely
        drafting += step[at_depth[depth] + 1] - step[at_depth[depth]]
        at_depth[depth] += 1
        rate = tokens / (target_seconds(rows + plain_rows + count) + drafting)
        if rate > best_rate:
            best_rate, best = rate, count
    lengths = [0] * rows
    for _, _, row in walk[:best]:
        lengths[row] += 1
    return Choice(lengths, best_rate / plain if best else 1.0)
