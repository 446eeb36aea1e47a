"""Watches over deployments, beside the poster: how their drafts do, how busy they are, and whether ramps may go on.

Several hosts may observe the same: states, events and steps are decided under SQL locks, once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from ledger.acceptance import Drafted, Key, drafted_by_hour, update_states
from ledger.database import Database
from ledger.deployments import add_sample, prune
from ledger.errors import LedgerError
from proxy.http1 import ConnectionLost
from proxy.ids import now_ms
from proxy.ramp import take_step
from proxy.routing import deployment_names
from proxy.scraping import Reading, Sample, between, read_metrics
from proxy.settings import Model, Settings
from proxy.settings_checks import BACKEND
from proxy.upstream import Patience, Upstream, UpstreamFailed, read_all

log = structlog.get_logger(__name__)

LOOK_S = 5.0
WINDOW_MS = 15 * 60_000
"""What a draft is judged by."""
HOUR_MS = 3_600_000
PRUNE_MS = HOUR_MS
TIMEOUT_S = 2.0
MAX_METRICS_BYTES = 16 * 2**20


class Observer:
    """`run` it, or call `look` yourself. clock: UTC milliseconds."""

    def __init__(self, db: Database, settings: Settings, clock: Callable[[], int] = now_ms) -> None:
        self._db = db
        self._settings = settings
        self._clock = clock
        self._places = _places(settings)
        self._drafts = _own_drafts(settings)
        self._readings: dict[str, tuple[float, Reading]] = {}
        self._unreadable: dict[str, str] = {}
        """Place → what is wrong with its metrics, told once."""
        self._sums: dict[tuple[int, Key], Drafted] | None = None
        self._window: deque[tuple[int, Key, Drafted]] = deque()
        self._pruned_ms = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop; what goes wrong is tried again."""
        while not stop.is_set():
            try:
                await self.look()
            except LedgerError as error:
                log.warning("observing_waits", reason=str(error))
            except Exception as error:
                log.error("observing_failed", exc_info=error)
            try:
                await asyncio.wait_for(stop.wait(), LOOK_S)
            except TimeoutError:
                pass
        for place in self._places.values():
            place.close()

    async def look(self) -> None:
        """One look at everything. What goes wrong with one place or one model is logged and keeps nothing else from
        being looked at: a ramp falls back whatever else there is. Raises LedgerError."""
        now = self._clock()
        samples = {name: sample for name, place in self._places.items() if (sample := await self._sample(name, place))}
        await self._measure(samples, now)
        measured = self._measured(now)
        for place, sample in samples.items():
            await _apart(self._keep(place, sample, now), place=place)
        if measured:
            await _apart(self._judge(measured, now))
        for name, model in self._settings.models.items():
            if model.ramp is not None:
                await _apart(self._ramp(name, model, now), model=name)
        if now - self._pruned_ms > PRUNE_MS:
            self._pruned_ms = now
            await _apart(self._prune(now))

    async def _keep(self, place: str, sample: Sample, now: int) -> None:
        async with self._db.begin() as c:
            await add_sample(
                c,
                place,
                now,
                draft_tokens=sample.draft_tokens,
                accepted_tokens=sample.accepted_tokens,
                utilisation=sample.utilisation,
            )

    async def _judge(self, measured: dict[Key, Drafted], now: int) -> None:
        async with self._db.begin() as c:
            changed = await update_states(c, measured, now)
        for state in changed:
            log.warning("acceptance_changed", deployment=state.deployment, draft=state.draft_model, now=state.state)

    async def _ramp(self, name: str, model: Model, now: int) -> None:
        assert model.ramp is not None
        async with self._db.begin() as c:
            step = await take_step(c, name, model, model.ramp, now)
        if step is not None:
            log.warning("ramp_step", model=name, share_percent=step.share_percent, reason=step.reason)

    async def _prune(self, now: int) -> None:
        async with self._db.begin() as c:
            await prune(c, now)

    async def _measure(self, samples: dict[str, Sample], now: int) -> None:
        """Put what was drafted since the last look into the window."""
        async with self._db.read() as c:
            sums = await drafted_by_hour(c, now - now % HOUR_MS - HOUR_MS)
        if self._sums is not None:
            for at, total in sums.items():
                known = self._sums.get(at, Drafted())
                self._add(
                    now, at[1], total.draft_tokens - known.draft_tokens, total.accepted_tokens - known.accepted_tokens
                )
        self._sums = sums
        for (place, deployment), draft in self._drafts.items():
            sample = samples.get(place)
            if sample is not None:
                self._add(now, Key(deployment, draft), sample.draft_tokens, sample.accepted_tokens)
        while self._window and self._window[0][0] <= now - WINDOW_MS:
            self._window.popleft()

    def _add(self, now: int, key: Key, draft_tokens: int, accepted_tokens: int) -> None:
        if draft_tokens > 0:
            self._window.append((now, key, Drafted(draft_tokens, max(0, accepted_tokens))))

    def _measured(self, now: int) -> dict[Key, Drafted]:
        """Of those that drafted just now: a state is not looked at again while nothing happens."""
        found: dict[Key, Drafted] = {}
        fresh = {key for at, key, _ in self._window if at == now}
        for _, key, drafted in self._window:
            if key in fresh:
                found[key] = found.get(key, Drafted()) + drafted
        return found

    async def _sample(self, name: str, place: Upstream) -> Sample | None:
        """What a place's metrics tell since the last look; None at the first, or when they say nothing."""
        before = self._readings.pop(name, None)
        try:
            reading = await _read(place)
            at = time.monotonic()
            sample = None if before is None else between(before[1], reading, max(0.001, at - before[0]))
        except (UpstreamFailed, ConnectionLost, TimeoutError):
            return None
        except Exception as error:  # whatever it says: the other places are read, and ramps go on
            if self._unreadable.get(name) != str(error):
                log.warning("metrics_unreadable", place=name, reason=str(error))
            self._unreadable[name] = str(error)
            return None
        self._unreadable.pop(name, None)
        self._readings[name] = (at, reading)
        return sample


