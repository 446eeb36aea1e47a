"""Invoices: draft (recomputed at every look) → finalized (numbered, hashed, immutable) → paid or void.

Numbers are gapless, months are finalized in order per team, and what was finalized is read back from its own bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, and_, func, insert, literal, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.accounts import credit, credit_line_id
from ledger.audit import By
from ledger.corrections import ACTION as CORRECTED
from ledger.errors import Conflict, Invalid, NotFound
from ledger.ids import new_id
from ledger.month_figures import Used, draft_statement, used_in
from ledger.months import is_closed
from ledger.paging import Page, page
from ledger.periods import zone
from ledger.schema import audit as audit_table
from ledger.schema import counters, invoices, rollups, transfers
from ledger.statements import Statement
from ledger.teams import get_team
from ledger.topups import book


class Invoice(msgspec.Struct, frozen=True):
    """One invoice as it stands. `document_hash` is the SHA-256 of the statement stored with it."""

    id: str
    team_id: str
    period: str
    kind: str
    state: str
    number: str | None
    currency: str
    billed_pico: int
    carry_in_pico: int
    carry_out_pico: int
    exact_usd_pico: int
    exact_cny_pico: int
    document_hash: str | None
    merkle_root: str | None
    refers_to: str | None
    created_ms: int
    finalized_ms: int | None
    due_pico: int = 0
    """What is left to be paid of it; of a credit note, what it takes off that."""


_INVOICE_COLUMNS = [invoices.c[name] for name in Invoice.__struct_fields__]


async def statement_of(c: AsyncConnection, team_id: str, period: str) -> Statement:
    """The finalized statement of the month if there is one, else the draft."""
    query = select(invoices.c.document).where(live_invoice(team_id, period))
    document = (await c.execute(query)).scalar_one_or_none()
    if document is not None:
        return msgspec.json.decode(document, type=Statement)
    return await draft_statement(c, team_id, period)


@dataclass(frozen=True, slots=True)
class Read:
    """What was read of a closed month before its invoice is made."""

    used: Used
    corrected_seq: int
    """The last correction that it knows, in the audit chain."""


async def read_closed(c: AsyncConnection, team_id: str, period: str) -> Read | None:
    """The long part of `finalize`, which keeps no writer waiting: give it a snapshot. None: there is nothing to read,
    because the invoice is there, or the month is not closed and `finalize` refuses it."""
    team = await get_team(c, team_id)
    if not await is_closed(c, period, team.timezone):
        return None
    if (await c.execute(select(invoices.c.id).where(live_invoice(team_id, period)))).first() is not None:
        return None
    return Read(await used_in(c, team_id, period), await _corrected_seq(c))


async def _corrected_seq(c: AsyncConnection) -> int:
    a = audit_table.c
    return int((await c.execute(select(func.coalesce(func.max(a.seq), 0)).where(a.action == CORRECTED))).scalar_one())


async def finalize(c: AsyncConnection, team_id: str, period: str, by: By, read: Read | None = None) -> Invoice:
    """Freeze the month: number, hash, immutable bytes. The same month again gives the same invoice.

    read: from `read_closed`; without it the writers wait until all of the month is read. Raises Invalid while the month
    is not over; Conflict while it is not closed, while an earlier month with usage is not finalized, when a later one
    was finalized without this one, or when a correction was approved since `read`.
    """
    await audit.lock(c)
    existing = (await c.execute(select(*_INVOICE_COLUMNS).where(live_invoice(team_id, period)))).one_or_none()
    if existing is not None:
        return _invoice(existing)
    if read is not None and read.corrected_seq != await _corrected_seq(c):
        raise Conflict(f"a correction was approved while {period} was read: finalize it again")
    statement = await draft_statement(c, team_id, period, None if read is None else read.used)
    if by.at_ms < statement.period_end_ms:
        raise Invalid(f"{period} is not over in {statement.timezone}: finalize it after the month has ended", "month")
    if not await is_closed(c, period, statement.timezone):
        raise Conflict(
            f"{period} is not closed in {statement.timezone}: more may still come; run `tallygate month close --month "
            f"{period}` first"
        )
    await _require_earlier_finalized(c, team_id, period)
    await _require_carry_goes_on(c, team_id, period, statement.carry_out_pico)
    number = await next_number(c, "invoice", by.at_ms, statement.timezone)
    statement = msgspec.structs.replace(statement, state="finalized", number=number, issued_ms=by.at_ms)
    document = msgspec.json.encode(statement)
    invoice = Invoice(
        id=new_id("inv", by.at_ms),
        team_id=team_id,
        period=period,
        kind="invoice",
        state="finalized",
        number=number,
        currency=statement.currency,
        billed_pico=statement.billed_pico,
        carry_in_pico=statement.carry_in_pico,
        carry_out_pico=statement.carry_out_pico,
        exact_usd_pico=statement.exact_usd_pico,
        exact_cny_pico=statement.exact_cny_pico,
        document_hash=hashlib.sha256(document).hexdigest(),
        merkle_root=statement.merkle_root,
        refers_to=None,
        created_ms=by.at_ms,
        finalized_ms=by.at_ms,
        due_pico=statement.due_pico,
    )
    await store(c, invoice, statement.exact_pico, document)
    await audit.record(c, by, "invoice.finalize", "invoice", invoice.id, team_id=team_id, after=invoice)
    return invoice


async def store(c: AsyncConnection, invoice: Invoice, exact_pico: int, document: bytes) -> None:
    values = msgspec.structs.asdict(invoice)
    await c.execute(insert(invoices).values(**values, exact_pico=exact_pico, document=document))


async def mark(c: AsyncConnection, invoice_id: str, state: str, by: By) -> Invoice:
    """finalized → paid | void. Raises Conflict for any other step; the same step again changes nothing.

    Paid: what was due goes back to the credit line, less what credit notes took off; so does, when it is asked for
    again, the payment of an invoice that was paid in a version that did not book it. Void: what it asked for is asked
    for by the next invoice of that month, or a later one.
    """
    await audit.lock(c)
    before = await get(c, invoice_id)
    if before.state == state:
        if state == "paid" and await refill_credit(c, by, before):
            await _record(c, by, before, before)
        return before
    if before.kind != "invoice" or before.state != "finalized" or state not in ("paid", "void"):
        what = before.state if before.kind == "invoice" else "a credit note"
        raise Conflict(f"invoice {before.number} is {what}: only a finalized invoice becomes paid or void")
    if state == "void" and (note := await first_credit_note(c, invoice_id)) is not None:
        raise Conflict(f"invoice {before.number} has the credit note {note}: it cannot be void any more")
    if state == "paid":
        await refill_credit(c, by, before)
    await c.execute(update(invoices).where(invoices.c.id == invoice_id).values(state=state, settled_ms=by.at_ms))
    after = msgspec.structs.replace(before, state=state)
    await _record(c, by, before, after)
    return after


async def _record(c: AsyncConnection, by: By, before: Invoice, after: Invoice) -> None:
    subject = (f"invoice.{after.state}", "invoice", after.id)
    await audit.record(c, by, *subject, team_id=after.team_id, before=before, after=after)


async def refill_credit(c: AsyncConnection, by: By, invoice: Invoice) -> bool:
    """Books the payment of what is due. False: there is nothing to book, or it is booked already."""
    booked = select(transfers.c.id).where(transfers.c.id == payment_id(invoice.id))
    if (await c.execute(booked)).first() is not None:
        return False
    taken_off = select(func.coalesce(func.sum(invoices.c.due_pico), 0)).where(
        invoices.c.kind == "credit_note", invoices.c.refers_to == invoice.id
    )
    amount = invoice.due_pico - int((await c.execute(taken_off)).scalar_one())
    if amount <= 0:
        return False
    team, account_id = await get_team(c, invoice.team_id), credit_line_id(invoice.team_id)
    await credit(c, account_id, amount)
    booking = ("payment", payment_id(invoice.id), "clearing:manual", account_id)
    await book(c, by, team, *booking, amount, invoice.number)
    return True


def payment_id(invoice_id: str) -> str:
    """The transfer that pays an invoice."""
    return f"payment:{invoice_id}"


async def first_credit_note(c: AsyncConnection, invoice_id: str) -> str | None:
    query = select(invoices.c.number).where(invoices.c.kind == "credit_note", invoices.c.refers_to == invoice_id)
    number: str | None = (await c.execute(query.order_by(invoices.c.number).limit(1))).scalar_one_or_none()
    return number


async def get(c: AsyncConnection, invoice_id: str) -> Invoice:
    row = (await c.execute(select(*_INVOICE_COLUMNS).where(invoices.c.id == invoice_id))).one_or_none()
    if row is None:
        raise NotFound(f"no invoice {invoice_id}")
    return _invoice(row)


async def statement_of_invoice(c: AsyncConnection, invoice_id: str) -> Statement:
    """The statement exactly as it was finalized, checked against its hash."""
    query = select(invoices.c.document, invoices.c.document_hash).where(invoices.c.id == invoice_id)
    row = (await c.execute(query)).one_or_none()
    if row is None:
        raise NotFound(f"no invoice {invoice_id}")
    if hashlib.sha256(row.document).hexdigest() != row.document_hash:
        raise Conflict(f"invoice {invoice_id} was altered after it was finalized: its hash does not match")
    return msgspec.json.decode(row.document, type=Statement)


async def list_invoices(
    c: AsyncConnection, *, team_id: str | None = None, limit: int = 100, cursor: str | None = None
) -> Page[Invoice]:
    query = select(*_INVOICE_COLUMNS)
    if team_id is not None:
        query = query.where(invoices.c.team_id == team_id)
    return await page(c, query, (invoices.c.id,), _invoice, limit=limit, cursor=cursor)


async def _require_earlier_finalized(c: AsyncConnection, team_id: str, period: str) -> None:
    billed_in = func.coalesce(func.nullif(rollups.c.billed_in, ""), rollups.c.period)
    finalized = select(literal(1)).where(
        invoices.c.team_id == team_id, invoices.c.kind == "invoice", invoices.c.period == billed_in
    )
    query = (
        select(func.min(billed_in)).where(rollups.c.team_id == team_id, billed_in < period).where(~finalized.exists())
    )
    earliest = (await c.execute(query)).scalar_one_or_none()
    if earliest is not None:
        raise Conflict(f"finalize {earliest} first: the months of a team are finalized in order")


async def _require_carry_goes_on(c: AsyncConnection, team_id: str, period: str, carry_out_pico: int) -> None:
    """A month finalized again after a later one: the fraction that it carries out is the one that came in there."""
    later = (
        select(invoices.c.number, invoices.c.carry_in_pico)
        .where(invoices.c.team_id == team_id, invoices.c.kind == "invoice", invoices.c.state.in_(("finalized", "paid")))
        .where(invoices.c.period > period)
        .order_by(invoices.c.period)
        .limit(1)
    )
    row = (await c.execute(later)).one_or_none()
    if row is not None and row.carry_in_pico != carry_out_pico:
        raise Conflict(f"invoice {row.number} of a later month was made without this one: void it first")


async def next_number(c: AsyncConnection, kind: str, at_ms: int, timezone: str) -> str:
    """Gapless: the counter row is raised in the transaction that stores the invoice or credit note."""
    year = datetime.fromtimestamp(at_ms / 1000, zone(timezone)).year
    name = f"{kind}:{year}"
    raised = update(counters).where(counters.c.name == name).values(value=counters.c.value + 1)
    value = (await c.execute(raised.returning(counters.c.value))).scalar_one_or_none()
    if value is None:
        value = 1
        await c.execute(insert(counters).values(name=name, value=value))
    return f"{'TG' if kind == 'invoice' else 'TGC'}-{year}-{value:06d}"


def live_invoice(team_id: str, period: str) -> ColumnElement[bool]:
    """The condition for the month's finalized or paid invoice; there is at most one."""
    return and_(
        invoices.c.team_id == team_id,
        invoices.c.period == period,
        invoices.c.kind == "invoice",
        or_(invoices.c.state == "finalized", invoices.c.state == "paid"),
    )


def _invoice(row: Row[Any]) -> Invoice:
    return Invoice(**row._mapping)
