"""CSV for spreadsheets: UTF-8 with a byte order mark, CRLF, one row a line, then the figures. RFC 4180."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING

from ledger.documents.wording import (
    account_lines,
    closing_notes,
    describe,
    issued,
    local_date,
    number_or_state,
    summary,
    title,
    unit_price,
)
from ledger.money import format_amount
from ledger.statements import Statement

if TYPE_CHECKING:
    from _csv import Writer

_FORMULA_START = ("=", "+", "-", "@", "\t", "\r")


def write_csv(statement: Statement) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\r\n")
    _head(writer, statement)
    _lines(writer, statement)
    writer.writerow([])
    for date, what, reference, amount in account_lines(statement):
        writer.writerow([date, what, _text(reference), amount, statement.currency])
    for name, chinese, amount in summary(statement):
        writer.writerow([name, chinese, amount, statement.currency])
    writer.writerows(closing_notes(statement))
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def _head(writer: Writer, statement: Statement) -> None:
    party = statement.party
    end = local_date(statement.period_end_ms - 1, statement.timezone)
    rows = [
        (*title(statement).rsplit(" ", 1), number_or_state(statement)),
        *([("Issued", "开具日期", issued(statement), statement.timezone)] if statement.issued_ms is not None else []),
        *([("For invoice", "对应账单", statement.refers_to)] if statement.refers_to else []),
        ("Period", "账期", f"{local_date(statement.period_start_ms, statement.timezone)} to {end}", statement.timezone),
        ("Team", "客户", _text(party.name), party.team_id),
        *([("Invoice title", "发票抬头", _text(party.invoice_title))] if party.invoice_title else []),
        *([("Tax number", "纳税人识别号", _text(party.tax_id))] if party.tax_id else []),
        ("Requests", "请求数", statement.tokens.requests),
    ]
    for row in rows:
        writer.writerow(row)
    writer.writerow([])


def _lines(writer: Writer, statement: Statement) -> None:
    columns = "description,model,meter,price_version,tokens,usd_per_1m,cny_per_1m,amount_usd,amount_cny,billed,currency"
    writer.writerow(columns.split(","))
    for line in statement.lines:
        writer.writerow(
            [
                _text(describe(line)),
                _text(line.model),
                line.meter,
                line.price_version,
                line.tokens,
                unit_price(line, "USD"),
                unit_price(line, "CNY"),
                format_amount(line.usd_pico),
                format_amount(line.cny_pico),
                format_amount(line.billed_pico),
                statement.currency,
            ]
        )
    total = ["Total", "", "", "", sum(line.tokens for line in statement.lines if line.kind == "usage"), "", ""]
    exact = [format_amount(statement.exact_usd_pico), format_amount(statement.exact_cny_pico)]
    writer.writerow([*total, *exact, format_amount(statement.billed_pico), statement.currency])


def _text(value: str) -> str:
    """Text that a spreadsheet will not run as a formula (CSV injection)."""
    return "'" + value if value.startswith(_FORMULA_START) else value
