"""Exact sums of pico in SQL: high and low parts apart, since SQLite's SUM fails beyond 64 bits (9.2 million units)."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnClause, Integer, Label, RowMapping, func, type_coerce

_SPLIT = 10**9


def exact_sum(column: ColumnClause[Any]) -> tuple[Label[Any], Label[Any]]:
    """Two labelled columns to select; `read_sum(row, column.name)` puts them together."""
    name = column.name
    plain = type_coerce(column, Integer)
    return (
        func.coalesce(func.sum((plain - plain % _SPLIT) // _SPLIT), 0).label(f"{name}_high"),
        func.coalesce(func.sum(plain % _SPLIT), 0).label(f"{name}_low"),
    )


def read_sum(row: RowMapping, name: str) -> int:
    """The exact sum of `name` from a row mapping that selected `exact_sum` of it."""
    return int(row[f"{name}_high"]) * _SPLIT + int(row[f"{name}_low"])
