"""Clients under load: keep-alive connections over plain sockets, no retries, every outcome counted."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools

TIMEOUT_S = 30.0
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}
Done = Callable[[], bool]


@dataclass
class Outcome:
    """One request. status 0: no answer (`why` says what happened)."""

    at: float
    took_s: float
    status: int
    code: str = ""
    request_id: str = ""
    billed_tokens: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class Tally:
    """What became of all requests. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    def count(self, status: int) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    def failures(self) -> list[Outcome]:
        """What a client would call a failure: no answer, or a server error."""
        return [outcome for outcome in self.outcomes if outcome.status == 0 or outcome.status >= 500]

    def statuses(self) -> dict[str, int]:
        return dict(Counter(f"{o.status} {o.code}".strip() for o in self.outcomes))


class _Answer:
    """The callbacks of httptools."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self.keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep_alive = self.parser.should_keep_alive()


class Client:
    """One connection at a time, kept while the server keeps it."""

    def __init__(self, port: int, key: str, address: str = "127.0.0.1") -> None:
        self.port = port
        self.address = address
        self._key = key
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, body: dict[str, Any]) -> Outcome:
        began = time.monotonic()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._exchange(json.dumps(body).encode())
        except (OSError, TimeoutError, asyncio.IncompleteReadError, httptools.HttpParserError) as error:
            self.close()
            return Outcome(began, time.monotonic() - began, 0, f"{type(error).__name__}: {error}")
        status = answer.parser.get_status_code()
        outcome = Outcome(began, time.monotonic() - began, status, headers=answer.headers)
        outcome.request_id = answer.headers.get("x-request-id", "")
        if status != 200:
            outcome.code = json.loads(answer.body)["error"]["code"]
        elif not body.get("stream"):
            outcome.billed_tokens = json.loads(answer.body)["usage"]["tallygate"]["billed_tokens"]
        elif b"[DONE]" not in answer.body:
            outcome.status, outcome.code = 0, "cut short"
        return outcome

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _exchange(self, body: bytes) -> _Answer:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await asyncio.open_connection(self.address, self.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n"
        self._writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = _Answer()
        while not answer.complete:
            data = await self._reader.read(65_536)
            if not data:
                raise ConnectionResetError("closed before the answer was complete")
            answer.parser.feed_data(data)
        if not answer.keep_alive:
            self.close()
        return answer


async def load(
    ports: Sequence[int],
    keys: Sequence[str],
    clients: int,
    until: Done,
    *,
    body: dict[str, Any] | None = None,
    pause_s: float = 0.0,
    tally: Tally | None = None,
    requests: int | None = None,
    address: str = "127.0.0.1",
) -> Tally:
    """So many clients ask in turn, each on one port, until `until()` or so many requests in all."""
    tally = Tally() if tally is None else tally
    asked = itertools.count()
    base = BODY | (body or {})

    async def one(number: int) -> None:
        client = Client(ports[number % len(ports)], keys[number % len(keys)], address)
        try:
            while not until() and (requests is None or next(asked) < requests):
                tally.outcomes.append(await client.ask(base))
                if pause_s:
                    await asyncio.sleep(pause_s)
        finally:
            client.close()

    await asyncio.gather(*(one(number) for number in range(clients)))
    return tally


def for_seconds(seconds: float) -> Done:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end
