"""uvicorn's HTTP protocol with fewer system calls, and with bounds on what a client may send and how slowly.

What is written in one turn of the loop leaves in one piece. uvicorn itself bounds neither the size of a head (or of
trailers) nor the time that a request takes to arrive: without a key, one client could fill the memory or keep every
connection there is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import (
    HEADER_VALUE_RE,
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from proxy.ids import RequestIds, now_ms
from proxy.openai.errors import ApiError, head_too_large, invalid

LARGE_BYTES = 64 * 1024
"""Larger parts are not copied together: that would cost more than a system call."""
LINGER_S = 30.0
"""How long what is left to say may take after the connection was closed."""
MAX_HEAD_BYTES = 256 * 1024
"""What a client may send without coming any further: request line and headers, or trailers."""
PATIENCE_S = 30.0
"""How long a head may take, from the connection's first moment or its own; a body must bring LEAST_BYTES in each."""
LEAST_BYTES = 1_024
DRAIN_IDLE_S = 5.0
"""How long an idle connection stays open while we drain: as long as it would between two requests anyway, so that a
client's next request does not meet a closing connection more often than ever."""


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
        """What was written may still go out, though not for ever to a client that does not take it."""
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(LINGER_S, self._transport.abort)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if self._transport.is_closing():  # the client hung up between the write and now
            return
        if len(parts) > 1 and max(map(len, parts)) <= LARGE_BYTES:
            self._transport.write(b"".join(parts))
        else:
            for part in parts:
                self._transport.write(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class AnswerCycle(RequestResponseCycle):
    """uvicorn's, which looks at each header field with two regular expressions; here one looks at all values. Answers
    that say themselves how they are framed, or when the connection ends, are left to uvicorn."""

    async def send(self, message: Any) -> None:
        if message["type"] != "http.response.start" or self.response_started or self.scope["method"] == "HEAD":
            await super().send(message)
            return
        headers = message.get("headers", ())
        named = dict(headers)
        if b"connection" in named or b"transfer-encoding" in named:
            await super().send(message)
            return
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if not self.disconnected:
            self._begin(message["status"], headers, named.get(b"content-length"))

    def _begin(self, status: int, headers: Collection[tuple[bytes, bytes]], length: bytes | None) -> None:
        """Raises RuntimeError for a value that would begin a line of its own."""
        if HEADER_VALUE_RE.search(b"".join([value for _, value in headers])):
            raise RuntimeError("Invalid HTTP header value.")
        self.response_started = True
        self.waiting_for_100_continue = False
        lines = [b"%b: %b\r\n" % field for field in (*self.default_headers, *headers)]
        self.chunked_encoding = length is None and status not in (204, 304)
        if length is not None:
            self.expected_content_length = int(length)
        elif self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        self.transport.write(b"".join((STATUS_LINE[status], *lines, b"\r\n")))


class GatewayProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=GatewayProtocol)`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unfinished = True
        """A request, or the first one, is still to arrive in whole."""
        self._advanced = False
        self._stuck_bytes = 0
        """What came since the request last got further: a whole head, a piece of body, an end."""
        self._body_bytes = 0
        """What of the body came since the last look."""
        self._look_task: asyncio.TimerHandle | None = None
        self._ids = RequestIds()
        self._draining = False

    def drain(self) -> None:
        """The next answer that begins is the last, and says so. One that has begun without saying it is not: its client
        may be sending already what it asks next. Without a further request the connection ends soon."""
        self._draining = True
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(DRAIN_IDLE_S, self._close_if_idle)
        elif not self.cycle.response_started:
            self._make_last()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        merged = MergedWrites(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, merged))
        self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._advanced = False
        super().data_received(data)
        if self._advanced:
            self._stuck_bytes = 0
        else:
            self._stuck_bytes += len(data)
            if self._stuck_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large(MAX_HEAD_BYTES))
        if self._unfinished and self._look_task is None:
            self._look_later()

    def on_message_begin(self) -> None:
        self._unfinished = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._advanced = True
        super().on_headers_complete()
        self.cycle.__class__ = AnswerCycle  # it has not begun to run; uvicorn leaves no other place to name the class
        if self._draining:
            self._make_last()

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._advanced = True
        self._unfinished = False
        if self._look_task is not None:
            self._look_no_more()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP: answered in the shape of every error, and the connection ends."""
        self._refuse(invalid(msg))

    def _refuse(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:  # else an answer is on its way: no second one inside it
            body = error.body()
            fields = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"x-request-id", self._ids.new(now_ms()).encode()),
                (b"connection", b"close"),
            ]
            lines = [b"%b: %b\r\n" % field for field in (*self.server_state.default_headers, *fields)]
            self.transport.write(b"".join((STATUS_LINE[error.status], *lines, b"\r\n", body)))
        self._look_no_more()
        self.transport.close()

    def _make_last(self) -> None:
        """No request after the newest that has come: its answer says `connection: close`."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _close_if_idle(self) -> None:
        if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()

    def _look_later(self) -> None:
        if not self.transport.is_closing():
            self._body_bytes = 0
            self._look_task = self.loop.call_later(PATIENCE_S, self._look)

    def _look_no_more(self) -> None:
        if self._look_task is not None:
            self._look_task.cancel()
            self._look_task = None

    def _look(self) -> None:
        """Close what is too slow, unless it is us who do not read, or who still answer what came before."""
        self._look_task = None
        if not self._unfinished or self.transport.is_closing():
            return
        answering = self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body)
        if answering or self.flow.read_paused or self._body_bytes >= LEAST_BYTES:
            self._look_later()
        else:
            self.transport.close()
