"""Is the engine exact and fast on this GPU? One command: `python -m scripts.gpu_check [--json FILE]`.

Random weights of a real shape; the target's later layers are scaled down and its first layers are the draft, so that
acceptance can be dialled. Checks that speculative text equals plain text (float32 exactly; bfloat16 up to ties of the
top logits), measures tokens per second, plain and speculative, at batch 1 and 8, and checks that adaptive drafting is
never below .97 of plain. The last line is the verdict; exit code 0 when everything holds, 1 when something does not, 2
when there is no GPU. Without one, `--device cpu --shape tiny` runs the same code uncaptured.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from backend.adaptive import LengthPolicy
from backend.attention import Segment
from backend.calibration import measure_steps
from backend.drafts import Draft, ModelDraft
from backend.engine import Engine
from backend.graphs import calibrate_fixed
from backend.model import PackedModel
from backend.sampling import SamplingParams
from backend.sequence import Request
from backend.sequence import Sequence as Running
from backend.speculate import closed_form_speedup


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    draft_layers: int
    head_dim: int


SHAPES = {
    "7b": Shape(4096, 11008, 32, 32, 8, 32000, 2, 128),
    "1b": Shape(2048, 5632, 22, 32, 4, 32000, 2, 64),
    "tiny": Shape(64, 128, 4, 4, 2, 512, 2, 16),
}
CAPACITY = 1024
FLOOR = 0.97
ROOM_FOR_7B = 48 * 2**30  # bytes; while loading the weights are there twice


def build_models(shape: Shape, dtype: torch.dtype, device: torch.device, scale: float) -> tuple[Any, Any]:
    """(target, draft): the draft is the target's first layers; the target's other layers are scaled by `scale`."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    with torch.device(device):
        target = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for layer in target.model.layers[shape.draft_layers :]:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    draft_config = copy.deepcopy(config)
    draft_config.num_hidden_layers = shape.draft_layers
    with torch.device("meta"):
        draft = AutoModelForCausalLM.from_config(draft_config, dtype=dtype).eval()
    draft.model.layers = copy.deepcopy(target.model.layers[: shape.draft_layers])
    for layer in draft.model.layers:
        layer.self_attn.config = draft.config  # which attention runs is read from there
    draft.model.embed_tokens, draft.model.norm = target.model.embed_tokens, target.model.norm
    draft.model.rotary_emb, draft.lm_head = target.model.rotary_emb, target.lm_head
    return target, draft


def build_engine(target: PackedModel, draft: ModelDraft, costs: Any, fixed: int | None, graphs: bool) -> Engine:
    for model in (target, draft.model):
        for slot in range(model.cache.slots):
            model.cache.truncate(slot, 0)
    drafts: dict[str, Draft] = {"draft": draft}
    engine = Engine(target, str, drafts, policy=LengthPolicy(costs, fixed=fixed), fixed_rounds=graphs)
    if engine.fixed is not None and fixed is None:
        calibrate_fixed(engine.fixed, engine.policy, drafts.values())
    return engine


def generate(engine: Engine, requests: list[Request]) -> list[Running]:
    found = [engine.add(request) for request in requests]
    while not engine.idle:
        engine.step()
    return found


def requests_of(shape: Shape, batch: int, tokens: int, draft: str | None, temperature: float = 0.0) -> list[Request]:
    generator = torch.Generator().manual_seed(batch)
    return [
        Request(
            str(i),
            torch.randint(0, shape.vocabulary, (24 + 5 * i,), generator=generator).tolist(),
            tokens,
            SamplingParams(temperature=temperature, seed=i),
            draft=draft,
        )
        for i in range(batch)
    ]


def check_exact(shape: Shape, device: torch.device) -> list[str]:
    """float32 without TF32: plain packed rounds against every other way, greedy and sampled."""
    torch.backends.cuda.matmul.allow_tf32 = False
    target, draft = build_models(shape, torch.float32, device, 0.2)
    packed = PackedModel(target, slots=8, capacity=CAPACITY)
    model_draft = ModelDraft(PackedModel(draft, slots=8, capacity=CAPACITY), "first layers", shape.vocabulary)
    costs = measure_steps(packed, [1, 8])
    failures = []
    for temperature in (0.0, 0.8):
        plain = generate(
            build_engine(packed, model_draft, costs, 0, False), requests_of(shape, 8, 48, None, temperature)
        )
        for graphs in (False, True):
            for length in (1, 4, 8):
                fast = generate(
                    build_engine(packed, model_draft, costs, length, graphs),
                    requests_of(shape, 8, 48, "draft", temperature),
                )
                same = [a.tokens == b.tokens for a, b in zip(plain, fast, strict=True)]
                print(f"float32, T = {temperature}, K = {length}, graphs {graphs}: {sum(same)}/8 texts equal")
                if not all(same):
                    failures.append(f"float32 T={temperature} K={length} graphs={graphs}")
    return failures


