"""Draw what `benchmarks.gateway` measured.

python -m benchmarks.plot RUN.json [MORE.json …] --svg docs/speed.svg

Several files are several parts of one picture: a later one adds subjects and cells that are not there yet.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RATE_CELL = "32 connections"
OPEN_CELLS = ("open loop 200/s", "open loop 500/s", "open loop 1000/s")
WIDTH, ROW, LABEL, BAR = 760, 26, 240, 390
INK, GRID, OURS, OTHERS = "#24292f", "#d0d7de", "#0969da", "#8c959f"

Row = dict[str, float]
Cells = dict[str, dict[str, Row]]


def merged(paths: list[Path]) -> Cells:
    cells: Cells = {}
    for path in paths:
        run: dict[str, Any] = json.loads(path.read_text())
        for label, subjects in run["cells"].items():
            for name, row in subjects.items():
                cells.setdefault(label, {}).setdefault(name, row)
    return cells


def picture(cells: Cells) -> str:
    parts: list[str] = []
    y = _rates(parts, cells.get(RATE_CELL, {}), 0)
    y = _latencies(parts, [(label, cells[label]) for label in OPEN_CELLS if label in cells], y + 10)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}">'
    )
    return "\n".join((head, f'<rect width="{WIDTH}" height="{y}" fill="#ffffff"/>', *parts, "</svg>")) + "\n"


def _rates(parts: list[str], subjects: dict[str, Row], y: int) -> int:
    """One bar a subject, the spread of its rounds as a line through its end."""
    rows = {name: row for name, row in subjects.items() if name != "direct" and row["per_second"]}
    most = max((row["rate_high"] for row in rows.values()), default=1.0)
    parts.append(_text(10, y + 22, "Plain answers a second, 32 connections, gateway on one core", bold=True))
    y += 34
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["per_second"]):
        parts.append(_text(LABEL - 8, y + 16, _named(name), anchor="end"))
        width = BAR * row["per_second"] / most
        parts.append(_bar(LABEL, y + 3, width, ROW - 8, OURS if "TallyGate" in _named(name) else OTHERS))
        low, high = (LABEL + BAR * row[edge] / most for edge in ("rate_low", "rate_high"))
        parts.append(f'<path d="M{low:.1f} {y + 12}H{high:.1f}" stroke="{INK}"/>')
        parts.append(_text(LABEL + max(width, high - LABEL) + 8, y + 16, f"{row['per_second']:,.0f}"))
        y += ROW
    return y


def _latencies(parts: list[str], cells: list[tuple[str, dict[str, Row]]], y: int) -> int:
    """For each rate and subject a line from the median to the 99th percentile."""
    names = [name for name in (cells[0][1] if cells else {}) if name != "direct"]
    most = max((rows[name]["p99_ms"] for _, rows in cells for name in names if name in rows), default=1.0)
    parts.append(
        _text(10, y + 22, "Open loop: median (dot) and 99th percentile (tick) from the intended send", bold=True)
    )
    y += 34
    for label, rows in cells:
        parts.append(_text(10, y + 16, label.removeprefix("open loop ")))
        for name in names:
            if name not in rows:
                continue
            colour = OURS if "TallyGate" in _named(name) else OTHERS
            middle, tail = (LABEL + BAR * rows[name][edge] / most for edge in ("p50_ms", "p99_ms"))
            parts.append(_text(LABEL - 8, y + 16, _named(name), anchor="end"))
            parts.append(f'<path d="M{middle:.1f} {y + 12}H{tail:.1f}m0 -5v10" stroke="{colour}" stroke-width="2"/>')
            parts.append(f'<circle cx="{middle:.1f}" cy="{y + 12}" r="4" fill="{colour}"/>')
            told = f"{rows[name]['p50_ms']:.2f} · {rows[name]['p99_ms']:.1f} ms"
            parts.append(_text(tail + 8, y + 16, told))
            y += ROW
        parts.append(f'<path d="M10 {y}H{WIDTH - 10}" stroke="{GRID}"/>')
    return y + 10


def _named(name: str) -> str:
    known = {
        "floor": "bare forward, same stack",
        "TallyGate": "TallyGate, SQLite",
        "with PostgreSQL, Valkey": "TallyGate, PostgreSQL, Valkey",
        "TallyGate, poster on the same core": "TallyGate, all on one core",
    }
    return known.get(name, name)


def _text(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'


def _bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--svg", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.svg.write_text(picture(merged(arguments.runs)))


if __name__ == "__main__":
    main()
