"""Credit notes: whole cents off a finalized or paid invoice, outside the carry. An invoice itself never changes.

While the invoice has something due, the note takes that off first and the credit line is refilled by it; the rest, and
all of what was paid, goes to the team's prepaid account, from where it is spent or refunded.
"""

from __future__ import annotations

import hashlib

import msgspec
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit, invoices
from ledger.accounts import credit, credit_line_id, prepaid_id
from ledger.audit import By
from ledger.errors import Conflict, Invalid
from ledger.invoices import Invoice
from ledger.money import PICO_PER_CENT, format_amount
from ledger.schema import invoices as table
from ledger.statements import build_credit_note
from ledger.teams import get_team
from ledger.topups import book


async def credit_invoice(
    c: AsyncConnection, by: By, invoice_id: str, amount_pico: int, *, reference: str, reason: str
) -> Invoice:
    """Credits part or all of an invoice; `reference` is unique for each invoice.

    The same note again gives the first result. Raises NotFound, Invalid; Conflict when the reference stands for another
    amount, when the invoice is void or no invoice, or when all notes together would exceed it.
    """
    await audit.lock(c)
    invoice = await invoices.get(c, invoice_id)
    _check(invoice, amount_pico, reference, reason)
    note_id = f"cn_{hashlib.sha256(f'{invoice_id} {reference}'.encode()).hexdigest()[:20]}"
    known = (await c.execute(select(table.c.billed_pico).where(table.c.id == note_id))).scalar_one_or_none()
    if known is not None:
        if -known != amount_pico:
            raise Conflict(f"the reference {reference!r} already stands for a note of {format_amount(-known)}")
        return await invoices.get(c, note_id)
    credited, taken_off = await _so_far(c, invoice_id)
    if credited + amount_pico > invoice.billed_pico:
        left = format_amount(invoice.billed_pico - credited)
        raise Conflict(f"invoice {invoice.number} can be credited with {left} {invoice.currency} more")
    off = 0 if invoice.state == "paid" else min(amount_pico, max(0, invoice.due_pico - taken_off))
    note = await _store(c, by, invoice, note_id, amount_pico, off, reason)
    await _book(c, by, note, amount_pico)
    await audit.record(c, by, "credit_note.issue", "invoice", note.id, team_id=note.team_id, after=note)
    return note


def bookings(note_id: str, amount_pico: int, off_pico: int) -> list[tuple[str, str, int]]:
    """(kind of account, transfer, pico) of a note."""
    parts = (("credit_line", off_pico), ("prepaid", amount_pico - off_pico))
    return [(kind, f"{note_id}:{kind}", part) for kind, part in parts if part]


def _check(invoice: Invoice, amount_pico: int, reference: str, reason: str) -> None:
    if amount_pico <= 0 or amount_pico % PICO_PER_CENT:
        raise Invalid("a credit note is for whole cents or fen, more than zero", "amount")
    if not reference.strip():
        raise Invalid("a credit note needs a reference of its own", "reference")
    if not reason.strip():
        raise Invalid("a credit note says why it is given", "reason")
    if invoice.kind != "invoice" or invoice.state not in ("finalized", "paid"):
        raise Conflict(f"{invoice.number} is {invoice.state}: only a finalized or paid invoice can be credited")


async def _so_far(c: AsyncConnection, invoice_id: str) -> tuple[int, int]:
    """(credited, taken off what is due) by the notes of an invoice."""
    sums = [func.coalesce(func.sum(column), 0) for column in (table.c.billed_pico, table.c.due_pico)]
    where = (table.c.kind == "credit_note", table.c.refers_to == invoice_id)
    credited, taken_off = (await c.execute(select(*sums).where(*where))).one()
    return -int(credited), int(taken_off)


async def _store(
    c: AsyncConnection, by: By, invoice: Invoice, note_id: str, amount_pico: int, off_pico: int, reason: str
) -> Invoice:
    invoiced = await invoices.statement_of_invoice(c, invoice.id)
    number = await invoices.next_number(c, "credit_note", by.at_ms, invoiced.timezone)
    statement = build_credit_note(invoiced, amount_pico, reason, number=number, at_ms=by.at_ms)
    document = msgspec.json.encode(statement)
    note = Invoice(
        id=note_id,
        team_id=invoice.team_id,
        period=invoice.period,
        kind="credit_note",
        state="finalized",
        number=number,
        currency=invoice.currency,
        billed_pico=-amount_pico,
        carry_in_pico=0,
        carry_out_pico=0,
        exact_usd_pico=statement.exact_usd_pico,
        exact_cny_pico=statement.exact_cny_pico,
        document_hash=hashlib.sha256(document).hexdigest(),
        merkle_root=None,
        refers_to=invoice.id,
        created_ms=by.at_ms,
        finalized_ms=by.at_ms,
        due_pico=off_pico,
    )
    await invoices.store(c, note, statement.exact_pico, document)
    return note


async def _book(c: AsyncConnection, by: By, note: Invoice, amount_pico: int) -> None:
    team = await get_team(c, note.team_id)
    ids = {"credit_line": credit_line_id(team.id), "prepaid": prepaid_id(team.id)}
    for kind, transfer_id, part in bookings(note.id, amount_pico, note.due_pico):
        await credit(c, ids[kind], part)
        await book(c, by, team, "credit_note", transfer_id, "allowance", ids[kind], part, note.number)
