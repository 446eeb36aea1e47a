"""Where answers come from: one object a provider (or the local backend), all spoken to in the same way.

What can go wrong is sorted into few kinds, because the kind decides what follows: another deployment, a pause for this
one, or the caller's own mistake handed back to the caller.
"""

from __future__ import annotations

import ssl
import zlib
from dataclasses import dataclass, replace
from typing import Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from proxy.counting import Counting, RulesOfThumb
from proxy.http1 import ConnectFailed, ConnectionLost, ConnectTimedOut, Origin, Response
from proxy.openai.errors import ApiError, upstream_error, upstream_timeout

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 1.0
"""A place that wants to be left alone for longer is left: the next deployment is asked."""
MAX_ANSWER_BYTES = 256 * 2**20
_PASSED_THROUGH = frozenset({400, 404, 413, 422, 429})
_RETRY_HEADERS = (b"retry-after", b"retry-after-ms", b"x-should-retry")

Kind = Literal["connect", "timeout", "busy", "broken", "request"]
"""connect: never reached it · timeout: no first byte in time · busy: 429 · broken: 5xx, 401, 403, nonsense, a reset ·
request: the request itself is wrong, whoever serves it."""


class UpstreamFailed(Exception):
    """No usable answer. `error` is what the client gets if nothing else can serve it."""

    def __init__(self, kind: Kind, error: ApiError, pause_ms: int | None = None) -> None:
        super().__init__(f"{kind}: {error.message}")
        self.kind = kind
        self.error = error
        self.pause_ms = pause_ms
        """How long it asked to be left alone (429)."""
        self.refused = kind in ("connect", "busy", "request")
        """It did not take the request, so it costs nothing; else it may have worked for us, and bills that."""


