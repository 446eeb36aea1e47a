from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError

from ledger.accounts import balance, credit_line_id, funding, get_account, list_accounts, prepaid_id
from ledger.audit import By
from ledger.database import Database
from ledger.errors import Conflict, Invalid, NotFound
from ledger.money import MAX_SQL_PICO, parse_amount
from ledger.schema import accounts, topups, transfers
from ledger.teams import Team, TeamChange, create_team, find_team, get_team, list_teams, update_team
from ledger.topups import TopUp, expire_grants, grant, list_topups, refund, top_up
from tests.ledger_books.conftest import NOW_MS

TEN = parse_amount("10")
DAY_MS = 86_400_000


@pytest.fixture
async def team(db: Database, by: By) -> Team:
    async with db.begin() as c:
        return await create_team(c, by, "Acme", billing_currency="CNY", team_id="acme")


async def pay(db: Database, by: By, reference: str, amount_pico: int = TEN) -> TopUp:
    async with db.begin() as c:
        return await top_up(c, by, "acme", amount_pico, currency="CNY", reference=reference)


async def spend(db: Database, account_id: str, debits_pico: int, leased_pico: int) -> None:
    async with db.begin() as c:
        row = update(accounts).where(accounts.c.id == account_id)
        await c.execute(row.values(debits_pico=debits_pico, leased_pico=leased_pico))


async def test_a_team_starts_with_an_empty_prepaid_account_and_its_credit_line(db: Database, by: By) -> None:
    async with db.begin() as c:
        team = await create_team(c, by, "Bolt", credit_limit_pico=TEN)
        found = await funding(c, team.id, NOW_MS)
    assert [(a.kind, a.currency, a.free_pico) for a in found] == [("prepaid", "USD", 0), ("credit_line", "USD", TEN)]
    assert (team.billing_currency, team.timezone, team.created_ms) == ("USD", "Asia/Shanghai", NOW_MS)


async def test_creating_the_same_team_again_gives_the_same_and_another_one_conflicts(
    db: Database, team: Team, by: By
) -> None:
    async with db.begin() as c:
        again = await create_team(c, By("bob", NOW_MS + 5), "Acme", billing_currency="CNY", team_id="acme")
        with pytest.raises(Conflict, match="acme"):
            await create_team(c, by, "Acme", billing_currency="USD", team_id="acme")
    assert again == team


async def test_a_topup_is_on_the_balance_and_booked_twice(db: Database, team: Team, by: By) -> None:
    payment = await pay(db, by, "bank-1")
    async with db.read() as c:
        assert (await balance(c, "acme", NOW_MS)).available_pico == TEN
        [transfer] = (await c.execute(select(transfers))).all()
    assert (transfer.source, transfer.destination) == ("clearing:manual", prepaid_id("acme"))
    assert (transfer.amount_pico, transfer.currency, transfer.period) == (TEN, "CNY", "2026-11")
    assert transfer.id == payment.id


async def test_the_same_reference_twice_is_credited_once_and_another_payment_under_it_conflicts(
    db: Database, team: Team, by: By
) -> None:
    first = await pay(db, by, "bank-1")
    assert await pay(db, By("bob", NOW_MS + 1), "bank-1") == first
    with pytest.raises(Conflict, match="bank-1"):
        await pay(db, by, "bank-1", 2 * TEN)
    async with db.read() as c:
        assert (await balance(c, "acme", NOW_MS)).prepaid_pico == TEN


async def test_the_same_reference_sent_by_ten_clients_at_once_is_credited_once(
    db: Database, team: Team, by: By
) -> None:
    results = await asyncio.gather(*(pay(db, by, "bank-1") for _ in range(10)))
    assert len({result.id for result in results}) == 1
    async with db.read() as c:
        assert (await balance(c, "acme", NOW_MS)).prepaid_pico == TEN
        assert (await c.execute(select(func.count()).select_from(topups))).scalar_one() == 1


async def test_references_of_different_providers_do_not_meet(db: Database, team: Team, by: By) -> None:
    async with db.begin() as c:
        for provider in ("manual", "wechat", "alipay"):
            await top_up(c, by, "acme", TEN, currency="CNY", reference="1", provider=provider)  # type: ignore[arg-type]
        assert (await balance(c, "acme", NOW_MS)).prepaid_pico == 3 * TEN


@pytest.mark.parametrize(
    ("amount", "currency", "reference", "field"),
    [(0, "CNY", "r", "amount"), (-1, "CNY", "r", "amount"), (1, "USD", "r", "currency"), (1, "CNY", " ", "reference")],
)
async def test_a_topup_that_makes_no_sense_is_refused(
    db: Database, team: Team, by: By, amount: int, currency: str, reference: str, field: str
) -> None:
    with pytest.raises(Invalid) as refused:
        async with db.begin() as c:
            await top_up(c, by, "acme", amount, currency=currency, reference=reference)  # type: ignore[arg-type]
    assert refused.value.field == field


