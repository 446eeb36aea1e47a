"""How the fake provider may misbehave: a few knobs, and a table of named cases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

Usage = Literal[
    "last",  # in one last chunk without choices, when asked for
    "always",  # the same, asked for or not
    "each",  # cumulative, in every chunk
    "finish",  # in the chunk that carries finish_reason
    "first",  # in the first chunk, and never again
    "none",
    "zero",
    "null",
    "negative",
    "absurd",  # above 100 000 000
    "fraction",
    "text",  # numbers as strings
    "partial",  # without completion_tokens
    "list",  # not an object
    "inflated",  # total_tokens above the sum
    "decreasing",  # in every chunk, and falling
    "twice",  # two last chunks, the second one larger
    "cached",  # half of the prompt from a cache
]
End = Literal[
    "done",  # as it should be
    "close",  # the connection closes in the middle of the body
    "reset",  # … with a TCP reset
    "stall",  # nothing more comes, the connection stays open
    "half",  # half an event, then the connection closes
    "finish",  # the body ends properly, but early: no finish_reason, no usage, no [DONE]
    "error",  # an error event, then a proper end
    "garbage",  # bytes that are no event, then a proper end
]


@dataclass(frozen=True, slots=True)
class Fault:
    """Times are milliseconds. The default is a provider at its best."""

    accept: Literal["answer", "close", "reset", "hang"] = "answer"
    """What happens once the request is read: `hang` says nothing and keeps the connection."""
    headers_delay_ms: float = 0
    headers_trickle_ms: float = 0
    """Pause after each byte of the head."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str | None = None
    """Sent instead of the answer; JSON unless `headers` say otherwise."""
    tokens: int | None = None
    """Generated tokens; otherwise `max_tokens` of the request, at most 16."""
    first_chunk_delay_ms: float = 0
    chunk_delay_ms: float = 0
    end: End = "done"
    end_after: int = 3
    """For any `end` but `done`: how many tokens go out before."""
    usage: Usage = "last"
    done: bool = True
    """Send `data: [DONE]`."""
    finish_reason: str | None = "stop"
    newline: str = "\n"
    space: bool = True
    """`data: {…}` rather than `data:{…}`."""
    comments: bool = False
    event_names: bool = False
    bom: bool = False
    per_packet: int = 1
    """Events in one write; 0: all in one."""
    packet_bytes: int = 0
    """Cut the body into writes of so many bytes."""
    encoding: Literal["identity", "gzip", "deflate", "raw-deflate", "br-lie"] = "identity"
    framing: Literal["chunked", "length", "close"] = "chunked"
    length_error: int = 0
    """Added to Content-Length (framing becomes `length`): positive is a short body."""
    multibyte: bool = False
    json: bool = False
    """The content is a JSON object."""
    calls: int = 0
    """How many calls of the first tool the answer makes; it then says nothing else, unless `tokens` wants it to."""
    reasoning: int = 0
    """How many tokens of `reasoning_content` come first."""
    empty_deltas: bool = False
    """An empty delta before each token."""
    keep_alive: bool = True
    content_type: str | None = None
    answers_as: Literal["asked", "plain", "stream"] = "asked"
    """Answer plain to a stream request, or the other way round."""


def _error(message: str, code: str | None, kind: str = "invalid_request_error", **more: Any) -> str:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code, **more}})


_HTML = "<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>"
_AS_HTML = {"content-type": "text/html"}

