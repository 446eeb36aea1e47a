"""The engine over HTTP, in the OpenAI dialect: chat and plain completions, models, health, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from backend import prompts, wire
from backend.answers import AnswerWriter, event
from backend.errors import BadRequest, QueueFull
from backend.metrics import EngineMetrics
from backend.service import Service
from backend.worker import Answer, EngineWorker

_log = structlog.get_logger("backend.server")
_KEEP_ALIVE_S = 5.0
_MAX_BODY_BYTES = 32 * 1024 * 1024


class Endings:
    """Plain requests that run, by the x-request-id they came with, so that whoever sent one can have it ended early and
    still learn what was generated. A stream needs none of that: it has told, and hanging up ends it."""

    def __init__(self) -> None:
        self._running: dict[str, list[asyncio.Event]] = {}

    @contextlib.contextmanager
    def of(self, request_id: str | None) -> Iterator[asyncio.Event]:
        """Set once somebody wants the request to end."""
        wanted = asyncio.Event()
        if request_id is None:
            yield wanted
            return
        running = self._running.setdefault(request_id, [])
        running.append(wanted)
        try:
            yield wanted
        finally:
            running.remove(wanted)
            if not running:
                del self._running[request_id]

    def end(self, request_id: str) -> bool:
        """False: no such request runs."""
        running = self._running.get(request_id, ())
        for wanted in running:
            wanted.set()
        return bool(running)


@dataclass(slots=True)
class ServerState:
    """What the server knows of the engine: nothing at first, then how loading goes, then the engine itself."""

    served_models: tuple[str, ...]
    progress: str = "starting"
    failure: str | None = None
    service: Service | None = None
    worker: EngineWorker | None = None
    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    endings: Endings = field(default_factory=Endings)

    def ready(self, service: Service) -> None:
        self.worker = EngineWorker(service.engine)
        self.service = service
        self.metrics.watch(service.engine)


class ApiError(Exception):
    """An answer that is an error. `retry_after_s` becomes the header."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        code: str | None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = wire.error_body(message, type, code, param)


def build_app(state: ServerState) -> Starlette:
    """The ASGI application; it answers /health at once and everything else when `state` has a service."""

    async def complete(request: HttpRequest, *, chat: bool) -> Response:
        with state.endings.of(request.headers.get("x-request-id")) as end_wanted:
            return await answered(request, end_wanted, chat=chat)

    async def answered(request: HttpRequest, end_wanted: asyncio.Event, *, chat: bool) -> Response:
        service, worker = _loaded(state)
        body = await _read_body(request)
        with _as_api_errors():
            plan = (
                prompts.plan_chat(body, request.headers, service, state.served_models)
                if chat
                else (prompts.plan_completion(body, request.headers, service, state.served_models))
            )
            answer = await worker.submit(plan.requests)
        writer = AnswerWriter(
            chat=chat,
            model=plan.model,
            draft=plan.draft,
            tokenizer=service.tokenizer,
            fingerprint=f"tallygate-{service.weights}",
            tools=plan.tools,
            echo=plan.echo,
        )
        writer.start(answer.sequences)
        headers = {"x-tallygate-draft-model": plan.draft or "none"}
        state.metrics.started(chat=chat, streamed=plan.stream)
        if plan.stream:
            return _EventStream(answer, writer, plan, headers, state.metrics)
        return await _whole_answer(request, answer, writer, headers, state.metrics, end_wanted)

    async def chat_completions(request: HttpRequest) -> Response:
        return await complete(request, chat=True)

    async def completions(request: HttpRequest) -> Response:
        return await complete(request, chat=False)

    async def cancel(request: HttpRequest) -> Response:
        request_id = request.path_params["request_id"]
        if not state.endings.end(request_id):
            raise ApiError(404, f"no plain request {request_id!r} runs here", "invalid_request_error", "not_found")
        return JSONResponse({"id": request_id, "object": "request", "cancelled": True})

    async def models(request: HttpRequest) -> Response:
        service, _ = _loaded(state)
        return JSONResponse({"object": "list", "data": [_model(name, service) for name in state.served_models]})

    async def model(request: HttpRequest) -> Response:
        service, _ = _loaded(state)
        name = request.path_params["name"]
        if name not in state.served_models:
            raise _unknown_model(name, state.served_models)
        return JSONResponse(_model(name, service))

    async def health(request: HttpRequest) -> Response:
        if state.service is None:
            return JSONResponse({"status": "loading", "progress": state.failure or state.progress}, status_code=503)
        scheduler = state.service.engine.scheduler
        return JSONResponse(
            {
                "status": "ok",
                "running": len(scheduler.running),
                "waiting": scheduler.waiting,
                "free": scheduler.free_slots,
            }
        )

    async def metrics(request: HttpRequest) -> Response:
        return Response(state.metrics.render(), media_type="text/plain; version=0.0.4")

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        if state.worker is not None:
            await asyncio.to_thread(state.worker.close)

    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/requests/{request_id}/cancel", cancel, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    handlers: dict[Any, Callable[[HttpRequest, Any], Awaitable[Response]]] = {
        ApiError: _api_error,
        HTTPException: _http_error,
        Exception: _server_error,
    }
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.add_middleware(_RequestIds)
    return app


