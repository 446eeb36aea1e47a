"""One connection to Redis or Valkey, pipelined: what one tick of the loop asks goes out in one write.

Not redis-py, because a decision must cost microseconds, have a deadline that does not break the connection, and share
its round trip with the others of its tick. redis-py awaits per command and drops a connection whose reply came late.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote, urlsplit

import hiredis

Word = str | bytes | int


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is and how to enter."""

    host: str
    port: int
    database: int = 0
    username: str | None = None
    password: str | None = None
    tls: bool = False

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of `redis://[[user]:password@]host[:port][/database]`, or `rediss://` with TLS. Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "valkey", "valkeys"):
            raise ValueError(f"counters must be memory or redis://host:port/database, not {parts.scheme}://…")
        database = parts.path.strip("/") or "0"
        if not database.isdigit():
            raise ValueError(f"the database of a redis URL is a number, not {database!r}")
        return cls(
            parts.hostname or "127.0.0.1",
            parts.port or 6379,
            int(database),
            unquote(parts.username) if parts.username else None,
            unquote(parts.password) if parts.password else None,
            parts.scheme in ("rediss", "valkeys"),
        )


class Unanswered(Exception):
    """No answer within the deadline, or the connection is gone."""


class Asker(Protocol):
    """Who wants to know. Called within the tick that brings the news, not when a waiting task gets its turn."""

    def read(self, reply: object) -> object:
        """The result of a reply that came in time."""

    def lapse(self) -> object:
        """The result without a reply."""

    def late(self, reply: object) -> None:
        """A reply, possibly an error, that came after the result was settled without it."""


class Pending:
    """A command under way."""

    __slots__ = ("asker", "future", "sent_at")

    def __init__(self, future: asyncio.Future[object], asker: Asker | None) -> None:
        self.future = future
        self.asker = asker
        self.sent_at: float | None = None

    def answer(self, reply: object) -> None:
        """The server has replied, in time or not."""
        if self.future.done():
            if self.asker is not None:
                self.asker.late(reply)
        elif isinstance(reply, Exception):
            self.future.set_exception(reply)
        else:
            self.future.set_result(reply if self.asker is None else self.asker.read(reply))

    def lapse(self, why: str) -> None:
        """No reply in time."""
        if self.future.done():
            return
        if self.asker is None:
            self.future.set_exception(Unanswered(why))
        else:
            self.future.set_result(self.asker.lapse())


class Link(asyncio.Protocol):
    """One connection. Replies come in the order of the commands."""

    def __init__(self, deadline_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._deadline_s = deadline_s
        self._reader = hiredis.Reader()
        self._pending: deque[Pending] = deque()
        self._outbox: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None
        self.closed = False

    @classmethod
    async def connect(cls, address: Address, deadline_s: float, timeout_s: float) -> Link:
        """An open connection, authenticated, on the right database. Raises OSError, TimeoutError, Unanswered,
        hiredis.HiredisError."""
        async with asyncio.timeout(timeout_s):
            tls = ssl.create_default_context() if address.tls else None
            loop = asyncio.get_running_loop()
            _, link = await loop.create_connection(lambda: cls(deadline_s), address.host, address.port, ssl=tls)
            try:
                if address.password is not None:
                    user = (address.username,) if address.username else ()
                    await link.ask("AUTH", *user, address.password, within_s=timeout_s)
                if address.database:
                    await link.ask("SELECT", address.database, within_s=timeout_s)
            except BaseException:
                link.close()
                raise
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        while self._pending:
            self._pending.popleft().lapse("the connection to the counter store is gone")

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not False:
                self._pending.popleft().answer(reply)
        except (hiredis.ProtocolError, IndexError):
            self.close()

    def send(self, *words: Word, asker: Asker | None = None) -> Pending:
        """Ask with this tick's others. The future fails with Unanswered once the deadline has passed."""
        future: asyncio.Future[object] = self._loop.create_future()
        pending = Pending(future, asker)
        if self.closed:
            pending.lapse("the connection to the counter store is closed")
            return pending
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(hiredis.pack_command(words))  # type: ignore[arg-type]
        self._pending.append(pending)
        return pending

    def tell(self, *words: Word) -> None:
        """Ask, and do not care for the answer."""
        self.send(*words).future.add_done_callback(_ignore)

    async def ask(self, *words: Word, within_s: float) -> object:
        """The answer to a command that may take longer than a decision. Raises Unanswered, hiredis.HiredisError."""
        patient = _Patient(self._loop.create_future())
        first = await self.send(*words, asker=patient).future
        if not isinstance(first, _Patient):
            return first
        if self.closed:
            raise Unanswered("the connection to the counter store is gone")
        try:
            async with asyncio.timeout(within_s):
                reply = await patient.answer
        except TimeoutError:
            raise Unanswered(f"no answer within {within_s:g} s") from None
        if isinstance(reply, Exception):
            raise reply
        return reply

    def oldest_s(self) -> float:
        """For how long the oldest command has been without an answer; 0 when there is none."""
        sent_at = self._pending[0].sent_at if self._pending else None
        return 0.0 if sent_at is None else self._loop.time() - sent_at

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _flush(self) -> None:
        data, self._outbox = b"".join(self._outbox), []
        if self.closed or self._transport is None:
            return
        now = self._loop.time()
        batch = []
        for pending in reversed(self._pending):
            if pending.sent_at is not None:
                break
            pending.sent_at = now
            batch.append(pending)
        self._transport.write(data)
        self._loop.call_at(now + self._deadline_s, self._expire, batch, now + self._deadline_s)

    def _expire(self, batch: list[Pending], due: float | None) -> None:
        """Give up on a batch. If it was this loop that stood still, first look whether answers wait to be read."""
        late = [pending for pending in batch if not pending.future.done()]
        if late and due is not None and self._loop.time() - due > self._deadline_s / 4:
            self._loop.call_later(0.0005, self._expire, late, None)
            return
        for pending in late:
            pending.lapse(f"no answer within {1_000 * self._deadline_s:g} ms")


class _Patient:
    """An asker that goes on waiting past the deadline of decisions."""

    def __init__(self, answer: asyncio.Future[object]) -> None:
        self.answer = answer

    def read(self, reply: object) -> object:
        return reply

    def lapse(self) -> object:
        return self

    def late(self, reply: object) -> None:
        if not self.answer.done():
            self.answer.set_result(reply)


def _ignore(future: asyncio.Future[object]) -> None:
    if not future.cancelled():
        future.exception()


def cluster_slot(key: str) -> int:
    """The cluster slot of a key: CRC16 (XMODEM) of its hash tag. Source: Redis cluster specification."""
    start = key.find("{")
    end = key.find("}", start + 1) if start >= 0 else -1
    tag = key[start + 1 : end] if end > start + 1 else key
    crc = 0
    for byte in tag.encode():
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1) ^ 0x1021 if crc & 0x8000 else crc << 1
        crc &= 0xFFFF
    return crc % 16_384
