"""Adaptive over plain at any acceptance, by a draft that costs what a real one does; one hundred requests at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from backend.adaptive import LengthPolicy
from backend.drafts import Draft, DraftJob
from backend.engine import Engine
from backend.sequence import Request
from backend.sequence import Sequence as Running
from benchmarks.pace import run_paced

ACCEPTANCES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.98)


@dataclass(slots=True)
class DialledDraft:
    """inner: does the work and is ignored. answers: request id → generated tokens. acceptance: share that is right.

    The errors of a request are a hash of its position, the same in every run.
    """

    inner: Draft
    answers: Mapping[str, Sequence[int]]
    acceptance: float
    weights: str = field(default="dialled", init=False)

    def can_draft(self, sequence: Running) -> bool:
        return self.inner.can_draft(sequence)

    def step_seconds(self, rows: int) -> float:
        return self.inner.step_seconds(rows)

    def propose(self, jobs: Sequence[DraftJob]) -> list[list[int]]:
        return [self._disturbed(job, found) for job, found in zip(jobs, self.inner.propose(jobs), strict=True)]

    def _disturbed(self, job: DraftJob, found: list[int]) -> list[int]:
        sequence = job.sequence
        answer, at = self.answers[sequence.request.id], sequence.generated_tokens
        proposed = []
        for depth in range(len(found)):
            right = _hash(sequence.request.id, at + depth) < self.acceptance
            token = answer[at + depth] if at + depth < len(answer) else 0
            proposed.append(token if right else (token + 1) % 100)
        return proposed


def _hash(name: str, position: int) -> float:
    bits = (_number(name) * 0x9E3779B1 + position * 0x85EBCA77) & 0xFFFFFFFF
    bits ^= bits >> 16
    bits = bits * 0x7FEB352D & 0xFFFFFFFF
    bits ^= bits >> 15
    bits = bits * 0x846CA68B & 0xFFFFFFFF
    return float((bits ^ bits >> 16) / 2**32)


def _number(text: str) -> int:
    """The same number in every process, which `hash` does not promise."""
    return sum((i + 1) * byte for i, byte in enumerate(text.encode()))


class Bench(Protocol):
    """What is needed of the benchmark: its clock, its prompts, fresh engines."""

    repeats: int
    clock: Callable[[], float]

    def requests(self, count: int, draft: str | None) -> list[Request]: ...
    def engine(self, pair: Any, policy: LengthPolicy) -> Engine: ...


def dial_row(bench: Bench, pair: Any, batch: int, acceptance: float) -> dict[str, Any]:
    """One acceptance at one batch size; the first of the paired repeats teaches the policy and is told apart."""
    requests = bench.requests(2 if batch == 1 else batch, None)
    _, answers = run_paced(bench.engine(pair, pair.policy(0)), requests, batch, bench.clock)
    said = {s.request.id: s.tokens[s.prompt_tokens :] for s in answers}
    pair.drafts["dialled"] = DialledDraft(pair.drafts["head"], said, acceptance)
    policy, ratios = pair.policy(None), []
    engine = bench.engine(pair, policy)
    for _ in range(bench.repeats + 1):
        plain, _ = run_paced(bench.engine(pair, pair.policy(0)), requests, batch, bench.clock)
        engine = bench.engine(pair, policy)
        fast, _ = run_paced(engine, bench.requests(len(requests), "dialled"), batch, bench.clock)
        ratios.append(fast.speed / plain.speed)
    totals = engine.totals
    row = {
        "batch": batch,
        "acceptance": acceptance,
        "found": round(sum(totals.accepted_at.values()) / max(1, sum(totals.tested_at.values())), 3),
        "first_of_plain": round(ratios[0], 3),
        "of_plain": round(statistics.median(ratios[1:]), 3),
        "of_plain_least_most": [round(min(ratios[1:]), 3), round(max(ratios[1:]), 3)],
        "per_pass": round(totals.generated_tokens / totals.target_passes, 3),
        "drafted_per_round": round(sum(totals.draft_tokens.values()) / totals.rounds, 2),
    }
    print(row, flush=True)
    return row


def crowd(bench: Bench, pair: Any, count: int = 100, slots: int = 8) -> dict[str, Any]:
    """So many requests at once: their time over that of full batches one after another, and who waited longest."""
    asked = bench.requests(slots, None)
    many = [_own(asked[i % slots], i) for i in range(count)]
    one, _ = run_paced(bench.engine(pair, pair.policy(0)), many[:slots], slots, bench.clock)
    engine = bench.engine(pair, pair.policy(0))
    all_at_once, found = run_paced(engine, many, count, bench.clock)
    waits = sorted(sequence.started_s - sequence.arrived_s for sequence in found)
    row = {
        "seconds": round(all_at_once.all_s, 2),
        "one_full_batch_s": round(one.all_s, 2),
        "of_full_batches": round(all_at_once.all_s / (count / slots * one.all_s), 3),
        "longest_wait_of_all": round(waits[-1] / all_at_once.all_s, 3),
        "finished": sum(sequence.finish_reason == "length" for sequence in found),
    }
    print(row, flush=True)
    return row


def _own(request: Request, number: int) -> Request:
    """A request like this one whose prompt nobody else has, so that each is read in full; three teams take turns."""
    prompt = [100 + number, *request.prompt]
    return replace(request, id=str(number), prompt=prompt, max_tokens=24, tenant=f"team {number % 3}")
