"""Counters shared over Valkey: several workers, and a server that is frozen, killed, emptied or a cluster."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import pytest

from policies.access import Principal
from policies.counters.redis import RedisCounters
from policies.counters.resp import Address, cluster_slot
from policies.quotas import Limiter, Quota, Ticket
from policies.refusal import Refusal
from tests.services import ROOT, Valkey, free_port, running, wait_until


def caller(*quotas: Quota, team: str = "t") -> Principal:
    return Principal(team, f"key-{team}", "test", "CNY", "UTC", quotas=quotas)


@asynccontextmanager
async def limiter(url: str, **options: Any) -> AsyncIterator[tuple[Limiter, RedisCounters]]:
    counters = RedisCounters(url, **options)
    await counters.open()
    try:
        yield Limiter(counters), counters
    finally:
        await counters.close()


async def ask(limiter: Limiter, who: Principal, tokens: int = 1) -> Ticket | None:
    try:
        return await limiter.admit(who, "m", None, tokens)
    except Refusal:
        return None


async def passed(limiter: Limiter, who: Principal, count: int) -> int:
    return sum(ticket is not None for ticket in [await ask(limiter, who) for _ in range(count)])


async def until(true: Callable[[], bool], timeout_s: float = 30) -> float:
    """Seconds until the condition held."""
    started = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return time.monotonic() - started


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A Valkey that the test may hurt."""
    with running(Valkey()) as valkey:
        yield valkey


