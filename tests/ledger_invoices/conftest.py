from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ledger.database import Database
from ledger.periods import period_bounds
from tests.ledger_flow.material import House
from tests.ledger_invoices.material import LAST_MONTH, ZONE


@pytest.fixture
async def house(ledger_url: str, tmp_path: Path) -> AsyncIterator[House]:
    house = House(await Database.open(ledger_url), tmp_path / "journal")
    await house.furnish(at_ms=period_bounds(LAST_MONTH, ZONE)[0])  # prices and money are there from then on
    yield house
    await house.close()
