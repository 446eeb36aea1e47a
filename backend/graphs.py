"""Rounds of fixed shape, for GPUs: one captured CUDA graph drafts, one verifies, and the host reads once at the end.

Launching a small model's kernels one by one costs more than the kernels. A graph is captured per bucket of rows, draft
length and text length; inputs lie in fixed tensors, and drawing and acceptance happen inside. Rounds that read prompts,
or whose rows need logit processors, run without a graph. Without CUDA the same code runs uncaptured: so it is tested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from backend.adaptive import LengthPolicy
from backend.costs import LearnedCosts, StepCosts
from backend.drafts import Draft, DraftJob, ModelDraft, NgramDraft
from backend.head_draft import HeadDraft
from backend.lean import LeanBody
from backend.model import PackedModel
from backend.sampling import Noise, draw_in_place
from backend.sequence import Sequence as Running
from backend.speculate import accepted_counts

_LENGTHS = (0, 1, 2, 4, 8)
_REPEATS = 3


class FixedBatch:
    """The layout that the lean forward pass asks for, with `count` tokens in each of the first `rows` slots."""

    def __init__(self, model: PackedModel, rows: int, count: int, length: int) -> None:
        self.model = model
        self.rows, self.count, self.length = rows, count, length
        device = model.device
        self.slots = torch.arange(rows, device=device)[:, None].expand(rows, count).reshape(-1)
        self.keys_at = torch.arange(length, device=device)
        self.positions = torch.zeros(rows * count, dtype=torch.int64, device=device)
        self.mask = torch.zeros(0)

    def place(self, positions: Tensor) -> None:
        """positions int64 [rows, count]: where each token lies; `capacity` is scratch space that nobody reads."""
        self.positions = positions.flatten()
        visible = self.keys_at <= positions[:, :, None]
        self.mask = visible.repeat(1, self.model.query_groups, 1)[:, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """As PackedBatch.attend."""
        keys, values = self.model.cache.keys[layer], self.model.cache.values[layer]
        keys[self.slots, :, self.positions] = key.transpose(0, 1)
        values[self.slots, :, self.positions] = value.transpose(0, 1)
        heads, tokens, dim = query.shape
        kv_heads = keys.shape[1]
        folds = heads // kv_heads
        folded = query.reshape(kv_heads, folds, self.rows, self.count, dim).permute(2, 0, 1, 3, 4)
        output = F.scaled_dot_product_attention(
            folded.reshape(self.rows, kv_heads, folds * self.count, dim),
            keys[: self.rows, :, : self.length],
            values[: self.rows, :, : self.length],
            attn_mask=self.mask,
            scale=scale,
        )
        output = output.reshape(self.rows, kv_heads, folds, self.count, dim).permute(0, 3, 1, 2, 4)
        return output.reshape(tokens, heads, dim)


class RoundInputs:
    """One round's numbers per slot, in fixed device tensors filled by one copy.

    last, previous: the newest token and the one before; start: position of the newest; drafting: how many drafted
    tokens count; active: whether the slot is in the round; drafted int64 [slots, longest]; states [slots, width].
    """

    _FIELDS = ("last", "previous", "start", "seed", "drafting", "active")

    def __init__(self, target: PackedModel) -> None:
        slots, device = target.cache.slots, target.device
        self._host = torch.zeros(len(self._FIELDS), slots, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._device = torch.zeros(len(self._FIELDS), slots, dtype=torch.int64, device=device)
        self._host_temperature = torch.zeros(slots, pin_memory=device.type == "cuda")
        self.temperature = torch.zeros(slots, device=device)
        self.drafted = torch.zeros(slots, _LENGTHS[-1], dtype=torch.int64, device=device)
        self.states = torch.zeros(slots, target.width, dtype=target.dtype, device=device)
        for name, row in zip(self._FIELDS, self._device, strict=True):
            setattr(self, name, row)

    last: Tensor
    previous: Tensor
    start: Tensor
    seed: Tensor
    drafting: Tensor
    active: Tensor

    def fill(self, rows: Sequence[Running], lengths: Sequence[int], told: Sequence[Sequence[int]] | None) -> None:
        """told: drafted tokens that the host knows already."""
        self._host.zero_()
        for row, length in zip(rows, lengths, strict=True):
            assert row.slot is not None
            sampling = row.request.sampling
            numbers = (row.tokens[-1], row.tokens[-2], len(row.tokens) - 1, sampling.seed, length, 1)
            self._host[:, row.slot] = torch.tensor(numbers)
            self._host_temperature[row.slot] = sampling.temperature
        self._device.copy_(self._host, non_blocking=True)
        self.temperature.copy_(self._host_temperature, non_blocking=True)
        for row, tokens in zip(rows, told or (), strict=False):
            if tokens:
                self.drafted[row.slot or 0, : len(tokens)] = torch.tensor(tokens, device=self.drafted.device)


class FixedRounds:
    """Runs decoding rounds by captured graphs. `run` returns proposals and draws; the engine does the rest."""

    def __init__(self, target: PackedModel) -> None:
        assert target.lean is not None
        self._target = target
        self._capture = target.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if self._capture else None  # one graph runs at a time
        self.rounds = 0
        self._inputs = RoundInputs(target)
        self._noise = Noise(target.vocabulary, target.device)
        self._verifiers: dict[tuple[int, int, int], _Verifier] = {}
        self._drafters: dict[tuple[int, int, int, int], Callable[[], None]] = {}

    def fits(self, rows: Sequence[Running], lengths: Sequence[int], drafts: Sequence[Draft]) -> bool:
        """Whether every row is drawn without processors, and one draft that can run here serves all rows that draft."""
        if not all(row.request.sampling.plain and row.request.grammar is None for row in rows) or len(drafts) > 1:
            return False
        drafting = [row for row, length in zip(rows, lengths, strict=True) if length > 0]
        if max(lengths, default=0) > _LENGTHS[-1]:
            return False
        return all(_ready(draft, drafting) for draft in drafts)

    def run(
        self, rows: Sequence[Running], lengths: Sequence[int], draft: Draft | None
    ) -> list[tuple[list[int], list[int], Tensor]]:
        """(drafted tokens, drawn tokens, logits of the draws) per row. All numbers reach the host in one read."""
        inputs, slots = self._inputs, [row.slot or 0 for row in rows]
        told: list[list[int]] | None = None
        if isinstance(draft, NgramDraft):
            jobs = [DraftJob(row, length) for row, length in zip(rows, lengths, strict=True) if length > 0]
            found = iter(draft.propose(jobs))
            told = [next(found) if length > 0 else [] for length in lengths]
            lengths = [len(tokens) for tokens in told]
        longest = next(k for k in _LENGTHS if k >= max(lengths))
        bucket = _at_least(max(slots) + 1, self._target.cache.slots)
        length = _at_least(max(len(row.tokens) for row in rows) + longest + 1, self._target.cache.capacity, 256)
        self.rounds += 1
        inputs.fill(rows, lengths, told)
        self._bring_states(rows)
        if draft is not None and told is None and longest:
            self._drafter(draft, bucket, longest, length)()
        verifier = self._verifier(bucket, longest, length)
        verifier.run()
        both: list[list[int]] = torch.cat([inputs.drafted[:bucket, :longest], verifier.drawn], 1).tolist()
        results = []
        for row, slot, count in zip(rows, slots, lengths, strict=True):
            drafted, drawn = both[slot][:count], both[slot][longest : longest + count + 1]
            if isinstance(draft, ModelDraft) and count:
                draft.remember(row, drafted)
            row.hidden = inputs.states[slot]
            results.append((drafted, drawn, verifier.logits[slot]))
        return results

    @property
    def slots(self) -> int:
        return self._target.cache.slots

    @torch.inference_mode()
    def measure_target(self) -> dict[int, float]:
        """Seconds of one verifying pass by packed tokens: rows times tokens a row, all of them scratch."""
        found: dict[int, float] = {}
        for rows in self._buckets():
            for longest in _LENGTHS:
                seconds = self._seconds(self._verifier(rows, longest, self._shortest()).run)
                found[rows * (longest + 1)] = min(seconds, found.get(rows * (longest + 1), seconds))
        return found

    @torch.inference_mode()
    def measure_draft(self, draft: Draft) -> dict[int, float]:
        """Seconds of one draft step by rows. The draft is a ModelDraft or HeadDraft that can run here."""
        steps = _LENGTHS[-2]
        drafters = {rows: self._drafter(draft, rows, steps, self._shortest()) for rows in self._buckets()}
        return {rows: self._seconds(run) / steps for rows, run in drafters.items()}

    def _buckets(self) -> list[int]:
        slots = self._target.cache.slots
        return sorted({_at_least(rows, slots) for rows in range(1, slots + 1)})

    def _shortest(self) -> int:
        return _at_least(1, self._target.cache.capacity, 256)

    def _seconds(self, run: Callable[[], None]) -> float:
        """The best of a few runs with no slot active; nothing that a request knows is touched."""
        self._inputs.fill((), (), None)
        best = float("inf")
        for _ in range(_REPEATS):
            started = time.perf_counter()
            run()
            self._inputs.drafted[:1, :1].tolist()  # waits for the device, as a round does
            best = min(best, time.perf_counter() - started)
        return best

    def _bring_states(self, rows: Sequence[Running]) -> None:
        for row in rows:
            assert row.slot is not None
            home = self._inputs.states[row.slot]
            if row.hidden is not None and row.hidden.data_ptr() != home.data_ptr():
                home.copy_(row.hidden)

    def _verifier(self, rows: int, longest: int, length: int) -> _Verifier:
        key = (rows, longest, length)
        if key not in self._verifiers:
            verifier = _Verifier(self._target, self._inputs, self._noise, rows, longest, length)
            verifier.run = self._graph(verifier.compute)
            self._verifiers[key] = verifier
        return self._verifiers[key]

    def _drafter(self, draft: Draft, rows: int, longest: int, length: int) -> Callable[[], None]:
        key = (id(draft), rows, longest, length)
        if key not in self._drafters:
            if isinstance(draft, ModelDraft):
                compute = _ModelDrafter(draft, self._inputs, rows, longest, length).compute
            else:
                assert isinstance(draft, HeadDraft)
                compute = _HeadDrafter(draft, self._inputs, rows, longest).compute
            self._drafters[key] = self._graph(compute)
        return self._drafters[key]

    def _graph(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Capture `compute` after a warm-up on a side stream, as CUDA graphs demand; uncaptured without CUDA."""
        if not self._capture:
            return compute
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread may use the device meanwhile, for metrics say
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        replay: Callable[[], None] = graph.replay
        return replay


