"""Promises in milliseconds on a machine that has other work to do."""

from __future__ import annotations

import asyncio
import statistics
import time


def assert_in_time(late_s: list[float], lag_s: float) -> None:
    """Within 100 ms, and what other work on the machine holds up: gateway, upstream and we each wait for it."""
    assert statistics.median(late_s) < 0.1 + 3 * lag_s, (lag_s, sorted(late_s))


class Lag:
    """How much later than it wanted this process was woken: three in four wakings were sooner."""

    async def __aenter__(self) -> Lag:
        self._late: list[float] = []
        self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        self.seconds = statistics.quantiles(self._late, n=4)[2] if len(self._late) > 1 else 0.0

    async def _watch(self) -> None:
        while True:
            wanted = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            self._late.append(time.monotonic() - wanted)
