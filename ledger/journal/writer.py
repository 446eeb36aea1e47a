"""The writer of a slot: appends records to the current epoch and says when they are durable."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ledger.errors import Invalid, LedgerUnavailable
from ledger.journal.closing import Override
from ledger.journal.committer import Committer
from ledger.journal.files import Files
from ledger.journal.format import BEHIND_UNKNOWN, DATA_START, FRAME_HEAD, MAX_PAYLOAD, TYPE_CODES, encode_frame
from ledger.journal.health import Health
from ledger.journal.opening import Opened, open_epoch
from ledger.journal.segments import SEGMENT_BYTES
from ledger.journal.slots import SlotLock
from ledger.records import Record, encode


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class JournalWriter:
    """The one writer of a slot, bound to the event loop that first appends. Holds the slot's lock until closed."""

    def __init__(self, opened: Opened, *, files: Files, clock: Callable[[], int], segment_bytes: int) -> None:
        self.epoch = opened.header.epoch
        self.journal_uuid = opened.header.journal_uuid
        self.path = opened.path
        self.overrides: list[Override] = opened.overrides
        self.health = Health(files, opened.path, segment_bytes)
        self._lock = opened.lock
        self._committer = Committer(opened, self.health, files=files, clock=clock, segment_bytes=segment_bytes)
        self._largest_payload = min(MAX_PAYLOAD, segment_bytes - DATA_START - FRAME_HEAD)
        self._closed = False

    @classmethod
    def open(
        cls,
        slot_dir: Path,
        *,
        epoch: int,
        journal_uuid: str,
        lock: SlotLock | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        accept_damage: str | None = None,
        files: Files | None = None,
        clock: Callable[[], int] = now_ms,
    ) -> JournalWriter:
        """Takes the slot's lock (or takes over `lock`), closes older epochs and begins this one. Blocks for some syncs.

        `accept_damage` is the operator's reason to go on without durable frames that do not read; what was given up is
        then in `overrides`, for the audit log. Raises LedgerUnavailable (the slot is held by another process, the disk
        refuses, the epoch is not newer than those here) and JournalDamaged.
        """
        files = files or Files()
        lock = lock or SlotLock.acquire(slot_dir)
        assert lock.slot_dir == slot_dir, f"a lock on {lock.slot_dir} does not cover {slot_dir}"
        try:
            opened = open_epoch(
                files,
                lock,
                epoch,
                journal_uuid,
                segment_bytes=segment_bytes,
                at_ms=clock(),
                accept_damage=accept_damage,
            )
        except OSError as error:
            lock.release()
            raise LedgerUnavailable(f"the journal in {slot_dir} cannot be opened: {error}") from error
        except BaseException:
            lock.release()
            raise
        return cls(opened, files=files, clock=clock, segment_bytes=segment_bytes)

    @property
    def seq(self) -> int:
        """Of the last record appended; 0 before the first."""
        return self._committer.seq

    @property
    def durable_seq(self) -> int:
        return self._committer.durable.seq

    def append(self, record: Record) -> int:
        """The record's sequence number. The operating system has it (it survives kill -9) by the end of this loop turn,
        or when the next segment is ready if this one is full; a second later, at most, it is on its way to the disk.

        Raises LedgerUnavailable when the journal has failed, Invalid when the record is too large.
        """
        if self.health.failure is not None or self._closed:
            raise LedgerUnavailable(self.health.failure or "the journal is closed")
        payload = encode(record)
        if len(payload) > self._largest_payload:
            raise Invalid(f"a journal record of {len(payload)} bytes is too large", "record")
        committer = self._committer
        seq = committer.seq + 1
        behind = min(seq - 1 - committer.durable.seq, BEHIND_UNKNOWN)
        committer.add(encode_frame(seq, TYPE_CODES[type(record)], payload, behind=behind))
        return seq

    async def append_written(self, record: Record) -> int:
        """As `append`, and returns when the operating system has it: for the INTENT before the upstream call."""
        seq = self.append(record)
        await self._committer.written(seq)
        return seq

    async def append_durable(self, record: Record) -> int:
        """As `append`, and returns when it is on disk. Cancelling the wait does not take the record back.

        Raises LedgerUnavailable when the disk fails first: whether it is there is then found at the next start.
        """
        seq = self.append(record)
        await self._committer.synced(seq)
        return seq

    async def flush(self) -> None:
        """Returns when everything appended so far is durable. Raises LedgerUnavailable."""
        await self._committer.synced(self._committer.seq)

    def unhealthy(self) -> str | None:
        """Why nothing new may be admitted now (failed, disk low, too much unposted or unsynced); None: all is well.
        What was admitted can still settle unless the journal has failed. Cheap enough to ask for each request."""
        return self.health.reason()

    def posted(self, seq: int) -> None:
        """The poster has brought everything up to `seq` of this epoch into SQL; feeds the backlog limit."""
        self.health.backlog_frames = self._committer.seq - seq

    async def close(self) -> None:
        """Ends the epoch cleanly: all is durable, the mark says closed, the lock is free. Idempotent.

        Raises LedgerUnavailable when that fails; the lock is free all the same and the next start finds the end.
        """
        if self._closed:
            return
        self._closed = True
        try:
            await self.flush()
            await self._committer.finish()
        except OSError as error:
            raise LedgerUnavailable(f"the journal in {self.path} could not be closed cleanly: {error}") from error
        finally:
            self._committer.release()
            self._lock.release()

    def abandon(self) -> None:
        """Lets go without any last write, as a crash would; what is pending is lost. For tests."""
        self._closed = True
        self._committer.release()
        self._lock.release()
