"""A database that an earlier release made and filled goes on with this one, and keeps every figure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.accounts import balance, get_account
from ledger.audit import By, latest_seq, verify_chain
from ledger.database import Database
from ledger.invoices import mark
from ledger.keys import find_by_hash
from ledger.migrations import REVISIONS, migrate_database, require_current
from ledger.money import FxRate
from ledger.movements import not_invoiced
from ledger.prices import PriceBook, items_of, latest_version
from ledger.publishing import publish_fx
from ledger.quotas import applicable
from ledger.teams import get_team
from ledger.topups import top_up
from tests.ledger_books.conftest import NOW_MS

FILLING = [
    "INSERT INTO teams (id, name, billing_currency, timezone, created_ms) VALUES ('acme', 'Acme', 'CNY', 'UTC', 1)",
    "INSERT INTO keys (id, team_id, name, prefix, state, created_ms) VALUES ('k', 'acme', 'ci', 'sk-tg-', 'active', 1)",
    "INSERT INTO key_secrets (secret_hash, key_id) VALUES ('h', 'k')",
    "INSERT INTO accounts (id, kind, team_id, currency, target_pico, credits_pico, debits_pico, leased_pico,"
    " created_ms) VALUES ('prepaid:acme', 'prepaid', 'acme', 'CNY', 900, 900, 100, 50, 1),"
    " ('credit:acme', 'credit_line', 'acme', 'CNY', 0, 0, 0, 0, 1)",
    "INSERT INTO quotas (id, scope, team_id, metric, \"window\", limit_value) VALUES ('q', 'team', 'acme', 'requests',"
    " 'minute', 5)",
    "INSERT INTO fx_rates (id, base, quote, numerator, denominator, effective_from_ms, published_ms)"
    " VALUES ('fx_1', 'USD', 'CNY', 73, 10, 1, 1)",
    "INSERT INTO price_versions (id, effective_from_ms, published_ms, fx_rate_id, approved_by, hash)"
    " VALUES ('pv_1', 1, 1, 'fx_1', 'ada', 'x')",
    *(
        "INSERT INTO price_items (version_id, scope, model, meter, usd_pico, cny_pico, fx_exact)"
        f" VALUES ('pv_1', 'default', 'm', '{meter}', 10, 73, 1)"
        for meter in ("input_uncached", "cache_read", "cache_write", "output_text", "output_reasoning")
    ),
]


@pytest.fixture(params=["sqlite", "postgresql"])
async def old(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """A populated database at the first revision."""
    url = f"sqlite:///{tmp_path / 'old.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    db = await Database.open(url)
    await migrate_database(db, REVISIONS[:1])
    async with db.begin() as c:
        for statement in FILLING:
            await c.execute(text(statement))
        record = "x'00'" if db.dialect == "sqlite" else "'\\x00'"
        await c.execute(text(usage_row("0190a0b0-0000-7000-8000-000000000000", record)))
    yield db
    await db.close()


NUMBERS = (
    "created_ms, settled_ms, prompt_tokens, cached_tokens, cache_write_tokens, generated_tokens, reasoning_tokens, "
    "billed_tokens, draft_tokens, accepted_tokens, target_passes, estimated, attempts, cost_usd_pico, cost_cny_pico, "
    "provider_cost_usd_pico, loss_pico, latency_ms, epoch, seq"
)
TEXTS = "period, team_id, key_id, model, deployment, status, price_version, charges, slot_id, batch_id"


def usage_row(request_id: str, record: str) -> str:
    zeros, texts = ", ".join("0" for _ in NUMBERS.split(",")), ", ".join("'x'" for _ in TEXTS.split(","))
    return (
        f"INSERT INTO usage (request_id, {NUMBERS}, {TEXTS}, record) "
        f"VALUES ('{request_id}', {zeros}, {texts}, {record})"
    )


async def everything(db: Database) -> dict[str, list[dict[str, Any]]]:
    tables = "teams keys key_secrets accounts quotas fx_rates price_versions price_items usage audit chain_heads"
    async with db.read() as c:
        return {
            table: [dict(row) for row in (await c.execute(text(f"SELECT * FROM {table} ORDER BY 1, 2"))).mappings()]
            for table in tables.split()
        }


async def test_an_upgrade_keeps_every_row_and_every_value(old: Database) -> None:
    before = await everything(old)
    await migrate_database(old)
    await require_current(old)
    after = await everything(old)
    for table, rows in before.items():
        kept = [{name: row[name] for name in rows[0]} for row in after[table]] if rows else after[table]
        assert kept == rows, table


async def test_the_books_go_on_after_an_upgrade(old: Database) -> None:
    await migrate_database(old)
    by = By("ada", NOW_MS)
    async with old.begin() as c:
        await top_up(c, by, "acme", 100, currency="CNY", reference="after")
        assert (await balance(c, "acme", NOW_MS)).available_pico == 900
        assert (await get_team(c, "acme")).plan is None
        assert (await find_by_hash(c, "h")) is not None
        assert [quota.limit for quota in await applicable(c, "acme", "k")] == [5]
        assert (await PriceBook.load(c, NOW_MS)).pin("m", NOW_MS, "acme").cny.output_text == 73
        version = await publish_fx(c, by, FxRate("USD", "CNY", Fraction(8)))
        assert {item.cny_pico for item in await items_of(c, version.id)} == {80}
        assert await latest_version(c) == version
        assert await verify_chain(c) == (await latest_seq(c), None)


CENT = 10**10


async def test_what_was_drawn_on_credit_before_the_upgrade_is_asked_for_by_the_invoices_there_are(
    old: Database,
) -> None:
    """10.5, 1.5, 3 and 2.7 cents in four months: the first is paid, the second void, the third open, the last new."""
    months = {"2026-01": 105, "2026-02": 15, "2026-03": 30, "2026-04": 27}
    async with old.begin() as c:
        await c.execute(
            text(
                "UPDATE accounts SET target_pico = :c, credits_pico = :c, debits_pico = :d WHERE kind = 'credit_line'"
            ),
            {"c": 100 * CENT, "d": sum(months.values()) * CENT // 10},
        )
        for month, tenths in months.items():
            row = {"id": month, "amount": tenths * CENT // 10}
            await c.execute(
                text(
                    "INSERT INTO transfers (id, batch_id, at_ms, kind, source, destination, amount_pico, currency, "
                    "team_id, period) "
                    "VALUES (:id, 'b', 1, 'usage', 'credit:acme', 'revenue:m', :amount, 'CNY', 'acme', :id)"
                ),
                row,
            )
        for month, state in (("2026-01", "paid"), ("2026-02", "void"), ("2026-03", "finalized")):
            row = {"id": month, "state": state, "billed": 50 * CENT}
            await c.execute(
                text(
                    "INSERT INTO invoices (id, team_id, period, kind, state, currency, carry_in_pico, exact_pico,"
                    " billed_pico, carry_out_pico, exact_usd_pico, exact_cny_pico, created_ms) VALUES"
                    " (:id, 'acme', :id, 'invoice', :state, 'CNY', 0, :billed, :billed, 0, 0, :billed, 1)"
                ),
                row,
            )
    await migrate_database(old)
    async with old.begin() as c:
        query = text("SELECT due_pico FROM invoices ORDER BY id")
        assert [int(due) for due in (await c.execute(query)).scalars()] == [10 * CENT, 0, 3 * CENT]
        assert await not_invoiced(c, "acme", "2026-04") == sum(months.values()) * CENT // 10 - 13 * CENT
        drawn = sum(months.values()) * CENT // 10
        assert await free_on_credit(c) == 100 * CENT - drawn
        for _ in range(2):  # what was paid then refilled nothing; asked for again, it does, once
            assert (await mark(c, "2026-01", "paid", By("ada", NOW_MS))).due_pico == 10 * CENT
            assert await free_on_credit(c) == 110 * CENT - drawn


async def free_on_credit(c: AsyncConnection) -> int:
    return (await get_account(c, "credit:acme")).free_pico