async def test_a_topup_of_an_unknown_team_is_not_found(db: Database, by: By) -> None:
    with pytest.raises(NotFound, match="acme"):
        await pay(db, by, "r")


async def test_a_balance_beyond_64_bits_is_refused_on_sqlite_and_kept_on_postgresql(
    db: Database, team: Team, by: By
) -> None:
    await pay(db, by, "bank-1", MAX_SQL_PICO)
    if db.dialect == "sqlite":
        with pytest.raises(Invalid, match=r"9223372.036854775808 CNY is more than one account can hold here"):
            await pay(db, by, "bank-2", 1)
        expected = MAX_SQL_PICO
    else:
        await pay(db, by, "bank-2", 10 * MAX_SQL_PICO)
        expected = 11 * MAX_SQL_PICO
    async with db.read() as c:
        assert (await balance(c, "acme", NOW_MS)).available_pico == expected


async def test_the_database_itself_refuses_an_overspent_account(db: Database, team: Team, by: By) -> None:
    await pay(db, by, "bank-1")
    for debits, leased in ((TEN, 1), (-1, 0), (0, -1)):
        with pytest.raises(IntegrityError):
            await spend(db, prepaid_id("acme"), debits, leased)


async def test_a_lower_credit_limit_stops_new_takes_and_keeps_what_is_spent_or_held(
    db: Database, team: Team, by: By
) -> None:
    async def limit(pico: int) -> None:
        async with db.begin() as c:
            await update_team(c, by, "acme", TeamChange(credit_limit_pico=pico))

    await limit(10 * TEN)
    await spend(db, credit_line_id("acme"), 4 * TEN, 2 * TEN)
    await limit(5 * TEN)
    async with db.read() as c:
        line = await get_account(c, credit_line_id("acme"))
        assert (line.target_pico, line.credits_pico, line.free_pico) == (5 * TEN, 6 * TEN, 0)
        assert (await balance(c, "acme", NOW_MS)).credit_limit_pico == 5 * TEN
    await limit(8 * TEN)
    async with db.read() as c:
        line = await get_account(c, credit_line_id("acme"))
        assert (line.target_pico, line.credits_pico, line.free_pico) == (8 * TEN, 8 * TEN, 2 * TEN)
        assert (await get_team(c, "acme")).credit_limit_pico == 8 * TEN


async def test_grants_are_drawn_first_by_expiry_then_prepaid_then_credit(db: Database, team: Team, by: By) -> None:
    await pay(db, by, "bank-1")
    async with db.begin() as c:
        late = await grant(c, by, "acme", TEN, currency="CNY", reference="b", expires_at_ms=NOW_MS + 2 * DAY_MS)
        soon = await grant(c, by, "acme", TEN, currency="CNY", reference="a", expires_at_ms=NOW_MS + DAY_MS)
        order = [account.id for account in await funding(c, "acme", NOW_MS)]
        assert order == [soon, late, prepaid_id("acme"), credit_line_id("acme")]
        assert soon not in [account.id for account in await funding(c, "acme", NOW_MS + DAY_MS)]
        assert (await balance(c, "acme", NOW_MS)).granted_pico == 2 * TEN


async def test_a_grant_is_given_once(db: Database, team: Team, by: By) -> None:
    async def give(amount_pico: int) -> str:
        async with db.begin() as c:
            return await grant(
                c, by, "acme", amount_pico, currency="CNY", reference="welcome", expires_at_ms=NOW_MS + DAY_MS
            )

    assert await give(TEN) == await give(TEN)
    with pytest.raises(Conflict):
        await give(2 * TEN)
    async with db.read() as c:
        assert (await balance(c, "acme", NOW_MS)).granted_pico == TEN


