"""The fake provider's HTTP: bytes by hand, so that every broken byte is meant."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import struct
import time
from typing import Any, cast

import httptools

from tests.upstream import answers, native
from tests.upstream.bodies import BodyWriter
from tests.upstream.faults import FAULTS, Fault, fault_of

ANSWER_PATHS = ("/chat/completions", "/completions")
MAX_LOGGED_BODY = 65_536


class ClientGone(Exception):
    """The client closed before the answer was complete."""


class Provider:
    """State shared by all connections: the log and the standing fault."""

    def __init__(self, log_path: str | None) -> None:
        self._log = open(log_path, "a", buffering=1) if log_path else None  # noqa: SIM115
        self.logged_bytes = os.path.getsize(log_path) if log_path else 0
        self.requests = 0
        self.standing: Any = None
        self.standing_times = 0
        self.health = 200

    def fault_for(self, headers: dict[str, str], body: dict[str, Any]) -> Fault:
        """Raises ValueError when the wanted fault does not exist."""
        if "x-fault" in headers:
            return fault_of(headers["x-fault"])
        if "x_fault" in body:
            return fault_of(body["x_fault"])
        model = body.get("model")
        if isinstance(model, str) and "@" in model:
            return fault_of(model.partition("@")[2])
        if self.standing is not None and self.standing_times != 0:
            self.standing_times -= 1
            return fault_of(self.standing)
        return FAULTS["none"]

    def control(self, body: dict[str, Any]) -> None:
        """`{"fault": …, "times": n}`: the next n requests (default: all) meet that fault. `{"fault": null}` ends it and
        makes `/health` well again; `{"health": status}` says what that answers."""
        self.health = int(body.get("health", 200))
        if "health" in body:
            return
        if body.get("fault") is not None:
            fault_of(body["fault"])
        self.standing = body.get("fault")
        self.standing_times = int(body.get("times", -1))

    def log(self, entry: dict[str, Any]) -> None:
        if self._log is not None:
            self.logged_bytes += self._log.write(json.dumps(entry) + "\n")  # ASCII


class Connection(asyncio.Protocol):
    """One client connection; requests are answered one after the other."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._parser = httptools.HttpRequestParser(self)
        self._requests: asyncio.Queue[tuple[str, str, dict[str, str], bytes]] = asyncio.Queue()
        self._url, self._headers, self._body = b"", {}, b""  # type: tuple[bytes, dict[str, str], bytes]
        self.gone = asyncio.Event()
        self.room = asyncio.Event()
        self.room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._task = asyncio.get_running_loop().create_task(self._serve())

    def connection_lost(self, error: Exception | None) -> None:
        self.gone.set()
        self.room.set()
        if self._requests.empty():
            self._requests.put_nowait(("", "", {}, b""))

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        self._requests.put_nowait((method, self._url.decode(), self._headers, self._body))
        self._url, self._headers, self._body = b"", {}, b""

    async def _serve(self) -> None:
        while not self.gone.is_set():
            method, url, headers, raw = await self._requests.get()
            if not method:
                return
            await Exchange(self._provider, self, method, url.partition("?")[0], headers, raw).run()

    async def write(self, data: bytes) -> None:
        """Write, and wait while the client reads too slowly. Raises ClientGone."""
        if self.gone.is_set() or self.transport.is_closing():
            raise ClientGone
        self.transport.write(data)
        if not self.room.is_set():
            await self.room.wait()
            if self.gone.is_set():
                raise ClientGone

    async def pause(self, ms: float) -> None:
        """Wait so long, or until the client is gone: ClientGone."""
        if ms <= 0:
            await asyncio.sleep(0)
        else:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.gone.wait(), ms / 1_000)
        if self.gone.is_set():
            raise ClientGone

    def close(self) -> None:
        self.transport.close()

    def reset(self) -> None:
        """Close with a TCP reset."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class Exchange:
    """One request and its answer, and the line in the log that tells of both."""

    def __init__(
        self, provider: Provider, connection: Connection, method: str, path: str, headers: dict[str, str], raw: bytes
    ) -> None:
        self._provider, self._connection, self._method, self._path = provider, connection, method, path
        self._headers, self._raw = headers, raw
        self._started = time.monotonic()
        self._fault = FAULTS["none"]
        self._body: dict[str, Any] = {}
        self._finished = False
        self.entry: dict[str, Any] = {}

    async def run(self) -> None:
        path = self._path.removeprefix("/v1")
        if path == "/control":
            self._provider.control(json.loads(self._raw))
            await self._send_whole(200, json.dumps({"logged_bytes": self._provider.logged_bytes}).encode())
        elif path in ("/health", "/health/live"):
            await self._send_whole(self._provider.health, b'{"status": "ok"}')
        elif path == "/models":
            model = {"id": "gpt-4", "object": "model", "created": answers.CREATED, "owned_by": "fake"}
            await self._send_whole(200, json.dumps({"object": "list", "data": [model]}).encode())
        elif self._method == "POST" and path in (*ANSWER_PATHS, *native.PATHS, "/embeddings"):
            await self._logged(path)
        else:
            await self._send_whole(
                404, b'{"error": {"message": "no such route", "type": "x", "param": null, "code": null}}'
            )

    async def _logged(self, path: str) -> None:
        self._provider.requests += 1
        number = self._provider.requests
        self.entry = {
            "number": number,
            "began": self._started,
            "id": self._headers.get("x-request-id"),
            "path": self._path,
            "headers": self._headers,
            "sha256": hashlib.sha256(self._raw).hexdigest(),
            "produced_tokens": 0,
            "sent_tokens": 0,
            "reported": None,
            "outcome": "error",
            "started": time.time(),
        }
        try:
            await self._answer(path, number)
        except (ClientGone, ConnectionError):
            self.entry["outcome"] = "client_gone"
        finally:
            self.entry["ended"] = time.time()
            self.entry["duration_ms"] = round((time.monotonic() - self._started) * 1_000, 3)
            self._provider.log(self.entry)

    async def _answer(self, path: str, number: int) -> None:
        connection = self._connection
        try:
            self._body = json.loads(self._raw)
            self._fault = self._provider.fault_for(self._headers, self._body)
        except (ValueError, AttributeError) as error:
            message = {"error": {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}}
            await self._send_whole(400, json.dumps(message).encode())
            return
        fault = self._fault
        self.entry |= {"model": self._body.get("model"), "stream": bool(self._body.get("stream"))}
        self.entry["body"] = self._body if len(self._raw) <= MAX_LOGGED_BODY else None
        if fault.accept == "hang":
            self.entry["outcome"] = "hang"
            await connection.gone.wait()
            raise ClientGone
        if fault.accept != "answer":
            self.entry["outcome"] = fault.accept
            (connection.reset if fault.accept == "reset" else connection.close)()
            return
        await connection.pause(fault.headers_delay_ms)
        if fault.body is not None:
            await self._send_instead(fault.body)
        elif path == "/embeddings":
            await self._send_embeddings()
        else:
            await self._send_answer(number)

    async def _send_answer(self, number: int) -> None:
        fault = self._fault
        answer = answers.answer(self._body, fault, number)
        self.entry["prompt_tokens"] = answer.prompt_tokens
        self.entry["text"] = answer.text if len(answer.tokens) <= 1_000 else None
        streamed = self.entry["stream"] if fault.answers_as == "asked" else fault.answers_as == "stream"
        await (self._stream(answer) if streamed else self._plain(answer))

    async def _send_instead(self, text: str) -> None:
        self.entry["outcome"] = "instead"
        await self._send_whole(self._fault.status, text.encode(), dict(self._fault.headers))

    async def _send_embeddings(self) -> None:
        inputs = self._body.get("input", "")
        count = len(inputs) if isinstance(inputs, list) else 1
        data = [{"object": "embedding", "index": i, "embedding": [0.0, 0.5, -0.5]} for i in range(count)]
        prompt = answers.prompt_tokens(self._body)
        used = {"prompt_tokens": prompt, "total_tokens": prompt}
        self.entry |= {"prompt_tokens": prompt, "reported": used, "outcome": "done"}
        body = {"object": "list", "data": data, "model": self._body.get("model"), "usage": used}
        await self._send_whole(200, json.dumps(body).encode(), dict(self._fault.headers))

    async def _plain(self, answer: answers.Answer) -> None:
        fault = self._fault
        await self._connection.pause(fault.first_chunk_delay_ms + fault.chunk_delay_ms * answer.generated)
        self.entry["produced_tokens"] = answer.generated
        path = self._path.removeprefix("/v1")
        is_native = path in native.PATHS
        body = native.plain_body(path, answer, fault) if is_native else answers.plain_body(answer, fault)
        self.entry["reported"] = json.loads(body).get("usage")
        writer = BodyWriter(
            self._connection, self._fault, {"content-type": fault.content_type or "application/json"}, size=len(body)
        )
        await writer.head()
        if fault.end == "done":
            self.entry |= {"sent_tokens": answer.generated, "outcome": "done"}
            await writer.part(body)
            await writer.end()
            return
        if fault.end == "garbage":
            await writer.part(b"\x00\xff" + body[:20])
        elif fault.end == "error":
            await writer.part(b'{"error": {"message": "generation failed", "type": "server_error", "code": null}}')
        else:
            await writer.part(body[: len(body) // 2])
        await self._break(writer)

    async def _stream(self, answer: answers.Answer) -> None:
        fault, connection = self._fault, self._connection
        options = self._body.get("stream_options") or {}
        writer = BodyWriter(
            self._connection, self._fault, {"content-type": fault.content_type or "text/event-stream; charset=utf-8"}
        )
        await writer.head()
        await connection.pause(fault.first_chunk_delay_ms)
        if fault.bom:
            await writer.part(b"\xef\xbb\xbf")
        held: list[bytes] = []
        path = self._path.removeprefix("/v1")
        is_native = path in native.PATHS
        events = native.events(path, answer, fault) if is_native else answers.events(answer, fault, options)
        for event in events:
            if fault.end != "done" and event.generated > fault.end_after:
                await writer.part(b"".join(held))
                await self._break_stream(writer, event)
                return
            if event.token:
                await connection.pause(fault.chunk_delay_ms)
                self.entry["produced_tokens"] = event.generated
            held.append(self._encode(event.data))
            if fault.per_packet and len(held) >= fault.per_packet:
                await writer.part(b"".join(held))
                held.clear()
            self.entry["sent_tokens"] = event.generated
            if event.reported is not None:
                self.entry["reported"] = event.reported
        self.entry["outcome"] = "done"
        await writer.part(b"".join(held))
        await writer.end()

    async def _break_stream(self, writer: BodyWriter, event: answers.Event) -> None:
        match self._fault.end:
            case "half":
                await writer.part(self._encode(event.data)[:40])
            case "error":
                failed = {"error": {"message": "generation failed", "type": "server_error", "code": None}}
                await writer.part(self._encode(json.dumps(failed)))
            case "garbage":
                await writer.part(b"\x00\xff<html>not an event</html>\n\n")
            case _:
                pass
        await self._break(writer)

    async def _break(self, writer: BodyWriter) -> None:
        connection, end = self._connection, self._fault.end
        self.entry["outcome"] = end
        if end in ("close", "half"):
            await connection.pause(5)  # so that what was written arrives first
            connection.close()
        elif end == "reset":
            await connection.pause(20)
            connection.reset()
        elif end == "stall":
            await connection.gone.wait()
        else:
            await writer.end()

    def _encode(self, data: str) -> bytes:
        fault, newline = self._fault, self._fault.newline
        lines = [f": keep-alive{newline}{newline}"] if fault.comments else []
        lines += [f"event: message{newline}id: 1{newline}"] if fault.event_names else []
        if self._path.removeprefix("/v1") in native.PATHS:
            lines.append(f"event: {json.loads(data).get('type', 'error')}{newline}")
        lines.append(f"data:{' ' if fault.space else ''}{data}{newline}{newline}")
        return "".join(lines).encode()

    async def _send_whole(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        writer = BodyWriter(
            self._connection,
            self._fault,
            {"content-type": "application/json", **(headers or {})},
            size=len(body),
            status=status,
        )
        await writer.head()
        await writer.part(body)
        await writer.end()


async def serve(port: int, log_path: str | None, host: str = "127.0.0.1") -> None:
    """Serve until cancelled."""
    provider = Provider(log_path)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(provider), host, port, backlog=1024)
    async with server:
        await server.serve_forever()
