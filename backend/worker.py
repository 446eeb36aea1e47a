"""The engine in a thread of its own, reached from an event loop: submit, read updates, hang up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from functools import partial

import structlog

from backend.engine import Engine
from backend.sequence import Request, Update
from backend.sequence import Sequence as Running

_log = structlog.get_logger("backend.worker")


class Answer:
    """The running choices of one HTTP request. Cancelling is safe at any time, also twice."""

    def __init__(self, worker: EngineWorker, loop: asyncio.AbstractEventLoop) -> None:
        self.sequences: list[Running] = []
        self._worker = worker
        self._loop = loop
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(choice, what a round added to it), until every choice has its finish_reason."""
        open_choices = len(self.sequences)
        while open_choices:
            choice, update = await self._updates.get()
            open_choices -= update.finish_reason is not None
            yield choice, update

    async def next_update(self, timeout_s: float) -> tuple[int, Update] | None:
        """The next one, or None when nothing came in time."""
        try:
            return await asyncio.wait_for(self._updates.get(), timeout_s)
        except TimeoutError:
            return None

    def cancel(self) -> None:
        """Free the slots before the next round starts."""
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                self._worker.command(partial(self._worker.drop, sequence))

    def deliver(self, choice: int, update: Update) -> None:
        """Called in the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads this any more
            self._loop.call_soon_threadsafe(self._updates.put_nowait, (choice, update))


class EngineWorker:
    """Runs rounds while there is work, commands between rounds. An error in a round ends the running requests only."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: deque[Callable[[Engine], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._readers: dict[Running, Callable[[Update], None]] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def submit(self, requests: Sequence[Request]) -> Answer:
        """Queue the choices of a request, all or none. Raises BadRequest or QueueFull, as Engine.add does."""
        answer = Answer(self, asyncio.get_running_loop())
        queued: Future[None] = Future()

        def add(engine: Engine) -> None:
            try:
                for request in requests:
                    sequence = engine.add(request)
                    self._readers[sequence] = partial(answer.deliver, len(answer.sequences))
                    answer.sequences.append(sequence)
            except Exception as error:  # it belongs to the caller
                for sequence in answer.sequences:
                    self.drop(sequence, engine)
                queued.set_exception(error)
                return
            queued.set_result(None)

        self.command(add)
        try:
            await asyncio.shield(asyncio.wrap_future(queued))
        except asyncio.CancelledError:
            queued.add_done_callback(lambda _: answer.cancel())
            raise
        return answer

    def command(self, act: Callable[[Engine], None]) -> None:
        """Run `act` in the engine's thread, between two rounds."""
        with self._wake:
            self._commands.append(act)
            self._wake.notify()

    def drop(self, sequence: Running, engine: Engine) -> None:
        update = engine.cancel(sequence)
        if update is not None:
            self._deliver(update)

    def close(self) -> None:
        """End all requests and the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._commands and self.engine.idle and not self._stopping:
                    self._wake.wait()
                commands = list(self._commands)
                self._commands.clear()
                if self._stopping:
                    break
            for act in commands:
                act(self.engine)
            self._round()
        for sequence in list(self._readers):
            self.drop(sequence, self.engine)

    def _round(self) -> None:
        try:
            updates = self.engine.step()
        except Exception as error:
            _log.exception("round_failed")
            updates = self.engine.fail_all(f"the engine failed in this round: {error}")
        for update in updates:
            if update.text or update.logprobs or update.finish_reason or update.generated_tokens:
                self._deliver(update)

    def _deliver(self, update: Update) -> None:
        over = update.finish_reason is not None
        read = self._readers.pop(update.sequence, None) if over else self._readers.get(update.sequence)
        if read is not None:
            read(update)
