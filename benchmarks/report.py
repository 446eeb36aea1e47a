"""What a run of `benchmarks.gateway` found, as tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def show(console: Console, report: dict[str, Any]) -> None:
    for label, subjects in report["cells"].items():
        console.print(_cell(label, subjects))
    for title, key in (("1 000 streams at once, mostly silent", "quiet"), ("work per request, counted", "work")):
        if any(report[key].values()):
            console.print(_facts(title, report[key]))
    for name, facts in report["facts"].items():
        console.print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    for name, why in report["absent"].items():
        console.print(f"{name} took no part: {why}")
    console.print(f"fdatasync of this disk after 4 kB: {report['fdatasync_us']:.0f} us (median)")
    console.print(f"medians of {report['rounds']} rounds of {report['seconds']:g} s")


def _cell(label: str, subjects: dict[str, dict[str, float]]) -> Table:
    streamed, sized, base = "stream" in label, "body" in label, subjects.get("floor", {}).get("per_second", 0)
    table = Table(title=label, title_justify="left")
    columns = ["", "req/s", "spread", "p50 ms", "p99 ms", "p99 spread", "× floor", "CPU us", "errors"]
    columns += ["first byte p50", "chunks/s"] if streamed else ["memory added MB"] if sized else []
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for name, row in subjects.items():
        cells = [
            name,
            f"{row['per_second']:,.0f}",
            f"{row['rate_low']:,.0f}–{row['rate_high']:,.0f}",
            f"{row['p50_ms']:.2f}",
            f"{row['p99_ms']:.2f}",
            f"{row['p99_low_ms']:.1f}–{row['p99_high_ms']:.1f}",
            f"{row['per_second'] / base:.2f}" if base else "",
            f"{row['cpu_us']:,.0f}" if row["cpu_us"] else "",
            f"{row['errors']:.0f}",
        ]
        if streamed:
            cells += [f"{row['first_byte_p50_ms']:.2f}", f"{row['chunks_per_second']:,.0f}"]
        elif sized:
            cells.append(f"{row['memory_added_mb']:.0f}")
        table.add_row(*cells)
    return table


def _facts(title: str, subjects: dict[str, dict[str, float]]) -> Table:
    table = Table(title=title, title_justify="left")
    names = list(dict.fromkeys(name for facts in subjects.values() for name in facts))
    for column in ("", *names):
        table.add_column(column.replace("_", " "), justify="right" if column else "left")
    for name, facts in subjects.items():
        table.add_row(name, *(f"{facts[key]:g}" if key in facts else "" for key in names))
    return table
