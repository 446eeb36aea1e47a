"""The engine against transformers, same prompts, one run: `python -m benchmarks.engine [--quick] [--json FILE]`.

Bundled pair: what people get. Scaled pairs (high, medium): the bundled target with its later layers scaled down, and
its first layers as the draft, so that acceptance can be chosen; they also run in transformers' assisted generation.
Dial: the bundled pair with its proposals replaced by the answer and any share of errors, adaptive against plain.
Everything is greedy, ends after the same number of tokens, and every figure is the median of paired repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backend.adaptive import LengthPolicy
from backend.calibration import measure_steps
from backend.costs import StepCosts
from backend.drafts import Draft, ModelDraft, NgramDraft, NgramThenModelDraft
from backend.engine import Engine
from backend.loading import choose_dtype, load_model, load_tokenizer, resolve_weights
from backend.model import PackedModel
from backend.pages import use_large_pages
from backend.sampling import SamplingParams
from backend.sequence import Request
from backend.speculate import Rates, closed_form_speedup
from backend.text import Tokenizer
from benchmarks.dial import ACCEPTANCES, crowd, dial_row
from benchmarks.pace import run_paced

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
HOT = 8192
PROMPTS = (
    "Write a product description for a stainless steel water bottle.",
    "List five benefits of walking every day, with one sentence each.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Write a short e-mail to a customer whose parcel is late.",
    "Explain what a hash table is to a ten-year-old.",
    "Write three titles and a description for an online shop that sells tea.",
    "Summarise the story of Cinderella in five sentences.",
    "Write a JSON object for a product with a name, a price and three tags.",
)


@dataclass(slots=True)
class Row:
    """One configuration. speeds: tokens per second over all its requests, prompt reading included; decoding: of full
    rounds without prompts, which is what the closed form speaks of. draft_cost, verify_cost: c and v."""

    name: str
    batch: int
    speeds: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    policy: LengthPolicy | None = None
    per_pass: float | None = None
    acceptance: float | None = None
    tested: float | None = None
    draft_cost: float | None = None
    verify_cost: float | None = None
    closed_form: float | None = None

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)

    def report(self, plain: Row) -> dict[str, Any]:
        """The figures as they are printed; plain: the row of plain decoding at the same batch."""
        of_plain = [own / base for own, base in zip(self.speeds, plain.speeds, strict=False)]
        found: dict[str, Any] = {
            "name": self.name,
            "batch": self.batch,
            "tok_s": round(self.speed, 1),
            "of_plain": round(statistics.median(of_plain), 3),
            "of_plain_least_most": [round(min(of_plain), 3), round(max(of_plain), 3)],
            "per_pass": _rounded(self.per_pass),
            "acceptance": _rounded(self.acceptance),
            "tested": _rounded(self.tested),
            "c": _rounded(self.draft_cost),
            "v": _rounded(self.verify_cost),
            "closed_form": _rounded(self.closed_form),
        }
        if self.decoding and self.closed_form:
            decoding = statistics.median(a / b for a, b in zip(self.decoding, plain.decoding, strict=False))
            found |= {"decoding_of_plain": round(decoding, 3), "of_closed_form": round(decoding / self.closed_form, 3)}
        return found


@dataclass(slots=True)
class Pair:
    """A target and a draft for this engine, and the same two for transformers (None where it cannot use them)."""

    name: str
    target: PackedModel
    drafts: dict[str, Draft]
    costs: StepCosts
    reference: Any
    assistant: Any = None
    usual: Mapping[str, Rates] = field(default_factory=dict)

    def policy(self, fixed: int | None) -> LengthPolicy:
        policy = LengthPolicy(self.costs, fixed=fixed)
        policy.pair_rates.update(self.usual)
        return policy


class Bench:
    """clock: seconds of the wall, or of this process's CPU time: with one thread the better one on a busy machine."""

    def __init__(self, tokenizer: Tokenizer, tokens: int, repeats: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.tokens = tokens
        self.repeats = repeats
        self.prompts = [tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
        self._decode = tokenizer.decode

    def compare(self, pair: Pair, fixed: Sequence[int]) -> list[Row]:
        """Every configuration once per repeat, in turn, so that all of them see the same machine."""
        cases: list[tuple[Row, Callable[[Row], float]]] = []
        for batch in (1, 8):
            cases.append((Row("plain", batch), partial(self._ours, pair, draft=None, fixed=None)))
            for name in pair.drafts:
                if name == "head":  # a part of "bundled"; the dial uses it
                    continue
                lengths = [*fixed, None] if name != "ngram" else [None]
                for length in lengths:
                    label = f"{name}, {'adaptive' if length is None else f'K = {length}'}"
                    row = Row(label, batch)
                    cases.append((row, partial(self._ours, pair, draft=name, fixed=length)))
            cases.append((Row("transformers greedy", batch), partial(self._generate, pair, options={})))
        if pair.assistant is not None:
            for label, options in [("default", {}), *((f"constant {k}", _constant(k)) for k in (2, 4, 6))]:
                row = Row(f"transformers assisted, {label}", 1)
                cases.append((row, partial(self._assisted, pair, options=options)))
        for repeat in range(self.repeats):
            for row, run in cases:
                print(f"\r{pair.name}: {repeat + 1}/{self.repeats} {row.name:<40}", end="", file=sys.stderr)
                row.speeds.append(run(row))
        print(file=sys.stderr)
        return [row for row, _ in cases]

    def hot_tokens(self, pair: Pair) -> torch.Tensor:
        """What the target says to these prompts, filled up to HOT tokens: a hot vocabulary that fits the text."""
        engine = self.engine(pair, pair.policy(None))
        _, found = run_paced(engine, self.requests(len(self.prompts), None), 8, self.clock)
        said = {token for sequence in found for token in sequence.tokens[sequence.prompt_tokens :]}
        rest = (token for token in range(HOT) if token not in said)
        return torch.tensor(sorted([*said, *list(rest)[: HOT - len(said)]]))

    def engine(self, pair: Pair, policy: LengthPolicy) -> Engine:
        for slot in range(pair.target.cache.slots):
            pair.target.cache.truncate(slot, 0)
        return Engine(pair.target, self._decode, pair.drafts, policy=policy)

    def requests(self, count: int, draft: str | None) -> list[Request]:
        return [
            Request(f"{i}", prompt, self.tokens, GREEDY, draft=draft) for i, prompt in enumerate(self.prompts[:count])
        ]

    def _ours(self, pair: Pair, row: Row, draft: str | None, fixed: int | None) -> float:
        if row.policy is None:  # kept from repeat to repeat, as a server keeps it from request to request
            row.policy = pair.policy(fixed)
        engine = self.engine(pair, row.policy)
        pace, _ = run_paced(engine, self.requests(self._texts(row.batch), draft), row.batch, self.clock)
        row.decoding.append(pace.decoding)
        if draft is not None:
            self._explain(pair, row, engine, draft)
        return pace.speed

    def _texts(self, batch: int) -> int:
        return len(self.prompts) if batch > 1 else 3 if self.repeats > 1 else 2

    def _explain(self, pair: Pair, row: Row, engine: Engine, name: str) -> None:
        totals = engine.totals
        drafted, accepted = totals.draft_tokens.get(name, 0), totals.accepted_tokens.get(name, 0)
        row.per_pass = totals.generated_tokens / totals.target_passes
        if not drafted:
            return
        row.acceptance = accepted / drafted
        row.tested = sum(totals.accepted_at.values()) / max(1, sum(totals.tested_at.values()))
        plain = pair.costs(row.batch)
        length = drafted / totals.target_passes
        row.draft_cost = pair.drafts[name].step_seconds(row.batch) / plain
        row.verify_cost = pair.costs(round(row.batch * (1 + length))) / plain
        row.closed_form = closed_form_speedup(row.tested, length, row.draft_cost, row.verify_cost)

    def _generate(self, pair: Pair, row: Row, options: dict[str, Any]) -> float:
        pair.reference.set_attn_implementation("sdpa")
        texts = self.prompts[: self._texts(row.batch)]
        started = self.clock()
        for at in range(0, len(texts), row.batch):
            group = texts[at : at + row.batch]
            width = max(map(len, group))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in group])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group])
            pair.reference.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self.tokens,
                min_new_tokens=self.tokens,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        return len(texts) * self.tokens / (self.clock() - started)

    def _assisted(self, pair: Pair, row: Row, options: dict[str, Any]) -> float:
        pair.assistant.set_attn_implementation("sdpa")
        before = {name: getattr(pair.assistant.generation_config, name, None) for name in options}
        for name, value in options.items():
            setattr(pair.assistant.generation_config, name, value)
        try:
            return self._generate(pair, row, {"assistant_model": pair.assistant})
        finally:
            for name, value in before.items():
                setattr(pair.assistant.generation_config, name, value)

    def latencies(self, pair: Pair, draft: str | None, users: int = 8, turns: int = 3) -> list[float]:
        """Seconds of each request of so many users, who each send the next one when the last is answered."""
        engine = self.engine(pair, pair.policy(None))
        started: dict[str, float] = {}
        left = dict.fromkeys(range(users), turns)
        seconds: list[float] = []

        def send(user: int) -> None:
            left[user] -= 1
            name = f"{user}.{left[user]}"
            started[name] = self.clock()
            prompt = self.prompts[(user + left[user]) % len(self.prompts)]
            engine.add(Request(name, prompt, self.tokens, GREEDY, draft=draft))

        for user in range(users):
            send(user)
        while not engine.idle:
            for update in engine.step():
                if update.finish_reason is not None:
                    name = update.sequence.request.id
                    seconds.append(self.clock() - started[name])
                    if left[int(name.split(".")[0])]:
                        send(int(name.split(".")[0]))
        return sorted(seconds)


