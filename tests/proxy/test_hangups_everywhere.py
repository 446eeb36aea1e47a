"""A client that hangs up at each chunk of a stream of 50: delivered ≤ billed ≤ produced, and the upstream is let go."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import pytest

from tests.proxy.lag import Lag, assert_in_time
from tests.proxy.serving import Gateway
from tests.upstream.process import FakeUpstream

CHUNKS = 50
BODY = {"messages": [{"role": "user", "content": "hi there"}], "stream": True}


@dataclass
class HungUp:
    request_id: str
    delivered: int
    at: float


async def hang_up_after(gateway: Gateway, body: dict[str, Any], chunks: int) -> HungUp:
    """Read so many chunks that say something and close the socket there and then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    data = json.dumps({**BODY, **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
    head_lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    request_id = next(line.split(": ")[1] for line in head_lines if line.startswith("x-request-id"))
    delivered = 0
    while delivered < chunks:
        line = await reader.readline()
        assert line, "the stream ended before it was hung up"
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:])["choices"]
            delivered += bool(choices and choices[0]["delta"].get("content"))
    writer.transport.abort()
    return HungUp(request_id, delivered, time.time())


async def hang_up_everywhere(gateway: Gateway, bodies: list[dict[str, Any]]) -> list[HungUp]:
    places = asyncio.Semaphore(10)

    async def one(body: dict[str, Any], chunk: int) -> HungUp:
        async with places:
            return await hang_up_after(gateway, body, chunk)

    return list(await asyncio.gather(*(one(body, chunk) for chunk, body in enumerate(bodies, 1))))


async def accounts(gateway: Gateway, upstream: FakeUpstream, found: list[HungUp]) -> list[tuple[HungUp, Any, Any]]:
    """Each hang-up with its row in the ledger and its entry in the provider's own log."""

    def look() -> list[tuple[HungUp, Any, Any]]:
        entries = {entry["id"]: entry for entry in upstream.wait_for_entries(len(found))}
        for hung_up in found:
            gateway.row(hung_up.request_id)
        rows = {row["request_id"]: row for row in gateway.rows()}
        return [(item, rows[item.request_id], entries[item.request_id]) for item in found]

    return await asyncio.to_thread(look)


@pytest.mark.parametrize("model", ["deepseek-v3.2", "m"])
async def test_what_is_billed_is_what_was_delivered_is_what_was_produced(
    gateway: Gateway, upstream: FakeUpstream, model: str
) -> None:
    """Our backend, and an upstream that reports usage in every chunk. It waits after each chunk that is hung up at, as
    a generation does that the client follows: so all three counts must be one."""
    waits = [
        {"model": model, "x_fault": {"usage": "each", "tokens": CHUNKS + 1, "end": "stall", "end_after": chunk}}
        for chunk in range(1, CHUNKS + 1)
    ]
    late = []
    async with Lag() as lag:
        found = await hang_up_everywhere(gateway, waits)
    for hung_up, row, entry in await accounts(gateway, upstream, found):
        assert hung_up.delivered == row["generated_tokens"] == entry["produced_tokens"]
        assert row["billed_tokens"] == entry["prompt_tokens"] + hung_up.delivered
        assert (row["status"], bool(row["estimated"])) == ("cancelled", False)
        assert entry["outcome"] == "stall"
        late.append(entry["ended"] - hung_up.at)
    assert_in_time(late, lag.seconds)


@pytest.mark.parametrize("usage", ["each", "last"])
async def test_a_stream_that_goes_on_is_billed_between_what_was_delivered_and_produced(
    gateway: Gateway, upstream: FakeUpstream, usage: str
) -> None:
    flowing = [
        {"model": "m", "x_fault": {"usage": usage, "tokens": CHUNKS, "chunk_delay_ms": 20}} for _ in range(CHUNKS)
    ]
    late = []
    async with Lag() as lag:
        found = await hang_up_everywhere(gateway, flowing)
    for hung_up, row, entry in await accounts(gateway, upstream, found):
        assert hung_up.delivered <= row["generated_tokens"] <= entry["produced_tokens"]
        assert row["billed_tokens"] == row["prompt_tokens"] + row["generated_tokens"]
        if entry["outcome"] == "client_gone":
            assert row["status"] == "cancelled"
            late.append(entry["ended"] - hung_up.at)
    assert len(late) > CHUNKS / 2  # at the last chunks the answer may be complete before the client is missed
    assert_in_time(late, lag.seconds)
