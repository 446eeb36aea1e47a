"""Invoices: a draft may be looked at in any format at any time; finalized, paid and void are for ever."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ledger import invoices, teams
from ledger.documents import file_name, format_named
from ledger.invoices import Invoice
from ledger.money import format_amount
from ledger.statements import Statement
from proxy.admin.endpoints import EVERYONE, FINANCE, Call, Document, Endpoint, Listing, Paging, Strict
from proxy.admin.times import iso, required_iso

Month = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{4}-(0[1-9]|1[0-2])$", description="YYYY-MM")]
FormatName = Literal["xlsx", "pdf", "csv", "json", "focus"]
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
    """Finalizes the month of a team: number, hash, immutable bytes. The same month again gives the same invoice."""

    team_id: str
    month: Month


class InvoiceAnswer(msgspec.Struct, frozen=True):
    """`billed` is in whole fen or cents; carry_in + exact = billed + carry_out."""

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
    return InvoiceAnswer.of(await invoices.finalize(call.c, team.id, body.month, call.by))


async def get(call: Call) -> InvoiceAnswer:
    return InvoiceAnswer.of(await invoices.get(call.c, call.path["invoice"]))


async def finalize(call: Call) -> InvoiceAnswer:
    """A stored invoice is finalized already: this confirms it, so that a client may call it without harm."""
    invoice = await invoices.get(call.c, call.path["invoice"])
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
    Endpoint("POST", "/invoices", "Finalize a month", create, InvoiceAnswer, FINANCE, body=NewInvoice, status=201),
    Endpoint("POST", "/invoices/{invoice}/finalize", "Confirm an invoice", finalize, InvoiceAnswer, FINANCE),
    Endpoint("POST", "/invoices/{invoice}/pay", "Mark an invoice as paid", pay, InvoiceAnswer, FINANCE),
    Endpoint("POST", "/invoices/{invoice}/void", "Void an invoice", void, InvoiceAnswer, FINANCE),
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
