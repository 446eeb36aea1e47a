"""uvicorn's server with two ways to end: soon, with `server.drain_s` for what runs (SIGTERM), or when all is answered
(SIGUSR1).

The second is for a worker that another has replaced: it takes no new connections, answers what runs and what still
comes on the connections that it has, says `connection: close` with each answer, and is gone when the last is closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import cast

import uvicorn

from proxy.http_server import GatewayProtocol
from proxy.supervisor import DRAIN_S, DRAIN_SIGNAL, STOPPING_S


class GatewayServer(uvicorn.Server):
    """`run` it. on_listening: called once connections are accepted. drain_s: how long running requests may go on after
    SIGTERM."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None], drain_s: int) -> None:
        super().__init__(config)
        config.timeout_graceful_shutdown = drain_s
        self._gone_after_s = drain_s + STOPPING_S
        self._on_listening = on_listening
        self._draining = False
        self._hurried = False

    def listen_for_signals(self) -> None:
        """Call it before `run`, which takes SIGTERM and SIGINT itself."""
        signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more at the end: then end with code 0
        signal.signal(DRAIN_SIGNAL, self._on_drain)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._draining and not self._hurried:
            await self._drain(sockets or [])
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A SIGTERM is also a promise to be gone soon, however stuck something is: the journal makes that safe."""
        self._hurried = True
        timer = threading.Timer(self._gone_after_s, os._exit, (1,))
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)

    def _on_drain(self, sig: int, frame: FrameType | None) -> None:
        self._draining = True
        self.should_exit = True

    async def _drain(self, sockets: list[socket.socket]) -> None:
        for server in self.servers:
            server.close()
        for sock in sockets:
            sock.close()
        for connection in list(self.server_state.connections):
            cast(GatewayProtocol, connection).drain()
        deadline = asyncio.get_running_loop().time() + DRAIN_S
        while self.server_state.connections and not self._hurried:
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(0.05)
