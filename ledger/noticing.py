"""Notices, from the books, what webhooks are told: spend that reaches a part of its limit, and balances that run low.

The poster looks now and then; what was noticed before, by whomever, is in the outbox already and stays one event.
Limits on requests and tokens are not in the books, nor are refusals: gateways notice those.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.accounts import FUNDING, Account, funding, read_account
from ledger.budgets import budget_period
from ledger.database import Database
from ledger.money import format_amount
from ledger.outbox import EventKind, record_event
from ledger.periods import DEFAULT_TIMEZONE, HOUR_MS, Window, window_start
from ledger.quotas import Quota, list_quotas
from ledger.schema import accounts, quotas, rollups, teams, topups
from ledger.spending import spent_in

PERCENTS = (50, 80, 100)
LOW_PERCENT = 20
"""A balance is low when less than this is left of the latest top-up (without any: of the credit limit)."""
MAX_REMEMBERED = 100_000
quota_zone = func.coalesce(quotas.c.timezone, teams.c.timezone, DEFAULT_TIMEZONE).label("timezone")


@dataclass(frozen=True)
class Notice:
    kind: EventKind
    key: str
    payload: dict[str, Any]


class Noticing:
    """`look` from time to time. Remembers what it has recorded, so that looking again writes nothing."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._recorded: set[str] = set()

    async def look(self, now_ms: int) -> int:
        """Records what is new; returns how much that was."""
        async with self._db.read() as c:
            notices = [*await _hard_budgets(c, now_ms), *await _soft_budgets(c, now_ms), *await _balances(c, now_ms)]
        fresh = [notice for notice in notices if notice.key not in self._recorded]
        if not fresh:
            return 0
        async with self._db.begin() as c:
            new = [await record_event(c, notice.kind, notice.key, notice.payload, now_ms) for notice in fresh]
        if len(self._recorded) > MAX_REMEMBERED:
            self._recorded.clear()
        self._recorded.update(notice.key for notice in fresh)
        return sum(new)


async def _hard_budgets(c: AsyncConnection, now_ms: int) -> list[Notice]:
    """Budget accounts of the running periods of which half or more is spent: looked up by quota and period, since those
    of past periods only become more."""
    a, reached = accounts.c, dict[str, tuple[int, int]]()
    for (window, timezone), start_ms in (await _running_periods(c, now_ms)).items():
        account = select(a.debits_pico + a.spent_before_pico).where(
            a.quota_id == quotas.c.id, a.period_start_ms == start_ms
        )
        spent = (
            select(quotas.c.id, quotas.c.limit_value, account.scalar_subquery().label("pico"))
            .outerjoin(teams, teams.c.id == quotas.c.team_id)
            .where(quotas.c.metric == "spend", quotas.c.hard == 1, quotas.c.window == window, quota_zone == timezone)
            .subquery()
        )
        query = select(spent.c.id, spent.c.pico).where(spent.c.pico > 0, 2 * spent.c.pico >= spent.c.limit_value)
        reached |= {row.id: (start_ms, int(row.pico)) for row in await c.execute(query)}
    notices = []
    for quota in (await _quotas_by_id(c, reached)).values():
        start_ms, spent_pico = reached[quota.id]
        notices += _reached(quota, start_ms, quota.limit, spent_pico)
    return notices


async def _soft_budgets(c: AsyncConnection, now_ms: int) -> list[Notice]:
    """Soft limits on spend have no account: what was posted in their period is added up."""
    query = (
        select(quotas.c.id, quota_zone)
        .outerjoin(teams, teams.c.id == quotas.c.team_id)
        .where(quotas.c.metric == "spend", quotas.c.hard == 0)
    )
    zones = {row.id: row.timezone for row in await c.execute(query)}
    notices = []
    for quota in (await _quotas_by_id(c, zones)).values():
        start = budget_period(quota, now_ms, zones[quota.id])
        notices += _reached(quota, start, quota.limit, await spent_in(c, quota, start, None))
    return notices


