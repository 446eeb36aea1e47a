"""Accounts that hold money or a budget, and what may be taken from them.

A team has one `prepaid` account (top-ups), one `credit_line` (post-paid, up to its limit) and any number of grants
(credit with an expiry); budgets are accounts too (`ledger.budgets`). In every row `debits + leased ≤ credits`; leases
are taken only while `target − debits − leased` allows it, so a reduction moves `target` at once, and `credits` no lower
than what is already spent or set aside.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from sqlalchemy import case, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.errors import Invalid, NotFound
from ledger.money import MAX_SQL_PICO, Currency, format_amount
from ledger.paging import Page, page
from ledger.schema import accounts, teams

AccountKind = Literal["prepaid", "grant", "credit_line", "budget"]
FUNDING: tuple[AccountKind, ...] = ("grant", "prepaid", "credit_line")
"""What pays, in the order in which it is drawn; grants among themselves by expiry."""


class Account(msgspec.Struct, frozen=True):
    """One row. Amounts are pico of `currency`."""

    id: str
    kind: AccountKind
    team_id: str | None
    quota_id: str | None
    period_start_ms: int | None
    currency: Currency
    target_pico: int
    credits_pico: int
    debits_pico: int
    leased_pico: int
    expires_at_ms: int | None
    created_ms: int
    spent_before_pico: int = 0
    """Of a budget: what was spent in its period before the quota was set. The target is the limit less this."""

    @property
    def unspent_pico(self) -> int:
        """What has not been charged, wherever it lies."""
        return max(0, min(self.target_pico, self.credits_pico) - self.debits_pico)

    @property
    def free_pico(self) -> int:
        """What a lease could still take."""
        return max(0, min(self.target_pico, self.credits_pico) - self.debits_pico - self.leased_pico)


class Balance(msgspec.Struct, frozen=True):
    """A team's money at one moment, in pico of its billing currency."""

    team_id: str
    currency: Currency
    prepaid_pico: int
    """Paid in and not yet charged; what running requests hold is still in it."""
    granted_pico: int
    """The same of grants that have not expired."""
    credit_limit_pico: int
    credit_used_pico: int
    """Drawn and not paid."""
    held_pico: int
    """The part of `available_pico` that lies in the workers: holds of running requests, charges on their way into SQL,
    and slices that idle there until another worker or a refund wants them."""
    available_pico: int
    """What can still be spent: prepaid + grants + what is left of the credit limit."""


def prepaid_id(team_id: str) -> str:
    return f"prepaid:{team_id}"


def credit_line_id(team_id: str) -> str:
    return f"credit:{team_id}"


async def open_team_accounts(c: AsyncConnection, team_id: str, currency: Currency, limit_pico: int, at_ms: int) -> None:
    """The two accounts that every team has, with nothing in the prepaid one."""
    rows = [
        _row(prepaid_id(team_id), "prepaid", team_id, currency, 0, at_ms),
        _row(credit_line_id(team_id), "credit_line", team_id, currency, limit_pico, at_ms),
    ]
    await c.execute(insert(accounts), rows)


async def open_grant(
    c: AsyncConnection,
    grant_id: str,
    team_id: str,
    currency: Currency,
    amount_pico: int,
    expires_at_ms: int,
    at_ms: int,
) -> None:
    row = _row(grant_id, "grant", team_id, currency, amount_pico, at_ms)
    await c.execute(insert(accounts).values(**row | {"expires_at_ms": expires_at_ms}))


async def get_account(c: AsyncConnection, account_id: str) -> Account:
    """Raises NotFound."""
    row = (await c.execute(select(accounts).where(accounts.c.id == account_id))).one_or_none()
    if row is None:
        raise NotFound(f"no account {account_id!r}")
    return read_account(row)


async def funding(c: AsyncConnection, team_id: str, now_ms: int) -> list[Account]:
    """The accounts that can pay for a team, in the order in which they are drawn; expired grants are left out."""
    query = select(accounts).where(accounts.c.team_id == team_id, accounts.c.kind.in_(FUNDING))
    found = [read_account(row) for row in await c.execute(query)]
    valid = [account for account in found if account.expires_at_ms is None or account.expires_at_ms > now_ms]
    return sorted(valid, key=drawing_order)


