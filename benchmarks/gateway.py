"""The gateway with everything on, beside the upstream itself and the barest forward on the same stack, in one run.

python -m benchmarks.gateway [--quick] [--json FILE] [--production] [--one-core]

One gateway worker on one core; load, upstream and poster on the other (`--one-core`: the poster on the gateway's).
`--production` adds PostgreSQL and Valkey. Every ledger that a run made must pass `verify`, or the run fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.journal import sync_time_us
from benchmarks.load import Result, closed_loop, open_loop, request_bytes
from benchmarks.processes import GATEWAY_CORE, LOAD_CORE, pin_here
from benchmarks.subjects import MODEL, Subject, floor, tallygate, upstream

CONNECTIONS = (1, 8, 32, 128)
RATES = (200, 500, 1_000)
PROMPT = "Write one sentence about a small red bicycle for our shop page."


def body(*, stream: bool = False, size: int = 0) -> bytes:
    content = PROMPT if not size else "x" * size
    request: dict[str, Any] = {"model": MODEL, "max_tokens": 256, "messages": [{"role": "user", "content": content}]}
    if stream:
        request["stream"] = True
    return msgspec.json.encode(request)


class Run:
    """One pass over all subjects; `rounds` are interleaved so that a slow minute of the machine hits everyone."""

    def __init__(self, seconds: float, rounds: int) -> None:
        self.seconds = seconds
        self.rounds = rounds
        self.cells: dict[str, dict[str, list[Result]]] = {}

    def measure(self, subjects: list[Subject], quick: bool) -> None:
        for _ in range(self.rounds):
            for subject in subjects:
                for connections in CONNECTIONS[::2] if quick else CONNECTIONS:
                    self._closed(subject, f"{connections} connections", connections, body())
                self._closed(subject, "8 streams", 8, body(stream=True))
                for rate in RATES[1:2] if quick else RATES:
                    result = uvloop.run(open_loop(subject.port, self._request(subject, body()), rate, self.seconds))
                    self._add(subject, f"open loop {rate}/s", result)
                for size, label in ((100_000, "100 kB body"), (5_000_000, "5 MB body")):
                    self._closed(subject, label, 2, body(size=size))

    def _closed(self, subject: Subject, label: str, connections: int, payload: bytes) -> None:
        request = self._request(subject, payload)
        self._add(subject, label, uvloop.run(closed_loop(subject.port, request, connections, self.seconds)))

    def _request(self, subject: Subject, payload: bytes) -> bytes:
        return request_bytes(subject.port, subject.key, payload)

    def _add(self, subject: Subject, label: str, result: Result) -> None:
        self.cells.setdefault(label, {}).setdefault(subject.name, []).append(result)
        if result.errors:
            print(f"{subject.name}, {label}: {result.errors} errors of {result.requests}", file=sys.stderr)


def summarise(results: list[Result]) -> dict[str, float]:
    """Medians over the rounds, and the spread of the rate."""
    names = [name for name in Result.__struct_fields__ if name != "seconds"]
    row = {name: median(getattr(result, name) for result in results) for name in names}
    rates = [result.per_second for result in results]
    return row | {"rate_low": min(rates), "rate_high": max(rates)}


def show(console: Console, report: dict[str, Any]) -> None:
    for label, subjects in report["cells"].items():
        table = Table(title=label, title_justify="left")
        for column in ("", "req/s", "spread", "p50 ms", "p99 ms", "first byte p50", "chunks/s", "× floor", "errors"):
            table.add_column(column, justify="left" if not column else "right")
        base = subjects.get("floor", {}).get("per_second", 0)
        for name, row in subjects.items():
            table.add_row(
                name,
                f"{row['per_second']:,.0f}",
                f"{row['rate_low']:,.0f}–{row['rate_high']:,.0f}",
                f"{row['p50_ms']:.2f}",
                f"{row['p99_ms']:.2f}",
                f"{row['first_byte_p50_ms']:.2f}",
                f"{row['chunks_per_second']:,.0f}" if "stream" in label else "",
                f"{row['per_second'] / base:.2f}" if base else "",
                f"{row['errors']:.0f}",
            )
        console.print(table)
    for name, facts in report["facts"].items():
        console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    console.print(f"fdatasync of this disk after 4 kB: {report['fdatasync_us']:.0f} us (median)")


def prove(subject: Subject) -> None:
    """Wait until the poster has caught up, then let `verify` prove the ledger of this run."""
    assert subject.commands is not None
    deadline = time.monotonic() + 120
    while (report := subject.commands.json("verify"))["unposted"] and time.monotonic() < deadline:
        time.sleep(0.5)
    subject.facts["verified"] = report["ok"]
    subject.facts["peak_memory_mb"] = round(subject.process.peak_memory_mb())
    if not report["ok"] or report["unposted"]:
        raise SystemExit(f"{subject.name}: the ledger does not prove: {json.dumps(report)[:2000]}")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    pin_here(LOAD_CORE)
    seconds, rounds = (1.5, 1) if arguments.quick else (4.0, 3)
    run = Run(seconds, rounds)
    poster_core = GATEWAY_CORE if arguments.one_core else LOAD_CORE
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tallygate-bench-")))
        direct = stack.enter_context(upstream(folder))
        subjects = [direct, stack.enter_context(floor(folder, direct.port))]
        metered = [stack.enter_context(tallygate(folder / "a", direct.port, name="TallyGate", poster_core=poster_core))]
        if arguments.production:
            metered.append(stack.enter_context(_production(stack, folder / "b", direct.port, poster_core)))
        run.measure(subjects + metered, arguments.quick)
        for subject in metered:
            prove(subject)
        cells = {label: {name: summarise(r) for name, r in named.items()} for label, named in run.cells.items()}
        facts = {subject.name: subject.facts for subject in metered}
        return {
            "cells": cells,
            "facts": facts,
            "fdatasync_us": sync_time_us(folder, 4096),
            "rounds": rounds,
            "seconds": seconds,
        }


def _production(stack: ExitStack, folder: Path, upstream_port: int, poster_core: int) -> Any:
    from tests.services import Postgres, Valkey, running

    postgres, valkey = stack.enter_context(running(Postgres())), stack.enter_context(running(Valkey()))
    database = postgres.url(postgres.create_database())
    return tallygate(
        folder,
        upstream_port,
        name="with PostgreSQL, Valkey",
        database=database,
        counters=valkey.url,
        poster_core=poster_core,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round, fewer cells")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--production", action="store_true", help="also with PostgreSQL and Valkey")
    parser.add_argument("--one-core", action="store_true", help="the poster shares the gateway's core")
    arguments = parser.parse_args()
    report = run(arguments)
    show(Console(), report)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
