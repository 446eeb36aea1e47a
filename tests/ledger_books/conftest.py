from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ledger.audit import By
from ledger.database import Database

NOW_MS = 1_796_000_000_000  # 2026-11-30 in UTC


@pytest.fixture
async def db(ledger_url: str) -> AsyncIterator[Database]:
    database = await Database.open(ledger_url)
    yield database
    await database.close()


@pytest.fixture
def by() -> By:
    return By("ada", NOW_MS)
