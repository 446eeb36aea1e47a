"""Money that comes in and goes back: top-ups (paid), grants (given, with an expiry), refunds. Each is booked once."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Literal

import msgspec
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.accounts import credit, get_account, open_grant, prepaid_id
from ledger.audit import By
from ledger.errors import Conflict, Invalid
from ledger.ids import new_id
from ledger.money import Currency, format_amount
from ledger.paging import Page, page
from ledger.periods import period_of
from ledger.schema import accounts, topups, transfers
from ledger.teams import Team, get_team

Provider = Literal["manual", "wechat", "alipay"]


class TopUp(msgspec.Struct, frozen=True):
    """One payment as credited."""

    id: str
    team_id: str
    account_id: str
    amount_pico: int
    currency: Currency
    provider: Provider
    reference: str
    note: str | None
    at_ms: int


async def top_up(
    c: AsyncConnection,
    by: By,
    team_id: str,
    amount_pico: int,
    *,
    currency: Currency,
    reference: str,
    provider: Provider = "manual",
    note: str | None = None,
) -> TopUp:
    """Credits a payment to the team's prepaid account; `reference` is unique for each provider.

    The same payment again gives the first result. Raises Conflict when the reference stands for another one, NotFound,
    Invalid for an amount that is not positive, in another currency than the team's, or too large for the database.
    """
    await audit.lock(c)
    team = await get_team(c, team_id)
    _check(team, amount_pico, currency, reference)
    known = select(topups).where(topups.c.provider == provider, topups.c.reference == reference)
    row = (await c.execute(known)).one_or_none()
    if row is not None:
        return _same(_topup(row), team_id, amount_pico, currency)
    payment = TopUp(
        id=new_id("topup", by.at_ms),
        team_id=team_id,
        account_id=prepaid_id(team_id),
        amount_pico=amount_pico,
        currency=currency,
        provider=provider,
        reference=reference,
        note=note,
        at_ms=by.at_ms,
    )
    await credit(c, payment.account_id, amount_pico)
    await c.execute(insert(topups).values(msgspec.structs.asdict(payment)))
    await book(c, by, team, "topup", payment.id, f"clearing:{provider}", payment.account_id, amount_pico, reference)
    await audit.record(c, by, "topup.credit", "topup", payment.id, team_id=team_id, after=payment)
    return payment


async def grant(
    c: AsyncConnection,
    by: By,
    team_id: str,
    amount_pico: int,
    *,
    currency: Currency,
    reference: str,
    expires_at_ms: int,
) -> str:
    """Gives credit that ends at `expires_at_ms`; returns its account id. `reference` is unique within the team.

    The same grant again gives the first result. Raises as `top_up`.
    """
    await audit.lock(c)
    team = await get_team(c, team_id)
    _check(team, amount_pico, currency, reference)
    if expires_at_ms <= by.at_ms:
        raise Invalid("a grant must expire in the future", "expires_at")
    account_id = f"grant:{team_id}:{_short(reference)}"
    row = (await c.execute(select(accounts).where(accounts.c.id == account_id))).one_or_none()
    if row is not None:
        if (row.credits_pico, row.expires_at_ms) == (amount_pico, expires_at_ms):
            return account_id
        raise Conflict(f"the reference {reference!r} already stands for another grant")
    await open_grant(c, account_id, team_id, currency, amount_pico, expires_at_ms, by.at_ms)
    await book(c, by, team, "grant", account_id, "promotion", account_id, amount_pico, reference)
    after = {"amount_pico": amount_pico, "currency": currency, "expires_at_ms": expires_at_ms}
    await audit.record(c, by, "grant.create", "account", account_id, team_id=team_id, after=after)
    return account_id


async def refund(
    c: AsyncConnection, by: By, team_id: str, amount_pico: int, *, currency: Currency, reference: str
) -> str:
    """Pays back from the prepaid account what is neither spent nor held; returns the transfer's id.

    `reference` is unique within the team; the same refund again gives the first result. Raises as `top_up`, and
    Conflict when less than that is free: nothing is paid back in part.
    """
    await audit.lock(c)
    team = await get_team(c, team_id)
    _check(team, amount_pico, currency, reference)
    transfer_id = refund_id(team_id, reference)
    row = (await c.execute(select(transfers.c.amount_pico).where(transfers.c.id == transfer_id))).one_or_none()
    if row is not None:
        if row.amount_pico == amount_pico:
            return transfer_id
        raise Conflict(f"the reference {reference!r} already stands for another refund")
    account_id = prepaid_id(team_id)
    free = accounts.c.credits_pico - accounts.c.debits_pico - accounts.c.leased_pico
    debit = update(accounts).where(accounts.c.id == account_id, free >= amount_pico)
    if not (await c.execute(debit.values(debits_pico=accounts.c.debits_pico + amount_pico))).rowcount:
        left = (await get_account(c, account_id)).free_pico
        raise Conflict(
            f"only {format_amount(left)} {currency} of team {team_id!r} is free now, the rest is spent or held"
        )
    await book(c, by, team, "refund", transfer_id, account_id, "clearing:manual", amount_pico, reference)
    after = {"amount_pico": amount_pico, "currency": currency, "reference": reference}
    await audit.record(c, by, "refund.pay", "account", account_id, team_id=team_id, after=after)
    return transfer_id


async def expire_grants(c: AsyncConnection, by: By, *, limit: int = 1_000) -> int:
    """Books what is left in expired grants as breakage; returns how many. What workers hold waits for its return."""
    await audit.lock(c)
    free = accounts.c.credits_pico - accounts.c.debits_pico - accounts.c.leased_pico
    due = select(accounts, free.label("left")).where(
        accounts.c.kind == "grant", accounts.c.expires_at_ms <= by.at_ms, free > 0
    )
    rows = (await c.execute(due.order_by(accounts.c.id).limit(limit).with_for_update())).all()
    for row in rows:
        left = int(row.left)
        debit = update(accounts).where(accounts.c.id == row.id)
        await c.execute(debit.values(debits_pico=accounts.c.debits_pico + left))
        team = await get_team(c, row.team_id)
        transfer_id = f"{row.id}:expired:{row.debits_pico}"
        await book(c, by, team, "expiry", transfer_id, row.id, "breakage", left, None)
        await audit.record(c, by, "grant.expire", "account", row.id, team_id=row.team_id, after={"amount_pico": left})
    return len(rows)


async def list_topups(
    c: AsyncConnection, team_id: str | None = None, *, cursor: str | None = None, limit: int = 100
) -> Page[TopUp]:
    """Newest first."""
    query = select(topups)
    if team_id is not None:
        query = query.where(topups.c.team_id == team_id)
    key = [topups.c.at_ms, topups.c.id]
    return await page(c, query, key, _topup, cursor=cursor, limit=limit, newest_first=True)


def _check(team: Team, amount_pico: int, currency: str, reference: str) -> None:
    if amount_pico <= 0:
        raise Invalid("the amount must be positive", "amount")
    if currency != team.billing_currency:
        raise Invalid(f"team {team.id!r} is billed in {team.billing_currency}, not in {currency}", "currency")
    if not reference.strip():
        raise Invalid("a payment needs a reference of its own, such as the bank's", "reference")


def _same(first: TopUp, team_id: str, amount_pico: int, currency: str) -> TopUp:
    if (first.team_id, first.amount_pico, first.currency) == (team_id, amount_pico, currency):
        return first
    raise Conflict(f"the reference {first.reference!r} already stands for another payment ({first.id})")


def refund_id(team_id: str, reference: str) -> str:
    """The transfer of a refund."""
    return f"refund:{team_id}:{_short(reference)}"


def _short(reference: str) -> str:
    return sha256(reference.encode()).hexdigest()[:16]


async def book(
    c: AsyncConnection,
    by: By,
    team: Team,
    kind: str,
    transfer_id: str,
    source: str,
    destination: str,
    amount_pico: int,
    reference: str | None,
) -> None:
    """One transfer in the team's currency, in its month of that instant. The caller moves the balances and audits."""
    transfer = {
        "id": transfer_id,
        "at_ms": by.at_ms,
        "kind": kind,
        "source": source,
        "destination": destination,
        "amount_pico": amount_pico,
        "currency": team.billing_currency,
        "team_id": team.id,
        "period": period_of(by.at_ms, team.timezone),
        "reference": reference,
    }
    await c.execute(insert(transfers).values(transfer))


def _topup(row: Any) -> TopUp:
    return TopUp(**row._mapping)