class _Verifier:
    """One target pass over the newest and the drafted tokens of each slot, its draws, and the states to go on from."""

    def __init__(
        self, target: PackedModel, inputs: RoundInputs, noise: Noise, rows: int, longest: int, length: int
    ) -> None:
        assert target.lean is not None
        self._target, self._lean, self._inputs, self._noise = target, target.lean, inputs, noise
        self._rows, self._count = rows, longest + 1
        self._batch = FixedBatch(target, rows, longest + 1, length)
        self._offsets = torch.arange(longest + 1, device=target.device)
        self.drawn = torch.zeros(rows, longest + 1, dtype=torch.int64, device=target.device)
        self.logits = torch.zeros(rows, longest + 1, target.vocabulary, dtype=target.dtype, device=target.device)
        self.run: Callable[[], None] = self.compute

    def compute(self) -> None:
        inputs, rows, count = self._inputs, self._rows, self._count
        start, active = inputs.start[:rows, None], inputs.active[:rows, None] > 0
        scratch = self._target.cache.capacity
        places = start + self._offsets
        self._batch.place(torch.where(active, places, scratch).clamp(max=scratch))
        ids = torch.cat([inputs.last[:rows, None], inputs.drafted[:rows, : count - 1]], 1)
        hidden = self._lean.forward(ids.flatten(), self._batch)
        logits = self._lean.logits(hidden)
        drawn = draw_in_place(
            logits.float(),
            inputs.seed[:rows, None].expand(rows, count).reshape(-1),
            (places + 1).flatten(),
            inputs.temperature[:rows, None].expand(rows, count).reshape(-1),
            self._noise,
        ).view(rows, count)
        self.drawn.copy_(drawn)
        self.logits.copy_(logits.view(rows, count, -1))
        kept = accepted_counts(inputs.drafted[:rows, : count - 1], drawn, inputs.drafting[:rows])
        states = hidden.view(rows, count, -1)[torch.arange(rows, device=kept.device), kept]
        inputs.states[:rows].copy_(torch.where(active, states, inputs.states[:rows]))


