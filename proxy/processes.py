"""One child process: started so that it cannot outlive us, watched, restarted with growing pauses, and stopped in time.

Children stay in our process group. Ctrl-C and a terminal that closes reach the whole group, so SIGINT and SIGHUP are
blocked in children: only the parent decides the order in which they stop.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
STEADY_AFTER_S = 60.0
"""A child that ran this long starts over with the first pause when it dies."""
MAX_LOG_BYTES = 16 * 1024 * 1024
_PR_SET_PDEATHSIG = 1  # Linux, prctl(2)


@dataclass(frozen=True)
class Role:
    """What to run. `log` takes its standard output and error."""

    name: str
    argv: tuple[str, ...]
    log: Path
    pass_fds: tuple[int, ...] = ()
    dies_by: signal.Signals = signal.SIGTERM
    """The signal that it gets from the kernel when we die first."""
    environ: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A role and its current process. `say` receives one line for each crash and restart; on_crash: called when it has
    ended by itself, with an error or a signal."""

    def __init__(self, role: Role, say: Callable[[str], None], on_crash: Callable[[], None] = lambda: None) -> None:
        self.role = role
        self._on_crash = on_crash
        self.exit_code: int | None = None
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Spawn the process. Raises OSError when it cannot be."""
        _rotate(self.role.log)
        with self.role.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.role.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=self.role.pass_fds,
                env={**os.environ, **self.role.environ},
                preexec_fn=_tied_to_parent(self.role.dies_by),
            )

    async def wait(self) -> int:
        """The exit code of the current process, negative for a signal."""
        process = self._process
        assert process is not None, "start first"
        await _exited(process)
        self.exit_code = process.wait()
        return self.exit_code

    async def keep_running(self) -> None:
        """Restart the process whenever it ends, until `stop`."""
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self.wait()
            if self._stopping.is_set():
                return
            if code != 0:
                self._on_crash()
            if time.monotonic() - began > STEADY_AFTER_S:
                pause_s = FIRST_PAUSE_S
            self._say(
                f"{self.role.name} ended ({describe_exit(code)}); restarting in {pause_s:g} s; log: {self.role.log}"
            )
            try:
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            except TimeoutError:
                try:
                    self.start()
                except OSError as error:  # no memory, no room for its log: that may pass, so the next turn tries again
                    self._say(f"{self.role.name} cannot be started: {error}")
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def leave_ended(self) -> None:
        """Whatever ends from now on stays ended: everything is about to stop."""
        self._stopping.set()

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL after `grace_s`. False when it had to be killed."""
        self._stopping.set()
        return await self.end(grace_s)

    async def end(self, grace_s: float) -> bool:
        """As `stop`, of the current process only: `keep_running` starts the next one."""
        process = self._process
        if process is None or process.poll() is not None:
            return True
        process.terminate()
        try:
            await asyncio.wait_for(_exited(process), grace_s)
        except TimeoutError:
            self._say(f"{self.role.name} did not stop within {grace_s:g} s and was killed; log: {self.role.log}")
            process.kill()
            await _exited(process)
            return False
        return True

    async def end_by(self, number: signal.Signals, patience_s: float) -> None:
        """Ask with `number` to end; returns when it has. SIGTERM, then SIGKILL, when it takes longer."""
        self._stopping.set()
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(number)
        try:
            await asyncio.wait_for(_exited(process), patience_s)
        except TimeoutError:
            await self.stop(10.0)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def last_words(self, lines: int = 1) -> str:
        """The end of its log, for a message."""
        try:
            text = self.role.log.read_bytes()[-8192:].decode(errors="replace")
        except OSError:
            return ""
        spoken = [line.strip() for line in text.splitlines() if line.strip()]
        return "\n".join(spoken[-lines:])


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


async def _exited(process: subprocess.Popen[bytes]) -> None:
    """Wait without a thread: through a pidfd where the system has them, else by looking ten times a second."""
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        while process.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    loop.add_reader(handle, resolve, gone)
    try:
        await gone
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    process.poll()


def resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _tied_to_parent(dies_by: signal.Signals) -> Callable[[], None]:
    parent = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not between fork and exec

    def in_child() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(dies_by))
            if os.getppid() != parent:  # it died in between
                os._exit(1)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})

    return in_child


def _rotate(log: Path) -> None:
    """One older file is kept."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
