"""One `/metrics` for the whole host: each process keeps what it has counted in a file; whoever is asked adds them up.

`data/metrics/<process>.json` is written once a second when something has changed, and before its process answers
`/metrics`: so what was shown once is in a file, and no sum goes back. A process holds `<process>.lock` while it runs.
Who takes a name whose process has ended (`gateway-0` after a crash, a slot that is used again after a roll) goes on
from what is in its file. A process that is killed loses what it counted in its last second.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec
import structlog

from proxy.metrics import Snapshot

log = structlog.get_logger(__name__)

WRITE_S = 1.0


class HostMetrics:
    """The host's numbers, as one of its processes sees and adds to them.

    process: its name, a role or a role and a number (`gateway-0`). own: what it has counted. go_on_from: given, once,
    what a process of that name had counted before.
    """

    def __init__(
        self, directory: Path, process: str, own: Callable[[], Snapshot], go_on_from: Callable[[Snapshot], None]
    ) -> None:
        self._directory = directory
        self._process = process
        self._path = directory / f"{process}.json"
        self._own = own
        self._go_on_from = go_on_from
        self._lock: IO[bytes] | None = None
        self._written = b""
        self._replacing: asyncio.Future[None] | None = None
        """A thread cannot be cancelled with us: it would put its file over a later one."""
        self._writing = asyncio.Lock()
        self._complaint = ""

    async def keep_written(self) -> None:
        while True:
            await self.write()
            await asyncio.sleep(WRITE_S)

    async def write(self) -> bytes:
        """Bring our file up to date; returns what it says. A disk that takes nothing is no reason not to serve."""
        async with self._writing:
            try:
                if self._lock is None:
                    self._take_name()
                await self._under_way()
                body = msgspec.json.encode(self._own())
                if self._lock is not None and body != self._written:
                    self._replacing = asyncio.ensure_future(asyncio.to_thread(self._replace, body))
                    await asyncio.shield(self._replacing)
                    self._written = body
                self._complain("")
            except OSError as error:
                body = msgspec.json.encode(self._own())
                self._complain(str(error))
            return body

    async def read(self) -> tuple[list[Snapshot], dict[str, Snapshot]]:
        """What every process there was has counted, each once; and by name, with their gauges, those that run."""
        own = msgspec.json.decode(await self.write(), type=Snapshot)
        counted, running = await asyncio.to_thread(self._read_others)
        return [own, *counted], dict(sorted({**running, self._process: own}.items()))

    async def close(self) -> None:
        """The last word of this process, once nothing else writes."""
        if self._lock is not None:
            await self.write()
            self._lock.close()
            self._lock = None

    def _take_name(self) -> None:
        """Leaves it for the next time while another has it: it is about to end, or a reader looks whether it runs."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = self._path.with_suffix(".lock").open("ab")
        if not _taken(lock):
            lock.close()
            return
        self._lock = lock
        before = _snapshot_at(self._path)
        if before is not None:
            self._go_on_from(before)

    def _read_others(self) -> tuple[list[Snapshot], dict[str, Snapshot]]:
        counted, running = [], {}
        for path in sorted(self._directory.glob("*.json")):
            if path == self._path and self._lock is not None:
                continue
            snapshot = _snapshot_at(path)
            if snapshot is not None:
                counted.append(snapshot)
                if _runs(path):
                    running[path.stem] = snapshot
        return counted, running

    async def _under_way(self) -> None:
        if self._replacing is not None:
            await asyncio.wait([self._replacing])

    def _replace(self, body: bytes) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(body)
        os.replace(fresh, self._path)

    def _complain(self, complaint: str) -> None:
        if complaint and complaint != self._complaint:
            log.warning("metrics_not_shared", reason=complaint)
        self._complaint = complaint


def forget_ended(directory: Path) -> None:
    """Start again from 0, with what still runs. Call it when nothing of the host is started yet."""
    for path in directory.glob("*.json"):
        if not _runs(path):
            path.unlink(missing_ok=True)


def _snapshot_at(path: Path) -> Snapshot | None:
    """None where there is none that this version can read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except (OSError, msgspec.MsgspecError):
        return None


def _runs(path: Path) -> bool:
    """Whether its process holds its name."""
    try:
        with path.with_suffix(".lock").open("rb") as lock:
            return not _taken(lock, fcntl.LOCK_SH)
    except OSError:
        return False


def _taken(lock: IO[bytes], how: int = fcntl.LOCK_EX) -> bool:
    """Whether the lock is ours from now on, until the file is closed."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