class _ModelDrafter:
    """`longest` steps of a draft model. The first feeds two tokens: after full acceptance the older is not read yet."""

    def __init__(self, draft: ModelDraft, inputs: RoundInputs, rows: int, longest: int, length: int) -> None:
        lean = draft.model.lean
        assert lean is not None
        self._draft, self._inputs, self._rows, self._longest = draft, inputs, rows, longest
        self._lean: LeanBody = lean
        self._first = FixedBatch(draft.model, rows, 2, length)
        self._next = FixedBatch(draft.model, rows, 1, length)

    def compute(self) -> None:
        inputs, rows, scratch = self._inputs, self._rows, self._draft.model.cache.capacity
        start, drafting = inputs.start[:rows, None], inputs.drafting[:rows, None] > 0
        ids = torch.cat([inputs.previous[:rows, None], inputs.last[:rows, None]], 1)
        self._first.place(torch.where(drafting, torch.cat([start - 1, start], 1), scratch))
        hidden = self._lean.forward(self._draft.readable(ids.flatten()), self._first).view(rows, 2, -1)[:, 1]
        for step in range(self._longest):
            logits = self._lean.logits(hidden)[:, : self._draft.columns]
            tokens = draw_in_place(
                logits.float(),
                inputs.seed[:rows],
                inputs.start[:rows] + 1 + step,
                inputs.temperature[:rows],
                self._draft.noise,
            )
            inputs.drafted[:rows, step].copy_(torch.where(drafting[:, 0], tokens, inputs.drafted[:rows, step]))
            if step + 1 < self._longest:
                places = torch.where(drafting, start + 1 + step, scratch).clamp(max=scratch)
                self._next.place(places)
                hidden = self._lean.forward(self._draft.readable(tokens), self._next)


