"""All processes of one machine: the local backend, the poster and the gateway workers, started, watched and stopped.

Stop order: gateways first (they drain their requests while the backend still answers), then the poster (it empties the
journal), then the backend. Everything is gone within STOP_WITHIN_S.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from proxy.preflight import StartRefused
from proxy.probe import get_json
from proxy.processes import Child, Role, describe_exit
from proxy.settings import Settings

STOP_WITHIN_S = 9.5
NOTICE_WITHIN_S = 5.0
"""How long gateways may take to notice that the backend is there."""
_GATEWAY_SHARE_S = 7.0
_POSTER_SHARE_S = 1.8
_BACKEND_SHARE_S = 0.7

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
        backend = () if self.backend_url is None else ("--backend-url", self.backend_url)
        fd = self.listener.fileno()
        return [
            Role(
                f"gateway {slot}",
                (*_tallygate("gateway"), *self.arguments, *backend, "--slot", str(slot), "--fd", str(fd)),
                self._log(f"gateway-{slot}"),
                pass_fds=(fd,),
            )
            for slot in range(self.settings.server.workers)
        ]

    def poster(self) -> Role:
        return Role("poster", (*_tallygate("poster"), *self.arguments), self._log("poster"))

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
        self._gateways = [Child(role, say) for role in plan.gateways()]
        self._poster = Child(plan.poster(), say)
        role = plan.backend()
        self._backend = None if role is None else Child(role, say)
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def children(self) -> list[Child]:
        backend = [] if self._backend is None else [self._backend]
        return [*backend, self._poster, *self._gateways]

    def listen_for_signals(self) -> None:
        """The first SIGTERM, SIGINT or SIGHUP asks for a stop; a second one kills what is left."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if not self.stop_requested.is_set():
            self.stop_requested.set()
            return
        for child in self.children:
            child.kill()

    async def start(self, prepare: Callable[[], Awaitable[None]], progress: Say) -> bool:
        """Start all and wait until the first request can be answered. False when a stop was requested meanwhile.

        The backend, which takes longest, loads while `prepare` readies the ledger; the others start after that. Raises
        what `prepare` raises, and StartRefused when a child ends; nothing is left running then.
        """
        try:
            if self._backend is not None:
                self._backend.start()
            await prepare()
            for child in (self._poster, *self._gateways):
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
            await self.stop(grace_s=2.0)
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
        """From now on a child that ends is restarted."""
        self._watchers = [asyncio.ensure_future(child.keep_running()) for child in self.children]

    async def stop(self, grace_s: float = STOP_WITHIN_S) -> None:
        """Drain and stop everything within `grace_s`."""
        deadline = time.monotonic() + grace_s
        share = grace_s / STOP_WITHIN_S

        def left(seconds: float, kept_for_later: float = 0.0) -> float:
            return max(0.1, min(seconds * share, deadline - time.monotonic() - kept_for_later * share))

        for child in self.children:
            child.leave_ended()
        later = _POSTER_SHARE_S + _BACKEND_SHARE_S
        await asyncio.gather(*(gateway.stop(left(_GATEWAY_SHARE_S, later)) for gateway in self._gateways))
        await asyncio.gather(
            self._poster.stop(left(STOP_WITHIN_S)),
            *([] if self._backend is None else [self._backend.stop(left(STOP_WITHIN_S))]),
        )
        for watcher in self._watchers:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher


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
