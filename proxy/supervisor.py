"""All processes of one machine: the local backend, the poster and the gateway workers, started, watched and stopped.

SIGHUP replaces the gateway workers one by one, with the configuration as it is then, and restarts the poster. No
request is lost by it: a worker is only asked to end when another one serves in its place, and it ends when it has
answered everything; what is settled while there is no poster waits in the journals.

Stop order: gateways first (they drain their requests while the backend still answers), then the poster (it empties the
journal), then the backend. Everything is gone STOPPING_S after `server.drain_s`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.host_metrics import HostMetrics, forget_ended
from proxy.metrics import Snapshot
from proxy.preflight import StartRefused
from proxy.probe import get_json
from proxy.processes import Child, Role, describe_exit, resolve
from proxy.settings import Settings, SettingsError

STOPPING_S = 4.5
"""How long a stop may take beside the drain: settling what was cut, leases, journals."""
AFTER_GATEWAYS_S = 2.5
"""How much of that is kept for the poster and the backend."""
NOTICE_WITHIN_S = 5.0
"""How long gateways may take to notice that the backend is there."""
REPLACEMENT_WITHIN_S = 60.0
"""How long a new worker may take until it serves, before the old one is left in its place."""
DRAIN_SIGNAL = signal.SIGUSR1
"""Tells a worker that it was replaced."""
DRAIN_S = 900.0
"""How long a replaced worker may go on: longer than any request lasts (60 s for a place and 120 s for an answer at each
deployment, with pauses between the pieces of a stream)."""
POSTER_GRACE_S = 30.0
"""How long a poster that is to be restarted may empty the journals."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What this machine runs."""

    settings: Settings
    arguments: tuple[str, ...]
    """`--config` and the other options that every role gets, so that all read the same settings."""
    listener: socket.socket
    backend_port: int | None
    """None: no local backend."""
    read_again: Callable[[], Settings]
    """Reads the configuration as it is now. Raises SettingsError."""

    @property
    def configured(self) -> bool:
        """Whether there is a configuration file."""
        return "--config" in self.arguments

    @property
    def backend_url(self) -> str | None:
        backend = self.settings.backend
        if backend is None:
            return None
        return backend.url or f"http://{backend.host}:{self.backend_port}/v1"

    @property
    def address(self) -> tuple[str, int]:
        """Where this machine itself reaches the gateway."""
        host, port = self.listener.getsockname()[:2]
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port

    def gateways(self) -> list[Role]:
        return [self.gateway(slot) for slot in range(self.settings.server.workers)]

    def gateway(self, slot: int, ready_fd: int | None = None) -> Role:
        """ready_fd: a pipe to which it writes once it serves; until then it takes no connection."""
        ready = () if ready_fd is None else ("--ready-fd", str(ready_fd))
        fd = self.listener.fileno()
        return Role(
            f"gateway {slot}",
            (
                *_tallygate("gateway"),
                *self.arguments,
                *self._backend_option,
                "--slot",
                str(slot),
                "--fd",
                str(fd),
                *ready,
            ),
            self._log(f"gateway-{slot}"),
            pass_fds=(fd,) if ready_fd is None else (fd, ready_fd),
        )

    def poster(self) -> Role:
        argv = (*_tallygate("poster"), *self.arguments, *self._backend_option)
        return Role("poster", argv, self._log("poster"))

    @property
    def _backend_option(self) -> tuple[str, ...]:
        return () if self.backend_url is None else ("--backend-url", self.backend_url)

    def backend(self) -> Role | None:
        if self.backend_port is None:
            return None
        arguments = backend_arguments(self.settings, self.backend_port)
        argv = (sys.executable, "-P", "-m", "backend", *arguments)
        return Role("backend", argv, self._log("backend"), dies_by=signal.SIGKILL)

    def _log(self, name: str) -> Path:
        return self.settings.data_dir / "logs" / f"{name}.log"


def _tallygate(command: str) -> tuple[str, ...]:
    return (sys.executable, "-P", "-m", "proxy.cli", command)


