"""A load generator light enough for one core: raw asyncio protocols, closed loop and open loop.

Latency in the open loop is counted from the moment at which a request was meant to be sent, so a server that stalls
cannot hide it by being asked less (coordinated omission).

python -m benchmarks.load --port N --key KEY --connections C --requests R --body JSON     exits with 1 if one fails
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import uvloop


class Result(msgspec.Struct, kw_only=True):
    """Latencies in milliseconds; rates a second."""

    requests: int
    errors: int
    seconds: float
    per_second: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    first_byte_p50_ms: float = 0.0
    first_byte_p99_ms: float = 0.0
    chunks_per_second: float = 0.0
    received_bytes: int = 0
    memory_added_mb: float = 0.0
    cpu_us: float = 0.0
    """Of the server's process, all threads, per request."""


@dataclass(slots=True)
class Sample:
    latencies_s: list[float] = field(default_factory=list)
    first_bytes_s: list[float] = field(default_factory=list)
    chunks: int = 0
    errors: int = 0
    received_bytes: int = 0
    counted_from_s: float = 0.0
    """Requests meant to be sent before this are warm-up."""

    def result(self, seconds: float) -> Result:
        latencies, first = sorted(self.latencies_s), sorted(self.first_bytes_s)
        return Result(
            requests=len(latencies),
            errors=self.errors,
            seconds=round(seconds, 3),
            per_second=round(len(latencies) / seconds, 1),
            p50_ms=quantile_ms(latencies, 0.5),
            p90_ms=quantile_ms(latencies, 0.9),
            p99_ms=quantile_ms(latencies, 0.99),
            max_ms=quantile_ms(latencies, 1.0),
            first_byte_p50_ms=quantile_ms(first, 0.5),
            first_byte_p99_ms=quantile_ms(first, 0.99),
            chunks_per_second=round(self.chunks / seconds, 1),
            received_bytes=self.received_bytes,
        )


def quantile_ms(ordered_s: list[float], q: float) -> float:
    if not ordered_s:
        return 0.0
    return round(ordered_s[min(len(ordered_s) - 1, int(q * len(ordered_s)))] * 1000, 3)


class Client(asyncio.Protocol):
    """One kept-alive connection: `ask` sends the prepared request, `done` is told when its answer is complete."""

    transport: asyncio.Transport

    def __init__(self, request: bytes, done: Callable[[Client, bool], None], sample: Sample) -> None:
        self.request = request
        self.done = done
        self.sample = sample
        self.busy = False
        self.intended_s = self.first_s = 0.0

    def ask(self, intended_s: float | None = None) -> None:
        self.busy = True
        self.intended_s = time.perf_counter() if intended_s is None else intended_s
        self.first_s = 0.0
        self.need = -1
        self.head = b""
        self.tail = b""
        self.chunked = self.failed = False
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.sample.received_bytes += len(data)
        if not self.first_s:
            self.first_s = time.perf_counter()
        if self.need < 0 and not self.chunked:
            data = self._read_head(data)
            if self.need < 0 and not self.chunked:
                return
        if self.chunked:
            self.sample.chunks += data.count(b"data: ")
            self.tail = (self.tail + data)[-5:]
            if self.tail == b"0\r\n\r\n":
                self._finish()
        else:
            self.need -= len(data)
            if self.need <= 0:
                self._finish()

    def _read_head(self, data: bytes) -> bytes:
        self.head += data
        end = self.head.find(b"\r\n\r\n")
        if end < 0:
            return b""
        head, body = self.head[: end + 2].lower(), self.head[end + 4 :]
        self.failed = b" 200 " not in head[:16]
        start = head.find(b"\r\ncontent-length:")
        if start >= 0:
            self.need = int(head[start + 17 : head.find(b"\r\n", start + 2)])
        else:
            self.chunked = True
        return body

    def _finish(self) -> None:
        now = time.perf_counter()
        self.busy = False
        if self.failed:
            self.sample.errors += 1
        elif self.intended_s >= self.sample.counted_from_s:
            self.sample.latencies_s.append(now - self.intended_s)
            self.sample.first_bytes_s.append(self.first_s - self.intended_s)
        self.done(self, not self.failed)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.busy:
            self.busy = False
            self.sample.errors += 1
            self.done(self, False)


