"""How many requests run at once on a deployment, who waits, and who is told to come back.

A backend that likes 8 at once gets 8; the rest wait in a bounded queue that takes turns between tenants, so that one
tenant's burst delays another by at most one round.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from policies.refusal import Refusal

MIN_RETRY_MS = 100
MAX_RETRY_MS = 60_000
SMOOTHING = 0.1
"""Weight of the newest run in the mean service time."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """max_concurrency 0 means no cap. The cap holds in this process: divide it by the number of workers."""

    max_concurrency: int = 0
    max_queue: int = 1_000
    queue_timeout_s: float = 60.0


UNLIMITED = Capacity()


class Admission:
    """The queues of all deployments of this process."""

    def __init__(self, capacities: Mapping[str, Capacity]) -> None:
        self._lanes: dict[str, _Lane] = {}
        self.update(capacities)

    def update(self, capacities: Mapping[str, Capacity]) -> None:
        """Change caps while requests run and wait. A deployment that is not named has no cap."""
        for name in self._lanes.keys() | capacities.keys():
            capacity = capacities.get(name, UNLIMITED)
            lane = self._lanes.get(name)
            if lane is None:
                self._lanes[name] = _Lane(name, capacity)
            else:
                lane.capacity = capacity
                lane.wake()

    def slot(self, deployment: str, tenant: str) -> Slot:
        """`async with admission.slot(…)`: runs the body once there is room. Raises Refusal 429 instead when the queue
        is full or the wait too long."""
        lane = self._lanes.get(deployment)
        if lane is None:
            lane = self._lanes[deployment] = _Lane(deployment, UNLIMITED)
        return Slot(lane, tenant)

    def running(self, deployment: str) -> int:
        lane = self._lanes.get(deployment)
        return 0 if lane is None else lane.running

    def waiting(self, deployment: str) -> int:
        lane = self._lanes.get(deployment)
        return 0 if lane is None else lane.waiting


class Slot:
    """One place on a deployment: entered once, left once. `acquire` and `release` are there for callers whose work
    outlives a block of code; `release` is harmless when repeated or when nothing is held."""

    __slots__ = ("_held", "_lane", "_since", "_tenant")

    def __init__(self, lane: _Lane, tenant: str) -> None:
        self._lane = lane
        self._tenant = tenant
        self._held = False
        self._since = 0.0

    def take(self) -> bool:
        """A place at once, if one is free and nobody waits."""
        if self._lane.take():
            self._hold()
            return True
        return False

    async def acquire(self) -> None:
        lane = self._lane
        if not lane.take():
            await lane.wait(self._tenant)
        self._hold()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._lane.leave(time.monotonic() - self._since)

    def _hold(self) -> None:
        self._held = True
        self._since = time.monotonic()

    async def __aenter__(self) -> Slot:
        await self.acquire()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.release()


class _Lane:
    """One deployment: how many run, and a queue per tenant, served in turn."""

    def __init__(self, name: str, capacity: Capacity) -> None:
        self.name = name
        self.capacity = capacity
        self.running = 0
        self.waiting = 0
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._mean_s = 0.0

    def take(self) -> bool:
        """A place at once, unless others wait for one."""
        if self.waiting or not self._room():
            return False
        self.running += 1
        return True

    async def wait(self, tenant: str) -> None:
        """A place in turn. Raises Refusal when the queue is full or the time is over."""
        capacity = self.capacity
        if self.waiting >= capacity.max_queue:
            raise self._refusal(f"{self.waiting} requests are already waiting")
        place = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(place)
        self.waiting += 1
        timer = asyncio.get_running_loop().call_later(capacity.queue_timeout_s, self._time_out, place)
        try:
            await place
        except BaseException:
            self._withdraw(tenant, place)
            raise
        finally:
            timer.cancel()

    def leave(self, took_s: float) -> None:
        """A run of so many seconds is over."""
        self.running -= 1
        self._mean_s = took_s if not self._mean_s else self._mean_s + SMOOTHING * (took_s - self._mean_s)
        self.wake()

    def wake(self) -> None:
        """Give free places to those that wait, one tenant after the other."""
        while self.waiting and self._room():
            tenant, queue = next(iter(self._queues.items()))
            place = queue.popleft()
            self._queues.move_to_end(tenant)
            if not queue:
                del self._queues[tenant]
            self.waiting -= 1
            if not place.done():
                self.running += 1
                place.set_result(None)

    def _room(self) -> bool:
        cap = self.capacity.max_concurrency
        return not cap or self.running < cap

    def _time_out(self, place: asyncio.Future[None]) -> None:
        if not place.done():
            place.set_exception(self._refusal(f"no place came free within {self.capacity.queue_timeout_s:g} s"))

    def _withdraw(self, tenant: str, place: asyncio.Future[None]) -> None:
        """The one who waited is gone: out of the queue, or, if a place was just given, pass that on."""
        queue = self._queues.get(tenant)
        if queue is not None and place in queue:
            queue.remove(place)
            self.waiting -= 1
            if not queue:
                del self._queues[tenant]
        elif place.done() and not place.cancelled() and place.exception() is None:
            self.running -= 1
            self.wake()

    def _refusal(self, why: str) -> Refusal:
        cap = max(1, self.capacity.max_concurrency)
        estimate_ms = round(1_000 * self._mean_s * (self.waiting + 1) / cap)
        wait_ms = min(MAX_RETRY_MS, max(MIN_RETRY_MS, estimate_ms))
        return Refusal(
            429,
            "rate_limit_error",
            "rate_limit_exceeded",
            f"The deployment {self.name!r} is busy: {why} (it runs {cap} at once). Try again in {wait_ms} ms.",
            retry_after_ms=wait_ms,
            should_retry=True,
        )
