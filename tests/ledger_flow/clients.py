"""Clients that ask a gateway over plain HTTP, one request a connection, and remember what they were told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec


@dataclass
class Seen:
    """The final usage that a client got, and that its answer was complete."""

    request_id: str
    streamed: bool
    prompt_tokens: int
    generated_tokens: int
    billed_tokens: int
    cost_usd: str
    ended: bool


@dataclass
class Told:
    """What all clients together were told."""

    usages: list[Seen] = field(default_factory=list)
    broken: int = 0
    """Answers that ended before their usage."""
    unanswered: int = 0
    statuses: dict[int, int] = field(default_factory=dict)


class Answer:
    """An HTTP answer as it comes in: the callbacks of httptools."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True


async def ask_for_ever(ports: Sequence[int], key: str, models: dict[bool, str], told: Told, number: int) -> None:
    """Half of the clients stream. A gateway that is away is asked again, as is one that has no money left."""
    chance, streamed = random.Random(number), number % 2 == 1
    while True:
        body = {
            "model": models[streamed],
            "max_tokens": chance.randint(1, 400),
            "messages": [{"role": "user", "content": "word " * chance.randint(1, 60)}],
            **({"stream": True, "stream_options": {"include_usage": True}} if streamed else {}),
        }
        status = await _ask(chance.choice(ports), key, body, told)
        told.statuses[status] = told.statuses.get(status, 0) + 1
        if status != 200:
            await asyncio.sleep(0.1)


async def _ask(port: int, key: str, body: dict[str, Any], told: Told) -> int:
    """The status; 0: no answer."""
    answer = Answer()
    parser = httptools.HttpResponseParser(answer)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return 0
    try:
        packed = msgspec.json.encode(body)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        writer.write(head.encode() + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(packed) + packed)
        while data := await reader.read(65_536):
            parser.feed_data(data)
    except OSError:
        pass
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    if not answer.headers:
        told.unanswered += 1
        return 0
    status: int = parser.get_status_code()
    if status == 200:
        seen = _usage(answer, bool(body.get("stream")))
        if seen is None:
            told.broken += 1
        else:
            told.usages.append(seen)
    return status


def _usage(answer: Answer, streamed: bool) -> Seen | None:
    if streamed:
        events = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n")[:-1]]
        found = [event for event in map(_object, events) if event is not None and event.get("usage")]
        ended = bool(events) and events[-1] == b"[DONE]"
    else:
        whole = _object(answer.body) if answer.complete else None
        found, ended = ([whole] if whole is not None else []), True
    if not found:
        return None
    usage = found[-1]["usage"]
    return Seen(
        answer.headers[b"x-request-id"].decode(),
        streamed,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["total_tokens"],
        usage["tallygate"]["cost_usd"],
        ended,
    )


def _object(data: bytes) -> Any:
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) else None
