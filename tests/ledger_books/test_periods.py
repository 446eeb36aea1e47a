from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import Invalid
from ledger.periods import (
    Window,
    next_period,
    period_bounds,
    period_of,
    previous_period,
    whole_hours,
    window_bounds,
    window_start,
)

ZONES = ["UTC", "Asia/Shanghai", "America/New_York", "Europe/Berlin", "Asia/Kathmandu", "Africa/Cairo", "Asia/Beirut"]
instants = st.integers(0, 4_000_000_000_000)
zones = st.sampled_from(ZONES)
hour_ms, day_ms = 3_600_000, 86_400_000


def ms(text: str, zone: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp() * 1000)


def test_a_zone_that_is_half_an_hour_off_for_part_of_the_year_is_not_one_of_whole_hours() -> None:
    """Lord Howe: eleven hours ahead in January, ten and a half in July."""
    january, july = ms("2026-01-10", "UTC"), ms("2026-07-10", "UTC")
    assert not whole_hours("Australia/Lord_Howe", january, july)
    assert not whole_hours("Asia/Kolkata", january, july)
    assert not whole_hours("Australia/Lord_Howe", None, None)
    for zone in ("UTC", "Asia/Shanghai", "America/New_York", "Europe/Berlin"):
        assert whole_hours(zone, None, None)


def test_a_month_begins_at_midnight_in_the_teams_zone() -> None:
    assert period_bounds("2026-12", "Asia/Shanghai") == (
        ms("2026-11-30T16:00", "UTC"),
        ms("2026-12-31T16:00", "UTC"),
    )
    midnight = ms("2026-12-01T00:00", "Asia/Shanghai")
    assert period_of(midnight - 1, "Asia/Shanghai") == "2026-11"
    assert period_of(midnight, "Asia/Shanghai") == "2026-12"
    assert period_of(midnight, "UTC") == "2026-11"


@given(instants, zones)
def test_every_instant_lies_in_the_month_it_is_said_to_lie_in(at_ms: int, zone: str) -> None:
    period = period_of(at_ms, zone)
    start, end = period_bounds(period, zone)
    assert start <= at_ms < end
    assert period_bounds(next_period(period), zone)[0] == end
    assert previous_period(next_period(period)) == period


@given(instants, zones, st.sampled_from(["minute", "hour", "day", "month"]))
def test_windows_follow_each_other_without_gap_or_overlap(at_ms: int, zone: str, window: Window) -> None:
    start, end = window_bounds(window, at_ms, zone)
    assert end is not None
    assert start <= at_ms < end
    assert window_bounds(window, start, zone)[0] == start
    assert window_start(window, end - 1, zone) == start
    if window != "hour" or (start // hour_ms == end // hour_ms - 1):
        assert window_start(window, end, zone) == end


@given(instants, zones)
def test_a_day_begins_where_the_local_date_changes(at_ms: int, zone: str) -> None:
    start, _ = window_bounds("day", at_ms, zone)
    dates = [datetime.fromtimestamp(t / 1000, UTC).astimezone(ZoneInfo(zone)).date() for t in (start - 1, start, at_ms)]
    assert dates[0] < dates[1] == dates[2]


@pytest.mark.parametrize(
    ("zone", "noon", "hours"),
    [
        ("America/New_York", "2026-03-08T12:00", 23),
        ("America/New_York", "2026-11-01T12:00", 25),
        ("Asia/Shanghai", "2026-11-01T12:00", 24),
        ("Asia/Beirut", "2026-03-29T12:00", 23),  # here midnight itself is skipped
    ],
)
def test_a_day_is_as_long_as_the_zone_makes_it(zone: str, noon: str, hours: int) -> None:
    start, end = window_bounds("day", ms(noon, zone), zone)
    assert end is not None
    assert (end - start) // hour_ms == hours


def test_an_hour_is_that_of_the_wall_clock() -> None:
    at_ms = ms("2026-11-30T10:50", "Asia/Kathmandu")
    assert window_start("hour", at_ms, "Asia/Kathmandu") == ms("2026-11-30T10:00", "Asia/Kathmandu")


def test_total_has_no_end() -> None:
    assert window_bounds("total", 123, "UTC") == (0, None)


@pytest.mark.parametrize(
    "bad", ["2026-13", "2026-00", "2026-1", "26-01", "2026-01-01", "", "２０２６-01", "2026-11\n", "0001-01"]
)
def test_what_is_not_a_month_is_refused(bad: str) -> None:
    with pytest.raises(Invalid, match="not a month"):
        period_bounds(bad, "UTC")


@pytest.mark.parametrize("bad", ["Mars/Olympus", "", "../etc/passwd", "/etc/passwd"])
def test_an_unknown_zone_is_refused(bad: str) -> None:
    with pytest.raises(Invalid, match="time zone"):
        period_of(0, bad)
