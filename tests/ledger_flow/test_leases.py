"""Slices of money in several workers: never overspent, nothing stranded, no refusal while money lies idle."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import text, update
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from ledger.database import CommitUnknown, Database
from ledger.errors import InsufficientQuota, Invalid, LedgerUnavailable
from ledger.gate import Gate
from ledger.leases import Fenced
from ledger.migrations import migrate
from ledger.quotas import Scope
from ledger.schema import accounts, leases, slots
from tests.ledger_flow.conftest import furnished
from tests.ledger_flow.material import USD, House, now_ms, price, run, used
from tests.ledger_flow.processes import lines, spender
from tests.ledger_flow.test_holds import proven
from tests.services import Postgres

PRICE = price(100, 200)
AWAY_S = float(os.environ.get("AWAY_S", "1"))
"""How long PostgreSQL is away; 60 makes it the long one."""


async def refreshing(*gates: Gate) -> None:
    while True:
        await asyncio.sleep(0.1)
        for gate in gates:
            await gate.refresh()


async def test_idle_money_of_another_worker_is_recalled_before_anyone_is_refused(either: House) -> None:
    await either.budget(Scope.of_key(either.key_id), 4 * PRICE)
    rich, poor = await either.gate(0), await either.gate(1)
    hold = await rich.hold(either.ask(output=600))
    await hold.void("not needed")
    assert any(slice.free >= 2 * PRICE for slice in rich.leases.slices.values() if slice.kind == "budget")
    background = asyncio.create_task(refreshing(rich, poor))
    for _ in range(4):
        hold = await run(poor, either.ask())
        assert hold.output_tokens == 200
    with pytest.raises(InsufficientQuota):
        await poor.hold(either.ask())
    background.cancel()
    await proven(either)
    budget = await either.account("budget")
    assert budget.debits_pico == budget.credits_pico


async def test_a_rich_account_is_leased_in_large_slices_and_a_poor_one_request_by_request(house: House) -> None:
    gate = await house.gate()
    await run(gate, house.ask())
    prepaid = next(slice for slice in gate.leases.slices.values() if slice.kind == "prepaid")
    assert prepaid.taken == 10 * USD // 2
    await house.budget(Scope.of_key(house.key_id), 3 * PRICE)
    await gate.refresh()
    for _ in range(3):
        hold = await gate.hold(house.ask())
        await hold.settle(used())
    budget = next(slice for slice in gate.leases.slices.values() if slice.kind == "budget")
    assert (budget.free, budget.taken) == (0, 3 * PRICE)
    await proven(house)


async def test_a_warm_hold_needs_no_sql(house: House) -> None:
    gate = await house.gate()
    await run(gate, house.ask())
    await house.db.close()
    house.db.begin = house.db.read = None  # type: ignore[assignment,method-assign]
    for _ in range(20):
        await run(gate, house.ask())
        stream = await gate.hold(house.ask(output=5_000, streamed=True))
        assert await stream.extend(1_000)
        await stream.settle(used(100, 1_000))
    del house.db.begin, house.db.read
    await proven(house)


async def test_an_idle_slice_returns_after_a_while(house: House) -> None:
    clock = [0]

    def later() -> int:
        return now_ms() + clock[0]

    gate = await house.gate(clock=later)
    await run(gate, house.ask())
    clock[0] = 2_000
    await gate.refresh()
    assert await house.leased() > PRICE
    clock[0] = 34_000
    await gate.refresh()
    assert await house.leased() == PRICE  # spent, and not posted yet
    await proven(house)


async def test_while_sql_is_away_leases_are_spent_and_the_poor_are_told_to_come_back(house: House) -> None:
    await house.budget(Scope.of_key(house.key_id), USD)
    gate = await house.gate()
    await run(gate, house.ask())
    real = house.db.engine, house.db._reader
    path = str(house.db.engine.url.database)
    broken = broken_engine(path)
    house.db.engine = house.db._reader = broken
    await gate.refresh()
    assert any("SQL" in words for words in gate.degraded())
    for _ in range(50):
        await run(gate, house.ask())
    with pytest.raises(LedgerUnavailable) as away:
        await gate.hold(house.ask(prompt=10_000_000))
    assert away.value.retry_after_ms > 0
    with pytest.raises(LedgerUnavailable):
        await gate.hold(house.ask(idempotency_key="k", body_hash="h"))
    house.db.engine, house.db._reader = real
    await asyncio.sleep(0.6)
    await gate.refresh()
    assert gate.degraded() == []
    await run(gate, house.ask(prompt=100_000))
    await proven(house)


def broken_engine(path: str) -> AsyncEngine:
    return create_async_engine(f"sqlite+aiosqlite:///{path}.nowhere/none.db")


async def test_a_fenced_worker_stops(either: House) -> None:
    gate = await either.gate()
    await run(gate, either.ask())
    hold = await gate.hold(either.ask())
    async with either.db.begin() as c:
        await c.execute(update(slots).values(epoch=slots.c.epoch + 1))
    with pytest.raises(Fenced):
        await gate.leases.take(next(iter(gate.leases.slices.values())), 10 * USD)
    await gate.refresh()
    with pytest.raises(LedgerUnavailable):
        await gate.hold(either.ask())
    await hold.settle(used())
    async with either.db.begin() as c:
        await c.execute(update(slots).values(epoch=slots.c.epoch - 1))


async def test_a_commit_whose_end_nobody_saw_is_read_before_it_is_tried_again(either: House) -> None:
    """Both ways: it happened, or it did not."""
    gate = await either.gate()
    await run(gate, either.ask())
    (slice,) = [s for s in gate.leases.slices.values() if s.kind == "prepaid"]
    real = Database.begin
    for happened in (True, False):

        @asynccontextmanager
        async def cut(self, happened=happened):  # type: ignore[no-untyped-def]
            if not happened:
                raise CommitUnknown("cut before COMMIT arrived")
                yield
            async with real(self) as c:
                yield c
            raise CommitUnknown("cut after COMMIT arrived")

        either.db.begin = cut.__get__(either.db)  # type: ignore[method-assign]
        with pytest.raises(LedgerUnavailable):
            await gate.leases.take(slice, 6 * USD)
        assert not slice.synced
        del either.db.begin
        gate.leases.down_since_ms = None
        await gate.leases.take(slice, USD)
        async with either.db.read() as c:
            row = (await c.execute(text("SELECT * FROM leases WHERE account_id = 'x' OR taken_pico > 0"))).first()
        assert row is not None
        assert (slice.taken, slice.returned) == (int(row.taken_pico), int(row.returned_pico))
        assert slice.free == slice.taken - slice.returned - slice.spent
    await proven(either)


async def test_a_failover_that_lost_a_lease_stops_its_spending(either: House) -> None:
    gate = await either.gate()
    await run(gate, either.ask())
    await either.post()
    async with either.db.begin() as c:
        await c.execute(text("UPDATE accounts SET leased_pico = 0"))
        await c.execute(text("UPDATE leases SET taken_pico = posted_pico, revision = revision - 1"))
    gate.leases.failed()
    await gate.refresh()
    (slice,) = [s for s in gate.leases.slices.values() if s.kind == "prepaid"]
    assert slice.free == 0
    await run(gate, either.ask())  # takes anew
    await proven(either)


async def test_a_request_that_used_more_than_was_held_settles_also_when_a_failover_lost_its_lease(
    either: House,
) -> None:
    await either.budget(Scope.of_key(either.key_id), 10 * PRICE)
    gate = await either.gate()
    hold = await gate.hold(either.ask())
    async with either.db.begin() as c:
        lost = leases.c.account_id.startswith("budget:")
        await c.execute(leases.delete().where(lost))
        await c.execute(update(accounts).where(accounts.c.kind == "budget").values(leased_pico=0))
    gate.leases.down_since_ms = now_ms()
    await gate.refresh()
    assert [slice.free < 0 for slice in gate.leases.slices.values() if slice.kind == "budget"] == [True]
    gate.leases.failed()  # and is away again: nothing can be taken
    receipt = await hold.settle(used(100, 300))
    assert (receipt.billed_tokens, receipt.waiver_reason) == (300, "overrun")
    gate.leases.down_since_ms = None
    await proven(either)


async def test_a_clock_that_goes_back_refuses_nobody_while_there_is_money(either: House) -> None:
    """What was noted for some milliseconds, such as that an account is empty, is not believed for an hour."""
    moved = 0
    await either.budget(Scope.of_key(either.key_id), PRICE)
    rich, poor = await either.gate(0), await either.gate(1, clock=lambda: now_ms() + moved)
    hold = await rich.hold(either.ask())
    with pytest.raises(InsufficientQuota):
        await poor.hold(either.ask())
    moved = -3_600_000
    await hold.void("not needed")
    for slice in rich.leases.slices.values():
        await rich.leases.give_back(slice)
    await run(poor, either.ask())
    await proven(either)


@pytest.mark.parametrize("asked", [{"prompt": -1_000_000}, {"output": -1_000_000}])
async def test_less_than_nothing_cannot_be_held(house: House, asked: dict[str, int]) -> None:
    gate = await house.gate()
    with pytest.raises(Invalid):
        await gate.hold(house.ask(**asked))
    await run(gate, house.ask(prompt=0, output=0))
    await proven(house)


async def test_a_return_whose_end_nobody_saw_is_not_spent_until_sql_has_told(house: House) -> None:
    """SQL gave the money to others, perhaps; a second failure must not put it back into our hands."""
    gate = await house.gate()
    await run(gate, house.ask())
    (slice,) = [s for s in gate.leases.slices.values() if s.kind == "prepaid"]
    real = Database.begin

    @asynccontextmanager
    async def cut(self):  # type: ignore[no-untyped-def]
        async with real(self) as c:
            yield c
        raise CommitUnknown("cut after COMMIT arrived")

    @asynccontextmanager
    async def away(self):  # type: ignore[no-untyped-def]
        raise LedgerUnavailable("still away")
        yield

    house.db.begin = cut.__get__(house.db)  # type: ignore[method-assign]
    with pytest.raises(LedgerUnavailable):
        await gate.leases.give_back(slice)
    gate.leases.down_since_ms = None
    house.db.begin = away.__get__(house.db)  # type: ignore[method-assign]
    with pytest.raises(LedgerUnavailable):
        await gate.leases.give_back(slice)
    assert slice.free == 0
    del house.db.begin
    gate.leases.down_since_ms = None
    await run(gate, house.ask())
    await proven(house)


async def test_a_reconnect_waits_for_a_return_that_is_still_being_committed(
    ledger_postgres_url: str, tmp_path: Path
) -> None:
    """A COMMIT may go on in the server after we lost it (it waits for its standby): what it says counts, not what a
    reader sees before it."""
    async with furnished(ledger_postgres_url, tmp_path / "journal") as house:
        gate = await house.gate()
        await run(gate, house.ask())
        (slice,) = [s for s in gate.leases.slices.values() if s.kind == "prepaid"]
        committing, over = asyncio.Event(), asyncio.Event()

        async def return_slowly(amount: int) -> None:
            async with house.db.begin() as c:
                mine = (leases.c.account_id == slice.account_id, leases.c.revision == slice.revision)
                back = {"returned_pico": leases.c.returned_pico + amount, "revision": leases.c.revision + 1}
                of = accounts.c.id == slice.account_id
                await c.execute(update(accounts).where(of).values(leased_pico=accounts.c.leased_pico - amount))
                await c.execute(update(leases).where(*mine).values(back))
                committing.set()
                await over.wait()

        server = asyncio.create_task(return_slowly(slice.free))
        await committing.wait()
        slice.on_its_way, slice.free, slice.synced = slice.free, 0, False  # as after a CommitUnknown
        gate.leases.failed()
        await gate.refresh()
        assert slice.free == 0, "nobody knows yet whether it went back"
        over.set()
        await server
        await run(gate, house.ask())
        await proven(house)


@pytest.mark.parametrize("workers", [4])
async def test_several_processes_spend_one_budget_to_the_last_pico_and_not_one_more(
    either: House, workers: int
) -> None:
    calls = 200
    await either.budget(Scope.of_key(either.key_id), calls * PRICE)
    running = [spender(either, slot) for slot in range(workers)]
    poster = either.poster()
    stop = asyncio.Event()
    posting = asyncio.create_task(poster.run(stop))
    async with asyncio.timeout(120):
        await asyncio.to_thread(lambda: [process.wait() for process in running])
    stop.set()
    await posting
    assert [process.returncode for process in running] == [0] * workers
    receipts = [line for line in lines(either.journal_dir.parent) if line.kind == "D"]
    budget = await either.account("budget")
    assert sum(line.second for line in receipts) == budget.debits_pico <= budget.credits_pico
    assert budget.credits_pico - budget.debits_pico < price(100, 1)  # what is left buys nothing
    assert sum(line.first for line in receipts) == sum(row.billed_tokens for row in await either.rows())
    assert not any(row.loss_pico for row in await either.rows())
    await proven(either)


@pytest.mark.soak
@pytest.mark.timeout(180 + 3 * AWAY_S)
async def test_workers_and_poster_live_through_the_death_of_postgresql(
    postgres_server: Callable[..., Postgres], tmp_path: Path
) -> None:
    server = postgres_server(fsync=True)
    url = server.url(server.create_database())
    await migrate(url)

    async def both_went_on(after: int) -> None:
        async with asyncio.timeout(90):
            while min(sum(line.kind == "D" for line in lines(tmp_path, n)) for n in (0, 1)) < after:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async with furnished(url, tmp_path / "journal") as house:
        budget = int(4 + 3 * AWAY_S) * USD  # a worker leases a quarter, and spends half a dollar a second
        await house.top_up(budget)
        await house.budget(Scope.of_key(house.key_id), budget)
        stop = asyncio.Event()
        posting = asyncio.create_task(house.poster().run(stop))
        running = [spender(house, slot) for slot in range(2)]
        await both_went_on(20)
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(AWAY_S / 2)
        half = sum(line.kind == "D" for line in lines(tmp_path))
        await asyncio.sleep(AWAY_S / 2)
        async with asyncio.timeout(90):  # from leases, until the end of the outage
            while not (served := sum(line.kind == "D" for line in lines(tmp_path)) - half):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.to_thread(server.start)
        print(f"{served} requests in the second half of {AWAY_S:g} s without SQL")
        seen = max(sum(line.kind == "D" for line in lines(tmp_path, slot)) for slot in range(2))
        await both_went_on(seen + 20)
        await house.budget(Scope.of_key(house.key_id), 0)  # which ends them
        async with asyncio.timeout(90):
            await asyncio.to_thread(lambda: [process.wait() for process in running])
        stop.set()
        await posting
        assert [process.returncode for process in running] == [0, 0]
        receipts = [line for line in lines(tmp_path) if line.kind == "D"]
        await proven(house)
        spent = await house.account("budget")
        assert sum(line.second for line in receipts) == spent.debits_pico <= spent.credits_pico


async def test_eight_processes_spend_1000_calls_worth_exactly_while_postgresql_dies_and_comes_back(
    postgres_server: Callable[..., Postgres], tmp_path: Path
) -> None:
    """Nobody is refused while money lies idle elsewhere: what is left in the end buys nothing."""
    server = postgres_server(fsync=True)
    url = server.url(server.create_database())
    await migrate(url)
    async with furnished(url, tmp_path / "journal") as house:
        await house.budget(Scope.of_key(house.key_id), 1_000 * PRICE)
        stop = asyncio.Event()
        posting = asyncio.create_task(house.poster().run(stop))
        running = [spender(house, slot, "--when-started") for slot in range(8)]
        async with asyncio.timeout(90):
            while len(list(tmp_path.glob("spender-*.log"))) < 8:  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.02)
            (tmp_path / "start").touch()
            while sum(line.kind == "D" for line in lines(tmp_path)) < 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(1)
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(120):
            await asyncio.to_thread(lambda: [process.wait() for process in running])
        stop.set()
        await posting
        assert [process.returncode for process in running] == [0] * 8
        receipts = [line for line in lines(tmp_path) if line.kind == "D"]
        assert await house.leased() == 0  # SQL was up when they ended: nothing is stranded
        await proven(house)
        budget = await house.account("budget")
        assert sum(line.second for line in receipts) == budget.debits_pico <= budget.credits_pico
        assert budget.credits_pico - budget.debits_pico < price(100, 1)
        assert not any(row.loss_pico for row in await house.rows())


async def test_a_frozen_worker_keeps_its_slot_and_goes_on_when_it_thaws(house: House) -> None:
    await house.budget(Scope.of_key(house.key_id), 5 * USD)
    process = spender(house, 0, "--until-killed")
    folder = house.journal_dir.parent
    async with asyncio.timeout(90):
        while sum(line.kind == "D" for line in lines(folder)) < 50:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(LedgerUnavailable):
        await house.gate(0)
    await house.post()
    before = len(list(lines(folder)))
    process.send_signal(signal.SIGCONT)
    async with asyncio.timeout(90):
        while len(list(lines(folder))) < before + 50:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    process.kill()
    process.wait()
    await house.gate(0)
    await proven(house)
    seen = {line.request_id: line.first for line in lines(folder) if line.kind == "D"}
    assert {row.request_id: row.billed_tokens for row in await house.rows()}.items() >= seen.items()
