"""Segment files: `000001.seg` … in an epoch's directory, created whole or not at all, filled front to back."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from ledger.errors import JournalDamaged
from ledger.journal.files import Files
from ledger.journal.format import DATA_START, HEADER_BYTES, Header, decode_header, encode_header

SEGMENT_BYTES = 64 << 20
ZERO_STEP_BYTES = 256 << 10
ZERO_MARGIN_BYTES = 64 << 10
_NAME = re.compile(r"(\d{6,})\.seg")
SPARE_NAME = "spare"
"""A pre-allocated file that becomes the next segment by renaming."""


def segment_name(number: int) -> str:
    return f"{number:06d}.seg"


def segment_numbers(epoch_dir: Path) -> list[int]:
    """Ascending. Raises FileNotFoundError."""
    return sorted(int(match[1]) for name in os.listdir(epoch_dir) if (match := _NAME.fullmatch(name)))


PRUNED_NAME = "first-kept"
"""Says the number of the lowest segment that was not pruned."""


class Segment:
    """An open segment of the writer: where the next frame goes, and how much room is left."""

    def __init__(self, number: int, path: Path, fd: int, offset: int, size: int) -> None:
        self.number = number
        self.path = path
        self.fd = fd
        self.offset = offset
        self.size = size
        self.zeroed = offset
        """Up to here the file was written, with frames or with zeros; beyond, its blocks are only reserved."""

    @property
    def room(self) -> int:
        return self.size - self.offset

    def zero_ahead(self, files: Files) -> None:
        """Write zeros before the frames get there. OSError.

        To sync bytes in blocks that were reserved and never written, the file system must commit its own journal, and
        with it what other files have there: each settlement would wait for the database's writes. A sync of bytes that
        overwrite others has nothing to do with them.
        """
        if self.offset > self.zeroed - ZERO_MARGIN_BYTES and self.zeroed < self.size:
            start = max(self.zeroed, self.offset)
            end = min(start + ZERO_STEP_BYTES, self.size)
            files.write_all(self.fd, bytes(end - start), start)
            self.zeroed = end


def prepare_spare(files: Files, epoch_dir: Path, size: int) -> None:
    """Reserves the disk space of the segment after the current one. Raises OSError, typically for want of space."""
    fd = files.open(epoch_dir / SPARE_NAME, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        files.allocate(fd, size)
        files.sync_data(fd)
    finally:
        files.close(fd)


def create_segment(files: Files, epoch_dir: Path, header: Header, size: int, data: bytes = b"") -> Segment:
    """A durable segment that holds `data`. It gets its name last: a segment that is there is complete. OSError."""
    spare = epoch_dir / SPARE_NAME
    size = max(size, DATA_START + len(data))
    fd = files.open(spare, os.O_RDWR | os.O_CREAT)
    try:
        files.allocate(fd, size)
        files.write_all(fd, encode_header(header), 0)
        if data:
            files.write_all(fd, data, DATA_START)
        segment = Segment(header.segment, epoch_dir / segment_name(header.segment), fd, DATA_START + len(data), size)
        segment.zero_ahead(files)
        files.sync_data(fd)
        files.rename(spare, segment.path)
        files.sync_directory(epoch_dir)
    except OSError:
        files.close(fd)
        remove_spare(files, epoch_dir)  # a later try must not find half of this one's frames
        raise
    return segment


def first_kept(epoch_dir: Path) -> int:
    """The lowest segment number that pruning has left; 1 when nothing was pruned. Others are missing, not pruned."""
    try:
        return int((epoch_dir / PRUNED_NAME).read_text())
    except FileNotFoundError:
        return 1


def remove_spare(files: Files, epoch_dir: Path) -> None:
    with suppress(OSError):
        files.unlink(epoch_dir / SPARE_NAME)


def read_header(epoch_dir: Path, number: int) -> Header:
    """Raises JournalDamaged when the segment is missing or its header does not read."""
    path = epoch_dir / segment_name(number)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise JournalDamaged(f"{path} is missing: restore it from where it went") from None
    try:
        header = decode_header(os.pread(fd, HEADER_BYTES, 0))
    finally:
        os.close(fd)
    if header is None or header.segment != number:
        raise JournalDamaged(f"{path}: the segment header does not read")
    return header
