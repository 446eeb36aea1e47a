"""The floor: the barest forward on the gateway's own stack, Starlette and uvicorn, with no metering at all.

python -m benchmarks.floor --port 9002 --upstream http://127.0.0.1:9001/v1
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import uvicorn
from pyreqwest.client import ClientBuilder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


def build(upstream: str) -> Starlette:
    client: Any = None

    async def forward(request: Request) -> Response:
        nonlocal client
        if client is None:
            client = ClientBuilder().timeout(timedelta(seconds=120)).build()
        body = await request.body()
        call = (
            client.post(upstream + "/chat/completions")
            .body_bytes(body)
            .header("content-type", "application/json")
            .build_streamed()
            if b'"stream":true' in body
            else client.post(upstream + "/chat/completions")
            .body_bytes(body)
            .header("content-type", "application/json")
            .build()
        )
        if b'"stream":true' not in body:
            answer = await call.send()
            return Response(bytes(await answer.bytes()), answer.status, media_type="application/json")

        async def chunks() -> AsyncIterator[bytes]:
            async with call as streamed:
                while (chunk := await streamed.body_reader.read_chunk()) is not None:
                    yield bytes(chunk)

        return StreamingResponse(chunks(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", forward, methods=["POST"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=9002)
    parser.add_argument("--upstream", default="http://127.0.0.1:9001/v1")
    arguments = parser.parse_args()
    server = uvicorn.Server(
        uvicorn.Config(
            build(arguments.upstream),
            host="127.0.0.1",
            port=arguments.port,
            loop="uvloop",
            http="httptools",
            access_log=False,
            log_level="warning",
            backlog=2048,
        )
    )
    server.run()


if __name__ == "__main__":
    main()
