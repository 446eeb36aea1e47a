"""Quotas: limits on requests, tokens, concurrency (counted by the policies) and spend (budgets, kept as accounts).

A scope (all, a team, a key, an end user of a team) has a list, and the list is replaced as a whole. What a quota limits
is its identity: with a new limit, or set again after a time, it goes on counting where it stood.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, Literal

import msgspec
from sqlalchemy import case, delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.accounts import set_target
from ledger.audit import By
from ledger.errors import Invalid, NotFound
from ledger.money import CURRENCIES, Currency
from ledger.paging import Page, page
from ledger.periods import DEFAULT_TIMEZONE, Window, window_bounds, zone
from ledger.schema import accounts, keys, quotas, teams
from ledger.spending import count_spent_before

Metric = Literal["requests", "tokens", "spend", "concurrency"]
ScopeKind = Literal["global", "team", "key", "end_user"]
METRICS: tuple[Metric, ...] = ("requests", "tokens", "spend", "concurrency")
WINDOWS: tuple[Window, ...] = ("minute", "hour", "day", "month", "total")


class Scope(msgspec.Struct, frozen=True):
    """Whom a list of quotas is for. Make one with `everyone`, `of_team`, `of_key`, `of_end_user`."""

    kind: ScopeKind
    team_id: str | None = None
    key_id: str | None = None
    end_user: str | None = None

    @classmethod
    def everyone(cls) -> Scope:
        return cls("global")

    @classmethod
    def of_team(cls, team_id: str) -> Scope:
        return cls("team", team_id)

    @classmethod
    def of_key(cls, key_id: str) -> Scope:
        return cls("key", None, key_id)

    @classmethod
    def of_end_user(cls, team_id: str, end_user: str) -> Scope:
        return cls("end_user", team_id, None, end_user)


class Limit(msgspec.Struct, frozen=True):
    """One wanted quota. limit: a count, or pico of `currency` (default: the team's) for spend."""

    metric: Metric
    window: Window | None
    limit: int
    model: str | None = None
    currency: Currency | None = None
    hard: bool = True
    timezone: str | None = None
    """Whose days and months a global spend quota counts; the others count in their team's zone."""


class Quota(msgspec.Struct, frozen=True):
    """One quota as stored."""

    id: str
    scope: ScopeKind
    team_id: str | None
    key_id: str | None
    end_user: str | None
    metric: Metric
    window: Window | None
    model: str | None
    currency: Currency | None
    limit: int
    hard: bool
    timezone: str | None


async def replace_quotas(c: AsyncConnection, by: By, scope: Scope, limits: Sequence[Limit]) -> list[Quota]:
    """The scope's new list. Raises NotFound for an unknown team or key, Invalid.

    A lower spend limit takes effect at once on what is still free; what is spent or held stays.
    """
    await audit.lock(c)
    scope, currency, timezone = await _resolve(c, scope)
    wanted = {quota.id: quota for quota in (_quota(scope, limit, currency) for limit in limits)}
    if len(wanted) < len(limits):
        raise Invalid("the list limits the same thing twice", "quotas")
    before = {quota.id: quota for quota in await quotas_of(c, scope)}
    for quota_id in before.keys() - wanted.keys():
        await c.execute(delete(quotas).where(quotas.c.id == quota_id))
    for quota in wanted.values():
        await _store(c, quota, before.get(quota.id), by.at_ms, timezone)
    if wanted != before:
        subject = scope.key_id or scope.team_id or "global"
        lists = {"before": list(before.values()), "after": list(wanted.values())}
        await audit.record(c, by, "quota.replace", "quotas", subject, team_id=scope.team_id, **lists)
    return await quotas_of(c, scope)


async def quotas_of(c: AsyncConnection, scope: Scope) -> list[Quota]:
    """The scope's own list, in a stable order."""
    where = [quotas.c.scope == scope.kind]
    if scope.kind == "key":
        where.append(quotas.c.key_id == scope.key_id)
    elif scope.kind != "global":
        where.append(quotas.c.team_id == scope.team_id)
    if scope.kind == "end_user":
        where.append(quotas.c.end_user == scope.end_user)
    return [_read(row) for row in await c.execute(select(quotas).where(*where).order_by(quotas.c.id))]


async def applicable(c: AsyncConnection, team_id: str, key_id: str, end_user: str | None = None) -> list[Quota]:
    """All that limits a request of this key: global, team, key, and the end user's own if one is given."""
    whose = (
        (quotas.c.scope == "global")
        | ((quotas.c.scope == "team") & (quotas.c.team_id == team_id))
        | ((quotas.c.scope == "key") & (quotas.c.key_id == key_id))
    )
    if end_user is not None:
        its = (quotas.c.scope == "end_user") & (quotas.c.team_id == team_id) & (quotas.c.end_user == end_user)
        whose = whose | its
    return [_read(row) for row in await c.execute(select(quotas).where(whose).order_by(quotas.c.id))]


async def list_quotas(
    c: AsyncConnection, *, team_id: str | None = None, cursor: str | None = None, limit: int = 100
) -> Page[Quota]:
    """All quotas, or those of a team, its keys and its end users."""
    query = select(quotas)
    if team_id is not None:
        query = query.where(quotas.c.team_id == team_id)
    return await page(c, query, [quotas.c.id], _read, cursor=cursor, limit=limit)


async def _resolve(c: AsyncConnection, scope: Scope) -> tuple[Scope, Currency | None, str]:
    """The scope with its team filled in, and that team's currency and zone."""
    if scope.kind == "global":
        return scope, None, DEFAULT_TIMEZONE
    team_id = scope.team_id
    if scope.kind == "key":
        team_id = (await c.execute(select(keys.c.team_id).where(keys.c.id == scope.key_id))).scalar_one_or_none()
        if team_id is None:
            raise NotFound(f"no key {scope.key_id!r}")
    if scope.kind == "end_user" and not scope.end_user:
        raise Invalid("an end user's quota needs the end user", "end_user")
    team = (await c.execute(select(teams).where(teams.c.id == team_id))).one_or_none()
    if team is None:
        raise NotFound(f"no team {team_id!r}")
    return msgspec.structs.replace(scope, team_id=team_id), team.billing_currency, team.timezone


def _quota(scope: Scope, limit: Limit, team_currency: Currency | None) -> Quota:
    spend = limit.metric == "spend"
    currency = (limit.currency or team_currency) if spend else None
    timezone = (limit.timezone or DEFAULT_TIMEZONE) if spend and scope.kind == "global" else None
    _check(limit, currency, timezone)
    place = [scope.kind, scope.team_id, scope.key_id, scope.end_user]
    identity = msgspec.json.encode([*place, limit.metric, limit.window, limit.model, currency, timezone])
    return Quota(
        id=f"quota_{sha256(identity).hexdigest()[:24]}",
        scope=scope.kind,
        team_id=scope.team_id,
        key_id=scope.key_id,
        end_user=scope.end_user,
        metric=limit.metric,
        window=limit.window,
        model=limit.model,
        currency=currency,
        limit=limit.limit,
        hard=limit.hard,
        timezone=timezone,
    )


def _check(limit: Limit, currency: str | None, timezone: str | None) -> None:
    if limit.metric not in METRICS:
        raise Invalid(f"unknown metric {limit.metric!r}: use {', '.join(METRICS)}", "metric")
    if limit.metric == "concurrency" and limit.window is not None:
        raise Invalid("concurrency has no window: leave it out", "window")
    if limit.metric != "concurrency" and limit.window not in WINDOWS:
        raise Invalid(f"{limit.metric} needs a window: {', '.join(WINDOWS)}", "window")
    if not 0 <= limit.limit < 2**63:
        raise Invalid("a limit is zero or more, and fits 64 bits", "limit")
    if limit.metric == "spend" and currency not in CURRENCIES:
        raise Invalid("a spend quota needs a currency: USD or CNY", "currency")
    if limit.metric != "spend" and limit.currency is not None:
        raise Invalid("only a spend quota has a currency", "currency")
    if timezone is not None:
        zone(timezone)


async def _store(c: AsyncConnection, quota: Quota, before: Quota | None, at_ms: int, timezone: str) -> None:
    columns = msgspec.structs.asdict(quota)
    columns["limit_value"], columns["hard"] = columns.pop("limit"), int(quota.hard)
    if before is None:
        await c.execute(insert(quotas).values(columns))
    elif before != quota:
        await c.execute(update(quotas).where(quotas.c.id == quota.id).values(columns))
    if quota.metric == "spend" and quota.hard and quota.window is not None:
        start, end = window_bounds(quota.window, at_ms, quota.timezone or timezone)
        if before is None or not before.hard:
            await count_spent_before(c, quota, start, end, at_ms)
        current = (accounts.c.quota_id == quota.id) & (accounts.c.period_start_ms >= start)
        spent = accounts.c.spent_before_pico
        await set_target(c, current, case((spent < quota.limit, quota.limit - spent), else_=0))


def _read(row: Any) -> Quota:
    values = dict(row._mapping)
    return Quota(limit=values.pop("limit_value"), hard=bool(values.pop("hard")), **values)
