"""Clients that leave before a plain answer: what was generated for them is learnt all the same, and settled.

A connection that is closed says nothing any more. So our own backend is told to end the request, and answers it with
what it has; a route may let an upstream finish (`on_hangup: finish`). Any other upstream is hung up on, and what it
generated stays unknown: nobody is billed for that. Nor is a request with an Idempotency-Key cut short: its client would
have paid for half an answer, and could never get the whole one under that key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from proxy.attempts import in_time
from proxy.http1 import ConnectionLost
from proxy.routing import Deployment
from proxy.run import Run
from proxy.upstream import Upstream, UpstreamFailed, read_all
from proxy.watch import Interrupted

LAST_WORDS_S = 10.0
"""How long the backend may take to end a request: a round, and whatever else keeps it."""
KNOWN_WITHIN_S = 0.5
"""How long it may not know the request yet, which was sent a moment ago."""
AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Whole:
    """The body of a plain answer. gone: the client has left. cut: so it is what there was by then."""

    body: bytes
    gone: bool = False
    cut: bool = False


async def whole(run: Run, deployment: Deployment, answering: Coroutine[Any, Any, bytes]) -> Whole:
    """Raises UpstreamFailed, and Interrupted when the client has left and there is nothing to learn any more."""
    upstream, settings = deployment.upstream, run.request.route.settings
    finishes = settings.on_hangup == "finish"
    if not (finishes or (upstream.is_backend and run.request.once is None)):
        return Whole(await in_time(run, deployment, answering, upstream.patience.total))
    if run.watch.client_gone:  # while it waited for its turn: nobody is asked for it
        answering.close()
        raise Interrupted("client_gone")
    task = asyncio.create_task(answering)
    try:
        return Whole(await in_time(run, deployment, asyncio.shield(task), upstream.patience.total))
    except Interrupted:
        try:
            async with asyncio.timeout(settings.finish_s if finishes else LAST_WORDS_S):
                if not finishes:
                    await _end(upstream, run.request.id, task)
                return Whole(await asyncio.shield(task), gone=True, cut=not finishes)
        except (UpstreamFailed, TimeoutError):
            raise Interrupted("client_gone") from None
    finally:
        if not task.done():
            task.cancel()  # and with it the connection
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])


async def _end(upstream: Upstream, request_id: str, answering: asyncio.Task[bytes]) -> None:
    """Ask until the backend knows it, or has answered it. Raises UpstreamFailed, TimeoutError when it does neither."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + KNOWN_WITHIN_S
    while not answering.done():
        answer = await upstream.post(b"/requests/%b/cancel" % request_id.encode(), b"")
        with contextlib.suppress(ConnectionLost):
            await read_all(answer)
        if 200 <= answer.status < 300:
            return
        if answer.status != 404 or loop.time() > deadline:
            raise TimeoutError
        await asyncio.wait([answering], timeout=AGAIN_S)
