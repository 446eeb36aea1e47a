"""What a step costs in seconds: measured at start, and then learned from the rounds themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_RATE = 0.03  # share of an error that one round corrects at its size, once the size has been run often; more before
_SPEED_RATE = 0.25  # the same for the speed of the machine, which all sizes share
_OF_THE_MACHINE = (
    1.6  # an error by this factor is not the size's: the machine became slower or faster, or was elsewhere
)
_TRUSTED = 0.25  # errors count up to this share of the cost: a round that was interrupted says little
_FIRST_ROUNDS = 4  # these only tell how fast the machine is


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

    Two things are learned: how slow the machine is now, which concerns all sizes alike and changes quickly, and what
    each size costs beside the others, which changes slowly. So sizes that are not run do not look fast in a busy hour.
    """

    def __init__(self, measured: StepCosts) -> None:
        self._sizes = measured.sizes
        self._seconds = list(measured.seconds)
        self._runs = [6.0] * len(self._seconds)  # rounds that each size stands for; the measurement counts as six
        self._rounds = 0
        self.slowness = 1.0  # of the machine, against the time of the measurement

    def __call__(self, tokens: int) -> float:
        return self.slowness * _interpolated(self._sizes, self._seconds, tokens)

    def learn(self, tokens: int, seconds: float) -> None:
        """A pass over `tokens` took so long."""
        self._rounds += 1
        ratio = min(4.0, max(0.25, seconds / max(1e-9, self(tokens))))
        if self._rounds <= _FIRST_ROUNDS:
            self.slowness *= ratio ** (1.0 / self._rounds)
            return
        self.slowness *= min(1.5, max(0.67, ratio)) ** _SPEED_RATE
        if not 1.0 / _OF_THE_MACHINE < ratio < _OF_THE_MACHINE:
            return
        error = relative_error(seconds, self(tokens))
        left, share = _place(self._sizes, tokens)
        for i, weight in ((left, 1.0 - share), (left + 1, share)):
            weight = min(1.0, max(0.0, weight))
            self._seconds[i] *= 1.0 + weight * max(_RATE, 1.0 / self._runs[i]) * error
            self._runs[i] += weight


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
