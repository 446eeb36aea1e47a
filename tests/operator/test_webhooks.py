"""What webhooks are told: once for each thing that happened, signed, and again until it is taken."""

from __future__ import annotations

import hashlib
import hmac
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from sqlalchemy import func, insert, select, update

from ledger import outbox, teams, topups
from ledger.audit import By
from ledger.budgets import ensure_budgets
from ledger.database import Database
from ledger.errors import InsufficientQuota
from ledger.money import PICO_PER_UNIT
from ledger.noticing import Noticing
from ledger.quotas import Limit, Scope, quotas_of, replace_quotas
from ledger.schema import accounts, rollups, webhook_deliveries, webhook_events
from policies.access import Principal
from policies.counters.memory import MemoryCounters
from policies.quotas import Limiter, Quota
from proxy import webhooks
from proxy.notices import Notices
from proxy.settings import Webhook
from proxy.webhooks import Courier, signature_headers

NOW_MS = 1_796_040_000_000
SECRET = "whsec-0123456789"


class Receiver:
    """A web server that keeps what it gets and answers with `statuses` in turn, then 204."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 204)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture
async def db(ledger_url: str) -> AsyncIterator[Database]:
    database = await Database.open(ledger_url)
    yield database
    await database.close()


async def record(db: Database, key: str, kind: outbox.EventKind = "budget") -> bool:
    async with db.begin() as c:
        return await outbox.record_event(c, kind, key, {"percent": 80}, NOW_MS)


async def events(db: Database) -> list[dict[str, Any]]:
    async with db.read() as c:
        rows = await c.execute(select(webhook_events).order_by(webhook_events.c.key))
        found = [{"kind": row.kind, **json.loads(row.payload)} for row in rows]
        return sorted(found, key=lambda event: (event.get("percent", 0), event.get("available", "")))


async def test_an_event_that_many_notice_is_delivered_once_and_signed(db: Database, receiver: Receiver) -> None:
    assert [await record(db, "quota:1:80") for _ in range(3)] == [True, False, False]
    await record(db, "low:team", "balance")
    clock = [NOW_MS]
    couriers = [Courier(db, [Webhook(url=receiver.url, secret=SECRET, events=("budget",))], clock=lambda: clock[0])] * 2
    async with httpx.AsyncClient() as client:
        for courier in couriers:
            await courier.deliver_once(client)
        clock[0] += 10 * outbox.CLAIM_MS
        await couriers[0].deliver_once(client)
    ((headers, body),) = receiver.got
    told = json.loads(body)
    assert (told["type"], told["data"], told["created_at"]) == ("budget", {"percent": 80}, "2026-11-30T12:00:00Z")
    assert headers["x-tallygate-event"] == told["id"]
    signed = headers["x-tallygate-timestamp"].encode() + b"." + body
    expected = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
    assert headers["x-tallygate-signature"] == f"v1={expected}"


async def test_what_is_refused_comes_again_later_with_the_same_id(db: Database, receiver: Receiver) -> None:
    await record(db, "a")
    receiver.statuses = [500, 302]
    clock = [NOW_MS]
    courier = Courier(db, [Webhook(url=receiver.url)], clock=lambda: clock[0])
    async with httpx.AsyncClient() as client:
        for wait_ms in (0, 1_000, outbox.pause_ms(1), outbox.pause_ms(2), outbox.LONGEST_PAUSE_MS):
            clock[0] += wait_ms
            await courier.deliver_once(client)
    assert len(receiver.got) == 3  # not after one second, and not after it was taken
    assert len({json.loads(body)["id"] for _, body in receiver.got}) == 1


async def test_a_courier_that_dies_leaves_its_deliveries_to_the_next(db: Database, receiver: Receiver) -> None:
    await record(db, "a")
    hooks = {"h": ("budget",)}
    async with db.begin() as c:
        await outbox.route(c, hooks, NOW_MS)
        assert len(await outbox.claim(c, hooks, NOW_MS)) == 1
    async with db.begin() as c:
        assert await outbox.claim(c, hooks, NOW_MS + outbox.CLAIM_MS - 1) == []
        (again,) = await outbox.claim(c, hooks, NOW_MS + outbox.CLAIM_MS)
    assert again.attempts == 2


async def test_a_claim_is_through_before_it_ends_and_a_dead_hook_keeps_places_free_for_the_others(db: Database) -> None:
    longest_ms = 1_000 * webhooks.TIMEOUT_S * outbox.BATCH / webhooks.AT_ONCE
    assert longest_ms < outbox.CLAIM_MS
    assert outbox.TRIED_AT_ONCE < webhooks.AT_ONCE
    for n in range(60):
        await record(db, str(n))
    hooks = {"dead": ("budget",), "well": ("budget",)}
    async with db.begin() as c:
        await outbox.route(c, hooks, NOW_MS)
        first = await outbox.claim(c, hooks, NOW_MS)
        for delivery in first:
            await outbox.finish(c, delivery, "silent" if delivery.hook == "dead" else None, NOW_MS)
        again = await outbox.claim(c, hooks, NOW_MS + 1)
    assert Counter(delivery.hook for delivery in first) == {"dead": outbox.BATCH // 2, "well": outbox.BATCH // 2}
    assert Counter(delivery.hook for delivery in again) == {"dead": outbox.TRIED_AT_ONCE, "well": outbox.BATCH // 2}
    assert [delivery.hook for delivery in again[: outbox.BATCH // 2]] == ["well"] * (outbox.BATCH // 2)


async def test_what_is_long_done_is_forgotten_and_the_first_hook_hears_of_no_history(db: Database) -> None:
    hooks = {"h": ("budget",)}

    async def deliver(at_ms: int) -> int:
        async with db.begin() as c:
            await outbox.route(c, hooks, at_ms)
            due = await outbox.claim(c, hooks, at_ms)
            for delivery in due:
                await outbox.finish(c, delivery, None, at_ms)
            return len(due)

    async def after_tidying(at_ms: int, any_hooks: bool) -> list[int]:
        async with db.begin() as c:
            await outbox.tidy(c, at_ms, any_hooks=any_hooks)
            return [
                (await c.execute(select(func.count()).select_from(table))).scalar_one()
                for table in (webhook_events, webhook_deliveries)
            ]

    await record(db, "before there was a hook")
    assert await after_tidying(NOW_MS + 2 * outbox.UNWANTED_AFTER_MS, any_hooks=False) == [1, 0]
    assert await deliver(NOW_MS) == 0
    await record(db, "while the poster was away")
    assert await after_tidying(NOW_MS + 2 * outbox.UNWANTED_AFTER_MS, any_hooks=True) == [2, 0]
    assert await deliver(NOW_MS) == 1
    assert await after_tidying(NOW_MS + outbox.DELIVERIES_KEPT_MS, any_hooks=True) == [2, 1]
    assert await after_tidying(NOW_MS + outbox.DELIVERIES_KEPT_MS + 1, any_hooks=True) == [2, 0]
    assert not await record(db, "while the poster was away")  # still known
    assert await after_tidying(NOW_MS + outbox.EVENTS_KEPT_MS + 1, any_hooks=True) == [0, 0]


async def test_what_nobody_ever_takes_is_given_up(db: Database) -> None:
    await record(db, "a")
    hook = Webhook(url="http://127.0.0.1:9/nobody")
    clock = [NOW_MS]
    courier = Courier(db, [hook], clock=lambda: clock[0])
    async with httpx.AsyncClient() as client:
        await courier.deliver_once(client)
        async with db.begin() as c:
            await c.execute(update(webhook_deliveries).values(attempts=outbox.GIVE_UP_AFTER - 1, next_ms=NOW_MS))
        await courier.deliver_once(client)
    async with db.read() as c:
        row = (await c.execute(select(webhook_deliveries))).one()
    assert (row.state, row.attempts) == ("given_up", outbox.GIVE_UP_AFTER)
    assert "Connect" in row.error


def test_a_webhook_without_a_secret_is_not_signed() -> None:
    assert signature_headers(None, 1, b"{}") == {"x-tallygate-timestamp": "1"}


async def test_limits_that_fill_up_are_told_once_by_all_workers_together(db: Database) -> None:
    quota = Quota("q1", "team", "requests", "month", 10, hard=False)
    who = Principal("team", "key", "name", "USD", "UTC", quotas=(quota,))
    for _ in range(2):  # two workers, each with the whole count
        limiter = Limiter(MemoryCounters(wall=lambda: NOW_MS))
        notices = Notices(limiter)
        for _ in range(12):
            await limiter.admit(who, "m", None, 1)
        await notices.write(db)
        await notices.write(db)
    told = await events(db)
    assert [(event["percent"], event["used"], event["limit"]) for event in told] == [
        (50, 5, 10),
        (80, 8, 10),
        (100, 10, 10),
    ]
    assert {event["team_id"] for event in told} == {"team"}
    assert {event["hard"] for event in told} == {False}


async def furnish(db: Database) -> str:
    by = By("test", NOW_MS)
    async with db.begin() as c:
        team = await teams.create_team(c, by, "acme", timezone="Asia/Shanghai")
        await topups.top_up(c, by, team.id, 100 * PICO_PER_UNIT, currency="USD", reference="r1")
    return team.id


async def spend(db: Database, team_id: str, usd: int) -> None:
    """As posting does: the prepaid account, every budget, and the rollups."""
    pico = usd * PICO_PER_UNIT
    mine = (accounts.c.team_id == team_id) & accounts.c.kind.in_(("prepaid", "budget"))
    sums = {c.name: 0 for c in rollups.c if c.name not in ("hour_ms", "period", "slot_id") and not c.primary_key}
    keys = {"hour_ms": NOW_MS - NOW_MS % 3_600_000, "period": "2026-11", "team_id": team_id, "key_id": "k"}
    names = {"model": "m", "deployment": "d", "price_version": "p", "slot_id": f"s{usd}-{id(object())}"}
    async with db.begin() as c:
        await c.execute(update(accounts).where(mine).values(debits_pico=accounts.c.debits_pico + pico))
        await c.execute(insert(rollups).values(**keys, **names, **sums | {"cost_usd_pico": pico, "requests": 1}))


@pytest.mark.parametrize("hard", [True, False])
async def test_budgets_tell_at_50_80_and_100_percent_and_never_twice(db: Database, hard: bool) -> None:
    team_id = await furnish(db)
    by = By("test", NOW_MS)
    async with db.begin() as c:
        limit = Limit("spend", "month", 20 * PICO_PER_UNIT, hard=hard)
        await replace_quotas(c, by, Scope.of_team(team_id), [limit])
        await ensure_budgets(c, await quotas_of(c, Scope.of_team(team_id)), NOW_MS, "Asia/Shanghai")
    seen = []
    for usd in (9, 2, 6, 3):
        await spend(db, team_id, usd)
        seen.append([await Noticing(db).look(NOW_MS), await Noticing(db).look(NOW_MS + 1)])
    assert seen == [[0, 0], [1, 0], [1, 0], [1, 0]]
    told = await events(db)
    assert [event["percent"] for event in told] == [50, 80, 100]
    assert {(event["limit"], event["currency"], event["hard"]) for event in told} == {("20", "USD", hard)}


async def test_a_low_balance_is_told_once_for_each_topup(db: Database) -> None:
    team_id = await furnish(db)
    noticing = Noticing(db)
    await spend(db, team_id, 80)
    assert await noticing.look(NOW_MS) == 0
    await spend(db, team_id, 1)
    assert [await noticing.look(NOW_MS), await Noticing(db).look(NOW_MS)] == [1, 0]
    async with db.begin() as c:
        by = By("test", NOW_MS + 1)
        await topups.top_up(c, by, team_id, 50 * PICO_PER_UNIT, currency="USD", reference="r2")
    assert await noticing.look(NOW_MS) == 0
    await spend(db, team_id, 60)
    assert await noticing.look(NOW_MS) == 1
    assert [(event["state"], event["available"]) for event in await events(db)] == [("low", "19"), ("low", "9")]


async def test_a_refusal_for_want_of_money_is_told_once(db: Database) -> None:
    team_id = await furnish(db)
    who = Principal(team_id, "key", "name", "USD", "UTC")
    for _ in range(2):
        notices = Notices(Limiter(MemoryCounters()))
        for _ in range(3):
            notices.refused(who, InsufficientQuota("the balance is used up", "prepaid"))
        await notices.write(db)
    (told,) = await events(db)
    assert (told["kind"], told["state"], told["message"]) == ("balance", "exhausted", "the balance is used up")
