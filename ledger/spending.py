"""What was spent within a quota's scope and period, budget or not; and the budget account that begins with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import case, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.periods import HOUR_MS
from ledger.schema import accounts, rollups, usage
from ledger.sums import exact_sum, read_sum

if TYPE_CHECKING:
    from ledger.quotas import Quota


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
    for name in ("team_id", "key_id", "model", "end_user"):
        wanted = getattr(quota, name)
        if wanted is not None:
            query = query.where(table.c[name] == wanted)
    return read_sum((await c.execute(query)).mappings().one(), amount.name)


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
    spent, counted = await spent_in(c, quota, start_ms, end_ms), accounts.c.debits_pico
    before = case((counted < spent, spent - counted), else_=0)
    await c.execute(update(accounts).where(accounts.c.id == account_id).values(spent_before_pico=before))
