"""Budgets: the accounts behind hard spend quotas, one for each quota and period, made when it is first needed.

A budget's id follows from its quota and the period, so on a warm path it is known without asking SQL. A quota set again
after it was removed finds its accounts, and what was spent from them, as they were. The account of the period in which
a quota is set is made at once, less what was spent in it before.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import literal, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.accounts import Account, read_account
from ledger.periods import window_start
from ledger.quotas import Quota
from ledger.schema import accounts, quotas
from ledger.spending import budget_id


def budget_period(quota: Quota, at_ms: int, timezone: str) -> int:
    """The start of the period in which a quota counts `at_ms`. `timezone`: the team's; global quotas have their own."""
    assert quota.window is not None
    return window_start(quota.window, at_ms, quota.timezone or timezone)


async def ensure_budgets(
    c: AsyncConnection, applicable: Iterable[Quota], at_ms: int, timezone: str
) -> dict[str, Account]:
    """The budget accounts of the hard spend quotas among `applicable` for the period of `at_ms`: quota id → account.

    Missing ones are made with the limit that the quota has in SQL now. A quota deleted meanwhile has no entry.
    """
    starts = {q.id: budget_period(q, at_ms, timezone) for q in applicable if q.metric == "spend" and q.hard}
    found = await _budgets(c, starts)
    missing = starts.keys() - found.keys()
    for quota_id in sorted(missing):
        await _make_budget(c, quota_id, starts[quota_id], at_ms)
    return await _budgets(c, starts) if missing else found


async def _make_budget(c: AsyncConnection, quota_id: str, period_start_ms: int, at_ms: int) -> None:
    """FOR SHARE: a new limit that is just being set is waited for, and one set later finds this row."""
    limit = (
        select(
            literal(budget_id(quota_id, period_start_ms)),
            literal("budget"),
            quotas.c.team_id,
            quotas.c.id,
            literal(period_start_ms),
            quotas.c.currency,
            quotas.c.limit_value,
            quotas.c.limit_value,
            literal(at_ms),
        )
        .where(quotas.c.id == quota_id, quotas.c.metric == "spend", quotas.c.hard == 1)
        .with_for_update(read=True)
    )
    columns = ["id", "kind", "team_id", "quota_id", "period_start_ms", "currency", "target_pico", "credits_pico"]
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    await c.execute(build(accounts).from_select([*columns, "created_ms"], limit).on_conflict_do_nothing())


async def _budgets(c: AsyncConnection, starts: dict[str, int]) -> dict[str, Account]:
    ids = [budget_id(quota_id, start) for quota_id, start in starts.items()]
    if not ids:
        return {}
    found = [read_account(row) for row in await c.execute(select(accounts).where(accounts.c.id.in_(ids)))]
    return {str(account.quota_id): account for account in found}
