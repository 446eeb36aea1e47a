"""Idempotency-Key: what is kept of an answer, and how it is given again, with the usage that was settled then."""

from __future__ import annotations

import hashlib

import msgspec

from ledger import usage
from ledger.database import Database
from ledger.gate import Receipt, Tokens
from ledger.hold import MAX_ANSWER_BYTES
from ledger.usage import UsageRow
from proxy.asgi import JSON, STREAM_HEADERS, Headers, Reply
from proxy.metering import Settled
from proxy.openai.dialects import Dialect
from proxy.openai.errors import invalid
from proxy.openai.requests import Call
from proxy.openai.sse import EventCutter

MAX_KEY_CHARS = 255
REPLAYED: tuple[bytes, bytes] = (b"idempotent-replayed", b"true")


class Kept(msgspec.Struct, frozen=True, array_like=True):
    """body: of a plain answer as the upstream sent it; of a stream the events that were read, without `[DONE]`."""

    streamed: bool
    body: bytes
    native: str = ""
    """Which dialect the upstream spoke, when not chat completions."""


class Recorder:
    """Gathers what is read of a stream, as long as it is small enough to be kept."""

    def __init__(self, native: str = "") -> None:
        self._native = native
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_ANSWER_BYTES:
            self._parts.append(data)

    def kept(self) -> bytes | None:
        """For the outcome; None when it grew too large."""
        return keep(True, b"".join(self._parts), self._native) if self._size <= MAX_ANSWER_BYTES else None


def keep(streamed: bool, body: bytes, native: str = "") -> bytes:
    return msgspec.msgpack.encode(Kept(streamed, body, native))


def idempotency_key(value: bytes | None) -> str | None:
    """The header's value. Raises ApiError 400 when it is none that can be kept."""
    if not value:
        return None
    if len(value) > MAX_KEY_CHARS or not value.isascii() or not value.decode().isprintable():
        raise invalid(f"Idempotency-Key must be at most {MAX_KEY_CHARS} printable ASCII characters.", "Idempotency-Key")
    return value.decode()


def body_hash(path: str, body: bytes) -> str:
    """Hex SHA-256 of a request: the same key with another one is refused."""
    return hashlib.sha256(path.encode() + b"\0" + body).hexdigest()


async def replay(db: Database, dialect: Dialect, call: Call, request_id: str, answer: bytes, reply: Reply) -> None:
    """Give a kept answer again, under the id of the request that was billed. Raises NotFound, LedgerUnavailable."""
    kept = msgspec.msgpack.decode(answer, type=Kept)
    async with db.read() as c:
        row = (await usage.get_request(c, request_id)).usage
    settled = _settled(row)
    dialect = dialect.at(frozenset({kept.native}))
    reply.request_id = request_id
    headers: Headers = [
        REPLAYED,
        (b"x-tallygate-deployment", row.deployment.encode("latin-1", "replace")),
        (b"x-tallygate-draft-model", (row.draft_model or "none").encode("latin-1", "replace")),
        (b"x-tallygate-cost-usd", settled.cost_usd),
        (b"x-tallygate-cost-cny", settled.cost_cny),
    ]
    if not kept.streamed:
        plain = dialect.plain(request_id, call, kept.body)
        body = plain.body(settled.usage(generates=dialect.generates))
        await reply.whole(200, body, [JSON, *headers])
        return
    reader = dialect.reader(request_id, call)
    parts = [reader.accept(reader.read(event)) for event in EventCutter().feed(kept.body)]
    await reply.begin(200, [*STREAM_HEADERS, *headers])
    await reply.end(b"".join(parts) + reader.tail(settled.usage(), cut=False))


def _settled(row: UsageRow) -> Settled:
    tokens = Tokens(
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        cache_write_tokens=row.cache_write_tokens,
        generated_tokens=row.generated_tokens,
        reasoning_tokens=row.reasoning_tokens,
        draft_tokens=row.draft_tokens,
        accepted_tokens=row.accepted_tokens,
        target_passes=row.target_passes,
    )
    receipt = Receipt(
        row.request_id,
        row.billed_tokens,
        row.waiver_reason,
        row.cost_usd_pico,
        row.cost_cny_pico,
        row.price_version,
    )
    return Settled(tokens, receipt, row.draft_model)
