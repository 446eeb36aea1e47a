"""A machine that can lose power: what was not synced may be there, gone, or there in part, sector by sector.

`PowerFiles` does every operation for real and remembers which of it a disk would have kept. `after_power_loss` writes
one state that a disk may come back with. A sync that fails drops an arbitrary part of what it should have written and
calls the rest clean, as Linux does: a second sync succeeds and brings nothing back.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock

from ledger.journal import Files

SECTOR = 512


class _Content:
    """The bytes of one file: what the disk has, and what it was told since."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes]] = []
        self.size: int | None = None

    def image(self, survives: Callable[[], bool]) -> bytearray:
        image = bytearray(self.durable)
        for offset, data in self.pending:
            for at, piece in _sectors(offset, data):
                if survives():
                    if len(image) < at + len(piece):
                        _resize(image, at + len(piece))
                    image[at : at + len(piece)] = piece
        if self.size is not None and survives():
            _resize(image, self.size)
        return image

    def keep(self, survives: Callable[[], bool]) -> None:
        self.durable = self.image(survives)
        self.pending.clear()
        self.size = None


class PowerFiles(Files):
    """`sync_failures`: the chance that a data sync fails. `before` is called before every operation, in its thread."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.sync_failures = 0.0
        self.before: Callable[[], None] = lambda: None
        self._lock = RLock()
        self._content: dict[Path, _Content] = {}  # by the path that processes see
        self._by_fd: dict[int, _Content] = {}
        self._names: dict[Path, _Content] = {}  # by the path that the disk has
        self._renames: list[tuple[Path, Path]] = []  # in order; the disk has none of these
        self._new: list[Path] = []

    def after_power_loss(self, source: Path, target: Path) -> None:
        """Writes under `target` what may be left of the directory `source`."""
        with self._lock:
            survival = self.chance.choice([0.0, 0.5, 1.0])
            names = dict(self._names)
            done = self.chance.randint(0, len(self._renames))
            for old, new in self._renames[:done]:
                _move(names, old, new)
            for path in self._new:
                if self.chance.random() < survival and path in self._content:
                    names.setdefault(path, self._content[path])
            for path, content in names.items():
                place = target / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content.image(lambda: self.chance.random() < survival))

    def open(self, path: Path, flags: int) -> int:
        with self._begin():
            fd = super().open(path, flags)
            if path not in self._content:
                self._content[path] = _Content()
                self._new.append(path)
            self._by_fd[fd] = self._content[path]
            if flags & os.O_TRUNC:
                self._by_fd[fd].size = 0
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            super().close(fd)
            del self._by_fd[fd]

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        with self._begin():
            self._by_fd[fd].pending.append((offset, data))
            return super().pwrite(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        with self._begin():
            super().allocate(fd, size)
            self._by_fd[fd].size = os.fstat(fd).st_size

    def truncate(self, fd: int, size: int) -> None:
        with self._begin():
            super().truncate(fd, size)
            self._by_fd[fd].size = size

    def sync_data(self, fd: int) -> None:
        with self._begin():
            if self.chance.random() < self.sync_failures:
                survival = self.chance.choice([0.0, 0.5, 1.0])
                self._by_fd[fd].keep(lambda: self.chance.random() < survival)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self._by_fd[fd].keep(lambda: True)

    def sync_directory(self, path: Path) -> None:
        with self._begin():
            for entry in [entry for entry in self._new if entry.parent == path]:
                self._new.remove(entry)
                if entry in self._content:
                    self._names[entry] = self._content[entry]
            for old, new in [pair for pair in self._renames if pair[1].parent == path]:
                self._renames.remove((old, new))
                _move(self._names, old, new)

    def rename(self, source: Path, target: Path) -> None:
        with self._begin():
            super().rename(source, target)
            _move(self._content, source, target)
            self._renames.append((source, target))
            if source in self._new:  # a file whose first name the disk never had
                self._names[source] = self._content[target]
                self._new.remove(source)

    def unlink(self, path: Path) -> None:
        with self._begin():
            super().unlink(path)
            self._content.pop(path, None)
            self._names.pop(path, None)
            if path in self._new:
                self._new.remove(path)

    def _begin(self) -> RLock:
        with self._lock:
            self.before()
        return self._lock


def _move(names: dict[Path, _Content], old: Path, new: Path) -> None:
    for path in list(names):
        if path == old:
            names[new] = names.pop(path)
        elif path.is_relative_to(old):
            names[new / path.relative_to(old)] = names.pop(path)


def _sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        size = SECTOR - (offset + at) % SECTOR
        yield offset + at, data[at : at + size]
        at += size


def _resize(image: bytearray, size: int) -> None:
    if size < len(image):
        del image[size:]
    else:
        image.extend(bytes(size - len(image)))
