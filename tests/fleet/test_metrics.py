"""`/metrics` counts for the whole host, whichever worker is asked, and what it has counted never goes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.fleet.hosts import Fleet, Host, fleet_of, metric
from tests.fleet.load import BODY, Client
from tests.services import Postgres, Valkey, wait_until
from tests.upstream.process import FakeUpstream

REQUESTS = "tallygate_requests_total"
CRASHES = "tallygate_crashes_total"
READINGS = 8
"""Over connections of their own: enough to meet both workers."""


@pytest.fixture(scope="module")
def host(
    tmp_path_factory: pytest.TempPathFactory, postgres: Postgres, valkey: Valkey, upstream_process: FakeUpstream
) -> Iterator[Host]:
    """Of two workers, which nobody else asks anything."""
    name = postgres.create_database()
    folder = tmp_path_factory.mktemp("metrics")
    with fleet_of(folder, 1, postgres.url(name), valkey.url, upstream_process.base_url) as started:
        yield started.hosts[0]
    postgres.drop_database(name)


async def ask(host: Host, times: int) -> None:
    """Each over a connection of its own."""
    key = Fleet([host]).new_key()
    for _ in range(times):
        client = Client(host.port, key)
        outcome = await client.ask(BODY)
        assert outcome.status == 200, outcome
        client.close()


def settle_at(host: Host, name: str, expected: float, *labels: str) -> None:
    """It comes to say so, and then every worker does."""
    wait_until(lambda: metric(host, name, *labels) == expected, 60, f"{name} {expected}\n{host.logs()}")
    assert {metric(host, name, *labels) for _ in range(READINGS)} == {expected}


@contextmanager
def never_going_back(host: Host, name: str) -> Iterator[None]:
    """It is read all the while."""
    stop, readings = threading.Event(), [metric(host, name)]

    def read() -> None:
        while not stop.wait(0.05):
            with suppress(OSError):  # a killed worker takes its connections with it
                readings.append(metric(host, name))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()
    assert len(readings) > 3
    assert readings == sorted(readings)


async def test_every_worker_answers_for_the_whole_host(host: Host) -> None:
    requests, timed = metric(host, REQUESTS), metric(host, "tallygate_request_seconds_count")
    await ask(host, 10)
    settle_at(host, REQUESTS, requests + 10)
    settle_at(host, "tallygate_request_seconds_count", timed + 10)
    settle_at(host, "tallygate_ready", 2)
    for role, running in (("gateway", 2), ("poster", 1), ("supervisor", 1)):
        settle_at(host, "tallygate_processes", running, f'role="{role}"')


async def test_what_a_killed_worker_has_counted_stays_counted(host: Host) -> None:
    before, crashes = metric(host, REQUESTS), metric(host, CRASHES, 'role="gateway"')
    with never_going_back(host, REQUESTS):
        host.roles("gateway")[0].kill()
        settle_at(host, CRASHES, crashes + 1, 'role="gateway"')
        settle_at(host, "tallygate_ready", 2)
        await ask(host, 10)
        settle_at(host, REQUESTS, before + 10)


async def test_replacing_the_workers_keeps_what_they_have_counted(host: Host) -> None:
    before, crashes = metric(host, REQUESTS), metric(host, CRASHES)
    with never_going_back(host, REQUESTS):
        host.roll()
        await ask(host, 10)
        settle_at(host, REQUESTS, before + 10)
        settle_at(host, "tallygate_processes", 2, 'role="gateway"')
    settle_at(host, REQUESTS, before + 10)
    settle_at(host, CRASHES, crashes)
