from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import select

from ledger.audit import By
from ledger.errors import InsufficientQuota, LedgerError, PriceNotFound
from ledger.quotas import Scope
from ledger.schema import transfers
from ledger.topups import grant
from ledger.verify import verify
from tests.ledger_flow.material import INPUT, OUTPUT, USD, House, now_ms, price, request_id, run, used


async def proven(house: House) -> None:
    for gate in house.gates:
        await gate.close(patience_s=1)
    await house.post()
    report = await verify(house.db, house.journal_dir)
    assert report.first_difference is None
    assert report.unposted == 0
    assert await house.leased() == 0


async def test_a_stream_holds_a_window_and_extends_it_while_it_flows(house: House) -> None:
    gate = await house.gate()
    hold = await gate.hold(house.ask(prompt=10, output=5_000, streamed=True))
    assert hold.output_tokens == 1_024
    generated = 0
    while generated < 5_000:
        generated += 1
        if not hold.covers(generated):
            assert await hold.extend(generated - 1)
        hold.progress(10, generated)
    assert hold.output_tokens == 5_000
    assert not await hold.extend(5_000)
    await hold.settle(used(10, 5_000))
    await proven(house)
    assert (await house.account()).debits_pico == price(10, 5_000)


async def test_a_small_balance_buys_a_small_answer_and_the_stream_is_cut_there(house: House) -> None:
    balance = 10 * INPUT + 3_000 * OUTPUT
    gate = await house.gate()
    await run(gate, house.ask(prompt=0, output=0), used(0, 0))
    prepaid = (await house.account()).credits_pico
    rest = prepaid - balance
    hold = await gate.hold(house.ask(prompt=0, output=rest // OUTPUT))
    await hold.settle(used(0, rest // OUTPUT))
    stream = await gate.hold(house.ask(prompt=10, output=1_000_000, streamed=True))
    generated = 0
    while stream.covers(generated + 1) or await stream.extend(generated):
        generated += 1
    assert 3_000 <= generated <= 3_001
    await stream.settle(used(10, generated))
    with pytest.raises(InsufficientQuota) as refused:
        await gate.hold(house.ask())
    assert refused.value.account_kind == "prepaid"
    await proven(house)


async def test_a_plain_request_gets_fewer_tokens_when_money_is_short_and_a_refusal_when_there_is_none(
    house: House,
) -> None:
    await house.budget(Scope.of_key(house.key_id), price(100, 50))
    gate = await house.gate()
    hold = await gate.hold(house.ask(prompt=100, output=200))
    assert hold.output_tokens == 50
    with pytest.raises(InsufficientQuota) as refused:
        await gate.hold(house.ask(prompt=100, output=200))
    assert refused.value.account_kind == "budget"
    await hold.settle(used(100, 20))
    hold = await gate.hold(house.ask(prompt=0, output=200))
    assert hold.output_tokens == 30
    await hold.settle(used(0, 30))
    await proven(house)
    budget = await house.account("budget")
    assert budget.debits_pico == budget.credits_pico == price(100, 50)


async def test_every_budget_that_applies_counts_the_cost_once_in_its_own_currency(house: House) -> None:
    await house.budget(Scope.of_team(house.team_id), 5 * USD, "day", currency="CNY")
    await house.budget(Scope.of_key(house.key_id), 5 * USD, "total")
    await house.budget(Scope.everyone(), 9 * USD, "month", currency="USD")
    gate = await house.gate()
    await run(gate, house.ask(prompt=100, output=100))
    await house.post()
    async with house.db.read() as c:
        moved = (await c.execute(select(transfers).where(transfers.c.kind == "budget"))).all()
    amounts = sorted((row.currency, int(row.amount_pico)) for row in moved)
    cost = price(100, 100)
    assert amounts == [("CNY", cost * 73 // 10), ("USD", cost), ("USD", cost)]
    await proven(house)


async def test_grants_pay_first_and_a_charge_is_split_where_one_ends(house: House) -> None:
    first, second = price(0, 30), price(0, 50)
    async with house.db.begin() as c:
        for amount, days, name in ((second, 20, "later"), (first, 10, "sooner")):
            await grant(
                c,
                By("test", now_ms()),
                house.team_id,
                amount,
                currency="USD",
                reference=name,
                expires_at_ms=now_ms() + days * 86_400_000,
            )
    gate = await house.gate()
    await run(gate, house.ask(prompt=0, output=100))
    await house.post()
    assert (await house.account()).debits_pico == price(0, 20)
    await run(gate, house.ask(prompt=0, output=100))
    await house.post()
    assert (await house.account()).debits_pico == price(0, 120)
    await proven(house)


async def test_more_used_than_held_takes_what_is_there_and_waives_the_rest_in_whole_tokens(house: House) -> None:
    await house.budget(Scope.of_key(house.key_id), price(100, 120) + OUTPUT // 2)
    gate = await house.gate()
    hold = await gate.hold(house.ask(prompt=100, output=100))
    receipt = await hold.settle(used(100, 150))
    assert receipt.billed_tokens == 220
    assert receipt.waiver_reason == "overrun"
    assert receipt.cost_usd_pico == price(100, 120)
    await proven(house)
    (row,) = await house.rows()
    assert (row.generated_tokens, row.billed_tokens, row.loss_pico) == (150, 220, price(0, 30))
    async with house.db.read() as c:
        loss = (await c.execute(select(transfers).where(transfers.c.kind == "loss"))).one()
    assert (int(loss.amount_pico), loss.destination) == (price(0, 30), "loss:overrun")


async def test_more_used_than_held_is_billed_in_full_when_the_account_can_give_it(house: House) -> None:
    gate = await house.gate()
    hold = await gate.hold(house.ask(prompt=100, output=100))
    receipt = await hold.settle(used(150, 150))
    assert (receipt.billed_tokens, receipt.waiver_reason) == (300, None)
    await proven(house)


async def test_a_waived_request_bills_nothing_and_books_the_loss(house: House) -> None:
    gate = await house.gate()
    hold = await gate.hold(house.ask())
    receipt = await hold.settle(used(100, 30, status="failed", waive="upstream_error"))
    assert (receipt.billed_tokens, receipt.waiver_reason, receipt.cost_usd_pico) == (0, "upstream_error", 0)
    await proven(house)
    (row,) = await house.rows()
    assert row.loss_pico == price(100, 30)


async def test_provider_cost_is_booked_beside_the_price(house: House) -> None:
    gate = await house.gate()
    hold = await gate.hold(house.ask())
    await hold.settle(used(100, 100, provider_cost_usd_pico=12_345, attempts=3))
    await proven(house)
    async with house.db.read() as c:
        paid = (await c.execute(select(transfers).where(transfers.c.kind == "provider_cost"))).one()
    assert (paid.source, paid.destination, int(paid.amount_pico)) == ("cost:deepseek-v3.2", "provider:backend", 12_345)
    assert (await house.rows())[0].attempts == 3


async def test_a_cny_team_is_charged_in_cny(house: House) -> None:
    await house.furnish_another("cny", "CNY", 100 * USD)
    gate = await house.gate()
    await run(gate, house.ask(prompt=100, output=100))
    await proven(house)
    (row,) = await house.rows()
    account = await house.account_of(house.team_id)
    assert account.debits_pico == row.cost_cny_pico == price(100, 100) * 73 // 10


async def test_a_model_without_a_price_is_refused_before_it_costs_anything(house: House) -> None:
    gate = await house.gate()
    with pytest.raises(PriceNotFound):
        await gate.hold(house.ask(model="unknown"))
    await proven(house)


async def test_a_voided_hold_cannot_be_settled(house: House) -> None:
    gate = await house.gate()
    hold = await gate.hold(house.ask())
    await hold.void("upstream refused")
    with pytest.raises(LedgerError):
        await hold.settle(used())


async def test_a_topup_is_seen_at_the_next_refresh(house: House) -> None:
    gate = await house.gate()
    prepaid = (await house.account()).credits_pico
    await run(gate, house.ask(prompt=0, output=prepaid // OUTPUT))
    with pytest.raises(InsufficientQuota):
        await gate.hold(house.ask())
    await house.top_up(USD)
    await gate.refresh()
    await run(gate, house.ask())
    await proven(house)


async def test_a_lower_budget_is_obeyed_at_once_for_what_is_still_free(house: House) -> None:
    await house.budget(Scope.of_key(house.key_id), USD)
    gate = await house.gate()
    await run(gate, house.ask())
    await house.budget(Scope.of_key(house.key_id), price(100, 200))
    await gate.refresh()
    for slice in gate.leases.slices.values():
        await gate.leases.give_back(slice)
    with pytest.raises(InsufficientQuota):
        await gate.hold(house.ask())
    await proven(house)


async def test_a_budget_set_while_a_plan_is_made_is_not_forgotten(house: House) -> None:
    """The plan was read before the budget was there, and is ready only after the gate has heard of the budget."""
    gate = await house.gate()
    real, overtaken = house.db.read, False

    @asynccontextmanager
    async def slow() -> AsyncIterator[Any]:
        nonlocal overtaken
        async with real() as c:
            yield c
            if not overtaken:
                overtaken = True
                await house.budget(Scope.of_key(house.key_id), 10 * OUTPUT)
                await gate.refresh()

    house.db.read = slow  # type: ignore[method-assign]
    first = await gate.hold(house.ask(prompt=0, output=1))
    house.db.read = real  # type: ignore[method-assign]
    assert overtaken
    await first.void("done")
    with pytest.raises(InsufficientQuota):
        await gate.hold(house.ask(prompt=1_000, output=1))
    await proven(house)


async def test_an_end_users_budget_counts_that_user_alone(house: House) -> None:
    await house.budget(Scope.of_end_user(house.team_id, "ann"), price(100, 200))
    gate = await house.gate()
    await run(gate, house.ask(end_user="ann"))
    with pytest.raises(InsufficientQuota):
        await gate.hold(house.ask(end_user="ann"))
    await run(gate, house.ask(end_user="bob"))
    await run(gate, house.ask())
    await proven(house)


async def test_many_requests_at_once_never_hold_more_than_there_is(house: House) -> None:
    await house.budget(Scope.of_key(house.key_id), 10 * price(100, 200))
    gate = await house.gate()

    async def one() -> int:
        try:
            hold = await gate.hold(house.ask())
        except InsufficientQuota:
            return 0
        await asyncio.sleep(0.01)
        await hold.settle(used(100, hold.output_tokens))
        return hold.output_tokens

    answers = await asyncio.gather(*(one() for _ in range(40)))
    assert sum(answers) * OUTPUT + sum(100 * INPUT for answer in answers if answer) <= 10 * price(100, 200)
    assert sum(1 for answer in answers if answer == 200) >= 9
    await proven(house)


async def test_a_cancelled_settlement_is_settled_all_the_same(house: House) -> None:
    gate = await house.gate()
    hold = await gate.hold(house.ask())
    task = asyncio.create_task(hold.settle(used(100, 50)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    receipt = await hold.settle(used(100, 200))
    assert receipt.billed_tokens == 150
    await proven(house)


async def test_more_used_than_held_is_billed_also_when_the_worker_is_stopped_while_it_asks_for_more(
    house: House,
) -> None:
    gate = await house.gate()
    await house.budget(Scope.of_key(house.key_id), price(100, 200) + price(0, 300))
    await gate.refresh()
    hold = await gate.hold(house.ask())
    fill, filled = gate.fill, asyncio.Event()

    async def slow(*arguments: Any) -> None:
        await fill(*arguments)
        filled.set()
        await asyncio.sleep(60)

    gate.fill = slow  # type: ignore[method-assign]
    task = asyncio.create_task(hold.settle(used(100, 450)))
    await filled.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await hold.void("no answer")  # as whoever gives up says
    await proven(house)
    (row,) = await house.rows()
    assert row.cost_usd_pico == price(100, 450)


async def test_absurd_subsets_never_reach_the_ledger(house: House) -> None:
    gate = await house.gate()
    hold = await gate.hold(house.ask())
    wrong = {"cached_tokens": 900, "cache_write_tokens": -5, "reasoning_tokens": 1_000, "accepted_tokens": 7}
    await hold.settle(used(100, 50, tokens={**wrong, "raw": b'{"prompt_tokens": -1}', "estimated": True}))
    await house.post()
    (row,) = await house.rows()
    assert (row.cached_tokens, row.cache_write_tokens, row.reasoning_tokens, row.accepted_tokens) == (100, 0, 50, 0)
    await proven(house)


async def test_a_request_keeps_the_month_of_its_admission(house: House) -> None:
    gate = await house.gate()
    at_ms = now_ms()
    hold = await gate.hold(house.ask(at_ms=at_ms, request_id=request_id(at_ms)))
    await hold.settle(used())
    await proven(house)
    (row,) = await house.rows()
    assert row.created_ms == at_ms
