"""The engine against transformers, same prompts, one run: `python -m benchmarks.engine [--quick] [--json FILE]`.

Two pairs. Bundled: what people get. Dialled: the bundled target with its later layers scaled down, and its first layers
as the draft, so that acceptance can be chosen; that pair also runs in transformers' assisted generation. Everything is
greedy, ends after the same number of tokens, and every figure is the median of paired repeats.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
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
from backend.sampling import SamplingParams
from backend.sequence import Request
from backend.speculate import closed_form_speedup
from backend.text import Tokenizer

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
    """One configuration. Speeds in tokens per second over all its requests, prompt reading included."""

    name: str
    batch: int
    speeds: list[float] = field(default_factory=list)
    per_pass: float | None = None
    acceptance: float | None = None
    tested: float | None = None
    draft_cost: float | None = None
    verify_cost: float | None = None
    closed_form: float | None = None

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


@dataclass(slots=True)
class Pair:
    """A target and a draft for this engine, and the same two for transformers (None where it cannot use them)."""

    name: str
    target: PackedModel
    drafts: dict[str, Draft]
    costs: StepCosts
    reference: Any
    assistant: Any = None


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
        engine = self.engine(pair, None)
        found = [engine.add(Request(f"{i}", p, self.tokens, GREEDY)) for i, p in enumerate(self.prompts)]
        while not engine.idle:
            engine.step()
        said = {token for sequence in found for token in sequence.tokens[sequence.prompt_tokens :]}
        rest = (token for token in range(HOT) if token not in said)
        return torch.tensor(sorted([*said, *list(rest)[: HOT - len(said)]]))

    def engine(self, pair: Pair, fixed: int | None) -> Engine:
        for slot in range(pair.target.cache.slots):
            pair.target.cache.truncate(slot, 0)
        return Engine(pair.target, self._decode, pair.drafts, policy=LengthPolicy(pair.costs, fixed=fixed))

    def _ours(self, pair: Pair, row: Row, draft: str | None, fixed: int | None) -> float:
        engine = self.engine(pair, fixed)
        texts = self.prompts if row.batch > 1 else self.prompts[: 3 if self.repeats > 1 else 2]
        started = self.clock()
        for at in range(0, len(texts), row.batch):
            for i, prompt in enumerate(texts[at : at + row.batch]):
                engine.add(Request(f"{at + i}", prompt, self.tokens, GREEDY, draft=draft))
            while not engine.idle:
                engine.step()
        seconds = self.clock() - started
        if draft is not None:
            self._explain(pair, row, engine, draft)
        return len(texts) * self.tokens / seconds

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
        row.closed_form = closed_form_speedup(row.tested, round(length), row.draft_cost, row.verify_cost)

    def _generate(self, pair: Pair, row: Row, options: dict[str, Any]) -> float:
        pair.reference.set_attn_implementation("sdpa")
        texts = self.prompts if row.batch > 1 else self.prompts[: 3 if self.repeats > 1 else 2]
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
        engine = self.engine(pair, None)
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
    from backend.loading import BUNDLED_DRAFT

    model = load_model(directory, dtype, CPU)
    target = PackedModel(model, slots=8, capacity=1024)
    drafts: dict[str, Draft] = {"ngram": NgramDraft()}
    if BUNDLED_DRAFT.is_dir():
        head = HeadDraft(load_demo_draft(model, BUNDLED_DRAFT), "bundled")
        head.calibrate(StepCosts.measured({rows: head.measure(rows) for rows in (1, 2, 4, 8)}))
        drafts["bundled"] = NgramThenModelDraft(head)  # as `demo` is served
    return Pair("bundled pair", target, drafts, measure_steps(target, _SIZES, clock=bench.clock), model)


_SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 16, 24, 40, 72]


def dialled_pair(bench: Bench, directory: Path, dtype: torch.dtype, scale: float, layers: int) -> Pair:
    """Target: later layers scaled by `scale`. Draft: its first `layers` layers; here with a head cut to HOT tokens."""
    model = load_model(directory, dtype, CPU)
    with torch.no_grad():
        for layer in model.model.layers[layers:]:
            layer.self_attn.o_proj.weight.mul_(scale)
            layer.mlp.down_proj.weight.mul_(scale)
    target = PackedModel(model, slots=8, capacity=1024)
    assistant = load_model(directory, dtype, CPU)
    assistant.model.layers = assistant.model.layers[:layers]
    assistant.config.num_hidden_layers = layers
    pair = Pair(
        f"dialled pair, rest × {scale}", target, {}, measure_steps(target, _SIZES, clock=bench.clock), model, assistant
    )
    hot = bench.hot_tokens(pair)
    draft = ModelDraft(PackedModel(assistant, slots=8, capacity=1024, head_rows=hot), "first layers", 1 << 30, hot)
    draft.calibrate(measure_steps(draft.model, [1, 2, 4, 8], clock=bench.clock))
    pair.drafts["draft"] = draft
    return pair


def table(pair: Pair, rows: Sequence[Row]) -> None:
    plain = {row.batch: row.speed for row in rows if row.name == "plain"}
    print(f"\n## {pair.name}\n")
    print("| | batch | tok/s | × plain | tokens/pass | acceptance (tested) | c | v | closed form |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [
            row.name,
            str(row.batch),
            f"{row.speed:.1f}",
            f"{row.speed / plain[row.batch]:.2f}",
            _cell(row.per_pass),
            "–" if row.acceptance is None else f"{row.acceptance:.2f} ({row.tested:.2f})",
            _cell(row.draft_cost),
            _cell(row.verify_cost),
            _cell(row.closed_form),
        ]
        print("| " + " | ".join(cells) + " |")


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
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    directory = resolve_weights("demo", given.data_dir)
    dtype = choose_dtype(given.dtype, CPU)
    tokens, repeats = (24, 1) if given.quick else (64, 3)
    tokens, repeats = given.tokens or tokens, given.repeats or repeats
    clock = time.process_time if given.cpu_time else time.perf_counter
    bench = Bench(load_tokenizer(directory), tokens, repeats, clock)
    result: dict[str, Any] = {"dtype": str(dtype), "threads": torch.get_num_threads(), "tokens": tokens, "pairs": {}}
    print(f"{dtype}, {torch.get_num_threads()} threads, {tokens} tokens an answer, median of {repeats}")
    makers: list[Callable[[], Pair]] = [partial(bundled_pair, bench, directory, dtype)]
    makers += [partial(dialled_pair, bench, directory, dtype, scale, 2) for scale in (0.001, 0.005)]
    for make in makers:
        pair = make()
        rows = bench.compare(pair, [4] if given.quick else [2, 4, 6])
        table(pair, rows)
        result["pairs"][pair.name] = [asdict(row) for row in rows]
        if pair.assistant is not None or not given.quick:
            result["pairs"][f"{pair.name}, latency"] = latency_table(bench, pair)
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
