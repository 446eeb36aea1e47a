"""The books against a plain Python model, step by step; at the end the proof must pass."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ledger.accounts import balance
from ledger.audit import By
from ledger.database import Database
from ledger.errors import Conflict, Invalid, PriceNotFound
from ledger.money import FxRate
from ledger.prices import PriceBook
from ledger.publishing import LEAD_MS, Quote, publish_fx, publish_prices, seed
from ledger.teams import TeamChange, create_team, update_team
from ledger.topups import expire_grants, grant, refund, top_up
from ledger.verify import verify
from tests.ledger_books.conftest import NOW_MS

T = TypeVar("T")
amounts = st.integers(1, 10**15)
references = st.sampled_from(["a", "b", "c", "d"])
models = st.sampled_from(["m", "n"])


class Books(RuleBasedStateMachine):
    """Money of one team, and prices of two models, while a clock moves on."""

    template: ClassVar[Path]
    directory: ClassVar[Path]
    runs: ClassVar[int] = 0

    @initialize()
    def open(self) -> None:
        Books.runs += 1
        path = self.directory / f"{Books.runs}.db"
        shutil.copy(self.template, path)
        self.loop = asyncio.new_event_loop()
        self.db = self.run(Database.open(f"sqlite:///{path}", pool_size=2))
        self.now = NOW_MS
        self.topups: dict[str, int] = {}
        self.refunds: dict[str, int] = {}
        self.grants: dict[str, tuple[int, int]] = {}
        self.limit = 0
        self.rate = Fraction(73, 10)
        self.prices: dict[str, int] = {"m": 1000}
        self.versions: list[tuple[int, dict[str, tuple[int, int]]]] = []
        self.write(lambda c: create_team(c, self.by, "t", team_id="t", timezone="UTC"))
        self.write(lambda c: seed(c, self.by, [Quote("m", 1000, 1000)], FxRate("USD", "CNY", self.rate)))
        self.remember(self.now)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def write(self, act: Any) -> Any:
        async def within() -> Any:
            async with self.db.begin() as c:
                return await act(c)

        return self.run(within())

    @property
    def by(self) -> By:
        return By("model", self.now)

    def remember(self, start: int) -> None:
        self.versions.append((start, {m: (usd, round(usd * self.rate)) for m, usd in self.prices.items()}))

    @property
    def prepaid(self) -> int:
        return sum(self.topups.values()) - sum(self.refunds.values())

    @rule(ms=st.integers(1, 2 * LEAD_MS))
    def time_passes(self, ms: int) -> None:
        self.now += ms

    @rule(reference=references, amount=amounts)
    def top_up(self, reference: str, amount: int) -> None:
        act = lambda c: top_up(c, self.by, "t", amount, currency="USD", reference=reference)  # noqa: E731
        if self.topups.get(reference, amount) != amount:
            with pytest.raises(Conflict):
                self.write(act)
        else:
            self.write(act)
            self.topups[reference] = amount

    @rule(reference=references, amount=amounts)
    def refund(self, reference: str, amount: int) -> None:
        act = lambda c: refund(c, self.by, "t", amount, currency="USD", reference=reference)  # noqa: E731
        known = self.refunds.get(reference)
        if known != amount and (known is not None or amount > self.prepaid):
            with pytest.raises(Conflict):
                self.write(act)
        else:
            self.write(act)
            self.refunds[reference] = amount

    @rule(reference=references, amount=amounts, lasts_ms=st.integers(1, 10 * LEAD_MS))
    def grant(self, reference: str, amount: int, lasts_ms: int) -> None:
        given = self.grants.setdefault(reference, (amount, self.now + lasts_ms))
        if given == (amount, self.now + lasts_ms):
            self.write(
                lambda c: grant(
                    c, self.by, "t", amount, currency="USD", reference=reference, expires_at_ms=self.now + lasts_ms
                )
            )

    @rule()
    def expire(self) -> None:
        self.write(lambda c: expire_grants(c, self.by))

    @rule(limit=st.integers(0, 10**15))
    def set_credit_limit(self, limit: int) -> None:
        self.write(lambda c: update_team(c, self.by, "t", TeamChange(credit_limit_pico=limit)))
        self.limit = limit

    @rule(model=models, price=st.integers(0, 10**6), ahead_ms=st.integers(-1, 2 * LEAD_MS))
    def publish_price(self, model: str, price: int, ahead_ms: int) -> None:
        start = self.now + LEAD_MS + ahead_ms
        quotes = [Quote(model, price, price)]
        act = lambda c: publish_prices(c, self.by, quotes, effective_from_ms=start)  # noqa: E731
        last = self.versions[-1][0]
        if start == last and self.prices.get(model) == price:
            return
        if ahead_ms < 0 or start <= last:
            with pytest.raises((Invalid, Conflict)):
                self.write(act)
        else:
            self.write(act)
            self.prices[model] = price
            self.remember(start)

    @rule(rate=st.fractions(min_value=Fraction(1, 10), max_value=20, max_denominator=1000))
    def publish_rate(self, rate: Fraction) -> None:
        version = self.write(lambda c: publish_fx(c, self.by, FxRate("USD", "CNY", rate)))
        self.rate = rate
        self.remember(version.effective_from_ms)

    @precondition(lambda self: "n" not in self.prices)
    @rule(price=st.integers(0, 10**6))
    def configure_another_model(self, price: int) -> None:
        quotes = [Quote("m", 5, 5), Quote("n", price, price)]
        version = self.write(lambda c: seed(c, self.by, quotes, FxRate("USD", "CNY", Fraction(1))))
        self.prices["n"] = price
        self.remember(version.effective_from_ms)

    @invariant()
    def the_balance_is_the_models(self) -> None:
        async def read() -> Any:
            async with self.db.read() as c:
                return await balance(c, "t", self.now), await PriceBook.load(c, self.now)

        now, book = self.run(read())
        granted = sum(amount for amount, until in self.grants.values() if until > self.now)
        assert (now.prepaid_pico, now.granted_pico, now.credit_limit_pico) == (self.prepaid, granted, self.limit)
        assert now.available_pico == self.prepaid + granted + self.limit
        for at_ms in (self.now, self.now + LEAD_MS):
            table = next(table for start, table in reversed(self.versions) if start <= at_ms)
            for model in ("m", "n"):
                try:
                    price = book.pin(model, at_ms, "t")
                except PriceNotFound:
                    assert model not in table
                else:
                    assert (price.usd.output_text, price.cny.output_text) == table[model]

    def teardown(self) -> None:
        if hasattr(self, "db"):
            report = self.run(verify(self.db, None))
            self.run(self.db.close())
            self.loop.close()
            assert report.ok, report.first_difference


def test_any_sequence_of_acts_gives_the_balances_and_prices_of_the_model(
    tmp_path: Path, ledger_sqlite_url: str
) -> None:
    Books.template = Path(ledger_sqlite_url.removeprefix("sqlite:///"))
    Books.directory = tmp_path
    run_state_machine_as_test(
        Books,
        settings=settings(
            max_examples=12,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
