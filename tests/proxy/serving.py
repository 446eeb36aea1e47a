"""A gateway under test: a real uvicorn on a real socket, in a thread of its own, over a ledger of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import uvicorn
import yaml
from sqlalchemy import select

from ledger import keys, teams, topups
from ledger.audit import By
from ledger.database import Database
from ledger.keys import KeyHasher
from ledger.money import PICO_PER_UNIT, Currency
from ledger.schema import usage
from proxy.app import build_app
from proxy.http_server import GatewayProtocol
from proxy.preflight import check_directories
from proxy.secrets import key_secret
from proxy.seeding import prepare
from proxy.settings import Settings, load_settings
from tests.services import wait_until

PRICE = {"currency": "USD", "input": "0.28", "cache_read": "0.028", "output": "0.42"}


def configuration(upstreams: dict[str, str], **models: Any) -> dict[str, Any]:
    """upstreams: name → base URL. models: name → what `models:` says, or nothing for one deployment on the first."""
    first = next(iter(upstreams))
    default = {"deployments": [{"to": first, "model": "gpt-4"}], "price": PRICE}
    return {
        "admin_token": "t" * 32,
        "upstreams": {name: {"base_url": url, "api_key": "sk-upstream"} for name, url in upstreams.items()},
        "models": {name: {**default, **said} for name, said in (models or {"m": {}}).items()},
    }


class Gateway:
    """Started by entering it. `client` is the real SDK with the demo team's key."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        path = folder / "tallygate.yaml"
        path.write_text(yaml.safe_dump(config))
        self.settings: Settings = load_settings(path, folder)
        self.folder = folder
        check_directories(self.settings)
        first = asyncio.run(prepare(self.settings))
        assert first.demo_key is not None
        self.key = first.demo_key
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named: asyncio then
        self._socket.bind(("127.0.0.1", 0))  # switches Nagle's algorithm off
        self.port: int = self._socket.getsockname()[1]
        self.app = build_app(self.settings, slot=0, embed_poster=True)
        config = uvicorn.Config(
            self.app, http=GatewayProtocol, log_config=None, proxy_headers=False, timeout_graceful_shutdown=3
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive(), what="the gateway")
        assert self._server.started
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=key or self.key, **{"max_retries": 0, **options})

    def http(self, key: str | None = None) -> httpx.Client:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=30)

    def ledger(self, work: Any) -> Any:
        """`await work(c)` in a write transaction of its own."""

        async def act() -> Any:
            db = await Database.open(self.settings.storage.database)
            try:
                async with db.begin() as c:
                    return await work(c)
            finally:
                await db.close()

        return asyncio.run(act())

    def new_key(self, *, money: str = "10", currency: Currency = "USD", **options: Any) -> str:
        """A key of a new team with so much money."""
        hasher = KeyHasher(key_secret(self.settings))
        by = By("test", time.time_ns() // 1_000_000)

        async def make(c: Any) -> str:
            team = await teams.create_team(c, by, "team", billing_currency=currency)
            pico = int(float(money) * PICO_PER_UNIT)
            if pico:
                await topups.top_up(c, by, team.id, pico, currency=currency, reference=team.id)
            return (await keys.create_key(c, by, hasher, team.id, **options)).secret

        secret: str = self.ledger(make)
        return secret

    def row(self, request_id: str) -> dict[str, Any]:
        """The usage row of a request, once it is posted."""
        rows = self.rows(request_id)
        deadline = time.monotonic() + 30
        while not rows:
            assert time.monotonic() < deadline, f"no row for {request_id}"
            time.sleep(0.05)
            rows = self.rows(request_id)
        assert len(rows) == 1
        return rows[0]

    def rows(self, request_id: str | None = None) -> list[dict[str, Any]]:
        async def read(c: Any) -> list[dict[str, Any]]:
            query = select(usage)
            if request_id is not None:
                query = query.where(usage.c.request_id == request_id)
            return [dict(row._mapping) for row in await c.execute(query)]

        found: list[dict[str, Any]] = self.ledger(read)
        return found
