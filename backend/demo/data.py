"""Generate the distillation data: the target answers our prompts, and what it thought of every token is kept.

    python -m backend.demo.data --target DIR --out DIR --tokens 600000

A shard holds whole conversations, concatenated: `ids` [T], `hidden` [T, width] (the target's last hidden state after
its final norm, what the head reads), `top_ids` and `top_logits` [T, 64] (zero on prompt positions, which have no answer
to learn from). A JSON file beside it says where each starts. Killed and started again, it goes on with the next shard.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend.demo.prompts import Kind, Prompt, prompts

TOP = 64
TEMPERATURES = (0.0, 0.7, 1.0)
TEMPERATURE_WEIGHTS = (30, 40, 30)
LONGEST_PROMPT_TOKENS = 96
LONGEST_ANSWER_TOKENS = 128  # more prompts teach more than longer answers, which often end in loops


@dataclass(frozen=True, slots=True)
class Conversation:
    """Where one conversation lies in its shard, half open, and how it was made."""

    start: int
    answer_start: int
    end: int
    kind: Kind
    temperature: float
    held_out: bool


@dataclass(slots=True)
class _Slot:
    prompt: Prompt
    temperature: float
    ids: list[int]
    answer_start: int


class TargetSampler:
    """Continuous batched sampling from a Llama target with a static cache; keeps hidden states and the top logits."""

    def __init__(self, directory: Path, slots: int, longest: int, seed: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width, self.head_dim = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.eps, self.longest = config.rms_norm_eps, longest
        self.embedding = model.model.embed_tokens.weight.data
        self.norm = model.model.norm.weight.data
        self.layers = [_fused(layer) for layer in model.model.layers]
        inverse = 1.0 / (config.rope_parameters["rope_theta"] ** (torch.arange(0, self.head_dim, 2) / self.head_dim))
        angles = torch.arange(longest)[:, None] * inverse[None]
        self.cos, self.sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        shape = (len(self.layers), slots, self.kv_heads, longest, self.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.bfloat16)
        self.values = torch.zeros(shape, dtype=torch.bfloat16)
        self.hidden = torch.zeros(slots, longest, self.width, dtype=torch.bfloat16)
        self.top_ids = torch.zeros(slots, longest, TOP, dtype=torch.int32)
        self.top_logits = torch.zeros(slots, longest, TOP, dtype=torch.float16)
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, ids: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Hidden states after the final norm, [rows, n, width], of tokens [rows, n] at positions [rows, n] of slots."""
        rows, n = ids.shape
        reach = int(positions.max()) + 1
        x = functional.embedding(ids, self.embedding)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        visible = torch.arange(reach)[None, None] <= positions[:, :, None]
        group = self.heads // self.kv_heads
        mask = visible[:, None].repeat(1, 1, group, 1)  # the query heads of one key head lie along the query axis
        bias = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill_(~mask, float("-inf"))
        everyone = len(slots) == self.keys.shape[1]
        for layer, (norm1, qkv, out, norm2, gate_up, down) in enumerate(self.layers):
            y = (
                functional.linear(functional.rms_norm(x, (self.width,), norm1, self.eps), qkv)
                .view(rows, n, -1, self.head_dim)
                .transpose(1, 2)
            )
            q, k, v = torch.split(y, [self.heads, self.kv_heads, self.kv_heads], 1)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            keys, values = self.keys[layer], self.values[layer]
            keys[slots[:, None], :, positions] = k.transpose(1, 2)
            values[slots[:, None], :, positions] = v.transpose(1, 2)
            seen_keys, seen_values = (keys, values) if everyone else (keys[slots], values[slots])
            q = q.reshape(rows, self.kv_heads, group * n, self.head_dim)
            a = functional.scaled_dot_product_attention(q, seen_keys[:, :, :reach], seen_values[:, :, :reach], bias)
            a = a.view(rows, self.heads, n, self.head_dim).transpose(1, 2).reshape(rows, n, self.width)
            x = x + functional.linear(a, out)
            gate, up = functional.linear(functional.rms_norm(x, (self.width,), norm2, self.eps), gate_up).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.rms_norm(x, (self.width,), self.norm, self.eps)

    def draw(self, hidden: Tensor, slots: Tensor, positions: Tensor, temperatures: Tensor) -> Tensor:
        """The next token of each row [rows]; its top logits are kept at `positions`. Draws are among the top 64."""
        top = functional.linear(hidden, self.embedding).topk(TOP, dim=-1).indices
        logits = torch.einsum("rkw,rw->rk", self.embedding[top].float(), hidden.float())  # exact: bf16 heads make ties
        self.top_ids[slots, positions] = top.int()
        self.top_logits[slots, positions] = logits.half()
        exponential = torch.empty_like(logits).exponential_(generator=self.generator)
        noisy = logits / temperatures[:, None].clamp_min(1e-6) - exponential.log()
        choice = torch.where(temperatures[:, None] > 0, noisy, logits).argmax(-1, keepdim=True)
        return top.gather(1, choice)[:, 0]


