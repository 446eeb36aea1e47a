"""A small HTTP/1.1 client for the hot path: one exchange at a time on a connection, kept alive, closed when we stop.

Why our own: when a client hangs up, the generation must stop within 100 ms. Cancelling a pyreqwest 0.15 request leaves
its connection open (and the upstream generating) until the server is done; here `Response.close()` closes the socket.
It also costs less per request. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from typing import cast

import httptools

MAX_HEADER_BYTES = 64 * 1024
HIGH_WATER_BYTES = 256 * 1024
"""Reading from the upstream pauses while this much waits for a slow client."""
IDLE_SECONDS = 4.0
"""Below the keep-alive of common servers (uvicorn and node: 5 s): a request seldom meets a closing connection."""

STALE_WITHIN_S = 1.0
"""A server that had closed a kept connection before we wrote to it says so within a round trip."""


class ConnectFailed(Exception):
    """No connection: nothing was sent, so another try costs nothing."""


class ConnectTimedOut(ConnectFailed):
    """No connection within the time allowed."""


class ConnectionLost(Exception):
    """The connection broke, or spoke something else than HTTP/1.1, before the answer was complete."""


class Response:
    """One answer as it arrives. `status` is 0 until its header section is complete; header names are lower case."""

    __slots__ = (
        "_buffered",
        "_chunks",
        "_connection",
        "_discarding",
        "_lost",
        "_waiter",
        "complete",
        "headers",
        "keep_alive",
        "status",
        "touched",
    )

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.touched = False
        """Whether one byte of it has come."""
        self.complete = False
        self.keep_alive = False
        self._connection = connection
        self._waiter: asyncio.Future[None] | None = None
        self._lost: ConnectionLost | None = None
        self._discarding = False
        self._chunks: list[bytes] = []
        self._buffered = 0

    async def head(self) -> None:
        """Wait for the status and the header fields. Raises ConnectionLost."""
        while not self.status:
            if self._lost is not None:
                raise self._lost
            await self._wait()

    async def chunk(self) -> bytes:
        """What has arrived since the last call, as it came; b"" at the end. Raises ConnectionLost when cut short."""
        while not self._chunks:
            if self.complete:
                return b""
            if self._lost is not None:
                raise self._lost
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        if self._buffered > HIGH_WATER_BYTES:
            self._connection.resume()
        self._buffered = 0
        return data

    def close(self) -> None:
        """Stop now: an answer that is not complete takes its connection with it."""
        if not self.complete:
            self._connection.abort()

    def leave(self, seconds: float = 1.0) -> None:
        """All that matters was read: let the rest arrive unread, so that the connection can be kept."""
        if not self.complete and not self._discarding:
            self._discarding = True
            self._connection.loop.call_later(seconds, self.close)

    @property
    def bounded(self) -> bool:
        """Whether the end of the body can be told from a broken connection."""
        return b"content-length" in self.headers or b"transfer-encoding" in self.headers or self.status in (204, 304)

    def put(self, body: bytes) -> None:
        """A piece of the body has come."""
        if self._discarding:
            return
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > HIGH_WATER_BYTES:
            self._connection.pause()

    def lose(self, message: str) -> None:
        """The connection is gone; only a body without a length ends well by that."""
        if not self.complete and self._lost is None:
            self._lost = ConnectionLost(message)
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._connection.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    """A socket to an origin: carrying one answer, idle, or closed.

    Its parser reads one answer after the other: one for each would refer to its answer and its answer to it, and only
    the garbage collector could free them.
    """

    __slots__ = (
        "_header_bytes",
        "_origin",
        "_parser",
        "_paused",
        "_transport",
        "closed",
        "idle_since",
        "loop",
        "response",
    )

    def __init__(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._origin = origin
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._header_bytes = 0
        self.response: Response | None = None
        self.idle_since = 0.0
        self.closed = False

    def send(self, head: bytes, body: bytes) -> Response:
        assert self._transport is not None
        assert self.response is None
        self.response = Response(self)
        self._header_bytes = 0
        if len(body) < HIGH_WATER_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return self.response

    def pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None and not self.closed:
            self.closed = True
            self._transport.abort()

    # asyncio calls these

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response is None:
            self.abort()  # an idle connection has nothing to say
            return
        response.touched = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ConnectionLost) as error:
            response.lose(f"not an HTTP/1.1 answer: {error.__context__ or error}")
            self.abort()
            return
        if response.complete:
            self._finish(response)
        response.wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        response = self.response
        if response is None:
            self._origin.forget(self)
            return
        if response.status and not response.bounded and error is None:
            response.complete = True
        response.lose(str(error) if error else "the connection was closed before the answer was complete")

    # httptools calls these, within `data_received`: there is an answer

    def on_message_begin(self) -> None:
        self._reading()  # half a head behind an answer must not become the beginning of the next one

    def on_header(self, name: bytes, value: bytes) -> None:
        response = self._reading()
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ConnectionLost("too many header bytes")
        if not response.status:  # else it is a trailer
            response.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        response, status = self._reading(), self._parser.get_status_code()
        if status < 200:  # 100 Continue, 103 Early Hints: the answer proper follows
            response.headers = {}
        else:
            response.status = status

    def on_body(self, body: bytes) -> None:
        self._reading().put(body)

    def on_message_complete(self) -> None:
        response = self._reading()
        if response.status:
            response.complete = True
            response.keep_alive = self._parser.should_keep_alive()  # the parser forgets it when it returns

    def _reading(self) -> Response:
        """The answer that is being read. Raises ConnectionLost when it has ended already."""
        response = self.response
        assert response is not None
        if response.complete:
            raise ConnectionLost("bytes after the end of the answer")
        return response

    def _finish(self, response: Response) -> None:
        self.response = None
        if response.keep_alive and response.bounded and not self.closed:
            self.resume()
            self._origin.put_back(self)
        else:
            self.abort()


class Origin:
    """One host and port, plain or TLS, and the idle connections to it."""

    def __init__(
        self, host: str, port: int, tls: ssl.SSLContext | None, connect_timeout_s: float, max_idle: int = 256
    ) -> None:
        self.host = host
        self.port = port
        self._tls = tls
        self._connect_timeout_s = connect_timeout_s
        self._max_idle = max_idle
        self._idle: list[Connection] = []

    async def send(self, head: bytes, body: bytes) -> Response:
        """Send one request; return when the status and the header fields of its answer are in.

        Raises ConnectFailed (nothing was sent) or ConnectionLost. A kept connection that turns out to be closed is
        replaced once; one that breaks later is not, because the request may have been served in part by then.
        Cancelling closes the connection.
        """
        kept = self._take()
        if kept is not None:
            response = kept.send(head, body)
            stale_until = time.monotonic() + STALE_WITHIN_S
            try:
                await response.head()
            except ConnectionLost:
                if response.touched or time.monotonic() > stale_until:
                    raise
            except BaseException:
                kept.abort()
                raise
            else:
                return response
        fresh = await self._connect()
        response = fresh.send(head, body)
        try:
            await response.head()
        except BaseException:
            fresh.abort()
            raise
        return response

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, loop),
                    self.host,
                    self.port,
                    ssl=self._tls,
                    server_hostname=self.host if self._tls else None,
                )
        except TimeoutError as error:
            raise ConnectTimedOut(f"no connection within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise ConnectFailed(f"no connection: {error}") from error
        return connection

    def _take(self) -> Connection | None:
        oldest_allowed = time.monotonic() - IDLE_SECONDS
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since >= oldest_allowed and not connection.closed:
                return connection
            connection.abort()
        return None

    def put_back(self, connection: Connection) -> None:
        if len(self._idle) >= self._max_idle:
            connection.abort()
            return
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close what is idle; running exchanges end by themselves."""
        while self._idle:
            self._idle.pop().abort()
