"""Where draft tokens come from: a small model, the request's own text, or the text first and the model otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from backend.attention import Segment
from backend.cache import common_prefix
from backend.model import PackedModel
from backend.sampling import Noise, draw
from backend.sequence import Sequence as Running

_CATCH_UP = 512  # tokens a draft model reads per round and request before it drafts
_WORTH = 8  # tokens it may have to read for each token it could draft


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Propose up to `length` ≥ 1 tokens after the tokens of `sequence`."""

    sequence: Running
    length: int


class Draft(Protocol):
    """Proposes tokens. What it proposes changes the speed of an answer and nothing else.

    weights: what really drafts, for people.
    """

    weights: str

    def propose(self, jobs: Sequence[DraftJob]) -> list[list[int]]:
        """One list per job, each at most as long as asked; empty where there is nothing to propose."""
        ...

    def can_draft(self, sequence: Running) -> bool:
        """Whether a proposal now is worth asking for."""
        ...

    def step_seconds(self, rows: int) -> float:
        """Time of one draft step for so many rows; 0 where it is not worth counting."""
        ...


class NgramDraft:
    """Looks the last tokens up in the request's own prompt and answer, and proposes what followed them last time.

    Longest match first (prompt lookup decoding). Needs no model and next to no time.
    """

    weights = "ngram"

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[int, _NgramIndex] = {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[list[int]]:
        return [self._index(job.sequence).follow(job.sequence.tokens, job.length) for job in jobs]

    def corrected(self, sequence: Running, drafted: list[int]) -> list[int]:
        """`drafted` up to the first place that the text knows, and then what the text says; not longer than before."""
        index = self._index(sequence)
        for depth in range(1, len(drafted)):
            found = index.follow(sequence.tokens, len(drafted) - depth, drafted[:depth])
            if found:
                return [*drafted[:depth], *found]
        return drafted

    def can_draft(self, sequence: Running) -> bool:
        return bool(self._index(sequence).follow(sequence.tokens, 1))

    def step_seconds(self, rows: int) -> float:
        return 0.0

    def _index(self, sequence: Running) -> _NgramIndex:
        assert sequence.slot is not None
        index = self._indices.get(sequence.slot)
        if index is None or index.owner is not sequence:
            index = self._indices[sequence.slot] = _NgramIndex(sequence, self._sizes)
        index.read(sequence.tokens)
        return index


class _NgramIndex:
    """For each n-gram of one sequence, where the text went on after its last occurrence."""

    def __init__(self, owner: Running, sizes: range) -> None:
        self.owner = owner
        self._sizes = sizes
        self._next: dict[tuple[int, ...], int] = {}
        self._read = 0

    def read(self, tokens: list[int]) -> None:
        """Index the n-grams that have a token after them."""
        for end in range(self._read, len(tokens)):
            for size in self._sizes:
                if end >= size:
                    self._next[tuple(tokens[end - size : end])] = end
        self._read = len(tokens)

    def follow(self, tokens: list[int], length: int, drafted: Sequence[int] = ()) -> list[int]:
        """Up to `length` tokens that came after the last of `tokens` and `drafted` when these came last."""
        last = (*tokens[-self._sizes[0] :], *drafted)
        for size in self._sizes:
            at = self._next.get(last[-size:]) if len(last) >= size else None
            if at is not None:
                return tokens[at : at + length]
        return []


class ModelDraft:
    """A small model with the target's tokenizer drafts token by token, drawing with the request's own noise.

    hot_tokens: int64 [columns], the token ids of a cut head; None where the head is whole. `width` is the vocabulary
    that target and draft have in common.
    """

    def __init__(
        self,
        model: PackedModel,
        weights: str,
        width: int,
        hot_tokens: Tensor | None = None,
        step_seconds: Callable[[int], float] | None = None,
    ) -> None:
        self.weights = weights
        self.model = model
        self.columns = width if hot_tokens is None else int(hot_tokens.shape[0])
        self.noise = Noise(width, model.device, hot_tokens)
        self._owners: list[Running | None] = [None] * model.cache.slots
        self._checked = [0] * model.cache.slots
        self._step_seconds = step_seconds or (lambda rows: 0.0)

    def can_draft(self, sequence: Running) -> bool:
        """Not where reading a long text first would take longer than drafting the short rest could save."""
        slot = sequence.slot
        assert slot is not None
        read = self._checked[slot] if self._owners[slot] is sequence else 0
        worth = sequence.request.forced or len(sequence.tokens) - read <= _WORTH * max(16, sequence.remaining)
        return worth and len(sequence.tokens) + 1 < self.model.cache.capacity

    def step_seconds(self, rows: int) -> float:
        return self._step_seconds(rows)

    def calibrate(self, step_seconds: Callable[[int], float]) -> None:
        self._step_seconds = step_seconds

    @torch.inference_mode()
    def propose(self, jobs: Sequence[DraftJob]) -> list[list[int]]:
        proposals: list[list[int]] = [[] for _ in jobs]
        feeds = [self._catch_up(job) for job in jobs]
        active = [i for i, job in enumerate(jobs) if job.length > 0]
        while active:
            drawn = self._step([(jobs[i].sequence, feeds[i], proposals[i]) for i in active])
            still = []
            for i, token in zip(active, drawn, strict=True):
                if token is None:  # has not read its prompt yet; it drafts in a later round
                    continue
                proposals[i].append(token)
                feeds[i] = [token]
                room = len(jobs[i].sequence.tokens) + len(proposals[i]) < self.model.cache.capacity
                if len(proposals[i]) < jobs[i].length and room:
                    still.append(i)
            active = still
        return proposals

    def ready(self, sequence: Running) -> bool:
        """Whether this model has read all but the last two tokens, or less is missing."""
        return self._known(sequence) >= len(sequence.tokens) - 2

    def remember(self, sequence: Running, drafted: Sequence[int]) -> None:
        """Say that the sequence's tokens and all drafted ones but the last are read now."""
        assert sequence.slot is not None
        known = self.model.cache.length(sequence.slot)
        self.model.cache.extend(sequence.slot, [*sequence.tokens[known:], *drafted[:-1]])

    def readable(self, ids: Tensor) -> Tensor:
        """Token ids with those beyond this model's vocabulary (a padded target's) replaced."""
        return torch.where(ids < self.model.vocabulary, ids, 0)

    def _catch_up(self, job: DraftJob) -> list[int]:
        """The tokens this model has to read first. After full acceptance these are two, otherwise one or many."""
        known = self._known(job.sequence)
        return job.sequence.tokens[known : known + _CATCH_UP]

    def _known(self, sequence: Running) -> int:
        """How many of the sequence's tokens are read; what was read beyond, or for another request, is forgotten."""
        slot, cache, end = sequence.slot, self.model.cache, len(sequence.tokens) - 1
        assert slot is not None
        if self._owners[slot] is not sequence:
            self._owners[slot] = sequence
            self._checked[slot] = cache.claim(slot, sequence.tokens)
        start = self._checked[slot]
        known = start + common_prefix(cache.tokens[slot][start:], sequence.tokens[start:end])
        cache.truncate(slot, known)
        self._checked[slot] = known
        return known

    def _step(self, rows: Sequence[tuple[Running, list[int], list[int]]]) -> list[int | None]:
        """Feed each row its tokens and draw the next one; None for a row that is still behind its sequence."""
        cache = self.model.cache
        segments: list[Segment] = []
        tokens: list[int] = []
        last: list[int] = []
        for sequence, feed, _ in rows:
            assert sequence.slot is not None
            segments.append(Segment(sequence.slot, cache.length(sequence.slot), len(feed)))
            tokens.extend(token if token < self.model.vocabulary else 0 for token in feed)  # a padded target's
            last.append(len(tokens) - 1)
        hidden = self.model.forward(tokens, segments)
        ready = []
        for i, (sequence, feed, drafted) in enumerate(rows):
            assert sequence.slot is not None
            cache.extend(sequence.slot, feed)
            if cache.length(sequence.slot) == len(sequence.tokens) + len(drafted):
                ready.append(i)
        drawn: list[int | None] = [None] * len(rows)
        if ready:
            logits = self.model.logits(hidden[[last[i] for i in ready]])[:, : self.columns]
            choices = draw(logits, [rows[i][0].row(rows[i][2]) for i in ready], self.noise).tolist()
            for i, token in zip(ready, choices, strict=True):
                drawn[i] = token
        return drawn


class NgramThenModelDraft:
    """What the text repeats is taken from the text; where it has nothing, the model drafts.

    Also within a block: from where the model's tokens lead to known ones, the text goes on. It is right more often.
    """

    def __init__(self, model: Draft) -> None:
        self._ngram = NgramDraft(longest=4, shortest=3)
        self._model = model
        self.weights = f"ngram, then {model.weights}"

    def can_draft(self, sequence: Running) -> bool:
        return self._ngram.can_draft(sequence) or self._model.can_draft(sequence)

    def step_seconds(self, rows: int) -> float:
        return self._model.step_seconds(rows)

    def propose(self, jobs: Sequence[DraftJob]) -> list[list[int]]:
        proposals = self._ngram.propose(jobs)
        rest = [i for i, found in enumerate(proposals) if not found]
        if rest:
            for i, found in zip(rest, self._model.propose([jobs[i] for i in rest]), strict=True):
                proposals[i] = self._ngram.corrected(jobs[i].sequence, found)
        return proposals
