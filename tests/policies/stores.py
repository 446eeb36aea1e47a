"""Both counter stores behind one face for property tests: time stands still unless a test moves it.

Valkey is real; its scripts run with a clock that reads a key instead of TIME, everything else is production code.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

from policies.access import Principal
from policies.counters.memory import MemoryCounters
from policies.counters.redis import RedisCounters
from policies.quotas import Limiter, Quota, Ticket
from policies.refusal import Refusal
from tests.services import Valkey

T = TypeVar("T")
NOON = 1_796_040_000_000
"""2026-11-30 12:00 UTC, four hours before the month turns in Shanghai."""
TEST_CLOCK = "local now = tonumber(redis.call('GET', 'test:now'))\n"
_teams = itertools.count()


class Store:
    """A limiter on one store, driven from ordinary code. `now` is UTC milliseconds."""

    def __init__(self, valkey: Valkey | None) -> None:
        self.loop = asyncio.new_event_loop()
        self.now = NOON
        self._valkey = valkey
        if valkey is None:
            self.counters: Any = MemoryCounters(monotonic=lambda: self.monotonic, wall=lambda: self.now)
        else:
            self.counters = RedisCounters(
                valkey.url, clock=TEST_CLOCK, wall=lambda: self.now, on_outage="refuse", deadline_ms=5_000
            )
        self.monotonic = 1_000_000
        self._open = False
        self.at(NOON)
        self.run(self.counters.open())
        self._open = True
        self.limiter = Limiter(self.counters)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def at(self, now: int) -> None:
        """Set the wall clock; for memory the monotonic one follows only forward."""
        self.monotonic += max(0, now - self.now)
        self.now = now
        if self._valkey is not None:
            self._valkey.command("SET", "test:now", now)
            if self._open:
                self.run(self.counters._beat())  # real time beats every second; here hours pass at once

    def pass_ms(self, ms: int) -> None:
        if ms:
            self.at(self.now + ms)

    def new_caller(self, *quotas: Quota, timezone: str = "Asia/Shanghai") -> Principal:
        """A key of a team that nobody has used before."""
        team = f"team-{next(_teams)}"
        return Principal(team, f"key-{team}", "test", "CNY", timezone, quotas=quotas)

    def ask(
        self, caller: Principal, tokens: int = 1, *, model: str = "m", end_user: str | None = None
    ) -> Ticket | None:
        """A ticket, or None when refused."""
        try:
            return self.run(self.limiter.admit(caller, model, end_user, tokens))
        except Refusal as refusal:
            self.refusal = refusal
            return None

    def settle(self) -> None:
        """Let what was told to the server arrive, and its answers come back."""
        if self._valkey is not None:
            self.run(self.counters._nodes.link("any").ask("PING", within_s=5))

    def close(self) -> None:
        self.run(self.counters.close())
        self.loop.close()
