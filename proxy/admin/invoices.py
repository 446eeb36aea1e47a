"""Invoices: a draft may be looked at in any format at any time; finalized, paid and void are for ever."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ledger import invoices, months, teams
from ledger.audit import By
from ledger.credit_notes import credit_invoice
from ledger.database import Database
from ledger.documents import file_name, format_named
from ledger.errors import Conflict, Invalid
from ledger.invoices import Invoice
from ledger.money import format_amount, parse_amount
from ledger.statements import Statement
from proxy.admin.endpoints import EVERYONE, FINANCE, Call, Document, Endpoint, Listing, Paging, Strict
from proxy.admin.times import iso, required_iso

Month = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])$", description="YYYY-MM")]
FormatName = Literal["xlsx", "pdf", "csv", "json", "focus"]
CLOSE_PATIENCE_S = 5.0
"""Running slots seal within a second; requests of the month that still run may take longer than anybody waits here."""
MEDIA_TYPES = (
    "text/csv",
    "application/json",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
)


class InvoiceFilter(Paging, frozen=True, kw_only=True):
    team: str | None = None


class ExportQuery(Strict, frozen=True, kw_only=True):
    team: str
    month: Month
    format: FormatName = "json"


class NewInvoice(Strict, frozen=True, kw_only=True):
    """Finalizes the month of a team: number, hash, immutable bytes. The same month again gives the same invoice.

    A month that is not closed is closed first, for all teams of that time zone."""

    team_id: str
    month: Month


class NewCreditNote(Strict, frozen=True, kw_only=True):
    """Whole cents or fen off an invoice. The same reference again gives the same note."""

    amount: str
    reference: str
    reason: str


class InvoiceAnswer(msgspec.Struct, frozen=True):
    """`billed` is in whole fen or cents, and so is `due`, what is left to be paid of it. A credit note's `billed` is
    negative, and its `due` what it takes off that of the invoice it refers to."""

    id: str
    number: str | None
    team_id: str
    month: str
    kind: str
    state: str
    currency: str
    billed: str
    carry_in: str
    carry_out: str
    exact_usd: str
    exact_cny: str
    document_hash: str | None
    merkle_root: str | None
    refers_to: str | None
    created_at: str
    finalized_at: str | None
    due: str

    @classmethod
    def of(cls, invoice: Invoice) -> InvoiceAnswer:
        return cls(
            invoice.id,
            invoice.number,
            invoice.team_id,
            invoice.period,
            invoice.kind,
            invoice.state,
            invoice.currency,
            format_amount(invoice.billed_pico),
            format_amount(invoice.carry_in_pico),
            format_amount(invoice.carry_out_pico),
            format_amount(invoice.exact_usd_pico),
            format_amount(invoice.exact_cny_pico),
            invoice.document_hash,
            invoice.merkle_root,
            invoice.refers_to,
            required_iso(invoice.created_ms),
            iso(invoice.finalized_ms),
            format_amount(invoice.due_pico),
        )


def document_of(statement: Statement, name: str) -> Document:
    """The statement as a file of the named format."""
    wanted = format_named(name)
    return Document(wanted.write(statement), wanted.media_type, file_name(statement, wanted))


async def list_(call: Call) -> Listing[InvoiceAnswer]:
    query: InvoiceFilter = call.query
    team_id = None if query.team is None else (await teams.find_team(call.c, query.team)).id
    found = await invoices.list_invoices(call.c, team_id=team_id, limit=query.limit, cursor=query.cursor)
    return Listing([InvoiceAnswer.of(invoice) for invoice in found.items], found.next_cursor)


async def create(call: Call) -> InvoiceAnswer:
    body: NewInvoice = call.body
    team = await teams.find_team(call.c, body.team_id)
    return InvoiceAnswer.of(await invoices.finalize(call.c, team.id, body.month, call.by, call.prepared))


async def close_and_read(db: Database, by: By, body: NewInvoice) -> invoices.Read | None:
    """Closes the month unless it is closed, and reads it. Raises Invalid while it is not over, Conflict while it cannot
    be closed."""
    async with db.read() as c:
        team = await teams.find_team(c, body.team_id)
        closed = await months.is_closed(c, body.month, team.timezone)
    if not closed:
        await _close(db, by, body.month, team.timezone)
    async with db.snapshot() as c:
        return await invoices.read_closed(c, team.id, body.month)


async def _close(db: Database, by: By, period: str, zone: str) -> None:
    (month,) = await months.close_patiently(db, by, period, [zone], patience_s=CLOSE_PATIENCE_S)
    if month.state == "open":
        raise Invalid("; ".join(month.waiting_for), "month")
    if month.state == "closing":
        raise Conflict(f"{period} cannot be closed yet: {'; '.join(month.waiting_for)}")


async def credit(call: Call) -> InvoiceAnswer:
    body: NewCreditNote = call.body
    amount, terms = parse_amount(body.amount), {"reference": body.reference, "reason": body.reason}
    return InvoiceAnswer.of(await credit_invoice(call.c, call.by, call.path["invoice"], amount, **terms))


async def get(call: Call) -> InvoiceAnswer:
    return InvoiceAnswer.of(await invoices.get(call.c, call.path["invoice"]))


async def finalize(call: Call) -> InvoiceAnswer:
    """A stored invoice is finalized already: this confirms it, so that a client may call it without harm."""
    invoice = await invoices.get(call.c, call.path["invoice"])
    if invoice.state == "void":
        raise Conflict(f"invoice {invoice.number} is void: make another for {invoice.period}")
    return InvoiceAnswer.of(await invoices.finalize(call.c, invoice.team_id, invoice.period, call.by))


async def pay(call: Call) -> InvoiceAnswer:
    return InvoiceAnswer.of(await invoices.mark(call.c, call.path["invoice"], "paid", call.by))


async def void(call: Call) -> InvoiceAnswer:
    return InvoiceAnswer.of(await invoices.mark(call.c, call.path["invoice"], "void", call.by))


async def download(call: Call) -> Document:
    return document_of(await invoices.statement_of_invoice(call.c, call.path["invoice"]), call.path["format"])


async def export(call: Call) -> Document:
    """The finalized invoice of a month, or its draft."""
    query: ExportQuery = call.query
    team = await teams.find_team(call.c, query.team)
    return document_of(await invoices.statement_of(call.c, team.id, query.month), query.format)


ENDPOINTS = [
    Endpoint(
        "GET",
        "/invoices/export",
        "A month's invoice or draft as a file",
        export,
        Document,
        EVERYONE,
        query=ExportQuery,
        media_types=MEDIA_TYPES,
    ),
    Endpoint("GET", "/invoices", "List invoices", list_, Listing[InvoiceAnswer], EVERYONE, query=InvoiceFilter),
    Endpoint(
        "POST",
        "/invoices",
        "Finalize a month",
        create,
        InvoiceAnswer,
        FINANCE,
        body=NewInvoice,
        status=201,
        prepare=close_and_read,
    ),
    Endpoint("POST", "/invoices/{invoice}/finalize", "Confirm an invoice", finalize, InvoiceAnswer, FINANCE),
    Endpoint("POST", "/invoices/{invoice}/pay", "Mark an invoice as paid", pay, InvoiceAnswer, FINANCE),
    Endpoint("POST", "/invoices/{invoice}/void", "Void an invoice", void, InvoiceAnswer, FINANCE),
    Endpoint(
        "POST",
        "/invoices/{invoice}/credit-notes",
        "Credit an invoice",
        credit,
        InvoiceAnswer,
        FINANCE,
        body=NewCreditNote,
        status=201,
    ),
    Endpoint(
        "GET",
        "/invoices/{invoice}.{format}",
        "An invoice as a file: xlsx, pdf, csv, json or focus",
        download,
        Document,
        EVERYONE,
        media_types=MEDIA_TYPES,
    ),
    Endpoint("GET", "/invoices/{invoice}", "Get an invoice", get, InvoiceAnswer, EVERYONE),
]
