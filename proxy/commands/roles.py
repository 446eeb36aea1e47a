"""`tallygate gateway | poster | backend | migrate`: one role alone, for containers and for the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.commands.options import HERE, ConfigOption, DataDirOption, ledger_of, run, say, settings_in_use, settings_of

if TYPE_CHECKING:
    from ledger.database import Database
    from proxy.settings import Settings

HostOption = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option(help="Port to listen on.")]
WorkersOption = Annotated[int | None, typer.Option(help="How many gateways share the counters.")]

RETRY_S = 1.0
NOTICE_S = 5.0
RECOVER_S = 10.0
TIDY_S = 600.0
COLLECT_AFTER = 20_000
"""Objects that are new, before the collector goes through them: as many as a hundred requests at once have."""
POSTER_NICENESS = 10
"""Posting can wait a moment, a request cannot: where they share a core the gateway goes first."""
POSTER_TIMEOUT_S = 30.0
"""How long one statement may take before the database counts as away: a batch takes a second at most."""


BackendUrlOption = Annotated[str | None, typer.Option(help="Where the local backend listens.")]


def gateway(
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = None,
    slot: Annotated[int, typer.Option(min=0, help="This worker's number on this host; each needs its own.")] = 0,
    fd: Annotated[int | None, typer.Option(help="A listening socket inherited from the supervisor.")] = None,
    backend_url: BackendUrlOption = None,
    ready_fd: Annotated[int | None, typer.Option(help="A pipe of the supervisor: written to when we serve.")] = None,
) -> None:
    """One gateway worker."""
    overrides = {"server.host": host, "server.port": port, "server.workers": workers, "backend.url": backend_url}
    settings = settings_of(config, data_dir, overrides)
    from proxy.preflight import check_directories, listen

    check_directories(settings)
    if fd is None:
        fd = listen(settings.server.host, settings.server.port).detach()
        _migrate_if_possible(settings)
    _serve_app(settings, slot, fd, ready_fd)


def _serve_app(settings: Settings, slot: int, fd: int, ready_fd: int | None) -> None:
    import socket

    import uvicorn

    from proxy.app import build_app
    from proxy.http_server import GatewayProtocol
    from proxy.logs import configure_logging
    from proxy.preflight import StartRefused
    from proxy.server import GatewayServer

    configure_logging()
    app = build_app(settings, slot=slot, replaces=ready_fd is not None)
    config = uvicorn.Config(
        app,
        http=GatewayProtocol,
        loop="auto",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
    )

    def listening() -> None:
        _spare_the_collector()
        if ready_fd is not None:
            os.write(ready_fd, b"1")
            os.close(ready_fd)

    server = GatewayServer(config, listening, settings.server.drain_s)
    server.listen_for_signals()
    try:
        server.run(sockets=[socket.socket(fileno=fd)])
    finally:  # uvicorn ends the process itself, and says only that the start failed
        if app.state.worker.refused is not None:
            raise StartRefused(app.state.worker.refused)
    if not server.started:
        raise typer.Exit(1)


def _spare_the_collector() -> None:
    """What is loaded by now stays: going through it in each full collection stopped every request for 60 ms. And what
    requests make, they free by themselves: Python's 700 would have the collector look on at a dozen of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)


def poster(
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = None,
    backend_url: BackendUrlOption = None,
) -> None:
    """The poster: moves settled requests from the journals into SQL, and watches over deployments beside it."""
    overrides = {"server.host": host, "server.port": port, "server.workers": workers, "backend.url": backend_url}
    settings = settings_of(config, data_dir, overrides)
    from proxy.logs import configure_logging

    configure_logging()
    os.nice(POSTER_NICENESS)
    run(_post(settings))


async def _post(settings: Settings) -> None:
    from proxy.host_metrics import HostMetrics
    from proxy.metrics import Snapshot

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    attempts: Counter[str] = Counter()
    metrics = HostMetrics(
        settings.metrics_dir,
        "poster",
        lambda: Snapshot(webhook_attempts=attempts),
        lambda before: attempts.update(before.webhook_attempts),
    )
    counting = loop.create_task(metrics.keep_written())
    try:
        await _post_until(stop, settings, attempts)
    finally:
        counting.cancel()
        await asyncio.wait([counting])
        await metrics.close()


