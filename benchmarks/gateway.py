"""The gateway with everything on, beside the upstream itself and the barest forward on the same stack, in one run.

python -m benchmarks.gateway [--quick] [--json FILE] [--only plain,open,streams,bodies,quiet,work]
                             [--production] [--peers] [--one-core]

One gateway worker on one core; load, upstream and poster on the other (`--one-core`: also the poster on the first).
`--production` adds PostgreSQL and Valkey, `--peers` LiteLLM and Portkey. Medians of three rounds, in which the subjects
take turns. Every ledger that a run made must pass `verify`, or the run fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import uvloop
from rich.console import Console

from benchmarks import peers
from benchmarks.journal import sync_time_us
from benchmarks.load import Result, closed_loop, open_loop
from benchmarks.processes import GATEWAY_CORE, LOAD_CORE, pin_here
from benchmarks.quiet import quiet_streams
from benchmarks.report import show
from benchmarks.subjects import MODEL, Subject, floor, tallygate, upstream
from benchmarks.upstream import QUIET_MODEL
from benchmarks.work import work_per_request

GROUPS = ("plain", "open", "streams", "bodies", "quiet", "work")
CONNECTIONS = (1, 8, 32, 128)
RATES = (200, 500, 1_000)
BODIES = (("1 kB body", 1_000), ("100 kB body", 100_000), ("5 MB body", 5_000_000))
BODY_CONNECTIONS = 2
QUIET_STREAMS = 1_000
ONE_CORE = "TallyGate, poster on the same core"
PROMPT = "Write one sentence about a small red bicycle for our shop page."


def body(*, model: str = MODEL, stream: bool = False, size: int = 0) -> bytes:
    content = PROMPT if not size else "x" * size
    request: dict[str, Any] = {"model": model, "max_tokens": 256, "messages": [{"role": "user", "content": content}]}
    if stream:
        request["stream"] = True
    return msgspec.json.encode(request)


class Run:
    """One pass over all subjects; `rounds` are interleaved so that a slow minute of the machine hits everyone."""

    def __init__(self, groups: Sequence[str], seconds: float, rounds: int, *, quick: bool) -> None:
        self.groups = groups
        self.seconds = seconds
        self.rounds = rounds
        self.quick = quick
        self.cells: dict[str, dict[str, list[Result]]] = {}

    def measure(self, subjects: list[Subject]) -> None:
        steps: dict[str, Callable[[Subject], None]] = {
            "plain": self._plain,
            "streams": self._streams,
            "open": self._open,
            "bodies": self._bodies,
        }
        for _ in range(self.rounds):
            for group in self.groups:
                for subject in subjects if group in steps else ():
                    steps[group](subject)

    def _plain(self, subject: Subject) -> None:
        for connections in CONNECTIONS[::2] if self.quick or subject.is_peer else CONNECTIONS:
            self._closed(subject, f"{connections} connections", connections, body())

    def _streams(self, subject: Subject) -> None:
        for streams in () if subject.on_one_core else (1, 8):
            self._closed(subject, f"{streams} streams", streams, body(stream=True))

    def _open(self, subject: Subject) -> None:
        if not (subject.is_peer or subject.on_one_core):
            for rate in RATES[1:2] if self.quick else RATES:
                run = open_loop(subject.port, subject.request(body()), rate, self.seconds)
                self._add(subject, f"open loop {rate}/s", uvloop.run(run))

    def _bodies(self, subject: Subject) -> None:
        for label, size in () if subject.is_peer or subject.on_one_core else BODIES[1:] if self.quick else BODIES:
            before = subject.process.memory_mb()
            subject.process.forget_peak()
            self._closed(subject, label, BODY_CONNECTIONS, body(size=size))
            self.cells[label][subject.name][-1].memory_added_mb = round(subject.process.peak_memory_mb() - before, 1)

    def _closed(self, subject: Subject, label: str, connections: int, payload: bytes) -> None:
        before_s = 0.0

        def warm() -> None:
            nonlocal before_s
            before_s = subject.process.cpu_s()

        run = closed_loop(subject.port, subject.request(payload), connections, self.seconds, warm=warm)
        result = uvloop.run(run)
        result.cpu_us = round((subject.process.cpu_s() - before_s) * 1e6 / max(1, result.requests), 1)
        self._add(subject, label, result)

    def _add(self, subject: Subject, label: str, result: Result) -> None:
        self.cells.setdefault(label, {}).setdefault(subject.name, []).append(result)
        if result.errors:
            print(f"{subject.name}, {label}: {result.errors} errors of {result.requests}", file=sys.stderr)


def summarise(results: list[Result]) -> dict[str, float]:
    """Medians over the rounds, and the spread of the rate."""
    names = [name for name in Result.__struct_fields__ if name != "seconds"]
    row = {name: median(getattr(result, name) for result in results) for name in names}
    rates = [result.per_second for result in results]
    tails = [result.p99_ms for result in results]
    return row | {"rate_low": min(rates), "rate_high": max(rates), "p99_low_ms": min(tails), "p99_high_ms": max(tails)}


def prove(subject: Subject) -> None:
    """Wait until the poster has caught up, then let `verify` prove the ledger of this run."""
    assert subject.commands is not None
    deadline = time.monotonic() + 120
    while (report := subject.commands.json("verify"))["unposted"] and time.monotonic() < deadline:
        time.sleep(0.5)
    subject.facts["verified"] = report["ok"]
    if not report["ok"] or report["unposted"]:
        raise SystemExit(f"{subject.name}: the ledger does not prove: {json.dumps(report)[:2000]}")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    pin_here(LOAD_CORE)
    gc.freeze()
    gc.disable()  # a collection here would look like a stall there
    seconds, rounds = (1.5, 1) if arguments.quick else (arguments.seconds, arguments.rounds)
    groups = [name for name in arguments.only.split(",") if name]
    if unknown := set(groups) - set(GROUPS):
        raise SystemExit(f"--only {','.join(unknown)}: there are {', '.join(GROUPS)}")
    run = Run(groups, seconds, rounds, quick=arguments.quick)
    report: dict[str, Any] = {
        "machine": {"cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()},
        "rounds": rounds,
        "seconds": seconds,
        "quiet": {},
        "work": {},
        "absent": {},
    }
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tallygate-bench-")))
        subjects = _subjects(stack, folder, arguments, report["absent"])
        run.measure(subjects)
        for subject in subjects:
            if subject.commands is not None:
                if "quiet" in groups and subject.counters == "memory" and not subject.on_one_core:
                    report["quiet"][subject.name] = _quiet(subject)
                if "work" in groups and not subject.on_one_core:
                    report["work"][subject.name] = _work(subject, folder)
                prove(subject)
        report["fdatasync_us"] = sync_time_us(folder, 4096)
        report["facts"] = {subject.name: subject.facts for subject in subjects if subject.facts}
    report["cells"] = {label: {who: summarise(r) for who, r in named.items()} for label, named in run.cells.items()}
    return report


def _subjects(stack: ExitStack, folder: Path, arguments: argparse.Namespace, absent: dict[str, str]) -> list[Subject]:
    """All that take part, started; `absent` is told who does not, and why."""
    direct = stack.enter_context(upstream(folder))
    subjects = [direct, stack.enter_context(floor(folder, direct.port))]
    subjects.append(stack.enter_context(tallygate(folder / "a", direct.port, name="TallyGate")))
    if arguments.production:
        subjects.append(stack.enter_context(_production(stack, folder / "b", direct.port)))
    if arguments.one_core:
        together = tallygate(folder / "c", direct.port, name=ONE_CORE, poster_core=GATEWAY_CORE)
        subjects.append(stack.enter_context(together))
    for start in (peers.litellm, peers.portkey) if arguments.peers else ():
        try:
            subjects.append(stack.enter_context(start(folder, direct.port)))
        except (peers.NoPeer, RuntimeError) as error:
            absent[start.__name__] = str(error)
    return subjects


def _quiet(subject: Subject) -> Any:
    request = subject.request(body(model=QUIET_MODEL, stream=True))
    return msgspec.to_builtins(uvloop.run(quiet_streams(subject.port, request, QUIET_STREAMS, subject.process)))


def _work(subject: Subject, folder: Path) -> dict[str, float]:
    pid = subject.process.process.pid
    return work_per_request(pid, subject.port, subject.request(body()), subject.neighbours, folder)


def _production(stack: ExitStack, folder: Path, upstream_port: int) -> AbstractContextManager[Subject]:
    from tests.services import Postgres, Valkey, running

    postgres, valkey = stack.enter_context(running(Postgres())), stack.enter_context(running(Valkey()))
    database = postgres.url(postgres.create_database())
    name = "with PostgreSQL, Valkey"
    return tallygate(folder, upstream_port, name=name, database=database, counters=valkey.url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, fewer cells")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups of cells, with commas")
    parser.add_argument("--seconds", type=float, default=4.0, help="per cell and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--production", action="store_true", help="also with PostgreSQL and Valkey")
    parser.add_argument("--peers", action="store_true", help="also LiteLLM and Portkey")
    parser.add_argument("--one-core", action="store_true", help="also with the poster on the gateway's core")
    arguments = parser.parse_args()
    report = run(arguments)
    show(Console(width=None if sys.stdout.isatty() else 120), report)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