@torch.inference_mode()
def only_ties(packed: PackedModel, plain: Running, fast: Running) -> bool:
    """Whether the first difference is between tokens whose logits are equal up to bfloat16's rounding."""
    pairs = zip(plain.tokens, fast.tokens, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return True
    for slot in range(packed.cache.slots):
        packed.cache.truncate(slot, 0)
    hidden = packed.forward(plain.tokens[:at], [Segment(0, 0, at)])
    logits = packed.logits(hidden[-1:])[0].float()
    gap = abs(float(logits[plain.tokens[at]] - logits[fast.tokens[at]]))
    return gap <= float(logits.abs().max()) * 2**-6


def described(
    name: str,
    batch: int,
    length: int | None,
    speeds: dict[str, float],
    engine: Engine,
    draft: ModelDraft,
    found: list[Running],
) -> dict[str, Any]:
    """One line of the table. c and v: of the rounds as they were run, captured or not."""
    drafted = sum(s.stats.draft_tokens for s in found)
    accepted = sum(s.stats.accepted_tokens for s in found)
    plain = speeds.get("plain, graphs", speeds["plain, eager"])
    row: dict[str, Any] = {"batch": batch, "name": name, "tok_s": round(speeds[name], 1)}
    row["acceptance"] = round(accepted / drafted, 3) if drafted else None
    row["of_plain"] = round(speeds[name] / plain, 2)
    if drafted and length is None and engine.fixed is not None:
        points = engine.fixed.measure_target()
        mean = drafted / sum(s.stats.target_passes for s in found)
        tested = sum(engine.totals.accepted_at.values()) / max(1, sum(engine.totals.tested_at.values()))
        padded = next(k for k in (1, 2, 4, 8) if k >= min(8, mean))
        c, v = draft.step_seconds(batch) / points[batch], points[batch * (padded + 1)] / points[batch]
        row |= {"c": round(c, 3), "v": round(v, 3), "mean_length": round(mean, 2)}
        row["closed_form"] = round(closed_form_speedup(tested, mean, c, v), 2)
    return row


def measure(shape: Shape, device: torch.device, scale: float, tokens: int) -> tuple[list[dict[str, Any]], list[str]]:
    """bfloat16 speeds, and texts that differ by more than ties."""
    target, draft = build_models(shape, torch.bfloat16, device, scale)
    packed = PackedModel(target, slots=8, capacity=CAPACITY)
    small = PackedModel(draft, slots=8, capacity=CAPACITY)
    model_draft = ModelDraft(small, "first layers", shape.vocabulary)
    del target, draft
    rows: list[dict[str, Any]] = []
    failures = []
    costs = measure_steps(packed, [1, 2, 3, 5, 8, 9, 16, 24, 40, 72])
    model_draft.calibrate(measure_steps(small, [1, 2, 4, 8]))
    for batch in (1, 8):
        plain: list[Running] = []
        speeds: dict[str, float] = {}
        for name, length, graphs in (
            ("plain, eager", 0, False),
            ("plain, graphs", 0, True),
            ("K = 2, graphs", 2, True),
            ("K = 4, eager", 4, False),
            ("K = 4, graphs", 4, True),
            ("K = 8, graphs", 8, True),
            ("adaptive, graphs", None, True),
        ):
            asked = requests_of(shape, batch, tokens, None if length == 0 else "draft")
            engine = build_engine(packed, model_draft, costs, length, graphs)
            generate(engine, asked)  # captures what has to be captured
            for model in (packed, small):
                for slot in range(8):
                    model.cache.truncate(slot, 0)
            started = time.perf_counter()
            found = generate(engine, asked)
            seconds = time.perf_counter() - started
            plain = plain or found
            speeds[name] = batch * tokens / seconds
            row = described(name, batch, length, speeds, engine, model_draft, found)
            rows.append(row)
            print(row, flush=True)
            if device.type == "cuda" and name.startswith("adaptive") and row["of_plain"] < FLOOR:
                failures.append(f"bfloat16 {name} batch {batch}: {row['of_plain']} of plain, under {FLOOR}")
            for a, b in zip(plain, found, strict=True):
                if not only_ties(packed, a, b):
                    failures.append(f"bfloat16 {name} batch {batch}: request {a.request.id} differs by more than a tie")
    return rows, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_check", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="default: 7b where it fits, else 1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, nargs="*", default=[0.01, 0.1], help="how much the later layers count")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no usable CUDA device here; install a CUDA build of torch, or try --device cpu --shape tiny")
        return 2
    print(torch.__version__, torch.cuda.get_device_name() if device.type == "cuda" else "cpu")
    if given.shape is None:
        roomy = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= ROOM_FOR_7B
        given.shape = "7b" if roomy else "1b"
    failures = check_exact(SHAPES["tiny"], device)
    result: dict[str, Any] = {}
    for scale in given.scale:
        print(f"\n{given.shape}, later layers × {scale}")
        result[str(scale)], more = measure(SHAPES[given.shape], device, scale, given.tokens)
        failures += more
    if given.json:
        given.json.write_text(json.dumps({"speeds": result, "failures": failures}, indent=2) + "\n")
    print("\n".join(["", *failures, f"VERDICT: {'FAIL' if failures else 'PASS'} ({len(failures)} failures)"]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
