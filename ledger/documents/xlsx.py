"""XLSX for finance: the figures as numbers with two decimals where they are billed, as exact text where they are exact.

A spreadsheet cell is a binary float of 15 digits, so exact amounts are written as text, never as a number that lies.
"""

from __future__ import annotations

import io
from typing import Any

import xlsxwriter

from ledger.documents.wording import (
    account_lines,
    closing_notes,
    describe,
    heading,
    number_or_state,
    summary,
    title,
    unit_price,
)
from ledger.money import PICO_PER_CENT, format_amount
from ledger.statements import Statement

_COLUMNS = (
    ("Description", 46),
    ("Model", 22),
    ("Tokens", 16),
    ("USD per 1M", 14),
    ("CNY per 1M", 14),
    ("Amount USD (exact)", 22),
    ("Amount CNY (exact)", 22),
    ("Billed", 16),
)


def write_xlsx(statement: Statement) -> bytes:
    buffer = io.BytesIO()
    book = xlsxwriter.Workbook(buffer, {"in_memory": True, "strings_to_formulas": False, "strings_to_urls": False})
    sheet = book.add_worksheet(statement.period)
    bold, money, count = (
        book.add_format({"bold": True}),
        book.add_format({"num_format": "#,##0.00"}),
        book.add_format({"num_format": "#,##0"}),
    )
    for column, (_, width) in enumerate(_COLUMNS):
        sheet.set_column(column, column, width)
    row = _head(sheet, statement, bold)
    for column, (name, _) in enumerate(_COLUMNS):
        sheet.write_string(row, column, name, bold)
    first = row + 1
    for row, line in enumerate(statement.lines, first):
        texts = (describe(line), line.model)
        exact = (unit_price(line, "USD"), unit_price(line, "CNY"))
        amounts = (format_amount(line.usd_pico), format_amount(line.cny_pico))
        for column, text in zip((0, 1, 3, 4, 5, 6), (*texts, *exact, *amounts), strict=True):
            sheet.write_string(row, column, text)
        sheet.write_number(row, 2, line.tokens, count)
        sheet.write_number(row, 7, line.billed_pico // PICO_PER_CENT / 100, money)
    row = first + len(statement.lines)
    sheet.write_string(row, 0, f"Total ({statement.currency})", bold)
    sheet.write_string(row, 5, format_amount(statement.exact_usd_pico), bold)
    sheet.write_string(row, 6, format_amount(statement.exact_cny_pico), bold)
    sheet.write_number(row, 7, statement.billed_pico // PICO_PER_CENT / 100, money)
    _figures(sheet, statement, row + 2)
    book.close()
    return buffer.getvalue()


def _head(sheet: Any, statement: Statement, bold: Any) -> int:
    rows = [(title(statement), number_or_state(statement)), *heading(statement)]
    for row, (name, value) in enumerate(rows):
        sheet.write_string(row, 0, name, bold)
        sheet.write_string(row, 1, value)
    return len(rows) + 1


def _figures(sheet: Any, statement: Statement, row: int) -> None:
    rows = [
        (f"{date} {what}", f"{amount} {statement.currency} · {reference}")
        for date, what, reference, amount in account_lines(statement)
    ]
    rows += [(f"{name} {chinese}", f"{amount} {statement.currency}") for name, chinese, amount in summary(statement)]
    rows += [(f"{name} {chinese}", text) for name, chinese, text in closing_notes(statement)]
    for offset, (name, value) in enumerate(rows):
        sheet.write_string(row + offset, 0, name)
        sheet.write_string(row + offset, 1, value)
