"""An upstream that is never the bottleneck: a raw asyncio protocol that answers chat completions from prepared bytes.

A stream for the model `quiet` is a slow one: a token, a long gap, a token, the same gap, the end.

python -m benchmarks.upstream --port 9001 [--quiet-gap-s 22]
"""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

import uvloop

CHUNKS = 100
QUIET_MODEL = "quiet"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: "
_USAGE = b'"usage":{"prompt_tokens":12,"completion_tokens":%d,"total_tokens":%d}'


def _plain_answer() -> bytes:
    body = (
        b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"Hello! How can I help you today?"},"finish_reason":"stop"}],'
        + _USAGE % (8, 20)
        + b"}"
    )
    return _HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _event(delta: bytes, finish: bytes, rest: bytes = b"") -> bytes:
    data = (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
        + b'"delta":'
        + delta
        + b',"finish_reason":'
        + finish
        + b"}]"
        + rest
        + b"}\n\n"
    )
    return b"%x\r\n" % len(data) + data + b"\r\n"


STREAM_HEAD = _HEAD + b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = _event(b'{"content":" token"}', b"null")
_USAGE_DATA = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],'
    + _USAGE % (CHUNKS, CHUNKS + 12)
    + b"}\n\ndata: [DONE]\n\n"
)
STREAM_TAIL = _event(b"{}", b'"stop"') + b"%x\r\n" % len(_USAGE_DATA) + _USAGE_DATA + b"\r\n0\r\n\r\n"
PLAIN = _plain_answer()


class Provider(asyncio.Protocol):
    """Reads a request by its content-length, looks for `"stream":true`, writes the prepared answer."""

    def __init__(self, quiet_gap_s: float) -> None:
        self.quiet_gap_s = quiet_gap_s
        self.buffer = bytearray()
        self.need = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            if not self.need:
                end = self.buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                head = bytes(self.buffer[: end + 2]).lower()
                start = head.find(b"\r\ncontent-length:")
                length = int(head[start + 17 : head.find(b"\r\n", start + 2)]) if start >= 0 else 0
                self.need = end + 4 + length
            if len(self.buffer) < self.need:
                return
            request = bytes(self.buffer[: self.need])
            del self.buffer[: self.need]
            self.need = 0
            streamed = b'"stream":true' in request or b'"stream": true' in request
            if not streamed:
                self.transport.write(PLAIN)
            elif b'"model":"quiet"' in request:
                self.transport.write(STREAM_HEAD + TOKEN)
                asyncio.get_running_loop().call_later(self.quiet_gap_s, self.go_on, TOKEN)
                asyncio.get_running_loop().call_later(2 * self.quiet_gap_s, self.go_on, STREAM_TAIL)
            else:
                self.transport.write(STREAM_HEAD + TOKEN)
                for _ in range(CHUNKS - 1):
                    self.transport.write(TOKEN)
                self.transport.write(STREAM_TAIL)

    def go_on(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)


async def serve(port: int, quiet_gap_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Provider(quiet_gap_s), "127.0.0.1", port, backlog=2048)
    print(f"upstream ready on {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9001)
    parser.add_argument("--quiet-gap-s", type=float, default=22.0)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, arguments.quiet_gap_s))


if __name__ == "__main__":
    main()
