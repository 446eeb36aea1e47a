"""Server-sent events that keep their bytes: an event is cut out of the stream exactly as it came, and read beside it.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

import re

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: every client skips it."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_EVENT_END = re.compile(rb"\r?\n\r?\n|\r\r")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_LONGEST_END = 4


class EventTooLong(ValueError):
    """One event outgrew the limit: the upstream does not speak SSE, or means harm."""


class EventCutter:
    """Cuts a stream of packets into events. Packets may end anywhere, also inside a character or a line end."""

    def __init__(self, max_event_bytes: int = 64 * 2**20) -> None:
        self._rest = b""
        self._max_event_bytes = max_event_bytes

    def feed(self, packet: bytes) -> list[bytes]:
        """The events that are complete now, each with its blank line. Joined with `rest()` they are the input."""
        scan_from = max(0, len(self._rest) - _LONGEST_END + 1)
        buffer = self._rest + packet if self._rest else packet
        events = []
        start = 0
        for end in _EVENT_END.finditer(buffer, scan_from):
            events.append(buffer[start : end.end()])
            start = end.end()
        self._rest = buffer[start:] if start else buffer
        if len(self._rest) > self._max_event_bytes:
            raise EventTooLong(f"an event of more than {self._max_event_bytes} bytes")
        return events

    def rest(self) -> bytes:
        """What came after the last blank line; a stream that breaks off inside an event leaves it here."""
        return self._rest


def data_of(event: bytes) -> bytes | None:
    """The payload of an event: its `data` lines joined by line feeds; None when it has none (a comment, an id …)."""
    if event.startswith(BYTE_ORDER_MARK):
        event = event[len(BYTE_ORDER_MARK) :]
    if event.startswith(b"data:"):
        payload = event[5:].strip()
        if b"\n" not in payload and b"\r" not in payload:
            return payload
    lines = [_value(line) for line in _LINE_END.split(event) if line.startswith(b"data:") or line == b"data"]
    return b"\n".join(lines) if lines else None


def event_name(event: bytes) -> bytes | None:
    """The value of the last `event` line; None when there is none."""
    names = [_value(line) for line in _LINE_END.split(event) if line.startswith(b"event:")]
    return names[-1] if names else None


def data_event(payload: bytes) -> bytes:
    """An event of one line."""
    return b"data: " + payload + b"\n\n"


def _value(line: bytes) -> bytes:
    value = line.partition(b":")[2]
    return value[1:] if value.startswith(b" ") else value
