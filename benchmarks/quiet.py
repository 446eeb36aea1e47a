"""A thousand streams that are mostly silent, at once: does each get its signs of life, and what memory do they take?"""

from __future__ import annotations

import asyncio
import time
from typing import cast

import msgspec

from benchmarks.load import quantile_ms
from benchmarks.processes import Process

OPENED_PER_SECOND = 250
KEEP_ALIVE_S = 10.0
"""The gateway's promise (`proxy.relay.QUIET_S`): no silence is longer."""
LATE_S = 1.0


class QuietResult(msgspec.Struct, kw_only=True):
    streams: int
    errors: int
    first_byte_p50_ms: float
    first_byte_p99_ms: float
    longest_silence_s: float
    keep_alives: int
    missed_keep_alives: int
    memory_added_mb: float


class Listener(asyncio.Protocol):
    """One stream: sends its request at once and notes when something came."""

    def __init__(self, request: bytes, ended: asyncio.Event) -> None:
        self.request = request
        self.ended = ended
        self.first_byte_s = 0.0
        self.silences_s: list[float] = []
        self.keep_alives = 0
        self.head = b""
        self.tail = b""
        self.complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.asked_s = self.heard_s = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self.first_byte_s:
            self.silences_s.append(now - self.heard_s)
        else:
            self.first_byte_s = now - self.asked_s
        self.heard_s = now
        if b"\r\n\r\n" not in self.head:  # a head may end like a body: `…: 0` and an empty line
            self.head += data
            data = self.head.partition(b"\r\n\r\n")[2]
        self.keep_alives += data.count(b"\n: ") + data.count(b"\n:\n")
        self.tail = (self.tail + data)[-64:]
        if self.tail.endswith(b"0\r\n\r\n"):
            self.complete = b"[DONE]" in self.tail
            self.ended.set()
            self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set()


async def quiet_streams(port: int, request: bytes, count: int, process: Process) -> QuietResult:
    """Open `count` streams, wait for all to end; `process` is the worker that holds them."""
    before_mb = process.memory_mb()
    process.forget_peak()
    loop = asyncio.get_running_loop()
    listeners = [Listener(request, asyncio.Event()) for _ in range(count)]
    for listener in listeners:
        await loop.create_connection(lambda listener=listener: listener, "127.0.0.1", port)  # type: ignore[misc]
        await asyncio.sleep(1 / OPENED_PER_SECOND)
    await asyncio.wait_for(asyncio.gather(*(listener.ended.wait() for listener in listeners)), 120)
    first = sorted(listener.first_byte_s for listener in listeners if listener.first_byte_s)
    silences = [silence for listener in listeners for silence in listener.silences_s]
    return QuietResult(
        streams=count,
        errors=sum(not listener.complete for listener in listeners),
        first_byte_p50_ms=quantile_ms(first, 0.5),
        first_byte_p99_ms=quantile_ms(first, 0.99),
        longest_silence_s=round(max(silences, default=0.0), 2),
        keep_alives=sum(listener.keep_alives for listener in listeners),
        missed_keep_alives=sum(silence > KEEP_ALIVE_S + LATE_S for silence in silences),
        memory_added_mb=round(process.peak_memory_mb() - before_mb, 1),
    )
