"""What moves a team's balance beside top-ups and use, and who paid for what was used; read from the transfers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, get_args

from sqlalchemy import ColumnElement, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.accounts import credit_line_id
from ledger.entries import REVERSAL
from ledger.money import Currency
from ledger.schema import accounts, invoices, transfers
from ledger.statements import Movement, MovementKind
from ledger.sums import exact_sum, read_sum

CORRECTION: MovementKind = "correction"
KINDS: tuple[MovementKind, ...] = tuple(kind for kind in get_args(MovementKind) if kind != CORRECTION)
_OUT = ("refund", "expiry", CORRECTION)


def moved_where(team_id: str, currency: Currency, kinds: Sequence[str]) -> tuple[ColumnElement[bool], ...]:
    t = transfers.c
    return t.team_id == team_id, t.kind.in_(kinds), t.currency == currency, t.batch_id.is_(None)


async def movements(c: AsyncConnection, team_id: str, currency: Currency, start_ms: int, end_ms: int) -> list[Movement]:
    """Promo credit given and expired, invoices paid, credit notes, corrected balances: in [start, end), oldest
    first."""
    t = transfers.c
    corrected = (t.team_id == team_id, t.currency == currency, t.kind.in_((CORRECTION, f"{CORRECTION}{REVERSAL}")))
    query = select(t.kind, t.at_ms, t.amount_pico, t.reference, t.source).where(
        or_(and_(*moved_where(team_id, currency, KINDS)), and_(*corrected)), t.at_ms >= start_ms, t.at_ms < end_ms
    )
    return [_movement(row) for row in await c.execute(query.order_by(t.at_ms, t.id))]


def _movement(row: Any) -> Movement:
    out = row.kind in _OUT
    amount = -int(row.amount_pico) if out else int(row.amount_pico)
    kind = row.kind.removesuffix(REVERSAL)
    return Movement(kind=kind, at_ms=row.at_ms, amount_pico=amount, reference=row.reference or row.source)


async def moved_before(c: AsyncConnection, team_id: str, currency: Currency, before_ms: int) -> int:
    """All of these together, less refunds, before an instant. Corrections of a balance come to nothing."""
    t = transfers.c
    query = (
        select(t.kind, *exact_sum(t.amount_pico))
        .where(*moved_where(team_id, currency, (*KINDS, "refund")), t.at_ms < before_ms)
        .group_by(t.kind)
    )
    moved = 0
    for row in (await c.execute(query)).mappings():
        amount = read_sum(row, "amount_pico")
        moved += -amount if row["kind"] in _OUT else amount
    return moved


async def paid_by(c: AsyncConnection, team_id: str, period: str) -> dict[str, int]:
    """Kind of account → what it paid of the month's consumption, of promo credit and the credit line. Exact."""
    drawn = select(accounts.c.id, accounts.c.kind).where(
        accounts.c.team_id == team_id, accounts.c.kind.in_(("grant", "credit_line")), accounts.c.debits_pico > 0
    )
    kinds = {row.id: row.kind for row in await c.execute(drawn)}
    if not kinds:
        return {}
    paid: dict[str, int] = {}
    for account_id, amount in (await _drawn(c, team_id, kinds, transfers.c.period == period)).items():
        kind = kinds[account_id]
        paid[kind] = paid.get(kind, 0) + amount
    return paid


async def _drawn(
    c: AsyncConnection, team_id: str, account_ids: Collection[str], when: ColumnElement[bool]
) -> dict[str, int]:
    """Account → what usage took from it, less what corrections put back."""
    t, drawn = transfers.c, dict.fromkeys(account_ids, 0)
    for side, kind, sign in ((t.source, "usage", 1), (t.destination, f"usage{REVERSAL}", -1)):
        query = select(side.label("account"), *exact_sum(t.amount_pico)).group_by(side)
        query = query.where(t.team_id == team_id, when, t.kind == kind, side.in_(account_ids))
        for row in (await c.execute(query)).mappings():
            drawn[row["account"]] += sign * read_sum(row, "amount_pico")
    return drawn


async def not_invoiced(c: AsyncConnection, team_id: str, period: str) -> int:
    """What was drawn on the credit line up to the end of the month and no other invoice asks for. Exact.

    Nothing is asked for twice: neither what earlier invoices ask for, nor, of a month that is finalized again after
    later ones, what these ask for.
    """
    used = select(accounts.c.debits_pico).where(accounts.c.id == credit_line_id(team_id))
    if not (await c.execute(used)).scalar_one_or_none():
        return 0
    i = invoices.c
    others = select(i.period, i.due_pico).where(
        i.team_id == team_id, i.kind == "invoice", i.state.in_(("finalized", "paid")), i.period != period
    )
    asked = {row.period: int(row.due_pico) for row in await c.execute(others)}
    left = await drawn_on_credit(c, team_id, period) - sum(due for month, due in asked.items() if month < period)
    last = max(asked, default=period)
    if last < period:
        return left
    return min(left, await drawn_on_credit(c, team_id, last) - sum(asked.values()))


async def drawn_on_credit(c: AsyncConnection, team_id: str, until: str) -> int:
    """What the team's usage took from its credit line up to the end of a month. Exact."""
    account_id = credit_line_id(team_id)
    return (await _drawn(c, team_id, [account_id], transfers.c.period <= until))[account_id]