def _constant(length: int) -> dict[str, Any]:
    return {
        "num_assistant_tokens": length,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def bundled_pair(bench: Bench, directory: Path, dtype: torch.dtype) -> Pair:
    """The bundled target with everything that ships: n-gram lookup, and the distilled head where it is checked in."""
    from backend.demo.draft import load_demo_draft
    from backend.head_draft import HeadDraft
    from backend.loading import BUNDLED_DRAFT, BUNDLED_DRAFT_ACCEPTANCE

    model = load_model(directory, dtype, CPU)
    target = PackedModel(model, slots=8, capacity=1024)
    drafts: dict[str, Draft] = {"ngram": NgramDraft()}
    if BUNDLED_DRAFT.is_dir():
        head = HeadDraft(load_demo_draft(model, BUNDLED_DRAFT), "bundled")
        head.calibrate(StepCosts.measured({rows: head.measure(rows) for rows in (1, 2, 4, 8)}))
        drafts["bundled"] = NgramThenModelDraft(head)  # as `demo` is served
        drafts["head"] = head
    del model
    use_large_pages()  # as served; the reference is loaded afterwards, as transformers loads it by itself
    reference = load_model(directory, dtype, CPU)
    costs = measure_steps(target, _SIZES, clock=bench.clock, budget_s=_CALIBRATION_S)
    return Pair("bundled", target, drafts, costs, reference, usual={"bundled": Rates(*BUNDLED_DRAFT_ACCEPTANCE)})


_SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 24, 40, 72]
_CALIBRATION_S = 5.0


