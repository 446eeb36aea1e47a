from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from sqlalchemy import insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.database import Database
from ledger.partitions import ensure_partitions, uuid7_floor
from ledger.periods import period_bounds
from ledger.schema import usage
from tests.ledger_books.conftest import NOW_MS


@pytest.fixture
async def pg(ledger_postgres_url: str) -> AsyncIterator[Database]:
    database = await Database.open(ledger_postgres_url)
    yield database
    await database.close()


def usage_row(at_ms: int, number: int = 0) -> dict[str, Any]:
    zero = {c.name: 0 for c in usage.columns if not c.nullable}
    texts = dict.fromkeys(["team_id", "key_id", "model", "deployment", "status", "price_version", "slot_id"], "x")
    return (
        zero
        | texts
        | {
            "request_id": uuid7_floor(at_ms)[:-12] + f"{number:012x}",
            "created_ms": at_ms,
            "period": "2026-11",
            "charges": "[]",
            "batch_id": "b",
            "record": b"r",
        }
    )


async def places(c: AsyncConnection) -> dict[str, str]:
    rows = await c.execute(text("SELECT request_id::text, tableoid::regclass::text FROM usage"))
    return {row[0]: row[1] for row in rows}


async def test_partitions_are_made_ahead_once(pg: Database) -> None:
    async with pg.begin() as c:
        assert await ensure_partitions(c, NOW_MS) == ["usage_2026_11", "usage_2026_12", "usage_2027_01"]
        assert await ensure_partitions(c, NOW_MS) == []
        assert await ensure_partitions(c, NOW_MS + 2 * 86_400_000) == ["usage_2027_02"]


async def test_a_row_lies_in_the_partition_of_its_month_and_an_odd_clock_in_the_default(pg: Database) -> None:
    start, end = period_bounds("2026-12", "UTC")
    instants = {start - 1: "usage_2026_11", start: "usage_2026_12", end - 1: "usage_2026_12", 1: "usage_default"}
    async with pg.begin() as c:
        await ensure_partitions(c, NOW_MS)
        await c.execute(insert(usage), [usage_row(at_ms) for at_ms in instants])
        assert await places(c) == {uuid7_floor(at_ms): name for at_ms, name in instants.items()}


async def test_rows_that_came_before_their_partition_are_moved_into_it(pg: Database) -> None:
    async with pg.begin() as c:
        await c.execute(insert(usage), [usage_row(NOW_MS, number) for number in range(5)] + [usage_row(1)])
    async with pg.begin() as c:
        await ensure_partitions(c, NOW_MS)
    async with pg.read() as c:
        where = await places(c)
        assert sorted(where.values()) == ["usage_2026_11"] * 5 + ["usage_default"]
        stored = (await c.execute(select(usage).where(usage.c.created_ms == NOW_MS).limit(1))).one()
        assert stored.record == b"r"


async def test_a_new_partition_has_the_keys_checks_and_indexes_of_all(pg: Database) -> None:
    async with pg.begin() as c:
        await ensure_partitions(c, NOW_MS, 0)
        query = text("SELECT indexdef FROM pg_indexes WHERE tablename = 'usage_2026_11' ORDER BY 1")
        indexes = " ".join((await c.execute(query)).scalars())
        assert "UNIQUE" in indexes
        assert "USING brin (created_ms)" in indexes
        assert "(team_id, period)" in indexes
        query = text("SELECT count(*) FROM pg_constraint WHERE conrelid = 'usage_2026_11'::regclass AND contype = 'c'")
        assert (await c.execute(query)).scalar_one() == 5


async def test_only_the_partitions_of_the_time_asked_for_are_read(pg: Database) -> None:
    start, end = period_bounds("2026-12", "UTC")
    async with pg.begin() as c:
        await ensure_partitions(c, NOW_MS)
        query = f"EXPLAIN SELECT * FROM usage WHERE request_id >= '{uuid7_floor(start)}'"
        plan = "\n".join((await c.execute(text(f"{query} AND request_id < '{uuid7_floor(end)}'"))).scalars())
    assert "usage_2026_12" in plan
    assert "usage_2026_11" not in plan


async def test_two_posters_that_start_at_once_make_each_partition_once(pg: Database) -> None:
    async def make() -> list[str]:
        async with pg.begin() as c:
            return await ensure_partitions(c, NOW_MS)

    made = await asyncio.gather(*(make() for _ in range(4)))
    assert sorted(name for names in made for name in names) == ["usage_2026_11", "usage_2026_12", "usage_2027_01"]


async def test_sqlite_has_no_partitions_to_make(ledger_sqlite_url: str) -> None:
    db = await Database.open(ledger_sqlite_url)
    async with db.begin() as c:
        assert await ensure_partitions(c, NOW_MS) == []
    await db.close()
