"""A state machine of everything that can happen to money, against a plain model of what should be left.

`STEPS=` and `EXAMPLES=` make it longer.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from ledger.audit import By
from ledger.database import Database
from ledger.errors import (
    AlreadyAnswered,
    IdempotencyExpired,
    IdempotencyInProgress,
    IdempotencyMismatch,
    InsufficientQuota,
)
from ledger.gate import Gate, Hold
from ledger.invoices import finalize
from ledger.migrations import migrate
from ledger.month_figures import draft_statement
from ledger.periods import period_of, previous_period
from ledger.publishing import Quote, publish_prices
from ledger.quotas import Scope
from ledger.verify import verify
from tests.conftest import run_apart
from tests.ledger_flow.material import MODEL, USD, House, crash, now_ms, used
from tests.services import Postgres

T = TypeVar("T")
MONTH_MS = 31 * 86_400_000
SMALL = USD // 2_000
SLOTS = (0, 1)
ZONE = "Asia/Shanghai"


class Flow(RuleBasedStateMachine):
    """The model keeps, per team-wide pot, what has come in and what receipts say has been spent."""

    new_url: Callable[[Path], str]
    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp())
        self.shift_ms = 0
        self.paid_in = 0
        self.spent = 0
        self.receipts: dict[str, tuple[int, int]] = {}
        self.maximum: dict[str, int] = {}
        """Cost that a request without a receipt may turn out to have, by request."""
        self.keys: dict[str, tuple[str, bytes]] = {}
        self.opened: dict[int, Gate] = {}
        self.prices = 0
        self.closed_through = ""
        self.invoices: dict[str, tuple[int, str | None]] = {}
        """By month: what it was sealed as."""

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def beside_refreshes(self, work: Coroutine[Any, Any, T]) -> T:
        """As in real life: the other workers answer recalls meanwhile."""

        async def refreshing() -> None:
            while True:
                await asyncio.sleep(0.02)
                for gate in self.opened.values():
                    await gate.refresh()

        background = asyncio.create_task(refreshing())
        try:
            return await work
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)

    def replayed(self, key: str, done: AlreadyAnswered) -> None:
        assert self.keys[key] == (done.request_id, done.answer)

    def clock(self) -> int:
        return now_ms() + self.shift_ms

    @initialize(balance=st.integers(1, 50), budget=st.integers(1, 80))
    def furnish(self, balance: int, budget: int) -> None:
        async def work() -> House:
            house = House(await Database.open(type(self).new_url(self.folder)), self.folder / "journal")
            await house.furnish(balance * SMALL)
            await house.budget(Scope.of_key(house.key_id), budget * SMALL)
            for slot in SLOTS:
                self.opened[slot] = await house.gate(slot, clock=self.clock, segment_bytes=1 << 20)
            return house

        self.house = self.do(work())
        self.paid_in = balance * SMALL

    @rule(
        target=holds,
        slot=st.sampled_from(SLOTS),
        prompt=st.integers(0, 300),
        output=st.integers(0, 2_000),
        streamed=st.booleans(),
        key=st.none() | st.integers(0, 3),
        body=st.sampled_from("ab"),
    )
    def hold(self, slot: int, prompt: int, output: int, streamed: bool, key: int | None, body: str) -> Any:
        options: dict[str, Any] = {} if key is None else {"idempotency_key": f"k{key}", "body_hash": body}
        ask = self.house.ask(prompt=prompt, output=output, streamed=streamed, at_ms=self.clock(), **options)
        try:
            held: Hold = self.do(self.beside_refreshes(self.opened[slot].hold(ask)))
        except InsufficientQuota:
            return multiple()
        except AlreadyAnswered as done:
            self.replayed(f"k{key}", done)
            return multiple()
        except (IdempotencyMismatch, IdempotencyExpired, IdempotencyInProgress):
            assert key is not None
            return multiple()
        assert held.output_tokens <= output
        price = held.price
        self.maximum[ask.request_id] = 10_000 * max(price.usd)
        return held

    @rule(held=holds, step=st.integers(1, 600))
    def stream(self, held: Hold, step: int) -> None:
        if held._state != "open" or held._gate not in self.opened.values() or not held.ask.streamed:
            return
        wanted = held.delivered_tokens + step
        while not held.covers(wanted) and self.do(self.beside_refreshes(held.extend(held.output_tokens))):
            pass
        delivered = min(wanted, held.output_tokens)
        if delivered > held.delivered_tokens:
            held.progress(held.ask.prompt_tokens_bound, delivered)

    @rule(held=consumes(holds), share=st.integers(0, 120), waive=st.booleans())
    def settle(self, held: Hold, share: int, waive: bool) -> None:
        """A share above 100 is an upstream that does not stop where it was told to."""
        if held._gate not in self.opened.values():
            return
        generated = max(held.delivered_tokens, held.output_tokens * share // 100)
        answer = b"answer" if held.ask.idempotency_key else None
        outcome = used(held.ask.prompt_tokens_bound, generated, answer=answer, waive="goodwill" if waive else None)
        receipt = self.do(held.settle(outcome))
        assert receipt == self.do(held.settle(used(1, 1)))
        self.receipts[receipt.request_id] = (receipt.billed_tokens, receipt.cost_usd_pico)
        self.spent += receipt.cost_usd_pico
        self.maximum.pop(receipt.request_id, None)
        if held.ask.idempotency_key:
            self.keys[held.ask.idempotency_key] = (receipt.request_id, b"answer")

    @rule(held=consumes(holds))
    def void(self, held: Hold) -> None:
        if held._gate in self.opened.values() and held._state == "open":
            self.do(held.void("refused upstream"))
            self.maximum.pop(held.ask.request_id, None)

    @rule(
        slot=st.sampled_from(SLOTS),
        prompt=st.integers(0, 300),
        output=st.integers(1, 2_000),
        streamed=st.booleans(),
        share=st.integers(0, 110),
    )
    def whole_request(self, slot: int, prompt: int, output: int, streamed: bool, share: int) -> None:
        held = self.hold(slot, prompt, output, streamed, None, "a")
        if isinstance(held, Hold):
            self.stream(held, output // 2)
            self.settle(held, share, False)

    @rule(what=st.sampled_from(range(13)), number=st.integers(0, 80))
    def upkeep(self, what: int, number: int) -> None:
        """What is no request: rarer than requests, so one rule for all of it."""
        match what:
            case 0 | 1 | 2:
                self.post((1_000, 5, 1)[number % 3])
            case 3 | 4:
                self.refresh()
            case 5:
                self.prove()
            case 6:
                self.kill_and_restart(number % 2)
            case 7:
                self.restart(number % 2)
            case 8:
                self.top_up(1 + number % 20)
            case 9:
                self.change_the_budget(number)
            case 10:
                self.change_the_price(1 + number % 9)
            case 11:
                self.turn_the_month()
            case _:
                self.close_the_month(leave_out=number % 3 == 0)

    def kill_and_restart(self, slot: int) -> None:
        async def work() -> None:
            await self.opened[slot].journal.flush()
            crash(self.house, self.opened[slot])
            self.opened[slot] = await self.house.gate(slot, clock=self.clock, segment_bytes=1 << 20)

        self.do(work())

    def restart(self, slot: int) -> None:
        async def work() -> None:
            await self.opened[slot].close(patience_s=0)
            self.house.gates.remove(self.opened[slot])
            self.opened[slot] = await self.house.gate(slot, clock=self.clock, segment_bytes=1 << 20)

        self.do(work())

    def top_up(self, units: int) -> None:
        self.do(self.house.top_up(units * SMALL))
        self.paid_in += units * SMALL
        self.refresh()

    def change_the_budget(self, budget: int) -> None:
        self.do(self.house.budget(Scope.of_key(self.house.key_id), budget * SMALL))
        self.refresh()

    def change_the_price(self, factor: int) -> None:
        async def work() -> None:
            async with self.house.db.begin() as c:
                quote = Quote.parse(MODEL, input=f"0.{factor}", output=f"0.{factor + 1}1")
                await publish_prices(c, By("test", self.clock()), [quote])

        self.shift_ms += 61_000
        self.do(work())
        self.shift_ms += 61_000
        self.refresh()

    def turn_the_month(self) -> None:
        self.shift_ms += MONTH_MS

    def close_the_month(self, leave_out: bool) -> None:
        """The month before the clock's. It may have to wait for requests that run; what is closed gets an invoice."""

        async def work() -> None:
            by = By("finance", self.clock())
            period = previous_period(period_of(by.at_ms, ZONE))
            slots = tuple(gate.leases.slot_id for gate in self.opened.values()) if leave_out else ()
            await self.house.try_to_close(period, ZONE, by, leave_out=slots)
            for gate in self.opened.values():
                await gate.refresh()
            poster = self.house.poster(clock=self.clock)
            await poster.drain()
            poster.close()
            month = await self.house.try_to_close(period, ZONE, by, leave_out=slots)
            if month.state == "closed":
                self.closed_through = max(self.closed_through, period)
                await self.finalize_through(by)

        self.do(work())

    async def finalize_through(self, by: By) -> None:
        """All closed months in order; one that is skipped because nothing was used in it may not be made later."""
        periods = sorted({row.billed_in or row.period for row in await self.house.rows()})
        for period in periods:
            if period <= self.closed_through:
                async with self.house.db.begin() as c:
                    invoice = await finalize(c, self.house.team_id, period, by)
                first = self.invoices.setdefault(period, (invoice.exact_usd_pico, invoice.merkle_root))
                assert (invoice.exact_usd_pico, invoice.merkle_root) == first

    def post(self, frames: int) -> None:
        async def work() -> None:
            poster = self.house.poster(batch_frames=frames, clock=self.clock)
            await poster.drain()
            poster.close()

        self.do(work())

    def refresh(self) -> None:
        for gate in self.opened.values():
            self.do(gate.refresh())

    def prove(self) -> None:
        report = self.do(verify(self.house.db, self.house.journal_dir))
        assert report.first_difference is None

    @invariant()
    def nothing_is_overspent(self) -> None:
        assert self.spent <= self.paid_in

    def teardown(self) -> None:
        if hasattr(self, "house"):
            self.do(self.settle_all())
        self.loop.close()
        shutil.rmtree(self.folder)

    async def settle_all(self) -> None:
        """At the end everything returns, and the books say what the receipts said."""
        house = self.house
        for gate in list(house.gates):
            await gate.close(patience_s=0)
        house.gates.clear()
        for slot in SLOTS:  # recover what was still open
            await (await house.gate(slot, clock=self.clock, segment_bytes=1 << 20)).close()
        await house.post()
        report = await verify(house.db, house.journal_dir)
        assert report.first_difference is None
        assert report.unposted == 0
        assert await house.leased() == 0
        rows = {row.request_id: row for row in await house.rows()}
        for request_id, told in self.receipts.items():
            assert (rows[request_id].billed_tokens, rows[request_id].cost_usd_pico) == told
        for request_id in rows.keys() - self.receipts.keys():
            assert rows[request_id].status == "crashed"
            assert rows[request_id].cost_usd_pico <= self.maximum[request_id]
        for period, (exact, root) in self.invoices.items():
            async with house.db.read() as c:
                month = await draft_statement(c, house.team_id, period)
            assert (month.exact_usd_pico, month.merkle_root) == (exact, root)
        debited = (await house.account()).debits_pico
        assert debited == sum(row.cost_usd_pico for row in rows.values()) <= self.paid_in
        await house.db.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], str]:
    """Makes a migrated database for each run of the machine."""
    if request.param == "postgresql":
        postgres: Postgres = request.getfixturevalue("postgres")
        template: str = request.getfixturevalue("migrated_template")
        return lambda _: postgres.url(postgres.create_database(template))
    run_apart(lambda: migrate(f"sqlite:///{tmp_path / 'template.db'}"))

    def copy(folder: Path) -> str:
        shutil.copy(tmp_path / "template.db", folder / "machine.db")
        return f"sqlite:///{folder / 'machine.db'}"

    return copy


@pytest.mark.timeout(3_600)
def test_whatever_happens_the_books_say_what_the_receipts_said(new_url: Callable[[Path], str]) -> None:
    run_state_machine_as_test(
        type("Machine", (Flow,), {"new_url": staticmethod(new_url)}),
        settings=settings(
            max_examples=int(os.environ.get("EXAMPLES", "2")),
            stateful_step_count=int(os.environ.get("STEPS", "40")),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
