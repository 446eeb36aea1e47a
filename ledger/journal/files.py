"""The operating-system calls of the journal, in one object, so that tests can make each of them fail or be the last."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path


class Files:
    """Plain system calls; every method raises OSError as the system does. Subclass it to inject faults."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o640)

    def close(self, fd: int) -> None:
        os.close(fd)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """May write less than all, as the system may: `write_all` goes on."""
        return os.pwrite(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        """Reserves the blocks of [0, size): a later write there cannot run out of space."""
        if sys.platform != "darwin":
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
            else:
                return
        missing = size - os.fstat(fd).st_size
        while missing > 0:
            missing -= os.pwrite(fd, bytes(min(missing, 1 << 20)), size - missing)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync_data(self, fd: int) -> None:
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # its fsync leaves the data in the drive's cache
        else:
            os.fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def free_bytes(self, path: Path) -> int:
        """What an ordinary user may still write on the file system of `path`."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize

    def write_all(self, fd: int, data: bytes, offset: int) -> None:
        written = self.pwrite(fd, data, offset)
        while written < len(data):
            more = self.pwrite(fd, data[written:], offset + written)
            if more == 0:
                raise OSError(errno.ENOSPC, "the file takes no more bytes")
            written += more
