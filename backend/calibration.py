"""How long a forward pass takes here, by the number of packed tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from backend.attention import Segment
from backend.costs import StepCosts
from backend.model import PackedModel
from backend.sampling import Noise, Row, SamplingParams, draw, first_largest

_CONTEXT = 96  # tokens before the measured ones: about where short chats are
_BUDGET_S = 1.0  # a busy machine measures fewer sizes less often, and starts in time all the same
_REPEATS = 4
_BLOCK = 4  # drafted tokens of a typical block


def measure_steps(
    model: PackedModel,
    sizes: list[int],
    columns: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    budget_s: float = _BUDGET_S,
) -> StepCosts:
    """Seconds per pass, logits included, for each size; a size is spread over as many slots as it fills, unevenly.

    Uses the slots' memory, and leaves them empty. columns: width of the logits that are used, None for all.
    """
    started = time.perf_counter()
    points: dict[int, float] = {}
    wanted = sorted(set(sizes))
    ordered = [wanted[0], wanted[-1], *wanted[1:-1]] if len(wanted) > 1 else wanted
    for repeat in range(_REPEATS):
        for size in ordered:
            if time.perf_counter() - started > budget_s and len(points) >= 2:
                break
            seconds = _seconds(model, size, columns, clock, warm=repeat == 0)
            points[size] = min(seconds, points.get(size, seconds))
    for slot in range(model.cache.slots):
        model.cache.truncate(slot, 0)
    if len(points) == 1:
        (size, seconds), *_ = points.items()
        points[size + 1] = seconds
    return StepCosts.measured(points)


def _seconds(model: PackedModel, size: int, columns: int | None, clock: Callable[[], float], *, warm: bool) -> float:
    rows = min(size, model.cache.slots)
    counts = _uneven(size, rows)
    start = min(_CONTEXT, model.cache.capacity - max(counts))
    segments = [Segment(slot, start, count) for slot, count in enumerate(counts)]
    tokens = [1 + i % 7 for i in range(size)]

    def once() -> None:
        logits = model.logits(model.forward(tokens, segments))
        first_largest(logits[:, :columns]).tolist()

    if warm:
        once()
    return _timed(once, clock)


def _uneven(size: int, rows: int) -> list[int]:
    """Tokens per row as rounds have them: some rows verify a block while others add one token."""
    counts = [1] * rows
    while sum(counts) < size:
        row = min(range(rows), key=lambda i: (counts[i] // _BLOCK, i))
        counts[row] += min(_BLOCK, size - sum(counts))
    return counts


@torch.inference_mode()
def _timed(act: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    act()
    return clock() - started


@torch.inference_mode()
def measure_draw(model: PackedModel, rows: int = 8, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds per row that a draw with noise takes more than an argmax; 0 on a GPU, where it is part of the round."""
    if model.device.type != "cpu":
        return 0.0
    logits = torch.randn(rows, model.vocabulary, generator=torch.Generator().manual_seed(1)).to(model.dtype)
    noise = Noise(model.vocabulary, model.device)
    best = []
    for temperature in (0.0, 0.7):
        wanted = [Row(SamplingParams(temperature=temperature, seed=row), row) for row in range(rows)]
        times = []
        for _ in range(_REPEATS):
            started = clock()
            draw(logits, wanted, noise).tolist()
            times.append(clock() - started)
        best.append(min(times))
    return max(0.0, best[1] - best[0]) / rows
