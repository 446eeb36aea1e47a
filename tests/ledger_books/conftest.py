from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.audit import GENESIS, By
from ledger.database import Database
from ledger.schema import metadata
from tests.services import Postgres

NOW_MS = 1_796_000_000_000  # 2026-11-30 in UTC


@pytest.fixture(scope="session")
def emptied_postgres_url(postgres: Postgres, migrated_template: str) -> Iterator[str]:
    """One migrated database for all tests here: emptying it is much cheaper than making another."""
    name = postgres.create_database(migrated_template)
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture(params=["sqlite", "postgresql"])
def books_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """Empty books; the test runs once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        yield request.getfixturevalue("ledger_sqlite_url")
        return
    url: str = request.getfixturevalue("emptied_postgres_url")
    yield url
    tables = ", ".join(f'"{name}"' for name in metadata.tables)
    server: Postgres = request.getfixturevalue("postgres")
    head = f"INSERT INTO chain_heads (name, seq, hash) VALUES ('audit', 0, '{GENESIS}')"
    server.sql(f"TRUNCATE {tables}; {head}", url.rpartition("/")[2])


@pytest.fixture
async def db(books_url: str) -> AsyncIterator[Database]:
    database = await Database.open(books_url)
    yield database
    await database.close()


@pytest.fixture
def by() -> By:
    return By("ada", NOW_MS)


@asynccontextmanager
async def tampering(db: Database, table: str) -> AsyncIterator[AsyncConnection]:
    """A transaction in which an append-only table can be changed; nothing of it stays."""
    ends = ["_append_only_update", "_append_only_delete"] if db.dialect == "sqlite" else [f"_append_only ON {table}"]
    with suppress(_TakenBack):
        async with db.begin() as c:
            for end in ends:
                await c.execute(text(f"DROP TRIGGER {table}{end}"))
            yield c
            raise _TakenBack


class _TakenBack(Exception):
    pass
