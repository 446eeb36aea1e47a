"""What a worker counts, for Prometheus. The hot path only adds to plain numbers; text is made when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from ledger.acceptance import Acceptance, State
from ledger.gate import Outcome, Receipt
from ledger.money import format_amount

STATES: tuple[State, ...] = get_args(State)
LATENCY_BUCKETS_MS = (5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000)

Labels = tuple[tuple[str, str], ...]


class _Totals:
    """Sums of one (model, deployment, status)."""

    __slots__ = (
        "accepted_tokens",
        "billed_tokens",
        "buckets",
        "cost_cny_pico",
        "cost_usd_pico",
        "draft_tokens",
        "generated_tokens",
        "latency_ms",
        "prompt_tokens",
        "requests",
        "ttft_buckets",
        "ttft_ms",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.billed_tokens = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.cost_usd_pico = 0
        self.cost_cny_pico = 0
        self.latency_ms = 0
        self.ttft_ms = 0
        self.buckets = [0] * (len(LATENCY_BUCKETS_MS) + 1)
        self.ttft_buckets = [0] * (len(LATENCY_BUCKETS_MS) + 1)


class Metrics:
    """One worker's numbers. `gauges` (name → value) and `limit_decisions` (where → how many) are asked when the text
    is made."""

    def __init__(
        self, gauges: Callable[[], Mapping[str, float]] = dict, limit_decisions: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        self._settled: dict[tuple[str, str, str], _Totals] = {}
        self._refused: defaultdict[str, int] = defaultdict(int)
        self._upstream_failures: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._fresh_failures: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._gauges = gauges
        self.acceptance: Sequence[Acceptance] = ()
        """How drafts do, as the ledger last had it."""
        self._limit_decisions = limit_decisions

    def settled(self, model: str, outcome: Outcome, receipt: Receipt) -> None:
        key = (model, outcome.deployment, outcome.status)
        totals = self._settled.get(key)
        if totals is None:
            totals = self._settled[key] = _Totals()
        tokens = outcome.tokens
        totals.requests += 1
        totals.prompt_tokens += tokens.prompt_tokens
        totals.generated_tokens += tokens.generated_tokens
        totals.billed_tokens += receipt.billed_tokens
        totals.draft_tokens += tokens.draft_tokens
        totals.accepted_tokens += tokens.accepted_tokens
        totals.cost_usd_pico += receipt.cost_usd_pico
        totals.cost_cny_pico += receipt.cost_cny_pico
        totals.latency_ms += outcome.latency_ms
        totals.buckets[bisect_left(LATENCY_BUCKETS_MS, outcome.latency_ms)] += 1
        if outcome.ttft_ms is not None:
            totals.ttft_ms += outcome.ttft_ms
            totals.ttft_buckets[bisect_left(LATENCY_BUCKETS_MS, outcome.ttft_ms)] += 1

    def refused(self, code: str) -> None:
        self._refused[code] += 1

    def upstream_failed(self, model: str, deployment: str, kind: str) -> None:
        self._upstream_failures[(deployment, kind)] += 1
        if kind != "request":
            self._fresh_failures[(model, deployment)] += 1

    def take_failures(self) -> dict[tuple[str, str], int]:
        """(model, deployment) → failed attempts since this was last called; the caller's own mistakes are none."""
        taken = dict(self._fresh_failures)
        self._fresh_failures.clear()
        return taken

    def give_back_failures(self, failures: Mapping[tuple[str, str], int]) -> None:
        """They could not be kept: next time."""
        for place, count in failures.items():
            self._fresh_failures[place] += count

    def text(self) -> bytes:
        """The Prometheus exposition format, version 0.0.4."""
        settled: list[tuple[Labels, _Totals]] = [
            ((("model", model), ("deployment", deployment), ("status", status)), totals)
            for (model, deployment, status), totals in self._settled.items()
        ]
        lines: list[str] = []
        for name, what in (
            ("requests", "Settled requests."),
            ("prompt_tokens", "Prompt tokens."),
            ("generated_tokens", "Generated tokens."),
            ("billed_tokens", "Billed tokens."),
            ("draft_tokens", "Tokens that draft models proposed."),
            ("accepted_tokens", "Proposed tokens that the target accepted."),
        ):
            lines += _family(f"tallygate_{name}_total", what, "counter", ((at, getattr(t, name)) for at, t in settled))
        for currency in ("usd", "cny"):
            costs = ((at, format_amount(getattr(t, f"cost_{currency}_pico"))) for at, t in settled)
            lines += _family(f"tallygate_cost_{currency}_total", f"Cost in {currency.upper()}.", "counter", costs)
        lines += _histogram(
            "tallygate_request_seconds", "From request to settlement.", settled, "buckets", "latency_ms"
        )
        lines += _histogram("tallygate_first_token_seconds", "To the first token.", settled, "ttft_buckets", "ttft_ms")
        refused = (((("code", code),), count) for code, count in self._refused.items())
        lines += _family("tallygate_refused_total", "Requests that were refused or failed.", "counter", refused)
        failures = (
            ((("deployment", deployment), ("kind", kind)), count)
            for (deployment, kind), count in self._upstream_failures.items()
        )
        lines += _family("tallygate_upstream_failures_total", "Failed attempts.", "counter", failures)
        decisions = (((("where", where),), count) for where, count in self._limit_decisions().items())
        lines += _family(
            "tallygate_limit_decisions_total", "Decisions on limits, by where the counters were.", "counter", decisions
        )
        drafts = [((("deployment", item.deployment), ("draft", item.draft_model)), item) for item in self.acceptance]
        rates = ((at, f"{item.rate:.4f}") for at, item in drafts)
        lines += _family("tallygate_acceptance_rate", "Accepted of drafted tokens, lately.", "gauge", rates)
        states = (((*at, ("state", state)), int(item.state == state)) for at, item in drafts for state in STATES)
        lines += _family("tallygate_acceptance_state", "1: the draft is in this state.", "gauge", states)
        for name, value in self._gauges().items():
            lines += _family(f"tallygate_{name}", name.replace("_", " ").capitalize() + ".", "gauge", [((), value)])
        return ("\n".join(lines) + "\n").encode()


def _family(name: str, what: str, kind: str, samples: Iterable[tuple[Labels, float | int | str]]) -> list[str]:
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}", *(f"{name}{_labels(at)} {n}" for at, n in samples)]


def _histogram(name: str, what: str, settled: list[tuple[Labels, _Totals]], buckets: str, total_ms: str) -> list[str]:
    lines = [f"# HELP {name} {what}", f"# TYPE {name} histogram"]
    for at, totals in settled:
        below = 0
        counts: list[int] = getattr(totals, buckets)
        for limit_ms, count in zip(LATENCY_BUCKETS_MS, counts, strict=False):
            below += count
            lines.append(f"{name}_bucket{_labels((*at, ('le', f'{limit_ms / 1000:g}')))} {below}")
        lines.append(f"{name}_bucket{_labels((*at, ('le', '+Inf')))} {sum(counts)}")
        lines.append(f"{name}_sum{_labels(at)} {getattr(totals, total_ms) / 1000:g}")
        lines.append(f"{name}_count{_labels(at)} {sum(counts)}")
    return lines


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels)
    return f"{{{pairs}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
