"""What a place says of itself in its Prometheus metrics: how much it drafted, and how busy its device is. Pure.

Sources: our backend (`tallygate_backend_*`), vLLM (docs/usage/metrics.md: `vllm:spec_decode_num_*_total`), SGLang
(`sglang:spec_accept_rate`, `sglang:spec_accept_length`, `sglang:generation_tokens_total`), NVIDIA's DCGM exporter.
"""

from __future__ import annotations

import math
from collections import defaultdict

import msgspec
from prometheus_client.parser import text_string_to_metric_families


class Reading(msgspec.Struct, frozen=True):
    """Counters since the place's start, and gauges of now; None: it does not say."""

    draft_tokens: float | None = None
    accepted_tokens: float | None = None
    generated_tokens: float | None = None
    accept_rate: float | None = None
    accept_length: float | None = None
    """Tokens per target pass, the target's own one included."""
    busy_seconds: float | None = None
    utilisation: float | None = None


class Sample(msgspec.Struct, frozen=True):
    """What happened between two readings."""

    draft_tokens: int
    accepted_tokens: int
    utilisation: float | None


MAX_COUNT = 2.0**53
"""What a counter may hold: beyond it a float counts no longer one by one."""


def read_metrics(text: str) -> Reading:
    """Raises ValueError for what is no exposition, and for a counter that is no count. A gauge that is no number says
    nothing: places give NaN for a mean of nothing."""
    sums: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] += sample.value
                counts[sample.name] += 1
    except (IndexError, KeyError, TypeError) as error:  # the parser's own, on garbage
        raise ValueError(f"no Prometheus exposition: {error}") from error

    def total(name: str) -> float | None:
        if name not in counts:
            return None
        if not 0 <= sums[name] <= MAX_COUNT:
            raise ValueError(f"{name} is {sums[name]}: no count")
        return sums[name]

    def mean(name: str) -> float | None:
        found = sums[name] / counts[name] if name in counts else math.nan
        return found if math.isfinite(found) else None

    percent = mean("DCGM_FI_DEV_GPU_UTIL")
    return Reading(
        draft_tokens=total("vllm:spec_decode_num_draft_tokens_total"),
        accepted_tokens=total("vllm:spec_decode_num_accepted_tokens_total"),
        generated_tokens=total("sglang:generation_tokens_total"),
        accept_rate=mean("sglang:spec_accept_rate"),
        accept_length=mean("sglang:spec_accept_length"),
        busy_seconds=total("tallygate_backend_busy_seconds_total"),
        utilisation=mean("tallygate_backend_device_utilization") if percent is None else percent / 100,
    )


def between(before: Reading, after: Reading, seconds: float) -> Sample:
    """The difference of two readings so far apart; a counter that fell was set back by a restart. Raises ValueError
    for what cannot be."""
    drafted, accepted = (
        round(_grown(getattr(before, name), getattr(after, name))) for name in ("draft_tokens", "accepted_tokens")
    )
    if after.draft_tokens is None:
        drafted, accepted = _by_rate(after, _grown(before.generated_tokens, after.generated_tokens))
    utilisation = after.utilisation
    if utilisation is None and after.busy_seconds is not None:
        utilisation = min(1.0, _grown(before.busy_seconds, after.busy_seconds) / seconds)
    if drafted > MAX_COUNT:
        raise ValueError(f"{drafted:.3g} tokens drafted: no count")
    return Sample(drafted, min(accepted, drafted), None if utilisation is None else min(1.0, max(0.0, utilisation)))


def _grown(before: float | None, after: float | None) -> float:
    if after is None:
        return 0.0
    return after - before if before is not None and after >= before else after


def _by_rate(reading: Reading, generated: float) -> tuple[int, int]:
    """SGLang tells rates: each pass gave `accept_length` tokens, all but one of them accepted."""
    rate, length = reading.accept_rate, reading.accept_length
    if rate is None or rate <= 0 or length is None or length < 1:
        return 0, 0
    accepted = generated * (length - 1) / length
    return round(accepted / rate), round(accepted)
