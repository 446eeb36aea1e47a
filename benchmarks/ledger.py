"""How fast money flows here: holds and settlements of one worker, the poster on both databases, a month's invoice and
its proof. The disk's own fdatasync time stands beside, because it bounds the rest.

    python -m benchmarks.ledger [--quick] [--json FILE] [--rows N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.journal import sync_time_us
from ledger.audit import By
from ledger.database import Database
from ledger.gate import Ask, Gate, Outcome, Spender, Tokens
from ledger.keys import KeyHasher, create_key
from ledger.migrations import migrate
from ledger.money import FxRate
from ledger.periods import period_of
from ledger.posting import Poster
from ledger.publishing import Quote, seed
from ledger.quotas import Limit, Scope, replace_quotas
from ledger.teams import create_team
from ledger.topups import top_up

MODEL = "deepseek-v3.2"
USD = 10**12
TIMEZONE = "Asia/Shanghai"


SYNC_BYTES = 4_096
ASKED = {
    "poster": "20,000/s · 10,000/s",
    "invoice": "20 s, 300 MB",
    "verify": "60 s",
}
"""What a million rows are allowed; the poster on SQLite and on PostgreSQL."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def request_id(at_ms: int) -> str:
    number = at_ms << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


async def furnish(db: Database) -> Spender:
    """A team with a balance and two budgets, and its key."""
    by = By("benchmark", now_ms() - 86_400_000)
    async with db.begin() as c:
        await seed(c, by, [Quote.parse(MODEL, input="0.28", output="0.42")], FxRate.parse("USD", "CNY", "7.3"))
        team = await create_team(c, by, "benchmark", timezone=TIMEZONE)
        key = (await create_key(c, by, KeyHasher(secrets.token_bytes(16)), team.id)).key
        await top_up(c, by, team.id, 1_000_000 * USD, currency="USD", reference="benchmark")
        for scope in (Scope.of_team(team.id), Scope.of_key(key.id)):
            await replace_quotas(c, by, scope, [Limit("spend", "month", 900_000 * USD)])
    return Spender(team.id, key.id, None, "USD", TIMEZONE)


async def spend(gate: Gate, spender: Spender, requests: int, concurrency: int) -> dict[str, float]:
    """Whole requests, without an upstream: hold, INTENT, settle, durable."""
    left = requests

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            at_ms = now_ms()
            hold = await gate.hold(Ask(request_id(at_ms), at_ms, spender, MODEL, 100, 200, False, "backend"))
            tokens = Tokens(90, generated_tokens=150, draft_tokens=160, accepted_tokens=120, target_passes=30)
            await hold.settle(Outcome("completed", "backend", "qwen-0.5b", tokens, latency_ms=12))

    sync_us = sync_time_us(gate.journal.path.parent, SYNC_BYTES)
    start, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    return {"per_s": requests / wall, "cpu_us": cpu / requests * 1e6, "sync_us": sync_us}


async def post(db: Database, journal_dir: Path, rows: int) -> dict[str, float]:
    poster, sync_us = Poster(db, journal_dir), sync_time_us(journal_dir, SYNC_BYTES)
    start = time.perf_counter()
    await poster.drain()
    wall = time.perf_counter() - start
    poster.close()
    return {"per_s": rows / wall, "seconds": wall, "sync_us": sync_us}


async def fill(url: str, folder: Path, rows: int) -> dict[str, Any]:
    """One worker's requests, then the poster: on a database of its own."""
    await migrate(url)
    db = await Database.open(url)
    spender = await furnish(db)
    gate = await Gate.open(db, folder, 0)
    found: dict[str, Any] = {}
    for concurrency in (1, 32):
        found[f"hold and settle, {concurrency} at once"] = await spend(gate, spender, min(rows, 5_000), concurrency)
    found["hold and settle, 512 at once"] = await spend(gate, spender, rows, 512)
    await gate.close()
    found["poster"] = await post(db, folder, rows + 2 * min(rows, 5_000))
    await db.close()
    return found


async def _invoice(url: str, journal_dir: Path) -> dict[str, Any]:
    """In a process of its own, for its memory."""
    del journal_dir
    from sqlalchemy import select

    from ledger.documents import csv as csv_document  # noqa: F401  # part of what an export loads
    from ledger.month_figures import draft_statement
    from ledger.schema import teams

    db = await Database.open(url)
    async with db.read() as c:
        (team_id,) = (await c.execute(select(teams.c.id))).scalars()
        statement = await draft_statement(c, team_id, period_of(now_ms(), TIMEZONE))
    await db.close()
    return {"requests": statement.tokens.requests, "exact_pico": str(statement.exact_pico)}


async def _verify(url: str, journal_dir: Path) -> dict[str, Any]:
    from ledger.verify import verify

    db = await Database.open(url)
    report = await verify(db, journal_dir)
    await db.close()
    if not report.ok:
        raise SystemExit(f"the ledger does not prove: {report.first_difference}")
    return {check.name: check.counted for check in report.checks}


TASKS: dict[str, Callable[[str, Path], Coroutine[Any, Any, dict[str, Any]]]] = {"invoice": _invoice, "verify": _verify}


def apart(task: str, url: str, journal_dir: Path) -> dict[str, Any]:
    """Run a task in a process of its own; its time and its memory at most."""
    command = [sys.executable, "-m", "benchmarks.ledger", "--task", task, url, str(journal_dir)]
    sync_us = sync_time_us(journal_dir, SYNC_BYTES)
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "sync_us": sync_us}


def run_task(task: str, url: str, journal_dir: Path) -> None:
    start = time.perf_counter()
    result = uvloop.run(TASKS[task](url, journal_dir))
    wall = time.perf_counter() - start
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": wall, "memory_mb": memory_mb, "result": result}))


def measure(folder: Path, rows: int) -> dict[str, Any]:
    from tests.services import Postgres, running

    report: dict[str, Any] = {"rows": rows}
    with running(Postgres(fsync=True)) as postgres:
        urls = {"SQLite": f"sqlite:///{folder / 'ledger.db'}", "PostgreSQL": postgres.url(postgres.create_database())}
        for name, url in urls.items():
            journal_dir = folder / f"journal-{name}"
            report[name] = uvloop.run(fill(url, journal_dir, rows))
            for task in TASKS:
                report[name][task] = apart(task, url, journal_dir)
    return report


def show(report: dict[str, Any]) -> None:
    title = f"{report['rows']:,} requests; in brackets the disk's fdatasync just before"
    table = Table("", "asked", "SQLite", "PostgreSQL", title=title)
    for row in report["SQLite"]:
        cells = []
        for name in ("SQLite", "PostgreSQL"):
            found = report[name][row]
            words = f"{found['per_s']:,.0f}/s" if "per_s" in found else f"{found['seconds']:.1f} s"
            words += f", {found['cpu_us']:.0f} us CPU each" if "cpu_us" in found else ""
            words += f", {found['memory_mb']:.0f} MB" if "memory_mb" in found else ""
            cells.append(f"{words} ({found['sync_us']:.0f} us)")
        table.add_row(row, ASKED.get(row, ""), *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 000 rows instead of a million")
    parser.add_argument("--rows", type=int, help="how many requests")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: a temporary one")
    parser.add_argument("--task", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task, url, journal_dir = options.task
        run_task(task, url, Path(journal_dir))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        report = measure(Path(folder), options.rows or (20_000 if options.quick else 1_000_000))
    show(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
