"""The plans that a worker keeps in memory, by key, model and (where it matters) end user."""

from __future__ import annotations

import asyncio

from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.database import Database
from ledger.errors import LedgerUnavailable
from ledger.leases import Leases
from ledger.plans import Plan, has_end_user_budgets, make_plan
from ledger.prices import PriceBook
from ledger.requests import Ask
from ledger.sealing import BillingMonths

MAX_PLANS = 50_000
Key = tuple[str, str, str | None]


class PlanCache:
    """`find` needs no SQL, `make` does. `book` may be replaced when prices change; then forget all plans."""

    def __init__(self, db: Database, leases: Leases, months: BillingMonths, book: PriceBook) -> None:
        self.book = book
        self._months = months
        self._db = db
        self._leases = leases
        self._plans: dict[Key, Plan] = {}
        self._making: dict[Key, asyncio.Task[Plan]] = {}
        self._known_teams: set[str] = set()
        self._teams_with_user_budgets: set[str] = set()
        self._forgotten = 0
        """How often something was forgotten: what was read before the last time may be out of date."""

    def find(self, ask: Ask) -> Plan | None:
        """The plan in force at `ask.at_ms`, if it is here."""
        plan = self._plans.get(self._key(ask))
        return plan if plan is not None and plan.from_ms <= ask.at_ms < plan.until_ms else None

    async def make(self, ask: Ask) -> Plan:
        """Those who need the same plan at the same time share one trip to SQL. PriceNotFound, LedgerUnavailable."""
        spender = ask.spender
        key = (spender.key_id, ask.model, spender.end_user)
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = asyncio.get_running_loop().create_task(self._make(ask))
            making.add_done_callback(lambda done: self._made(key, done))
        plan = await asyncio.shield(making)
        if plan.from_ms <= ask.at_ms < plan.until_ms:
            return plan
        return await self._make(ask)  # the other one's was for the other side of a month or a price change

    def forget(self, team_ids: set[str | None]) -> None:
        """Something of these teams changed; None: something of everybody."""
        self._forgotten += 1
        self._making.clear()  # who asks from now on reads anew
        if None in team_ids:
            self._plans.clear()
            self._known_teams.clear()
            self._teams_with_user_budgets.clear()
            return
        self._known_teams.difference_update(team_ids)
        self._teams_with_user_budgets.difference_update(team_ids)
        for key in [key for key, plan in self._plans.items() if plan.team_id in team_ids]:
            del self._plans[key]

    def _made(self, key: Key, done: asyncio.Task[Plan]) -> None:
        if self._making.get(key) is done:
            del self._making[key]

    def _key(self, ask: Ask) -> Key:
        spender = ask.spender
        end_user = spender.end_user if spender.team_id in self._teams_with_user_budgets else None
        return spender.key_id, ask.model, end_user

    async def _make(self, ask: Ask) -> Plan:
        """Reads; writes only where a budget begins a new period."""
        forgotten = self._forgotten
        try:
            async with self._db.read() as c:
                plan = await self._from_sql(c, ask, writing=False)
            if plan is None:
                async with self._db.begin() as c:
                    plan = await self._from_sql(c, ask, writing=True)
        except LedgerUnavailable:
            self._leases.failed()
            raise
        assert plan is not None
        if (
            forgotten == self._forgotten
        ):  # else a change overtook the reading: good for this request, not for later ones
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[self._key(ask)] = plan
        return plan

    async def _from_sql(self, c: AsyncConnection, ask: Ask, *, writing: bool) -> Plan | None:
        team_id = ask.spender.team_id
        per_end_user = team_id in self._teams_with_user_budgets
        if team_id not in self._known_teams:
            forgotten = self._forgotten
            per_end_user = await has_end_user_budgets(c, team_id)
            if forgotten == self._forgotten:
                self._known_teams.add(team_id)
                if per_end_user:
                    self._teams_with_user_budgets.add(team_id)
        book, leases, months = self.book, self._leases, self._months
        return await make_plan(
            c, leases, months, book, ask.spender, ask.model, ask.at_ms, per_end_user=per_end_user, writing=writing
        )
