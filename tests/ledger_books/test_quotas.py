from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import func, select, update

from ledger.accounts import Account, get_account
from ledger.audit import By
from ledger.budgets import ensure_budgets
from ledger.database import Database
from ledger.errors import Invalid, NotFound
from ledger.keys import KeyHasher, create_key
from ledger.periods import period_bounds, window_bounds
from ledger.quotas import Limit, Quota, Scope, applicable, list_quotas, quotas_of, replace_quotas
from ledger.schema import accounts
from ledger.spending import budget_id
from ledger.teams import create_team
from tests.ledger_books.conftest import NOW_MS

UNIT = 10**12
MONTHLY = Limit("spend", "month", 100 * UNIT)


@pytest.fixture
async def key_id(db: Database, by: By) -> str:
    async with db.begin() as c:
        await create_team(c, by, "Acme", billing_currency="CNY", team_id="acme")
        await create_team(c, by, "Bolt", team_id="bolt")
        return (await create_key(c, by, KeyHasher(b"0123456789abcdef"), "acme")).key.id


async def put(db: Database, by: By, scope: Scope, *limits: Limit) -> list[Quota]:
    async with db.begin() as c:
        return await replace_quotas(c, by, scope, limits)


async def budgets(db: Database, quotas: list[Quota], at_ms: int = NOW_MS) -> dict[str, Account]:
    async with db.begin() as c:
        return await ensure_budgets(c, quotas, at_ms, "Asia/Shanghai")


async def test_a_list_of_quotas_is_replaced_as_a_whole(db: Database, by: By, key_id: str) -> None:
    team = Scope.of_team("acme")
    await put(db, by, team, Limit("requests", "minute", 60), Limit("concurrency", None, 4), MONTHLY)
    left = await put(db, by, team, Limit("requests", "minute", 30), Limit("tokens", "day", 5, model="m", hard=False))
    assert {(q.metric, q.window, q.limit, q.model, q.hard, q.currency) for q in left} == {
        ("requests", "minute", 30, None, True, None),
        ("tokens", "day", 5, "m", False, None),
    }


async def test_a_request_is_limited_by_all_lists_that_concern_it_and_no_other(
    db: Database, by: By, key_id: str
) -> None:
    one = Limit("requests", "minute", 1)
    for scope in (Scope.everyone(), Scope.of_team("acme"), Scope.of_team("bolt"), Scope.of_key(key_id)):
        await put(db, by, scope, one)
    for user in ("u1", "u2"):
        await put(db, by, Scope.of_end_user("acme", user), one)
    async with db.read() as c:
        assert {q.scope for q in await applicable(c, "acme", key_id)} == {"global", "team", "key"}
        named = await applicable(c, "acme", key_id, "u1")
        assert {(q.scope, q.team_id, q.end_user) for q in named} == {
            ("global", None, None),
            ("team", "acme", None),
            ("key", "acme", None),
            ("end_user", "acme", "u1"),
        }
        assert len((await list_quotas(c, team_id="acme")).items) == 4
        assert len(await quotas_of(c, Scope.of_end_user("acme", "u2"))) == 1


async def test_a_spend_quota_takes_the_teams_currency_and_a_global_one_must_say(
    db: Database, by: By, key_id: str
) -> None:
    [quota] = await put(db, by, Scope.of_key(key_id), MONTHLY)
    assert quota.currency == "CNY"
    with pytest.raises(Invalid, match="USD or CNY"):
        await put(db, by, Scope.everyone(), MONTHLY)
    [quota] = await put(db, by, Scope.everyone(), Limit("spend", "month", 1, currency="USD", timezone="UTC"))
    assert (quota.currency, quota.timezone) == ("USD", "UTC")


@pytest.mark.parametrize(
    ("limit", "field"),
    [
        (Limit("requests", None, 1), "window"),
        (Limit("concurrency", "minute", 1), "window"),
        (Limit("requests", "week", 1), "window"),  # type: ignore[arg-type]
        (Limit("smiles", "minute", 1), "metric"),  # type: ignore[arg-type]
        (Limit("requests", "minute", -1), "limit"),
        (Limit("tokens", "minute", 2**63), "limit"),
        (Limit("tokens", "minute", 1, currency="USD"), "currency"),
        (Limit("spend", "minute", 1, currency="EUR"), "currency"),  # type: ignore[arg-type]
    ],
)
async def test_a_quota_that_makes_no_sense_is_refused(
    db: Database, by: By, key_id: str, limit: Limit, field: str
) -> None:
    with pytest.raises(Invalid) as refused:
        await put(db, by, Scope.of_team("acme"), limit)
    assert refused.value.field == field


async def test_the_same_thing_limited_twice_and_unknown_subjects_are_refused(db: Database, by: By, key_id: str) -> None:
    with pytest.raises(Invalid, match="twice"):
        await put(db, by, Scope.of_team("acme"), MONTHLY, Limit("spend", "month", 7))
    for scope in (Scope.of_team("no"), Scope.of_key("no"), Scope.of_end_user("no", "u")):
        with pytest.raises(NotFound):
            await put(db, by, scope, MONTHLY)


