"""The step loop: schedule → draft → verify → emit.

One round is one forward pass of the target over the packed tokens of all rows: chunks of prompts, rows that decode
plainly, rows with drafted tokens to verify. What a request gets does not depend on who else is in the round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from backend.adaptive import LengthPolicy
from backend.attention import Segment
from backend.costs import StepCosts
from backend.drafts import Draft, DraftJob
from backend.errors import BadRequest
from backend.graphs import FixedRounds
from backend.model import PackedModel
from backend.sampling import Noise, Row, TokenLogprobs, draw, logprobs_of
from backend.scheduler import Chunk, Round, Scheduler
from backend.sequence import Request, Update
from backend.sequence import Sequence as Running
from backend.speculate import accept


@dataclass(slots=True)
class Totals:
    """What the engine has done since it started, for the metrics."""

    rounds: int = 0
    target_passes: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: dict[str, int] = field(default_factory=dict)
    accepted_tokens: dict[str, int] = field(default_factory=dict)
    tested_at: dict[tuple[str, int], int] = field(default_factory=dict)
    accepted_at: dict[tuple[str, int], int] = field(default_factory=dict)
    low_acceptance: dict[str, int] = field(default_factory=dict)  # requests by draft; counted once each
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    busy_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Verified:
    """The target's answer for one row: tokens drawn after its drafted tokens, and logprobs where asked for."""

    sequence: Running
    drafted: list[int]
    drawn: list[int]
    logprobs: list[TokenLogprobs | None]
    hidden: Tensor | None  # [len(drawn), width]: what each token was drawn from; None where the sequence has it


