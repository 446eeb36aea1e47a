"""A month closes on proof that nothing of it can follow; what follows all the same is billed in the next open one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from sqlalchemy import select, text

from ledger.audit import By
from ledger.errors import Conflict, Invalid, NotFound
from ledger.gate import Gate
from ledger.invoices import Invoice
from ledger.lost_journals import declare_lost
from ledger.months import Month, close_in_zones, close_patiently, late_months, list_months
from ledger.periods import next_period, period_bounds, previous_period
from ledger.records import Charge, Usage
from ledger.schema import audit, periods
from ledger.suspense import list_suspended, write_off
from tests.ledger_flow.material import USD, House, crash, now_ms, price, run, used
from tests.ledger_flow.processes import lines, spender
from tests.ledger_flow.test_posting import settle
from tests.ledger_invoices.conftest import furnished
from tests.ledger_invoices.material import (
    LAST_MONTH,
    THIS_MONTH,
    ZONE,
    draft,
    finalized,
    in_month,
    included,
    proven,
)


def finance() -> By:
    return By("finance", now_ms(), "month end")


async def step(house: House, period: str = LAST_MONTH, zone: str = ZONE, leave_out: tuple[str, ...] = ()) -> Month:
    async with house.db.begin() as c:
        return (await close_in_zones(c, finance(), period, [zone], leave_out=leave_out))[0]


async def months_of(house: House) -> list[tuple[str, str | None]]:
    """(period, billed in) of the requests."""
    return sorted((row.period, row.billed_in) for row in await house.rows())


async def orphan_of(house: House, gate: Gate) -> str:
    """A stream of last month that has delivered something when its worker dies; its request id."""
    ask = in_month(house, streamed=True, output=2_000)
    hold = await gate.hold(ask)
    hold.progress(100, 300)
    await gate.journal.flush()
    crash(house, gate)
    return ask.request_id


async def closed_without(house: House, gate: Gate) -> Invoice:
    """Last month, closed and finalized while the gate's slot is left out."""
    slot = (gate.leases.slot_id,)
    await step(house, leave_out=slot)
    for other in house.gates:
        if other is not gate:
            await other.refresh()
    await house.post()
    assert (await step(house, leave_out=slot)).state == "closed"
    return await finalized(house)


async def test_a_month_closes_when_every_slot_has_sealed_it_and_all_before_that_is_posted(house: House) -> None:
    first, second = [await house.gate(slot) for slot in (0, 1)]
    await run(first, in_month(house))
    asked = await step(house)
    assert (asked.state, len(asked.waiting_for)) == ("closing", 2)
    await first.refresh()
    await house.post()
    (waiting,) = (await step(house)).waiting_for
    assert second.leases.slot_id in waiting
    await run(second, in_month(house))
    await second.refresh()
    assert (await step(house)).state == "closing"  # sealed, and not posted yet
    await house.post()
    assert (await step(house)).state == "closed"
    await run(second, in_month(house))
    await house.post()
    assert await months_of(house) == [(LAST_MONTH, None), (LAST_MONTH, None), (THIS_MONTH, None)]
    await proven(house)


async def test_a_close_waits_for_a_batch_that_found_an_earlier_month_open(
    ledger_postgres_url: str, tmp_path: Path
) -> None:
    """It cannot see the month that the batch makes, and would leave it open, and its usage unbilled, behind itself."""
    earlier = previous_period(LAST_MONTH)
    async with furnished(ledger_postgres_url, tmp_path) as house:
        slot = ((await house.gate()).leases.slot_id,)
        async with house.db.begin() as batch:
            async with house.db.begin() as c:
                await close_in_zones(c, finance(), LAST_MONTH, [ZONE], leave_out=slot)
                assert await late_months(batch, [(earlier, ZONE)]) == {}
            closing = asyncio.create_task(step(house, leave_out=slot))
            await asyncio.sleep(0.3)
            assert not closing.done()
        assert (await closing).state == "closed"
        async with house.db.read() as c:
            found = (await c.execute(select(periods.c.period, periods.c.state).order_by(periods.c.period))).all()
        assert [tuple(row) for row in found] == [(earlier, "closed"), (LAST_MONTH, "closed")]


