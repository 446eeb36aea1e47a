from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, ProgrammingError

from ledger.accounts import balance
from ledger.audit import By, verify_chain
from ledger.database import CommitUnknown, Database, driver
from ledger.errors import Invalid, LedgerUnavailable
from ledger.migrations import migrate
from ledger.teams import create_team
from tests.ledger_books.conftest import NOW_MS
from tests.services import ROOT, Postgres

COUNTER = "INSERT INTO counters (name, value) VALUES ('n', 0)"


async def value(db: Database) -> int:
    async with db.read() as c:
        return int((await c.execute(text("SELECT value FROM counters WHERE name = 'n'"))).scalar_one())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://localhost/x", "use sqlite:///FILE or postgresql"),
        ("sqlite://", "SQLite needs a file"),
        ("sqlite:///:memory:", "SQLite needs a file"),
        ("what?", "not a database URL"),
    ],
)
async def test_a_url_of_another_kind_is_refused(url: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        await Database.open(url)


async def test_a_missing_directory_or_server_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerUnavailable, match="nowhere"):
        await Database.open(f"sqlite:///{tmp_path}/nowhere/x.db")
    with pytest.raises(LedgerUnavailable, match="not available"):
        await Database.open("postgresql://postgres@127.0.0.1:1/x")


async def test_a_block_that_raises_leaves_nothing_and_one_that_ends_is_seen_by_all(db: Database) -> None:
    async def change_my_mind() -> None:
        async with db.begin() as c:
            await c.execute(text(COUNTER))
            raise KeyError

    with pytest.raises(KeyError):
        await change_my_mind()
    async with db.begin() as c:
        await c.execute(text(COUNTER))
    assert await value(db) == 0


async def test_a_constraint_or_a_mistake_is_not_taken_for_an_outage(db: Database) -> None:
    async with db.begin() as c:
        await c.execute(text(COUNTER))
    with pytest.raises(IntegrityError):
        async with db.begin() as c:
            await c.execute(text(COUNTER))
    with pytest.raises((ProgrammingError, Exception)) as mistake:
        async with db.begin() as c:
            await c.execute(text("SELECT * FROM nowhere"))
    assert not isinstance(mistake.value, LedgerUnavailable)


async def test_sqlite_is_durable_waits_for_writers_and_checks_references(ledger_sqlite_url: str) -> None:
    db = await Database.open(ledger_sqlite_url)
    wanted = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 10_000}
    async with db.read() as c:
        for pragma, expected in wanted.items():
            assert (await c.execute(text(f"PRAGMA {pragma}"))).scalar_one() == expected
    with pytest.raises(IntegrityError, match="cannot store"):
        async with db.begin() as c:
            await c.execute(text("INSERT INTO counters (name, value) VALUES ('n', 'not a number')"))
    await db.close()


async def test_a_reader_on_sqlite_keeps_its_snapshot_while_another_writes(ledger_sqlite_url: str) -> None:
    db = await Database.open(ledger_sqlite_url)
    async with db.read() as reader:
        count = text("SELECT count(*) FROM counters")
        assert (await reader.execute(count)).scalar_one() == 0
        async with db.begin() as writer:
            await writer.execute(text(COUNTER))
        assert (await reader.execute(count)).scalar_one() == 0
    assert await value(db) == 0
    await db.close()


async def test_the_raw_driver_works_inside_the_transaction(db: Database) -> None:
    async with db.begin() as c:
        await (await driver(c)).execute(COUNTER)
        assert (await c.execute(text("SELECT count(*) FROM counters"))).scalar_one() == 1
    assert await value(db) == 0


async def test_many_tasks_of_one_process_add_up(db: Database) -> None:
    async with db.begin() as c:
        await c.execute(text(COUNTER))

    async def add() -> None:
        for _ in range(5):
            async with db.begin() as c:
                await c.execute(text("UPDATE counters SET value = value + 1 WHERE name = 'n'"))

    await asyncio.gather(*(add() for _ in range(12)))
    assert await value(db) == 60


