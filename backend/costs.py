"""What a step costs in seconds: measured at start, and then learned from the rounds themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_RATE = 0.05  # share of an error that one round corrects, once the size has been run often; more before that
_FOLLOW = 0.5  # share of a correction that sizes get which were not run: the machine may be slower for all of them
_TRUSTED = 0.25  # errors count up to this share of the cost: a round that was interrupted says little


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of one forward pass by packed tokens, measured at some sizes and interpolated between them."""

    sizes: tuple[int, ...] = (1, 64)
    seconds: tuple[float, ...] = (0.020, 0.040)

    def __call__(self, tokens: int) -> float:
        return _interpolated(self.sizes, self.seconds, tokens)

    @staticmethod
    def measured(points: Mapping[int, float]) -> StepCosts:
        """From size → seconds (two sizes or more). More tokens never cost less: noise is smoothed out."""
        sizes = tuple(sorted(points))
        seconds: list[float] = []
        for size in sizes:
            seconds.append(max(points[size], seconds[-1] if seconds else 0.0))
        return StepCosts(sizes, tuple(seconds))


class LearnedCosts:
    """Step costs that follow what rounds took: longer texts, a busier machine, a measurement that was off.

    A size that is run is corrected fully, the others by half as much: so a wrong cost beside a right one shows itself
    in use, and a slow hour of the machine does not make the sizes that were not run look fast.
    """

    def __init__(self, measured: StepCosts) -> None:
        self._sizes = measured.sizes
        self._seconds = list(measured.seconds)
        self._runs = [2.0] * len(self._seconds)  # rounds that each size stands for; the measurement counts as two

    def __call__(self, tokens: int) -> float:
        return _interpolated(self._sizes, self._seconds, tokens)

    def learn(self, tokens: int, seconds: float) -> None:
        """A pass over `tokens` took so long."""
        error = relative_error(seconds, self(tokens))
        left, share = _place(self._sizes, tokens)
        own = {left: 1.0 - share, left + 1: share}
        for i, runs in enumerate(self._runs):
            weight = min(1.0, max(0.0, own.get(i, 0.0)))
            rate = weight * max(_RATE, 1.0 / runs) + (1.0 - weight) * _FOLLOW * _RATE
            self._seconds[i] *= 1.0 + rate * error
            self._runs[i] = runs + weight


def relative_error(found: float, expected: float) -> float:
    """found / expected - 1, within what one round is trusted to say."""
    if expected <= 0.0:
        return 0.0
    return min(_TRUSTED, max(-_TRUSTED, found / expected - 1.0))


def learned_scale(scale: float, found: float, expected: float) -> float:
    """A factor on `expected` after one more round; expected includes `scale`."""
    return scale * (1.0 + _RATE * relative_error(found, expected))


def _place(sizes: Sequence[int], tokens: int) -> tuple[int, float]:
    """(i, share): `tokens` lies at sizes[i] + share of the way to sizes[i + 1]; beyond the ends share leaves 0 to 1."""
    right = min(max(bisect_left(sizes, tokens), 1), len(sizes) - 1)
    return right - 1, (tokens - sizes[right - 1]) / (sizes[right] - sizes[right - 1])


def _interpolated(sizes: Sequence[int], seconds: Sequence[float], tokens: int) -> float:
    left, share = _place(sizes, tokens)
    return seconds[left] + (seconds[left + 1] - seconds[left]) * share
