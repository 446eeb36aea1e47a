"""Start, pin and measure the processes of a benchmark."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

GATEWAY_CORE, LOAD_CORE = 0, 1


def pin_here(core: int) -> None:
    """Pin this process, where the machine has more than one core."""
    if (os.cpu_count() or 1) > 1:
        os.sched_setaffinity(0, {core})


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Process:
    """A process on one core, stopped when the block ends: ours in Python, or another `program`.

    ready: the port that it answers on. environment: what is added to ours.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        core: int,
        log: Path,
        ready: int | None = None,
        *,
        program: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        ready_within_s: float = 60.0,
    ) -> None:
        self.arguments = [program, *arguments]
        self.core = core
        self.log = log
        self.ready = ready
        self.ready_s = 0.0
        self._environment = {**os.environ, **(environment or {})}
        self._ready_within_s = ready_within_s

    def __enter__(self) -> Self:
        started = time.perf_counter()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.arguments,
                stdout=log,
                stderr=log,
                env=self._environment,
                preexec_fn=lambda: pin_here(self.core),
            )
        while self.ready is not None and not answers(self.ready):
            if self.process.poll() is not None or time.perf_counter() - started > self._ready_within_s:
                self.process.kill()
                raise RuntimeError(f"{' '.join(self.arguments)} did not start:\n{self.log.read_text()[-2000:]}")
            time.sleep(0.01)
        self.ready_s = time.perf_counter() - started
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def memory_mb(self) -> float:
        """Resident memory now, in MB; 0 where /proc is not there."""
        return self._status("VmRSS:")

    def peak_memory_mb(self) -> float:
        """The most it had since `forget_peak`."""
        return self._status("VmHWM:")

    def forget_peak(self) -> None:
        """Let the peak begin anew, where the system can."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def cpu_s(self) -> float:
        """User and system seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _status(self, name: str) -> float:
        try:
            lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        except OSError:
            return 0.0
        return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name)), 0.0)


def answers(port: int) -> bool:
    """Whether an HTTP server there answers at all; an open port alone may belong to one that is still starting."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
            probe.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            return probe.recv(16).startswith(b"HTTP/1.1 ")
    except OSError:
        return False
