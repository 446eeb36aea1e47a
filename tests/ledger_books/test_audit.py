from __future__ import annotations

import asyncio
import random

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from ledger.audit import By, changes_since, latest_seq, list_entries, lock, record, verify_chain
from ledger.database import Database
from tests.ledger_books.conftest import NOW_MS, tampering


async def act(db: Database, by: By, name: str, *, fails: bool = False) -> None:
    async with db.begin() as c:
        await record(c, by, "test.act", "thing", name, team_id="acme", before={"a": 1}, after={"a": 2})
        await asyncio.sleep(random.random() / 100)
        if fails:
            raise RuntimeError("changed my mind")


async def test_an_act_is_recorded_with_who_why_before_and_after(db: Database) -> None:
    await act(db, By("ada", NOW_MS, "because"), "x")
    async with db.read() as c:
        [entry] = (await list_entries(c)).items
    assert (entry.seq, entry.actor, entry.reason, entry.action) == (1, "ada", "because", "test.act")
    assert (entry.before, entry.after) == ('{"a":1}', '{"a":2}')


async def test_concurrent_writers_leave_no_gap_and_a_reader_misses_nothing(db: Database, by: By) -> None:
    seen: list[int] = []
    done = asyncio.Event()

    async def follow() -> None:
        seq = 0
        while True:
            finished = done.is_set()
            async with db.read() as c:
                changes = await changes_since(c, seq, limit=3)
            seen.extend(change.seq for change in changes)
            seq = changes[-1].seq if changes else seq
            if finished and not changes:
                return
            await asyncio.sleep(0.002)

    reader = asyncio.create_task(follow())
    writers = [act(db, by, str(number), fails=number % 5 == 0) for number in range(30)]
    results = await asyncio.gather(*writers, return_exceptions=True)
    done.set()
    await reader
    assert sum(isinstance(result, RuntimeError) for result in results) == 6
    assert seen == list(range(1, 25))
    async with db.read() as c:
        assert await latest_seq(c) == 24
        assert await verify_chain(c) == (24, None)


async def test_whoever_holds_the_head_makes_others_wait_so_reads_before_writes_are_safe(db: Database, by: By) -> None:
    """Two read the same value under the lock and add one: both additions count."""

    async def add_one() -> None:
        async with db.begin() as c:
            await lock(c)
            value = (await c.execute(text("SELECT count(*) FROM counters"))).scalar_one()
            await asyncio.sleep(0.01)
            await c.execute(text(f"INSERT INTO counters (name, value) VALUES ('{value}', 0)"))
            await record(c, by, "test.add", "counter", str(value))

    await asyncio.gather(*(add_one() for _ in range(5)))
    async with db.read() as c:
        assert (await c.execute(text("SELECT count(*) FROM counters"))).scalar_one() == 5


async def test_the_database_refuses_to_change_or_delete_an_act(db: Database, by: By) -> None:
    await act(db, by, "x")
    for statement in ("UPDATE audit SET actor = 'eve'", "DELETE FROM audit"):
        with pytest.raises(DBAPIError, match="append-only"):
            async with db.begin() as c:
                await c.execute(text(statement))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("UPDATE audit SET actor = 'eve' WHERE seq = 2", "audit entry 2 was changed"),
        ("UPDATE audit SET hash = 'x' WHERE seq = 2", "audit entry 2 was changed"),
        ("DELETE FROM audit WHERE seq = 2", "audit entry 2 is missing"),
        ("DELETE FROM audit WHERE seq = 3", "ends at 2, its head says 3"),
        ("UPDATE audit SET previous_hash = 'x' WHERE seq = 3", "audit entry 3 does not follow"),
    ],
)
async def test_a_chain_that_was_tampered_with_names_the_first_wrong_entry(
    db: Database, by: By, damage: str, message: str
) -> None:
    for name in "abc":
        await act(db, by, name)
    async with tampering(db, "audit") as c:
        await c.execute(text(damage))
        _, wrong = await verify_chain(c)
    assert wrong is not None
    assert message in wrong


async def test_acts_are_listed_newest_first_by_team_and_subject(db: Database, by: By) -> None:
    for name in "abcd":
        await act(db, by, name)
    async with db.begin() as c:
        await record(c, by, "test.other", "other", "a")
        first = await list_entries(c, team_id="acme", limit=3)
        rest = await list_entries(c, team_id="acme", limit=3, cursor=first.next_cursor)
        assert [entry.subject_id for entry in first.items + rest.items] == list("dcba")
        assert [e.action for e in (await list_entries(c, subject_kind="other", subject_id="a")).items] == ["test.other"]
        assert msgspec.json.encode(first)