class Answer(Protocol):
    """An answer as it arrives: `chunk` gives b"" at the end and raises ConnectionLost when it breaks off."""

    status: int
    headers: dict[bytes, bytes]

    async def chunk(self) -> bytes: ...
    def close(self) -> None: ...
    def leave(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. `total` is for each deployment that is asked, from its turn in the queue on; a plain answer is one long
    first byte."""

    connect: float = 10.0
    first_byte: float = 60.0
    idle: float = 60.0
    total: float = 120.0

    def for_one_piece(self) -> Patience:
        """For an answer that begins only when it is complete."""
        return replace(self, first_byte=self.total)


@dataclass(frozen=True, slots=True)
class Retries:
    """How often the same place is asked again, and after which failures; never once a byte of an answer has come."""

    times: int = 0
    kinds: frozenset[Kind] = frozenset()

    def pause_s(self, failure: UpstreamFailed, tries: int) -> float | None:
        """How long to wait before the next try; None when there is none. tries: made so far."""
        if tries > self.times or failure.kind not in self.kinds:
            return None
        own = FIRST_RETRY_S * 2 ** (tries - 1)
        wanted = own if failure.pause_ms is None else failure.pause_ms / 1000
        return wanted if wanted <= LONGEST_RETRY_S else None


class Upstream:
    """An OpenAI-compatible server under one base URL (which includes `/v1`)."""

    def __init__(
        self,
        name: str,
        base_url: str,
        api_key: str | None,
        patience: Patience,
        *,
        max_concurrency: int = 64,
        is_backend: bool = False,
        native: frozenset[str] = frozenset(),
        counting: Counting | None = None,
        retries: Retries = Retries(),
        metrics_path: str | None = None,
    ) -> None:
        url = urlsplit(base_url)
        tls = ssl.create_default_context() if url.scheme == "https" else None
        host, port = url.hostname or "", url.port or (443 if tls else 80)
        self.name = name
        self.patience = patience
        self.max_concurrency = max_concurrency
        self.is_backend = is_backend
        self.counting = counting or RulesOfThumb()
        self.native = native
        """Dialects beside chat completions that it speaks itself."""
        self.retries = retries
        self.metrics_path = metrics_path
        self.up = True
        """False while its health check fails; nobody is sent there."""
        self._origin = Origin(host, port, tls, patience.connect)
        self._path = url.path.rstrip("/").encode()
        fixed = (
            f" HTTP/1.1\r\nhost: {url.netloc.rpartition('@')[2]}\r\n"
            "content-type: application/json\r\naccept-encoding: identity\r\nuser-agent: tallygate\r\n"
        )
        self._fixed = (fixed + (f"authorization: Bearer {api_key}\r\n" if api_key else "")).encode("latin-1")
        self._fixed_with_x_api_key = (fixed + (f"x-api-key: {api_key}\r\n" if api_key else "")).encode("latin-1")

    async def post(self, path: bytes, body: bytes, headers: bytes = b"", *, x_api_key: bool = False) -> Answer:
        """Send a request; return once status and headers are in. Raises UpstreamFailed (connect or broken).

        path: below the base URL, such as b"/chat/completions". headers: complete lines, each ending in CR LF.
        x_api_key: show our key in that header, not as a bearer token.
        """
        fixed = self._fixed_with_x_api_key if x_api_key else self._fixed
        head = b"POST %b%b%b%bcontent-length: %d\r\n\r\n" % (self._path, path, fixed, headers, len(body))
        return await self._send(head, body)

    async def get(self, path: bytes, *, below_base: bool = True) -> Answer:
        """`below_base` False: a path of the server itself, such as b"/health"."""
        return await self._send(b"GET %b%b%b\r\n" % (self._path if below_base else b"", path, self._fixed), b"")

    async def _send(self, head: bytes, body: bytes) -> Answer:
        try:
            response = await self._origin.send(head, body)
        except ConnectTimedOut as error:
            raise UpstreamFailed("connect", upstream_timeout(f"The upstream `{self.name}`: {error}.")) from error
        except ConnectFailed as error:
            raise UpstreamFailed("connect", upstream_error(f"The upstream `{self.name}`: {error}.")) from error
        except ConnectionLost as error:
            raise UpstreamFailed("broken", upstream_error(f"The upstream `{self.name}`: {error}.")) from error
        encoding = response.headers.get(b"content-encoding", b"identity").lower()
        if encoding == b"identity":
            return response
        if encoding in (b"gzip", b"x-gzip", b"deflate"):
            return Inflated(response)
        response.close()
        raise UpstreamFailed(
            "broken",
            upstream_error(f"The upstream `{self.name}` sent an unknown encoding: {encoding.decode('latin-1')}."),
        )

    def close(self) -> None:
        self._origin.close()


class Inflated:
    """A gzip or deflate answer, unpacked as it arrives (asked not to, some servers compress all the same)."""

    def __init__(self, response: Response) -> None:
        self._response = response
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 32)
        self._begun = False
        self.status = response.status
        self.headers = response.headers

    async def chunk(self) -> bytes:
        while packed := await self._response.chunk():
            if data := self._inflate(packed):
                return data
        data = self._zlib.flush()
        if not self._zlib.eof and self._begun:
            raise ConnectionLost("the compressed answer was cut short")
        return data

    def close(self) -> None:
        self._response.close()

    def leave(self) -> None:
        self._response.leave()

    def _inflate(self, packed: bytes) -> bytes:
        try:
            data = self._zlib.decompress(packed)
        except zlib.error:
            if self._begun:
                raise ConnectionLost("the compressed answer is damaged") from None
            self._zlib = zlib.decompressobj(-zlib.MAX_WBITS)  # "deflate" without its header, a common mistake
            try:
                data = self._zlib.decompress(packed)
            except zlib.error:
                raise ConnectionLost("the compressed answer is damaged") from None
        self._begun = True
        return data


async def read_all(answer: Answer, limit_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """The whole body. Raises ConnectionLost, also when it is larger than the limit. Unless it is read to its end, for
    whatever reason, its connection is closed."""
    try:
        first = await answer.chunk()
        parts = [first]
        total = len(first)
        while part := await answer.chunk():
            parts.append(part)
            total += len(part)
            if total > limit_bytes:
                raise ConnectionLost(f"the answer is larger than {limit_bytes} bytes")
    except BaseException:
        answer.close()
        raise
    return first if len(parts) == 1 else b"".join(parts)


class _ErrorBody(msgspec.Struct):
    error: msgspec.Raw


_error_decoder = msgspec.json.Decoder(_ErrorBody)


def failure_of(name: str, status: int, headers: dict[bytes, bytes], body: bytes) -> UpstreamFailed:
    """What an answer that is not 2xx means. The caller's own mistakes and 429 pass through with their error object."""
    if status not in _PASSED_THROUGH:
        failed = UpstreamFailed("broken", upstream_error(f"The upstream `{name}` answered with HTTP {status}."))
        failed.refused = True
        return failed
    passed = tuple((header, headers[header]) for header in _RETRY_HEADERS if header in headers)
    error = ApiError(
        status,
        "rate_limit_error" if status == 429 else "invalid_request_error",
        None,
        f"The upstream `{name}` answered with HTTP {status}.",
        body=body if is_error_body(body) else None,
        headers=passed,
    )
    if status == 429:
        return UpstreamFailed("busy", error, _pause_ms(headers))
    return UpstreamFailed("request", error)


def is_error_body(body: bytes) -> bool:
    """Whether this is a JSON object with an `error` that is not null."""
    try:
        return bytes(_error_decoder.decode(body).error) != b"null"
    except msgspec.MsgspecError:
        return False


def _pause_ms(headers: dict[bytes, bytes]) -> int | None:
    for name, factor in ((b"retry-after-ms", 1), (b"retry-after", 1000)):
        try:
            return max(0, min(int(float(headers[name]) * factor), 60_000))
        except (KeyError, ValueError, OverflowError):
            continue
    return None