def _loaded(state: ServerState) -> tuple[Service, EngineWorker]:
    if state.service is None or state.worker is None:
        raise ApiError(503, f"the model is loading: {state.progress}", "api_error", "model_loading", retry_after_s=2)
    return state.service, state.worker


def _model(name: str, service: Service) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "tallygate",
        "tallygate": {
            "weights": service.weights,
            "drafts": dict(service.drafts),
            "context_tokens": service.engine.target.cache.capacity,
        },
    }


def _unknown_model(name: str, served: tuple[str, ...]) -> ApiError:
    return ApiError(
        404,
        f"the model {name!r} is not served here; this backend serves {', '.join(served)}",
        "invalid_request_error",
        "model_not_found",
        "model",
    )


async def _read_body(request: HttpRequest) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > _MAX_BODY_BYTES:
            raise ApiError(413, "the body is larger than 32 MB", "invalid_request_error", "request_too_large")
        parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def _as_api_errors() -> Any:
    try:
        yield
    except prompts.UnknownModel as error:
        raise _unknown_model(error.name, error.served) from None
    except BadRequest as error:
        raise ApiError(400, error.message, "invalid_request_error", error.code, error.param) from None
    except QueueFull as error:
        raise ApiError(
            429, error.message, "rate_limit_error", "rate_limit_exceeded", retry_after_s=error.retry_after_s
        ) from None


async def _whole_answer(
    request: HttpRequest,
    answer: Answer,
    writer: AnswerWriter,
    headers: dict[str, str],
    metrics: EngineMetrics,
    end_wanted: asyncio.Event,
) -> Response:
    """Wait for every choice. If the client hangs up before, or wants it ended, the slots are free within a round; in
    the second case it gets what was generated until then, and its usage."""

    async def collect() -> str | None:
        async for choice, update in answer.updates():
            writer.add(choice, update)
            if update.error is not None or (update.finish_reason == "cancelled" and not end_wanted.is_set()):
                return update.error or "the backend is stopping"
        return None

    collecting = asyncio.ensure_future(collect())
    leaving = asyncio.ensure_future(_gone(request.receive))
    ending = asyncio.ensure_future(end_wanted.wait())
    try:
        await asyncio.wait([collecting, leaving, ending], return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            answer.cancel()
            await asyncio.wait([collecting, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)
        error = collecting.result()
    finally:
        collecting.cancel()
        leaving.cancel()
        ending.cancel()
        answer.cancel()
        metrics.finished(answer.sequences)
    if error is not None:
        raise ApiError(500, error, "api_error", "engine_error")
    return JSONResponse(writer.body(), headers=headers)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream(Response):
    """Server-sent events; a client that hangs up frees its slots within a round."""

    def __init__(
        self,
        answer: Answer,
        writer: AnswerWriter,
        plan: prompts.Plan,
        headers: dict[str, str],
        metrics: EngineMetrics,
    ) -> None:
        super().__init__(headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        del self.headers["content-length"]
        self._answer, self._writer, self._plan, self._metrics = answer, writer, plan, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()
            leaving.cancel()
            self._answer.cancel()
            self._metrics.finished(self._answer.sequences)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._events():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        waiting = len(self._answer.sequences)
        while waiting:
            found = await self._answer.next_update(_KEEP_ALIVE_S)
            if found is None:
                yield b": waiting\n\n"
                continue
            choice, update = found
            if update.error is not None or update.finish_reason == "cancelled":
                yield event({"error": {"message": update.error or "the backend is stopping", "type": "api_error",
                                       "param": None, "code": "engine_error"}})  # fmt: skip
                return
            waiting -= update.finish_reason is not None
            chunks = self._writer.chunks(choice, update, with_usage=self._plan.continuous_usage)
            yield b"".join(chunks)
        if self._plan.include_usage:
            yield self._writer.usage_chunk()
        yield b"data: [DONE]\n\n"


class _RequestIds:
    """x-request-id on every answer: the caller's, or one of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given if 0 < len(given) <= 128 else uuid.uuid4().hex.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name)]
            await send(message)

        await self._app(scope, receive, send_with_id)


async def _api_error(_: HttpRequest, error: ApiError) -> Response:
    headers = {}
    if error.retry_after_s is not None:
        headers = {
            "retry-after": str(max(1, round(error.retry_after_s))),
            "retry-after-ms": str(round(error.retry_after_s * 1000)),
            "x-should-retry": "true",
        }
    return Response(error.body, error.status, headers, media_type="application/json")


async def _http_error(request: HttpRequest, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = wire.error_body(message, "invalid_request_error", "not_found" if error.status_code == 404 else None)
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def _server_error(_: HttpRequest, error: Exception) -> Response:
    _log.error("request_failed", error=repr(error))
    body = wire.error_body("the backend failed on this request", "api_error", "engine_error")
    return Response(body, 500, media_type="application/json")
