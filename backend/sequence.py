"""One request while it runs: what was asked, what was generated, why it ended."""

from __future__ import annotations

import time
from collections import abc
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from torch import Tensor

from backend.sampling import Row, SamplingParams, TokenLogprobs
from backend.speculate import Rates
from backend.text import TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Grammar(Protocol):
    """What a grammar allows next, after the tokens of one request."""

    def allowed(self, drafted: abc.Sequence[int]) -> Tensor:
        """bool [vocabulary]: the tokens that may follow the request's tokens and then `drafted`."""
        ...

    def advance(self, token: int) -> None:
        """One more token was generated."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate. `draft` None means plain decoding; `forced` drafts at least one round.

    logprobs: number of alternatives to report per token, None reports nothing. max_tokens ≥ 1.
    """

    id: str
    prompt: abc.Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    draft: str | None = None
    forced: bool = False
    tenant: str = ""
    grammar: Grammar | None = None


@dataclass(slots=True)
class SpeculationStats:
    """Work of one request. target_passes counts the passes that generated tokens, not those that read the prompt."""

    draft_tokens: int = 0
    accepted_tokens: int = 0
    target_passes: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """What a round added to one request, with totals after it."""

    sequence: Sequence
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    generated_tokens: int
    stats: SpeculationStats
    finish_reason: FinishReason | None
    error: str | None = None


class Sequence:
    """State of a running request. `tokens` = prompt + generated; every token before the last is in the slot."""

    def __init__(self, request: Request, decode: abc.Callable[[list[int]], str]) -> None:
        self.request = request
        self.prompt_tokens = len(request.prompt)
        self.tokens: list[int] = list(request.prompt)
        self.text = TextStream(decode, request.stop, list(request.prompt)[-6:])
        self.counts: dict[int, int] = {}
        self.slot: int | None = None
        self.computed = 0  # tokens whose keys and values are in the slot
        self.cached_tokens = 0
        self.hidden: Tensor | None = None  # [width]: the target's state that the last token was drawn from
        self.stats = SpeculationStats()
        self.finish_reason: FinishReason | None = None
        self.tracker = AcceptanceTracker()
        self.arrived_s = time.monotonic()
        self.started_s = self.arrived_s  # when it got its slot
        self.first_token_s: float | None = None
        self._pending: list[tuple[int, int, TokenLogprobs]] = []
        self._prompt_set: frozenset[int] | None = None

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def prefilling(self) -> bool:
        return self.computed < len(self.tokens) - 1 or self.generated_tokens == 0

    @property
    def remaining(self) -> int:
        return self.request.max_tokens - self.generated_tokens

    def row(self, drafted: abc.Sequence[int] = ()) -> Row:
        """How to draw the token after `tokens` and then `drafted`."""
        request = self.request
        if self._prompt_set is None:
            wanted = request.sampling.repetition_penalty != 1.0
            self._prompt_set = frozenset(request.prompt) if wanted else frozenset()
        allowed = None if request.grammar is None else request.grammar.allowed(drafted)
        position = len(self.tokens) + len(drafted)
        return Row(request.sampling, position, self.counts, self._prompt_set, tuple(drafted), allowed)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Take one generated token; True when it ends the request. A stop inside the budget wins over the budget."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self.tokens.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1
        if self.request.grammar is not None:
            self.request.grammar.advance(token)
        start = len(self.text.text)
        if token in self.request.stop_tokens or self.text.push(token):
            self.finish("stop")
        elif self.remaining <= 0:
            self.finish("length")
        if logprobs is not None and token not in self.request.stop_tokens:
            self._pending.append((start, len(self.text.text), logprobs))
        return self.finish_reason is not None

    def finish(self, reason: FinishReason) -> None:
        self.text.finish()
        self.finish_reason = reason

    def take_update(self, error: str | None = None) -> Update:
        """What is certain now and was not taken before."""
        text = self.text.take()
        over, end = self.finish_reason is not None, len(self.text.text)
        ready: list[TokenLogprobs] = []
        while self._pending and (over or self._pending[0][1] <= self.text.taken):
            start, _, entry = self._pending.pop(0)
            if not (self.text.stopped and start >= end):  # trimmed with the text it stands for
                ready.append(entry)
        stats = replace(self.stats)
        return Update(self, text, tuple(ready), self.generated_tokens, stats, self.finish_reason, error)


class AcceptanceTracker:
    """How well the draft does for one request: running rates of acceptance at the first drafted token and later ones.

    Only tested tokens count: those after the first rejection of a block say nothing. `low` says that less than half
    of a whole window was accepted, which is a draft that does not fit; what to do about it is the cost model's.
    """

    WINDOW = 32
    _DECAY = 0.97
    _WEIGHT = 4.0  # tested tokens that the pair's usual acceptance counts for

    def __init__(self) -> None:
        self._accepted = [0.0, 0.0]
        self._tested = [self._WEIGHT, self._WEIGHT]
        self._window = [0, 0]
        self.rounds = 0  # rounds in which something was drafted
        self.idle_rounds = 0  # rounds since then
        self.drafting = True
        self.low = False
        self.start_from(Rates(0.7, 0.7))

    def start_from(self, usual: Rates) -> None:
        """Begin with the pair's usual acceptance; only before the first round."""
        if not self.rounds:
            self._accepted = [rate * self._WEIGHT for rate in usual]

    @property
    def rates(self) -> Rates:
        first, later = (min(0.99, a / t) for a, t in zip(self._accepted, self._tested, strict=True))
        return Rates(first, later)

    def record(self, drafted: int, accepted: int) -> None:
        """One round's outcome."""
        if drafted == 0:
            self.idle_rounds += 1
            return
        self.rounds += 1
        self.idle_rounds = 0
        tested = min(drafted, accepted + 1)
        for depth in range(tested):
            place = min(depth, 1)
            self._accepted[place] = self._accepted[place] * self._DECAY + (depth < accepted)
            self._tested[place] = self._tested[place] * self._DECAY + 1.0
        self._window[0] += accepted
        self._window[1] += tested
        if self._window[1] >= self.WINDOW:
            self.low = self.low or self._window[0] * 2 < self._window[1]
            self._window = [0, 0]
