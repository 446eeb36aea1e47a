"""A worker process for tests of shared counters.

`python -m tests.policies.counting_worker URL MODE N`: `burst` asks N times and prints how many passed; `hold` takes N
concurrency slots, prints how many it got and keeps them until it is killed.
"""

from __future__ import annotations

import asyncio
import sys

from policies.access import Principal
from policies.counters.redis import RedisCounters
from policies.quotas import Limiter, Quota, Ticket
from policies.refusal import Refusal

CALLER = Principal(
    "shared",
    "key",
    "test",
    "CNY",
    "UTC",
    quotas=(Quota("r", "team", "requests", "hour", 1_000), Quota("d", "key", "requests", "day", 1_000)),
)
HOLDER = Principal("held", "key", "test", "CNY", "UTC", quotas=(Quota("c", "team", "concurrency", None, 8),))


async def work(url: str, mode: str, count: int) -> None:
    # A busy test machine may stall for longer than 15 ms; what happens then has tests of its own.
    counters = RedisCounters(url, on_outage="refuse", deadline_ms=5_000)
    limiter = Limiter(counters)
    await counters.open()
    caller = CALLER if mode == "burst" else HOLDER

    async def ask() -> Ticket | None:
        try:
            return await limiter.admit(caller, "m", None, 1)
        except Refusal:
            return None

    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    tickets = []
    for _ in range(0, count, 50):
        tickets += await asyncio.gather(*(ask() for _ in range(min(50, count))))
    print(sum(ticket is not None for ticket in tickets), flush=True)
    if mode == "hold":
        await asyncio.Event().wait()
    await counters.close()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2], int(sys.argv[3])))
