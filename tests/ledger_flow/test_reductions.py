"""A limit that goes down holds at once for money that workers have leased already, on every worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from sqlalchemy import select

from ledger.audit import By
from ledger.errors import InsufficientQuota, LedgerUnavailable
from ledger.gate import Gate
from ledger.quotas import Scope, replace_quotas
from ledger.schema import accounts
from ledger.slices import Slice
from ledger.teams import TeamChange, update_team
from tests.ledger_flow.material import USD, House, now_ms, price, run, used
from tests.ledger_flow.test_holds import proven
from tests.ledger_flow.test_leases import refreshing

CALL = price(100, 200)
SCOPES = [
    pytest.param(lambda house: Scope.of_key(house.key_id), id="key"),
    pytest.param(lambda house: Scope.of_end_user(house.team_id, "ann"), id="end user"),
    pytest.param(lambda _: Scope.everyone(), id="everyone"),
]


async def busy(house: House) -> tuple[Gate, Gate]:
    """Two workers that have each leased much of the limits."""
    gates = await house.gate(0), await house.gate(1)
    for gate in gates:
        await run(gate, house.ask(end_user="ann"))
    return gates


async def admitted(house: House, *gates: Gate, at_most: int = 50) -> int:
    """How many more requests the workers let through, in turns, until all of them refuse."""
    background = asyncio.create_task(refreshing(*gates))
    open_gates, count = list(gates), 0
    while open_gates and count < at_most:
        gate = open_gates.pop(0)
        try:
            await run(gate, house.ask(end_user="ann"))
        except InsufficientQuota:
            continue
        count += 1
        open_gates.append(gate)
    background.cancel()
    await asyncio.gather(background, return_exceptions=True)
    return count


async def lower_and_raise(house: House, whose: Scope) -> None:
    await house.budget(whose, 1_000 * CALL, currency="USD")
    gates = await busy(house)
    await house.budget(whose, 5 * CALL, currency="USD")
    for gate in gates:
        await gate.refresh()
    assert await admitted(house, *gates) == 3
    account = await house.account("budget")
    assert account.debits_pico + account.leased_pico == account.target_pico == 5 * CALL
    await house.budget(whose, 9 * CALL, currency="USD")
    for gate in gates:
        await gate.refresh()
    assert await admitted(house, *gates) == 4
    await proven(house)


async def test_a_lowered_limit_holds_on_every_worker_once_it_has_looked(either: House) -> None:
    await lower_and_raise(either, Scope.of_team(either.team_id))


@pytest.mark.parametrize("scope", SCOPES)
async def test_so_does_one_of_another_scope(house: House, scope: Callable[[House], Scope]) -> None:
    await lower_and_raise(house, scope(house))


async def test_a_limit_below_what_was_spent_lets_nothing_more_through(house: House) -> None:
    await house.budget(Scope.of_team(house.team_id), 1_000 * CALL)
    gates = await busy(house)
    await house.budget(Scope.of_team(house.team_id), 1)
    for gate in gates:
        await gate.refresh()
    assert await admitted(house, *gates) == 0
    await proven(house)


async def test_a_lowered_credit_limit_holds_on_every_worker(house: House) -> None:
    async def limit(pico: int) -> None:
        async with house.db.begin() as c:
            change = TeamChange(credit_limit_pico=pico)
            await update_team(c, By("test", now_ms()), house.team_id, change)

    await house.furnish_another("on credit", "USD", CALL)
    await limit(1_000 * CALL)
    gates = await busy(house)
    await run(gates[0], house.ask())
    await limit(4 * CALL)
    for gate in gates:
        await gate.refresh()
    assert await admitted(house, *gates) == 2
    await limit(6 * CALL)
    for gate in gates:
        await gate.refresh()
    assert await admitted(house, *gates) == 2
    await proven(house)


def test_a_lease_that_was_lost_owes_nothing_less() -> None:
    slice = Slice("account", "budget", "USD", 0)
    slice.free, slice.spent = -100, 100  # the database forgot what was taken
    slice.owe(0)
    assert (slice.free, slice.owed) == (-100, 0)


async def test_running_requests_keep_what_they_hold_and_nobody_draws_on_what_they_give_back(house: House) -> None:
    await house.budget(Scope.of_team(house.team_id), 1_000 * CALL)
    gates = await busy(house)
    plain = await gates[0].hold(house.ask(output=10_000))
    stream = await gates[1].hold(house.ask(output=10_000, streamed=True))
    covered = stream.output_tokens
    await house.budget(Scope.of_team(house.team_id), 4 * CALL)
    for gate in gates:
        await gate.refresh()
    assert stream.covers(covered)
    assert not await stream.extend(covered), "a stream that goes on needs more, and there is none"
    await plain.settle(used(100, 300))
    for gate in gates:  # none has looked again
        with pytest.raises(InsufficientQuota):
            await gate.hold(house.ask())
    await stream.settle(used(100, 100))
    for gate in gates:
        await gate.refresh()
    assert await admitted(house, *gates) == 0
    billed = {row.generated_tokens: row.billed_tokens for row in await rows_of(house)}
    assert (billed[300], billed[100]) == (400, 200)
    await proven(house)


async def rows_of(house: House) -> list[object]:
    await house.post()
    return await house.rows()


async def test_what_is_owed_returns_once_the_requests_that_hold_it_have_ended(house: House) -> None:
    await house.budget(Scope.of_team(house.team_id), 1_000 * CALL)
    gate = await house.gate()
    hold = await gate.hold(house.ask(output=50_000))
    held = price(100, 50_000)
    await house.budget(Scope.of_team(house.team_id), 2 * CALL)
    await gate.refresh()
    assert (await house.account("budget")).leased_pico == held
    await hold.settle(used())
    await gate.refresh()
    assert (await house.account("budget")).leased_pico == 2 * CALL
    (slice,) = [slice for slice in gate.leases.slices.values() if slice.kind == "budget"]
    assert (slice.free, slice.owed, slice.held()) == (CALL, 0, 0)
    await proven(house)


async def test_a_limit_that_is_raised_again_gives_back_what_was_owed(house: House) -> None:
    await house.budget(Scope.of_team(house.team_id), 1_000 * CALL)
    gate = await house.gate()
    hold = await gate.hold(house.ask(output=50_000))
    await house.budget(Scope.of_team(house.team_id), CALL)
    await gate.refresh()
    (slice,) = [slice for slice in gate.leases.slices.values() if slice.kind == "budget"]
    assert slice.owed > 0 > slice.free
    await house.budget(Scope.of_team(house.team_id), 1_000 * CALL)
    await gate.refresh()
    assert (slice.owed, slice.free) == (0, 0)
    await run(gate, house.ask())
    await hold.settle(used())
    await proven(house)


async def test_while_sql_is_away_what_is_owed_is_not_spent_and_returns_afterwards(house: House) -> None:
    await house.budget(Scope.of_team(house.team_id), 1_000 * CALL)
    gate = await house.gate()
    await run(gate, house.ask())
    await house.budget(Scope.of_team(house.team_id), CALL)
    begin = house.db.begin

    def away() -> None:
        raise LedgerUnavailable("away")

    house.db.begin = away  # type: ignore[method-assign,assignment]
    await gate.refresh()
    house.db.begin = begin  # type: ignore[method-assign]
    with pytest.raises(LedgerUnavailable):
        await gate.hold(house.ask())
    gate.leases.down_since_ms = None
    await gate.refresh()
    assert (await house.account("budget")).leased_pico == CALL
    with pytest.raises(InsufficientQuota):
        await gate.hold(house.ask())
    await proven(house)


async def test_a_storm_of_lower_and_higher_limits_under_load_neither_loses_nor_doubles_a_pico(either: House) -> None:
    seed = random.Random(7)
    await either.budget(Scope.of_team(either.team_id), 100 * CALL)
    gates = await busy(either)
    background = asyncio.create_task(refreshing(*gates))
    over = asyncio.Event()

    async def client(gate: Gate) -> None:
        while not over.is_set():
            try:
                hold = await gate.hold(either.ask(output=seed.choice((50, 200, 2_000))))
            except InsufficientQuota:
                await asyncio.sleep(0.02)
                continue
            await asyncio.sleep(seed.choice((0, 0.01, 0.1)))
            await hold.settle(used(100, seed.randint(1, hold.output_tokens)))

    clients = [asyncio.create_task(client(gate)) for gate in gates for _ in range(4)]
    for number in range(15):
        limit = seed.choice((0, 10, 50, 400, 1_000)) * CALL
        await either.budget(Scope.of_team(either.team_id), limit)
        if number == 9:
            async with either.db.begin() as c:
                await replace_quotas(c, By("test", now_ms()), Scope.of_team(either.team_id), [])
        await asyncio.sleep(0.15)
    await either.budget(Scope.of_team(either.team_id), 0)
    over.set()
    await asyncio.gather(*clients)
    background.cancel()
    await asyncio.gather(background, return_exceptions=True)
    for gate in gates:
        await gate.refresh()
        assert all(slice.held() == 0 for slice in gate.leases.slices.values())
        assert all(slice.free <= 0 for slice in gate.leases.slices.values() if slice.kind == "budget")
    await proven(either)
    async with either.db.read() as c:
        for row in await c.execute(select(accounts)):
            assert row.debits_pico <= row.credits_pico <= 11 * USD