async def test_budgets_are_made_when_first_needed_one_for_each_period_in_the_teams_zone(
    db: Database, by: By, key_id: str
) -> None:
    quotas = await put(db, by, Scope.of_team("acme"), MONTHLY, Limit("spend", "day", UNIT), Limit("spend", "total", 9))
    start, end = period_bounds("2026-11", "Asia/Shanghai")
    first = await budgets(db, quotas, end - 1)
    second = await budgets(db, quotas, end)
    by_window = {q.window: q.id for q in quotas}
    month = by_window["month"] or ""
    assert first[month].period_start_ms == start
    assert second[month].period_start_ms == end
    assert first[by_window["day"]].period_start_ms == window_bounds("day", end - 1, "Asia/Shanghai")[0]
    assert first[by_window["total"]] == second[by_window["total"]]
    assert first[month].id == budget_id(month, start)
    assert (first[month].currency, first[month].free_pico, first[month].team_id) == ("CNY", 100 * UNIT, "acme")


async def test_a_global_budget_is_one_account_for_teams_of_all_zones(db: Database, by: By, key_id: str) -> None:
    quotas = await put(db, by, Scope.everyone(), Limit("spend", "day", UNIT, currency="USD"))
    async with db.begin() as c:
        one = await ensure_budgets(c, quotas, NOW_MS, "America/New_York")
        two = await ensure_budgets(c, quotas, NOW_MS, "Asia/Shanghai")
    assert one == two
    assert one[quotas[0].id].team_id is None


async def test_soft_spend_and_other_metrics_have_no_account(db: Database, by: By, key_id: str) -> None:
    quotas = await put(db, by, Scope.of_team("acme"), Limit("spend", "month", 1, hard=False), Limit("tokens", "day", 1))
    assert await budgets(db, quotas) == {}


async def test_many_workers_that_need_a_budget_at_once_make_one(db: Database, by: By, key_id: str) -> None:
    quotas = await put(db, by, Scope.of_team("acme"), MONTHLY)
    made = await asyncio.gather(*(budgets(db, quotas) for _ in range(8)))
    assert all(one == made[0] for one in made)
    async with db.read() as c:
        count = select(func.count()).select_from(accounts).where(accounts.c.kind == "budget")
        assert (await c.execute(count)).scalar_one() == 1


async def test_a_lower_limit_moves_the_target_at_once_and_never_below_what_is_spent(
    db: Database, by: By, key_id: str
) -> None:
    [quota] = await put(db, by, Scope.of_team("acme"), MONTHLY)
    account = (await budgets(db, [quota]))[quota.id]
    async with db.begin() as c:
        spent = update(accounts).where(accounts.c.id == account.id)
        await c.execute(spent.values(debits_pico=30 * UNIT, leased_pico=20 * UNIT))
    [lower] = await put(db, by, Scope.of_team("acme"), Limit("spend", "month", 40 * UNIT))
    assert lower.id == quota.id
    async with db.read() as c:
        account = await get_account(c, account.id)
    assert (account.target_pico, account.credits_pico, account.free_pico) == (40 * UNIT, 50 * UNIT, 0)
    await put(db, by, Scope.of_team("acme"), Limit("spend", "month", 60 * UNIT))
    async with db.read() as c:
        assert (await get_account(c, account.id)).free_pico == 10 * UNIT


async def test_a_quota_removed_and_set_again_goes_on_where_it_stood(db: Database, by: By, key_id: str) -> None:
    [quota] = await put(db, by, Scope.of_team("acme"), MONTHLY)
    account = (await budgets(db, [quota]))[quota.id]
    async with db.begin() as c:
        await c.execute(update(accounts).where(accounts.c.id == account.id).values(debits_pico=30 * UNIT))
    await put(db, by, Scope.of_team("acme"))
    [again] = await put(db, by, Scope.of_team("acme"), Limit("spend", "month", 31 * UNIT))
    assert (await budgets(db, [again]))[again.id].free_pico == UNIT


async def test_a_worker_with_an_old_limit_makes_the_budget_with_the_new_one(db: Database, by: By, key_id: str) -> None:
    stale = await put(db, by, Scope.of_team("acme"), MONTHLY)
    await put(db, by, Scope.of_team("acme"), Limit("spend", "month", UNIT))
    assert (await budgets(db, stale))[stale[0].id].target_pico == UNIT
    next_month = NOW_MS + 32 * 86_400_000
    await put(db, by, Scope.of_team("acme"))
    assert await budgets(db, stale, next_month) == {}


async def test_a_limit_set_while_workers_make_the_budget_always_wins(db: Database, by: By, key_id: str) -> None:
    for round_ in range(10):
        scope = Scope.of_end_user("acme", f"user {round_}")
        quotas = await put(db, by, scope, MONTHLY)
        lower = put(db, by, scope, Limit("spend", "month", UNIT))
        await asyncio.gather(budgets(db, quotas), lower, budgets(db, quotas))
        assert (await budgets(db, quotas))[quotas[0].id].target_pico == UNIT
