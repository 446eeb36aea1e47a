"""The test ground itself: servers are real, fresh and gone afterwards; the fake provider does what its table says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import asyncpg
import httpx
import pytest

from tests.services import ROOT, Postgres, Valkey, own_folder, wait_until
from tests.upstream.faults import FAULTS
from tests.upstream.process import FakeUpstream

CHAT = {"model": "gpt-4", "messages": [{"role": "user", "content": "count to ten please"}]}


async def test_each_test_gets_an_empty_database(postgres_url: str) -> None:
    connection = await asyncpg.connect(postgres_url)
    try:
        assert await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'") == 0
        await connection.execute("CREATE TABLE left_over (id int)")
    finally:
        await connection.close()


async def test_each_test_gets_an_empty_database_again(postgres_url: str) -> None:
    await test_each_test_gets_an_empty_database(postgres_url)


async def test_a_server_of_ones_own_survives_a_kill(postgres_server: Callable[..., Postgres]) -> None:
    server = postgres_server()
    server.sql("CREATE TABLE kept (id int)")
    server.kill()
    server.start()
    assert server.sql("SELECT count(*) FROM kept").strip() == "0"


def test_valkey_is_real_and_empty(valkey_url: str, valkey: Valkey) -> None:
    assert valkey.command("DBSIZE") == 0
    assert valkey.command("SET", "a", "b")


def test_servers_die_with_a_killed_test_process_and_the_next_one_clears_up() -> None:
    code = (
        "import sys\n"
        "from tests.services import Postgres, Valkey\n"
        "p, v = Postgres().start(), Valkey().start()\n"
        "print(p.server.pid, v.server.pid, p._home, v._home, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    *pids, postgres_home, valkey_home = child.stdout.readline().split()
    assert Path(postgres_home).exists()
    child.kill()
    child.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 30, "the servers' end")
    own_folder("empty").rmdir()
    assert not Path(postgres_home).exists()
    assert not Path(valkey_home).exists()


async def test_the_fake_provider_answers_plain_and_streamed_the_same(upstream: FakeUpstream) -> None:
    async with httpx.AsyncClient(base_url=upstream.base_url) as client:
        plain = (await client.post("/chat/completions", json=CHAT, headers={"x-request-id": "one"})).json()
        asked = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
        streamed = (await client.post("/chat/completions", json=asked)).text
    events = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1])
    assert text == plain["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == plain["usage"]
    assert chunks[-1]["choices"] == []
    entry = upstream.entry("one")
    assert entry["produced_tokens"] == plain["usage"]["completion_tokens"] == 16
    assert entry["outcome"] == "done"


async def test_the_fake_provider_notices_a_hang_up_and_logs_what_it_produced(upstream: FakeUpstream) -> None:
    async with (
        httpx.AsyncClient(base_url=upstream.base_url) as client,
        client.stream("POST", "/chat/completions", json={**CHAT, "stream": True, "x_fault": "slow-chunks"}) as response,
    ):
        seen = 0
        async for line in response.aiter_lines():
            seen += '"content": "' in line
            if seen == 5:
                break
    (entry,) = upstream.wait_for_entries(1)
    assert entry["outcome"] == "client_gone"
    assert 3 <= entry["produced_tokens"] < 50


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "stream"])
async def test_every_named_fault_runs_and_is_logged(upstream: FakeUpstream, streamed: bool) -> None:
    """Each ends, one way or another, once the client has waited two seconds."""
    async with httpx.AsyncClient(base_url=upstream.base_url, timeout=2) as client:

        async def meet(name: str) -> str:
            try:
                response = await client.post(
                    "/chat/completions",
                    json={**CHAT, "stream": streamed, "max_tokens": 20},
                    headers={"x-fault": name, "x-request-id": name},
                )
            except httpx.HTTPError as error:
                return type(error).__name__
            return str(response.status_code)

        outcomes = dict(zip(FAULTS, await asyncio.gather(*map(meet, FAULTS)), strict=True))
    assert len(FAULTS) >= 41
    assert outcomes["none"] == outcomes["gzip"] == outcomes["deflate"] == outcomes["crlf"] == "200"
    assert outcomes["hang"] == "ReadTimeout"
    assert outcomes["reset"] in ("ReadError", "RemoteProtocolError")
    assert outcomes["short-body"] == "RemoteProtocolError"
    assert outcomes["429-retry-after"] == "429"
    assert {entry["id"] for entry in upstream.wait_for_entries(len(FAULTS))} == set(FAULTS)


async def test_a_standing_fault_meets_the_next_requests_only(upstream: FakeUpstream) -> None:
    upstream.standing_fault("503", times=2)
    async with httpx.AsyncClient(base_url=upstream.base_url) as client:
        statuses = [(await client.post("/chat/completions", json=CHAT)).status_code for _ in range(4)]
    assert statuses == [503, 503, 200, 200]