async def test_closing_again_changes_nothing_and_who_closed_it_is_in_the_audit_chain(house: House) -> None:
    first = await step(house)
    again = await step(house)
    assert (first.state, again.state, again.closed_ms) == ("closed", "closed", first.closed_ms)
    assert (await step(house, previous_period(LAST_MONTH))).closed_ms == first.closed_ms  # and with it those before
    async with house.db.read() as c:
        acts = (await c.execute(select(audit).where(audit.c.action.like("month.%")).order_by(audit.c.seq))).all()
        listed = await list_months(c, now_ms())
    assert [(act.action, act.actor, act.reason) for act in acts] == [
        ("month.seal", "finance", "month end"),
        ("month.close", "finance", "month end"),
    ]
    assert [(month.period, month.state) for month in listed.items] == [(LAST_MONTH, "closed")]


async def test_a_month_that_is_not_over_or_not_closed_has_no_invoice(sqlite_house: House) -> None:
    assert (await step(sqlite_house, THIS_MONTH)).state == "open"
    with pytest.raises(Invalid, match="not over"):
        await sqlite_house.try_to_close(THIS_MONTH, ZONE, finance())
    with pytest.raises(Conflict, match="tallygate month close"):
        await finalized(sqlite_house)


async def test_a_running_request_stays_in_its_month_and_the_close_waits_for_it(sqlite_house: House) -> None:
    gate = await sqlite_house.gate()
    hold = await gate.hold(in_month(sqlite_house))
    await step(sqlite_house)
    await gate.refresh()
    await sqlite_house.post()
    (waiting,) = (await step(sqlite_house)).waiting_for
    assert "still runs 1 requests" in waiting
    await run(gate, in_month(sqlite_house))  # admitted after the close was asked for
    await hold.settle(used())
    await gate.refresh()
    await sqlite_house.post()
    assert (await step(sqlite_house)).state == "closed"
    assert await months_of(sqlite_house) == [(LAST_MONTH, None), (THIS_MONTH, None)]


async def test_a_clock_that_jumps_back_admits_nothing_to_a_sealed_month(sqlite_house: House) -> None:
    gate = await sqlite_house.gate()
    await run(gate, in_month(sqlite_house))
    assert (await sqlite_house.close_month(LAST_MONTH)).state == "closed"
    invoice = await finalized(sqlite_house)
    await run(gate, in_month(sqlite_house))
    await run(gate, in_month(sqlite_house))
    await sqlite_house.post()
    assert await months_of(sqlite_house) == [(LAST_MONTH, None), (THIS_MONTH, None), (THIS_MONTH, None)]
    assert (await draft(sqlite_house, LAST_MONTH)).exact_pico == invoice.exact_usd_pico
    await proven(sqlite_house, LAST_MONTH)


@pytest.mark.parametrize("killed", [False, True])
async def test_a_slot_that_starts_again_admits_nothing_to_a_month_that_is_closing_or_closed(
    sqlite_house: House, killed: bool
) -> None:
    gate = await sqlite_house.gate()
    await run(gate, in_month(sqlite_house))
    await step(sqlite_house)
    await gate.refresh()  # it seals the month
    if killed:
        crash(sqlite_house, gate)
    else:
        await gate.close()
        sqlite_house.gates.remove(gate)
    gate = await sqlite_house.gate()
    await run(gate, in_month(sqlite_house))
    await gate.refresh()
    await sqlite_house.post()
    assert (await step(sqlite_house)).state == "closed"
    await gate.close()
    sqlite_house.gates.remove(gate)
    await run(await sqlite_house.gate(), in_month(sqlite_house))
    await sqlite_house.post()
    assert await months_of(sqlite_house) == [(LAST_MONTH, None), (THIS_MONTH, None), (THIS_MONTH, None)]
    await proven(sqlite_house)


async def test_a_stopped_slot_that_is_posted_needs_no_seal_and_one_that_is_not_is_named(sqlite_house: House) -> None:
    gate = await sqlite_house.gate()
    await run(gate, in_month(sqlite_house))
    await gate.close()
    (waiting,) = (await step(sqlite_house)).waiting_for
    assert f"slot {gate.leases.slot_id} is stopped" in waiting
    assert "tallygate poster" in waiting
    await sqlite_house.post()
    assert (await step(sqlite_house)).state == "closed"


async def test_a_lost_journal_holds_the_close_back_until_it_is_declared_lost(house: House) -> None:
    """And when its disc comes back, nothing of it is billed: that was given up."""
    gate = await house.gate()
    await run(gate, in_month(house))
    slot_id, epoch = gate.leases.slot_id, gate.leases.epoch
    crash(house, gate)
    async with house.db.begin() as c:
        late = By("finance", now_ms() + 60_000)
        (waiting,) = (await close_in_zones(c, late, LAST_MONTH, [ZONE]))[0].waiting_for
        assert "has not been heard of for" in waiting
        assert f"tallygate journal declare-lost {slot_id} {epoch}" in waiting
        await declare_lost(c, late, slot_id, epoch)
        assert (await close_in_zones(c, late, LAST_MONTH, [ZONE]))[0].state == "closed"
    invoice = await finalized(house)
    await house.gate()
    await house.post()
    assert await house.rows() == []
    assert (await draft(house, LAST_MONTH)).merkle_root == invoice.merkle_root