async def _post_until(stop: asyncio.Event, settings: Settings, attempts: Counter[str]) -> None:
    """attempts: to deliver webhooks, counted by what became of them."""
    from ledger.left_slots import LeftSlots
    from ledger.noticing import Noticing
    from ledger.posting import Poster
    from proxy.observer import Observer
    from proxy.webhooks import Courier

    loop = asyncio.get_running_loop()
    db = await _patiently_open(settings, stop)
    if db is None:
        return
    try:
        poster = Poster(db, settings.storage.journal_path)
        left_slots, noticing = LeftSlots(db, settings.storage.journal_path), Noticing(db)
        notice = _again("noticing", NOTICE_S, lambda: noticing.look(time.time_ns() // 1_000_000), stop)
        recover = _again("recovering", RECOVER_S, left_slots.recover, stop)
        tidy = _again("tidying", TIDY_S, lambda: _tidy_outbox(db, bool(settings.webhooks)), stop)
        courier = Courier(db, settings.webhooks, attempts)
        besides = (Observer(db, settings).run(stop), courier.run(stop), notice, recover, tidy)
        beside = [loop.create_task(work) for work in besides]
        _spare_the_collector()
        await poster.run(stop)
        await asyncio.wait(beside, timeout=1.0)
        await poster.drain()
    finally:
        await db.close()


async def _tidy_outbox(db: Database, any_hooks: bool) -> None:
    from ledger import outbox

    async with db.begin() as c:
        await outbox.tidy(c, time.time_ns() // 1_000_000, any_hooks=any_hooks)


async def _again(what: str, every_s: float, work: Callable[[], Awaitable[object]], stop: asyncio.Event) -> None:
    """Do it every so often. Whatever fails, it must never keep the poster from posting."""
    import structlog

    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), every_s)
            return
        try:
            await work()
        except Exception as error:  # the database is away, or whatever it is: again later
            structlog.get_logger(__name__).warning("failed", what=what, error=str(error))


async def _patiently_open(settings: Settings, stop: asyncio.Event) -> Database | None:
    """The database, brought up to date, as soon as it is there; None when told to stop before."""
    from ledger.database import Database
    from ledger.errors import LedgerUnavailable
    from proxy.preflight import check_directories
    from proxy.seeding import bring_up_to_date, check_startable_without_database

    check_directories(settings)
    said = False
    while not stop.is_set():
        try:
            await bring_up_to_date(settings)
            return await Database.open(settings.storage.database, command_timeout_s=POSTER_TIMEOUT_S)
        except LedgerUnavailable as error:
            check_startable_without_database(settings, error)
            if not said:
                say(f"posting waits for the database: {error}")
            said = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), RETRY_S)
    return None


def backend(
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """The local engine; this process becomes `python -m backend`."""
    overrides = {"backend.host": host, "backend.port": port}
    settings = settings_of(config, data_dir, overrides)
    from proxy.commands.options import Fail
    from proxy.preflight import DEFAULT_BACKEND_PORT, check_backend_installed, check_directories
    from proxy.supervisor import backend_arguments

    if settings.backend is None:
        raise Fail(f"{settings.source} has no `backend:` section, so there is no engine to run here", 2)
    check_backend_installed(settings)
    check_directories(settings)
    arguments = backend_arguments(settings, settings.backend.port or DEFAULT_BACKEND_PORT)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "backend", *arguments])


def migrate(
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    new_key_secret: Annotated[
        bool,
        typer.Option(
            "--new-key-secret",
            help="Hash keys under this host's secret from now on. Keys and tokens made under another stop working.",
        ),
    ] = False,
) -> None:
    """Bring the database to this version's schema, and publish configured prices of models that have none. `serve` and
    `gateway` do it by themselves."""
    settings = settings_in_use(config, data_dir, json_=False)
    from proxy.preflight import check_directories
    from proxy.seeding import bring_up_to_date

    check_directories(settings)
    if new_key_secret:
        run(_change_secret(settings))
    run(bring_up_to_date(settings))
    say("the database is up to date")


async def _change_secret(settings: Settings) -> None:
    from proxy.seeding import change_secret

    async with ledger_of(settings, make=True) as db:
        await change_secret(settings, db)


def _migrate_if_possible(settings: Settings) -> None:
    """A gateway comes up without its database, says so in /health/ready, and serves as soon as it is there."""
    from ledger.errors import LedgerUnavailable
    from proxy.seeding import bring_up_to_date, check_startable_without_database

    try:
        run(bring_up_to_date(settings))
    except LedgerUnavailable as error:
        check_startable_without_database(settings, error)
        say(f"starting without a database: {error}")
