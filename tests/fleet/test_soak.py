"""A fleet at 300 requests a second with hang-ups and restarts: nothing grows, nothing is lost, the proof passes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.fleet.hosts import Host
from tests.fleet.load import Client, Outcome, Tally
from tests.fleet.outages import CLIENTS, HEAD, Trial, proofs, report, trial

SECONDS = float(os.environ.get("SECONDS", "0"))
long_only = pytest.mark.skipif(not SECONDS, reason="long: make soak SECONDS=1200")
RATE = 300
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8}
STREAM = BODY | {"stream": True, "x_fault": {"chunk_delay_ms": 5}}
HANG_UPS = 0.05
PAUSED_S = 4.0


@dataclass
class Sample:
    rss_mb: float
    fds: int


class Gauge:
    """Memory and file descriptors of the processes of a host that is never restarted."""

    def __init__(self, host: Host) -> None:
        self._processes = {
            f"{role} {n}": process for role in ("gateway", "poster") for n, process in enumerate(host.roles(role))
        }
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)
        self.pauses: list[tuple[float, float]] = []
        """When this process itself stood still: what was under way then says nothing about the servers."""
        self._looked: float | None = None

    def failures(self, tally: Tally) -> list[Outcome]:
        """Those that did not meet a pause of ours."""
        return [
            failed
            for failed in tally.failures()
            if all(failed.at > end or failed.at + failed.took_s < start for start, end in self.pauses)
        ]

    def look(self) -> None:
        now = time.monotonic()
        if self._looked is not None and now - self._looked > PAUSED_S:
            self.pauses.append((self._looked, now))
        self._looked = now
        for name, process in self._processes.items():
            self.samples[name].append(Sample(process.memory_info().rss / 2**20, process.num_fds()))

    def growth(self) -> dict[str, tuple[Sample, Sample]]:
        """By process: the median of the second quarter (the first one warms up), and of the last."""
        quarters = {}
        for name, samples in self.samples.items():
            n = len(samples) // 4
            parts = samples[n : 2 * n], samples[-n:]
            quarters[name] = tuple(
                Sample(median(s.rss_mb for s in part), round(median(s.fds for s in part))) for part in parts
            )
        return quarters  # type: ignore[return-value]


async def one_client(made: Trial, number: int, turns: Any, began: float, end: float, tally: Tally) -> None:
    """Takes the next turn of all, when it is due: together RATE a second, as long as answers come in time."""
    chance = random.Random(number)
    client = Client(made.fleet.ports[number % 2], made.key)
    while True:
        due = began + next(turns) / RATE
        if due > end:
            break
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if chance.random() < HANG_UPS:
            asking = asyncio.create_task(client.ask(STREAM))
            await asyncio.wait([asking], timeout=chance.uniform(0.001, 0.06))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            client.close()
        else:
            tally.outcomes.append(await client.ask(STREAM if chance.random() < 0.3 else BODY))
    client.close()


async def restarts(host: Host, end: float, pause_s: float) -> dict[str, int]:
    """Kill a worker, kill the poster, replace all workers, in turn."""
    done: defaultdict[str, int] = defaultdict(int)
    turns = itertools.cycle(("worker", "poster", "roll"))
    while time.monotonic() + pause_s + 20 < end:
        turn = next(turns)
        await asyncio.sleep(pause_s)
        if turn == "roll":
            await asyncio.to_thread(host.roll)
        else:
            victims = host.roles("gateway" if turn == "worker" else "poster")
            if victims:
                os.kill(victims[0].pid, signal.SIGKILL)
        done[turn] += 1
    return dict(done)


async def soak(made: Trial, seconds: float) -> tuple[dict[int, Tally], Gauge, dict[str, int]]:
    restarted, steady = made.fleet.hosts
    gauge, began = Gauge(steady), time.monotonic()
    tallies = {host.port: Tally() for host in made.fleet.hosts}
    turns = itertools.count()
    clients = [
        asyncio.create_task(one_client(made, n, turns, began, began + seconds, tallies[made.fleet.ports[n % 2]]))
        for n in range(4 * CLIENTS)
    ]
    restarting = asyncio.create_task(restarts(restarted, began + seconds, max(10.0, min(30.0, seconds / 12))))
    while not all(client.done() for client in clients):
        gauge.look()
        await asyncio.sleep(1.0)
    await asyncio.gather(*clients)
    return tallies, gauge, await restarting


@pytest.mark.soak
@long_only
def test_a_fleet_under_load_with_hangups_and_restarts_stays_flat_and_its_books_are_right(tmp_path: Path) -> None:
    with trial(tmp_path) as made:
        tallies, gauge, done = asyncio.run(soak(made, SECONDS))
        restarted, steady = (tallies[port] for port in made.fleet.ports)
        answered = [o for tally in tallies.values() for o in tally.outcomes if o.status == 200]
        growth = gauge.growth()
        lost, double, overspent = asyncio.run(made.books(_both(tallies)))
        wrong = proofs(made)
        summary = {
            "seconds": SECONDS,
            "answered_per_second": round(len(answered) / SECONDS, 1),
            "restarts": done,
            "pauses_of_the_clients_s": [round(end - start) for start, end in gauge.pauses],
            "steady_host": steady.statuses(),
            "restarted_host": restarted.statuses(),
            "growth": {
                name: {"rss_mb": [round(a.rss_mb, 1), round(b.rss_mb, 1)], "fds": [a.fds, b.fds]}
                for name, (a, b) in growth.items()
            },
            "lost": lost,
            "double": double,
            "overspent": overspent,
            "verify": wrong or "passes",
        }
        print(json.dumps(summary, indent=2))
        assert gauge.failures(steady) == []
        assert (lost, double, overspent) == (0, 0, "0")
        assert wrong == []
        for name, (early, late) in growth.items():
            assert late.rss_mb < early.rss_mb * 1.1 + 8, name
            assert late.fds <= early.fds + 16, name


def _both(tallies: dict[int, Tally]) -> Tally:
    both = Tally()
    for tally in tallies.values():
        both.outcomes += tally.outcomes
    return both


@pytest.mark.soak
@long_only
def test_every_part_may_be_killed_or_frozen_under_load(tmp_path: Path) -> None:
    """The table of docs/operations.md; what must hold whatever is lost: no money, no row."""
    with trial(tmp_path) as made:
        print(HEAD)
        reports = asyncio.run(report(made, max(8.0, SECONDS / 12)))
        assert proofs(made) == []
    for one in reports:
        assert (one.lost_rows, one.double_rows, one.overspent) == (0, 0, "0"), one.fault
        assert one.recovered_s < 30, one.fault
        assert one.failed < one.requests / 2, one.fault
