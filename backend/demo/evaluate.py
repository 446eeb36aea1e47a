"""Measure the bundled draft on held-out prompts, in the real engine: acceptance by kind of prompt and by position.

    python -m backend.demo.evaluate --data-dir data --weights backend/demo/weights

Speculation runs at a fixed draft length, so that every kind is measured over its whole answers.
Prints one table per temperature, in the form of MODEL_CARD.md.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from backend.adaptive import LengthPolicy
from backend.calibration import measure_steps
from backend.costs import StepCosts
from backend.demo.draft import WEIGHTS, load_demo_draft
from backend.demo.prompts import KINDS, Kind, prompts
from backend.drafts import Draft, DraftJob, NgramThenModelDraft
from backend.engine import Engine
from backend.head_draft import HeadDraft
from backend.loading import load_model, load_tokenizer, resolve_weights, stop_tokens_of
from backend.model import PackedModel
from backend.sampling import SamplingParams
from backend.sequence import Request
from backend.speculate import accept

_EVALUATION_SEED = 20_000


@dataclass(slots=True)
class Acceptance:
    """Counts over the rounds of one kind of prompt. A position is tested when all drafted before it was right."""

    length: int
    rounds: int = 0
    tested: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tested = [0] * self.length
        self.accepted = [0] * self.length

    def add(self, drafted: Sequence[int], agreed: int) -> None:
        self.rounds += 1
        for position in range(min(len(drafted), agreed + 1)):
            self.tested[position] += 1
            self.accepted[position] += position < agreed

    def merge(self, other: Acceptance) -> None:
        self.rounds += other.rounds
        self.tested = [a + b for a, b in zip(self.tested, other.tested, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]

    @property
    def rate(self) -> float:
        """Of the tested tokens, how many were accepted: α of the closed form."""
        return sum(self.accepted) / max(1, sum(self.tested))

    def at(self, position: int) -> float:
        return self.accepted[position] / max(1, self.tested[position])

    def tokens_per_pass(self, length: int) -> float:
        """Expected with drafts of `length`: 1 + Σ of the products of the rates by position."""
        total = product = 1.0
        for position in range(length):
            product *= self.at(position)
            total += product
        return total


class _Recorder:
    """A draft that remembers what it proposed, so that it can be compared with the answer."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self.weights = draft.weights
        self.can_draft = draft.can_draft
        self.step_seconds = draft.step_seconds
        self.proposed: dict[str, list[tuple[int, list[int]]]] = {}

    def propose(self, jobs: Sequence[DraftJob]) -> list[list[int]]:
        proposals = self._draft.propose(jobs)
        for job, tokens in zip(jobs, proposals, strict=True):
            entry = (len(job.sequence.tokens), tokens)
            self.proposed.setdefault(job.sequence.request.id, []).append(entry)
        return proposals


class Evaluation:
    """The bundled pair, loaded once. length: tokens drafted per round. lookup: as served, n-gram lookup first."""

    def __init__(self, data_dir: Path, weights: Path, dtype: torch.dtype, length: int, *, lookup: bool = False) -> None:
        directory = resolve_weights("demo", data_dir)
        model = load_model(directory, dtype, torch.device("cpu"))
        self.tokenizer = load_tokenizer(directory)
        self.stop_tokens = stop_tokens_of(directory, self.tokenizer)
        self.target = PackedModel(model, slots=8, capacity=1024)
        self.head = HeadDraft(load_demo_draft(model, weights), "demo")
        self.length = length
        self._draft: Draft = NgramThenModelDraft(self.head) if lookup else self.head

    def acceptance(
        self, conversations: Sequence[list[dict[str, str]]], temperature: float, max_tokens: int
    ) -> Acceptance:
        """Answer the conversations, drafting `length` tokens in every round."""
        recorder = _Recorder(self._draft)
        policy = LengthPolicy(StepCosts(), fixed=self.length)
        engine = Engine(self.target, self.tokenizer.decode, {"demo": recorder}, policy=policy)
        running = []
        for i, conversation in enumerate(conversations):
            ids = self.tokenizer.chat(conversation)
            sampling = SamplingParams(temperature=temperature, seed=i)
            sequence = engine.add(
                Request(str(i), ids, max_tokens, sampling, stop_tokens=self.stop_tokens, draft="demo")
            )
            running.append(sequence)
        while not engine.idle:
            engine.step()
        counts = Acceptance(self.length)
        for sequence in running:
            for at, drafted in recorder.proposed.get(sequence.request.id, []):
                truth = sequence.tokens[at : at + len(drafted)]
                drafted = drafted[: len(truth)]
                counts.add(drafted, len(accept(drafted, [*truth, -1])) - 1)
        return counts

    def costs(self) -> tuple[float, float]:
        """(c, v): one draft step, and one pass over `length` + 1 tokens, in units of a pass over one token."""
        steps = measure_steps(self.target, [1, self.length + 1])
        return self.head.measure(1) / steps(1), steps(self.length + 1) / steps(1)


def held_out_conversations(kind: Kind, count: int) -> list[list[dict[str, str]]]:
    """Distinct held-out prompts of one kind, always the same ones."""
    chosen = dict.fromkeys(
        p.messages for p in itertools.islice(prompts(_EVALUATION_SEED), 40_000) if p.held_out and p.kind == kind
    )
    return [[{"role": r, "content": c} for r, c in messages] for messages in itertools.islice(chosen, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--prompts", type=int, default=16, help="per kind")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--length", type=int, default=5)
    parser.add_argument("--lookup", action="store_true", help="look the last tokens up in the text first, as served")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype)
    evaluation = Evaluation(given.data_dir, given.weights, dtype, given.length, lookup=given.lookup)
    for temperature in (0.0, 0.7):
        print(f"\n| T = {temperature:g} | rounds | α | by position | tokens per pass, K = 1…{given.length} |")
        print("|---|---|---|---|---|")
        everything = Acceptance(given.length)
        for kind in KINDS:
            counts = evaluation.acceptance(held_out_conversations(kind, given.prompts), temperature, given.tokens)
            everything.merge(counts)
            print(_row(kind, counts), flush=True)
        print(_row("all", everything), flush=True)
    draft_cost, verify_cost = evaluation.costs()
    print(f"\nc = {draft_cost:.3f}, v({given.length + 1} rows) = {verify_cost:.3f}")


def _row(name: str, counts: Acceptance) -> str:
    positions = " ".join(f"{counts.at(i):.2f}" for i in range(counts.length))
    passes = " ".join(f"{counts.tokens_per_pass(i + 1):.2f}" for i in range(counts.length))
    return f"| {name} | {counts.rounds} | {counts.rate:.3f} | {positions} | {passes} |"


if __name__ == "__main__":
    main()
