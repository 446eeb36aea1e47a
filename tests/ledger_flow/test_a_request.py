from __future__ import annotations

from sqlalchemy import select

from ledger.schema import rollups, transfers
from ledger.verify import verify
from tests.ledger_flow.material import MODEL, House, price, run, used


async def test_what_is_used_is_billed_to_the_pico_and_the_rest_of_the_hold_is_free_again(either: House) -> None:
    gate = await either.gate()
    hold = await gate.hold(either.ask(prompt=1_000, output=500))
    assert hold.output_tokens == 500
    receipt = await hold.settle(used(900, 300))
    assert receipt.cost_usd_pico == price(900, 300)
    assert receipt.cost_cny_pico * 10 == receipt.cost_usd_pico * 73
    assert receipt.billed_tokens == 1_200
    await either.post()
    (row,) = await either.rows()
    assert (row.prompt_tokens, row.generated_tokens, row.billed_tokens) == (900, 300, 1_200)
    assert row.cost_usd_pico == price(900, 300)
    account = await either.account()
    assert account.debits_pico == price(900, 300)
    await gate.close()
    await either.post()
    assert await either.leased() == 0


async def test_a_second_settlement_returns_the_first_receipt(either: House) -> None:
    gate = await either.gate()
    hold = await gate.hold(either.ask())
    first = await hold.settle(used(100, 20))
    assert await hold.settle(used(100, 200)) == first
    await hold.void("too late")
    await either.post()
    assert (await either.account()).debits_pico == price(100, 20)


async def test_a_void_request_costs_nothing(either: House) -> None:
    gate = await either.gate()
    hold = await gate.hold(either.ask())
    await hold.void("upstream refused")
    await gate.close()
    await either.post()
    assert await either.rows() == []
    account = await either.account()
    assert (account.debits_pico, account.leased_pico) == (0, 0)


async def test_rows_transfers_and_rollups_say_the_same(either: House) -> None:
    gate = await either.gate()
    for n in range(20):
        await run(gate, either.ask(prompt=100 + n, output=10), used(100 + n, 10))
    await either.post()
    total = sum(price(100 + n, 10) for n in range(20))
    async with either.db.read() as c:
        moved = (await c.execute(select(transfers).where(transfers.c.kind == "usage"))).all()
        summed = (await c.execute(select(rollups))).all()
    assert sum(int(row.amount_pico) for row in moved) == total
    assert {row.destination for row in moved} == {f"revenue:{MODEL}"}
    assert sum(int(row.cost_usd_pico) for row in summed) == total
    assert sum(row.requests for row in summed) == 20


async def test_the_proof_holds_beside_a_live_gate_and_counts_what_is_not_posted(either: House) -> None:
    gate = await either.gate()
    for _ in range(5):
        await run(gate, either.ask())
    await either.post()
    for _ in range(3):
        await run(gate, either.ask())
    report = await verify(either.db, either.journal_dir)
    assert report.first_difference is None
    assert report.unposted == 3
    await gate.close()
    await either.post()
    report = await verify(either.db, either.journal_dir)
    assert (report.ok, report.unposted) == (True, 0)
    assert next(check for check in report.checks if check.name == "usage").counted == 8