async def test_an_orphan_of_a_closed_month_is_late_usage_of_the_next_open_one(house: House) -> None:
    first, second = [await house.gate(slot) for slot in (0, 1)]
    in_time = in_month(house)
    await run(first, in_time)
    late = await orphan_of(house, second)
    with pytest.raises(NotFound, match="no slot"):
        await step(house, leave_out=("nobody/7",))
    invoice = await closed_without(house, second)
    await house.gate(1)  # it recovers what it had left open
    await house.post()
    rows = {row.request_id: (row.period, row.billed_in, row.estimated) for row in await house.rows()}
    assert rows == {in_time.request_id: (LAST_MONTH, None, 0), late: (LAST_MONTH, THIS_MONTH, 1)}
    await proven(house)
    await proven(house, LAST_MONTH)
    assert await included(house, in_time.request_id, invoice)
    assert not await included(house, late, invoice)
    await run(first, house.ask())
    await house.post()
    month = await draft(house)
    cost = price(100, 300)
    assert sum(line.usd_pico for line in month.lines if line.late_of == LAST_MONTH) == cost
    assert month.exact_usd_pico == cost + price(100, 200)
    assert month.opening_pico == (await draft(house, LAST_MONTH)).closing_pico
    assert (await house.close_month(THIS_MONTH)).state == "closed"
    following = await finalized(house, THIS_MONTH)
    assert following.carry_in_pico == invoice.carry_out_pico
    assert await included(house, late, following)
    await proven(house)


async def test_late_usage_goes_to_the_first_month_that_is_not_closed_either(house: House) -> None:
    gate = await house.gate()
    await run(gate, in_month(house))
    end = By("finance", period_bounds(THIS_MONTH, ZONE)[1])
    slot = (gate.leases.slot_id,)
    states = [(await house.try_to_close(THIS_MONTH, ZONE, end, leave_out=slot)).state for _ in range(2)]
    assert states == ["closing", "closed"]
    await house.post()
    assert await months_of(house) == [(LAST_MONTH, next_period(THIS_MONTH))]
    await proven(house)


async def test_what_a_restored_database_had_forgotten_is_late_usage_of_the_next_open_month(house: House) -> None:
    gate = await house.gate(1)
    await run(gate, in_month(house))
    crash(house, gate)
    async with house.db.begin() as c:
        for table in ("leases", "epochs", "slots"):
            await c.execute(text(f"DELETE FROM {table}"))
        await c.execute(text("UPDATE accounts SET leased_pico = 0"))
    assert (await step(house)).state == "closed"
    invoice = await finalized(house)
    await house.gate(1)
    await house.post()
    assert await months_of(house) == [(LAST_MONTH, THIS_MONTH)]
    assert (await draft(house, LAST_MONTH)).merkle_root == invoice.merkle_root
    await proven(house)


async def test_a_row_that_is_posted_while_the_month_closes_is_either_in_it_or_late(house: House) -> None:
    """The poster locks the month's row for each batch: what the invoice seals is what it summed."""
    gate = await house.gate()
    for _ in range(60):
        await run(gate, in_month(house, prompt=1, output=1))
    slot = (gate.leases.slot_id,)
    await step(house, leave_out=())

    async def post() -> None:
        poster = house.poster(batch_frames=2)
        while await poster.post_once(whole=True):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        poster.close()

    async def close() -> Invoice:
        while len(await house.rows()) < 10:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await step(house, leave_out=slot)).state == "closed"
        return await finalized(house)

    _, invoice = await asyncio.gather(post(), close())
    rows = await house.rows()
    in_time = [row for row in rows if row.billed_in is None]
    assert len(rows) == 60
    assert 10 <= len(in_time) < 60
    assert invoice.exact_usd_pico == sum(row.cost_usd_pico for row in in_time)
    await proven(house)
    await proven(house, LAST_MONTH)


