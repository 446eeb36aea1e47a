"""What the engine has done, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from backend.engine import Engine
from backend.sequence import Sequence as Running

_SECONDS = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class EngineMetrics:
    """One registry per server: request counts and times, and the engine's own totals when there is an engine."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "tallygate_backend_requests", "Requests accepted", ["kind", "streamed"], registry=self._registry
        )
        self._finished = Counter(
            "tallygate_backend_finished", "Choices that are over", ["reason"], registry=self._registry
        )
        self._latency = Histogram(
            "tallygate_backend_request_seconds", "Arrival to end", buckets=_SECONDS, registry=self._registry
        )
        self._first_token = Histogram(
            "tallygate_backend_first_token_seconds", "Arrival to first token", buckets=_SECONDS, registry=self._registry
        )

    def watch(self, engine: Engine) -> None:
        self._registry.register(_EngineCollector(engine))

    def started(self, *, chat: bool, streamed: bool) -> None:
        self._requests.labels("chat" if chat else "completion", str(streamed).lower()).inc()

    def finished(self, sequences: Sequence[Running]) -> None:
        now = time.monotonic()
        for sequence in sequences:
            self._finished.labels(sequence.finish_reason or "cancelled").inc()
            self._latency.observe(now - sequence.arrived_s)
            if sequence.first_token_s is not None:
                self._first_token.observe(sequence.first_token_s - sequence.arrived_s)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        totals, scheduler = self._engine.totals, self._engine.scheduler
        simple = {
            "rounds": totals.rounds,
            "target_passes": totals.target_passes,
            "generated_tokens": totals.generated_tokens,
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
            "draft_seconds": totals.draft_seconds,
            "target_seconds": totals.target_seconds,
            "busy_seconds": totals.busy_seconds,
        }
        for name, value in simple.items():
            yield CounterMetricFamily(f"tallygate_backend_{name}", name.replace("_", " "), value=value)
        gauges = {
            "slots": self._engine.target.cache.slots,
            "slots_free": scheduler.free_slots,
            "queue_depth": scheduler.waiting,
            "tokens_per_pass": totals.generated_tokens / max(1, totals.target_passes),
        }
        utilization = _device_utilization(self._engine.target.device)
        if utilization is not None:
            gauges["device_utilization"] = utilization
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"tallygate_backend_{name}", name.replace("_", " "), value=value)
        yield from self._by_draft()

    def _by_draft(self) -> Iterator[Metric]:
        totals = self._engine.totals
        for name, counts in (
            ("draft_tokens", totals.draft_tokens),
            ("accepted_tokens", totals.accepted_tokens),
            ("low_acceptance_requests", totals.low_acceptance),
        ):
            yield _labelled(f"tallygate_backend_{name}", ["draft"], (((d,), n) for d, n in dict(counts).items()))
        for name, positions in (("tested_at", totals.tested_at), ("accepted_at", totals.accepted_at)):
            rows = (((draft, str(at)), n) for (draft, at), n in dict(positions).items())
            yield _labelled(f"tallygate_backend_{name}", ["draft", "position"], rows)


def _device_utilization(device: torch.device) -> float | None:
    """Share of the last sample period in which the GPU computed, by NVML; None on a CPU or without NVML."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # NVML or its Python binding is missing: the other metrics matter more
        return None


def _labelled(name: str, labels: list[str], rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    family = CounterMetricFamily(name, name.replace("_", " "), labels=labels)
    for values, number in rows:
        family.add_metric(list(values), number)
    return family
