"""The mathematics of speculation: pure functions of tokens, tensors and numbers.

Sources: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192) for the
expected number of tokens; arXiv 2408.07978 for acceptance by equality under shared noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per target pass, each drafted token accepted with probability `acceptance`: (1 - a^(K+1)) / (1 - a)."""
    if acceptance >= 1.0:
        return length + 1.0
    return float((1.0 - acceptance ** (length + 1)) / (1.0 - acceptance))


def closed_form_speedup(acceptance: float, length: int, draft_cost: float, verify_cost: float = 1.0) -> float:
    """Speed-up over plain decoding; costs in units of one plain target step: E(K) / (K c + v)."""
    return expected_tokens(acceptance, length) / (length * draft_cost + verify_cost)


def best_lengths(
    acceptances: Sequence[float],
    caps: Sequence[int],
    plain_rows: int,
    draft_seconds: Callable[[int], float],
    target_seconds: Callable[[int], float],
    gain: float = 1.0,
) -> list[int]:
    """Draft lengths for rows that share one draft: maximises tokens per second of the whole round.

    The rows with the best acceptance draft first; `plain_rows` are verified in the same pass and draft nothing.
    draft_seconds(rows) is the time of one draft step, target_seconds(tokens) that of one pass over packed tokens.
    Speculation has to beat plain decoding by the factor `gain`; otherwise every length is 0.
    """
    rows = len(acceptances)
    order = sorted(range(rows), key=lambda i: -acceptances[i])
    plain = (rows + plain_rows) / target_seconds(rows + plain_rows)
    best_rate, best = plain * gain, [0] * rows
    longest = max(caps, default=0)
    for drafting in range(1, rows + 1):
        members = order[:drafting]
        for length in range(1, longest + 1):
            lengths = [min(length, caps[i]) for i in members]
            tokens = sum(expected_tokens(acceptances[i], k) for i, k in zip(members, lengths, strict=True))
            seconds = target_seconds(rows + plain_rows + sum(lengths))
            seconds += sum(
                draft_seconds(sum(k > j for k in lengths)) for j in range(length) if any(k > j for k in lengths)
            )
            rate = (tokens + rows - drafting + plain_rows) / seconds
            if rate > best_rate:
                best_rate = rate
                best = [0] * rows
                for i, k in zip(members, lengths, strict=True):
                    best[i] = k
    return best
