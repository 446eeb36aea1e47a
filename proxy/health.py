"""Is this worker alive, can it serve, and what has its host counted."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from proxy.exposition import text_of
from proxy.worker import Worker


def health_routes(worker: Worker) -> list[Route]:
    async def live(request: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    async def ready(request: Request) -> Response:
        """200 while some request can be served, also when parts are degraded; 503 otherwise."""
        parts = worker.degraded()
        serving = worker.can_serve()
        degraded = [name for name, reasons in parts.items() if reasons]
        body = {
            "status": ("degraded" if degraded else "ok") if serving else "unavailable",
            "degraded": degraded,
            "checks": {name: {"ok": not reasons, "reasons": reasons} for name, reasons in parts.items()},
        }
        return Response(msgspec.json.encode(body), 200 if serving else 503, media_type="application/json")

    async def metrics(request: Request) -> Response:
        """Of the whole host, whichever worker is asked."""
        counted, running = await worker.host_metrics.read()
        text = await asyncio.to_thread(text_of, counted, running, worker.metrics.acceptance)
        return Response(text, media_type="text/plain; version=0.0.4")

    return [Route("/health/live", live), Route("/health/ready", ready), Route("/metrics", metrics)]
