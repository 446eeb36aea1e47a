"""The few things the hot path needs of ASGI: read a bounded body, find a header, send an answer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from policies.access import Network, client_address
from proxy.openai.errors import invalid, too_large

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")
STREAM_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class ClientGone(Exception):
    """The client hung up before its request was complete."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """The request's header fields by lower-case name; of a repeated one the last."""
    return dict(scope["headers"])


def client_of(scope: Scope, trusted: tuple[Network, ...]) -> str | None:
    """The address that the request comes from; behind a trusted proxy that of its client."""
    client = scope.get("client")
    peer: str | None = client[0] if client else None
    if not trusted:
        return peer
    forwarded = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"]
    return client_address(peer, forwarded, trusted)


def text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1").strip()


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """The whole request body. Raises ApiError 413, ClientGone.

    A body that is too large is read on for a while, unkept: a client that is still sending would not see our answer.
    """
    message = await receive()
    body: bytes = message.get("body", b"")
    if not message.get("more_body", False) and message["type"] == "http.request" and len(body) <= limit_bytes:
        return body
    parts, total = [body], len(body)
    while message.get("more_body", False) and total <= 4 * limit_bytes:
        message = await receive()
        part = message.get("body", b"")
        total += len(part)
        if total <= limit_bytes:
            parts.append(part)
        else:
            parts.clear()
    if message["type"] == "http.disconnect":
        raise ClientGone
    if total > limit_bytes:
        raise too_large(limit_bytes)
    return b"".join(parts)


class Reply:
    """What goes back to one client. It knows the request id, which every answer carries."""

    __slots__ = ("_send", "_started_ns", "begun", "ended", "id_header", "request_id")

    def __init__(self, send: Send, request_id: str, id_header: bytes = b"x-request-id") -> None:
        self._send = send
        self._started_ns = time.perf_counter_ns()
        self.request_id = request_id
        self.id_header = id_header
        self.begun = False
        self.ended = False

    def elapsed_ms(self, until_ns: int | None = None) -> int:
        """From the arrival of the request until now, or until a reading of `time.perf_counter_ns`."""
        until_ns = time.perf_counter_ns() if until_ns is None else until_ns
        return (until_ns - self._started_ns) // 1_000_000

    async def whole(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """An answer in one piece."""
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, status: int, headers: Headers) -> None:
        self.begun = True
        request_id = self.request_id.encode()
        headers.append((b"x-request-id", request_id))
        if self.id_header != b"x-request-id":
            headers.append((self.id_header, request_id))
        headers.append((b"openai-processing-ms", b"%d" % self.elapsed_ms()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def part(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        self.ended = True
        await self._send({"type": "http.response.body", "body": data})


def refuse_packed_body(headers: dict[bytes, bytes]) -> None:
    """Raises ApiError 400 for a compressed body: it would have to be unpacked within a bound."""
    encoding = headers.get(b"content-encoding")
    if encoding is not None and encoding.lower() != b"identity":
        raise invalid("A compressed request body is not accepted: send it without `content-encoding`.")
