"""One thread that does what may block (syncs, new segments) for an event loop, one job after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
Job = Callable[[], None]


class Worker:
    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, loop: asyncio.AbstractEventLoop, work: Callable[[], T], done: Callable[[T | None, Exception | None], None]
    ) -> None:
        """Runs `work` in the thread and then `done(result, error)` in the loop."""

        def job() -> None:
            result: T | None = None
            problem: Exception | None = None
            try:
                result = work()
            except Exception as error:
                problem = error
            try:
                loop.call_soon_threadsafe(done, result, problem)
            except RuntimeError:
                pass  # the loop is closed: nobody waits any more

        self._jobs.put(job)

    def stop(self) -> None:
        """Ends the thread after the job that runs; idempotent."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
