"""How much to draft: from measured step costs and the acceptance so far, so that drafting never loses."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backend.drafts import Draft
from backend.sequence import Sequence as Running
from backend.speculate import best_lengths

_GAIN = 1.05  # rows that decode plainly start to draft for this much,
_GOING_ON = 1.02  # rows that draft go on for this much: costs are measured, and measurements are off by as much
_CAREFUL_ROUNDS = 2  # a request that has drafted less often than this
_CAREFUL_LENGTH = 2  # drafts at most so many tokens: nothing is known of it yet
_PROBE_SHARE = 0.01  # of the time that a plain request may spend on asking again whether drafting pays


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of one forward pass by packed tokens, measured at some sizes and interpolated between them."""

    sizes: tuple[int, ...] = (1, 64)
    seconds: tuple[float, ...] = (0.020, 0.040)

    def __call__(self, tokens: int) -> float:
        at = bisect_left(self.sizes, tokens)
        if at < len(self.sizes) and self.sizes[at] == tokens:
            return self.seconds[at]
        right = min(max(at, 1), len(self.sizes) - 1)
        x0, x1, y0, y1 = self.sizes[right - 1], self.sizes[right], self.seconds[right - 1], self.seconds[right]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

    @staticmethod
    def measured(points: Mapping[int, float]) -> StepCosts:
        """From size → seconds (two sizes or more). More tokens never cost less: noise is smoothed out."""
        sizes = tuple(sorted(points))
        seconds: list[float] = []
        for size in sizes:
            seconds.append(max(points[size], seconds[-1] if seconds else 0.0))
        return StepCosts(sizes, tuple(seconds))


class LengthPolicy:
    """Chooses the draft length of every decoding row, each round.

    fixed: always this length (benchmarks, tests). Otherwise the length that gives most tokens per second, down to 0.
    draw_seconds: what a draw with noise costs more than an argmax, for each token of a pass.
    """

    def __init__(
        self, target: StepCosts, *, longest: int = 8, fixed: int | None = None, draw_seconds: float = 0.0
    ) -> None:
        self.target = target
        self.draw_seconds = draw_seconds
        self.longest = longest
        self.fixed = fixed
        self.pair_rates: dict[str, float] = {}

    def lengths(self, rows: Sequence[Running], drafts: Mapping[str, Draft], capacity: int) -> list[int]:
        """One length per row; never more than the tokens a request may still get, less the one the target adds."""
        caps = [self._cap(row, drafts, capacity) for row in rows]
        if self.fixed is not None:
            return [min(self.fixed, cap) for cap in caps]
        chosen = [0] * len(rows)
        target = self._target_seconds(rows)
        for name, draft in drafts.items():
            members = [i for i, row in enumerate(rows) if row.request.draft == name and caps[i] > 0]
            if not members:
                continue
            for i in members:
                rows[i].tracker.start_from(self.pair_rates.get(name, 0.7))
            lengths = best_lengths(
                [rows[i].tracker.rate for i in members],
                [caps[i] for i in members],
                len(rows) - len(members),
                draft.step_seconds,
                target,
                _GOING_ON if any(rows[i].tracker.drafting and rows[i].tracker.rounds for i in members) else _GAIN,
            )
            for i, length in zip(members, lengths, strict=True):
                rows[i].tracker.drafting = length > 0
                chosen[i] = length or self._probe(rows[i], draft, len(rows), caps[i])
        return chosen

    def _target_seconds(self, rows: Sequence[Running]) -> Callable[[int], float]:
        """Time of a pass by its tokens, with the draw of those that are drawn with noise."""
        share = sum(not row.request.sampling.greedy for row in rows) / max(1, len(rows))
        return lambda tokens: self.target(tokens) + share * self.draw_seconds * tokens

    def _cap(self, row: Running, drafts: Mapping[str, Draft], capacity: int) -> int:
        name = row.request.draft
        if name is None or row.tracker.fallen_back:
            return 0
        room = min(
            self.longest if self.fixed is None else self.fixed, row.remaining - 1, capacity - len(row.tokens) - 1
        )
        return room if room > 0 and drafts[name].can_draft(row) else 0

    def _probe(self, row: Running, draft: Draft, rows: int, cap: int) -> int:
        """A request that asked for speculation drafts once; a plain one asks again so rarely that it cannot lose."""
        if row.request.forced and row.tracker.rounds == 0:
            return min(2, cap)
        extra = 2 * draft.step_seconds(1) + self.target(rows + 2) - self.target(rows)
        rounds = extra / (self.target(rows) * _PROBE_SHARE) if self.target(rows) > 0 else 1e9
        if row.tracker.idle_rounds >= max(32, rounds):
            return min(2, cap)
        return 0

    def learn(self, name: str, tested: int, accepted: int) -> None:
        """Remember a pair's usual acceptance, where new requests start from."""
        if tested:
            old = self.pair_rates.get(name, 0.7)
            weight = 0.98**tested
            self.pair_rates[name] = old * weight + (accepted / tested) * (1 - weight)
