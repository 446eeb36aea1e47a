"""From logits to tokens: processors, the draw by shared Gumbel noise, logprobs.

A token is argmax(processed logits + Gumbel(seed, position, token id)); at temperature 0 it is the argmax. The noise is
a stateless hash, so a drafted token and the target's token at the same position are drawn with the same noise, and
equal tokens are an exact sample of the target (drafter-invariant coupling, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_CANDIDATES = 1024  # sorted first; the whole vocabulary is sorted only where these do not hold the nucleus
_AT_ONCE = 2  # rows drawn at once on a CPU; the scratch of more is given back each time (24 rows: 27 ms, now 7)
_BLOCK, _SMALLEST_BLOCK = 256, 32  # columns that are compared at once on a CPU
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX = (-4658895280553007687, -7723592293110705685)  # splitmix64's multipliers, signed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn. Defaults change nothing; `seed` is always resolved (never None).

    top_k 0, top_p 1, min_p 0, penalties 0 (repetition 1) are off. Truncation order: top_k, then top_p, then min_p.
    Presence and frequency penalties look at generated tokens, repetition_penalty also at the prompt.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def plain(self) -> bool:
        """Nothing but temperature comes between the logits and the draw."""
        return not (self.truncates or self.penalizes or self.logit_bias)

    @property
    def penalizes(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits to draw from: whose it is, which position it fills, and what precedes that position.

    position: absolute index of the token to draw. generated: counts of the request's generated tokens.
    drafted: tokens assumed after those, in this row's past. allowed: bool [vocab], None allows all.
    """

    params: SamplingParams
    position: int
    generated: Mapping[int, int] = field(default_factory=dict)
    prompt: frozenset[int] = frozenset()
    drafted: tuple[int, ...] = ()
    allowed: Tensor | None = None

    @property
    def untouched(self) -> bool:
        """The logits of this row go into the draw as they are."""
        params = self.params
        return self.allowed is None and not params.logit_bias and not params.penalizes


class Noise:
    """Gumbel noise over a vocabulary, or over the tokens of a cut head: `token_ids` says which token each column is."""

    def __init__(self, vocabulary: int, device: torch.device, token_ids: Tensor | None = None) -> None:
        ids = torch.arange(vocabulary, dtype=torch.int32) if token_ids is None else token_ids.to(torch.int32).cpu()
        self.lanes = _mix32(ids * -1640531527 + 0x3C6EF372).to(device)
        self.token_ids = None if token_ids is None else token_ids.to(device)
        self.columns = None if token_ids is None else {int(token): i for i, token in enumerate(token_ids.tolist())}

    def gumbel(self, seeds: Tensor, positions: Tensor) -> Tensor:
        """float32 [rows, columns] for int64 [rows] seeds and positions; the same noise on every device."""
        key = _mix64(_mix64(seeds) + positions * _GOLDEN)
        low, high = key.to(torch.int32)[:, None], (key >> 32).to(torch.int32)[:, None]
        bits = self.lanes[None, :] ^ low  # lowbias32, with the second half of the key in the middle
        bits ^= (bits >> 16) & 0xFFFF
        bits *= 0x7FEB352D
        bits += high
        bits ^= (bits >> 15) & 0x1FFFF
        bits *= -2073254261
        bits ^= (bits >> 16) & 0xFFFF
        # -log1p(-v) keeps the precision of small v, and small v are the ones that win
        uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
        return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(bits: Tensor) -> Tensor:
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * -2073254261
    return bits ^ ((bits >> 16) & 0xFFFF)


def _mix64(bits: Tensor) -> Tensor:
    bits = bits + _GOLDEN
    bits = (bits ^ ((bits >> 30) & (2**34 - 1))) * _MIX[0]
    bits = (bits ^ ((bits >> 27) & (2**37 - 1))) * _MIX[1]
    return bits ^ ((bits >> 31) & (2**33 - 1))


def draw(logits: Tensor, rows: Sequence[Row], noise: Noise) -> Tensor:
    """int64 [rows]: the token each row draws. logits: [rows, columns] in any float type, not changed."""
    if all(row.params.greedy and row.untouched for row in rows):
        columns = first_largest(logits)
    elif len(rows) > _AT_ONCE and logits.device.type == "cpu":
        starts = range(0, len(rows), _AT_ONCE)
        return torch.cat([draw(logits[i : i + _AT_ONCE], rows[i : i + _AT_ONCE], noise) for i in starts])
    else:
        scores = process(logits, rows, noise)
        hot = [i for i, row in enumerate(rows) if not row.params.greedy]
        if hot:
            seeds = torch.tensor([rows[i].params.seed for i in hot], dtype=torch.int64, device=logits.device)
            positions = torch.tensor([rows[i].position for i in hot], dtype=torch.int64, device=logits.device)
            gumbel = noise.gumbel(seeds, positions)
            if len(hot) == len(rows):
                scores = scores.add_(gumbel)
            else:
                scores[hot] += gumbel
        columns = first_largest(scores)
    return columns if noise.token_ids is None else noise.token_ids[columns]


