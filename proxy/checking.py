"""Active health checks: places that do not answer are left out of every route before a request finds out."""

from __future__ import annotations

import asyncio

import structlog

from proxy.http1 import ConnectionLost
from proxy.settings import HealthCheck
from proxy.upstream import Upstream, UpstreamFailed, read_all

log = structlog.get_logger(__name__)

FAILURES_BEFORE_DOWN = 2
MAX_BYTES = 2**20


async def keep_checking(upstream: Upstream, check: HealthCheck) -> None:
    """Runs for ever, and says in `upstream.up` what it finds. Two failures in a row mean down, one success up."""
    failures = 0
    while True:
        trouble = await trouble_of(upstream, check)
        failures = 0 if trouble is None else failures + 1
        up = failures < FAILURES_BEFORE_DOWN if upstream.up else failures == 0
        if up != upstream.up:
            log.warning("health_changed", upstream=upstream.name, up=up, reason=trouble)
        upstream.up = up
        await asyncio.sleep(check.interval_s)


async def trouble_of(upstream: Upstream, check: HealthCheck) -> str | None:
    """What is wrong with it; None: it answered below 400 in time."""
    try:
        async with asyncio.timeout(check.timeout_s):
            answer = await upstream.get(check.path.encode(), below_base=False)
            await read_all(answer, MAX_BYTES)
    except (UpstreamFailed, ConnectionLost, TimeoutError) as error:
        return str(error) or "it does not answer in time"
    return None if answer.status < 400 else f"HTTP {answer.status}"
