"""Patience: ends a wait when the client has hung up or the time for it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal, TypeVar

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Reason = Literal["client_gone", "first_byte", "idle", "total", "quiet"]
T = TypeVar("T")

_GLANCE_S = 0.02
"""How long a request runs before we look whether its client is still there: quick answers need no second task."""


class Interrupted(Exception):
    """The wait was ended. `reason`: client_gone, or which time was over."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class Watch:
    """Watches over one request. Only what runs inside `wait` can be interrupted: settling never is.

    receive: the ASGI channel, after the request body was read from it; its next message is the client's leaving.
    One lazy timer serves all deadlines; moving one later costs an assignment.
    """

    def __init__(self, receive: Receive, total_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._receive = receive
        self._listener: asyncio.Task[None] | None = None
        self._total_at = self._loop.time() + total_s
        self._deadline = self._total_at
        self._reason: Reason = "total"
        self._waiting = False
        self._fired: Reason | None = None
        self._closed = False
        self._tick_in(_GLANCE_S)
        self.client_gone = False

    def restart(self, total_s: float) -> None:
        """A new attempt: the total counts from now."""
        self._total_at = self._loop.time() + total_s

    async def wait(self, awaitable: Awaitable[T], reason: Reason, seconds: float) -> T:
        """The result of `awaitable`. Raises Interrupted when the client leaves, after `seconds`, or after the total."""
        if self.client_gone:
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
            raise Interrupted("client_gone")
        deadline = self._loop.time() + seconds
        self._deadline, self._reason = (deadline, reason) if deadline < self._total_at else (self._total_at, "total")
        if self._deadline < self._tick_at and self._listener is not None:
            self._timer.cancel()
            self._tick_in(self._deadline - self._loop.time())
        self._waiting = True
        try:
            return await awaitable
        except asyncio.CancelledError:
            if self._fired is None:
                raise
            fired, self._fired = self._fired, None
            self._task.uncancel()
            raise Interrupted(fired) from None
        finally:
            self._waiting = False

    def close(self) -> None:
        self._closed = True
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()
            self._listener = None  # it remembers who cancelled it, and so us: nothing but the collector would free both

    def _tick(self) -> None:
        if self._closed:
            return
        if self._listener is None:
            self._listener = self._loop.create_task(self._listen())
        if self._waiting and self._loop.time() >= self._deadline:
            self._fire(self._reason)
        self._tick_in(self._deadline - self._loop.time() if self._waiting else 1.0)

    def _tick_in(self, seconds: float) -> None:
        """Not sooner than in a millisecond. When it is due is noted here: where a delay rounds to nothing, uvloop makes
        a handle that does not know."""
        self._tick_at = self._loop.time() + max(seconds, 0.001)
        self._timer: asyncio.Handle = self._loop.call_later(max(seconds, 0.001), self._tick)

    def _fire(self, reason: Reason) -> None:
        if self._waiting and self._fired is None:
            self._fired = reason
            self._task.cancel()

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.client_gone = True
        self._fire("client_gone")
