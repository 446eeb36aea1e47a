"""The application: routes to parts. What runs hot is plain ASGI; the rest are ordinary Starlette endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from ledger.errors import LedgerError
from policies.refusal import Refusal
from proxy.account import Account
from proxy.admin.app import admin_app, error_response, nothing_there, wrong_method
from proxy.anthropic.counting import CountTokens
from proxy.anthropic.dialect import MESSAGES
from proxy.asgi import JSON, Receive, Reply, Scope, Send
from proxy.health import health_routes
from proxy.ids import RequestIds, now_ms
from proxy.openai.dialects import DIALECTS, Dialect
from proxy.openai.errors import (
    ApiError,
    as_api_error,
    internal_error,
    method_not_allowed,
)
from proxy.openai.responses.dialect import RESPONSES
from proxy.settings import Settings
from proxy.worker import Worker

log = structlog.get_logger(__name__)

Endpoint = Callable[[Scope, Receive, Send], Awaitable[None]]


def build_app(settings: Settings, *, slot: int, embed_poster: bool = False, replaces: bool = False) -> Starlette:
    """One gateway worker as an ASGI application; its lifespan opens and closes the worker.

    slot: this worker's number on its host, from 0. embed_poster: post in this process too (tests, small machines).
    replaces: another worker serves until this one does, so take no connection before some request could be answered.
    """
    worker = Worker(settings, slot, embed_poster=embed_poster)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await worker.open()
        if replaces:
            await worker.until_serving()
        try:
            yield
        finally:
            await worker.close()

    dialects = (*DIALECTS, RESPONSES, MESSAGES)
    hot: dict[str, Endpoint] = {dialect.path: Generating(worker, dialect) for dialect in dialects}
    hot["/messages/count_tokens"] = CountTokens(worker)
    routes: list[Route | Mount] = [Route("/", _what_is_here)]
    account = Account(worker)
    for prefix in ("/v1", ""):
        routes += account.routes(prefix)
    routes += health_routes(worker)
    routes.append(Mount("/admin/v1", admin_app(settings, worker.database)))
    app = GatewayApp(
        hot={prefix + path: endpoint for prefix in ("/v1", "") for path, endpoint in hot.items()},
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(RequestId)],
        exception_handlers={
            404: nothing_there,
            405: wrong_method,
            ApiError: _answer,
            LedgerError: _answer,
            Refusal: _answer,
        },
    )
    app.state.worker = worker
    return app


class GatewayApp(Starlette):
    """A Starlette application that goes straight to what runs hot: routing and middleware cost a tenth of a request."""

    def __init__(self, hot: Mapping[str, Endpoint], **options: Any) -> None:
        super().__init__(**options)
        self._hot = hot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._hot.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
        else:
            await endpoint(scope, receive, send)


class Generating:
    """A route that generates, in one dialect."""

    def __init__(self, worker: Worker, dialect: Dialect) -> None:
        self._worker = worker
        self._dialect = dialect
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._worker.gateway
        if gateway is not None and scope["method"] == "POST":
            await gateway.serve(self._dialect, scope, receive, send)
            return
        try:
            if scope["method"] != "POST":
                raise method_not_allowed(scope["method"], scope["path"], "POST")
            self._worker.serving()
        except (ApiError, LedgerError) as error:
            known = as_api_error(error)
            reply = Reply(send, self._ids.new(now_ms()), self._dialect.id_header)
            await reply.whole(known.status, self._dialect.error_body(known), [JSON, *known.headers()])


class RequestId:
    """Puts `x-request-id` on every answer, also on the 500 for what nobody expected, which Starlette would make outside
    of all middleware. The generating routes do it themselves."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._ids = RequestIds()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = self._ids.new(now_ms())
        begun = False

        async def send_with_id(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            log.error("request_failed", request_id=request_id, path=scope["path"], exc_info=error)
            if begun:
                raise
            await error_response(internal_error())(scope, receive, send_with_id)


async def _what_is_here(request: Request) -> Response:
    """For who looks at the address in a browser."""
    return JSONResponse(
        {
            "name": "TallyGate",
            "base_url": f"{request.base_url}v1",
            "health": ["/health/live", "/health/ready", "/metrics"],
            "admin_api": "/admin/v1/openapi.json",
        }
    )


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(as_api_error(error))