class _HeadDrafter:
    """`longest` steps of the recurrent head, from the states that verification left."""

    def __init__(self, draft: HeadDraft, inputs: RoundInputs, rows: int, longest: int) -> None:
        self._draft, self._inputs, self._rows, self._longest = draft, inputs, rows, longest

    def compute(self) -> None:
        inputs, rows = self._inputs, self._rows
        state, tokens = inputs.states[:rows], inputs.last[:rows]
        for step in range(self._longest):
            state = self._draft.head.step(state, tokens, from_target=step == 0)
            tokens = draw_in_place(
                self._draft.head.logits(state).float(),
                inputs.seed[:rows],
                inputs.start[:rows] + 1 + step,
                inputs.temperature[:rows],
                self._draft.noise,
            )
            inputs.drafted[:rows, step].copy_(tokens)


def calibrate_fixed(fixed: FixedRounds, policy: LengthPolicy, drafts: Iterable[Draft]) -> None:
    """Price rounds as they are run, captured; step by step they cost several times as much on a GPU."""
    policy.target = LearnedCosts(StepCosts.measured(fixed.measure_target()))
    slots = fixed.slots
    for draft in drafts:
        if isinstance(draft, ModelDraft | HeadDraft) and _ready(draft, ()):
            points = fixed.measure_draft(draft)
            draft.calibrate(StepCosts.measured({slots + 1: max(points.values()), **points}))


def _ready(draft: Draft, rows: Sequence[Running]) -> bool:
    if isinstance(draft, ModelDraft):
        return draft.model.lean is not None and all(draft.ready(row) for row in rows)
    return isinstance(draft, HeadDraft | NgramDraft)


def _at_least(number: int, limit: int, smallest: int = 1) -> int:
    """The next power of two from `smallest` on, at most `limit`."""
    size = smallest
    while size < number:
        size *= 2
    return min(size, limit)
