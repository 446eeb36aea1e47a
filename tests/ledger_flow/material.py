"""What the tests of the flow of money share: a house with a team, a key and a price, and short ways to ask and to
look."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import select

from ledger.audit import By
from ledger.database import Database
from ledger.gate import Ask, Gate, Hold, Outcome, Spender, Tokens
from ledger.keys import KeyHasher, create_key
from ledger.money import Currency, FxRate
from ledger.months import Month, close_month
from ledger.periods import period_bounds
from ledger.posting import Poster
from ledger.publishing import Quote, seed
from ledger.quotas import Limit, Scope, replace_quotas
from ledger.schema import accounts, usage
from ledger.teams import create_team
from ledger.topups import top_up

USD = 10**12
INPUT, OUTPUT = 280_000, 420_000
"""Pico of USD a token: 0.28 and 0.42 per million."""
MODEL = "deepseek-v3.2"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def request_id(at_ms: int | None = None) -> str:
    """A UUIDv7."""
    number = (at_ms or now_ms()) << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    text = f"{number:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


@dataclass
class House:
    """A ledger with one team and one key, and as many gates as a test opens."""

    db: Database
    journal_dir: Path
    team_id: str = ""
    key_id: str = ""
    currency: Currency = "USD"
    timezone: str = "Asia/Shanghai"
    gates: list[Gate] = field(default_factory=list)

    async def furnish(self, balance_pico: int = 10 * USD, currency: Currency = "USD", at_ms: int | None = None) -> None:
        self.currency = currency
        async with self.db.begin() as c:
            by = By("test", at_ms or now_ms() - 40 * 86_400_000)
            quote = Quote.parse(MODEL, input="0.28", output="0.42", cache_read="0.028")
            await seed(c, by, [quote], FxRate.parse("USD", "CNY", "7.3"))
            team = await create_team(c, by, "team", billing_currency=currency, timezone=self.timezone)
            key = await create_key(c, by, KeyHasher(b"0123456789abcdef"), team.id)
            self.team_id, self.key_id = team.id, key.key.id
            if balance_pico:
                await top_up(c, by, team.id, balance_pico, currency=currency, reference="first")

    async def furnish_another(
        self, name: str, currency: Currency, balance_pico: int, timezone: str = "Asia/Shanghai"
    ) -> None:
        """A further team with a key; from now on `ask` is for it."""
        self.currency, self.timezone = currency, timezone
        by = By("test", now_ms())
        async with self.db.begin() as c:
            team = await create_team(c, by, name, billing_currency=currency, timezone=timezone)
            key = await create_key(c, by, KeyHasher(b"0123456789abcdef"), team.id)
            await top_up(c, by, team.id, balance_pico, currency=currency, reference=name)
        self.team_id, self.key_id = team.id, key.key.id

    async def top_up(self, amount_pico: int) -> None:
        async with self.db.begin() as c:
            await top_up(
                c, By("test", now_ms()), self.team_id, amount_pico, currency=self.currency, reference=request_id()
            )

    async def budget(self, scope: Scope, limit_pico: int, window: Any = "month", **options: Any) -> None:
        async with self.db.begin() as c:
            await replace_quotas(c, By("test", now_ms()), scope, [Limit("spend", window, limit_pico, **options)])

    async def gate(self, slot: int = 0, **options: Any) -> Gate:
        gate = await Gate.open(self.db, self.journal_dir, slot, **options)
        self.gates.append(gate)
        return gate

    def poster(self, **options: Any) -> Poster:
        return Poster(self.db, self.journal_dir, **options)

    async def post(self) -> None:
        poster = self.poster()
        await poster.drain()
        poster.close()

    async def close_month(self, period: str, zone: str = "Asia/Shanghai", at_ms: int | None = None) -> Month:
        """As `tallygate month close` beside running gates and a poster. `at_ms`: after the month by default."""
        by = By("finance", at_ms or max(now_ms(), period_bounds(period, zone)[1]))
        month = await self.try_to_close(period, zone, by)
        for gate in self.gates:
            await gate.refresh()
        await self.post()
        return month if month.state == "closed" else await self.try_to_close(period, zone, by)

    async def try_to_close(self, period: str, zone: str, by: By, **options: Any) -> Month:
        async with self.db.begin() as c:
            return await close_month(c, by, period, zone, **options)

    def ask(self, *, prompt: int = 100, output: int = 200, streamed: bool = False, **options: Any) -> Ask:
        at_ms = options.pop("at_ms", None) or now_ms()
        return Ask(
            request_id=options.pop("request_id", None) or request_id(at_ms),
            at_ms=at_ms,
            spender=Spender(self.team_id, self.key_id, options.pop("end_user", None), self.currency, self.timezone),
            model=options.pop("model", MODEL),
            prompt_tokens_bound=prompt,
            max_output_tokens=output,
            streamed=streamed,
            deployment="backend",
            **options,
        )

    async def account(self, kind: str = "prepaid") -> Any:
        async with self.db.read() as c:
            return (await c.execute(select(accounts).where(accounts.c.kind == kind))).one()

    async def account_of(self, team_id: str, kind: str = "prepaid") -> Any:
        async with self.db.read() as c:
            where = (accounts.c.kind == kind, accounts.c.team_id == team_id)
            return (await c.execute(select(accounts).where(*where))).one()

    async def rows(self) -> list[Any]:
        async with self.db.read() as c:
            return list(await c.execute(select(usage).order_by(usage.c.request_id)))

    async def leased(self) -> int:
        async with self.db.read() as c:
            return sum(int(row.leased_pico) for row in await c.execute(select(accounts)))

    async def close(self) -> None:
        for gate in self.gates:
            await gate.close(patience_s=0.1)
        await self.db.close()


def crash(house: House, gate: Gate) -> None:
    """The process is gone: nothing more is written, the lock is free."""
    if gate._ticker is not None:
        gate._ticker.cancel()
    house.gates.remove(gate)
    gate.journal.abandon()


def used(prompt: int = 100, generated: int = 200, **options: Any) -> Outcome:
    tokens = Tokens(prompt_tokens=prompt, generated_tokens=generated, **options.pop("tokens", {}))
    return Outcome(
        status=options.pop("status", "completed"),
        deployment="backend",
        draft_model="qwen-0.5b",
        tokens=tokens,
        **options,
    )


def price(prompt: int, generated: int) -> int:
    return prompt * INPUT + generated * OUTPUT


async def run(gate: Gate, ask: Ask, outcome: Outcome | None = None) -> Hold:
    """A whole request: what is asked for is used."""
    hold = await gate.hold(ask)
    await hold.settle(outcome or used(ask.prompt_tokens_bound, hold.output_tokens))
    return hold
