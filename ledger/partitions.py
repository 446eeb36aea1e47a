"""Monthly partitions of `usage` on PostgreSQL, by ranges of the UUIDv7 request id: its first 48 bits are milliseconds.

Unique and pruned by time at once. A DEFAULT partition catches what no month covers (a clock that is years off).
"""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.periods import next_period, period_bounds, period_of

MONTHS_AHEAD = 2


def uuid7_floor(at_ms: int) -> str:
    """The smallest UUID of that millisecond: every UUIDv7 made then or later is above it."""
    digits = f"{at_ms:012x}"
    return f"{digits[:8]}-{digits[8:]}-0000-0000-000000000000"


async def ensure_partitions(c: AsyncConnection, now_ms: int, months_ahead: int = MONTHS_AHEAD) -> list[str]:
    """Makes the partitions of this month (UTC) and the next ones that are missing; returns the names of the new ones.

    Rows of such a month that already lie in the DEFAULT partition are moved, not lost. Does nothing on SQLite. Call it
    in a write transaction of its own, at start and once a day.
    """
    if c.dialect.name != "postgresql":
        return []
    made = []
    month = period_of(now_ms, "UTC")
    for _ in range(months_ahead + 1):
        name = f"usage_{month.replace('-', '_')}"
        if not await _exists(c, name):
            await c.execute(text("SELECT pg_advisory_xact_lock(hashtext('tallygate.partitions'))"))
            if not await _exists(c, name):
                await _make(c, name, *period_bounds(month, "UTC"))
                made.append(name)
        month = next_period(month)
    return made


async def _exists(c: AsyncConnection, name: str) -> bool:
    """From the catalogue itself: `to_regclass` may answer from before another transaction's commit."""
    query = (
        "SELECT EXISTS (SELECT FROM pg_class WHERE relname = :name AND relnamespace = current_schema()::regnamespace)"
    )
    return (await c.execute(text(query), {"name": name})).scalar_one() is True


async def _make(c: AsyncConnection, name: str, start_ms: int, end_ms: int) -> None:
    """Fill a table of its own first and attach it then: the partitions in use are locked as briefly as can be."""
    low, high = uuid7_floor(start_ms), uuid7_floor(end_ms)
    within = f"request_id >= '{low}' AND request_id < '{high}'"
    await c.execute(text(f"CREATE TABLE {name} (LIKE usage INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"))
    moved = f"WITH moved AS (DELETE FROM usage_default WHERE {within} RETURNING *)"
    await c.execute(text(f"{moved} INSERT INTO {name} SELECT * FROM moved"))
    await c.execute(text(f"ALTER TABLE usage ATTACH PARTITION {name} FOR VALUES FROM ('{low}') TO ('{high}')"))