FAULTS: dict[str, Fault] = {
    "none": Fault(),
    # -- the connection
    "close": Fault(accept="close"),
    "reset": Fault(accept="reset"),
    "hang": Fault(accept="hang"),
    "slow-headers": Fault(headers_delay_ms=300),
    "trickled-headers": Fault(headers_trickle_ms=2),
    "no-keep-alive": Fault(keep_alive=False),
    "close-framed": Fault(framing="close", keep_alive=False),
    "length-framed": Fault(framing="length"),
    # -- statuses and bodies
    "400": Fault(status=400, body=_error("Unrecognized request argument", "unknown_parameter")),
    "401": Fault(status=401, body=_error("Incorrect API key provided: sk-pro…", "invalid_api_key")),
    "403": Fault(status=403, body=_error("Country not supported", "unsupported_country", "permission_error")),
    "404": Fault(status=404, body=_error("The model does not exist", "model_not_found")),
    "413": Fault(status=413, body=_error("Request too large", "request_too_large")),
    "422": Fault(status=422, body=_error("Unprocessable", "unprocessable")),
    "429": Fault(status=429, body=_error("Rate limit reached", "rate_limit_exceeded", "rate_limit_error")),
    "429-retry-after": Fault(
        status=429,
        headers={"retry-after": "7"},
        body=_error("Rate limit reached", "rate_limit_exceeded", "rate_limit_error"),
    ),
    "429-quota": Fault(status=429, body=_error("You exceeded your quota", "insufficient_quota", "insufficient_quota")),
    "500": Fault(status=500, body=_error("The server had an error", None, "server_error")),
    "502-html": Fault(status=502, headers=_AS_HTML, body=_HTML),
    "503": Fault(status=503, headers={"retry-after": "2"}, body=_error("Overloaded", None, "overloaded_error")),
    "529": Fault(status=529, body=_error("Overloaded", None, "overloaded_error")),
    "redirect": Fault(status=302, headers={"location": "http://127.0.0.1:9/"}, body=""),
    "200-html": Fault(headers=_AS_HTML, body=_HTML),
    "200-error": Fault(body=_error("Internal error", "internal_error", "server_error")),
    "200-error-event": Fault(
        headers={"content-type": "text/event-stream"},
        body="data: " + _error("Internal error", "internal_error", "server_error") + "\n\n",
    ),
    "200-empty": Fault(body=""),
    "200-null": Fault(body="null"),
    "200-list": Fault(body="[]"),
    "200-much-and-no-event": Fault(headers=_AS_HTML, body="<p>" * 700_000),
    "200-not-json": Fault(body='{"id": "chatcmpl-1", "choices": [{"mess'),
    "200-no-choices": Fault(body='{"id": "chatcmpl-1", "object": "chat.completion", "choices": []}'),
    "204": Fault(status=204, body=""),
    "400-html": Fault(status=400, headers=_AS_HTML, body="<html>Bad Request</html>"),
    "400-text-error": Fault(status=400, body='{"error": "just a string"}'),
    "provider-headers": Fault(
        headers={"openai-organization": "org-secret", "x-ratelimit-remaining-requests": "1", "set-cookie": "a=b"}
    ),
    # -- bodies that break
    "short-body": Fault(length_error=100),
    "long-body": Fault(length_error=-10),
    "cut": Fault(end="close"),
    "cut-at-once": Fault(end="close", end_after=0),
    "reset-midway": Fault(end="reset"),
    "stall": Fault(end="stall"),
    "stall-at-once": Fault(end="stall", end_after=0),
    "half-event": Fault(end="half"),
    "ends-early": Fault(end="finish"),
    "error-midway": Fault(end="error"),
    "error-first": Fault(end="error", end_after=0),
    "garbage-midway": Fault(end="garbage"),
    # -- usage
    "usage-always": Fault(usage="always"),
    "usage-each": Fault(usage="each"),
    "usage-finish": Fault(usage="finish"),
    "usage-first": Fault(usage="first"),
    "usage-first-then-cut": Fault(usage="first", end="close"),
    "usage-none": Fault(usage="none"),
    "usage-zero": Fault(usage="zero"),
    "usage-null": Fault(usage="null"),
    "usage-negative": Fault(usage="negative"),
    "usage-absurd": Fault(usage="absurd"),
    "usage-fraction": Fault(usage="fraction"),
    "usage-text": Fault(usage="text"),
    "usage-partial": Fault(usage="partial"),
    "usage-list": Fault(usage="list"),
    "usage-inflated": Fault(usage="inflated"),
    "usage-decreasing": Fault(usage="decreasing"),
    "usage-twice": Fault(usage="twice"),
    # -- the event stream's letter
    "no-done": Fault(done=False),
    "no-finish-reason": Fault(finish_reason=None),
    "finish-length": Fault(finish_reason="length"),
    "crlf": Fault(newline="\r\n"),
    "cr": Fault(newline="\r"),
    "no-space": Fault(space=False),
    "comments": Fault(comments=True),
    "event-names": Fault(event_names=True),
    "byte-order-mark": Fault(bom=True),
    "all-in-one-packet": Fault(per_packet=0),
    "three-a-packet": Fault(per_packet=3),
    "many-packets-an-event": Fault(packet_bytes=7),
    "byte-by-byte": Fault(packet_bytes=1, multibyte=True, tokens=6),
    "multibyte": Fault(multibyte=True, packet_bytes=5),
    # -- what an answer holds
    "calls": Fault(calls=1),
    "two-calls": Fault(calls=2, tokens=3),
    "json": Fault(json=True),
    "thinks": Fault(reasoning=5, usage="cached"),
    "cached": Fault(usage="cached"),
    "empty-deltas": Fault(empty_deltas=True),
    "gzip": Fault(encoding="gzip"),
    "deflate": Fault(encoding="deflate"),
    "raw-deflate": Fault(encoding="raw-deflate"),
    "wrong-encoding": Fault(encoding="br-lie"),
    "wrong-content-type": Fault(content_type="text/plain"),
    "called-json": Fault(content_type="application/json"),
    "plain-for-stream": Fault(answers_as="plain"),
    "stream-for-plain": Fault(answers_as="stream"),
    # -- pace
    "slow-first-chunk": Fault(first_chunk_delay_ms=300),
    "slow-chunks": Fault(chunk_delay_ms=20, tokens=50),
    "fifty-chunks": Fault(chunk_delay_ms=2, tokens=50, usage="each"),
    "endless": Fault(chunk_delay_ms=1, tokens=100_000),
}

_FIELDS = frozenset(f.name for f in fields(Fault))


def fault_of(wanted: Any) -> Fault:
    """The fault of a name, a JSON text or an object. Raises ValueError that names what exists."""
    if isinstance(wanted, str) and wanted.startswith("{"):
        wanted = json.loads(wanted)
    if isinstance(wanted, str):
        wanted = {"name": wanted}
    if not isinstance(wanted, dict):
        raise ValueError(f"a fault is a name or an object, not {wanted!r}")
    knobs = dict(wanted)
    name = knobs.pop("name", "none")
    if name not in FAULTS:
        raise ValueError(f"no fault {name!r}; there are: {', '.join(FAULTS)}")
    if unknown := knobs.keys() - _FIELDS:
        raise ValueError(f"no such knobs: {sorted(unknown)}; there are: {', '.join(sorted(_FIELDS))}")
    return replace(FAULTS[name], **knobs)
