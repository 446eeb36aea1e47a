"""What every room may use: a fresh database, a clean Valkey, a fake upstream. Servers start when first asked for."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import structlog

from tests.services import Postgres, Valkey, running
from tests.upstream.process import FakeUpstream

hypothesis.settings.register_profile(
    "house",
    deadline=None,  # a busy machine is no failure
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=not {"SECONDS", "EXAMPLES"} & os.environ.keys(),  # what is new is looked for by `make soak`
)
hypothesis.settings.load_profile("house")

structlog.configure(  # as our processes do: structlog's own choice renders every local variable, for seconds
    processors=[
        structlog.processors.add_log_level,
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(autouse=True)
def hour() -> None:
    """No test begins in the last half minute of an hour, with which days and months end: what happens at a turn has
    tests of its own, with clocks of their own."""
    left_s = 3_600 - time.time() % 3_600
    if left_s < 30:
        time.sleep(left_s)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """This test process's PostgreSQL. Tests that freeze or kill one take `postgres_server` instead."""
    with running(Postgres()) as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """An empty database of its own."""
    name = postgres.create_database()
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture(scope="session")
def migrated_template(postgres: Postgres) -> str:
    """The name of a database at the newest migration, to copy from."""
    from ledger.migrations import migrate

    name = postgres.create_database()
    run_apart(lambda: migrate(postgres.url(name)))
    return name


@pytest.fixture
def ledger_postgres_url(postgres: Postgres, migrated_template: str) -> Iterator[str]:
    """A migrated ledger database of its own on PostgreSQL."""
    name = postgres.create_database(migrated_template)
    yield postgres.url(name)
    postgres.drop_database(name)


@pytest.fixture
def ledger_sqlite_url(tmp_path: Path) -> str:
    """A migrated ledger database of its own on SQLite."""
    from ledger.migrations import migrate

    url = f"sqlite:///{tmp_path / 'tallygate.db'}"
    run_apart(lambda: migrate(url))
    return url


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest) -> str:
    """A migrated ledger database of its own; the test runs once on SQLite and once on PostgreSQL."""
    wanted = "ledger_sqlite_url" if request.param == "sqlite" else "ledger_postgres_url"
    url: str = request.getfixturevalue(wanted)
    return url


@pytest.fixture
def postgres_server() -> Iterator[Callable[..., Postgres]]:
    """Makes PostgreSQL servers of the test's own: `postgres_server("max_connections=20")`."""
    yield from _makes(Postgres)


@pytest.fixture(scope="session")
def valkey() -> Iterator[Valkey]:
    """This test process's Valkey. Tests that freeze or kill one take `valkey_server` instead."""
    with running(Valkey()) as server:
        yield server


@pytest.fixture
def valkey_url(valkey: Valkey) -> str:
    """An empty Valkey."""
    valkey.flush()
    return valkey.url


@pytest.fixture
def valkey_server() -> Iterator[Callable[..., Valkey]]:
    """Makes Valkey servers of the test's own."""
    yield from _makes(Valkey)


@pytest.fixture(scope="session")
def upstream_process() -> Iterator[FakeUpstream]:
    with FakeUpstream() as upstream:
        yield upstream


@pytest.fixture
def upstream(upstream_process: FakeUpstream) -> FakeUpstream:
    """A fake provider as a process of its own, with an empty log and no standing fault."""
    upstream_process.reset()
    return upstream_process


def _makes(kind: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(*arguments: Any, **options: Any) -> Any:
        server = kind(*arguments, **options)
        made.append(server)
        return server.start()

    yield make
    for server in reversed(made):
        server.close()


def run_apart(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine on a loop of its own in a thread of its own, and return its result."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(asyncio.run(work()))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
