"""Kill or freeze one part of a fleet under load, and say what that cost: in requests, in seconds, in money, in rows.

`python -m tests.fleet.outages [--seconds 12]` prints the table of docs/operations.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.fleet.hosts import Fleet, fleet_of
from tests.fleet.load import Outcome, Tally, load
from tests.services import Postgres, Valkey, running
from tests.upstream.process import FakeUpstream

CLIENTS = 24
FREEZE_S = 2.0
AWAY_S = 3.0
"""How long a killed server stays away before somebody starts it again."""


@dataclass
class Report:
    """What one fault cost. Seconds are from the fault (for a server that was away or frozen: from its return) to the
    last request that failed for it."""

    fault: str
    requests: int
    failed: int
    slowest_s: float
    recovered_s: float
    lost_rows: int
    double_rows: int
    overspent: str
    codes: dict[str, int]

    def row(self) -> str:
        return (
            f"| {self.fault} | {self.requests} | {self.failed} | {self.slowest_s:.2f} | {self.recovered_s:.1f} "
            f"| {self.overspent} | {self.lost_rows} / {self.double_rows} | {self.codes or ''} |"
        )


HEAD = (
    "| fault | requests | failed | slowest answer, s | recovered after, s | overspent | rows lost / double | how |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Trial:
    """One fleet whose PostgreSQL and Valkey may be hurt."""

    def __init__(self, fleet: Fleet, postgres: Postgres, valkey: Valkey, database: str) -> None:
        self.fleet, self.postgres, self.valkey, self.database = fleet, postgres, valkey, database
        self.key = fleet.new_key({"metric": "requests", "window": "hour", "limit": 1_000_000}, money="100000")

    def faults(self) -> dict[str, Callable[[], Awaitable[float]]]:
        """By name; each returns when its cause is over: the monotonic time of that."""
        return {
            "kill -9 of a worker": self._kill_worker,
            "kill -9 of a poster": self._kill_poster,
            "kill -9 of Valkey, back after 3 s": lambda: self._kill(self.valkey),
            "kill -9 of PostgreSQL, back after 3 s": lambda: self._kill(self.postgres),
            "2 s freeze of a worker": lambda: self._freeze(self._worker()),
            "2 s freeze of Valkey": lambda: self._freeze(psutil.Process(self.valkey.server.pid)),
            "2 s freeze of PostgreSQL": self._freeze_postgres,
        }

    async def run(self, name: str, seconds: float) -> Report:
        tally, stop = Tally(), asyncio.Event()
        asking = asyncio.create_task(
            load(self.fleet.ports, [self.key], CLIENTS, stop.is_set, pause_s=0.05, tally=tally)
        )
        await asyncio.sleep(2.0)
        began = time.monotonic()
        over = await self.faults()[name]()
        await asyncio.sleep(seconds)
        stop.set()
        await asyncio.wait_for(asking, 60)
        failures = [outcome for outcome in tally.failures() if outcome.at + outcome.took_s >= began]
        last = max((outcome.at + outcome.took_s for outcome in failures), default=over)
        lost, double, overspent = await self.books(tally)
        return Report(
            fault=name,
            requests=len(tally.outcomes),
            failed=len(failures),
            slowest_s=max(outcome.took_s for outcome in tally.outcomes),
            recovered_s=max(0.0, last - over),
            lost_rows=lost,
            double_rows=double,
            overspent=overspent,
            codes=_codes(failures),
        )

    async def books(self, tally: Tally) -> tuple[int, int, str]:
        """(answers without a usage row, rows that are there twice, what `verify` says was overspent)."""
        answered = [outcome.request_id for outcome in tally.outcomes if outcome.status == 200]
        rows: Counter[str] = Counter()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            found = await asyncio.to_thread(self.postgres.sql, "SELECT request_id FROM usage", self.database)
            rows = Counter(found.split())
            if all(request_id in rows for request_id in answered):
                break
            await asyncio.sleep(0.5)
        lost = sum(request_id not in rows for request_id in answered)
        over = await asyncio.to_thread(
            self.postgres.sql,
            "SELECT coalesce(sum(greatest(debits_pico + leased_pico - credits_pico, 0)), 0) FROM accounts",
            self.database,
        )
        return lost, sum(count > 1 for count in rows.values()), over.strip()

    def _worker(self) -> psutil.Process:
        return self.fleet.hosts[0].roles("gateway")[0]

    async def _kill_worker(self) -> float:
        os.kill(self._worker().pid, signal.SIGKILL)
        return time.monotonic()

    async def _kill_poster(self) -> float:
        os.kill(self.fleet.hosts[0].roles("poster")[0].pid, signal.SIGKILL)
        return time.monotonic()

    async def _kill(self, server: Postgres | Valkey) -> float:
        server.kill()
        await asyncio.sleep(AWAY_S)
        server.start(wait=False)  # from this thread: a server dies with the thread that started it
        await asyncio.to_thread(server.server.wait_ready)
        return time.monotonic()

    async def _freeze(self, process: psutil.Process) -> float:
        process.suspend()
        await asyncio.sleep(FREEZE_S)
        process.resume()
        return time.monotonic()

    async def _freeze_postgres(self) -> float:
        self.postgres.freeze()
        await asyncio.sleep(FREEZE_S)
        self.postgres.thaw()
        return time.monotonic()


def _codes(failures: list[Outcome]) -> dict[str, int]:
    return dict(Counter(f"{o.status} {o.code}" if o.status else o.code.partition(":")[0] for o in failures))


@contextlib.contextmanager
def trial(folder: Path, workers: int = 2, **changes: Any) -> Iterator[Trial]:
    """Two hosts, and servers of their own."""
    with contextlib.ExitStack() as stack:
        postgres = stack.enter_context(running(Postgres()))
        valkey = stack.enter_context(running(Valkey()))
        upstream = stack.enter_context(FakeUpstream())
        name = postgres.create_database()
        server = {"workers": workers}
        fleet = stack.enter_context(
            fleet_of(folder, 2, postgres.url(name), valkey.url, upstream.base_url, server=server, **changes)
        )
        yield Trial(fleet, postgres, valkey, name)


async def report(made: Trial, seconds: float, only: str = "") -> list[Report]:
    """Every fault, one after the other, on the same fleet."""
    reports = []
    for name in made.faults():
        if only in name:
            reports.append(await made.run(name, seconds))
            print(reports[-1].row(), flush=True)
    return reports


def proofs(made: Trial) -> list[str]:
    """What `verify` finds wrong, host by host."""
    wrong = []
    for host in made.fleet.hosts:
        proof = made.fleet.verify(host)
        wrong += [str(check) for check in proof["checks"] if not check["ok"]]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fleet.outages", description=__doc__)
    parser.add_argument("--seconds", type=float, default=12, help="of load after each fault")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, trial(Path(folder)) as made:
        print(HEAD, flush=True)
        asyncio.run(report(made, arguments.seconds, arguments.only))
        wrong = proofs(made)
        print("verify:", wrong or "passes on both hosts")
        if wrong:
            print(*(host.logs() for host in made.fleet.hosts), sep="\n", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()
