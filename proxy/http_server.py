"""uvicorn's HTTP protocol with fewer system calls: what is written in one turn of the loop leaves in one piece."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LARGE_BYTES = 64 * 1024
"""Larger parts are not copied together: that would cost more than a system call."""


class MergedWrites:
    """Stands in front of a transport and gathers writes until the loop's next turn; all else goes straight through."""

    __slots__ = ("_loop", "_parts", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if len(parts) > 1 and max(map(len, parts)) <= LARGE_BYTES:
            self._transport.write(b"".join(parts))
        else:
            for part in parts:
                self._transport.write(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GatewayProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=GatewayProtocol)`."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        merged = MergedWrites(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, merged))
