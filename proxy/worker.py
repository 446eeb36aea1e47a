"""One gateway worker: its parts, opened in order, kept up to date, closed in reverse.

A database that is away at the start is no reason to stay down: the worker comes up, answers 503 and says why, and opens
as soon as it can.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any

import structlog

from ledger.acceptance import list_states
from ledger.database import Database
from ledger.deployments import add_failures
from ledger.errors import LedgerError, LedgerUnavailable
from ledger.gate import Gate
from ledger.keys import KeyHasher
from ledger.migrations import NotMigrated, require_current
from ledger.posting import Poster
from policies.access import parse_networks
from policies.admission import Admission, Capacity
from policies.counters.memory import MemoryCounters
from policies.counters.redis import RedisCounters
from policies.counters.rules import Counters
from policies.quotas import Limiter
from proxy.auth import Keyring
from proxy.catalogue import Catalogue
from proxy.checking import keep_checking
from proxy.gateway import Gateway
from proxy.host_metrics import HostMetrics
from proxy.ids import now_ms
from proxy.metrics import Metrics
from proxy.notices import Notices
from proxy.observer import Observer
from proxy.overrides import RouteFeed
from proxy.preflight import StartRefused
from proxy.routing import build_routes, build_upstreams
from proxy.secrets import key_secret
from proxy.seeding import bring_up_to_date, secret_of
from proxy.settings import Settings

log = structlog.get_logger(__name__)

REFRESH_S = 0.25
RETRY_S = 1.0
EXCHANGE_S = 2.0
"""How often a worker tells of failed attempts, and asks how drafts do."""
STALE_S = 3.0
"""How long the change feed may be silent before readiness calls the database degraded."""


class Worker:
    """`open` it, serve with it while `ready`, `close` it. slot: this worker's number on its host."""

    def __init__(self, settings: Settings, slot: int, *, embed_poster: bool = False) -> None:
        self.settings = settings
        self.slot = slot
        self.upstreams = build_upstreams(settings)
        self.routes = build_routes(settings, self.upstreams)
        workers = settings.server.workers
        self.admission = Admission(
            {name: Capacity(settings.server.share(item.max_concurrency)) for name, item in self.upstreams.items()}
        )
        counters = settings.storage.counters
        self._counters: Counters = (
            MemoryCounters()
            if counters == "memory"
            else RedisCounters(counters, workers=workers, on_outage=settings.limits.on_outage)
        )
        self.limiter = Limiter(self._counters, global_timezone=settings.billing.timezone)
        self.metrics = Metrics(self._gauges, self.limiter.decisions)
        self.host_metrics = HostMetrics(
            settings.metrics_dir, f"gateway-{slot}", self.metrics.snapshot, self.metrics.go_on_from
        )
        self.notices = Notices(self.limiter)
        self.trusted_proxies = parse_networks(settings.server.trusted_proxies)
        self.catalogue = Catalogue(self.routes, self.upstreams)
        self.db: Database | None = None
        self.gate: Gate | None = None
        self.keyring: Keyring | None = None
        self.route_feed: RouteFeed | None = None
        self.gateway: Gateway | None = None
        self._embed_poster = embed_poster
        self.refused: str | None = None
        """Why it cannot be opened at all, until an operator decides."""
        self._failure: str | None = "starting"
        self._refreshed_at = 0.0
        self._behind = True
        """The feed may hold changes that keys and routes have not followed yet."""
        self._gate_refresh: asyncio.Task[bool] | None = None
        """Under way, or waiting for another writer."""
        self._exchanged_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()

    async def open(self) -> None:
        """Open what can be opened; the rest is retried. Raises what an operator must decide (a damaged journal)."""
        await self._counters.open()
        await self._try_to_open()
        self._start(self._tend())
        self._start(self.catalogue.keep_current())
        self._start(self.host_metrics.keep_written())
        for name, item in self.settings.upstreams.items():
            if item.health_check is not None:
                self._start(keep_checking(self.upstreams[name], item.health_check))

    async def until_serving(self) -> None:
        """Returns as soon as some request could be answered, however long that takes."""
        while not self.can_serve():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Wait for open requests, give back every lease, end the journal."""
        self._stop.set()
        tasks = [*self._tasks, *([] if self._gate_refresh is None else [self._gate_refresh])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.gate is not None:
            await self.gate.close(patience_s=2.0)
        await self.host_metrics.close()
        if self._embed_poster and self.db is not None:
            await Poster(self.db, self.settings.storage.journal_path).drain()
        await self._counters.close()
        for upstream in self.upstreams.values():
            upstream.close()
        if self.db is not None:
            await self.db.close()

    def database(self) -> Database:
        """The open database. Raises LedgerUnavailable."""
        if self.db is None:
            raise LedgerUnavailable(self._failure or "the database is not open yet")
        return self.db

    def serving(self) -> Gateway:
        """The open gateway. Raises LedgerUnavailable."""
        if self.gateway is None:
            raise LedgerUnavailable(self._failure or "this worker is still starting")
        return self.gateway

    def keys(self) -> Keyring:
        """Raises LedgerUnavailable."""
        if self.keyring is None:
            raise LedgerUnavailable(self._failure or "this worker is still starting")
        return self.keyring

    def degraded(self) -> dict[str, list[str]]:
        """What is not as it should be, by part; a part that is well has an empty list."""
        database = [self._failure] if self._failure is not None else []
        if self.gateway is not None and time.monotonic() - self._refreshed_at > STALE_S:
            database.append("the database does not answer: changes of keys and prices are not seen")
        return {
            "database": database,
            "counters": self.limiter.degraded(),
            "journal": self.gate.degraded() if self.gate is not None else [],
            "backend": self.catalogue.degraded(),
        }

    def can_serve(self) -> bool:
        """Whether some request could be answered now."""
        if self.gateway is None or self.gate is None or self.gate.journal.unhealthy() is not None:
            return False
        return self.catalogue.any_deployment_up()

    async def _try_to_open(self) -> None:
        settings = self.settings
        try:
            if self.db is None:
                self.db = await self._open_database()
            self.gate = await Gate.open(self.db, settings.storage.journal_path, self.slot)
        except LedgerUnavailable as error:
            self._failure = str(error)
            log.warning("not_open_yet", reason=str(error))
            return
        except (LedgerError, StartRefused) as error:
            self.refused = str(error)
            raise
        self.keyring = Keyring(self.db, KeyHasher(key_secret(settings)))
        self.route_feed = RouteFeed(self.db, self.routes)
        await self._refresh()
        self.gateway = Gateway(
            keyring=self.keyring,
            routes=self.routes,
            limiter=self.limiter,
            admission=self.admission,
            gate=self.gate,
            metrics=self.metrics,
            max_body_bytes=settings.server.max_body_mb * 2**20,
            trusted_proxies=self.trusted_proxies,
            notices=self.notices,
        )
        self._failure = None
        self._start(self._keep_telling())
        if self._embed_poster:
            self._start(Poster(self.db, settings.storage.journal_path).run(self._stop))
            self._start(Observer(self.db, settings).run(self._stop))

    async def _open_database(self) -> Database:
        """Brought up to date first where that is needed: it may have been away when this process started."""
        settings = self.settings
        db = await Database.open(settings.storage.database, command_timeout_s=5)
        try:
            try:
                await require_current(db)
            except NotMigrated:
                await bring_up_to_date(settings)
            await secret_of(settings, db)
        except BaseException:
            await db.close()
            raise
        return db

    async def _tend(self) -> None:
        while True:
            if self.gateway is None:
                await asyncio.sleep(RETRY_S)
                try:
                    await self._try_to_open()
                except Exception as error:  # nothing that trying again could heal: readiness says what it is
                    self._failure = str(error)
                    raise
            else:
                await asyncio.sleep(REFRESH_S)
                await self._refresh()

    async def _keep_telling(self) -> None:
        """What this worker writes of its own. Apart from `_tend`: on SQLite a writer may wait for another one, and a
        key blocked meanwhile must be seen."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.notices.write(self.database())
            except Exception as error:
                log.warning("notices_wait", reason=str(error))
            if time.monotonic() - self._exchanged_at > EXCHANGE_S:
                await self._exchange()

    async def _refresh(self) -> None:
        """Follow the change feed: keys here, money in the gate."""
        assert self.keyring is not None
        assert self.route_feed is not None
        assert self.gate is not None
        try:
            self._behind = await self._refresh_gate() or self._behind
            if self._behind:
                await self.keyring.refresh()
                await self.route_feed.refresh()
                self._behind = False
            self._refreshed_at = time.monotonic()
        except LedgerError as error:
            log.warning("refresh_failed", reason=str(error))
        except Exception as error:  # whatever it is, a key blocked from now on must still be seen
            log.error("refresh_failed", exc_info=error)

    async def _refresh_gate(self) -> bool:
        """Whether the feed has brought anything, as far as is known: the others need not ask when it has not. The gate
        writes too (its heartbeat), and while it waits for that the others do not."""
        assert self.gate is not None
        if self._gate_refresh is None:
            self._gate_refresh = asyncio.create_task(self.gate.refresh())
        running = self._gate_refresh
        await asyncio.wait({running}, timeout=REFRESH_S)
        if not running.done():
            return True
        self._gate_refresh = None
        try:
            return running.result()
        except Exception as error:
            log.error("refresh_failed", exc_info=error)
            return True

    async def _exchange(self) -> None:
        """Tell the ledger which attempts failed here; hear from it how drafts do everywhere."""
        self._exchanged_at = time.monotonic()
        failures = self.metrics.take_failures()
        if failures:
            try:
                async with self.database().begin() as c:
                    await add_failures(c, failures, now_ms())
            except Exception as error:
                self.metrics.give_back_failures(failures)
                log.warning("exchange_failed", reason=str(error))
        try:
            async with self.database().read() as c:
                self.metrics.acceptance = await list_states(c)
        except Exception as error:
            log.warning("exchange_failed", reason=str(error))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(_report)
        self._tasks.append(task)

    def _gauges(self) -> dict[str, float]:
        unposted = 0 if self.gate is None else self.gate.journal.health.backlog_frames
        gauges: dict[str, float] = {"ready": float(self.can_serve()), "unposted_records": float(unposted)}
        for part, reasons in self.degraded().items():
            gauges[f"degraded_{part}"] = float(bool(reasons))
        return gauges


def _report(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        error = task.exception()
        if error is not None:
            log.error("background_task_failed", exc_info=error)
