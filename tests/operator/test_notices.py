"""What a gateway notices is told, also what it notices while it is writing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import select

from ledger.database import Database
from ledger.errors import InsufficientQuota
from ledger.schema import webhook_events
from policies.access import Principal
from policies.counters.memory import MemoryCounters
from policies.quotas import Limiter
from proxy.notices import Notices


@pytest.fixture
async def db(ledger_url: str) -> AsyncIterator[Database]:
    database = await Database.open(ledger_url)
    yield database
    await database.close()


async def told(db: Database) -> set[str]:
    async with db.read() as c:
        return {row.key.split(":")[2] for row in await c.execute(select(webhook_events))}


async def noticed_while_writing(db: Database) -> tuple[Notices, asyncio.Task[None]]:
    """The refusal of `first` is being written while that of `second` comes."""
    notices = Notices(Limiter(MemoryCounters()))
    spent = InsufficientQuota("the budget is used up", "budget")
    notices.refused(Principal("team", "first", "name", "USD", "UTC"), spent)
    writing = asyncio.create_task(notices.write(db))
    await asyncio.sleep(0)
    notices.refused(Principal("team", "second", "name", "USD", "UTC"), spent)
    return notices, writing


async def test_a_refusal_that_is_noticed_while_others_are_written_is_told_the_next_time(db: Database) -> None:
    notices, writing = await noticed_while_writing(db)
    assert not writing.done()
    await writing
    await notices.write(db)
    assert await told(db) == {"first", "second"}


async def test_what_could_not_be_written_is_told_the_next_time_with_what_came_meanwhile(db: Database) -> None:
    notices, writing = await noticed_while_writing(db)
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    await notices.write(db)
    assert await told(db) == {"first", "second"}
