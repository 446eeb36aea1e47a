"""The bytes of one response of the fake provider: head, framing, encoding, packets, and where they break."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from tests.upstream.faults import Fault


class Client(Protocol):
    """The other end of a connection. Writing and pausing raise when it is gone."""

    async def write(self, data: bytes) -> None: ...

    async def pause(self, ms: float) -> None: ...

    def close(self) -> None: ...


class BodyWriter:
    """One response: head, parts, end, with the wanted framing, encoding and packets."""

    def __init__(
        self, client: Client, fault: Fault, headers: dict[str, str], *, size: int | None = None, status: int = 0
    ) -> None:
        self._client = client
        self._fault = fault
        self._status = status or fault.status
        framing = "length" if size is not None and fault.framing == "chunked" else fault.framing
        if size is None and (fault.length_error or framing == "length"):
            size, framing = 1_000_000 if fault.length_error >= 0 else 60, "length"
        if status == 204:
            size = None
        self._deflate = _encoder(fault.encoding)
        if self._deflate is not None and framing == "length":
            framing = "chunked"
        self._chunked = framing == "chunked" and status != 204
        self._headers = {**headers, **fault.headers}
        encoding = {"gzip": "gzip", "deflate": "deflate", "raw-deflate": "deflate", "br-lie": "br"}.get(fault.encoding)
        if encoding:
            self._headers["content-encoding"] = encoding
        if self._chunked:
            self._headers["transfer-encoding"] = "chunked"
        elif framing == "length" and size is not None:
            self._headers["content-length"] = str(size + fault.length_error)
        self._closes = framing == "close" or bool(fault.length_error) or not fault.keep_alive
        self._closes = self._closes or (framing == "length" and size == 1_000_000)
        if self._closes:
            self._headers["connection"] = "close"

    async def head(self) -> None:
        lines = [f"HTTP/1.1 {self._status} X", *(f"{name}: {value}" for name, value in self._headers.items())]
        data = "\r\n".join([*lines, "", ""]).encode()
        if not self._fault.headers_trickle_ms:
            await self._client.write(data)
            return
        for i in range(len(data)):
            await self._client.write(data[i : i + 1])
            await self._client.pause(self._fault.headers_trickle_ms)

    async def part(self, data: bytes) -> None:
        if data and self._deflate is not None:
            data = self._deflate(data, False)
        await self._packets(data)

    async def end(self) -> None:
        if self._deflate is not None:
            await self._packets(self._deflate(b"", True))
        if self._chunked:
            await self._client.write(b"0\r\n\r\n")
        if self._closes:
            self._client.close()

    async def _packets(self, data: bytes) -> None:
        for packet in _cut(data, self._fault.packet_bytes):
            await self._client.write(b"%x\r\n%b\r\n" % (len(packet), packet) if self._chunked else packet)
            if self._fault.packet_bytes:
                await self._client.pause(0)


def _cut(data: bytes, size: int) -> Iterator[bytes]:
    if not data:
        return
    if not size:
        yield data
        return
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _encoder(encoding: str) -> Callable[[bytes, bool], bytes] | None:
    if encoding in ("identity", "br-lie"):
        return None
    compressor = zlib.compressobj(wbits={"gzip": 31, "deflate": 15, "raw-deflate": -15}[encoding])

    def encode(data: bytes, last: bool) -> bytes:
        return compressor.compress(data) + compressor.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)

    return encode
