"""A statement as a file: one module a format, all from the same value. Nothing is computed here but text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ledger.errors import Invalid
from ledger.statements import Statement


@dataclass(frozen=True, slots=True)
class Format:
    """How one format is written and what it is called on disk and on the wire."""

    write: Callable[[Statement], bytes]
    media_type: str
    suffix: str


def format_named(name: str) -> Format:
    """The writer of a format. Raises Invalid naming those there are; each is imported when it is first asked for."""
    match name:
        case "csv":
            from ledger.documents.csv import write_csv

            return Format(write_csv, "text/csv; charset=utf-8", ".csv")
        case "json":
            from ledger.documents.json import write_json

            return Format(write_json, "application/json", ".json")
        case "xlsx":
            from ledger.documents.xlsx import write_xlsx

            return Format(write_xlsx, "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet", ".xlsx")
        case "pdf":
            from ledger.documents.pdf import write_pdf

            return Format(write_pdf, "application/pdf", ".pdf")
        case "focus":
            from ledger.documents.focus import write_focus

            return Format(write_focus, "text/csv; charset=utf-8", ".focus.csv")
    raise Invalid(f"unknown format {name!r}: use csv, json, xlsx, pdf or focus", "format")


def file_name(statement: Statement, format_: Format) -> str:
    """Such as "TG-2026-000001.xlsx" when finalized, "draft-team_…-2026-11.csv" before."""
    stem = statement.number or f"draft-{statement.party.team_id}-{statement.period}"
    return stem + format_.suffix
