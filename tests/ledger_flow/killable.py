"""Gateway workers and posters as the real programs, in processes that are cheap to start again after kill −9.

A fork server has imported everything, so a new worker is ready in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.services import PR_SET_PDEATHSIG, free_port

READY_WITHIN_LOOKS = 1_000
"""Looks, and not seconds: whoever stops this whole run for a while does no harm."""
_context = multiprocessing.get_context("forkserver")


class Killable:
    """One process that runs `target(*arguments)`; `kill` is SIGKILL."""

    def __init__(self, name: str, log: Path, target: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        self.kills = 0
        self._log = log
        self._target = target
        self._arguments = arguments
        self._process: BaseProcess | None = None

    def start(self) -> None:
        _context.set_forkserver_preload(["tests.ledger_flow.preloaded"])
        self._process = _context.Process(target=_run, args=(self._log, self._target, self._arguments), daemon=True)
        self._process.start()

    def running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.join()
        self.kills += 1

    def last_words(self) -> str:
        return self._log.read_text()[-2_000:]

    def stop(self) -> None:
        """Ask it to end, and wait until it has."""
        assert self._process is not None
        self._process.terminate()
        self._process.join(30)
        assert not self._process.is_alive()


class GatewayWorker(Killable):
    """`tallygate gateway --slot N` on a port of its own."""

    def __init__(self, config: Path, folder: Path, slot: int) -> None:
        self.port = free_port()
        super().__init__(
            f"gateway {slot}", folder / f"gateway-{slot}.log", serve_gateway, config, folder, slot, self.port
        )

    async def ready(self) -> float:
        """Seconds until it answers."""
        began = time.monotonic()
        url = f"http://127.0.0.1:{self.port}/health/ready"
        for _ in range(READY_WITHIN_LOOKS):
            if await asyncio.to_thread(_answers, url):
                return time.monotonic() - began
            assert self.running(), f"{self.name} ended: {self.last_words()}"
            await asyncio.sleep(0.02)
        raise TimeoutError(f"{self.name} does not get ready: {self.last_words()}")


def poster(config: Path, folder: Path) -> Killable:
    """`tallygate poster`."""
    return Killable("poster", folder / "poster.log", post, config, folder)


def serve_gateway(config: Path, folder: Path, slot: int, port: int) -> None:
    from proxy.preflight import listen

    fd = listen("127.0.0.1", port).detach()
    tallygate("gateway", config, folder, "--slot", str(slot), "--fd", str(fd))


def post(config: Path, folder: Path) -> None:
    tallygate("poster", config, folder)


def tallygate(role: str, config: Path, folder: Path, *options: str) -> None:
    from proxy.cli import main

    sys.argv = ["tallygate", role, "--config", str(config), "--data-dir", str(folder), *options]
    main()


def _run(log: Path, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    target(*arguments)


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False
