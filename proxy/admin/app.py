"""The admin API as one ASGI application, mounted at /admin/v1: token → role → decode → one transaction → answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from sqlalchemy.ext.asyncio import AsyncConnection
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ledger.audit import By
from ledger.database import Database
from ledger.errors import Conflict, Invalid, LedgerError, NotFound
from ledger.money import MoneyError
from proxy.admin.endpoints import Call, Document, Endpoint, Installation
from proxy.admin.idempotency import IdempotentCall
from proxy.admin.input import MAX_BODY_BYTES, decode_body, decode_query, refuse_nul
from proxy.admin.openapi import openapi_document
from proxy.admin.resources import ENDPOINTS
from proxy.admin.tokens import Caller, authenticate
from proxy.openai.errors import (
    INVALID,
    PERMISSION,
    ApiError,
    from_ledger,
    internal_error,
    invalid,
    method_not_allowed,
    not_found,
    too_large,
)
from proxy.secrets import key_secret
from proxy.settings import Settings

log = structlog.get_logger()


def admin_app(settings: Settings, database: Callable[[], Database]) -> Starlette:
    """database: gives the open database, or raises LedgerUnavailable; asked at each request."""
    installation = Installation(settings, key_secret(settings))
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in ENDPOINTS:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint
    routes = [
        Route(path.replace("{user}", "{user:path}"), _route(installation, database, methods))  # names may hold a slash
        for path, methods in by_path.items()
    ]
    document = msgspec.json.encode(openapi_document(ENDPOINTS))
    routes.append(Route("/openapi.json", lambda request: Response(document, media_type="application/json")))
    return Starlette(routes=routes, exception_handlers={404: nothing_there, 405: wrong_method})


class _Route:
    """All methods of one path. A class, so that Starlette passes every method on instead of answering 405 itself."""

    def __init__(
        self, installation: Installation, database: Callable[[], Database], methods: dict[str, Endpoint]
    ) -> None:
        self._installation = installation
        self._database = database
        self._methods = methods

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except ClientDisconnect:
            return
        except Exception as error:
            response = error_response(as_api_error(error))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        db = self._database()
        caller = await authenticate(request, db, self._installation)
        endpoint = self._methods.get("GET" if request.method == "HEAD" else request.method)
        if endpoint is None:
            raise method_not_allowed(request.method, request.url.path, ", ".join(self._methods))
        _check_role(endpoint, caller)
        refuse_nul([*request.path_params.values(), *request.query_params.values()])
        query = decode_query(endpoint, request.query_params.multi_items())
        raw = await _read(request)
        body = decode_body(endpoint, raw)
        by = By(caller.actor, time.time_ns() // 1_000_000, request.headers.get("x-audit-reason"))

        def call(c: AsyncConnection, prepared: Any = None) -> Call:
            return Call(self._installation, db, c, by, dict(request.path_params), query, body, prepared)

        if not endpoint.writes:
            async with db.read() as c:
                return _response(endpoint.status, await endpoint.run(call(c)))
        return await self._write(request, endpoint, caller, raw, by, body, call)

    async def _write(
        self,
        request: Request,
        endpoint: Endpoint,
        caller: Caller,
        raw: bytes,
        by: By,
        body: Any,
        call: Callable[..., Call],
    ) -> Response:
        """One transaction for the change and, with an Idempotency-Key, for its stored answer."""
        key = request.headers.get("idempotency-key")
        prepared = None if endpoint.prepare is None else await endpoint.prepare(self._database(), by, body)
        async with self._database().begin() as c:
            if key is None:
                response = _response(endpoint.status, await endpoint.run(call(c, prepared)))
            else:
                secret = self._installation.key_secret
                path = request.url.path
                once = IdempotentCall.of(key, caller.actor, request.method, path, raw, secret)
                replayed = await once.replay(c)
                if replayed is not None:
                    status, answer = replayed
                    headers = {"idempotent-replayed": "true"}
                    return Response(answer, status, media_type="application/json", headers=headers)
                response = _response(endpoint.status, await endpoint.run(call(c, prepared)))
                await once.store(c, response.status_code, bytes(response.body), by.at_ms)
        return response


def _route(
    installation: Installation, database: Callable[[], Database], methods: dict[str, Endpoint]
) -> Callable[..., Any]:
    return _Route(installation, database, methods)


def _check_role(endpoint: Endpoint, caller: Caller) -> None:
    if caller.role not in endpoint.roles:
        allowed = " or ".join(sorted(endpoint.roles))
        message = f"this needs a token with the role {allowed}; yours is {caller.role}"
        raise ApiError(403, PERMISSION, "role_not_allowed", message, should_retry=False)


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise too_large(MAX_BODY_BYTES)
    return bytes(body)


def _response(status: int, answer: Any) -> Response:
    if isinstance(answer, Document):
        headers = {"content-disposition": f'attachment; filename="{answer.filename}"'}
        return Response(answer.content, status, media_type=answer.media_type, headers=headers)
    if answer is None:
        return Response(status_code=204)
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """The wire's form of whatever an endpoint raised; what nobody expected is logged and becomes a 500."""
    match error:
        case ApiError():
            return error
        case Invalid(field=name):
            return invalid(str(error), name)
        case MoneyError():
            return invalid(str(error))
        case NotFound():
            return ApiError(404, INVALID, "not_found", str(error))
        case Conflict():
            return ApiError(409, INVALID, "conflict", str(error), should_retry=False)
        case LedgerError():
            known = from_ledger(error)
            if known.status != 500:
                return known
    log.error("admin_request_failed", exc_info=error)
    return internal_error()


def error_response(error: ApiError) -> Response:
    response = Response(error.body(), error.status, media_type="application/json")
    response.raw_headers.extend(error.headers())
    return response


async def nothing_there(request: Request, _: Exception) -> Response:
    return error_response(not_found(request.url.path))


async def wrong_method(request: Request, error: Exception) -> Response:
    allowed = (getattr(error, "headers", None) or {}).get("Allow", "GET")
    return error_response(method_not_allowed(request.method, request.url.path, allowed))
