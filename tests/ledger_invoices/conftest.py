from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ledger.database import Database
from ledger.periods import period_bounds
from tests.ledger_flow.material import House
from tests.ledger_invoices.material import LAST_MONTH, ZONE


@pytest.fixture
async def house(ledger_url: str, tmp_path: Path) -> AsyncIterator[House]:
    """Once on SQLite and once on PostgreSQL."""
    async with furnished(ledger_url, tmp_path) as house:
        yield house


@pytest.fixture
async def sqlite_house(ledger_sqlite_url: str, tmp_path: Path) -> AsyncIterator[House]:
    """For what happens in the worker, or is the same arithmetic in both."""
    async with furnished(ledger_sqlite_url, tmp_path) as house:
        yield house


@asynccontextmanager
async def furnished(url: str, folder: Path) -> AsyncIterator[House]:
    house = House(await Database.open(url), folder / "journal")
    await house.furnish(at_ms=period_bounds(LAST_MONTH, ZONE)[0])  # prices and money are there from then on
    yield house
    await house.close()
