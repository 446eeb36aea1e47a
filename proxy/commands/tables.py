"""Rows as text: a table where the terminal is wide enough, else one record under another; tab-separated in a pipe.

No cell is ever cut or folded: half an id is no id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?Z")
_GAP = "  "
Row = Sequence[str]


def cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def tab_separated(columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """With a header line."""
    return ["\t".join(row) for row in (columns, *rows)]


def for_terminal(columns: Sequence[str], rows: Sequence[Row], width: int) -> list[str]:
    """Without the columns that are empty in every row; the first line is the header when it is a table."""
    shown = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    names = [columns[index].removesuffix("_tokens").removesuffix("_at") for index in shown]
    texts = [[_short_time(row[index]) for index in shown] for row in rows]
    widths = [max(map(_width, column)) for column in zip(names, *texts, strict=True)]
    if sum(widths) + len(_GAP) * (len(widths) - 1) <= width:
        return [_line(row, widths) for row in (names, *texts)]
    return [line for row in texts for line in _record(names, row, width)]


def _record(names: Sequence[str], row: Row, width: int) -> list[str]:
    """The first cell, and below it the others with their names, as many in a line as fit."""
    lines = [row[0]]
    for name, text in zip(names[1:], row[1:], strict=True):
        if not text:
            continue
        pair = f"{name} {text}".strip()
        if len(lines) > 1 and _width(lines[-1]) + len(_GAP) + _width(pair) <= width:
            lines[-1] += _GAP + pair
        else:
            lines.append(_GAP + pair)
    return lines


def _line(row: Row, widths: Sequence[int]) -> str:
    return _GAP.join(text + " " * (width - _width(text)) for text, width in zip(row, widths, strict=True)).rstrip()


def _short_time(text: str) -> str:
    found = _TIME.fullmatch(text)
    return f"{found[1]} {found[2]}Z" if found else text


def _width(text: str) -> int:
    from rich.cells import cell_len  # a Chinese character takes two places

    return cell_len(text)