def _scaled(directory: Path, dtype: torch.dtype, scale: float, layers: int) -> Any:
    model = load_model(directory, dtype, CPU)
    with torch.no_grad():
        for layer in model.model.layers[layers:]:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    return model


def scaled_pair(bench: Bench, directory: Path, dtype: torch.dtype, scale: float, layers: int = 2) -> Pair:
    """Target: later layers scaled by `scale`. Draft: its first `layers` layers; here with a head cut to HOT tokens."""
    target = PackedModel(_scaled(directory, dtype, scale, layers), slots=8, capacity=1024)
    use_large_pages()
    model = _scaled(directory, dtype, scale, layers)
    assistant = load_model(directory, dtype, CPU)
    assistant.model.layers = assistant.model.layers[:layers]
    assistant.config.num_hidden_layers = layers
    costs = measure_steps(target, _SIZES, clock=bench.clock, budget_s=_CALIBRATION_S)
    pair = Pair(f"later layers × {scale}", target, {}, costs, model, assistant)
    hot = bench.hot_tokens(pair)
    draft = ModelDraft(PackedModel(assistant, slots=8, capacity=1024, head_rows=hot), "first layers", 1 << 30, hot)
    draft.calibrate(measure_steps(draft.model, [1, 2, 4, 8], clock=bench.clock))
    pair.drafts["draft"] = draft
    return pair


