"""Short ways to spend in a month that is over, and to look at what became of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ledger import invoices
from ledger.audit import By
from ledger.gate import Ask
from ledger.month_figures import draft_statement
from ledger.periods import period_bounds, period_of, previous_period
from ledger.receipts import receipt_of
from ledger.statements import Statement
from ledger.verify import verify
from tests.ledger_flow.material import House, now_ms

ZONE = "Asia/Shanghai"
THIS_MONTH = period_of(now_ms(), ZONE)
LAST_MONTH = previous_period(THIS_MONTH)
CHECK_RECEIPT = Path(__file__).parents[2] / "scripts" / "check_receipt.py"


def in_month(house: House, period: str = LAST_MONTH, **options: Any) -> Ask:
    """A request that is admitted in the middle of a month."""
    return house.ask(at_ms=period_bounds(period, house.timezone)[0] + 14 * 86_400_000, **options)


async def draft(house: House, period: str = THIS_MONTH) -> Statement:
    async with house.db.read() as c:
        return await draft_statement(c, house.team_id, period)


def foots(month: Statement) -> bool:
    moved = month.topups_pico + sum(movement.amount_pico for movement in month.movements)
    return (
        month.carry_in_pico + month.exact_pico == month.billed_pico + month.carry_out_pico
        and month.exact_pico == month.consumption_pico - month.promo_pico
        and sum(line.billed_pico for line in month.lines) == month.billed_pico
        and month.net_pico + month.tax_pico == month.billed_pico
        and month.opening_pico + moved - month.consumption_pico == month.closing_pico
        and 0 <= month.due_pico <= month.billed_pico
    )


async def finalized(house: House, period: str = LAST_MONTH) -> invoices.Invoice:
    """Of a month that is closed, as an operator makes it."""
    by = By("finance", max(now_ms(), period_bounds(period, house.timezone)[1]))
    async with house.db.snapshot() as c:
        read = await invoices.read_closed(c, house.team_id, period)
    async with house.db.begin() as c:
        return await invoices.finalize(c, house.team_id, period, by, read)


async def included(house: House, request_id: str, invoice: invoices.Invoice) -> bool:
    """Whether the stand-alone script finds the request's receipt under the invoice's root."""
    async with house.db.read() as c:
        receipt = await receipt_of(c, request_id)
    fields = ("request_id", "record", "index", "size", "path", "root")
    answer = json.dumps({"receipt": {name: getattr(receipt, name) for name in fields}})
    return _checked(answer, str(invoice.merkle_root))


def _checked(answer: str, root: str) -> bool:
    command = [sys.executable, str(CHECK_RECEIPT), "--root", root]
    return subprocess.run(command, input=answer, capture_output=True, text=True).returncode == 0


async def proven(house: House, month: str | None = None) -> None:
    report = await verify(house.db, house.journal_dir, month)
    assert report.first_difference is None
