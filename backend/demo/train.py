"""Distil the bundled draft from the shards of `backend.demo.data`. Killed and started again, it goes on.

    python -m backend.demo.train --target DIR --data DIR --out DIR --steps 4000 --decay 800

Each step takes answer positions at random, runs the draft from the target's hidden state along the target's own next
tokens, and pulls the draft's distribution of every next token towards the target's (KL over the target's top 64 tokens,
renormalised over the hot vocabulary). Later draft steps count less and run on fewer positions, as they do in use.
Matrices are trained with Muon (orthogonalised momentum, Jordan et al. 2024; several times fewer steps than AdamW in our
trial), vectors with AdamW; float32 masters, bfloat16 products; an average of the weights is what is shipped.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from backend.demo.data import read_shard
from backend.demo.draft import RecurrentDraft, save_demo_draft

ROWS_PER_STEP = (1024, 576, 320, 192)
"""Positions trained at each draft step: a nested subset, since step j is only used when all before it were right."""
STEP_WEIGHTS = (1.0, 0.5, 0.25, 0.15)
DEPTH = len(ROWS_PER_STEP)


class Examples:
    """Answer positions of all shards read so far: the target's state there, the tokens after it, its views of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokens = 0
        self.mass = torch.zeros(1 << 16, dtype=torch.float64)
        self._read: set[str] = set()
        self._parts: list[dict[str, Tensor]] = []
        self._starts: list[int] = []  # first position of each part
        self.positions = 0

    def refresh(self) -> None:
        """Read shards that were written since the last call. Held-out conversations are left out."""
        for path in sorted(self.directory.glob("*.safetensors")):
            if path.name in self._read:
                continue
            self._read.add(path.name)
            tensors, conversations = read_shard(path)
            at, left = [], []
            for c in conversations:
                if c.held_out or c.end - c.answer_start < 3:
                    continue
                span = torch.arange(c.answer_start - 1, c.end - 2)
                at.append(span)
                left.append((c.end - 2 - span).clamp_max(DEPTH))  # draft steps with a teacher: the last token has none
                views = slice(c.answer_start - 1, c.end - 1)
                mass = tensors["top_logits"][views].float().softmax(-1).double()
                self.mass.scatter_add_(0, tensors["top_ids"][views].long().flatten(), mass.flatten())
                self.tokens += c.end - c.answer_start
            self._parts.append({**tensors, "at": torch.cat(at), "left": torch.cat(left)})
            self._starts.append(self.positions)
            self.positions += len(self._parts[-1]["at"])

    def hot_tokens(self, count: int) -> Tensor:
        """The tokens with the most probability under the target, over all answer positions; ascending ids."""
        return self.mass.topk(count).indices.sort().values

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """states [n, width], tokens [n, depth], top ids and top logits [n, depth, 64], real [n, depth]."""
        draws = torch.randint(self.positions, (count,), generator=generator)
        part_of = torch.bucketize(draws, torch.tensor(self._starts), right=True) - 1
        batches = []
        for number in sorted(set(part_of.tolist())):
            part = self._parts[number]
            index = draws[part_of == number] - self._starts[number]
            at, left = part["at"][index], part["left"][index]
            ahead = at[:, None] + torch.arange(1, DEPTH + 1).minimum(left[:, None])
            real = torch.arange(DEPTH)[None] < left[:, None]
            ids, top_ids = part["ids"][ahead].long(), part["top_ids"][ahead].long()
            batches.append((part["hidden"][at], ids, top_ids, part["top_logits"][ahead], real))
        mixed = torch.randperm(count, generator=generator)
        states, tokens, ids, logits, real = (torch.cat(column)[mixed] for column in zip(*batches, strict=True))
        return states, tokens, ids, logits, real


class HeadLoss(torch.autograd.Function):
    """Cross-entropy of the hot head against the target's renormalised top tokens; the gradient is made in place."""

    @staticmethod
    def forward(ctx: Any, readout: Tensor, head: Tensor, columns: Tensor, top_logits: Tensor, real: Tensor) -> Tensor:
        """readout [n, width], head [hot, width], columns [n, 64] (-1: not hot), top_logits [n, 64], real [n]."""
        hot = columns >= 0
        columns = columns.clamp_min(0)
        wanted = top_logits.float().masked_fill(~hot, -1e9).softmax(-1) * hot
        mass = wanted.sum(-1, keepdim=True)
        weight = (real.float() / real.sum().clamp_min(1))[:, None]
        logits = functional.linear(readout, head)
        given = logits.gather(-1, columns).float()
        peak = logits.amax(-1, keepdim=True)
        logits = (logits - peak).exp_()
        total = logits.sum(-1, keepdim=True, dtype=torch.float32)
        loss = ((mass * (peak.float() + total.log()) - (wanted * given).sum(-1, keepdim=True)) * weight).sum()
        logits.mul_((weight * mass / total).to(logits.dtype))
        logits.scatter_add_(1, columns, (-wanted * weight).to(logits.dtype))
        ctx.save_for_backward(logits @ head)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None


