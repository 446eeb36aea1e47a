"""Teams: the customers that own money and keys."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy import exists, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.accounts import change_credit_limit, check_fits, open_team_accounts
from ledger.audit import By
from ledger.errors import Conflict, Invalid, NotFound
from ledger.ids import new_id
from ledger.money import CURRENCIES, Currency
from ledger.paging import Page, page
from ledger.periods import DEFAULT_TIMEZONE, zone
from ledger.schema import accounts, teams, usage

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Team(msgspec.Struct, frozen=True):
    """One customer. `plan` names a price scope; `tax_rate_bp` is in basis points (600 = 6 %)."""

    id: str
    name: str
    billing_currency: Currency
    timezone: str
    credit_limit_pico: int
    invoice_title: str | None
    tax_id: str | None
    tax_rate_bp: int
    created_ms: int
    plan: str | None


class TeamChange(msgspec.Struct, frozen=True, kw_only=True):
    """What to change; what is UNSET stays."""

    name: str | UnsetType = UNSET
    timezone: str | UnsetType = UNSET
    credit_limit_pico: int | UnsetType = UNSET
    invoice_title: str | UnsetType | None = UNSET
    tax_id: str | UnsetType | None = UNSET
    tax_rate_bp: int | UnsetType = UNSET
    plan: str | UnsetType | None = UNSET


async def create_team(
    c: AsyncConnection,
    by: By,
    name: str,
    *,
    billing_currency: Currency = "USD",
    timezone: str = DEFAULT_TIMEZONE,
    credit_limit_pico: int = 0,
    invoice_title: str | None = None,
    tax_id: str | None = None,
    tax_rate_bp: int = 0,
    plan: str | None = None,
    team_id: str | None = None,
) -> Team:
    """A new team with its accounts. With a `team_id` of the caller's own a repeated call gives the same team.

    Raises Invalid; Conflict when that id belongs to a team that is not the same.
    """
    await audit.lock(c)
    team = Team(
        id=team_id or new_id("team", by.at_ms),
        name=name,
        billing_currency=billing_currency,
        timezone=timezone,
        credit_limit_pico=credit_limit_pico,
        invoice_title=invoice_title,
        tax_id=tax_id,
        tax_rate_bp=tax_rate_bp,
        created_ms=by.at_ms,
        plan=plan,
    )
    _check(c, team)
    existing = await _find(c, team.id)
    if existing is not None:
        if msgspec.structs.replace(team, created_ms=existing.created_ms) == existing:
            return existing
        raise Conflict(f"team {team.id!r} exists with other properties; change it instead of creating it")
    await c.execute(insert(teams).values(msgspec.structs.asdict(team)))
    await open_team_accounts(c, team.id, team.billing_currency, team.credit_limit_pico, by.at_ms)
    await audit.record(c, by, "team.create", "team", team.id, team_id=team.id, after=team)
    return team


async def update_team(c: AsyncConnection, by: By, team_id: str, change: TeamChange) -> Team:
    """Raises NotFound, Invalid; Conflict when the time zone changes after something was charged in the old one."""
    await audit.lock(c)
    before = await get_team(c, team_id)
    changed = {name: value for name, value in msgspec.structs.asdict(change).items() if value is not UNSET}
    after = msgspec.structs.replace(before, **changed)
    if after == before:
        return before
    _check(c, after)
    if after.timezone != before.timezone and await _charged(c, team_id):
        raise Conflict(
            f"team {team_id!r} has charges in months of {before.timezone}: its time zone stays; make a new team instead"
        )
    await c.execute(update(teams).where(teams.c.id == team_id).values(changed))
    if after.credit_limit_pico != before.credit_limit_pico:
        limits = (before.credit_limit_pico, after.credit_limit_pico)
        await change_credit_limit(c, team_id, *limits, after.billing_currency)
    await audit.record(c, by, "team.update", "team", team_id, team_id=team_id, before=before, after=after)
    return after


async def get_team(c: AsyncConnection, team_id: str) -> Team:
    """Raises NotFound."""
    team = await _find(c, team_id)
    if team is None:
        raise NotFound(f"no team {team_id!r}")
    return team


async def find_team(c: AsyncConnection, id_or_name: str) -> Team:
    """By id, else by its exact name. Raises NotFound, Conflict when several teams have that name."""
    team = await _find(c, id_or_name)
    if team is not None:
        return team
    named = [_team(row) for row in await c.execute(select(teams).where(teams.c.name == id_or_name).limit(2))]
    if len(named) > 1:
        raise Conflict(f"several teams are named {id_or_name!r}: give the id")
    if not named:
        raise NotFound(f"no team with the id or name {id_or_name!r}")
    return named[0]


async def named(c: AsyncConnection, name: str) -> Team | None:
    """The oldest team of exactly that name."""
    query = select(teams).where(teams.c.name == name).order_by(teams.c.created_ms, teams.c.id).limit(1)
    row = (await c.execute(query)).one_or_none()
    return None if row is None else _team(row)


async def list_teams(c: AsyncConnection, *, cursor: str | None = None, limit: int = 100) -> Page[Team]:
    """Oldest first."""
    key = [teams.c.created_ms, teams.c.id]
    return await page(c, select(teams), key, _team, cursor=cursor, limit=limit)


async def _find(c: AsyncConnection, team_id: str) -> Team | None:
    row = (await c.execute(select(teams).where(teams.c.id == team_id))).one_or_none()
    return None if row is None else _team(row)


async def _charged(c: AsyncConnection, team_id: str) -> bool:
    used = (accounts.c.debits_pico > 0) | (accounts.c.leased_pico > 0)
    query = select(
        exists().where(usage.c.team_id == team_id),
        exists().where(accounts.c.team_id == team_id, used),
    )
    return any((await c.execute(query)).one())


def _check(c: AsyncConnection, team: Team) -> None:
    if not _ID.fullmatch(team.id):
        raise Invalid("a team's id has 1 to 64 letters, digits, and . _ -", "id")
    if not team.name.strip():
        raise Invalid("a team needs a name", "name")
    if team.billing_currency not in CURRENCIES:
        raise Invalid(f"unknown currency {team.billing_currency!r}: use USD or CNY", "billing_currency")
    zone(team.timezone)
    if team.credit_limit_pico < 0:
        raise Invalid("a credit limit cannot be negative", "credit_limit")
    check_fits(c, team.credit_limit_pico, team.billing_currency)
    if not 0 <= team.tax_rate_bp <= 10_000:
        raise Invalid("a tax rate is 0 to 10000 basis points", "tax_rate_bp")


def _team(row: Any) -> Team:
    return Team(**row._mapping)
