from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ledger.database import Database
from tests.ledger_flow.material import House


@pytest.fixture
async def house(ledger_sqlite_url: str, tmp_path: Path) -> AsyncIterator[House]:
    """On SQLite: for tests of what happens in the worker and its journal."""
    async with furnished(ledger_sqlite_url, tmp_path / "journal") as house:
        yield house


@pytest.fixture
async def either(ledger_url: str, tmp_path: Path) -> AsyncIterator[House]:
    """Once on SQLite and once on PostgreSQL: for tests of what happens in SQL."""
    async with furnished(ledger_url, tmp_path / "journal") as house:
        yield house


@asynccontextmanager
async def furnished(url: str, journal_dir: Path) -> AsyncIterator[House]:
    house = House(await Database.open(url), journal_dir)
    await house.furnish()
    try:
        yield house
    finally:
        await house.close()