async def test_a_month_turns_when_it_is_over_in_the_zone_of_the_team(sqlite_house: House) -> None:
    shanghai = sqlite_house.team_id
    gate = await sqlite_house.gate()
    await run(gate, in_month(sqlite_house))
    await sqlite_house.furnish_another("far west", "USD", 10 * USD, timezone="UTC")
    for period in (LAST_MONTH, THIS_MONTH):
        await run(gate, in_month(sqlite_house, period))
    turn = By("finance", period_bounds(LAST_MONTH, ZONE)[1])
    for _ in range(2):
        async with sqlite_house.db.begin() as c:
            east, west = await close_in_zones(c, turn, LAST_MONTH, [ZONE, "UTC"])
        await gate.refresh()
        await sqlite_house.post()
    assert (east.state, west.state) == ("closed", "open")
    assert "not over there until" in west.waiting_for[0]
    last_hours = sqlite_house.ask(at_ms=turn.at_ms + 3_600_000)  # in UTC it is still the month before
    await run(gate, last_hours)
    await sqlite_house.post()
    rows = {row.request_id: row.period for row in await sqlite_house.rows() if row.team_id != shanghai}
    assert rows[last_hours.request_id] == LAST_MONTH
    assert (await sqlite_house.close_month(LAST_MONTH, "UTC")).state == "closed"
    await proven(sqlite_house)


async def test_a_record_in_suspense_is_decided_on_before_its_month_closes(sqlite_house: House) -> None:
    gate = await sqlite_house.gate()
    bad = settle(sqlite_house, period=LAST_MONTH, charges=[Charge("nobody", 5)], usage=Usage(billed_tokens=0))
    await gate.journal.append_durable(bad)
    (waiting,) = (await sqlite_house.close_month(LAST_MONTH)).waiting_for
    assert "is in suspense" in waiting
    async with sqlite_house.db.begin() as c:
        (aside,) = await list_suspended(c)
        await write_off(c, finance(), aside.slot_id, aside.epoch, aside.seq)
    assert (await step(sqlite_house)).state == "closed"


async def test_a_seal_is_journalled_once_and_only_for_months_that_are_closing(sqlite_house: House) -> None:
    gate = await sqlite_house.gate()
    await step(sqlite_house)
    for _ in range(3):
        await gate.refresh()
    assert gate.journal.seq == 1
    await sqlite_house.post()
    await step(sqlite_house)
    await gate.refresh()
    assert gate.journal.seq == 1


async def test_a_frozen_worker_is_waited_for_and_seals_when_it_goes_on(house: House, tmp_path: Path) -> None:
    await house.top_up(1_000 * USD)
    admitted = str(in_month(house).at_ms)
    workers = [spender(house, slot, "--until-killed", "--slowly", "--admitted-at", admitted) for slot in (0, 1)]
    stop = asyncio.Event()
    posting = asyncio.create_task(house.poster().run(stop))
    try:
        await _until_both_have_spent(tmp_path)
        os.kill(workers[1].pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            while [words.split()[1][-2:] for words in (await step(house)).waiting_for] != ["/1"]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        os.kill(workers[1].pid, signal.SIGCONT)
        (month,) = await close_patiently(house.db, finance(), LAST_MONTH, [ZONE], patience_s=60)
        assert month.state == "closed", month.waiting_for
        invoice = await finalized(house)
        await _until_both_have_spent(tmp_path, 20 + len(list(lines(tmp_path))))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        stop.set()
        await posting
    for slot in (0, 1):
        await (await house.gate(slot)).close()
    await house.post()
    rows = await house.rows()
    assert {row.period for row in rows} == {LAST_MONTH, THIS_MONTH}
    assert not [row for row in rows if row.billed_in is not None]
    assert invoice.exact_usd_pico == sum(row.cost_usd_pico for row in rows if row.period == LAST_MONTH)
    await proven(house)


async def _until_both_have_spent(folder: Path, lines_of_both: int = 0) -> None:
    def spent(slot: int) -> bool:
        return any(line.kind == "D" for line in lines(folder, slot))

    async with asyncio.timeout(60):
        while not (spent(0) and spent(1) and len(list(lines(folder))) >= lines_of_both):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_a_closed_month_stays_closed_whatever_is_tried(sqlite_house: House) -> None:
    """What a hand changes in SQL is found by the proof."""
    gate = await sqlite_house.gate()
    await run(gate, in_month(sqlite_house))
    await sqlite_house.close_month(LAST_MONTH)
    await finalized(sqlite_house)
    await proven(sqlite_house)
    async with sqlite_house.db.begin() as c:
        await c.execute(text("UPDATE usage SET billed_in = :month"), {"month": THIS_MONTH})
    with pytest.raises(AssertionError):
        await proven(sqlite_house)