ADDER = """
import asyncio, sys
from ledger.audit import By, lock
from ledger.database import Database
from ledger.topups import top_up

async def main(url, name):
    db = await Database.open(url)
    for number in range(10):
        async with db.begin() as c:
            await top_up(c, By(name, 1), "acme", 1, currency="USD", reference=f"{name}-{number}")
    await db.close()

asyncio.run(main(*sys.argv[1:]))
"""


async def test_several_processes_write_the_same_books(db: Database, books_url: str, by: By) -> None:
    async with db.begin() as c:
        await create_team(c, by, "Acme", team_id="acme")
    command = [sys.executable, "-c", ADDER, books_url]
    processes = [await asyncio.create_subprocess_exec(*command, name, cwd=ROOT) for name in "abcd"]
    assert [await process.wait() for process in processes] == [0, 0, 0, 0]
    async with db.read() as c:
        assert (await balance(c, "acme", NOW_MS)).prepaid_pico == 40
        assert await verify_chain(c) == (41, None)


async def test_a_server_that_goes_away_is_unavailable_and_is_found_again(
    postgres_server: Callable[..., Postgres],
) -> None:
    server = postgres_server()
    await migrate(server.url())
    db = await Database.open(server.url())
    async with db.begin() as c:
        await c.execute(text(COUNTER))
    server.kill()
    for attempt in (db.read, db.begin):
        with pytest.raises(LedgerUnavailable):
            async with attempt() as c:
                await c.execute(text("SELECT 1"))
    server.start()
    assert await value(db) == 0
    await db.close()


async def test_a_connection_cut_during_the_transaction_or_its_commit_tells_which(
    postgres_server: Callable[..., Postgres],
) -> None:
    server = postgres_server()
    await migrate(server.url())
    db = await Database.open(server.url())

    async def write(statements_after_the_cut: int) -> None:
        async with db.begin() as c:
            await c.execute(text(COUNTER))
            server.kill()
            for _ in range(statements_after_the_cut):
                await c.execute(text(COUNTER))

    with pytest.raises(LedgerUnavailable) as cut:
        await write(1)
    assert not isinstance(cut.value, CommitUnknown)
    server.start()
    with pytest.raises(CommitUnknown, match="during COMMIT"):
        await write(0)
    await db.close()


async def test_a_frozen_server_is_unavailable_after_the_time_out_and_nothing_waits_longer(
    postgres_server: Callable[..., Postgres],
) -> None:
    server = postgres_server()
    await migrate(server.url())
    db = await Database.open(server.url(), pool_size=2, command_timeout_s=1)

    async def write(statements_after_the_freeze: int) -> None:
        async with db.begin() as c:
            await c.execute(text(COUNTER))
            server.freeze()
            for _ in range(statements_after_the_freeze):
                await c.execute(text("SELECT 1"))

    for statements, expected in ((1, LedgerUnavailable), (0, CommitUnknown)):
        async with asyncio.timeout(30):
            with pytest.raises(expected):
                await write(statements)
        server.thaw()
    async with db.begin() as c:
        await c.execute(text("DELETE FROM counters"))
    server.freeze()
    async with asyncio.timeout(60):
        for _ in range(3):
            with pytest.raises(LedgerUnavailable):
                await value(db)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await value(db)
    server.thaw()
    async with db.begin() as c:
        await c.execute(text(COUNTER))
    assert await value(db) == 0
    async with asyncio.timeout(30):
        await db.close()


def test_the_gateway_does_not_pay_for_alembic() -> None:
    modules = "ledger.audit ledger.prices ledger.budgets ledger.keys ledger.topups ledger.migrations ledger.partitions"
    program = f"import sys, {', '.join(modules.split())}; sys.exit('alembic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


async def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(b"this was a ledger once. " * 500)
    with pytest.raises(Invalid, match=r"ledger\.db is damaged or no SQLite database"):
        await Database.open(f"sqlite:///{path}")
