"""Whether the journal can take on new requests: asked before each admission, so that nothing is lost when it cannot."""

from __future__ import annotations

import time
from pathlib import Path

from ledger.journal.files import Files

BACKLOG_LIMIT_FRAMES = 5_000_000
UNSYNCED_LIMIT_BYTES = 64 << 20
SYNC_LIMIT_S = 10.0
_DISK_CHECK_S = 1.0


class Health:
    """Facts that the writer notes here, and the sentence that follows from them."""

    def __init__(self, files: Files, path: Path, segment_bytes: int) -> None:
        self.failure: str | None = None
        """The journal has stopped for good: nothing can be recorded until it is opened again."""
        self.position_problem: str | None = None
        self.spare_problem: str | None = None
        self.backlog_frames = 0
        self.backlog_limit_frames = BACKLOG_LIMIT_FRAMES
        self.unsynced_bytes = 0
        self.work_since: float | None = None
        self.reserve_bytes = 4 * segment_bytes
        self._files = files
        self._path = path
        self._disk_checked = 0.0
        self._disk_problem: str | None = None

    def reason(self) -> str | None:
        now = time.monotonic()
        if self.failure is not None:
            return self.failure
        if self.work_since is not None and now - self.work_since > SYNC_LIMIT_S:
            return f"the journal's disk has not answered for {now - self.work_since:.0f} s"
        if self.unsynced_bytes > UNSYNCED_LIMIT_BYTES:
            return f"the journal's disk is behind by {self.unsynced_bytes >> 20} MiB"
        if self.backlog_frames > self.backlog_limit_frames:
            return (
                f"{self.backlog_frames} journal records wait to be posted: is the database up and the poster running?"
            )
        if now - self._disk_checked > _DISK_CHECK_S:
            self._disk_checked = now
            self._disk_problem = self._check_disk()
        return self.spare_problem or self.position_problem or self._disk_problem

    def _check_disk(self) -> str | None:
        try:
            free = self._files.free_bytes(self._path)
        except OSError as error:
            return f"the journal's disk does not answer: {error}"
        if free >= self.reserve_bytes:
            return None
        return (
            f"the journal's disk has {free >> 20} MiB free and needs {self.reserve_bytes >> 20} MiB: "
            f"free space on the file system of {self._path}"
        )
