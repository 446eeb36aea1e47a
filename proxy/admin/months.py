"""Billing months: closing them, and which are closed. A month is closed for a time zone and all the teams in it."""

from __future__ import annotations

import msgspec

from ledger import months, teams
from ledger.audit import By
from ledger.errors import Invalid
from ledger.months import Month
from proxy.admin.endpoints import EVERYONE, FINANCE, Call, Endpoint, Listing, Paging, Strict
from proxy.admin.journals import Reason
from proxy.admin.times import iso


class CloseMonth(Strict, frozen=True, kw_only=True):
    """All time zones of teams, or that of one. `leave_out`: slots not to wait for; their usage is billed later, and
    `reason`, kept in the audit chain, says why."""

    team: str | None = None
    leave_out: tuple[str, ...] = ()
    reason: Reason | None = None


class MonthAnswer(msgspec.Struct, frozen=True):
    """open → closing (slots are told to seal it) → closed. `waiting_for` says what is missing, and what to do."""

    month: str
    timezone: str
    state: str
    closing_at: str | None
    closed_at: str | None
    waiting_for: list[str]

    @classmethod
    def of(cls, month: Month) -> MonthAnswer:
        at = (iso(month.closing_ms), iso(month.closed_ms))
        return cls(month.period, month.timezone, month.state, *at, list(month.waiting_for))


async def close(call: Call) -> Listing[MonthAnswer]:
    """One step; call it again until every state is closed."""
    body: CloseMonth = call.body
    period, slots = call.path["month"], frozenset(body.leave_out)
    by = By(call.by.actor, call.by.at_ms, body.reason or call.by.reason)
    if slots and not by.reason:
        raise Invalid("say with `reason` why a slot is left out; it is kept in the audit chain", "reason")
    if body.team is not None:
        team = await teams.find_team(call.c, body.team)
        found = [await months.close_month(call.c, by, period, team.timezone, leave_out=slots)]
    else:
        zones = await months.zones_of_teams(call.c)
        found = await months.close_in_zones(call.c, by, period, zones, leave_out=slots)
    return Listing([MonthAnswer.of(month) for month in found])


async def list_(call: Call) -> Listing[MonthAnswer]:
    query: Paging = call.query
    found = await months.list_months(call.c, call.by.at_ms, cursor=query.cursor, limit=query.limit)
    return Listing([MonthAnswer.of(month) for month in found.items], found.next_cursor)


ENDPOINTS = [
    Endpoint(
        "GET", "/months", "List months that are closing or closed", list_, Listing[MonthAnswer], EVERYONE, query=Paging
    ),
    Endpoint(
        "POST",
        "/months/{month}/close",
        "Close a month",
        close,
        Listing[MonthAnswer],
        FINANCE,
        body=CloseMonth,
        body_optional=True,
    ),
]