def _fused(layer: torch.nn.Module) -> tuple[Tensor, ...]:
    weights = dict(layer.named_parameters())
    qkv = torch.cat([weights[f"self_attn.{name}_proj.weight"] for name in "qkv"]).data
    gate_up = torch.cat([weights["mlp.gate_proj.weight"], weights["mlp.up_proj.weight"]]).data
    rest = (weights["self_attn.o_proj.weight"].data, weights["post_attention_layernorm.weight"].data)
    return weights["input_layernorm.weight"].data, qkv, *rest, gate_up, weights["mlp.down_proj.weight"].data


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


class ShardWriter:
    """Collects conversations and writes a shard, complete or not at all, whenever it has enough of them."""

    def __init__(self, directory: Path, first: int, conversations: int) -> None:
        self.directory, self.number, self.capacity = directory, first, conversations
        self._empty()

    def _empty(self) -> None:
        self.tensors: dict[str, list[Tensor]] = {"ids": [], "hidden": [], "top_ids": [], "top_logits": []}
        self.index: list[Conversation] = []
        self.tokens = 0

    def add(self, slot: _Slot, hidden: Tensor, top_ids: Tensor, top_logits: Tensor) -> None:
        n = len(slot.ids)
        self.tensors["ids"].append(torch.tensor(slot.ids, dtype=torch.int32))
        self.tensors["hidden"].append(hidden[:n].clone())
        self.tensors["top_ids"].append(top_ids[:n].clone())
        self.tensors["top_logits"].append(top_logits[:n].clone())
        end = self.tokens + n
        answer_start, prompt = self.tokens + slot.answer_start, slot.prompt
        self.index.append(Conversation(self.tokens, answer_start, end, prompt.kind, slot.temperature, prompt.held_out))
        self.tokens = end
        if len(self.index) == self.capacity:
            self._write()

    def _write(self) -> None:
        name = self.directory / f"{self.number:05d}"
        fields = Conversation.__slots__
        name.with_suffix(".json").write_text(json.dumps([{f: getattr(c, f) for f in fields} for c in self.index]))
        partial = name.with_suffix(".partial")
        save_file({key: torch.cat(value) for key, value in self.tensors.items()}, partial)
        os.replace(partial, name.with_suffix(".safetensors"))
        self.number += 1
        self._empty()


def read_shard(path: Path) -> tuple[dict[str, Tensor], list[Conversation]]:
    """The tensors of one shard and its conversations, in order."""
    return load_file(path), [Conversation(**entry) for entry in json.loads(path.with_suffix(".json").read_text())]


