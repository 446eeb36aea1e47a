"""How much to draft: from step costs and the acceptance so far, so that drafting never loses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from backend.costs import LearnedCosts, StepCosts, learned_scale, relative_error
from backend.drafts import Draft
from backend.sequence import Sequence as Running
from backend.speculate import Rates, best_lengths

_GAIN = 1.08  # rows that decode plainly start to draft for this much,
_GOING_ON = 1.05  # rows that draft go on for this much: costs are measured, and measurements are off by as much
_GAIN_PER_ROW = 0.01  # and this more for each further row, whose prompt the draft reads as well
_PROBE_SHARE = 0.01  # of the time that plain rows may spend on asking again whether drafting pays
_PROBE_LENGTH = 2
_FIRST_FOR_LATER = 0.25  # what a first token's outcome counts for later ones: a bad draft rarely shows these
_SURE_GAIN = 1.5  # below it, plain rounds are run in between: what they cost decides, and only they tell
_PLAIN_EVERY = 32  # rounds with drafts to one plain one, at the most; fewer at first
_USUAL = 0.7  # what a pair accepts of which nothing is known
_MEMORY = 0.98  # per tested token, of a pair's usual acceptance; less at first


class LengthPolicy:
    """Chooses the draft length of every decoding row, each round.

    fixed: always this length (benchmarks, tests). Otherwise the length that gives most tokens per second, down to 0.
    draw_seconds: what a draw with noise costs more than an argmax, for each token of a pass.
    """

    def __init__(
        self, target: StepCosts, *, longest: int = 8, fixed: int | None = None, draw_seconds: float = 0.0
    ) -> None:
        self.target = LearnedCosts(target)
        self.draw_seconds = draw_seconds
        self.longest = longest
        self.fixed = fixed
        self.pair_rates: dict[str, Rates] = {}
        self._pair_tests: dict[str, int] = {}
        self._draft_scales: dict[str, float] = {}
        self._plain_rounds: dict[int, int] = {}  # by rows: how many were run,
        self._drafting_rounds: dict[int, int] = {}  # and how many rounds with drafts since the last

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
                rows[i].tracker.start_from(self.usual_rates(name))
            going_on = any(rows[i].tracker.drafting and rows[i].tracker.rounds for i in members)
            choice = best_lengths(
                [rows[i].tracker.rates for i in members],
                [caps[i] for i in members],
                len(rows) - len(members),
                self._draft_seconds(name, draft),
                target,
                (_GOING_ON if going_on else _GAIN) + _GAIN_PER_ROW * (len(rows) - 1),
            )
            compare = choice.gain < _SURE_GAIN and self._plain_is_due(len(rows))
            for i, length in zip(members, choice.lengths, strict=True):
                rows[i].tracker.drafting = length > 0
                chosen[i] = 0 if compare else length
                chosen[i] = chosen[i] or self._probe(rows[i], self._draft_seconds(name, draft), len(rows), caps[i])
        return chosen

    def _plain_is_due(self, rows: int) -> bool:
        interval = min(_PLAIN_EVERY, 1 << min(16, self._plain_rounds.get(rows, 0)))
        return self._drafting_rounds.get(rows, interval) >= interval

    def usual_rates(self, name: str) -> Rates:
        """What this pair usually accepts; new requests start from it."""
        return self.pair_rates.get(name, Rates(_USUAL, _USUAL))

    def _target_seconds(self, rows: Sequence[Running]) -> Callable[[int], float]:
        """Time of a pass by its tokens, with the draw of those that are drawn with noise."""
        draw = self._draw_seconds(rows)
        return lambda tokens: self.target(tokens) + draw * tokens

    def _draw_seconds(self, rows: Sequence[Running]) -> float:
        share = sum(not row.request.sampling.greedy for row in rows) / max(1, len(rows))
        return share * self.draw_seconds

    def _draft_seconds(self, name: str, draft: Draft) -> Callable[[int], float]:
        scale = self._draft_scales.get(name, 1.0) * self.target.slowness
        return lambda rows: scale * draft.step_seconds(rows)

    def _cap(self, row: Running, drafts: Mapping[str, Draft], capacity: int) -> int:
        name = row.request.draft
        if name is None:
            return 0
        room = min(
            self.longest if self.fixed is None else self.fixed, row.remaining - 1, capacity - len(row.tokens) - 1
        )
        return room if room > 0 and drafts[name].can_draft(row) else 0

    def _probe(self, row: Running, draft_seconds: Callable[[int], float], rows: int, cap: int) -> int:
        """A request that asked for speculation drafts once; plain ones ask again so rarely that they cannot lose."""
        if row.request.forced and row.tracker.rounds == 0:
            return min(_PROBE_LENGTH, cap)
        plain = self.target(rows)
        extra = _PROBE_LENGTH * draft_seconds(1) + self.target(rows + _PROBE_LENGTH) - plain
        rounds = rows * extra / (plain * _PROBE_SHARE) if plain > 0 else 1e9  # all rows together spend the share
        if row.tracker.idle_rounds >= max(32, rounds):
            return min(_PROBE_LENGTH, cap)
        return 0

    def learn(self, name: str, tested: int, accepted: int) -> None:
        """Remember a pair's usual acceptance, at the first drafted token and at later ones."""
        first, later = self.usual_rates(name)
        known = self._pair_tests.get(name, 0)
        for depth in range(tested):
            weight = max(1.0 - _MEMORY, 1.0 / (known + depth + 8))
            if depth == 0:
                first += weight * ((accepted > 0) - first)
                later += _FIRST_FOR_LATER * weight * ((accepted > 0) - later)
            else:
                later += weight * ((depth < accepted) - later)
        self._pair_tests[name] = known + tested
        self.pair_rates[name] = Rates(first, later)

    def learn_round(
        self,
        rows: Sequence[Running],
        lengths: Sequence[int],
        drafted: int,
        drafts: Mapping[str, Draft],
        draft_seconds: float | None,
        target_seconds: float,
    ) -> None:
        """A round without prompts took so long. lengths: what the drafts were asked for; drafted: what they gave.

        draft_seconds None: both parts ran as one, and target_seconds is the time of both.
        """
        draw = self._draw_seconds(rows) * (len(rows) + drafted)
        expected = self.target(len(rows) + drafted)
        asked = self._expected_draft_seconds(rows, lengths, drafts)
        drafting = sum(asked.values())
        if draft_seconds is None:
            error = relative_error(target_seconds, expected + draw + drafting)
            target_seconds, draft_seconds = (1 + error) * (expected + draw), (1 + error) * drafting
        self.target.learn(len(rows) + drafted, target_seconds - draw)
        if drafted:
            self._drafting_rounds[len(rows)] = self._drafting_rounds.get(len(rows), 0) + 1
        else:
            self._plain_rounds[len(rows)] = self._plain_rounds.get(len(rows), 0) + 1
            self._drafting_rounds[len(rows)] = 0
        for name in asked:
            scale = self._draft_scales.get(name, 1.0)
            self._draft_scales[name] = learned_scale(scale, draft_seconds, drafting)

    def _expected_draft_seconds(
        self, rows: Sequence[Running], lengths: Sequence[int], drafts: Mapping[str, Draft]
    ) -> dict[str, float]:
        expected = {}
        for name, draft in drafts.items():
            own = [k for row, k in zip(rows, lengths, strict=True) if k > 0 and row.request.draft == name]
            step = self._draft_seconds(name, draft)
            seconds = sum(step(sum(k > depth for k in own)) for depth in range(max(own, default=0)))
            if seconds > 0.0:
                expected[name] = seconds
        return expected
