"""What a process counts, for Prometheus. The hot path only adds to plain numbers of its own process; that other
processes see them (`host_metrics`) and what becomes of them as text (`exposition`) is done when somebody asks.

Not with prometheus-client's multi-process mode: each of its samples is packed into a mapped file, 47 µs for what a
request adds here in 1 µs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from ledger.acceptance import Acceptance
from ledger.gate import Outcome, Receipt

LATENCY_BUCKETS_MS = (5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000)

Place = tuple[str, str, str]
"""Model, deployment, status."""


def _no_latencies() -> list[int]:
    return [0] * (len(LATENCY_BUCKETS_MS) + 1)


class Totals(msgspec.Struct, kw_only=True):
    """Sums of one place."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    billed_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    cost_usd_pico: int = 0
    cost_cny_pico: int = 0
    latency_ms: int = 0
    ttft_ms: int = 0
    buckets: list[int] = msgspec.field(default_factory=_no_latencies)
    ttft_buckets: list[int] = msgspec.field(default_factory=_no_latencies)

    def __post_init__(self) -> None:
        if not len(self.buckets) == len(self.ttft_buckets) == len(LATENCY_BUCKETS_MS) + 1:
            raise ValueError("of a version with other buckets")

    def add(self, other: Totals) -> None:
        for name in self.__struct_fields__:
            mine, more = getattr(self, name), getattr(other, name)
            summed = [a + b for a, b in zip(mine, more, strict=True)] if isinstance(mine, list) else mine + more
            setattr(self, name, summed)


class Snapshot(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one process has counted, and its gauges. What a process does not count is empty."""

    settled: list[tuple[Place, Totals]] = []
    refused: dict[str, int] = {}
    upstream_failures: list[tuple[tuple[str, str], int]] = []
    """By deployment and kind."""
    limit_decisions: dict[str, int] = {}
    """By where the counters were."""
    crashes: dict[str, int] = {}
    """By role: children that ended by themselves, with an error or a signal."""
    webhook_attempts: dict[str, int] = {}
    """By what became of them."""
    gauges: dict[str, float] = {}
    """What is so while the process runs; never summed."""


def added(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The counters of all together, without their gauges."""
    settled: defaultdict[Place, Totals] = defaultdict(Totals)
    failures: Counter[tuple[str, str]] = Counter()
    for snapshot in snapshots:
        for place, totals in snapshot.settled:
            settled[place].add(totals)
        failures.update(dict(snapshot.upstream_failures))
    return Snapshot(
        settled=list(settled.items()),
        refused=_sums(snapshot.refused for snapshot in snapshots),
        upstream_failures=list(failures.items()),
        limit_decisions=_sums(snapshot.limit_decisions for snapshot in snapshots),
        crashes=_sums(snapshot.crashes for snapshot in snapshots),
        webhook_attempts=_sums(snapshot.webhook_attempts for snapshot in snapshots),
    )


class Metrics:
    """One worker's numbers. `gauges` (name → value) and `limit_decisions` (where → how many) are asked for when a
    snapshot is taken."""

    def __init__(
        self, gauges: Callable[[], Mapping[str, float]] = dict, limit_decisions: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        self._settled: dict[Place, Totals] = {}
        self._refused: defaultdict[str, int] = defaultdict(int)
        self._upstream_failures: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._fresh_failures: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._gauges = gauges
        self.acceptance: Sequence[Acceptance] = ()
        """How drafts do, as the ledger last had it."""
        self._limit_decisions = limit_decisions
        self._decided_before: dict[str, int] = {}

    def settled(self, model: str, outcome: Outcome, receipt: Receipt) -> None:
        key = (model, outcome.deployment, outcome.status)
        totals = self._settled.get(key)
        if totals is None:
            totals = self._settled[key] = Totals()
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

    def go_on_from(self, before: Snapshot) -> None:
        """Counters continue where those of a process that has ended stopped, so that they never go back."""
        for place, totals in before.settled:
            self._settled.setdefault(place, Totals()).add(totals)
        for code, count in before.refused.items():
            self._refused[code] += count
        for failed, count in before.upstream_failures:
            self._upstream_failures[failed] += count
        self._decided_before = _sums([self._decided_before, before.limit_decisions])

    def snapshot(self) -> Snapshot:
        """Shares what is counted with: encode it before anything else is."""
        return Snapshot(
            settled=list(self._settled.items()),
            refused=self._refused,
            upstream_failures=list(self._upstream_failures.items()),
            limit_decisions=_sums([self._decided_before, self._limit_decisions()]),
            gauges=dict(self._gauges()),
        )


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
