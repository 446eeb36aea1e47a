"""A spend limit that is set in the middle of its period counts what was spent in it before."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ledger.audit import By
from ledger.errors import InsufficientQuota
from ledger.quotas import Scope, replace_quotas
from tests.ledger_flow.material import MODEL, House, now_ms, price, run, used
from tests.ledger_flow.test_holds import proven

CALL = price(100, 200)


async def spend(house: House, calls: int, **options: str) -> None:
    gate = house.gates[0] if house.gates else await house.gate()
    await gate.refresh()
    for _ in range(calls):
        await run(gate, house.ask(**options), used())
    await house.post()


@pytest.mark.parametrize(
    ("scope", "options"),
    [
        (lambda house: Scope.of_team(house.team_id), {"window": "month"}),
        (lambda house: Scope.of_key(house.key_id), {"window": "day", "model": MODEL}),
        (lambda house: Scope.of_end_user(house.team_id, "ann"), {"window": "total"}),
        (lambda _: Scope.everyone(), {"window": "hour", "currency": "USD"}),
    ],
    ids=["team", "key", "end user", "everyone"],
)
async def test_a_limit_set_in_the_middle_of_a_period_leaves_what_is_left_of_it(
    either: House, scope: Callable[[House], Scope], options: dict[str, str]
) -> None:
    await spend(either, 3, end_user="ann")
    await either.budget(scope(either), 5 * CALL, **options)
    await spend(either, 2, end_user="ann")
    with pytest.raises(InsufficientQuota):
        await either.gates[0].hold(either.ask(prompt=2_000, output=1, end_user="ann"))
    assert int((await either.account("budget")).debits_pico) == 2 * CALL
    await either.budget(scope(either), 6 * CALL, **options)
    await spend(either, 1, end_user="ann")
    await proven(either)


async def test_a_limit_below_what_was_spent_leaves_nothing(house: House) -> None:
    await spend(house, 3)
    await house.budget(Scope.of_team(house.team_id), 2 * CALL)
    with pytest.raises(InsufficientQuota):
        await spend(house, 1)
    await proven(house)


async def test_what_was_spent_while_a_limit_was_away_counts_when_it_is_set_again(house: House) -> None:
    team = Scope.of_team(house.team_id)
    await house.budget(team, 2 * CALL)
    await spend(house, 2)
    async with house.db.begin() as c:
        await replace_quotas(c, By("test", now_ms()), team, [])
    await spend(house, 3)
    await house.budget(team, 6 * CALL)
    account = await house.account("budget")
    assert (account.debits_pico, account.spent_before_pico, account.target_pico) == (2 * CALL, 3 * CALL, 3 * CALL)
    await spend(house, 1)
    with pytest.raises(InsufficientQuota):
        await house.gates[0].hold(house.ask(prompt=2_000, output=1))
    await proven(house)