def backend_arguments(settings: Settings, port: int) -> list[str]:
    """The command line of `python -m backend` for these settings."""
    backend = settings.backend
    assert backend is not None, "no backend is configured"
    served = dict.fromkeys(
        deployment.model or name
        for name, model in settings.models.items()
        for deployment in model.deployments
        if deployment.to == "backend"
    )
    arguments = ["--target", backend.target]
    for name, model in backend.drafts.items():
        arguments += ["--draft", f"{name}={model}"]
    for name in served:
        arguments += ["--served-model", name]
    arguments += ["--max-batch", str(backend.max_batch), "--device", backend.device, "--dtype", backend.dtype]
    return [*arguments, "--host", backend.host, "--port", str(port), "--data-dir", str(settings.data_dir)]


class Supervisor:
    """`start`, then `watch` until a signal, then `stop`. `say` gets what a person should read, one line at a time."""

    def __init__(self, plan: Plan, say: Say) -> None:
        self.plan = plan
        self.stop_requested = asyncio.Event()
        self._say = say
        self._drain_s = plan.settings.server.drain_s
        self._crashes: Counter[str] = Counter()
        self._gateways = dict(enumerate(self._child(role) for role in plan.gateways()))
        """By slot."""
        self._leaving: dict[int, Child] = {}
        """Slots whose worker has been replaced and still answers what it had."""
        self._roll_requested = asyncio.Event()
        self._poster = self._child(plan.poster())
        role = plan.backend()
        self._backend = None if role is None else self._child(role)
        self._watchers: set[asyncio.Task[None]] = set()
        self._metrics = HostMetrics(
            plan.settings.metrics_dir,
            "supervisor",
            lambda: Snapshot(crashes=self._crashes),
            lambda before: self._crashes.update(before.crashes),
        )

    def _child(self, role: Role) -> Child:
        name = role.name.partition(" ")[0]
        return Child(role, self._say, lambda: self._crashes.update([name]))

    @property
    def children(self) -> list[Child]:
        backend = [] if self._backend is None else [self._backend]
        return [*backend, self._poster, *self._gateways.values()]

    def listen_for_signals(self) -> None:
        """The first SIGTERM or SIGINT asks for a stop, a second one kills what is left. SIGHUP replaces the workers;
        where there is a terminal it means that it has gone, and so a stop; under `nohup` it means nothing."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            on_terminal = sys.stdin is not None and sys.stdin.isatty()
            loop.add_signal_handler(signal.SIGHUP, self._on_signal if on_terminal else self._roll_requested.set)

    def _on_signal(self) -> None:
        if not self.stop_requested.is_set():
            self.stop_requested.set()
            return
        for child in (*self.children, *self._leaving.values()):
            child.kill()

    async def start(self, prepare: Callable[[], Awaitable[None]], progress: Say) -> bool:
        """Start all and wait until the first request can be answered. False when a stop was requested meanwhile.

        The backend, which takes longest, loads while `prepare` readies the ledger; the others start after that. Raises
        what `prepare` raises, and StartRefused when a child ends; nothing is left running then.
        """
        forget_ended(self.plan.settings.metrics_dir)
        try:
            if self._backend is not None:
                self._backend.start()
            await prepare()
            for child in (self._poster, *self._gateways.values()):
                child.start()
            ready = asyncio.ensure_future(self._ready(progress))
            stopped = asyncio.ensure_future(self.stop_requested.wait())
            ended = [asyncio.ensure_future(self._ends(child)) for child in self.children]
            try:
                await asyncio.wait([ready, stopped, *ended], return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    if task.done():
                        task.result()
                if ready.done():
                    ready.result()
                    return not self.stop_requested.is_set()
                return False
            finally:
                for waiting in (ready, stopped, *ended):
                    waiting.cancel()
        except BaseException:
            await self.stop(drain=False)
            raise

    async def _ends(self, child: Child) -> None:
        code = await child.wait()
        words = child.last_words()
        raise StartRefused(
            f"{child.role.name} ended while starting ({describe_exit(code)})"
            + (f": {words}" if words else "")
            + f"; its log is {child.role.log}"
        )

    async def _ready(self, progress: Say) -> None:
        host, port = self.plan.address
        gateway = f"http://{_bracketed(host)}:{port}"
        progress("starting the gateway")
        while (await get_json(f"{gateway}/health/live"))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        if self._backend is None:
            return
        await self._backend_ready(progress)
        until = time.monotonic() + NOTICE_WITHIN_S
        while (await get_json(f"{gateway}/health/ready"))[0] != 200 and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def _backend_ready(self, progress: Say) -> None:
        root = (self.plan.backend_url or "").removesuffix("/v1")
        progress("starting the backend")
        while True:
            status, body = await get_json(f"{root}/health")
            if status == 200:
                return
            if status:
                progress(_describe_loading(body))
            await asyncio.sleep(0.2)

    def watch(self) -> None:
        """From now on a child that ends is restarted, and SIGHUP is answered."""
        for child in self.children:
            self._watch(child.keep_running())
        self._watch(self._answer_rolls())
        self._watch(self._metrics.keep_written())

    def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _answer_rolls(self) -> None:
        while True:
            await self._roll_requested.wait()
            self._roll_requested.clear()
            await self.roll()

    async def roll(self) -> None:
        """Replace the gateway workers one by one, then the poster. Stops at the first that cannot be replaced; the old
        ones go on."""
        try:
            drain_s = self.plan.read_again().server.drain_s
        except SettingsError as error:
            self._say("the workers are not replaced: the configuration is wrong\n" + "\n".join(error.lines))
            return
        self._drain_s = max(self._drain_s, drain_s)
        olds = list(self._gateways.items())
        for done, (slot, old) in enumerate(olds, 1):
            new_slot = self._free_slot()
            new = await self._start_replacement(new_slot)
            if new is None:
                return
            del self._gateways[slot]
            self._gateways[new_slot] = new
            self._leaving[slot] = old
            self._watch(new.keep_running())
            self._watch(self._leave(slot, old))
            self._say(f"gateway {slot} is replaced by gateway {new_slot} ({done} of {len(olds)})")
        self._say("the poster is restarted with the configuration as it is now")
        await self._poster.end(POSTER_GRACE_S)

    def _free_slot(self) -> int:
        """The lowest that no worker has; the journal of one that ended is found and recovered by the next."""
        taken = self._gateways.keys() | self._leaving.keys()
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    async def _start_replacement(self, slot: int) -> Child | None:
        """A worker that serves; None, with a line that says why, when it does not come to that."""
        reader, writer = os.pipe()
        new = self._child(self.plan.gateway(slot, writer))
        try:
            try:
                new.start()
            except OSError as error:
                self._say(f"the workers are not replaced: gateway {slot} cannot be started: {error}")
                return None
            finally:
                os.close(writer)
            if await _readable(reader, REPLACEMENT_WITHIN_S) and os.read(reader, 1):
                new.role = self.plan.gateway(slot)  # if it ends one day, its successor replaces nobody
                return new
        except BaseException:  # we are told to stop
            new.kill()
            raise
        finally:
            os.close(reader)
        self._say(f"the workers are not replaced: gateway {slot} does not serve: {new.last_words()}; {new.role.log}")
        await new.stop(2.0)
        return None

    async def _leave(self, slot: int, old: Child) -> None:
        await old.end_by(DRAIN_SIGNAL, DRAIN_S + 10.0)
        del self._leaving[slot]

    @property
    def stop_within_s(self) -> float:
        return self._drain_s + STOPPING_S

    async def stop(self, *, drain: bool = True) -> None:
        """Drain, if there is anything to, and stop everything."""
        drain_s = self._drain_s if drain else 0
        deadline = time.monotonic() + drain_s + STOPPING_S

        def left(kept_for_later: float = 0.0) -> float:
            return max(0.1, deadline - time.monotonic() - kept_for_later)

        for child in self.children:
            child.leave_ended()
        for watcher in self._watchers:
            watcher.cancel()
        gateways = [*self._gateways.values(), *self._leaving.values()]
        await asyncio.gather(*(gateway.stop(left(AFTER_GATEWAYS_S)) for gateway in gateways))
        await asyncio.gather(
            self._poster.stop(left()),
            *([] if self._backend is None else [self._backend.stop(left())]),
        )
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self._metrics.close()


async def _readable(fd: int, timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, resolve, came)
    try:
        await asyncio.wait_for(came, timeout_s)
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _describe_loading(body: object) -> str:
    """The backend says how far it is: {"status": "loading", "progress": "converting …"}, as far as it does."""
    if isinstance(body, dict):
        for name in ("progress", "detail", "message", "status"):
            value = body.get(name)
            if isinstance(value, str) and value:
                return f"backend: {value}"
    return "backend: loading the model"
