"""What is measured side by side: the upstream itself, the bare forward, and TallyGate with everything on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from benchmarks.load import request_bytes
from benchmarks.processes import GATEWAY_CORE, LOAD_CORE, Process, free_port
from benchmarks.upstream import QUIET_MODEL
from ledger.audit import By
from ledger.database import Database
from ledger.keys import KeyHasher, create_key
from ledger.money import PICO_PER_UNIT
from ledger.quotas import Limit, Scope, replace_quotas
from ledger.teams import create_team
from ledger.topups import top_up
from proxy.preflight import check_directories
from proxy.secrets import key_secret
from proxy.seeding import prepare
from proxy.settings import Settings, load_settings

MODEL = "bench"
PRICE = {"currency": "USD", "input": "0.28", "cache_read": "0.028", "output": "0.42"}


@dataclass(slots=True)
class Subject:
    """Something that answers on `port`; `process` is what is charged for it, `verify` proves its ledger."""

    name: str
    port: int
    key: str
    process: Process
    facts: dict[str, Any] = field(default_factory=dict)
    commands: Commands | None = None
    headers: tuple[str, ...] = ()
    """Sent with each request, beside the usual ones."""
    neighbours: dict[str, int] = field(default_factory=dict)
    """TCP ports of what it talks to."""
    is_peer: bool = False
    counters: str = "memory"
    on_one_core: bool = False

    def request(self, body: bytes) -> bytes:
        return request_bytes(self.port, self.key, body, self.headers)


class Commands:
    """`tallygate …` on one configuration and data directory."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.options = ["--config", str(config), "--data-dir", str(folder)]

    def json(self, *arguments: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-m", "proxy.cli", *arguments, *self.options, "--json"], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"tallygate {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout)


@contextmanager
def upstream(folder: Path, *options: str) -> Iterator[Subject]:
    port = free_port()
    arguments = ["-m", "benchmarks.upstream", "--port", str(port), *options]
    with Process(arguments, LOAD_CORE, folder / "upstream.log", port) as process:
        yield Subject("direct", port, "none", process)


@contextmanager
def floor(folder: Path, upstream_port: int) -> Iterator[Subject]:
    port = free_port()
    arguments = ["-m", "benchmarks.floor", "--port", str(port), "--upstream", f"http://127.0.0.1:{upstream_port}/v1"]
    with Process(arguments, GATEWAY_CORE, folder / "floor.log", port) as process:
        yield Subject("floor", port, "none", process)


@contextmanager
def tallygate(
    folder: Path,
    upstream_port: int,
    *,
    name: str,
    database: str | None = None,
    counters: str = "memory",
    poster_core: int = LOAD_CORE,
) -> Iterator[Subject]:
    """A gateway worker and its poster: a key, three limits, a balance and two budgets, the journal synced."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "tallygate.yaml"
    config.write_text(yaml.safe_dump(configuration(upstream_port, database, counters)))
    commands = Commands(folder, config)
    settings = load_settings(config, folder)
    check_directories(settings)
    asyncio.run(prepare(settings))
    key = asyncio.run(furnish(settings))
    port = free_port()
    gateway = ["-m", "proxy.cli", "gateway", "--port", str(port), *commands.options]
    poster = ["-m", "proxy.cli", "poster", *commands.options]
    with ExitStack() as stack:
        worker = stack.enter_context(Process(gateway, GATEWAY_CORE, folder / "gateway.log", port))
        facts: dict[str, Any] = {"ready_s": round(worker.ready_s, 2), "memory_mb": round(worker.memory_mb())}
        stack.enter_context(Process(poster, poster_core, folder / "poster.log"))
        neighbours = {"upstream": upstream_port}
        if database is not None:
            neighbours |= {"SQL": urlsplit(database).port or 5432}
        if counters != "memory":
            neighbours |= {"counters": urlsplit(counters).port or 6379}
        yield Subject(
            name,
            port,
            key,
            worker,
            facts,
            commands,
            neighbours=neighbours,
            counters=counters,
            on_one_core=poster_core == GATEWAY_CORE,
        )


def configuration(upstream_port: int, database: str | None, counters: str) -> dict[str, Any]:
    storage = {"counters": counters, **({"database": database} if database else {})}
    return {
        "storage": storage,
        "admin_token": "benchmark-admin-token-0123456789",
        "upstreams": {"provider": {"base_url": f"http://127.0.0.1:{upstream_port}/v1", "max_concurrency": 2_000}},
        "models": {name: {"deployments": [{"to": "provider"}], "price": PRICE} for name in (MODEL, QUIET_MODEL)},
    }


async def furnish(settings: Settings) -> str:
    """Everything on: requests and tokens a minute, concurrency, a balance, a budget for the team and for the key.

    Returns the key."""
    by, plenty = By("benchmark", time.time_ns() // 1_000_000), 500_000 * PICO_PER_UNIT
    db = await Database.open(settings.storage.database, pool_size=1)
    try:
        async with db.begin() as c:
            team = await create_team(c, by, "bench")
            await top_up(c, by, team.id, 2 * plenty, currency="USD", reference="bench")
            key = await create_key(c, by, KeyHasher(key_secret(settings)), team.id)
            spend = Limit("spend", "month", plenty, currency="USD")
            await replace_quotas(c, by, Scope.of_team(team.id), [spend, Limit("concurrency", None, 100_000)])
            counted = [Limit("requests", "minute", 10**8), Limit("tokens", "minute", 10**11)]
            await replace_quotas(c, by, Scope.of_key(key.key.id), [*counted, spend])
    finally:
        await db.close()
    return key.secret
