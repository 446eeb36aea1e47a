"""One streamed answer on its way to the client: read, counted, paid for as it grows, passed on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ledger.gate import Hold
from ledger.records import Status
from proxy.asgi import STREAM_HEADERS, Headers, Reply
from proxy.http1 import ConnectionLost
from proxy.openai.chunks import StreamReader
from proxy.openai.errors import ApiError, upstream_error, upstream_timeout
from proxy.openai.sse import EventCutter, EventTooLong
from proxy.replay import Recorder
from proxy.upstream import Answer, Patience, UpstreamFailed
from proxy.watch import Interrupted, Watch

QUIET_S = 10.0
"""After so long without an event the client gets a comment, so that nobody between takes the stream for dead."""
MAX_PRELUDE_BYTES = 2**20
"""How much may come before the first event: comments, at most."""
LAST_WORDS_S = 3.0
"""How long a finished answer may take to bring its usage and `[DONE]`."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How it ended. `how`: done · cut (the money did not reach) · gone (the client) · stopped (by our own end) · broken
    (the upstream)."""

    how: Literal["done", "cut", "gone", "stopped", "broken"]
    error: ApiError | None = None
    long: bool = False
    """It was still flowing when its time was over: that says nothing against the upstream."""

    @property
    def status(self) -> Status:
        return {"gone": "cancelled", "stopped": "cancelled", "broken": "failed"}.get(self.how, "completed")  # type: ignore[return-value]


class Relay:
    """Call `open` first: until it returns, another deployment can still answer. Then `run`, settle, and send `tail`."""

    def __init__(self, name: str, answer: Answer, reader: StreamReader, watch: Watch, patience: Patience) -> None:
        self._name = name
        self._answer = answer
        self._watch = watch
        self._patience = patience
        self._cutter = EventCutter()
        self._pending = b""
        self._ending: Ending | None = None
        self.reader = reader
        self.recorder: Recorder | None = None
        """Set when the answer may be asked for again."""
        self.first_token_ns: int | None = None

    async def open(self) -> None:
        """Wait for the first event that is more than a comment. Raises UpstreamFailed, Interrupted (client gone)."""
        try:
            while True:
                packet = await self._watch.wait(self._answer.chunk(), "first_byte", self._patience.first_byte)
                if not packet:
                    raise self._failed("ended without an answer")
                self._pending += packet
                if b"data:" in packet or b"data:" in self._pending[-len(packet) - 8 :]:
                    break
                if len(self._pending) > MAX_PRELUDE_BYTES:
                    raise self._failed("sent much, and no event")
        except ConnectionLost as error:
            raise self._failed(str(error)) from error
        except Interrupted as error:
            if error.reason == "client_gone":
                raise
            raise UpstreamFailed(
                "timeout", upstream_timeout(f"The upstream `{self._name}` sent nothing in time.")
            ) from error

    async def run(self, hold: Hold, reply: Reply, headers: Headers, prompt_tokens: Callable[[], int]) -> Ending:
        """Pass the stream on until it ends. Raises UpstreamFailed when its first event is an error.

        headers: of the response, without those of every stream. prompt_tokens: for progress, until the upstream tells.
        """
        packet, self._pending = self._pending, b""
        while packet:
            out = await self._read(packet, hold)
            if out:
                if not reply.begun:
                    await reply.begin(200, [*STREAM_HEADERS, *headers])
                await self._write(reply, out)
                usage = self.reader.usage
                told = usage.prompt_tokens if usage is not None else None
                hold.progress(prompt_tokens if told is None else told, self.reader.generated_tokens)
            if self._ending is not None:
                break
            packet = await self._next(reply)
        ending = self._ending or await self._end(reply)
        if not reply.begun and ending.how != "gone":
            if ending.how == "broken" or not self.reader.has_spoken:
                raise UpstreamFailed("broken", (ending.error or self._failed("sent no answer").error))
            await reply.begin(200, [*STREAM_HEADERS, *headers])
        return ending

    async def finish(self, hold: Hold, seconds: float) -> None:
        """The client has gone: read on, for so long and as far as the money reaches, to learn what was really used."""
        self._ending = None
        try:
            async with asyncio.timeout(seconds):
                while self._ending is None:
                    packet = await self._answer.chunk()
                    if not packet:
                        self._read_rest()
                        break
                    await self._read(packet, hold)
        except (TimeoutError, ConnectionLost):
            self._ending = Ending("gone")

    def leave(self) -> None:
        """Let go of the upstream: at once, or once the end of a complete answer has come in."""
        if self._ending is not None and self._ending.how == "done":
            self._answer.leave()
        else:
            self._answer.close()

    async def _read(self, packet: bytes, hold: Hold) -> bytes:
        """What may pass of a packet. Sets `_ending` when the stream is over."""
        out = []
        try:
            events = self._cutter.feed(packet)
        except EventTooLong as error:
            self._ending = Ending("broken", self._failed(str(error)).error)
            return b""
        for event in events:
            piece = self.reader.read(event)
            if piece.done:
                self._ending = Ending("done")
                break
            if piece.error is not None:
                self._ending = Ending("broken", self._failed("reported an error").error)
                break
            if piece.tokens:
                generated = self.reader.generated_with(piece)
                if not hold.covers(generated) and not await hold.extend(generated):
                    self._ending = Ending("cut")
                    break
                if self.first_token_ns is None:
                    self.first_token_ns = time.perf_counter_ns()
            data = self.reader.accept(piece)
            if data:
                out.append(data)
            if self.recorder is not None:
                self.recorder.add(event)
        return out[0] if len(out) == 1 else b"".join(out)

    async def _next(self, reply: Reply) -> bytes:
        """The next packet; b"" at the end, or with `_ending` set. Keeps a quiet client connection alive."""
        limit = LAST_WORDS_S if self.reader.finished else self._patience.idle
        waited = 0.0
        while True:
            try:
                return await self._watch.wait(self._answer.chunk(), "quiet", min(QUIET_S, limit - waited))
            except ConnectionLost as error:
                self._ending = (
                    Ending("done") if self.reader.finished else Ending("broken", self._failed(str(error)).error)
                )
                return b""
            except Interrupted as error:
                if error.reason == "client_gone":
                    self._ending = Ending("gone")
                    return b""
                waited += QUIET_S
                if error.reason == "total" or waited >= limit:
                    self._ending = self._too_late(error.reason)
                    return b""
            if reply.begun:
                await self._write(reply, self.reader.keep_alive)
                if self._ending is not None:
                    return b""

    async def _end(self, reply: Reply) -> Ending:
        """The body is over without `[DONE]`: fine if the answer was finished."""
        data = self._read_rest()
        if data and reply.begun:
            await self._write(reply, data)
        if self.reader.finished or self.reader.usage_is_final:
            return self._set(Ending("done"))
        return self._set(Ending("broken", self._failed("broke off before the answer was complete").error))

    def _read_rest(self) -> bytes:
        """What may pass of a last event that lacks its blank line. Sets `_ending` where it says that all is over."""
        rest = self._cutter.rest()
        if not rest.strip():
            return b""
        event = rest + b"\n\n"
        piece = self.reader.read(event)
        if piece.done:
            self._set(Ending("done"))
        elif piece.tokens or piece.finishes or piece.usage is not None:
            if self.recorder is not None:
                self.recorder.add(event)
            return self.reader.accept(piece)
        return b""

    def _set(self, ending: Ending) -> Ending:
        if self._ending is None:
            self._ending = ending
        return self._ending

    def _too_late(self, reason: str) -> Ending:
        if self.reader.finished:
            return Ending("done")
        long = reason == "total"
        what = "took too long for the whole of" if long else "fell silent in the middle of"
        return Ending("broken", upstream_timeout(f"The upstream `{self._name}` {what} an answer."), long)

    async def _write(self, reply: Reply, data: bytes) -> None:
        """A client that reads nothing for as long as we would wait for an upstream counts as gone."""
        try:
            await self._watch.wait(reply.part(data), "idle", self._patience.idle)
        except Interrupted:
            self._ending = Ending("gone")

    def _failed(self, what: str) -> UpstreamFailed:
        return UpstreamFailed("broken", upstream_error(f"The upstream `{self._name}`: {what}."))
