"""Calendar periods in a team's time zone, as half-open intervals of UTC milliseconds. Pure functions.

A billing period is a month written "YYYY-MM". A window is what a quota counts over: minute, hour, day, month or total.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal
from zoneinfo import ZoneInfo

from ledger.errors import Invalid

Window = Literal["minute", "hour", "day", "month", "total"]

DEFAULT_TIMEZONE = "Asia/Shanghai"
FIRST_YEAR = 1969
"""Of the epoch's first instant in western zones. Earlier months have no usage, and some have no instants."""
MINUTE_MS = 60_000
HOUR_MS = 3_600_000
_MONTH = re.compile(r"([0-9]{4})-(0[1-9]|1[0-2])")


@lru_cache(maxsize=1024)
def zone(name: str) -> ZoneInfo:
    """The zone of an IANA name such as "Asia/Shanghai". Raises Invalid."""
    try:
        if name == "localtime":  # what it means differs from host to host
            raise KeyError(name)
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise Invalid(
            f"unknown time zone {name!r}: use an IANA name such as Asia/Shanghai or UTC", "timezone"
        ) from None


def period_of(at_ms: int, timezone: str) -> str:
    """The month "YYYY-MM" that the instant falls into in that zone."""
    return _local(at_ms, timezone).strftime("%Y-%m")


def period_bounds(period: str, timezone: str) -> tuple[int, int]:
    """(first instant, first instant after it) of a month, in UTC milliseconds. Raises Invalid unless "YYYY-MM"."""
    return _start_of_month(period, timezone), _start_of_month(next_period(period), timezone)


def is_month(text: str) -> bool:
    """Whether it is written "YYYY-MM"."""
    return _MONTH.fullmatch(text) is not None


def next_period(period: str) -> str:
    year, month = _year_month(period)
    return f"{year + month // 12:04d}-{month % 12 + 1:02d}"


def previous_period(period: str) -> str:
    year, month = _year_month(period)
    return f"{year - (month == 1):04d}-{(month - 2) % 12 + 1:02d}"


def window_start(window: Window, at_ms: int, timezone: str) -> int:
    """The first instant of the window that `at_ms` lies in; 0 for total."""
    return window_bounds(window, at_ms, timezone)[0]


def window_bounds(window: Window, at_ms: int, timezone: str) -> tuple[int, int | None]:
    """(first instant, first instant after it) of the window that `at_ms` lies in; (0, None) for total.

    A day may have 23 or 25 hours. Minutes and hours are those of the wall clock at that instant.
    """
    match window:
        case "total":
            return 0, None
        case "minute":
            return at_ms - at_ms % MINUTE_MS, at_ms - at_ms % MINUTE_MS + MINUTE_MS
        case "hour":
            offset_ms = _offset_ms(at_ms, timezone)
            start = at_ms - (at_ms + offset_ms) % HOUR_MS
            return start, start + HOUR_MS
        case "day":
            midnight = _local(at_ms, timezone).replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None, fold=0)
            return _instant(midnight, timezone), _instant(midnight + timedelta(days=1), timezone)
        case "month":
            return period_bounds(period_of(at_ms, timezone), timezone)
    raise Invalid(f"unknown window {window!r}: use minute, hour, day, month or total", "window")


@lru_cache(maxsize=4096)
def _start_of_month(period: str, timezone: str) -> int:
    year, month = _year_month(period)
    return _instant(datetime(year, month, 1), timezone)


def _year_month(period: str) -> tuple[int, int]:
    match = _MONTH.fullmatch(period)
    if match is None or not FIRST_YEAR <= int(match[1]) <= 9998:
        raise Invalid(f"not a month: {period!r}; write it like 2026-11", "month")
    return int(match[1]), int(match[2])


def _instant(wall_clock: datetime, timezone: str) -> int:
    """The earliest instant at which the wall clock shows this; where it skips it, the instant of the skip."""
    return int(wall_clock.replace(tzinfo=zone(timezone), fold=0).timestamp()) * 1000


def _local(at_ms: int, timezone: str) -> datetime:
    return datetime.fromtimestamp(at_ms // 1000, UTC).astimezone(zone(timezone))


def still_ahead(until_ms: int, now_ms: int, span_ms: int) -> bool:
    """Whether an instant that was noted as at most `span_ms` ahead is still to come. If it lies further ahead the clock
    has gone back since then, and it is not waited for."""
    return 0 < until_ms - now_ms <= span_ms


def whole_hours(timezone: str, from_ms: int | None, to_ms: int | None) -> bool:
    """Whether the zone's days begin at whole hours of UTC from then to then, daylight saving included."""
    first = 2000 if from_ms is None else datetime.fromtimestamp(from_ms // 1000, UTC).year
    last = 2100 if to_ms is None else datetime.fromtimestamp(to_ms // 1000, UTC).year
    return all(_whole_hours_in(timezone, year) for year in range(max(first, 2000), min(last, 2100) + 1))


@lru_cache(maxsize=4096)
def _whole_hours_in(timezone: str, year: int) -> bool:
    start_ms = int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) * 1000
    return all(_offset_ms(start_ms + day * 24 * HOUR_MS, timezone) % HOUR_MS == 0 for day in range(367))


def _offset_ms(at_ms: int, timezone: str) -> int:
    offset = _local(at_ms, timezone).utcoffset()
    assert offset is not None
    return int(offset.total_seconds()) * 1000
