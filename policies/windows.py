"""Calendar windows of quotas: which day or month an instant lies in, in a zone. Half-open, UTC milliseconds. Pure.

A counter's window never moves backwards on its own: see `settle_window`, which both counter stores follow.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import Literal
from zoneinfo import ZoneInfo

Window = Literal["minute", "hour", "day", "month", "total"]
Span = Literal["day", "month", "total"]
NEVER = 0
"""The end of a window that does not end."""


class Calendar:
    """The windows of one span in one zone. Remembers the last answer: asking again within it costs a comparison."""

    __slots__ = ("_end", "_start", "span", "timezone")

    def __init__(self, span: Span, timezone: str) -> None:
        self.span = span
        self.timezone = timezone
        self._start, self._end = 0, NEVER if span == "total" else -1

    def bounds(self, at_ms: int) -> tuple[int, int]:
        """(first instant, first instant after it) of the window of `at_ms`; (0, NEVER) for a total."""
        if self._end == NEVER or self._start <= at_ms < self._end:
            return self._start, self._end
        self._start, self._end = _bounds(self.span, at_ms, self.timezone)
        return self._start, self._end


def settle_window(stored_start: int, used: int, start: int, end: int) -> tuple[int, int]:
    """(start, used) of a counter once the clock says its window is [start, end).

    A later window starts from nothing. A clock that jumped back keeps the stored window and what was used in it, so
    nothing is reset twice; if it had jumped ahead by more than a window, the count moves back with it, so that the next
    true turn still resets it.
    """
    if start > stored_start:
        return start, 0
    if end != NEVER and stored_start > end:
        return start, used
    return stored_start, used


def _bounds(span: Span, at_ms: int, timezone: str) -> tuple[int, int]:
    today = datetime.fromtimestamp(at_ms // 1_000, UTC).astimezone(_zone(timezone)).date()
    if span == "day":
        return _midnight(today, timezone), _midnight(today + timedelta(days=1), timezone)
    first = today.replace(day=1)
    return _midnight(first, timezone), _midnight((first + timedelta(days=32)).replace(day=1), timezone)


def _midnight(day: date, timezone: str) -> int:
    return int(datetime.combine(day, time(), _zone(timezone)).timestamp()) * 1_000


@lru_cache(maxsize=1024)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)
