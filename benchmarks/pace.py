"""Runs requests through an engine and tells decoding from the reading of prompts, and a full batch from its tail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backend.engine import Engine
from backend.sequence import Request
from backend.sequence import Sequence as Running


@dataclass(frozen=True, slots=True)
class Pace:
    """all_s, generated: the whole run. full_s, full_tokens: rounds without prompts in which `batch` requests ran."""

    generated: int
    all_s: float
    full_tokens: int
    full_s: float
    drafted: int
    passes: int

    @property
    def speed(self) -> float:
        """Tokens per second of the whole run, prompts and tail included: what users get."""
        return self.generated / self.all_s

    @property
    def decoding(self) -> float:
        """Tokens per second of full decoding rounds: what the closed form speaks of."""
        return self.full_tokens / self.full_s if self.full_s else self.speed


def run_paced(
    engine: Engine, requests: Sequence[Request], batch: int, clock: Callable[[], float]
) -> tuple[Pace, list[Running]]:
    """Keep `batch` requests in flight until all are answered."""
    waiting, found = list(requests), []
    totals = engine.totals
    full_tokens, full_s = 0, 0.0
    started = clock()
    while waiting or not engine.idle:
        while waiting and len(engine.scheduler.running) + engine.scheduler.waiting < batch:
            found.append(engine.add(waiting.pop(0)))
        running = len(engine.scheduler.running)
        prompts, generated, began = totals.prompt_tokens, totals.generated_tokens, clock()
        engine.step()
        if totals.prompt_tokens == prompts and running == batch:
            full_tokens += totals.generated_tokens - generated
            full_s += clock() - began
    pace = Pace(
        totals.generated_tokens,
        clock() - started,
        full_tokens,
        full_s,
        sum(totals.draft_tokens.values()),
        totals.target_passes,
    )
    return pace, found
