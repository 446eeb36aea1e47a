"""`tallygate gateway | poster | backend | migrate`: one role alone, for containers and for the supervisor."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.commands.options import HERE, ConfigOption, DataDirOption, ledger_of, run, say, settings_of

if TYPE_CHECKING:
    import socket
    from types import FrameType

    import uvicorn

    from proxy.settings import Settings

HostOption = Annotated[str | None, typer.Option(help="Address to listen on.")]
PortOption = Annotated[int | None, typer.Option(help="Port to listen on.")]
WorkersOption = Annotated[int | None, typer.Option(help="How many gateways share the counters.")]

GRACE_S = 5
"""How long running requests may go on after SIGTERM before they are cut and settled."""
GONE_AFTER_S = 9.5


def gateway(
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = None,
    slot: Annotated[int, typer.Option(min=0, help="This worker's number on this host; each needs its own.")] = 0,
    fd: Annotated[int | None, typer.Option(help="A listening socket inherited from the supervisor.")] = None,
    backend_url: Annotated[str | None, typer.Option(help="Where the local backend listens.")] = None,
) -> None:
    """One gateway worker."""
    overrides = {"server.host": host, "server.port": port, "server.workers": workers, "backend.url": backend_url}
    settings = settings_of(config, data_dir, overrides)
    from proxy.preflight import check_directories, listen

    check_directories(settings)
    if fd is None:
        fd = listen(settings.server.host, settings.server.port).detach()
        _migrate_if_possible(settings)
    _serve_app(settings, slot, fd)


def _serve_app(settings: Settings, slot: int, fd: int) -> None:
    import socket

    import uvicorn

    from proxy.app import build_app
    from proxy.http_server import GatewayProtocol
    from proxy.logs import configure_logging
    from proxy.preflight import StartRefused

    configure_logging()
    app = build_app(settings, slot=slot)
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
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _punctual(uvicorn.Server)(config)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn raises it once more when all is done: then end with code 0
    try:
        server.run(sockets=[socket.socket(fileno=fd)])
    finally:  # uvicorn ends the process itself, and says only that the start failed
        if app.state.worker.refused is not None:
            raise StartRefused(app.state.worker.refused)
    if not server.started:
        raise typer.Exit(1)


def _punctual(server: type[uvicorn.Server]) -> type[uvicorn.Server]:
    """A SIGTERM is also a promise to be gone soon, however stuck something is: the journal makes that safe."""

    class PunctualServer(server):  # type: ignore[misc, valid-type]
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _spare_the_collector()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            timer = threading.Timer(GONE_AFTER_S, os._exit, (1,))
            timer.daemon = True
            timer.start()
            super().handle_exit(sig, frame)

    return PunctualServer


def _spare_the_collector() -> None:
    """What is loaded by now stays: going through it in each full collection stopped every request for 60 ms."""
    gc.collect()
    gc.freeze()


def poster(
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    host: HostOption = None,
    port: PortOption = None,
    workers: WorkersOption = None,
) -> None:
    """The poster: moves settled requests from the journals into SQL."""
    overrides = {"server.host": host, "server.port": port, "server.workers": workers}
    settings = settings_of(config, data_dir, overrides)
    from proxy.logs import configure_logging

    configure_logging()
    run(_post(settings))


async def _post(settings: Settings) -> None:
    from ledger.posting import Poster

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with ledger_of(settings) as db:
        poster = Poster(db, settings.storage.journal_path)
        _spare_the_collector()
        await poster.run(stop)
        await poster.drain()


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


def migrate(config: ConfigOption = None, data_dir: DataDirOption = HERE) -> None:
    """Bring the database to this version's schema, and publish configured prices of models that have none. `serve` and
    `gateway` do it by themselves."""
    settings = settings_of(config, data_dir)
    run(_migrate(settings))
    say("the database is up to date")


def _migrate_if_possible(settings: Settings) -> None:
    """A gateway comes up without its database, says so in /health/ready, and serves as soon as it is there."""
    from ledger.errors import LedgerUnavailable
    from proxy.preflight import StartRefused
    from proxy.secrets import has_key_secret

    try:
        run(_migrate(settings))
        run(_check_secret(settings))
    except LedgerUnavailable as error:
        if not has_key_secret(settings):
            raise StartRefused(
                f"{error}; without it nobody knows whether this host needs another's key-secret"
            ) from None
        say(f"starting without a database: {error}")


async def _migrate(settings: Settings) -> None:
    from proxy.seeding import seed_prices

    async with ledger_of(settings) as db:
        await seed_prices(db, settings)


async def _check_secret(settings: Settings) -> None:
    from proxy.seeding import secret_of

    async with ledger_of(settings) as db:
        await secret_of(settings, db)