@pytest.fixture
def workers(valkey_url: str) -> Iterator[Callable[[str, int], subprocess.Popen[str]]]:
    with ExitStack() as stack:

        def start(mode: str, count: int) -> subprocess.Popen[str]:
            worker = subprocess.Popen(
                [sys.executable, "-m", "tests.policies.counting_worker", valkey_url, mode, str(count)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            return worker

        yield start


def go(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


def answer(worker: subprocess.Popen[str]) -> int:
    assert worker.stdout is not None
    return int(worker.stdout.readline())


def test_four_workers_together_admit_exactly_the_limit_in_a_burst(
    workers: Callable[[str, int], subprocess.Popen[str]],
) -> None:
    """An hour's limit, so that what drains during the burst (one per 3.6 s) stays below one."""
    started = [workers("burst", 400) for _ in range(4)]
    before = time.monotonic()
    for worker in started:
        go(worker)
    admitted = sum(map(answer, started))
    assert 1_000 <= admitted <= 1_000 + (time.monotonic() - before) / 3.6


async def test_a_killed_workers_slots_return_within_five_seconds(
    workers: Callable[[str, int], subprocess.Popen[str]], valkey_url: str
) -> None:
    holder = workers("hold", 20)
    go(holder)
    assert answer(holder) == 8
    who = caller(Quota("c", "team", "concurrency", None, 8), team="held")
    async with limiter(valkey_url, deadline_ms=5_000) as (limits, _):
        await asyncio.sleep(4.5)  # heartbeats keep what is held past the lease
        assert await passed(limits, who, 3) == 0
        holder.kill()
        killed = asked = time.monotonic()
        taken = 0
        while taken < 8:
            assert asked - killed < 5  # one that was refused later, however long we were held up ourselves
            await asyncio.sleep(0.1)
            asked = time.monotonic()
            taken += await passed(limits, who, 8)


async def test_decisions_of_one_tick_share_a_round_trip(valkey_url: str, valkey: Valkey) -> None:
    who = caller(Quota("r", "key", "requests", "minute", 1_000))

    def reads() -> int:
        return int(valkey.command("INFO", "stats")["total_reads_processed"])

    async with limiter(valkey_url, deadline_ms=5_000) as (limits, counters):
        await asyncio.sleep(0.05)
        before = reads()
        tickets = await asyncio.gather(*(ask(limits, who) for _ in range(100)))
        assert reads() - before < 10
        assert all(tickets)
        assert counters.shared_decisions == 100


async def test_a_tenants_counters_lie_on_one_cluster_slot(valkey_url: str, valkey: Valkey) -> None:
    who = caller(
        Quota("a", "team", "requests", "minute", 9),
        Quota("b", "key", "tokens", "month", 9),
        Quota("c", "key", "concurrency", None, 9),
    )
    async with limiter(valkey_url, deadline_ms=5_000) as (limits, _):
        assert await limits.admit(who, "m", "}odd{user", 1)
        keys = [key for key in valkey.command("KEYS", "*") if "workers" not in key]
    assert len(keys) == 3
    assert len({cluster_slot(key) for key in keys}) == 1
    assert cluster_slot("{user1000}.following") == cluster_slot("user1000")
    assert cluster_slot("123456789") == 0x31C3


@pytest.fixture
def cluster() -> Iterator[Valkey]:
    """One of two nodes that share the slots: low ones here, high ones there."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(running(Valkey("--cluster-enabled", "yes", "--cluster-port", str(free_port()))))
            for _ in range(2)
        )
        first.command("CLUSTER", "ADDSLOTSRANGE", 0, 8_191)
        second.command("CLUSTER", "ADDSLOTSRANGE", 8_192, 16_383)
        second.command("CONFIG", "SET", "cluster-announce-ip", "127.0.0.1")
        bus = second.server.command[second.server.command.index("--cluster-port") + 1]
        first.command("CLUSTER", "MEET", "127.0.0.1", second.port, bus)
        for node in (first, second):
            wait_until(partial(_ok, node), 20, "the cluster")
        yield first


def _ok(node: Valkey) -> bool:
    information = str(node.command("CLUSTER", "INFO"))
    return "cluster_state:ok" in information and "cluster_slots_assigned:16384" in information


async def test_a_cluster_decides_all_or_nothing_across_its_nodes(cluster: Valkey) -> None:
    everyone = Quota("g", "global", "requests", "hour", 50)
    callers = [
        caller(
            everyone, Quota("t", "team", "requests", "hour", 2), Quota("c", "key", "concurrency", None, 9), team=name
        )
        for name in map(str, range(12))
    ]
    assert len({cluster_slot(f"{{{who.team_id}}}") > 8_191 for who in callers}) == 2
    async with limiter(cluster.url, deadline_ms=2_000) as (limits, counters):
        assert counters.degraded() == []
        for who in callers:
            assert await passed(limits, who, 20) == 2  # the 18 refusals of each give the global limit back
            await asyncio.sleep(0.01)
        rest = caller(everyone, team="rest")
        assert await passed(limits, rest, 60) == 50 - 2 * len(callers)
        assert counters.local_decisions == 0


async def test_a_frozen_server_never_delays_a_decision_and_recovers_by_itself(server: Valkey) -> None:
    who = caller(Quota("r", "key", "requests", "hour", 100))
    async with limiter(server.url, workers=4) as (limits, counters):
        assert await passed(limits, who, 10) == 10
        stalls = counters.local_decisions  # of a busy test machine
        server.freeze()
        waits = []
        admitted = 0
        for _ in range(60):
            started = time.monotonic()
            admitted += await ask(limits, who) is not None
            waits.append(time.monotonic() - started)
        assert 22 - stalls <= admitted <= 22  # this worker's quarter of the 90 that were left
        assert sorted(waits)[54] < 0.02  # the first one meets the deadline of 15 ms; what is above 20 is the machine's
        assert "1/4 of what was left" in counters.degraded()[0]
        server.thaw()
        await until(lambda: counters.degraded() == [])
        for more in itertools.count(1):  # in the end what was let through meanwhile is booked
            ticket = await ask(limits, who)
            assert ticket is not None
            if ticket.headers()["x-ratelimit-remaining-requests"] == str(100 - 10 - admitted - more):
                break
            await asyncio.sleep(0.3)


async def test_an_exhausted_limit_stays_exhausted_when_the_server_goes(server: Valkey) -> None:
    who = caller(Quota("r", "key", "requests", "hour", 40), Quota("t", "key", "requests", "total", 1_000))
    async with limiter(server.url, workers=4, deadline_ms=500) as (limits, _):
        assert await passed(limits, who, 50) == 40
        server.kill()
        await asyncio.sleep(0.05)
        assert await passed(limits, who, 50) == 0


async def test_a_killed_server_comes_back_and_held_slots_are_counted_again(server: Valkey) -> None:
    who = caller(Quota("c", "team", "concurrency", None, 8))
    async with limiter(server.url, deadline_ms=500) as (limits, counters):
        held = [await ask(limits, who) for _ in range(5)]
        assert all(held)
        server.kill()
        await until(lambda: counters.degraded() != [])
        started = time.monotonic()
        held.append(await ask(limits, who))
        assert held[-1] is not None  # counted here meanwhile
        assert time.monotonic() - started < 0.4  # without waiting for the deadline
        server.start()
        (slots,) = counters._held
        await until(lambda: counters.degraded() == [] and server.command("ZCARD", slots) == 6)
        assert await passed(limits, who, 8) == 2


async def test_slots_that_a_worker_already_holds_count_in_its_share(server: Valkey) -> None:
    who = caller(Quota("c", "team", "concurrency", None, 8))
    async with limiter(server.url, workers=4, deadline_ms=500) as (limits, counters):
        held = [await ask(limits, who) for _ in range(3)]
        server.kill()
        await until(lambda: counters.degraded() != [])
        assert await ask(limits, who) is None
        for ticket in held[:2]:
            assert ticket is not None
            ticket.release()
        assert await passed(limits, who, 5) == 1


async def test_a_server_that_lost_its_scripts_gets_them_again(server: Valkey) -> None:
    who = caller(Quota("r", "key", "requests", "hour", 100))
    async with limiter(server.url, deadline_ms=500) as (limits, counters):
        server.command("SCRIPT", "FLUSH")
        assert await passed(limits, who, 10) == 10
        assert counters.local_decisions <= 1
        await until(lambda: counters.degraded() == [])


async def test_a_server_that_is_away_at_the_start_is_found_later(server: Valkey) -> None:
    server.stop()
    who = caller(Quota("r", "key", "requests", "hour", 10))
    async with limiter(server.url, deadline_ms=500) as (limits, counters):
        assert counters.degraded() != []
        assert await passed(limits, who, 4) == 4
        server.start()
        await until(lambda: counters.degraded() == [] and not counters._apart._debts)
        assert await passed(limits, who, 10) == 6


async def test_it_can_refuse_instead_and_callers_without_limits_pass(server: Valkey) -> None:
    server.stop()
    async with limiter(server.url, on_outage="refuse") as (limits, counters):
        with pytest.raises(Refusal) as refused:
            await limits.admit(caller(Quota("r", "key", "requests", "hour", 10)), "m", None, 1)
        assert (refused.value.status, refused.value.retry_after_ms) == (503, 1_000)
        assert "refused" in counters.degraded()[0]
        assert await limits.admit(caller(), "m", None, 1)


async def test_one_who_hangs_up_while_the_server_decides_consumes_nothing(server: Valkey) -> None:
    who = caller(Quota("c", "key", "concurrency", None, 1), Quota("r", "key", "requests", "total", 1))
    async with limiter(server.url, deadline_ms=2_000) as (limits, _):
        server.freeze()
        asking = asyncio.create_task(ask(limits, who))
        await asyncio.sleep(0.05)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        server.thaw()
        async with asyncio.timeout(30):
            while await ask(limits, who) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def test_workers_know_how_many_they_are(valkey_url: str) -> None:
    async with limiter(valkey_url) as (_, first), limiter(valkey_url) as (_, second):
        await until(lambda: first.live_workers == second.live_workers == 2)


def test_addresses_are_read_as_redis_writes_them() -> None:
    assert Address.parse("redis://host") == Address("host", 6379)
    assert Address.parse("rediss://u:p%40@h:1/2") == Address("h", 1, 2, "u", "p@", True)
    with pytest.raises(ValueError, match="memory or redis://"):
        Address.parse("http://host")
    with pytest.raises(ValueError, match="number"):
        Address.parse("redis://host/x")
