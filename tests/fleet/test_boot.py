"""How hosts start: without the database, with a wrong one, with another host's secret."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet.hosts import Fleet, Host
from tests.fleet.load import BODY, Client
from tests.services import Postgres, wait_until
from tests.upstream.process import FakeUpstream


def ask(host: Host, key: str) -> tuple[int, str]:
    async def once() -> tuple[int, str]:
        outcome = await Client(host.port, key).ask(BODY)
        return outcome.status, outcome.code

    return asyncio.run(once())


@pytest.fixture
def host(tmp_path: Path, upstream: FakeUpstream) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(database: str, name: str = "host", **changes: Any) -> Host:
        server = {"workers": 1} | changes.pop("server", {})
        made.append(Host(tmp_path / name, database, "memory", upstream.base_url, server=server, **changes))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(ValueError):  # closed by its test
            one.close()


def refused(host: Host) -> str:
    """What a start says that must end with exit code 2."""
    ran = subprocess.run(host.command, capture_output=True, text=True, timeout=120, check=False, cwd=host.folder)
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    return ran.stderr


def test_without_the_database_a_host_comes_up_says_so_and_heals_itself(
    host: Callable[..., Host], postgres_server: Callable[..., Postgres]
) -> None:
    server = postgres_server()
    first = host(server.url())
    first.start()
    key = Fleet([first]).new_key()
    assert ask(first, key)[0] == 200
    first.stop()
    server.stop()
    first.start(wait=False)
    wait_until(lambda: first.readiness().get("degraded") == ["database"], 60, "the gateway")
    assert "starting without the database" in first.output()
    posters = first.folder / "data/logs/poster.log"
    wait_until(lambda: "posting waits for the database" in posters.read_text(), 60, "the poster's word")
    assert ask(first, key) == (503, "ledger_unavailable")
    assert ask(first, "sk-tg-nobody-knows-this-key-yet") == (503, "ledger_unavailable")
    assert httpx.get(f"{first.url}/health/live").status_code == 200
    screens = first.output().count("Ctrl-C stops it")
    server.start()
    wait_until(lambda: ask(first, key)[0] == 200, 60, f"service\n{first.logs()}")
    assert ask(first, "sk-tg-nobody-knows-this-key-yet") == (401, "invalid_api_key")
    wait_until(lambda: first.output().count("Ctrl-C stops it") > screens, 60, "the screen")
    with first.admin() as admin:
        wait_until(lambda: len(admin.get("/usage").json()["data"]) == 2, 60, "both requests in SQL")


def test_a_wrong_password_name_or_schema_is_said_and_ends_the_start(
    host: Callable[..., Host], postgres: Postgres, postgres_url: str
) -> None:
    assert "does not exist" in refused(host(postgres.url("no_such_database"), "a"))
    assert "does not exist" in refused(host(postgres_url.replace("postgres@", "nobody:wrong@"), "b"))
    assert "storage.database" in refused(host("postgresql//typing-error", "c"))
    postgres.sql("CREATE TABLE teams (id text)", postgres_url.rpartition("/")[2])
    assert "half-migrated" in refused(host(postgres_url, "d"))


def test_a_host_with_another_key_secret_is_refused_until_somebody_decides(
    host: Callable[..., Host], ledger_postgres_url: str
) -> None:
    one = host(ledger_postgres_url, "one")
    other = host(ledger_postgres_url, "other", server={"key_secret": "not-the-secret-of-the-others"})
    with one:
        said = refused(other)
        assert "server.key_secret is not the secret" in said
        assert "not-the-secret-of-the-others" not in said
    without = host(ledger_postgres_url, "without", server={"key_secret": None})
    assert "key-secret is missing" in refused(without)
    assert not (without.folder / "data/key-secret").exists()
    migrate = [sys.executable, "-P", "-m", "proxy.cli", "migrate", "--new-key-secret", *other.options]
    assert subprocess.run(migrate, check=False, timeout=120).returncode == 0
    with other:
        assert other.ready()
    assert "server.key_secret is not the secret" in refused(one)


def test_a_gateway_that_is_killed_while_the_database_is_away_comes_back_and_then_serves(
    host: Callable[..., Host], postgres_server: Callable[..., Postgres]
) -> None:
    server = postgres_server()
    with host(server.url()) as first:
        key = Fleet([first]).new_key()
        assert ask(first, key)[0] == 200
        server.kill()
        (worker,) = first.roles("gateway")
        worker.kill()
        wait_until(lambda: first.readiness().get("status") == "unavailable", 60, "the new worker")
        server.start()
        wait_until(lambda: ask(first, key)[0] == 200, 60, f"service\n{first.logs()}")
    shutil.rmtree(first.folder)


def test_a_replaced_worker_that_dies_while_it_drains_is_recovered_without_a_restart(
    host: Callable[..., Host], postgres: Postgres, ledger_postgres_url: str
) -> None:
    """Its slot has the number that the only worker had before, and no worker has it any more."""
    database = ledger_postgres_url.rpartition("/")[2]

    def open_slots() -> list[str]:
        found = postgres.sql("SELECT DISTINCT slot_id FROM epochs WHERE state = 'open'", database).split()
        return sorted(slot.rpartition("/")[2] for slot in found)

    with host(ledger_postgres_url, "one") as one:
        key = Fleet([one]).new_key()
        (old,) = one.roles("gateway")
        body = {**BODY, "stream": True, "max_tokens": 1_500, "x_fault": {"tokens": 1_500, "chunk_delay_ms": 100}}
        headers = {"authorization": f"Bearer {key}"}
        with httpx.stream("POST", f"{one.url}/v1/chat/completions", json=body, headers=headers, timeout=60) as stream:
            for _ in zip(range(30), stream.iter_lines(), strict=False):
                pass  # far enough that its progress is journalled
            one.roll()
            assert open_slots() == ["0", "1"]
            old.kill()
        wait_until(lambda: open_slots() == ["1"], 60, f"the recovery\n{one.logs()}")
        usage = postgres.sql("SELECT estimated, billed_tokens > 0 FROM usage", database)
        assert usage.split() == ["1|t"], usage
        assert Fleet([one]).verify(one)["ok"]
