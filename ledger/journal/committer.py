"""Group commit: frames go in, one write a loop turn and one sync a group come out, and waiters are told.

While the thread syncs, later turns go on writing: the frames that are there when it ends form the next group, so there
is no timer between a frame and its sync. A segment that fails to write or to sync is never touched again: what is not
known to be durable moves to a new one, and if that fails too the journal stops.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog

from ledger.errors import LedgerUnavailable
from ledger.journal.closing import PAGE_BYTES
from ledger.journal.files import Files
from ledger.journal.format import DATA_START, Header, Place, next_chain
from ledger.journal.health import Health
from ledger.journal.opening import Opened
from ledger.journal.segments import Segment, create_segment, prepare_spare, remove_spare, segment_numbers
from ledger.journal.worker import Worker

IDLE_SYNC_S = 1.0
"""Frames that nobody waits for are synced this long after they were written."""
_UNSYNCED_BYTES = 8 << 20
"""… or when there are more of them than this."""
_SPARE_RETRY_S = 5.0

T = TypeVar("T")
Waiters = deque[tuple[int, "asyncio.Future[None]"]]
log = structlog.get_logger(__name__)


class _Group(NamedTuple):
    """Frames that one write put into the current segment, kept while their disk page may have to be written again."""

    before: Place
    data: bytes

    @property
    def end(self) -> int:
        return self.before.offset + len(self.data)


class Committer:
    """Owns the open segment and the published position of one epoch. All methods belong to the event loop's thread."""

    def __init__(
        self, opened: Opened, health: Health, *, files: Files, clock: Callable[[], int], segment_bytes: int
    ) -> None:
        self.seq = 0
        self.durable = opened.header.start
        self.path: Path = opened.path
        self._header = opened.header
        self._health = health
        self._files = files
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._segment = opened.segment
        self._position = opened.position
        self._written = opened.header.start
        self._pending: list[bytes] = []
        self._unsynced: deque[_Group] = deque()
        self._written_waiters: Waiters = deque()
        self._durable_waiters: Waiters = deque()
        self._worker = Worker(f"journal-{opened.path.parent.name}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._turn_ends = False  # a write is due at the end of this loop turn
        self._working = False  # the thread has a job
        self._stopping = False  # … or must not get one any more
        self._full = False  # the next pending frame does not fit: a new segment comes first
        self._broken = False  # the segment failed: what is not durable moves to a new one first
        self._overdue = False  # sync although nobody waits
        self._spare_due = True

    def add(self, frame: bytes) -> None:
        """Takes the frame of number `seq + 1`; it is written at the end of this loop turn."""
        self._end_turn_later()
        self.seq += 1
        self._pending.append(frame)

    async def written(self, seq: int) -> None:
        """Raises LedgerUnavailable, as `synced` does."""
        if self._written.seq < seq or self._broken:
            await self._wait(self._written_waiters, seq)

    async def synced(self, seq: int) -> None:
        if self.durable.seq < seq:
            if not self._turn_ends:  # written in an earlier turn: nothing else starts the sync that we now wait for
                self._running_loop().call_soon(self._advance)
            await self._wait(self._durable_waiters, seq)

    async def finish(self) -> None:
        """After the last frame is durable: ends the thread, gives unused space back, publishes the end. OSError."""
        self._stopping = True
        await asyncio.to_thread(self._worker.stop)
        await asyncio.to_thread(self._publish_end)

    def release(self) -> None:
        """Lets go of thread and files at once; what was not written stays unwritten."""
        self._stopping = True
        self._worker.stop()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._refuse_waiters("the journal is closed")
        if self._segment.fd >= 0:
            self._files.close(self._segment.fd)
            self._position.close()
            self._segment.fd = -1

    # one loop turn

    def _end_turn_later(self) -> None:
        if not self._turn_ends:
            self._running_loop().call_soon(self._end_turn)
            self._turn_ends = True

    def _end_turn(self) -> None:
        self._turn_ends = False
        self._write()
        self._advance()

    def _write(self) -> None:
        """Writes what is pending and fits, with one system call."""
        if not self._pending or self._full or self._broken or self._health.failure is not None:
            return
        frames, self._pending = self._pending, []
        room = self._segment.room
        if sum(map(len, frames)) > room:
            fitting = _count_fitting(frames, room)
            frames, self._pending = frames[:fitting], frames[fitting:]
            self._full = True
        if frames:
            self._put(frames)
        if not self._broken:
            _wake(self._written_waiters, self._written.seq)

    def _put(self, frames: list[bytes]) -> None:
        before, segment = self._written, self._segment
        chain = before.chain
        for frame in frames:
            chain = next_chain(chain, frame)
        data = b"".join(frames)
        group = _Group(before, data)
        self._unsynced.append(group)
        self._written = Place(segment.number, group.end, before.seq + len(frames), chain)
        self._health.unsynced_bytes += len(data)
        if self._health.unsynced_bytes > _UNSYNCED_BYTES:
            self._overdue = True
        try:
            self._files.write_all(segment.fd, data, segment.offset)
            segment.offset = group.end
            segment.zero_ahead(self._files)
        except OSError as error:
            segment.offset = group.end
            self._break(error)

    # what the thread does, one job at a time

    def _advance(self) -> None:
        if self._working or self._stopping or self._health.failure is not None:
            return
        unsynced = self._written.seq > self.durable.seq
        if self._broken:
            self._move()
        elif self._full:
            self._roll()
        elif self._spare_due:
            self._prepare()
        elif unsynced and (self._durable_waiters or self._overdue):
            self._sync()
        elif unsynced and self._idle_timer is None:
            self._idle_timer = self._running_loop().call_later(IDLE_SYNC_S, self._on_idle)

    def _sync(self) -> None:
        place, fd = self._written, self._segment.fd
        self._overdue = False

        def work() -> Place:
            self._files.sync_data(fd)
            return place

        def done(place: Place) -> None:
            self._publish(place)  # here and not in the thread, which would have to wait for the interpreter once more
            self._now_durable(place)

        self._start(work, done)

    def _roll(self) -> None:
        """The full segment is synced before the next one is opened."""
        place, segment, old = self._written, self._segment, self._header

        def work() -> Segment:
            self._files.truncate(segment.fd, segment.offset)
            self._files.sync_data(segment.fd)
            self._publish(place)
            header = Header(old.epoch, segment.number + 1, place.seq + 1, self._clock(), old.journal_uuid, place.chain)
            return create_segment(self._files, self.path, header, self._segment_bytes)

        def done(new: Segment) -> None:
            self._use(new, Place(new.number, new.offset, place.seq, place.chain))
            self._now_durable(place)

        self._start(work, done)

    def _move(self) -> None:
        """Writes everything from the disk page of the durable position on to a new segment and leaves the old as it is:
        after a failed sync nobody knows what of it is on disk, and a second sync would not say."""
        written, old, groups = self._written, self._header, list(self._unsynced)
        before = groups[0].before if groups else written
        data = b"".join(group.data for group in groups)

        def work() -> Segment:
            number = segment_numbers(self.path)[-1] + 1
            header = Header(old.epoch, number, before.seq + 1, self._clock(), old.journal_uuid, before.chain)
            new = create_segment(self._files, self.path, header, self._segment_bytes, data)
            self._publish(Place(number, new.offset, written.seq, written.chain))
            return new

        def done(new: Segment) -> None:
            place = Place(new.number, new.offset, written.seq, written.chain)
            self._use(new, place)
            self._unsynced.append(_Group(Place(new.number, DATA_START, before.seq, before.chain), data))
            self._now_durable(place)

        self._start(work, done, last_resort=True)

    def _prepare(self) -> None:
        self._spare_due = False

        def work() -> str | None:
            try:
                prepare_spare(self._files, self.path, self._segment_bytes)
            except OSError as error:
                remove_spare(self._files, self.path)
                return f"the journal cannot reserve its next segment in {self.path}: {error.strerror}"
            return None

        def done(problem: str | None) -> None:
            self._health.spare_problem = problem
            if problem is not None:
                log.error("journal_low_on_space", problem=problem)
                self._running_loop().call_later(_SPARE_RETRY_S, self._retry_spare)

        self._start(work, done)

    def _start(self, work: Callable[[], T], done: Callable[[T], None], *, last_resort: bool = False) -> None:
        """Runs `work` in the thread and `done` with its result here. An error breaks the segment, or all."""

        def ended(result: T | None, error: Exception | None) -> None:
            self._health.work_since = None
            if self._health.failure is not None or self._stopping:
                return
            self._working = False
            if error is None:
                done(result)  # type: ignore[arg-type]  # the result of `work`, which may itself be None
            elif last_resort:
                self._fail(f"the journal in {self.path} cannot be written: {error}")
            else:
                self._break(error)
            self._end_turn_later()  # and not now: the next group takes along what this turn still brings

        self._working = True
        loop = self._running_loop()
        self._health.work_since = time.monotonic()
        self._worker.submit(loop, work, ended)

    def _publish(self, place: Place) -> None:
        """The frames are durable also when this fails; only readers do not see it yet."""
        try:
            self._position.publish(place, self._clock())
            self._health.position_problem = None
        except OSError as error:
            self._health.position_problem = f"the journal's position in {self.path} cannot be written: {error}"

    def _publish_end(self) -> None:
        segment = self._segment
        remove_spare(self._files, self.path)
        self._files.truncate(segment.fd, segment.offset)
        self._files.sync_data(segment.fd)
        self._position.publish_closed(self._written, self._clock())
        self._files.sync_directory(self.path)

    # what changes then

    def _use(self, segment: Segment, place: Place) -> None:
        self._files.close(self._segment.fd)
        self._segment, self._written = segment, place
        self._unsynced.clear()
        self._full = self._broken = False
        self._spare_due = True

    def _now_durable(self, place: Place) -> None:
        self.durable = place
        page = place.offset - place.offset % PAGE_BYTES
        while self._unsynced and self._unsynced[0].end <= page:
            self._unsynced.popleft()
        self._health.unsynced_bytes = max(0, self._written.offset - place.offset)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        _wake(self._written_waiters, place.seq)
        _wake(self._durable_waiters, place.seq)

    def _break(self, error: Exception) -> None:
        self._broken = True
        log.error("journal_segment_failed", segment=str(self._segment.path), error=str(error))

    def _fail(self, reason: str) -> None:
        self._health.failure = reason
        log.error("journal_stopped", reason=reason)
        self._refuse_waiters(reason)

    def _refuse_waiters(self, reason: str) -> None:
        for waiters in (self._written_waiters, self._durable_waiters):
            while waiters:
                _, future = waiters.popleft()
                if not future.done():
                    future.set_exception(LedgerUnavailable(reason))

    def _on_idle(self) -> None:
        self._idle_timer = None
        self._overdue = True
        self._advance()

    def _retry_spare(self) -> None:
        self._spare_due = True
        self._advance()

    async def _wait(self, waiters: Waiters, seq: int) -> None:
        if self._health.failure is not None or self._stopping:
            raise LedgerUnavailable(self._health.failure or "the journal is closed")
        future = self._running_loop().create_future()
        waiters.append((seq, future))
        await future

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop


def _wake(waiters: Waiters, seq: int) -> None:
    while waiters and waiters[0][0] <= seq:
        _, future = waiters.popleft()
        if not future.done():
            future.set_result(None)


def _count_fitting(frames: list[bytes], room: int) -> int:
    count = 0
    for frame in frames:
        room -= len(frame)
        if room < 0:
            break
        count += 1
    return count
