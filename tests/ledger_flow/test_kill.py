"""kill −9 at random times under load: real gateways and posters, 16 clients, and the upstream's own log as the oracle.

`KILLS=200` or `SECONDS=600` (`make soak`) makes it the long one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import select

from ledger.audit import By
from ledger.database import Database
from ledger.keys import KeyHasher, create_key
from ledger.money import format_amount
from ledger.quotas import Limit, Scope, replace_quotas
from ledger.schema import accounts, usage
from ledger.teams import create_team
from ledger.topups import top_up
from ledger.verify import verify
from proxy.preflight import check_directories
from proxy.secrets import key_secret
from proxy.seeding import prepare
from proxy.settings import Settings, load_settings
from tests.conftest import run_apart
from tests.ledger_flow.clients import Told, ask_for_ever
from tests.ledger_flow.killable import GatewayWorker, Killable, poster
from tests.ledger_flow.material import USD, now_ms
from tests.upstream.process import FakeUpstream

KILLS = int(os.environ.get("KILLS", "4"))
SECONDS = float(os.environ.get("SECONDS", "0"))
CLIENTS = 16
SLOTS = 2
TOP_UP = USD // 200
"""What is paid in at each kill: about what is spent meanwhile, so that money is short most of the time."""
STREAMED, PLAIN = "streams", "plain"


@pytest.mark.soak
@pytest.mark.timeout(60 + 30 * KILLS + 2 * SECONDS)
async def test_killed_at_random_times_nothing_seen_is_lost_doubled_or_invented(
    ledger_url: str, tmp_path: Path, upstream: FakeUpstream
) -> None:
    config = tmp_path / "tallygate.yaml"
    config.write_text(yaml.safe_dump(_configuration(ledger_url, upstream)))
    settings = load_settings(config, tmp_path)
    check_directories(settings)
    await prepare(settings)
    db = await Database.open(settings.storage.database)
    team_id, key = await _furnish(db, settings)
    gateways = [GatewayWorker(config, tmp_path, slot) for slot in range(SLOTS)]
    post, told = poster(config, tmp_path), Told()
    for process in (*gateways, post):
        process.start()
    for gateway in gateways:
        await gateway.ready()
    async with _load([gateway.port for gateway in gateways], key, told):
        started = await _kill_again_and_again(db, settings, team_id, gateways, post)
    await _come_to_rest(gateways, post)
    report = await verify(db, settings.storage.journal_path)
    assert (report.first_difference, report.unposted) == (None, 0)
    found = await _compare(db, told, upstream)
    kills = {process.name: process.kills for process in (*gateways, post)}
    print(f"{db.dialect}: {sum(kills.values())} kills {kills}; restart {max(started):.1f} s at most; {found}")
    assert await _leased(db) == 0
    await db.close()


async def _kill_again_and_again(
    db: Database, settings: Settings, team_id: str, gateways: list[GatewayWorker], post: Killable
) -> list[float]:
    """Each time: one process dies at a random moment and is started again; then the proof must hold."""
    chance, started = random.Random(20_261_130), [0.0]
    until, number = time.monotonic() + SECONDS, 0
    while number < KILLS or time.monotonic() < until:
        await asyncio.sleep(chance.uniform(0.1, 1.5))
        victim = chance.choice([*gateways, *gateways, post])
        victim.kill()
        victim.start()
        if isinstance(victim, GatewayWorker):
            started.append(await victim.ready())
        report = await asyncio.to_thread(_verify, settings)
        number += 1
        assert report.first_difference is None, f"after kill {number}, of {victim.name}"
        await _require_nothing_overspent(db)
        async with db.begin() as c:
            await top_up(c, By("test", now_ms()), team_id, TOP_UP, currency="USD", reference=f"kill {number}")
    return started


async def _come_to_rest(gateways: list[GatewayWorker], post: Killable) -> None:
    """Everybody dies once more; then a clean start and a clean end bring in all that was left."""
    for gateway in gateways:
        gateway.kill()
    for gateway in gateways:
        gateway.start()
        await gateway.ready()
    for gateway in gateways:
        await asyncio.to_thread(gateway.stop)
    await asyncio.to_thread(post.stop)


async def _compare(db: Database, told: Told, upstream: FakeUpstream) -> dict[str, Any]:
    """Clients, the upstream's log and the ledger tell one story; returns it in numbers."""
    produced = {entry["id"]: entry for entry in upstream.entries()}
    columns = ("request_id", "status", "prompt_tokens", "generated_tokens", "billed_tokens", "cost_usd_pico")
    async with db.read() as c:
        rows = (await c.execute(select(*(usage.c[name] for name in (*columns, "estimated"))))).all()
    times = Counter(str(row.request_id) for row in rows)
    by_id = {str(row.request_id): row for row in rows}
    lost = [seen for seen in told.usages if seen.request_id not in by_id]
    doubled = [request_id for request_id, count in times.items() if count > 1]
    left = {request_id for request_id, row in by_id.items() if row.status == "cancelled" and not row.billed_tokens}
    invented = [request_id for request_id in times if request_id not in produced and request_id not in left]
    assert (lost, doubled, invented) == ([], [], [])
    for seen in told.usages:
        row, entry = by_id[seen.request_id], produced[seen.request_id]
        was_told = (seen.prompt_tokens, seen.generated_tokens, seen.billed_tokens, seen.cost_usd)
        posted = (row.prompt_tokens, row.generated_tokens, row.billed_tokens, format_amount(row.cost_usd_pico))
        assert was_told == posted
        if not row.estimated:  # else the money ended before the answer did, and what had been delivered was counted
            reported = entry["reported"]
            assert (reported["prompt_tokens"], reported["completion_tokens"]) == was_told[:2]
    for request_id in by_id.keys() & produced.keys():  # who left early may have left before the provider knew
        row, entry = by_id[request_id], produced[request_id]
        assert row.generated_tokens <= entry["produced_tokens"], request_id
        assert row.estimated or row.prompt_tokens == entry["prompt_tokens"], request_id
    by_status = Counter(row.status for row in rows)
    assert len(told.usages) >= 5 * KILLS
    return {
        "usages seen": len(told.usages),
        "lost": len(lost),
        "doubled": len(doubled),
        "invented": len(invented),
        "requests in the ledger": len(rows),
        **by_status,
        "answers cut by a kill": told.broken + told.unanswered,
        "statuses": told.statuses,
    }


