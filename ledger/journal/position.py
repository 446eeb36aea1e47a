"""The file `durable`: how far an epoch is safely on disk, written by its one writer, obeyed by readers anywhere.

Two copies, 512 bytes apart, are written in turn; a reader takes the valid one of the higher generation, so a torn write
of one never hides the other. It is written after the sync it speaks of and therefore never claims too much, also when
power fails and an older version of it comes back.
"""

from __future__ import annotations

import os
from pathlib import Path

from ledger.journal.files import Files
from ledger.journal.format import MARK_BYTES, Mark, Place, decode_mark, encode_mark

NAME = "durable"
_COPY_BYTES = 512
FILE_BYTES = 2 * _COPY_BYTES


def read_mark(epoch_dir: Path) -> Mark | None:
    """None: the file is not there or holds nothing valid."""
    try:
        fd = os.open(epoch_dir / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return read_mark_at(fd)
    finally:
        os.close(fd)


def read_mark_at(fd: int) -> Mark | None:
    data = os.pread(fd, FILE_BYTES, 0)
    first, second = decode_mark(data[:MARK_BYTES]), decode_mark(data[_COPY_BYTES : _COPY_BYTES + MARK_BYTES])
    if first is None or second is None:
        return first or second
    return first if first.generation > second.generation else second


class Position:
    """The writer's side. `publish` costs one small write; `publish_closed` also syncs."""

    def __init__(self, files: Files, fd: int, generation: int) -> None:
        self._files = files
        self._fd = fd
        self._generation = generation

    @classmethod
    def open(cls, files: Files, epoch_dir: Path) -> Position:
        mark = read_mark(epoch_dir)
        fd = files.open(epoch_dir / NAME, os.O_RDWR | os.O_CREAT)
        return cls(files, fd, mark.generation if mark else 0)

    def publish(self, place: Place, at_ms: int) -> None:
        self._write(Mark(self._generation + 1, place, at_ms))

    def publish_closed(self, place: Place, at_ms: int, *, damage_accepted: bool = False) -> Mark:
        mark = Mark(self._generation + 1, place, at_ms, closed=True, damage_accepted=damage_accepted)
        self._write(mark)
        self._files.sync_data(self._fd)
        return mark

    def sync(self) -> None:
        self._files.sync_data(self._fd)

    def close(self) -> None:
        self._files.close(self._fd)

    def _write(self, mark: Mark) -> None:
        copy = encode_mark(mark).ljust(_COPY_BYTES, b"\0")
        self._files.write_all(self._fd, copy, _COPY_BYTES * (mark.generation % 2))
        self._generation = mark.generation
