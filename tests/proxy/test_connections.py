"""What a client may do to a connection: bounded in size and in time, and answered in the shape of every error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

import httpx
import pytest
import uvloop

from proxy import http_server
from tests.proxy.serving import Gateway

POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@contextlib.contextmanager
def connected(gateway: Gateway) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        yield connection


def all_of(connection: socket.socket) -> bytes:
    """What comes until the other end closes. Raises TimeoutError when it does not."""
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def send_all(connection: socket.socket, pieces: Iterable[bytes]) -> int:
    """How many bytes left before the other end closed."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
    return sent


def test_what_is_no_http_is_answered_like_every_error(gateway: Gateway) -> None:
    with connected(gateway) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00 this is no request\r\n\r\n")
        head, _, body = all_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: " in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


ENDLESS = {
    "a header": (b"GET /v1/models HTTP/1.1\r\nx: ", b"a" * 65_536),
    "headers": (b"GET /v1/models HTTP/1.1\r\n", b"x: " + b"a" * 1_000 + b"\r\n"),
    "an address": (b"GET /", b"a" * 65_536),
    "trailers": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x: " + b"a" * 1_000 + b"\r\n"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_an_endless_head_is_cut_off(gateway: Gateway, what: str) -> None:
    start, piece = ENDLESS[what]
    pieces = [start, *[piece] * (64 * 2**20 // len(piece))]
    with connected(gateway) as connection:
        sent = send_all(connection, pieces)
    assert sent < 32 * 2**20  # what kernel buffers take in
    with gateway.http() as client:
        assert client.get("/models").status_code == 200


def test_a_head_that_is_too_large_is_told_so(gateway: Gateway) -> None:
    with connected(gateway) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nx: " + b"a" * (http_server.MAX_HEAD_BYTES + 65_536))
        answer = all_of(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer


def test_large_heads_within_the_bound_are_served_again_and_again(gateway: Gateway) -> None:
    with gateway.http() as client:
        for _ in range(5):
            assert client.get("/models", headers={"x-large": "a" * 100_000}).status_code == 200


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, gateway: Gateway) -> Gateway:
    monkeypatch.setattr(http_server, "PATIENCE_S", 0.5)
    return gateway


UNFINISHED = {
    "nothing": b"",
    "half a head": POST,
    "half a body": POST + b"authorization: Bearer KEY\r\ncontent-length: 500\r\n\r\n{",
    "half a body after a refusal": POST + b"content-length: 500\r\n\r\n{",
}


@pytest.mark.parametrize("what", UNFINISHED)
def test_a_request_that_does_not_come_is_not_waited_for(impatient: Gateway, what: str) -> None:
    with connected(impatient) as connection:
        connection.sendall(UNFINISHED[what].replace(b"KEY", impatient.key.encode()))
        assert b" 200 " not in all_of(connection)


def test_a_slow_body_that_does_come_is_waited_for(impatient: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PATIENCE_S", 1.0)  # for all six pieces it would be too short
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 20_000}]}
    raw = json.dumps(body).encode()

    def slowly() -> Iterator[bytes]:
        for start in range(0, len(raw), 4_000):
            time.sleep(0.3)
            yield raw[start : start + 4_000]

    with impatient.http() as client:
        assert client.post("/chat/completions", content=slowly()).status_code == 200


def test_a_stream_may_run_longer_than_a_request_may_take_to_arrive(impatient: Gateway) -> None:
    body = {"model": "m@slow-chunks", "messages": [{"role": "user", "content": "x"}], "stream": True}
    with impatient.http() as client:
        for _ in range(2):
            answer = client.post("/chat/completions", json=body)
            assert answer.text.endswith("data: [DONE]\n\n")


def test_bytes_after_a_request_never_get_into_its_answer(gateway: Gateway) -> None:
    body = json.dumps({"model": "m@slow-chunks", "messages": [{"role": "user", "content": "x"}], "stream": True})
    head = f"authorization: Bearer {gateway.key}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with connected(gateway) as connection:
        connection.sendall(POST + head + body.encode())
        first = connection.recv(65536)
        connection.sendall(b"\x00\x01garbage\r\n\r\n")
        answer = first + all_of(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1") == 1


def test_connections_are_kept_between_requests(gateway: Gateway) -> None:
    with httpx.Client(base_url=gateway.base_url, headers={"authorization": f"Bearer {gateway.key}"}) as client:
        ports = set()
        for _ in range(3):
            answer = client.get("/models")
            ports.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(ports) == 1


def test_what_is_written_to_a_client_that_hung_up_is_no_error() -> None:
    """On uvloop, as in production: there, unlike on asyncio's own loop, such a write raises."""
    errors: list[dict[str, Any]] = []

    class Server(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.Transport, transport)
            asyncio.get_running_loop().call_soon(self.answer)

        def answer(self) -> None:
            http_server.MergedWrites(self.transport, asyncio.get_running_loop()).write(b"an answer")
            self.transport.abort()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        server = await loop.create_server(Server, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        await reader.read()
        writer.close()
        server.close()

    uvloop.run(serve())
    assert errors == []
