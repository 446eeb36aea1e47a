"""Many calls that are each worth less than a cent, from the gate to the finalized invoices of two months.

`CALLS=200000` makes it the long one.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from ledger.money import PICO_PER_CENT
from ledger.periods import period_bounds
from ledger.verify import verify
from tests.ledger_flow.material import USD, House, price, used
from tests.ledger_invoices.material import LAST_MONTH, THIS_MONTH, ZONE
from tests.ledger_invoices.test_invoices import finalize

CALLS = int(os.environ.get("CALLS", "4000"))
AT_ONCE = 256


@pytest.mark.soak
@pytest.mark.timeout(120 + CALLS / 100)
async def test_small_calls_are_billed_to_the_pico_before_rounding_and_fractions_are_carried(house: House) -> None:
    await house.top_up(1_000 * USD)
    spent = {month: await _spend(house, month, CALLS // 2) for month in (LAST_MONTH, THIS_MONTH)}
    await house.post()
    invoices = [await finalize(house, month) for month in (LAST_MONTH, THIS_MONTH)]
    exact = [sum(spent[month]) for month in (LAST_MONTH, THIS_MONTH)]
    assert [invoice.exact_usd_pico for invoice in invoices] == exact
    assert [10 * invoice.exact_cny_pico for invoice in invoices] == [73 * pico for pico in exact]
    carried = 0
    for invoice in invoices:
        assert invoice.carry_in_pico == carried
        assert invoice.carry_in_pico + invoice.exact_usd_pico == invoice.billed_pico + invoice.carry_out_pico
        assert invoice.billed_pico % PICO_PER_CENT == 0
        assert 0 <= invoice.carry_out_pico < PICO_PER_CENT
        carried = invoice.carry_out_pico
    billed = sum(invoice.billed_pico for invoice in invoices)
    assert billed <= sum(exact) < billed + PICO_PER_CENT
    assert max(max(costs) for costs in spent.values()) < PICO_PER_CENT / 2  # each alone would round to nothing
    report = await verify(house.db, house.journal_dir)
    assert (report.first_difference, report.unposted) == (None, 0)
    print(f"{house.db.dialect}: {CALLS} calls, {sum(exact)} pico, billed {billed / USD} USD, carried {carried} pico")


async def _spend(house: House, month: str, calls: int) -> list[int]:
    """What each call cost: 1 to 3 600 tokens, all over the month."""
    start_ms, end_ms = period_bounds(month, ZONE)
    gate = house.gates[0] if house.gates else await house.gate()
    chance, left, costs = random.Random(month), calls, []

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            prompt, generated = chance.randint(1, 1_800), chance.randint(0, 1_800)
            at_ms = chance.randrange(max(start_ms, end_ms - 5 * 86_400_000), end_ms)
            hold = await gate.hold(house.ask(prompt=prompt, output=generated, at_ms=at_ms))
            await hold.settle(used(prompt, generated))
            costs.append(price(prompt, generated))

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return costs
