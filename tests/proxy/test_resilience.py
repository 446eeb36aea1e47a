"""Outages around a worker: a quiet provider, a database that is away at the start or goes away, a loading backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import Postgres, free_port, wait_until
from tests.upstream.process import FakeUpstream

HELLO: Any = [{"role": "user", "content": "hi"}]


def test_a_quiet_stream_is_kept_alive_by_comments(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.relay.QUIET_S", 0.2)
    with gateway.http() as http:
        answer = http.post("/chat/completions", json={"model": "m@stall", "messages": HELLO, "stream": True})
    assert answer.text.count(": keep-alive\n\n") >= 2  # five in the second that it waits, on a machine of its own
    assert '"upstream_timeout"' in answer.text


def ready(gateway: Gateway) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{gateway.port}/health/ready")


def test_a_database_away_at_the_start_is_said_and_healed(
    tmp_path: Path, upstream: FakeUpstream, postgres_server: Callable[..., Postgres]
) -> None:
    server = postgres_server()
    config = configuration({"legacy": upstream.base_url}) | {"storage": {"database": server.url()}}
    gateway = Gateway(tmp_path, config)
    server.stop()
    with gateway:
        with pytest.raises(openai.InternalServerError) as caught:
            gateway.client().chat.completions.create(model="m", messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (503, "ledger_unavailable")
        assert caught.value.response.headers["x-should-retry"] == "true"
        assert ready(gateway).status_code == 503
        assert ready(gateway).json()["checks"]["database"]["reasons"]
        assert httpx.get(f"http://127.0.0.1:{gateway.port}/health/live").status_code == 200
        server.start()
        wait_until(lambda: ready(gateway).status_code == 200, 20, "readiness")
        assert gateway.client().chat.completions.create(model="m", messages=HELLO).choices


def test_a_warm_key_is_served_while_the_database_is_away(
    tmp_path: Path, upstream: FakeUpstream, postgres_server: Callable[..., Postgres]
) -> None:
    server = postgres_server()
    config = configuration({"legacy": upstream.base_url}) | {"storage": {"database": server.url()}}
    with Gateway(tmp_path, config) as gateway:
        create = gateway.client().chat.completions.with_raw_response.create
        create(model="m", messages=HELLO)
        server.kill()
        request_id = create(model="m", messages=HELLO).headers["x-request-id"]
        with pytest.raises(openai.InternalServerError) as caught:
            gateway.client("sk-tg-unknown").chat.completions.create(model="m", messages=HELLO)
        assert caught.value.code == "ledger_unavailable"
        wait_until(lambda: bool(ready(gateway).json()["degraded"]), 30, "degradation")
        server.start()
        assert gateway.row(request_id)["status"] == "completed"


def test_while_the_backend_loads_requests_are_told_to_come_back(tmp_path: Path) -> None:
    model = {"deployments": [{"to": "backend"}], "price": PRICE, "drafts": [], "default_draft": None}
    config = configuration({"unused": "http://127.0.0.1:9/v1"}, deepseek=model)
    config["backend"] = {"url": f"http://127.0.0.1:{free_port()}/v1"}
    with Gateway(tmp_path, config) as gateway:
        wait_until(lambda: "connection" in ready(gateway).text, 30, "the first check")
        answer = ready(gateway)
        assert (answer.status_code, answer.json()["degraded"]) == (503, ["backend"])
        with pytest.raises(openai.InternalServerError) as caught:
            gateway.client().chat.completions.create(model="deepseek", messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (503, "no_deployment_available")
        assert caught.value.response.headers["x-should-retry"] == "true"


async def test_a_slow_reader_holds_up_nobody_and_nothing_piles_up(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    body = b'{"model":"m@endless","messages":[{"role":"user","content":"x"}],"stream":true}'
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b"
        % (gateway.key.encode(), len(body), body)
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    started = time.monotonic()
    answer = await asyncio.to_thread(
        lambda: gateway.client().chat.completions.create(model="m", messages=HELLO, max_tokens=2)
    )
    assert answer.choices
    assert time.monotonic() - started < 10  # the other one is never read
    writer.transport.abort()
    worker = gateway.app.state.worker
    await asyncio.to_thread(wait_until, lambda: worker.gate._open_holds == 0, 30, "the end of the hold")
