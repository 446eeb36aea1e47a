"""Drafting with a head that goes on from the target's last hidden state: no prompt to read, nothing to roll back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from backend.demo.draft import RecurrentDraft
from backend.drafts import DraftJob
from backend.lean import Linear
from backend.sampling import Noise, draw, first_largest
from backend.sequence import Sequence as Running

_REPEATS = 5
_SHARPNESS = 1.35  # of the drafted distribution: a small model is less sure than its target (T = 0.7: .445 → .452)


class HeadDraft:
    """A recurrent head, run token by token for all its rows at once, drawing with each request's own noise."""

    def __init__(self, head: RecurrentDraft, weights: str, step_seconds: Callable[[int], float] | None = None) -> None:
        self.weights = weights
        self.head = _PackedHead(head)
        self.noise = Noise(len(head.hot_tokens), head.embedding.device, head.hot_tokens)
        self._step_seconds = step_seconds or (lambda rows: 0.0)

    def can_draft(self, sequence: Running) -> bool:
        return sequence.hidden is not None

    def step_seconds(self, rows: int) -> float:
        return self._step_seconds(rows)

    def calibrate(self, step_seconds: Callable[[int], float]) -> None:
        self._step_seconds = step_seconds

    @torch.inference_mode()
    def propose(self, jobs: Sequence[DraftJob]) -> list[list[int]]:
        proposals: list[list[int]] = [[] for _ in jobs]
        states = {i: job.sequence.hidden for i, job in enumerate(jobs) if job.length > 0}
        order = sorted((i for i, state in states.items() if state is not None), key=lambda i: -jobs[i].length)
        if not order:
            return proposals
        state = torch.stack([states[i] for i in order])  # type: ignore[misc]
        last = [jobs[i].sequence.tokens[-1] for i in order]
        for step in range(jobs[order[0]].length):
            order = [i for i in order if jobs[i].length > step]  # rows that want fewer tokens lie at the end
            state = self.head.step(state[: len(order)], last[: len(order)], from_target=step == 0)
            rows = [jobs[i].sequence.row(proposals[i]) for i in order]
            last = draw(self.head.logits(state), rows, self.noise).tolist()
            for i, token in zip(order, last, strict=True):
                proposals[i].append(token)
        return proposals

    @torch.inference_mode()
    def measure(self, rows: int) -> float:
        """Seconds of one greedy draft step for so many rows; the best of a few."""
        width = self.head.width
        state = torch.zeros(rows, width, dtype=self.head.dtype, device=self.head.device)
        tokens = list(range(1, rows + 1))
        best = float("inf")
        for _ in range(_REPEATS):
            started = time.perf_counter()
            state = self.head.step(state, tokens, from_target=False)
            tokens = first_largest(self.head.logits(state)).tolist()
            best = min(best, time.perf_counter() - started)
        return best


class _PackedHead:
    """`RecurrentDraft` for serving: the same arithmetic in the target's dtype, over prepacked weights."""

    def __init__(self, head: RecurrentDraft) -> None:
        self.width, self._eps, self._inner = head.width, head.eps, head.inner
        self._embedding = head.embedding
        self.dtype, self.device = head.embedding.dtype, head.embedding.device
        self._norms = {name: p.detach().to(self.dtype) for name, p in head.named_parameters() if p.ndim == 1}
        self._norms["norm_out"] = self._norms["norm_out"] * _SHARPNESS  # what the logits are proportional to
        names = ("fuse_target", "fuse_state", "gate_up", "down")
        self._linears = {name: Linear(head.get_parameter(name).detach().to(self.dtype), None) for name in names}
        self._hot_head = Linear(head.hot_head, None)

    def step(self, state: Tensor, tokens: Tensor | Sequence[int], *, from_target: bool) -> Tensor:
        """Next states [rows, width] after one token per row."""
        kind = "target" if from_target else "state"
        ids = tokens if isinstance(tokens, Tensor) else torch.tensor(tokens, dtype=torch.int64, device=self.device)
        token = functional.embedding(ids, self._embedding)
        both = torch.cat([self._norm(state, f"norm_{kind}"), self._norm(token, "norm_token")], -1)
        x = self._linears[f"fuse_{kind}"](both)
        wide = self._linears["gate_up"](self._norm(x, "norm_inner"))
        return x + self._linears["down"](functional.silu(wide[:, : self._inner]).mul_(wide[:, self._inner :]))

    def logits(self, state: Tensor) -> Tensor:
        return self._hot_head(self._norm(state, "norm_out"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x, (self.width,), self._norms[name], self._eps)