async def _require_nothing_overspent(db: Database) -> None:
    async with db.read() as c:
        for row in await c.execute(select(accounts)):
            assert 0 <= row.debits_pico + row.leased_pico <= row.credits_pico, row.id


async def _leased(db: Database) -> int:
    async with db.read() as c:
        return sum(int(row.leased_pico) for row in await c.execute(select(accounts)))


def _verify(settings: Settings) -> Any:
    """In a loop of its own: the clients go on meanwhile."""

    async def prove() -> Any:
        db = await Database.open(settings.storage.database)
        try:
            return await verify(db, settings.storage.journal_path)
        finally:
            await db.close()

    return run_apart(prove)


@asynccontextmanager
async def _load(ports: list[int], key: str, told: Told) -> AsyncIterator[None]:
    models = {True: STREAMED, False: PLAIN}
    tasks = [asyncio.create_task(ask_for_ever(ports, key, models, told, number)) for number in range(CLIENTS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(done, asyncio.CancelledError) and isinstance(done, BaseException):
                raise done


async def _furnish(db: Database, settings: Settings) -> tuple[str, str]:
    by = By("test", now_ms())
    async with db.begin() as c:
        team = await create_team(c, by, "killed")
        await top_up(c, by, team.id, TOP_UP, currency="USD", reference="first")
        new = await create_key(c, by, KeyHasher(key_secret(settings)), team.id)
        await replace_quotas(c, by, Scope.of_key(new.key.id), [Limit("spend", "month", 100 * USD)])
    return team.id, new.secret


def _configuration(database: str, upstream: FakeUpstream) -> dict[str, Any]:
    paces = {STREAMED: {"tokens": 400, "chunk_delay_ms": 3}, PLAIN: {"tokens": 400, "chunk_delay_ms": 1}}
    price = {"currency": "USD", "input": "0.28", "output": "0.42"}
    return {
        "admin_token": "t" * 32,
        "storage": {"database": database},
        "upstreams": {"legacy": {"base_url": upstream.base_url, "api_key": "sk-upstream"}},
        "models": {
            name: {"deployments": [{"to": "legacy", "model": f"gpt-4@{json.dumps(pace)}"}], "price": price}
            for name, pace in paces.items()
        },
    }
