"""The poster brings each record into SQL exactly once, whatever happens around it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert, select, text

from ledger.audit import By
from ledger.database import Database
from ledger.errors import Conflict
from ledger.journal import JournalReader, list_epochs
from ledger.periods import period_of
from ledger.records import Charge, FailedAttempt, Settle, Usage
from ledger.schema import accounts, batches, leases, rollups, suspense, transfers, usage
from ledger.suspense import list_suspended, retry, write_off
from ledger.verify import verify
from tests.ledger_flow.conftest import furnished
from tests.ledger_flow.material import MODEL, House, now_ms, price, request_id, run, used
from tests.ledger_flow.test_holds import proven


async def balances(db: Database) -> dict[str, Any]:
    """Everything that must not depend on how the journal was cut into batches."""
    async with db.read() as c:
        rows = list(await c.execute(select(accounts).order_by(accounts.c.id)))
        held = list(await c.execute(select(leases).order_by(leases.c.epoch, leases.c.account_id)))
        summed = list(await c.execute(select(rollups).order_by(*rollups.primary_key)))
        columns = [column for column in usage.c if column.name != "batch_id"]
        requests = list(await c.execute(select(*columns).order_by(usage.c.request_id)))
        moved: dict[Any, int] = {}
        for row in await c.execute(select(transfers)):
            key = (row.kind, row.source, row.destination, row.currency, row.team_id, row.period)
            moved[key] = moved.get(key, 0) + int(row.amount_pico)
    return {"accounts": rows, "leases": held, "rollups": summed, "usage": requests, "transfers": moved}


async def unpost(house: House) -> None:
    """Put SQL back to before anything was posted, as a restored backup would be."""
    async with house.db.begin() as c:
        for row in list(await c.execute(select(leases))):
            back = {"posted": int(row.posted_pico), "account": row.account_id}
            await c.execute(
                text(
                    "UPDATE accounts SET debits_pico = debits_pico - :posted, leased_pico = leased_pico + :posted "
                    "WHERE id = :account"
                ),
                back,
            )
        await c.execute(text("UPDATE leases SET posted_pico = 0"))
        await c.execute(text("DELETE FROM transfers WHERE batch_id IS NOT NULL"))
        for table in ("usage", "rollups", "batches"):
            await c.execute(text(f"DELETE FROM {table}"))
        await c.execute(text("UPDATE epochs SET cursor_seq = 0, chain_hash = ''"))


async def test_posted_twice_and_in_other_batches_the_balances_are_the_same(either: House) -> None:
    gate = await either.gate()
    for n in range(25):
        hold = await gate.hold(either.ask(prompt=n, streamed=n % 2 == 0))
        hold.progress(n, 10)
        if n % 7 == 0:
            await hold.void("refused")
        else:
            await hold.settle(used(n, 50 + n))
    await gate.journal.flush()
    await either.post()
    await either.post()
    first = await balances(either.db)
    for frames in (1, 33):
        await unpost(either)
        poster = either.poster(batch_frames=frames)
        await poster.drain()
        poster.close()
        assert await balances(either.db) == first
    await proven(either)


async def test_posters_side_by_side_post_each_record_once(either: House) -> None:
    gate = await either.gate()
    for _ in range(100):
        await run(gate, either.ask())
    posters = [either.poster(batch_frames=9) for _ in range(3)]

    async def drain(poster: Any) -> None:
        for _ in range(60):
            await poster.post_once(whole=True)

    await asyncio.gather(*(drain(poster) for poster in posters))
    for poster in posters:
        await poster.drain()
        poster.close()
    assert len(await either.rows()) == 100
    await proven(either)


async def test_a_usage_row_is_visible_within_a_fraction_of_a_second(house: House) -> None:
    gate = await house.gate()
    stop = asyncio.Event()
    posting = asyncio.create_task(house.poster().run(stop))
    took_ms = []
    for posted in range(5):  # one of which a busy machine may hold up
        before = now_ms()
        await run(gate, house.ask())
        async with asyncio.timeout(60):
            while len(await house.rows()) <= posted:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        took_ms.append(now_ms() - before)
    assert min(took_ms) < 1_000
    stop.set()
    await posting
    await proven(house)


async def test_no_row_of_a_new_ledger_is_moved_to_another_partition_under_who_reads(
    ledger_postgres_url: str, tmp_path: Path
) -> None:
    async with furnished(ledger_postgres_url, tmp_path / "journal") as house:
        await run(await house.gate(), house.ask())
        poster, stop, places = house.poster(), asyncio.Event(), []

        async def look_where_it_lies() -> None:
            async with house.db.read() as c:
                places.extend((await c.execute(text("SELECT tableoid::regclass::text FROM usage"))).scalars())
            if places:
                stop.set()

        poster._keep_house = look_where_it_lies  # type: ignore[method-assign]
        await poster.run(stop)
        assert places == [f"usage_{period_of(now_ms(), 'UTC').replace('-', '_')}"]


def settle(house: House, **changes: Any) -> Settle:
    fields: dict[str, Any] = {
        "request_id": request_id(),
        "admitted_ms": now_ms(),
        "settled_ms": now_ms(),
        "period": "2026-11",
        "team_id": house.team_id,
        "key_id": house.key_id,
        "end_user": None,
        "model": MODEL,
        "deployment": "backend",
        "draft_model": None,
        "status": "completed",
        "usage": Usage(prompt_tokens=1, generated_tokens=1, billed_tokens=2),
        "price_version": "none",
        "cost_usd_pico": 0,
        "cost_cny_pico": 0,
        "provider_cost_usd_pico": 0,
        "charges": [],
        "loss_pico": 0,
    }
    return Settle(**{**fields, **changes})


@pytest.mark.parametrize(
    "poison",
    [
        {"usage": Usage(prompt_tokens=1, generated_tokens=1, billed_tokens=3)},
        {"charges": [Charge("nobody", 5)]},
        {"cost_usd_pico": 2**63},
        {"request_id": "no uuid", "cost_usd_pico": -1},
        {"model": "\x00"},
    ],
    ids=["constraint", "account", "too large", "malformed", "text"],
)
async def test_a_record_that_sql_refuses_goes_to_suspense_and_posting_goes_on(either: House, poison: Any) -> None:
    gate = await either.gate()
    for _ in range(10):
        await run(gate, either.ask())
    await gate.journal.append_durable(settle(either, **poison))
    for _ in range(10):
        await run(gate, either.ask())
    await either.post()
    async with either.db.read() as c:
        aside = list(await c.execute(select(suspense)))
    posted = await either.rows()
    if either.db.dialect == "sqlite" and poison == {"model": "\x00"}:
        assert len(posted) == 21  # SQLite keeps such a text
        return
    assert len(aside) == 1
    assert len(posted) == 20
    report = await verify(either.db, either.journal_dir)
    assert [check.name for check in report.checks if not check.ok] == ["suspense"]
    assert report.first_difference is not None


async def test_the_amount_of_a_suspended_record_stays_locked_when_its_epoch_closes(either: House) -> None:
    gate = await either.gate()
    hold = await gate.hold(either.ask())
    prepaid = (await either.account()).id
    amount = price(100, 200)
    bad = settle(either, charges=[Charge(prepaid, amount)], usage=Usage(billed_tokens=3))
    await gate.journal.append_durable(bad)
    hold._plan.funding[0].spent += amount  # what the gate would have booked for it
    hold._plan.funding[0].free -= amount
    await hold.void("test")
    await gate.close()
    await either.post()
    assert await either.leased() == amount


async def test_a_suspended_record_is_tried_again_or_written_off(either: House) -> None:
    gate = await either.gate()
    held = await gate.hold(either.ask())
    version, period = held.price.version_id, held.month.period
    slice, amount = held._plan.funding[0], price(1, 1)
    cny = amount * 73 // 10
    for account_id in ("later", "never"):
        charges = [Charge(slice.account_id, amount - 1), Charge(account_id, 1)]
        costs = {"cost_usd_pico": amount, "cost_cny_pico": cny}
        record = settle(either, charges=charges, price_version=version, period=period, **costs)
        await gate.journal.append_durable(record)
        slice.spent += amount - 1  # what the gate would have booked
        slice.free -= amount - 1
    await held.void("test")
    await gate.close()
    await either.post()
    assert await either.leased() == 2 * (amount - 1)
    by = By("ops", now_ms(), "the account was missing")
    async with either.db.read() as c:
        later, never = await list_suspended(c)
    with pytest.raises(Conflict):
        async with either.db.begin() as c:
            await retry(c, by, later.slot_id, later.epoch, later.seq)
    async with either.db.begin() as c:
        await c.execute(text("UPDATE accounts SET id = 'later' WHERE kind = 'credit_line'"))
        one = "credits_pico = 1, leased_pico = 1"
        await c.execute(text(f"UPDATE accounts SET {one} WHERE id = 'later'"))
        lease = {"slot_id": later.slot_id, "epoch": later.epoch, "account_id": "later", "taken_pico": 1}
        await c.execute(insert(leases).values(lease))
    async with either.db.begin() as c:
        await retry(c, by, later.slot_id, later.epoch, later.seq)
    async with either.db.begin() as c:
        await write_off(c, by, never.slot_id, never.epoch, never.seq)
    with pytest.raises(Conflict):
        async with either.db.begin() as c:
            await write_off(c, by, never.slot_id, never.epoch, never.seq)
    assert len(await either.rows()) == 1
    await proven(either)


async def test_a_request_id_used_twice_with_other_bytes_is_set_aside(either: House) -> None:
    gate = await either.gate()
    ask = either.ask()
    await run(gate, ask)
    await run(gate, ask, used(100, 20))
    await gate.close()
    await either.post()
    assert len(await either.rows()) == 1
    report = await verify(either.db, either.journal_dir)
    assert [check.name for check in report.checks if not check.ok] == ["suspense"]


async def test_what_the_upstream_said_and_nobody_believed_is_kept(either: House) -> None:
    gate = await either.gate()
    hold = await gate.hold(either.ask())
    await hold.settle(used(100, 5, tokens={"raw": b'{"completion_tokens": 1e99}', "estimated": True}))
    await proven(either)
    async with either.db.read() as c:
        kept = (await c.execute(select(suspense))).one()
    assert bytes(kept.record) == b'{"completion_tokens": 1e99}'


async def test_every_attempt_keeps_its_provider_cost_under_one_request(either: House) -> None:
    gate = await either.gate()
    hold = await gate.hold(either.ask())
    failed = [FailedAttempt("first", 700), FailedAttempt("second", 30)]
    await hold.settle(used(100, 5, attempts=3, provider_cost_usd_pico=9, failed_attempts=failed))
    await proven(either)
    (row,) = await either.rows()
    assert (row.attempts, row.provider_cost_usd_pico, row.deployment) == (3, 739, "backend")
    async with either.db.read() as c:
        query = select(transfers.c.destination, transfers.c.amount_pico).where(transfers.c.kind == "provider_cost")
        booked = {row.destination: int(row.amount_pico) for row in await c.execute(query)}
    assert booked == {"provider:first": 700, "provider:second": 30, "provider:backend": 9}


async def test_batches_carry_the_hash_chain_of_the_journal(either: House) -> None:
    gate = await either.gate()
    for _ in range(5):
        await run(gate, either.ask())
    await either.post()
    (info,) = list_epochs(either.journal_dir / "0")
    reader = JournalReader(info.path)
    frames = list(reader.frames(0))
    reader.close()
    async with either.db.read() as c:
        (batch,) = await c.execute(select(batches))
    assert (batch.last_seq, batch.chain_hash) == (frames[-1].seq, frames[-1].chain_hash.hex())
    await proven(either)


async def test_slots_post_side_by_side(either: House) -> None:
    gates = [await either.gate(slot) for slot in range(3)]
    for gate in gates:
        for _ in range(4):
            await run(gate, either.ask())
    await proven(either)
    rows = await either.rows()
    assert sorted(row.slot_id.rsplit("/", 1)[1] for row in rows) == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
