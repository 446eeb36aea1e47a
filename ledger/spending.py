"""What was spent within a quota's scope and period, budget or not; and the budget account that begins with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import ColumnElement, case, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.partitions import uuid7_floor
from ledger.periods import HOUR_MS, period_of
from ledger.schema import accounts, rollups, usage
from ledger.sums import exact_sum, read_sum

if TYPE_CHECKING:
    from ledger.quotas import Quota

DAY_MS = 24 * HOUR_MS
ID_MARGIN_MS = 60_000
"""A request's id may be made a moment before its admission."""


def budget_id(quota_id: str, period_start_ms: int) -> str:
    return f"budget:{quota_id}:{period_start_ms}"


async def spent_in(c: AsyncConnection, quota: Quota, start_ms: int, end_ms: int | None) -> int:
    """Pico of the quota's currency, as posted. Hours are summed from the rollups; shorter windows, and those of one end
    user, from the rows."""
    by_rows = quota.scope == "end_user" or quota.window == "minute" or start_ms % HOUR_MS != 0
    table: Any = usage if by_rows else rollups
    time = usage.c.created_ms if by_rows else rollups.c.hour_ms
    amount = table.c.cost_usd_pico if quota.currency == "USD" else table.c.cost_cny_pico
    query = select(*exact_sum(amount)).where(time >= start_ms)
    if end_ms is not None:
        query = query.where(time < end_ms)
    for name in ("key_id", "model", "end_user"):
        wanted = getattr(quota, name)
        if wanted is not None:
            query = query.where(table.c[name] == wanted)
    if by_rows:
        query = query.where(*_rows_of(quota, start_ms))
    elif quota.team_id is not None:
        query = query.where(rollups.c.team_id == quota.team_id)
    return read_sum((await c.execute(query)).mappings().one(), amount.name)


def _rows_of(quota: Quota, start_ms: int) -> list[ColumnElement[bool]]:
    """The team's rows since then, so that an index leads to them: by their ids, which are times, and over a long window
    by the team and its months."""
    since_ms = max(0, start_ms - ID_MARGIN_MS)
    where = [usage.c.request_id >= uuid7_floor(since_ms)]
    if quota.team_id is not None and quota.window in ("month", "total"):
        months = usage.c.period >= period_of(max(0, since_ms - DAY_MS), "UTC")  # whatever the zone of the team
        where += [usage.c.team_id == quota.team_id, months]
    elif quota.team_id is not None:  # not by the team's index: SQLite would read all that the team ever used
        where.append(func.coalesce(usage.c.team_id, "") == quota.team_id)
    return where


async def count_spent_before(c: AsyncConnection, quota: Quota, start_ms: int, end_ms: int | None, at_ms: int) -> None:
    """Makes the account of the running period, or finds it from a time when the quota was set before, and notes what
    was spent there beside it. The caller sets the target."""
    assert quota.currency is not None, "a spend quota"
    account_id = budget_id(quota.id, start_ms)
    row = {
        "id": account_id,
        "kind": "budget",
        "team_id": quota.team_id,
        "quota_id": quota.id,
        "period_start_ms": start_ms,
        "currency": quota.currency,
        "target_pico": 0,
        "credits_pico": 0,
        "created_ms": at_ms,
    }
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    await c.execute(build(accounts).values(row).on_conflict_do_nothing())
    locked = select(accounts.c.id).where(accounts.c.id == account_id).with_for_update()
    await c.execute(locked)  # no batch charges it between the two that are compared
    spent, counted = await spent_in(c, quota, start_ms, end_ms), accounts.c.debits_pico
    before = case((counted < spent, spent - counted), else_=0)
    await c.execute(update(accounts).where(accounts.c.id == account_id).values(spent_before_pico=before))