def first_largest(scores: Tensor) -> Tensor:
    """int64 [rows]: argmax over the columns, the first of equal ones.

    On a CPU block by block: torch's own argmax is not vectorised there (24 rows of 49 152 in bfloat16: 4.3 ms, now .5).
    """
    rows, width = scores.shape
    block = _BLOCK
    while width % block:
        block //= 2
    if scores.device.type != "cpu" or block < _SMALLEST_BLOCK:
        return scores.argmax(-1)
    blocks = scores.reshape(rows, -1, block)
    best = blocks.amax(-1).argmax(-1)
    return best * block + blocks[torch.arange(rows), best].argmax(-1)


def draw_in_place(scores: Tensor, seeds: Tensor, positions: Tensor, temperatures: Tensor, noise: Noise) -> Tensor:
    """`draw` for rows without processors, in tensors alone, so that a CUDA graph can hold it; overwrites `scores`.

    scores float32 [rows, columns]; seeds, positions int64 [rows]; temperatures float32 [rows].
    """
    cold = (temperatures == 0)[:, None]
    scores /= torch.where(cold, 1.0, temperatures[:, None])
    scores += torch.where(cold, 0.0, noise.gumbel(seeds, positions))
    columns = scores.argmax(-1)
    return columns if noise.token_ids is None else noise.token_ids[columns]


def process(logits: Tensor, rows: Sequence[Row], noise: Noise) -> Tensor:
    """float32 copy of `logits` after bias, penalties, grammar mask, temperature and truncation, row by row."""
    scores = logits.to(torch.float32, copy=True)
    for i, row in enumerate(rows):
        if not row.untouched:
            _adjust(scores[i], row, noise)
    temperatures = [1.0 if row.params.greedy else row.params.temperature for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        scores /= torch.tensor(temperatures, device=scores.device)[:, None]
    for i, row in enumerate(rows):
        if row.params.truncates:
            _truncate(scores[i], row.params)
    return scores


def _adjust(scores: Tensor, row: Row, noise: Noise) -> None:
    params, columns = row.params, noise.columns

    def column(token: int) -> int:
        if columns is not None:
            return columns.get(token, -1)
        return token if token < scores.shape[0] else -1

    if params.penalizes:
        counts = dict(row.generated)
        for token in row.drafted:
            counts[token] = counts.get(token, 0) + 1
        if params.repetition_penalty != 1.0:
            seen = [c for token in row.prompt | counts.keys() if (c := column(token)) >= 0]
            index = torch.tensor(seen, dtype=torch.int64, device=scores.device)
            values = scores[index]
            penalty = params.repetition_penalty
            scores[index] = torch.where(values > 0, values / penalty, values * penalty)
        pairs = [(c, count) for token, count in counts.items() if (c := column(token)) >= 0]
        if pairs:
            index = torch.tensor([c for c, _ in pairs], dtype=torch.int64, device=scores.device)
            count_tensor = torch.tensor([float(count) for _, count in pairs], device=scores.device)
            scores[index] -= params.frequency_penalty * count_tensor + params.presence_penalty
    biases = [(c, bias) for token, bias in params.logit_bias if (c := column(token)) >= 0]
    if biases:
        index = torch.tensor([c for c, _ in biases], dtype=torch.int64, device=scores.device)
        scores[index] += torch.tensor([bias for _, bias in biases], device=scores.device)
    if row.allowed is not None:
        allowed = row.allowed.to(scores.device)
        allowed = allowed[: scores.shape[0]] if noise.token_ids is None else allowed[noise.token_ids]
        scores.masked_fill_(~allowed, float("-inf"))


def _truncate(scores: Tensor, params: SamplingParams) -> None:
    """Set what top_k, top_p and min_p exclude to -inf, in place. Equal scores at an edge all stay."""
    width = scores.shape[0]
    wanted = min(width, params.top_k if params.top_k > 0 else _CANDIDATES)
    values = scores.topk(wanted).values
    floor = values[-1] if params.top_k > 0 else scores.new_tensor(float("-inf"))
    if params.top_p < 1.0:
        total = values.logsumexp(0) if params.top_k > 0 else scores.logsumexp(0)
        mass = (values - total).exp()
        if params.top_k <= 0 and wanted < width and float(mass.sum()) < params.top_p:
            values = scores.sort(descending=True).values
            mass = (values - total).exp()
        before = mass.cumsum(0) - mass
        kept = int((before < params.top_p).sum())
        floor = torch.maximum(floor, values[max(kept, 1) - 1])
    if params.min_p > 0.0:
        floor = torch.maximum(floor, values[0] + float(torch.tensor(params.min_p).log()))
    scores.masked_fill_(scores < floor, float("-inf"))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities under the model's own distribution at temperature 1, before any processor."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    """logits [rows, vocab]; tokens [rows] chosen; top [rows]: how many alternatives to report for each."""
    normalized = logits.float().log_softmax(-1)
    index = torch.tensor(list(tokens), dtype=torch.int64, device=logits.device)
    chosen = normalized.gather(-1, index[:, None])[:, 0].tolist()
    most = max(top, default=0)
    values, ids = normalized.topk(most) if most else (None, None)
    result = []
    for i, token in enumerate(tokens):
        pairs: tuple[tuple[int, float], ...] = ()
        if values is not None and ids is not None and top[i]:
            pairs = tuple(zip(ids[i, : top[i]].tolist(), values[i, : top[i]].tolist(), strict=True))
        result.append(TokenLogprobs(token, chosen[i], pairs))
    return result
