"""Trying: which deployment is asked when, how long for, and what a try that failed is taken for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from typing import TypeVar

from proxy.openai.errors import upstream_error, upstream_timeout
from proxy.routing import Deployment
from proxy.run import Run
from proxy.upstream import UpstreamFailed
from proxy.watch import Interrupted

T = TypeVar("T")

QUEUE_S = 600.0
"""Beyond what a queue lets anybody wait: it refuses by itself, and waiting is no failure of the upstream."""


def attempts(candidates: list[Deployment]) -> Iterator[tuple[Deployment, int]]:
    """Each deployment as often as it may be tried, with the number of the try."""
    for deployment in candidates:
        for tries in range(1, deployment.upstream.retries.times + 2):
            yield deployment, tries


async def worth_another_try(run: Run, deployment: Deployment, failure: UpstreamFailed | None, tries: int) -> bool:
    """Waits as long as is due first. failure: of the last try; None: it was not asked. Raises Interrupted."""
    pause_s = None if failure is None else deployment.upstream.retries.pause_s(failure, tries - 1)
    if pause_s is None:
        return False
    run.watch.restart(QUEUE_S)
    await run.watch.wait(asyncio.sleep(pause_s), "quiet", QUEUE_S)
    return True


async def in_time(run: Run, deployment: Deployment, awaitable: Awaitable[T], seconds: float) -> T:
    """Raises UpstreamFailed when the time is over, Interrupted when the client has gone."""
    try:
        return await run.watch.wait(awaitable, "first_byte", seconds)
    except Interrupted as error:
        if error.reason == "client_gone":
            raise
        message = f"The upstream `{deployment.upstream.name}` did not answer in time."
        raise UpstreamFailed("timeout", upstream_timeout(message)) from error


def broken(deployment: Deployment, what: str) -> UpstreamFailed:
    return UpstreamFailed("broken", upstream_error(f"The upstream `{deployment.upstream.name}`: {what}."))
