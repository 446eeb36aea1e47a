"""`tallygate serve`: check, migrate, start everything, show one screen, and stop cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxy.commands.options import HERE, ConfigOption, DataDirOption, ledger_of, say, settings_of
from proxy.commands.recorded import record_config

if TYPE_CHECKING:
    from proxy.seeding import FirstRun
    from proxy.settings import Settings
    from proxy.supervisor import Plan, Supervisor

RETRY_S = 1.0


def serve(
    config: ConfigOption = None,
    data_dir: DataDirOption = HERE,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    workers: Annotated[int | None, typer.Option(help="Gateway processes; more than one needs redis counters.")] = None,
) -> None:
    """Start and supervise everything a machine needs: gateway workers, the poster and the local backend."""
    if config is not None:
        config = config.absolute()
    overrides = {"server.host": host, "server.port": port, "server.workers": workers}
    settings = settings_of(config, data_dir, overrides)
    arguments = ["--data-dir", str(data_dir.absolute())]
    if config is not None:
        arguments += ["--config", str(config)]
    for name, value in (("--host", host), ("--port", port), ("--workers", workers)):
        arguments += [] if value is None else [name, str(value)]
    read_again = partial(settings_of, config, data_dir.absolute(), overrides)
    raise typer.Exit(asyncio.run(_serve(settings, config, tuple(arguments), read_again)))


async def _serve(
    settings: Settings, config: Path | None, arguments: tuple[str, ...], read_again: Callable[[], Settings]
) -> int:
    from proxy import preflight

    began = time.monotonic()
    preflight.check_directories(settings)
    preflight.check_room(settings)
    with preflight.claim_data_directory(settings):
        preflight.check_backend_installed(settings)
        listener = preflight.listen(settings.server.host, settings.server.port)
        with listener:
            backend = settings.backend
            port = preflight.backend_port(backend) if backend is not None and backend.url is None else None
            from proxy.supervisor import Plan

            before = record_config(settings.base_dir, config)
            if before not in (None, config):
                say(f"with {settings.source}; the last start here was with {before}")
            return await _supervise(Plan(settings, arguments, listener, port, read_again), began)


async def _supervise(plan: Plan, began: float) -> int:
    from proxy.supervisor import Supervisor

    supervisor = Supervisor(plan, say)
    supervisor.listen_for_signals()
    ledger = _Preparation(plan.settings)
    ready = False
    try:
        with _Progress() as progress:
            ready = await supervisor.start(ledger.try_once, progress)
    finally:
        if ledger.first_run is not None and not ready:
            _show_token(ledger.first_run)
    if not ready:
        await supervisor.stop()
        return 0
    supervisor.watch()
    try:
        if not await _until(supervisor, ledger.finish()):
            await _show_screen(plan, ledger, began)
            await supervisor.stop_requested.wait()
    finally:
        say(f"stopping: finishing what runs, at most {math.ceil(supervisor.stop_within_s)} s (again to stop at once)")
        await supervisor.stop()
        say("stopped")
    return 0


async def _until(supervisor: Supervisor, work: Coroutine[Any, Any, None]) -> bool:
    """Whether a stop was requested before the work was done. Raises what it raises."""
    working = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(supervisor.stop_requested.wait())
    try:
        await asyncio.wait([working, stopped], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return stopped.done()
    finally:
        working.cancel()
        stopped.cancel()


async def _show_screen(plan: Plan, ledger: _Preparation, began: float) -> None:
    from proxy.shares import shares
    from proxy.start_screen import start_screen

    assert ledger.first_run is not None
    for line in (*shares(plan.settings), *ledger.first_run.prices.warnings):
        say(line)
    sys.stdout.write(await start_screen(plan, ledger.first_run, time.monotonic() - began))
    sys.stdout.flush()


class _Preparation:
    """What the first start puts into the ledger, as soon as the ledger is there."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.first_run: FirstRun | None = None

    async def try_once(self) -> None:
        """Leaves `first_run` None while the database is away. Raises StartRefused, LedgerError where waiting is of no
        use."""
        from ledger.errors import LedgerUnavailable
        from proxy import seeding  # imports SQLAlchemy: while the backend is on its way already

        try:
            await self._prepare()
        except LedgerUnavailable as error:
            seeding.check_startable_without_database(self.settings, error)
            say(f"starting without the database, requests get 503 until it is there: {error}")

    async def finish(self) -> None:
        """Returns when `first_run` is there. Raises what `try_once` raises."""
        from ledger.errors import LedgerUnavailable

        while self.first_run is None:
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(LedgerUnavailable):
                await self._prepare()

    async def _prepare(self) -> None:
        from ledger.left_slots import LeftSlots
        from proxy import seeding

        first_run = await seeding.prepare(self.settings)
        async with ledger_of(self.settings) as db:
            workers = range(self.settings.server.workers)
            for slot in await LeftSlots(db, self.settings.storage.journal_path).recover(workers):
                say(f"slot {slot} has no worker any more: it is ended, and what it held returns")
        self.first_run = first_run


def _show_token(first_run: FirstRun) -> None:
    """A start that made the admin token and then failed has still made it."""
    if first_run.admin_token is not None:
        say(f"the admin token, shown this once: {first_run.admin_token}")


class _Progress:
    """What is being waited for: a spinner on a terminal, a line for each change elsewhere."""

    def __enter__(self) -> Callable[[str], None]:
        self._last = ""
        self._status = None
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("starting")
            self._status.__enter__()
        return self._show

    def _show(self, text: str) -> None:
        if text == self._last:
            return
        self._last = text
        if self._status is None:
            say(text)
        else:
            self._status.update(text)

    def __exit__(self, *exception: object) -> None:
        if self._status is not None:
            self._status.__exit__(None, None, None)
