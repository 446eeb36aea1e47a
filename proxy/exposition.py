"""What the processes of a host have counted, in the text exposition format of Prometheus, version 0.0.4. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from ledger.acceptance import Acceptance, State
from ledger.money import format_amount
from proxy.metrics import LATENCY_BUCKETS_MS, Place, Snapshot, Totals, added

STATES: tuple[State, ...] = get_args(State)
ROLES = ("gateway", "poster", "supervisor")

Labels = tuple[tuple[str, str], ...]


def text_of(
    counted: Sequence[Snapshot], running: Mapping[str, Snapshot], acceptance: Sequence[Acceptance] = ()
) -> bytes:
    """counted: of every process there was, each once. running: by name (`gateway-0`), those there are. acceptance: how
    drafts do, as the ledger last had it, which is the same for all."""
    total = added(counted)
    settled = [(_place(place), totals) for place, totals in total.settled]
    lines: list[str] = []
    for name, what in (
        ("requests", "Settled requests."),
        ("prompt_tokens", "Prompt tokens."),
        ("generated_tokens", "Generated tokens."),
        ("billed_tokens", "Billed tokens."),
        ("draft_tokens", "Tokens that draft models proposed."),
        ("accepted_tokens", "Proposed tokens that the target accepted."),
    ):
        lines += _family(f"{name}_total", what, "counter", ((at, getattr(t, name)) for at, t in settled))
    for currency in ("usd", "cny"):
        costs = ((at, format_amount(getattr(t, f"cost_{currency}_pico"))) for at, t in settled)
        lines += _family(f"cost_{currency}_total", f"Cost in {currency.upper()}.", "counter", costs)
    lines += _histogram("request_seconds", "From request to settlement.", settled, "buckets", "latency_ms")
    lines += _histogram("first_token_seconds", "To the first token.", settled, "ttft_buckets", "ttft_ms")
    lines += _by("refused_total", "Requests that were refused or failed.", "code", total.refused)
    failures = (((("deployment", place), ("kind", kind)), n) for (place, kind), n in total.upstream_failures)
    lines += _family("upstream_failures_total", "Failed attempts.", "counter", failures)
    decided = "Decisions on limits, by where the counters were."
    lines += _by("limit_decisions_total", decided, "where", total.limit_decisions)
    lines += _by("crashes_total", "Children that ended with an error or a signal.", "role", total.crashes)
    lines += _by("webhook_attempts_total", "Attempts to deliver an event.", "outcome", total.webhook_attempts)
    return ("\n".join([*lines, *_acceptance(acceptance), *_gauges(running)]) + "\n").encode()


def _acceptance(acceptance: Sequence[Acceptance]) -> list[str]:
    drafts = [((("deployment", item.deployment), ("draft", item.draft_model)), item) for item in acceptance]
    rates = ((at, f"{item.rate:.4f}") for at, item in drafts)
    states = (((*at, ("state", state)), int(item.state == state)) for at, item in drafts for state in STATES)
    return [
        *_family("acceptance_rate", "Accepted of drafted tokens, lately.", "gauge", rates),
        *_family("acceptance_state", "1: the draft is in this state.", "gauge", states),
    ]


def _gauges(running: Mapping[str, Snapshot]) -> list[str]:
    roles = [name.partition("-")[0] for name in running]
    counts = (((("role", role),), roles.count(role)) for role in ROLES)
    lines = _family("processes", "Processes that run on this host.", "gauge", counts)
    names = dict.fromkeys(name for snapshot in running.values() for name in snapshot.gauges)
    for name in names:
        what = name.replace("_", " ").capitalize() + "."
        samples = (
            ((("process", process),), snapshot.gauges[name])
            for process, snapshot in running.items()
            if name in snapshot.gauges
        )
        lines += _family(name, what, "gauge", samples)
    return lines


def _place(place: Place) -> Labels:
    return tuple(zip(("model", "deployment", "status"), place, strict=True))


def _by(name: str, what: str, label: str, counts: Mapping[str, int]) -> list[str]:
    return _family(name, what, "counter", ((((label, value),), count) for value, count in counts.items()))


def _family(name: str, what: str, kind: str, samples: Iterable[tuple[Labels, float | int | str]]) -> list[str]:
    name = f"tallygate_{name}"
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}", *(f"{name}{_labels(at)} {n}" for at, n in samples)]


def _histogram(name: str, what: str, settled: list[tuple[Labels, Totals]], buckets: str, total_ms: str) -> list[str]:
    lines = _family(name, what, "histogram", ())
    name = f"tallygate_{name}"
    for at, totals in settled:
        below = 0
        counts: list[int] = getattr(totals, buckets)
        for limit_ms, count in zip(LATENCY_BUCKETS_MS, counts, strict=False):
            below += count
            lines.append(f"{name}_bucket{_labels((*at, ('le', f'{limit_ms / 1000:g}')))} {below}")
        lines.append(f"{name}_bucket{_labels((*at, ('le', '+Inf')))} {sum(counts)}")
        seconds, ms = divmod(getattr(totals, total_ms), 1000)
        lines.append(f"{name}_sum{_labels(at)} {seconds}.{ms:03d}")
        lines.append(f"{name}_count{_labels(at)} {sum(counts)}")
    return lines


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels)
    return f"{{{pairs}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
