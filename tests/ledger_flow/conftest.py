from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ledger.database import Database
from tests.ledger_flow.material import House


@pytest.fixture
async def house(ledger_url: str, tmp_path: Path) -> AsyncIterator[House]:
    house = House(await Database.open(ledger_url), tmp_path / "journal")
    await house.furnish()
    yield house
    await house.close()