async def _running_periods(c: AsyncConnection, now_ms: int) -> dict[tuple[Window, str], int]:
    """(window, time zone) of the hard quotas on spend → the start of the period that runs there."""
    query = select(quotas.c.window, quota_zone).outerjoin(teams, teams.c.id == quotas.c.team_id).distinct()
    rows = await c.execute(query.where(quotas.c.metric == "spend", quotas.c.hard == 1))
    return {(row.window, row.timezone): window_start(row.window, now_ms, row.timezone) for row in rows}


def _reached(quota: Quota, start_ms: int, limit_pico: int, spent_pico: int) -> list[Notice]:
    reached = [percent for percent in PERCENTS if limit_pico > 0 and spent_pico * 100 >= limit_pico * percent]
    described = {name: getattr(quota, name) for name in ("scope", "team_id", "key_id", "end_user", "window", "model")}
    amounts = {"limit": format_amount(limit_pico), "used": format_amount(spent_pico), "currency": quota.currency}
    about = {"metric": "spend", "hard": quota.hard, "quota_id": quota.id, "period_start_ms": start_ms}
    return [
        Notice(
            "budget",
            f"{quota.id}:{start_ms}:{limit_pico}:{percent}",
            described | about | amounts | {"percent": percent},
        )
        for percent in reached
    ]


async def _quotas_by_id(c: AsyncConnection, wanted: Collection[str]) -> dict[str, Quota]:
    if not wanted:
        return {}
    found: dict[str, Quota] = {}
    cursor = None
    while True:
        page = await list_quotas(c, cursor=cursor, limit=1_000)
        found |= {quota.id: quota for quota in page.items if quota.id in wanted}
        cursor = page.next_cursor
        if cursor is None:
            return found


async def _balances(c: AsyncConnection, now_ms: int) -> list[Notice]:
    """Of the teams that spent in this hour or the one before."""
    recent = select(rollups.c.team_id).where(rollups.c.hour_ms >= now_ms - 2 * HOUR_MS).distinct()
    query = select(accounts).where(accounts.c.team_id.in_(recent), accounts.c.kind.in_(FUNDING))
    by_team: dict[str, list[Account]] = {}
    for row in await c.execute(query):
        account = read_account(row)
        if account.expires_at_ms is None or account.expires_at_ms > now_ms:
            by_team.setdefault(str(account.team_id), []).append(account)
    notices = []
    for team_id, found in by_team.items():
        latest, measure = await _measure(c, team_id, found)
        left = sum(account.unspent_pico for account in found)
        if measure > 0 and left * 100 < measure * LOW_PERCENT:
            level = {
                "state": "low",
                "available": format_amount(left),
                "currency": found[0].currency,
                "team_id": team_id,
            }
            notices.append(Notice("balance", f"low:{team_id}:{latest}", level))
    return notices


async def exhausted(c: AsyncConnection, team_id: str, message: str, now_ms: int) -> None:
    """A request was refused because nothing was left to pay for it: told once for each filling of the balance."""
    found = await funding(c, team_id, now_ms)
    latest, _ = await _measure(c, team_id, found)
    left = format_amount(sum(account.unspent_pico for account in found))
    told = {"state": "exhausted", "team_id": team_id, "available": left, "message": message}
    await record_event(c, "balance", f"exhausted:{team_id}:{latest}", told, now_ms)


async def _measure(c: AsyncConnection, team_id: str, found: list[Account]) -> tuple[str, int]:
    """(what the balance was last filled by, how much that was): a low balance is told once for each filling."""
    t = topups.c
    query = select(t.id, t.amount_pico).where(t.team_id == team_id, t.amount_pico > 0).order_by(t.id.desc()).limit(1)
    row = (await c.execute(query)).one_or_none()
    if row is not None:
        return str(row.id), int(row.amount_pico)
    credit = sum(account.target_pico for account in found)
    return f"credit:{credit}", credit