def _waiting(tokenizer: object, seed: int, held_out: bool | None) -> Iterator[_Slot]:
    rng = random.Random(seed)
    for prompt in prompts(seed):
        if held_out is not None and prompt.held_out != held_out:
            continue
        text = tokenizer.apply_chat_template(prompt.as_chat(), tokenize=False, add_generation_prompt=True)  # type: ignore[attr-defined]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
        if len(ids) <= LONGEST_PROMPT_TOKENS:
            yield _Slot(prompt, rng.choices(TEMPERATURES, TEMPERATURE_WEIGHTS)[0], list(ids), len(ids))


@torch.inference_mode()
def generate(
    target: Path, out: Path, *, tokens: int, slots: int, seed: int, end_id: int, held_out: bool | None
) -> None:
    """Write shards to `out` until about `tokens` answer tokens were generated in this run."""
    out.mkdir(parents=True, exist_ok=True)
    first = len(list(out.glob("*.safetensors")))
    seed += 1000 * first
    tokenizer = AutoTokenizer.from_pretrained(target)
    sampler = TargetSampler(target, slots, LONGEST_PROMPT_TOKENS + LONGEST_ANSWER_TOKENS, seed)
    waiting, writer = _waiting(tokenizer, seed, held_out), ShardWriter(out, first, 128)
    running: list[_Slot] = []
    free = list(range(slots))
    temperatures, began, made = torch.zeros(slots), time.monotonic(), 0
    for step in itertools.count():
        if len(free) >= slots // 8 or step == 0:
            arrivals = list(itertools.islice(waiting, len(free)))
            _prefill(sampler, arrivals, free, running, temperatures)
            free = []
        everyone = torch.arange(slots)
        positions = torch.tensor([len(slot.ids) - 1 for slot in running])
        last = torch.tensor([slot.ids[-1] for slot in running])
        hidden = sampler.forward(last[:, None], everyone, positions[:, None])[:, 0]
        sampler.hidden[everyone, positions] = hidden
        for index, token in enumerate(sampler.draw(hidden, everyone, positions, temperatures).tolist()):
            if index in free:
                continue
            slot = running[index]
            slot.ids.append(token)
            made += 1
            if token == end_id or len(slot.ids) - slot.answer_start >= LONGEST_ANSWER_TOKENS:
                writer.add(slot, sampler.hidden[index], sampler.top_ids[index], sampler.top_logits[index])
                free.append(index)
        if step % 100 == 0:
            print(f"step {step}: {made} tokens, {made / (time.monotonic() - began):.0f} tok/s", flush=True)
        if made >= tokens:
            return


def _prefill(
    sampler: TargetSampler, arrivals: list[_Slot], free: list[int], running: list[_Slot], temperatures: Tensor
) -> None:
    """Seat the arrivals. The last prompt token is left for the next step, which draws the first answer token."""
    longest = max(len(slot.ids) for slot in arrivals) - 1
    ids = torch.zeros(len(arrivals), longest, dtype=torch.long)
    for row, slot in enumerate(arrivals):
        ids[row, : len(slot.ids) - 1] = torch.tensor(slot.ids[:-1])
    index = torch.tensor(free)
    hidden = sampler.forward(ids, index, torch.arange(longest).expand(len(arrivals), longest))
    sampler.hidden[index, :longest] = hidden
    sampler.top_ids[index] = 0
    sampler.top_logits[index] = 0
    for seat, slot in zip(free, arrivals, strict=True):
        temperatures[seat] = slot.temperature
        if seat < len(running):
            running[seat] = slot
        else:
            running.append(slot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="safetensors directory of the target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=600_000, help="answer tokens to generate in this run")
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--end-id", type=int, default=2)
    parser.add_argument("--held-out", choices=("mixed", "only", "none"), default="mixed")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    held_out = {"mixed": None, "only": True, "none": False}[given.held_out]
    generate(
        given.target,
        given.out,
        tokens=given.tokens,
        slots=given.slots,
        seed=given.seed,
        end_id=given.end_id,
        held_out=held_out,
    )


if __name__ == "__main__":
    main()
