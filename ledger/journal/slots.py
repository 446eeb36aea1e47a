"""Where journals live, `<journal root>/<slot>/epoch-<number>-<uuid>/`, and the lock that gives one process a slot."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from uuid import uuid4

import msgspec

from ledger.errors import LedgerUnavailable

_EPOCH = re.compile(r"epoch-(\d{6,})-([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})")


class EpochInfo(msgspec.Struct, frozen=True):
    epoch: int
    journal_uuid: str
    path: Path


def epoch_dir_name(epoch: int, journal_uuid: str) -> str:
    return f"epoch-{epoch:06d}-{journal_uuid}"


def list_epochs(slot_dir: Path) -> list[EpochInfo]:
    """The epochs of a slot that are on this disk, oldest first."""
    if not slot_dir.is_dir():
        return []
    found = [(match, path) for path in slot_dir.iterdir() if (match := _EPOCH.fullmatch(path.name))]
    epochs = [EpochInfo(int(match[1]), match[2], path) for match, path in found]
    return sorted(epochs, key=lambda info: (info.epoch, info.journal_uuid))


def list_slots(journal_root: Path) -> list[Path]:
    """The slot directories under a journal root, by number."""
    if not journal_root.is_dir():
        return []
    return sorted((path for path in journal_root.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))


def host_id(journal_root: Path) -> str:
    """The identity of this host's journal volume: made once, kept in `<journal root>/host-id`, moving with it."""
    path = journal_root / "host-id"
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        journal_root.mkdir(parents=True, exist_ok=True)
    draft = journal_root / f".host-id-{uuid4()}"
    with draft.open("w") as file:
        file.write(str(uuid4()) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)  # the first of several processes wins; the others read what it wrote
    except FileExistsError:
        pass
    draft.unlink()
    return path.read_text().strip()


class SlotLock:
    """Exclusive ownership of a slot until `release` or the end of the process. The kernel frees it; no clock does."""

    def __init__(self, slot_dir: Path, fd: int) -> None:
        self.slot_dir = slot_dir
        self._fd: int | None = fd

    @classmethod
    def acquire(cls, slot_dir: Path) -> SlotLock:
        """Raises LedgerUnavailable when another process has the slot or the directory cannot be written."""
        try:
            slot_dir.mkdir(parents=True, exist_ok=True)
            fd = os.open(slot_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise LedgerUnavailable(f"the journal directory {slot_dir} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise LedgerUnavailable(
                f"slot {slot_dir} belongs to process {holder}: stop it first, or start this one on another slot"
            ) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return cls(slot_dir, fd)

    def release(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
