"""Closing billing months. A month belongs to a time zone, and with it to all the teams there.

asked (every slot is told to seal it) → each open epoch has its SEAL in SQL, and so all before it → closed. That is the
proof: an epoch that is not open has nothing left to post, one that is open and sealed has nothing left of this month.
What comes all the same (of a slot that was left out, or unknown to SQL) is billed in the next open month.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from sqlalchemy import and_, exists, func, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.audit import By
from ledger.database import Database
from ledger.errors import Invalid, NotFound
from ledger.leases import HEARTBEAT_FRESH_MS
from ledger.paging import Page, page
from ledger.periods import is_month, next_period, period_bounds
from ledger.posting_sql import UNBELIEVED
from ledger.records import Settle, decode
from ledger.schema import epochs, periods, seals, slots, suspense, teams

POLL_S = 0.25
MonthState = Literal["open", "closing", "closed"]


class Month(msgspec.Struct, frozen=True):
    """A month of a time zone. `waiting_for`: what stands between "closing" and "closed", and what to do about it."""

    period: str
    timezone: str
    state: MonthState
    closing_ms: int | None = None
    closed_ms: int | None = None
    waiting_for: tuple[str, ...] = ()


class ToSeal(msgspec.Struct, frozen=True):
    """Nothing may be admitted to this month or an earlier one of its zone. `closing`: a SEAL is waited for."""

    period: str
    timezone: str
    closing: bool


async def close_month(
    c: AsyncConnection, by: By, period: str, timezone: str, *, leave_out: Collection[str] = ()
) -> Month:
    """One step towards the close: ask the slots, or close if nothing is left. Call it again until it is closed.

    `leave_out`: slots that are not waited for; what they bring later is late usage. A closed month is closed for ever,
    and with it every earlier one of its zone. Raises Invalid while the month is not over there, NotFound.
    """
    await _wait_for_batches(c)
    return await _close_month(c, by, period, timezone, leave_out)


async def _close_month(c: AsyncConnection, by: By, period: str, timezone: str, leave_out: Collection[str]) -> Month:
    await audit.lock(c)
    p = periods.c
    query = select(periods).where(p.timezone == timezone, p.period <= period).order_by(p.period).with_for_update()
    asked = {row.period: row.closing_ms for row in await c.execute(query)}
    closed_ms = await _closed_ms(c, period, timezone)
    if closed_ms is not None:
        return Month(period, timezone, "closed", closed_ms=closed_ms)
    if by.at_ms < period_bounds(period, timezone)[1]:
        raise Invalid(f"{period} is not over in {timezone}: close it after the month has ended", "month")
    closing_ms, waiting = asked.get(period), list[str]()
    if closing_ms is None:
        closing_ms = by.at_ms
        await _ask(c, by, period, timezone)
        if leave_out:  # their posters may be at work and do not see the month's row yet
            waiting.append("slots are told just now: ask again")
    waiting += await _waiting_for(c, period, timezone, by.at_ms, leave_out)
    if waiting:
        return Month(period, timezone, "closing", closing_ms, waiting_for=tuple(waiting))
    which = (p.timezone == timezone, p.period <= period, p.state == "open")
    await c.execute(update(periods).where(*which).values(state="closed", closed_ms=by.at_ms))
    after = {"period": period, "timezone": timezone, "left_out": sorted(leave_out)}
    await audit.record(c, by, "month.close", "month", f"{period} {timezone}", after=after)
    return Month(period, timezone, "closed", closing_ms, by.at_ms)


async def close_in_zones(
    c: AsyncConnection, by: By, period: str, zones: Iterable[str], *, leave_out: Collection[str] = ()
) -> list[Month]:
    """One step in each zone. Where the month is not over yet it stays open, and the answer says until when."""
    await _wait_for_batches(c)
    found = []
    for timezone in zones:
        end_ms = period_bounds(period, timezone)[1]
        if by.at_ms < end_ms:
            until = datetime.fromtimestamp(end_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            found.append(Month(period, timezone, "open", waiting_for=(f"{period} is not over there until {until}",)))
        else:
            found.append(await _close_month(c, by, period, timezone, leave_out))
    return found


async def close_patiently(
    db: Database,
    by: By,
    period: str,
    zones: Sequence[str],
    *,
    patience_s: float,
    leave_out: Collection[str] = (),
    progress: Callable[[str], None] = lambda words: None,
) -> list[Month]:
    """Steps until all that can be closed is, or `patience_s` is over. `progress` is told what is waited for."""
    deadline = time.monotonic() + patience_s
    while True:
        async with db.begin() as c:
            found = await close_in_zones(c, by, period, zones, leave_out=leave_out)
        closing = [month for month in found if month.state == "closing"]
        if not closing or time.monotonic() > deadline:
            return found
        progress("; ".join(closing[0].waiting_for))
        await asyncio.sleep(POLL_S)


async def list_months(c: AsyncConnection, now_ms: int, *, cursor: str | None = None, limit: int = 100) -> Page[Month]:
    """Those that are closing or closed, newest first."""
    p = periods.c
    query = select(periods).where(p.closing_ms.is_not(None) | (p.state == "closed"))
    found = await page(c, query, [p.period, p.timezone], lambda row: row, cursor=cursor, limit=limit, newest_first=True)
    return Page([await month_of(c, row.period, row.timezone, now_ms) for row in found.items], found.next_cursor)


async def month_of(c: AsyncConnection, period: str, timezone: str, now_ms: int) -> Month:
    """As it stands now."""
    closed_ms = await _closed_ms(c, period, timezone)
    if closed_ms is not None:
        return Month(period, timezone, "closed", closed_ms=closed_ms)
    query = select(periods.c.closing_ms).where(periods.c.period == period, periods.c.timezone == timezone)
    closing_ms = (await c.execute(query)).scalar_one_or_none()
    if closing_ms is None:
        return Month(period, timezone, "open")
    waiting = await _waiting_for(c, period, timezone, now_ms, ())
    return Month(period, timezone, "closing", closing_ms, waiting_for=tuple(waiting))


async def is_closed(c: AsyncConnection, period: str, timezone: str) -> bool:
    return await _closed_ms(c, period, timezone) is not None


async def zones_of_teams(c: AsyncConnection) -> list[str]:
    """The time zones in which some team has its months."""
    return list((await c.execute(select(teams.c.timezone).distinct().order_by(teams.c.timezone))).scalars())


async def months_to_seal(c: AsyncConnection) -> list[ToSeal]:
    """Of each zone the last month that is closing, and the last one that is closed."""
    p = periods.c
    query = (
        select(p.timezone, p.state, func.max(p.period).label("period"))
        .where(p.closing_ms.is_not(None) | (p.state == "closed"))
        .group_by(p.timezone, p.state)
    )
    return [ToSeal(row.period, row.timezone, row.state == "open") for row in await c.execute(query)]


async def late_months(c: AsyncConnection, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """(period, time zone) → the next open month, for those of `wanted` that are closed.

    The rows are locked FOR SHARE until the transaction ends, so that no close comes between this answer and its use.
    """
    late = {}
    wanted = sorted(wanted)
    if wanted and c.dialect.name == "postgresql":
        await c.execute(text(f"SELECT pg_advisory_xact_lock_shared({_BATCHES})"))
    for period, timezone in wanted:
        month = await _open_month(c, period, timezone)
        if month != period:
            late[period, timezone] = month
    return late


async def late_for_teams(
    c: AsyncConnection, wanted: Collection[tuple[str, str]], zones: dict[str, str]
) -> dict[tuple[str, str], str]:
    """As `late_months`, for (team, period). `zones`: those known to the caller, by team; what is read is added: a team
    that has usage keeps its zone."""
    unknown = {team_id for team_id, _ in wanted} - zones.keys()
    if unknown:
        query = select(teams.c.id, teams.c.timezone).where(teams.c.id.in_(unknown))
        zones |= {row.id: row.timezone for row in await c.execute(query)}
    months = {(team, period): (period, zones[team]) for team, period in wanted if team in zones and is_month(period)}
    late = await late_months(c, set(months.values()))
    return {whose: late[month] for whose, month in months.items() if month in late}


_BATCHES = "hashtext('tallygate.months')"


async def _wait_for_batches(c: AsyncConnection) -> None:
    """Returns when every batch that asked `late_months` before us is in SQL: it may have made the row of a month that
    we would not see, and that would stay open behind the close. Call it before any row of `periods` is locked: a batch
    may wait for one. On SQLite writers are alone anyway."""
    if c.dialect.name == "postgresql":
        await c.execute(text(f"SELECT pg_advisory_unlock({_BATCHES}) FROM pg_advisory_lock({_BATCHES})"))


async def _open_month(c: AsyncConnection, period: str, timezone: str) -> str:
    p = periods.c
    query = select(p.period, p.state).where(p.timezone == timezone, p.period >= period).order_by(p.period)
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    while True:
        rows = (await c.execute(query.with_for_update(read=True))).all()
        closed = [row.period for row in rows if row.state == "closed"]
        month: str = next_period(closed[-1]) if closed else period
        if any(row.period == month for row in rows):
            return month
        row = {"period": month, "timezone": timezone, "state": "open"}
        await c.execute(build(periods).values(row).on_conflict_do_nothing())


async def _closed_ms(c: AsyncConnection, period: str, timezone: str) -> int | None:
    p = periods.c
    query = select(func.min(p.closed_ms)).where(p.timezone == timezone, p.period >= period, p.state == "closed")
    closed_ms: int | None = (await c.execute(query)).scalar_one_or_none()
    return closed_ms


async def _ask(c: AsyncConnection, by: By, period: str, timezone: str) -> None:
    row = {"period": period, "timezone": timezone, "state": "open", "closing_ms": by.at_ms}
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    asked = build(periods).values(row)  # a poster may be making the row at this moment
    keys = ["period", "timezone"]
    await c.execute(asked.on_conflict_do_update(index_elements=keys, set_={"closing_ms": by.at_ms}))
    after = {"period": period, "timezone": timezone}
    await audit.record(c, by, "month.seal", "month", f"{period} {timezone}", after=after)


async def _waiting_for(
    c: AsyncConnection, period: str, timezone: str, now_ms: int, leave_out: Collection[str]
) -> list[str]:
    """In words; empty when the proof is complete. Raises NotFound for a slot to leave out that there is not."""
    e, x = epochs.c, seals.c
    sealed = exists().where(x.slot_id == e.slot_id, x.epoch == e.epoch, x.timezone == timezone, x.period >= period)
    query = (
        select(e.slot_id, e.epoch, slots.c.live, slots.c.heartbeat_ms, slots.c.unsealed_requests)
        .outerjoin(slots, and_(slots.c.id == e.slot_id, slots.c.epoch == e.epoch))
        .where(e.state == "open", ~sealed)
        .order_by(e.slot_id, e.epoch)
    )
    known = set((await c.execute(select(slots.c.id))).scalars()) if leave_out else set()
    for slot_id in leave_out:
        if slot_id not in known:
            raise NotFound(f"no slot {slot_id!r}: see `tallygate journal list`")
    rows = (await c.execute(query)).all()
    waiting = [_why(row, period, now_ms) for row in rows if row.slot_id not in leave_out]
    return waiting + await _undecided(c, period, timezone)


def _why(row: Any, period: str, now_ms: int) -> str:
    slot = f"slot {row.slot_id}"
    declare = f"`tallygate journal declare-lost {row.slot_id} {row.epoch}`"
    if row.live is None:
        return (
            f"epoch {row.epoch} of {slot} is not posted to its end: start the poster where that journal lies; if the "
            f"journal is lost, {declare}"
        )
    if not row.live:
        return (
            f"{slot} is stopped and not posted to its end: start its poster (`tallygate poster`, or `tallygate serve`) "
            f"on its host; if its journal is lost, {declare}"
        )
    silent_ms = now_ms - row.heartbeat_ms
    if silent_ms > HEARTBEAT_FRESH_MS:
        return (
            f"{slot} has not been heard of for {silent_ms // 1000} s: if its process is frozen let it go on, if it "
            f"died start it again; if its journal is lost, {declare}"
        )
    if row.unsealed_requests:
        return (
            f"{slot} still runs {row.unsealed_requests} requests of {period}: it seals the month when they have ended"
        )
    return f"{slot} runs, and its seal of {period} is not posted yet: see that the poster of its host runs"


async def _undecided(c: AsyncConnection, period: str, timezone: str) -> list[str]:
    """Records of the month in suspense: whether they are billed has to be decided before the month is."""
    s = suspense.c
    query = select(s.slot_id, s.epoch, s.seq, s.record).where(s.resolved_ms.is_(None), s.reason != UNBELIEVED)
    found = []
    for row in (await c.execute(query.order_by(s.slot_id, s.epoch, s.seq))).all():
        if await _may_belong_to(c, bytes(row.record), period, timezone):
            where = f"frame {row.seq} of epoch {row.epoch} of slot {row.slot_id}"
            found.append(f"{where} is in suspense and may belong to {period}: decide on it (`tallygate suspense list`)")
    return found


async def _may_belong_to(c: AsyncConnection, payload: bytes, period: str, timezone: str) -> bool:
    try:
        record = decode(payload)
    except msgspec.DecodeError:
        return True
    if not isinstance(record, Settle) or record.period > period:
        return False
    query = select(teams.c.timezone).where(teams.c.id == record.team_id)
    return (await c.execute(query)).scalar_one_or_none() in (None, timezone)