async def test_what_is_left_of_an_expired_grant_becomes_breakage_except_what_is_held(
    db: Database, team: Team, by: By
) -> None:
    async with db.begin() as c:
        account_id = await grant(c, by, "acme", TEN, currency="CNY", reference="a", expires_at_ms=NOW_MS + DAY_MS)
    await spend(db, account_id, TEN // 2, TEN // 5)
    after = By("clock", NOW_MS + DAY_MS)
    async with db.begin() as c:
        assert await expire_grants(c, after) == 1
        assert await expire_grants(c, after) == 0
        [expiry] = (await c.execute(select(transfers).where(transfers.c.kind == "expiry"))).all()
        assert (expiry.source, expiry.destination, expiry.amount_pico) == (account_id, "breakage", 3 * TEN // 10)
    await spend(db, account_id, TEN - TEN // 5, 0)
    async with db.begin() as c:
        assert await expire_grants(c, after) == 1
        assert (await get_account(c, account_id)).free_pico == 0


async def test_the_time_zone_of_a_team_stays_once_something_is_charged(db: Database, team: Team, by: By) -> None:
    async def move(timezone: str) -> Team:
        async with db.begin() as c:
            return await update_team(c, by, "acme", TeamChange(timezone=timezone))

    assert (await move("Europe/Berlin")).timezone == "Europe/Berlin"
    await pay(db, by, "bank-1")
    await spend(db, prepaid_id("acme"), 1, 0)
    with pytest.raises(Conflict, match="time zone"):
        await move("UTC")


@pytest.mark.parametrize(
    "change",
    [
        TeamChange(name=" "),
        TeamChange(timezone="Mars/Olympus"),
        TeamChange(credit_limit_pico=-1),
        TeamChange(tax_rate_bp=10_001),
    ],
)
async def test_a_bad_change_of_a_team_is_refused(db: Database, team: Team, by: By, change: TeamChange) -> None:
    with pytest.raises(Invalid):
        async with db.begin() as c:
            await update_team(c, by, "acme", change)


async def test_a_team_is_found_by_id_or_by_a_name_that_is_its_own(db: Database, team: Team, by: By) -> None:
    async with db.begin() as c:
        assert await find_team(c, "acme") == await find_team(c, "Acme") == team
        await create_team(c, by, "Acme")
        with pytest.raises(Conflict, match="give the id"):
            await find_team(c, "Acme")
        with pytest.raises(NotFound):
            await find_team(c, "nobody")


async def test_pages_neither_skip_nor_repeat_while_rows_are_added(db: Database, by: By) -> None:
    async with db.begin() as c:
        for number in range(7):
            await create_team(c, by, f"t{number}", team_id=f"t{number}")
            await top_up(c, by, f"t{number}", TEN, currency="USD", reference=f"r{number}")
    seen: list[str] = []
    cursor, rounds = None, 0
    while True:
        async with db.begin() as c:
            found = await list_teams(c, cursor=cursor, limit=3)
            await create_team(c, By("ada", NOW_MS + 1 + rounds), "more", team_id=f"u{rounds}")
        seen += [team.id for team in found.items]
        cursor, rounds = found.next_cursor, rounds + 1
        if cursor is None or rounds > 5:
            break
    assert seen[:7] == [f"t{number}" for number in range(7)]
    assert len(set(seen)) == len(seen)
    async with db.read() as c:
        newest = await list_topups(c, limit=4)
        rest = await list_topups(c, limit=4, cursor=newest.next_cursor)
        assert _references(newest.items) | _references(rest.items) == {f"r{number}" for number in range(7)}
        assert len((await list_accounts(c, "t1")).items) == 2
        for bad in ("x", "W10", "bm9uc2Vuc2U"):
            with pytest.raises(Invalid, match="cursor"):
                await list_teams(c, cursor=bad)
        with pytest.raises(Invalid, match="1 to 1000"):
            await list_teams(c, limit=0)


def _references(items: Sequence[TopUp]) -> set[str]:
    return {item.reference for item in items}


async def test_a_limit_moved_beside_running_takes_never_lets_more_be_taken_than_the_highest_limit(
    db: Database, team: Team, by: By
) -> None:
    """Takes are what leases do: one conditional UPDATE. Limits go up and down meanwhile."""
    line = accounts.c.id == credit_line_id("acme")
    free = accounts.c.target_pico - accounts.c.debits_pico - accounts.c.leased_pico
    taken = 0

    async def take() -> None:
        nonlocal taken
        for _ in range(6):
            async with db.begin() as c:
                more = update(accounts).where(line, free >= 7).values(leased_pico=accounts.c.leased_pico + 7)
                count = (await c.execute(more)).rowcount
            taken += 7 * count

    async def move() -> None:
        for limit in (100, 20, 150, 0, 90):
            async with db.begin() as c:
                await update_team(c, by, "acme", TeamChange(credit_limit_pico=limit))

    await asyncio.gather(move(), *(take() for _ in range(6)))
    async with db.read() as c:
        account = await get_account(c, credit_line_id("acme"))
    assert account.leased_pico == taken <= 150
    assert (account.target_pico, account.credits_pico) == (90, max(90, taken))


async def test_a_refund_pays_back_only_what_is_neither_spent_nor_held_and_once(
    db: Database, team: Team, by: By
) -> None:
    async def pay_back(amount_pico: int, reference: str) -> str:
        async with db.begin() as c:
            return await refund(c, by, "acme", amount_pico, currency="CNY", reference=reference)

    await pay(db, by, "bank-1")
    await spend(db, prepaid_id("acme"), TEN // 5, TEN // 5)
    with pytest.raises(Conflict, match="only 6 CNY"):
        await pay_back(TEN, "back-1")
    assert await pay_back(TEN // 2, "back-1") == await pay_back(TEN // 2, "back-1")
    with pytest.raises(Conflict, match="another refund"):
        await pay_back(TEN // 10, "back-1")
    async with db.read() as c:
        now = await balance(c, "acme", NOW_MS)
        assert (now.available_pico, now.held_pico) == (TEN // 10 * 3, TEN // 5)
        [moved] = (await c.execute(select(transfers).where(transfers.c.kind == "refund"))).all()
    assert (moved.source, moved.destination, moved.amount_pico) == (prepaid_id("acme"), "clearing:manual", TEN // 2)