def request_bytes(port: int, key: str, body: bytes, headers: Sequence[str] = ()) -> bytes:
    lines = (
        "POST /v1/chat/completions HTTP/1.1",
        f"host: 127.0.0.1:{port}",
        f"authorization: Bearer {key}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *headers,
    )
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


async def connect(make: Callable[[], Client], port: int) -> Client:
    transport, client = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
    client.transport = transport  # uvloop may call connection_made only after this returns
    return client


async def closed_loop(
    port: int,
    request: bytes,
    connections: int,
    seconds: float,
    warmup_s: float = 0.5,
    warm: Callable[[], None] = lambda: None,
) -> Result:
    """Each connection sends its next request as soon as the last is answered. `warm` is called when counting begins."""
    sample, finished = Sample(), asyncio.Event()
    stop_at = time.perf_counter() + warmup_s + seconds
    active = connections

    def done(client: Client, _ok: bool) -> None:
        nonlocal active
        if time.perf_counter() < stop_at and not client.transport.is_closing():
            client.ask()
            return
        active -= 1
        if not active:
            finished.set()

    clients = []
    for _ in range(connections):
        clients.append(await connect(lambda: Client(request, done, sample), port))
    for client in clients:
        client.ask()
    await asyncio.sleep(warmup_s)
    warm()
    started = time.perf_counter()
    for name in ("latencies_s", "first_bytes_s"):
        getattr(sample, name).clear()
    sample.chunks = sample.errors = sample.received_bytes = 0
    await asyncio.wait_for(finished.wait(), seconds + 60)
    result = sample.result(time.perf_counter() - started)
    for client in clients:
        client.transport.close()
    return result


async def so_many(port: int, request: bytes, connections: int, requests: int) -> Result:
    """A closed loop that ends after so many requests."""
    sample, finished = Sample(), asyncio.Event()
    asked = answered = 0

    def go_on(client: Client) -> None:
        nonlocal asked
        if asked < requests:
            asked += 1
            client.ask()

    def done(client: Client, _ok: bool) -> None:
        nonlocal answered
        answered += 1
        go_on(client)
        if answered == requests:
            finished.set()

    clients = [await connect(lambda: Client(request, done, sample), port) for _ in range(connections)]
    started = time.perf_counter()
    for client in clients:
        go_on(client)
    await asyncio.wait_for(finished.wait(), 60)
    result = sample.result(time.perf_counter() - started)
    for client in clients:
        client.transport.close()
    return result


async def open_loop(
    port: int, request: bytes, per_second: float, seconds: float, warmup_s: float = 0.5, max_connections: int = 256
) -> Result:
    """Requests leave on a fixed timetable over connections that take turns; one that finds none free waits, and its
    waiting is counted. What opening the connections costs the server is over before the first counted request."""
    sample = Sample()
    waiting: deque[float] = deque()
    idle: deque[Client] = deque()
    outstanding, finished, sending = 0, asyncio.Event(), True

    def done(client: Client, _ok: bool) -> None:
        nonlocal outstanding
        outstanding -= 1
        if waiting and not client.transport.is_closing():
            client.ask(waiting.popleft())
        elif not client.transport.is_closing():
            idle.append(client)
        if not outstanding and not sending:
            finished.set()

    for _ in range(max_connections):
        idle.append(await connect(lambda: Client(request, done, sample), port))
    clients = list(idle)
    await asyncio.sleep(0.25)
    started = time.perf_counter() + 0.05
    sample.counted_from_s = started + warmup_s
    for number in range(int(per_second * (warmup_s + seconds))):
        due = started + number / per_second
        delay = due - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        outstanding += 1
        while idle and idle[0].transport.is_closing():  # kept alive for too long
            idle.popleft()
        if idle:
            idle.popleft().ask(due)
        else:
            waiting.append(due)
    sending = False
    if outstanding:
        await asyncio.wait_for(finished.wait(), 60)
    result = sample.result(time.perf_counter() - sample.counted_from_s)
    for client in clients:
        client.transport.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--port", "--connections", "--requests"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--body", required=True)
    arguments = parser.parse_args()
    request = request_bytes(arguments.port, arguments.key, arguments.body.encode())
    result = uvloop.run(so_many(arguments.port, request, arguments.connections, arguments.requests))
    sys.exit(result.errors > 0)


if __name__ == "__main__":
    main()
