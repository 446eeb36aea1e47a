"""What moves a team's balance beside top-ups and use, and who paid for what was used; read from the transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.accounts import credit_line_id
from ledger.money import Currency
from ledger.schema import accounts, invoices, transfers
from ledger.statements import Movement, MovementKind
from ledger.sums import exact_sum, read_sum

KINDS: tuple[MovementKind, ...] = get_args(MovementKind)
_OUT = ("refund", "expiry")


def moved_where(team_id: str, currency: Currency, kinds: Sequence[str]) -> tuple[ColumnElement[bool], ...]:
    t = transfers.c
    return t.team_id == team_id, t.kind.in_(kinds), t.currency == currency, t.batch_id.is_(None)


async def movements(c: AsyncConnection, team_id: str, currency: Currency, start_ms: int, end_ms: int) -> list[Movement]:
    """Promo credit given and expired, invoices paid, credit notes: in [start, end), oldest first."""
    t = transfers.c
    query = select(t.kind, t.at_ms, t.amount_pico, t.reference, t.source).where(
        *moved_where(team_id, currency, KINDS), t.at_ms >= start_ms, t.at_ms < end_ms
    )
    return [_movement(row) for row in await c.execute(query.order_by(t.at_ms, t.id))]


def _movement(row: Any) -> Movement:
    out = row.kind in _OUT
    amount = -int(row.amount_pico) if out else int(row.amount_pico)
    return Movement(kind=row.kind, at_ms=row.at_ms, amount_pico=amount, reference=row.reference or row.source)


async def moved_before(c: AsyncConnection, team_id: str, currency: Currency, before_ms: int) -> int:
    """All of these together, less refunds, before an instant."""
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
    t = transfers.c
    query = (
        select(t.source, *exact_sum(t.amount_pico))
        .where(t.team_id == team_id, t.period == period, t.kind == "usage", t.source.in_(kinds))
        .group_by(t.source)
    )
    paid: dict[str, int] = {}
    for row in (await c.execute(query)).mappings():
        kind = kinds[row["source"]]
        paid[kind] = paid.get(kind, 0) + read_sum(row, "amount_pico")
    return paid


async def not_invoiced(c: AsyncConnection, team_id: str, period: str) -> int:
    """What was drawn on the credit line up to the end of the month, less what earlier invoices ask for. Exact."""
    t, i, a = transfers.c, invoices.c, accounts.c
    used = select(a.debits_pico).where(a.id == credit_line_id(team_id))
    if not (await c.execute(used)).scalar_one_or_none():
        return 0
    drawn = select(*exact_sum(t.amount_pico)).where(
        t.source == credit_line_id(team_id), t.kind == "usage", t.period <= period
    )
    asked = select(func.coalesce(func.sum(i.due_pico), 0)).where(
        i.team_id == team_id, i.kind == "invoice", i.state.in_(("finalized", "paid")), i.period < period
    )
    row = (await c.execute(drawn)).mappings().one()
    return read_sum(row, "amount_pico") - int((await c.execute(asked)).scalar_one())