class Engine:
    """Generates for many requests at once. Not thread-safe: one thread adds, steps and cancels.

    decode: token ids → text. drafts: what a request may name in `draft`. fixed_rounds: decode by captured graphs
    (see graphs.py); None means on CUDA only.
    """

    def __init__(
        self,
        target: PackedModel,
        decode: Callable[[list[int]], str],
        drafts: Mapping[str, Draft] | None = None,
        *,
        policy: LengthPolicy | None = None,
        queue_limit: int = 256,
        chunk_tokens: int = 256,
        fixed_rounds: bool | None = None,
    ) -> None:
        self.target = target
        self.drafts = dict(drafts or {})
        self.policy = policy or LengthPolicy(StepCosts())
        self.scheduler = Scheduler(target.cache, queue_limit=queue_limit, chunk_tokens=chunk_tokens)
        self.totals = Totals()
        self._decode = decode
        self._typical_s = 1.0  # how long a request holds a slot, smoothed
        self._noise = Noise(target.vocabulary, target.device)
        if fixed_rounds is None:
            fixed_rounds = target.device.type == "cuda"
        self.fixed = FixedRounds(target) if fixed_rounds and target.lean is not None else None

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    def add(self, request: Request) -> Running:
        """Queue a request. Raises BadRequest (it can never run) or QueueFull (it cannot wait now)."""
        capacity = self.target.cache.capacity
        if not request.prompt:
            raise BadRequest("the prompt is empty", param="prompt")
        if len(request.prompt) + 1 > capacity:
            raise BadRequest(
                f"the prompt has {len(request.prompt)} tokens; this model's context holds {capacity}, answer included",
                param="messages",
                code="context_length_exceeded",
            )
        if request.draft is not None and request.draft not in self.drafts:
            raise BadRequest(f"no draft is called {request.draft}", param="X-Draft-Model")
        room = capacity - len(request.prompt)
        sequence = Running(replace(request, max_tokens=min(request.max_tokens, room)), self._decode)
        self.scheduler.add(sequence, self._retry_after_s())
        return sequence

    def _retry_after_s(self) -> float:
        """When a place in the queue should be free: a typical request's time over the slots."""
        return min(60.0, max(1.0, self._typical_s / self.target.cache.slots))

    def cancel(self, sequence: Running) -> Update | None:
        """End a request now; what it had generated is in the update. None when it was over already."""
        if sequence.finish_reason is not None:
            return None
        self.scheduler.remove(sequence)
        sequence.finish("cancelled")
        return sequence.take_update()

    def fail_all(self, message: str) -> list[Update]:
        """End every running request with an error, free its slot and forget what the slot held."""
        updates = []
        for sequence in list(self.scheduler.running):
            assert sequence.slot is not None
            self.target.cache.truncate(sequence.slot, 0)
            self.scheduler.remove(sequence)
            sequence.finish("error")
            updates.append(sequence.take_update(message))
        return updates

    @torch.inference_mode()
    def step(self) -> list[Update]:
        """One round. Returns what it added to each request; empty when there was nothing to do."""
        started = time.perf_counter()
        plan = self.scheduler.plan()
        if not plan:
            return []
        lengths = self.policy.lengths(plan.decoding, self.drafts, self.target.cache.capacity)
        verified, drafted = self._fixed_round(plan, lengths), None
        if verified is None:
            proposals = self._draft(plan.decoding, lengths)
            drafted = time.perf_counter()
            verified = self._verify(plan, proposals)
        updates = self._emit(plan, verified)
        self._count(started, drafted or started, time.perf_counter())
        if not plan.chunks:
            self._learn(plan.decoding, lengths, verified, started, drafted)
        return updates

    def _learn(
        self,
        rows: Sequence[Running],
        lengths: Sequence[int],
        verified: Sequence[_Verified],
        started: float,
        drafted: float | None,
    ) -> None:
        """Tell the policy how long this round took; drafted None: drafting and verification were one."""
        seconds = time.perf_counter() - (drafted or started)
        given = sum(len(row.drafted) for row in verified)
        draft_seconds = None if drafted is None else drafted - started
        self.policy.learn_round(rows, lengths, given, self.drafts, draft_seconds, seconds)

    def _fixed_round(self, plan: Round, lengths: Sequence[int]) -> list[_Verified] | None:
        """Draft and verify in captured graphs; None where this round is not of a kind that they can run."""
        if self.fixed is None or plan.chunks:
            return None
        names = {row.request.draft for row, length in zip(plan.decoding, lengths, strict=True) if length > 0}
        drafts = [self.drafts[name] for name in names if name is not None]
        if not self.fixed.fits(plan.decoding, lengths, drafts):
            return None
        found = self.fixed.run(plan.decoding, lengths, drafts[0] if drafts else None)
        return [
            self._verified(row, drafted, drawn, logits, None)
            for row, (drafted, drawn, logits) in zip(plan.decoding, found, strict=True)
        ]

    def _draft(self, decoding: Sequence[Running], lengths: Sequence[int]) -> list[list[int]]:
        """Drafted tokens for each decoding row; rows with the same draft are drafted together."""
        proposals: list[list[int]] = [[] for _ in decoding]
        for name, draft in self.drafts.items():
            rows = [i for i, row in enumerate(decoding) if lengths[i] > 0 and row.request.draft == name]
            if rows:
                found = draft.propose([DraftJob(decoding[i], lengths[i]) for i in rows])
                for i, tokens in zip(rows, found, strict=True):
                    proposals[i] = tokens[: lengths[i]]
        return proposals

    def _verify(self, plan: Round, proposals: list[list[int]]) -> list[_Verified]:
        """One pass of the target over everything, then one draw per position that needs a token."""
        tokens: list[int] = []
        segments: list[Segment] = []
        wanted: list[int] = []  # packed indices whose logits are needed
        rows: list[Row] = []
        for sequence, drafted in zip(plan.decoding, proposals, strict=True):
            assert sequence.slot is not None
            segments.append(Segment(sequence.slot, sequence.computed, 1 + len(drafted)))
            wanted.extend(range(len(tokens), len(tokens) + 1 + len(drafted)))
            rows.extend(sequence.row(drafted[:j]) for j in range(len(drafted) + 1))
            tokens.append(sequence.tokens[-1])
            tokens.extend(drafted)
        for chunk in plan.chunks:
            assert chunk.sequence.slot is not None
            segments.append(Segment(chunk.sequence.slot, chunk.start, chunk.count))
            tokens.extend(chunk.sequence.tokens[chunk.start : chunk.start + chunk.count])
            if chunk.last:
                wanted.append(len(tokens) - 1)
                rows.append(chunk.sequence.row())
        hidden = self.target.forward(tokens, segments)
        if not wanted:
            return []
        hidden = hidden if len(wanted) == len(tokens) else hidden[wanted]
        logits = self.target.logits(hidden)
        drawn: list[int] = draw(logits, rows, self._noise).tolist()
        return self._collect(plan, proposals, hidden, logits, drawn)

    def _collect(
        self, plan: Round, proposals: list[list[int]], hidden: Tensor, logits: Tensor, drawn: list[int]
    ) -> list[_Verified]:
        """Sort the draws of a packed pass by request."""
        members = [*zip(plan.decoding, proposals, strict=True), *((c.sequence, []) for c in plan.chunks if c.last)]
        verified, at = [], 0
        for sequence, drafted in members:
            part = slice(at, at + len(drafted) + 1)
            verified.append(self._verified(sequence, drafted, drawn[part], logits[part], hidden[part]))
            at = part.stop
        return verified

    def _verified(
        self, sequence: Running, drafted: list[int], drawn: list[int], logits: Tensor, hidden: Tensor | None
    ) -> _Verified:
        logprobs: list[TokenLogprobs | None] = [None] * len(drawn)
        if sequence.request.logprobs is not None:
            kept = len(accept(drafted, drawn))
            logprobs[:kept] = logprobs_of(logits[:kept], drawn[:kept], [sequence.request.logprobs] * kept)
        return _Verified(sequence, drafted, drawn, logprobs, hidden)

    def _emit(self, plan: Round, verified: list[_Verified]) -> list[Update]:
        """Keep what the target agreed to, token by token; roll the rest back; free the slots of who is done."""
        for chunk in plan.chunks:
            self._read(chunk)
        return [self._keep(row) for row in verified]

    def _read(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        assert sequence.slot is not None
        self.target.cache.extend(sequence.slot, sequence.tokens[chunk.start : chunk.start + chunk.count])
        sequence.computed += chunk.count
        self.totals.prompt_tokens += chunk.count
        if chunk.last:
            self.totals.cached_tokens += sequence.cached_tokens

    def _keep(self, row: _Verified) -> Update:
        sequence, drafted = row.sequence, row.drafted
        assert sequence.slot is not None
        tokens = accept(drafted, row.drawn)
        known = len(sequence.tokens)
        for token, logprobs in zip(tokens, row.logprobs, strict=False):
            if sequence.append(token, logprobs):
                break
        kept = len(sequence.tokens) - known
        self._account(sequence, drafted, len(tokens) - 1, kept)
        # the last token is not computed yet; everything before it is, and nothing after it counts
        self.target.cache.extend(sequence.slot, sequence.tokens[sequence.computed : len(sequence.tokens) - 1])
        sequence.computed = len(sequence.tokens) - 1
        if row.hidden is not None:
            sequence.hidden = row.hidden[len(tokens) - 1]
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)
            self._typical_s += 0.1 * (time.monotonic() - sequence.started_s - self._typical_s)
        return sequence.take_update()

    def _account(self, sequence: Running, drafted: list[int], agreed: int, kept: int) -> None:
        stats, totals, name = sequence.stats, self.totals, sequence.request.draft
        accepted = min(agreed, kept)
        stats.target_passes += 1
        stats.draft_tokens += len(drafted)
        stats.accepted_tokens += accepted
        totals.target_passes += 1
        totals.generated_tokens += kept
        if name is None:
            return
        was_low = sequence.tracker.low
        sequence.tracker.record(len(drafted), agreed)
        tested = min(len(drafted), agreed + 1)
        self.policy.learn(name, tested, agreed)
        totals.draft_tokens[name] = totals.draft_tokens.get(name, 0) + len(drafted)
        totals.accepted_tokens[name] = totals.accepted_tokens.get(name, 0) + accepted
        for position in range(tested):
            key = (name, position + 1)
            totals.tested_at[key] = totals.tested_at.get(key, 0) + 1
            totals.accepted_at[key] = totals.accepted_at.get(key, 0) + (position < agreed)
        if sequence.tracker.low and not was_low:
            totals.low_acceptance[name] = totals.low_acceptance.get(name, 0) + 1

    def _count(self, started: float, drafted: float, ended: float) -> None:
        self.totals.rounds += 1
        self.totals.draft_seconds += drafted - started
        self.totals.target_seconds += ended - drafted
        self.totals.busy_seconds += ended - started
