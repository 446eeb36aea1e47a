"""Clocks that jump and months that turn, through real processes: gateway, poster and Valkey live in a shifted time."""

from __future__ import annotations

import asyncio
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from tests.fleet.hosts import Fleet, Host
from tests.fleet.load import BODY, Client
from tests.services import Postgres, Valkey, running, wait_until
from tests.upstream.process import FakeUpstream

SOURCE = Path(__file__).with_name("shifted_clock.c")
SHORTLY_BEFORE = "2026-11-30T23:30:00+08:00"
COMPILER = shutil.which("cc") or shutil.which("gcc")


class Clock:
    """A wall clock for some processes. `set` takes an ISO instant, `jump` seconds."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "shift"
        self.shift_s = 0
        self._write()
        library = folder / "shifted_clock.so"
        assert COMPILER is not None
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True, timeout=60)
        self.environ = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._file)}

    def set(self, instant: str) -> None:
        self.shift_s = int(datetime.fromisoformat(instant).timestamp() - time.time())
        self._write()

    def jump(self, seconds: int) -> None:
        self.shift_s += seconds
        self._write()

    def _write(self) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", self.shift_s))


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Clock:
    if COMPILER is None:
        pytest.skip("needs a C compiler to shift the clock of other processes")
    return Clock(tmp_path_factory.mktemp("clock"))


@pytest.fixture(scope="module")
def host(
    tmp_path_factory: pytest.TempPathFactory, clock: Clock, postgres: Postgres, upstream_process: FakeUpstream
) -> Iterator[Host]:
    """A host with one worker, and its Valkey, all by `clock`."""
    clock.set("2026-11-30T22:00:00+08:00")  # prices are in force from here on, and no test goes back further
    name = postgres.create_database()
    with running(Valkey(environ=clock.environ)) as valkey:
        folder = tmp_path_factory.mktemp("fleet") / "host"
        made = Host(folder, postgres.url(name), valkey.url, upstream_process.base_url, server={"workers": 1})
        made.add_environ(clock.environ)
        with made:
            yield made
    postgres.drop_database(name)


@pytest.fixture(autouse=True)
def november(clock: Clock) -> None:
    """Half an hour before the month turns in Shanghai; another test may have left the clock in another year."""
    clock.set(SHORTLY_BEFORE)


def passed(host: Host, key: str, requests: int, code: str = "rate_limit_exceeded") -> int:
    """How many of so many requests pass, asked one by one; the others are refused with that code."""

    async def ask() -> list[str]:
        client = Client(host.port, key)
        outcomes = [await client.ask(BODY) for _ in range(requests)]
        client.close()
        return ["200" if outcome.status == 200 else outcome.code for outcome in outcomes]

    answers = asyncio.run(ask())
    assert set(answers) <= {"200", code}, answers
    return answers.count("200")


def test_a_month_turns_once_in_each_zone_however_the_clock_jumps(host: Host, clock: Clock) -> None:
    fleet = Fleet([host])
    month = {"metric": "requests", "window": "month", "limit": 5}
    shanghai = fleet.new_key(month, timezone="Asia/Shanghai")
    utc = fleet.new_key(month, timezone="UTC")
    assert (passed(host, shanghai, 7), passed(host, utc, 7)) == (5, 5)
    clock.jump(3_600)  # 00:30 of 1 December in Shanghai, and still November by UTC
    assert (passed(host, shanghai, 7), passed(host, utc, 7)) == (5, 0)
    clock.jump(-3_600)  # back into November: what December has counted stays counted
    assert (passed(host, shanghai, 7), passed(host, utc, 7)) == (0, 0)
    clock.jump(3_600)
    assert (passed(host, shanghai, 7), passed(host, utc, 7)) == (0, 0)
    clock.set("2026-12-01T00:00:05+00:00")
    assert (passed(host, shanghai, 7), passed(host, utc, 7)) == (0, 5)
    clock.set("2027-01-01T00:00:05+08:00")
    assert (passed(host, shanghai, 7), passed(host, utc, 7)) == (5, 0)


def test_a_spend_limit_turns_with_its_month_and_spend_is_never_wiped(host: Host, clock: Clock) -> None:
    fleet = Fleet([host])
    limit = {"metric": "spend", "window": "month", "limit": "0.0001", "currency": "USD"}
    key = fleet.new_key(limit, timezone="Asia/Shanghai")
    spent = []
    november = passed(host, key, 60, "insufficient_quota")
    assert 0 < november < 60
    clock.jump(3_600)
    december = passed(host, key, 60, "insufficient_quota")
    assert 0 < december < 60
    for seconds in (-3_600, 3_600, -3_600, 3_600):
        clock.jump(seconds)
        spent.append(passed(host, key, 3, "insufficient_quota"))
    assert spent == [0, 0, 0, 0]
    with host.admin() as admin:

        def months() -> list[str]:
            found = admin.get("/usage", params={"limit": 1000, "key": fleet.key_id(key)}).json()["data"]
            return [row["period"] for row in found]

        wait_until(lambda: len(months()) == november + december, 60, "every request in SQL")
        by_month = months()
    assert (by_month.count("2026-11"), by_month.count("2026-12")) == (november, december)
    assert fleet.verify(host)["ok"]


def test_a_minutes_limit_is_neither_stuck_nor_doubled_by_a_clock_that_goes_back(host: Host, clock: Clock) -> None:
    key = Fleet([host]).new_key({"metric": "requests", "window": "minute", "limit": 60})
    began = time.monotonic()
    assert passed(host, key, 75) >= 60
    clock.jump(-3_600)
    assert passed(host, key, 20) < 20
    wait_until(lambda: passed(host, key, 1) == 1, 30, "the next second's request")
    after = passed(host, key, 60)
    assert after <= time.monotonic() - began + 1
