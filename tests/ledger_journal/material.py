"""What the journal's tests write, and file systems that fail on purpose. Everything goes to real files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

from ledger.journal import Files, JournalReader, JournalWriter
from ledger.records import Record, Seal, Settle, Usage, Void

UUID_1 = str(UUID(int=1))
UUID_2 = str(UUID(int=2))
UUID_3 = str(UUID(int=3))
SMALL_SEGMENT = 16 << 10


def void(number: int, size: int = 0) -> Void:
    return Void(f"request-{number:05d}", 1_796_000_000_000, "x" * size)


def settle(number: int) -> Settle:
    usage = Usage(prompt_tokens=900, generated_tokens=250, billed_tokens=1_150)
    return Settle(
        f"request-{number:05d}", 1, 2, "2026-11", "team", "key", None, "deepseek-v3.2", "local", None, "completed",
        usage, "price-1", 105_000_000, 766_500_000, 0, [], 0,
    )  # fmt: skip


def records_of(epoch_dir: Path, *, durable_only: bool = True) -> list[Record]:
    reader = JournalReader(epoch_dir)
    try:
        return [frame.record for frame in reader.frames(0, durable_only=durable_only)]
    finally:
        reader.close()


def open_writer(
    slot_dir: Path, epoch: int = 1, *, files: Files | None = None, segment_bytes: int = SMALL_SEGMENT
) -> JournalWriter:
    return JournalWriter.open(
        slot_dir,
        epoch=epoch,
        journal_uuid=str(UUID(int=epoch)),
        files=files,
        segment_bytes=segment_bytes,
        clock=lambda: 7,
    )


def seal(month: int) -> Seal:
    return Seal(f"2026-{month:02d}")


class UnsyncedFiles(Files):
    """Does not wait for the disk: for tests that end no machine, only processes."""

    def sync_data(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


class HookedFiles(UnsyncedFiles):
    """Calls `before(operation, size)` before each operation that changes the disk; it may raise, count or end the
    process. `operation`: open, write, allocate, truncate, sync, sync_directory, rename, unlink."""

    def __init__(self, before: Callable[[str, int], None]) -> None:
        self.before = before

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self.before("write", len(data))
        return super().pwrite(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        self.before("allocate", size)
        super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self.before("truncate", size)
        super().truncate(fd, size)

    def sync_data(self, fd: int) -> None:
        self.before("sync", 0)
        super().sync_data(fd)

    def sync_directory(self, path: Path) -> None:
        self.before("sync_directory", 0)
        super().sync_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", 0)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self.before("unlink", 0)
        super().unlink(path)


class CountingFiles(HookedFiles):
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        super().__init__(self._count)

    def _count(self, operation: str, _size: int) -> None:
        self.counts[operation] = self.counts.get(operation, 0) + 1


class FailingFiles(HookedFiles):
    """`fail(operation, times)`: the next so many of these raise; large writes only, so that marks go through."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, int]] = {}
        super().__init__(self._maybe_fail)

    def fail(self, operation: str, error: int = errno.EIO, times: int = 1) -> None:
        self._failures[operation] = (error, times)

    def heal(self) -> None:
        self._failures.clear()

    def _maybe_fail(self, operation: str, size: int) -> None:
        if operation == "write" and size == 512:  # the mark
            operation = "mark"
        error, times = self._failures.get(operation, (0, 0))
        if times > 0:
            self._failures[operation] = (error, times - 1)
            raise OSError(error, os.strerror(error))


class DyingFiles(HookedFiles):
    """Ends the process at once before operation number `last`, after half of the write if it is one."""

    def __init__(self, last: int) -> None:
        self._left = last
        super().__init__(self._count_down)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        if self._left == 1:
            os.pwrite(fd, data[: len(data) // 2], offset)
        return super().pwrite(fd, data, offset)

    def _count_down(self, _operation: str, _size: int) -> None:
        self._left -= 1
        if self._left == 0:
            os._exit(99)
