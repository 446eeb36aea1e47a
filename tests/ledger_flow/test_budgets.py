"""A spend limit that is set in the middle of its period counts what was spent in it before."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import event, text, update

from ledger.audit import By
from ledger.errors import InsufficientQuota
from ledger.noticing import Noticing
from ledger.quotas import WINDOWS, Limit, Scope, replace_quotas
from ledger.schema import accounts, rollups
from tests.ledger_flow.conftest import furnished
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


async def test_what_was_spent_is_found_by_an_index_however_long_the_history(house: House) -> None:
    """Each quota's sum, when it is set and whenever webhooks are looked for, reads the rows of its period."""
    statements: list[tuple[str, Any]] = []

    def note(_1: Any, _2: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.lstrip().upper().startswith("SELECT"):
            statements.append((statement, parameters))

    event.listen(house.db.engine.sync_engine, "before_cursor_execute", note)
    scopes = [Scope.of_team(house.team_id), Scope.of_key(house.key_id), Scope.of_end_user(house.team_id, "ann")]
    for scope in [*scopes, Scope.everyone()]:
        currency: Any = "USD" if scope.kind == "global" else None
        limits = [Limit("spend", window, CALL, hard=False, currency=currency) for window in WINDOWS]
        for hard in (True, False):
            async with house.db.begin() as c:
                by = By("test", now_ms())
                limits = [msgspec.structs.replace(limit, hard=hard) for limit in limits]
                await replace_quotas(c, by, scope, limits)
            await Noticing(house.db).look(now_ms())
    event.remove(house.db.engine.sync_engine, "before_cursor_execute", note)
    assert any("FROM usage" in statement for statement, _ in statements)
    assert any("FROM rollups" in statement for statement, _ in statements)
    async with house.db.engine.connect() as c:
        for statement, parameters in statements:
            plan = (await c.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)).all()
            scanned = [row.detail for row in plan if re.match("SCAN (usage|rollups|accounts)", row.detail)]
            assert not scanned, (scanned, statement)
            if "FROM usage" in statement:
                assert re.search(r"\(request_id>\?|\(team_id=\? AND period>\?", plan[0].detail), (plan, statement)


async def test_a_batch_that_is_posted_while_a_limit_is_set_again_counts_once(
    ledger_postgres_url: str, tmp_path: Path
) -> None:
    """Its charge to the budget and its cost come together, whichever of the two transactions waits for the other."""
    async with furnished(ledger_postgres_url, tmp_path / "journal") as house:
        team = Scope.of_team(house.team_id)
        await house.budget(team, 100 * CALL)
        await spend(house, 2)
        async with house.db.begin() as c:
            await replace_quotas(c, By("test", now_ms()), team, [])
        await spend(house, 4)

        async def batch() -> None:
            async with house.db.begin() as c:
                charged = update(accounts).where(accounts.c.kind == "budget")
                await c.execute(charged.values(debits_pico=accounts.c.debits_pico + 3 * CALL))
                await c.execute(update(rollups).values(cost_usd_pico=rollups.c.cost_usd_pico + 3 * CALL))

        async with house.db.begin() as c:  # both are kept from what was spent, the limit first
            await c.execute(text("LOCK TABLE rollups IN ACCESS EXCLUSIVE MODE"))
            again = asyncio.create_task(house.budget(team, 100 * CALL))
            await asyncio.sleep(0.3)
            posted = asyncio.create_task(batch())
            await asyncio.sleep(0.3)
        await asyncio.gather(again, posted)
        account = await house.account("budget")
        assert (account.debits_pico, account.spent_before_pico) == (5 * CALL, 4 * CALL)