def table(pair: Pair, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Print the rows and return them. Decoding and closed form: prompts and the tail of a batch left out."""
    plain = {row.batch: row for row in rows if row.name == "plain"}
    print(f"\n## {pair.name}\n")
    print("| | batch | tok/s | × plain (least to most) | tokens/pass | acceptance (tested) | c | v "
          "| decoding × plain | closed form | of it |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    reports = [row.report(plain[row.batch]) for row in rows]
    for found in reports:
        least, most = found["of_plain_least_most"]
        cells = [
            found["name"],
            str(found["batch"]),
            f"{found['tok_s']:.1f}",
            f"{found['of_plain']:.2f} ({least:.2f} to {most:.2f})",
            _cell(found["per_pass"]),
            "–" if found["acceptance"] is None else f"{found['acceptance']:.2f} ({found['tested']:.2f})",
            *(_cell(found.get(name)) for name in ("c", "v", "decoding_of_plain", "closed_form", "of_closed_form")),
        ]
        print("| " + " | ".join(cells) + " |")
    return reports


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def latency_table(bench: Bench, pair: Pair) -> dict[str, Any]:
    """p50 and p99 at 8 users, plain and speculative, beside what the article claims."""
    fast = "bundled" if "bundled" in pair.drafts else next(iter(pair.drafts))
    plain, speculative = bench.latencies(pair, None), bench.latencies(pair, fast)
    found = {}
    print(f"\n## request latency, 8 users, {pair.name}\n\n| | p50 s | p99 s |\n|---|---|---|")
    for name, values in (("plain", plain), (f"speculative ({fast})", speculative)):
        found[name] = (quantile(values, 0.5), quantile(values, 0.99))
        print(f"| {name} | {found[name][0]:.2f} | {found[name][1]:.2f} |")
    p50, p99 = (found[f"speculative ({fast})"][i] / found["plain"][i] - 1 for i in (0, 1))
    print(f"| change | {p50:+.0%} | {p99:+.0%} |\n| claimed | -57% | -65% |\n\nClaimed throughput: 2 to 3 times plain.")
    return {"plain": found["plain"], "speculative": found[f"speculative ({fast})"]}


_PARTS = ("bundled", "high", "medium", "dial", "crowd")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer tokens, one repeat")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, help="per answer (default: 64, quick 24)")
    parser.add_argument("--repeats", type=int, help="default: 3, quick 1")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds; for one thread on a busy machine")
    parser.add_argument("--parts", nargs="*", choices=_PARTS, default=_PARTS, help="default: all")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    directory = resolve_weights("demo", given.data_dir)
    dtype = choose_dtype(given.dtype, CPU)
    tokens, repeats = (24, 1) if given.quick else (64, 3)
    tokens, repeats = given.tokens or tokens, given.repeats or repeats
    clock = time.process_time if given.cpu_time else time.perf_counter
    bench = Bench(load_tokenizer(directory), tokens, repeats, clock)
    result: dict[str, Any] = {"dtype": str(dtype), "threads": torch.get_num_threads(), "tokens": tokens, "parts": {}}
    print(f"{dtype}, {torch.get_num_threads()} threads, {tokens} tokens an answer, median of {repeats}")
    for name in given.parts:
        result["parts"][name] = part(bench, name, directory, dtype, quick=given.quick)
        if given.json:
            given.json.write_text(json.dumps(result, indent=2) + "\n")


def part(bench: Bench, name: str, directory: Path, dtype: torch.dtype, *, quick: bool) -> Any:
    """Run one part, print its table and return its figures."""
    scale = {"high": 0.001, "medium": 0.005}.get(name)
    pair = bundled_pair(bench, directory, dtype) if scale is None else scaled_pair(bench, directory, dtype, scale)
    if name == "dial":
        print("\n## the bundled pair with its acceptance dialled: adaptive over plain, never below .97\n")
        return [dial_row(bench, pair, batch, acceptance) for batch in (1, 8) for acceptance in ACCEPTANCES]
    if name == "crowd":
        print("\n## 100 requests at once on 8 slots\n")
        return crowd(bench, pair)
    rows = bench.compare(pair, [4] if quick else [2, 4, 6])
    found: dict[str, Any] = {"pair": pair.name, "rows": table(pair, rows)}
    if not quick:
        found["latency"] = latency_table(bench, pair)
    return found


if __name__ == "__main__":
    main()