async def _read(place: Upstream) -> Reading:
    """Raises what a place can fail with, ValueError for an answer that says nothing."""
    assert place.metrics_path is not None
    async with asyncio.timeout(TIMEOUT_S):
        answer = await place.get(place.metrics_path.encode(), below_base=False)
        body = await read_all(answer, MAX_METRICS_BYTES)
    if answer.status != 200:
        raise ValueError(f"HTTP {answer.status}")
    return read_metrics(body.decode(errors="replace"))


async def _apart(work: Awaitable[None], **about: str) -> None:
    """Do it; a failure is logged, and nobody else's."""
    try:
        await work
    except LedgerError as error:
        log.warning("observing_waits", reason=str(error), **about)
    except Exception as error:
        log.error("observing_failed", exc_info=error, **about)


def _places(settings: Settings) -> dict[str, Upstream]:
    """Those with metrics, each with a client of our own."""
    found = {
        name: Upstream(name, item.base_url, item.api_key, Patience(connect=TIMEOUT_S), metrics_path=item.metrics)
        for name, item in settings.upstreams.items()
        if item.metrics is not None
    }
    if settings.backend is not None:
        found[BACKEND] = Upstream(
            BACKEND, settings.backend.base_url, None, Patience(connect=TIMEOUT_S), metrics_path="/metrics"
        )
    return found


def _own_drafts(settings: Settings) -> dict[tuple[str, str], str]:
    """(place, deployment) → the draft it always has. What such a place drafts, its answers do not tell."""
    return {
        (item.to, deployment): item.draft
        for name, model in settings.models.items()
        for deployment, item in zip(deployment_names(name, model), model.deployments, strict=True)
        if item.draft is not None
    }
