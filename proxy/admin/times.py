"""Instants on the admin API and the command line: RFC 3339 in and out, a plain date means its midnight in a zone."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from typing import Annotated
from zoneinfo import ZoneInfo

import msgspec

from ledger.errors import Invalid

Instant = Annotated[
    str, msgspec.Meta(description="RFC 3339 with an offset (2026-12-01T00:00:00Z), a date, or Unix seconds as text")
]

_LAST_MS = 253_370_764_800_000 - 1
"""The end of the year 9998: a day later is still a date, in every zone."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_SECONDS = re.compile(r"\d{9,11}")


def iso(at_ms: int | None) -> str | None:
    """UTC with milliseconds: "2026-11-30T17:14:40.123Z"; None stays None."""
    if at_ms is None:
        return None
    return required_iso(at_ms)


def required_iso(at_ms: int) -> str:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at_ms)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at_ms % 1000:03d}Z"


def parse_instant(text: str | None, field: str, zone: str) -> int | None:
    """UTC milliseconds. Raises Invalid naming `field`, also for a time without an offset: nobody knows whose it is."""
    if text is None:
        return None
    if _SECONDS.fullmatch(text):
        return int(text) * 1000
    try:
        if _DATE.fullmatch(text):
            moment = datetime.combine(date.fromisoformat(text), datetime.min.time(), ZoneInfo(zone))
        else:
            moment = datetime.fromisoformat(text)
    except ValueError:
        raise Invalid(f"{field}: not a time: {text!r}; write 2026-12-01 or 2026-12-01T00:00:00Z", field) from None
    if moment.tzinfo is None:
        raise Invalid(f"{field}: {text} has no offset; append Z for UTC or for example +08:00", field)
    at_ms = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
    if not 0 <= at_ms <= _LAST_MS:
        raise Invalid(f"{field}: {text} is out of range; use the years 1970 to 9998", field)
    return at_ms