def drawing_order(account: Account) -> tuple[int, int, str]:
    """The sort key of FUNDING accounts: who pays first."""
    return FUNDING.index(account.kind), account.expires_at_ms or 0, account.id


async def balance(c: AsyncConnection, team_id: str, now_ms: int) -> Balance:
    """What a team has. Raises NotFound."""
    found = await funding(c, team_id, now_ms)
    prepaid = next((account for account in found if account.kind == "prepaid"), None)
    if prepaid is None:
        raise NotFound(f"no team {team_id!r}")
    credit_line = next(account for account in found if account.kind == "credit_line")
    grants = [account for account in found if account.kind == "grant"]
    limit = int((await c.execute(select(teams.c.credit_limit_pico).where(teams.c.id == team_id))).scalar_one())
    return Balance(
        team_id=team_id,
        currency=prepaid.currency,
        prepaid_pico=prepaid.credits_pico - prepaid.debits_pico,
        granted_pico=sum(grant.credits_pico - grant.debits_pico for grant in grants),
        credit_limit_pico=limit,
        credit_used_pico=credit_line.debits_pico - (credit_line.target_pico - limit),
        held_pico=sum(account.leased_pico for account in found),
        available_pico=sum(account.unspent_pico for account in found),
    )


async def list_accounts(
    c: AsyncConnection, team_id: str | None = None, *, cursor: str | None = None, limit: int = 100
) -> Page[Account]:
    query = select(accounts)
    if team_id is not None:
        query = query.where(accounts.c.team_id == team_id)
    return await page(c, query, [accounts.c.id], read_account, cursor=cursor, limit=limit)


async def credit(c: AsyncConnection, account_id: str, amount_pico: int) -> None:
    """Pays in. Raises Invalid when the sum would not fit the database, NotFound. The caller books the transfer."""
    account = await get_account(c, account_id)
    check_fits(c, max(account.credits_pico, account.target_pico) + amount_pico, account.currency)
    added = {
        "credits_pico": accounts.c.credits_pico + amount_pico,
        "target_pico": accounts.c.target_pico + amount_pico,
    }
    await c.execute(update(accounts).where(accounts.c.id == account_id).values(added))


async def set_target(c: AsyncConnection, where: Any, target_pico: Any) -> int:
    """New limit for the accounts that `where` selects; returns how many. One statement: right beside running leases."""
    used = accounts.c.debits_pico + accounts.c.leased_pico
    values = {"target_pico": target_pico, "credits_pico": case((used > target_pico, used), else_=target_pico)}
    return (await c.execute(update(accounts).where(where).values(values))).rowcount


async def change_credit_limit(
    c: AsyncConnection, team_id: str, before_pico: int, limit_pico: int, currency: Currency
) -> None:
    """Raises Invalid for a negative limit or one that does not fit. The caller audits it.

    The account's target is the limit and all that paid invoices and credit notes have ever refilled.
    """
    if limit_pico < 0:
        raise Invalid("a credit limit cannot be negative", "credit_limit")
    check_fits(c, limit_pico, currency)
    target = accounts.c.target_pico + (limit_pico - before_pico)
    await set_target(c, accounts.c.id == credit_line_id(team_id), target)


def check_fits(c: AsyncConnection, amount_pico: int, currency: str) -> None:
    """Raises Invalid when the database cannot hold the amount (SQLite: 64 bits)."""
    largest = MAX_SQL_PICO if c.dialect.name == "sqlite" else 10**38 - 1
    if amount_pico > largest:
        raise Invalid(
            f"{format_amount(amount_pico)} {currency} is more than one account can hold here "
            f"({format_amount(largest)} {currency}); PostgreSQL holds more than SQLite",
            "amount",
        )


def _row(
    account_id: str, kind: AccountKind, team_id: str, currency: Currency, amount_pico: int, at_ms: int
) -> dict[str, Any]:
    return {
        "id": account_id,
        "kind": kind,
        "team_id": team_id,
        "currency": currency,
        "target_pico": amount_pico,
        "credits_pico": amount_pico,
        "created_ms": at_ms,
    }


def read_account(row: Any) -> Account:
    """From a row of all columns of `schema.accounts`."""
    return Account(**row._mapping)