class Muon:
    """Momentum, orthogonalised by five Newton-Schulz iterations, for matrices."""

    def __init__(self, matrices: list[torch.nn.Parameter], momentum: float = 0.95, decay: float = 0.3) -> None:
        self.matrices, self.momentum, self.decay = matrices, momentum, decay
        self.buffers = [torch.zeros_like(matrix) for matrix in matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for matrix, buffer in zip(self.matrices, self.buffers, strict=True):
            assert matrix.grad is not None
            buffer.mul_(self.momentum).add_(matrix.grad)
            update = _orthogonal(matrix.grad + self.momentum * buffer)
            matrix.mul_(1 - rate * self.decay).add_(update, alpha=-rate * 0.2 * max(matrix.shape) ** 0.5)


def _orthogonal(gradient: Tensor) -> Tensor:
    x = gradient.to(torch.bfloat16)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = (x.T if tall else x).float()
    return result


class Trainer:
    def __init__(
        self, target: Path, data: Path, out: Path, *, inner: int, hot: int, rate: float, dropout: float
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        self.out, self.rate = out, rate
        self.examples = Examples(data)
        self.examples.refresh()
        self.embedding = model.get_input_embeddings().weight.detach()
        width = self.embedding.shape[1]
        self.draft = RecurrentDraft(
            width, inner, self.examples.hot_tokens(hot), model.config.rms_norm_eps, dropout=dropout
        )
        self.draft.norm_out.data.copy_(model.model.norm.weight.data)
        self.average = {name: p.detach().clone() for name, p in self.draft.named_parameters()}
        self.muon = Muon([p for p in self.draft.parameters() if p.ndim == 2])
        vectors = [p for p in self.draft.parameters() if p.ndim == 1]
        self.adam = torch.optim.AdamW(vectors, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.steps, self.seconds, self.loss = 0, 0.0, 0.0
        if self._checkpoint.exists():
            self._restore()
        self._attach()

    @property
    def _checkpoint(self) -> Path:
        return self.out / "checkpoint.pt"

    def train(self, steps: int, decay: int, generator: torch.Generator) -> None:
        """Go on until `steps` in all; over the last `decay` of them the rate falls to nothing."""
        began = time.monotonic()
        while self.steps < steps:
            rate = self.rate * min(1.0, (self.steps + 1) / 40, (steps - self.steps) / max(1, decay))
            loss = self._step(rate, generator)
            self.steps += 1
            self.loss = loss if self.loss == 0 else 0.98 * self.loss + 0.02 * loss
            if self.steps % 50 == 0 or self.steps == steps:
                self.seconds += time.monotonic() - began
                began = time.monotonic()
                self._save()
                self.examples.refresh()
                print(
                    f"step {self.steps}: loss {self.loss:.3f}, {self.examples.tokens} tokens, {self.seconds:.0f} s",
                    flush=True,
                )

    def _step(self, rate: float, generator: torch.Generator) -> float:
        states, tokens, top_ids, top_logits, real = self.examples.sample(ROWS_PER_STEP[0], generator)
        loss = torch.zeros(())
        for depth, rows in enumerate(ROWS_PER_STEP):
            states = self.draft.step(states[:rows], tokens[:rows, depth], from_target=depth == 0)
            columns, logits = self.column_of[top_ids[:rows, depth]], top_logits[:rows, depth]
            readout = self.draft.readout(states)
            part: Tensor = HeadLoss.apply(readout, self.draft.hot_head, columns, logits, real[:rows, depth])  # type: ignore[no-untyped-call]
            loss = loss + STEP_WEIGHTS[depth] / sum(STEP_WEIGHTS) * part
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for group in self.adam.param_groups:
            group["lr"] = rate * 0.3
        self.adam.step()
        self.muon.step(rate)
        self.draft.zero_grad()
        keep = min(0.99, 1 - 1 / (self.steps + 1))
        with torch.no_grad():
            for name, p in self.draft.named_parameters():
                self.average[name].lerp_(p, 1 - keep)
        return float(loss.detach())

    def _attach(self) -> None:
        self.draft.attach(self.embedding, self.embedding)
        self.column_of = torch.full((len(self.embedding),), -1)
        self.column_of[self.draft.hot_tokens] = torch.arange(len(self.draft.hot_tokens))

    def choose_hot_tokens(self) -> None:
        """Choose again on all data: the head's rows are the target's, so nothing else changes."""
        self.draft.hot_tokens = self.examples.hot_tokens(len(self.draft.hot_tokens))
        self._attach()

    def _save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            "draft": self.draft.state_dict(),
            "average": self.average,
            "muon": self.muon.buffers,
            "adam": self.adam.state_dict(),
            "steps": self.steps,
            "seconds": self.seconds,
            "loss": self.loss,
        }
        torch.save(state, self._checkpoint.with_suffix(".partial"))
        os.replace(self._checkpoint.with_suffix(".partial"), self._checkpoint)

    def _restore(self) -> None:
        state = torch.load(self._checkpoint)
        self.draft.load_state_dict(state["draft"])
        self.average = state["average"]
        self.muon.buffers = state["muon"]
        self.adam.load_state_dict(state["adam"])
        self.steps, self.seconds, self.loss = state["steps"], state["seconds"], state["loss"]

    def export(self, directory: Path) -> None:
        """Write the averaged weights as a draft directory."""
        draft = RecurrentDraft(self.draft.width, self.draft.inner, self.draft.hot_tokens, self.draft.eps)
        draft.load_state_dict({**self.average, "hot_tokens": self.draft.hot_tokens})
        draft.attach(self.embedding, self.embedding)
        trained = {"steps": self.steps, "answer_tokens": self.examples.tokens, "minutes": round(self.seconds / 60)}
        save_demo_draft(draft, directory, trained)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint and exported weights")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--decay", type=int, default=800)
    parser.add_argument("--inner", type=int, default=1536)
    parser.add_argument("--hot", type=int, default=8192)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    trainer = Trainer(
        given.target, given.data, given.out, inner=given.inner, hot=given.hot, rate=given.rate, dropout=given.dropout
    )
    trainer.choose_hot_tokens()
    trainer.train(given.steps, given.decay, torch.Generator().manual_seed(given.seed + trainer.steps))
    trainer.export(given.out / "weights")


if __name__ == "__main__":
    main()
