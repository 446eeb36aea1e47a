"""One request's life, top to bottom: authenticate → admit → hold → forward → settle → answer.

Whatever happens on the way, three things hold: nothing reaches an upstream before INTENT is written; the client sees
the final usage, `[DONE]` or the end of the body only after SETTLE is durable; a hold that was not settled is voided.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import structlog

from ledger.errors import AlreadyAnswered, InsufficientQuota, LedgerError
from ledger.gate import Gate
from ledger.records import Status
from policies.access import Network, check_access
from policies.admission import Admission, Slot
from policies.drafts import choose_draft
from policies.quotas import Limiter
from policies.refusal import Refusal
from proxy.asgi import (
    JSON,
    ClientGone,
    Receive,
    Reply,
    Scope,
    Send,
    client_of,
    headers_of,
    read_body,
    refuse_packed_body,
    text,
)
from proxy.attempts import QUEUE_S, attempts, broken, in_time, worth_another_try
from proxy.auth import Keyring
from proxy.hangups import whole
from proxy.http1 import ConnectionLost
from proxy.ids import RequestIds, now_ms
from proxy.metering import without_generation
from proxy.metrics import Metrics
from proxy.notices import Notices
from proxy.openai.chunks import StreamReader
from proxy.openai.dialects import Dialect
from proxy.openai.errors import (
    ApiError,
    as_api_error,
    internal_error,
    model_not_found,
    no_deployment_available,
    no_embeddings,
    shutting_down,
)
from proxy.openai.plain import NoAnswer
from proxy.openai.requests import refuse_surcharges
from proxy.openai.unstreamed import Unstreamed, is_unstreamed
from proxy.relay import Ending, Relay
from proxy.replay import Recorder, body_hash, idempotency_key, keep, replay
from proxy.routing import Deployment, Route
from proxy.run import Request, Run
from proxy.settling import charge, let_go, note_cost, note_left, used
from proxy.upstream import Answer, Kind, Patience, UpstreamFailed, failure_of, read_all
from proxy.watch import Interrupted, Watch

log = structlog.get_logger(__name__)


class Gateway:
    """The path that every generating request takes, whatever its dialect."""

    def __init__(
        self,
        *,
        keyring: Keyring,
        routes: Mapping[str, Route],
        limiter: Limiter,
        admission: Admission,
        gate: Gate,
        metrics: Metrics,
        max_body_bytes: int,
        trusted_proxies: tuple[Network, ...] = (),
        notices: Notices | None = None,
    ) -> None:
        self._keyring = keyring
        self._routes = routes
        self._limiter = limiter
        self._admission = admission
        self._gate = gate
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._trusted_proxies = trusted_proxies
        self._notices = notices
        self._ids = RequestIds()

    async def serve(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; every outcome is an answer."""
        at_ms = now_ms()
        reply = Reply(send, self._ids.new(at_ms), dialect.id_header)
        try:
            request = await self._understand(dialect, scope, receive, reply.request_id, at_ms)
            await self._admit(request, receive, reply)
        except ClientGone:
            self._metrics.refused("client_gone")
        except (ApiError, Refusal, LedgerError) as error:
            await self._refuse(dialect, reply, as_api_error(error))
        except asyncio.CancelledError:  # this worker is stopping; a stream that has begun has said so itself
            log.warning("request_cut", request_id=reply.request_id, reason="the gateway is stopping")
            if not reply.begun:  # nobody above us waits for the error: it would be logged as one of ours
                await self._refuse(dialect, reply, shutting_down())
        except Exception as error:
            log.error("request_failed", request_id=reply.request_id, exc_info=error)
            await self._refuse(dialect, reply, internal_error())

    # Who asks, and for what

    async def _understand(
        self, dialect: Dialect, scope: Scope, receive: Receive, request_id: str, at_ms: int
    ) -> Request:
        headers = headers_of(scope)
        principal = await self._keyring.principal(dialect.token(headers))
        refuse_packed_body(headers)
        body = await read_body(receive, self._max_body_bytes)
        call = dialect.parse(body)
        check_access(principal, call.model, client_of(scope, self._trusted_proxies), call.end_user, at_ms)
        route = self._routes.get(call.model)
        if route is None:
            raise model_not_found(call.model)
        if route.settings.surcharges == "refuse":
            refuse_surcharges(call)
        speculation = choose_draft(
            text(headers.get(b"x-speculative-decoding")),
            text(headers.get(b"x-draft-model")),
            model=call.model,
            allowed=route.settings.drafts,
            default=route.settings.default_draft,
            key_drafts=principal.drafts,
            route_default_mode=route.settings.speculative,
        )
        key = idempotency_key(headers.get(b"idempotency-key"))
        once = None if key is None else (key, body_hash(dialect.path, body))
        return Request(request_id, at_ms, dialect, call, principal, route, speculation, headers, once)

    # May it run now, and who pays

    async def _admit(self, request: Request, receive: Receive, reply: Reply) -> None:
        call, principal = request.call, request.principal
        sticky_key = request.route.sticky_key(principal.team_id, principal.key_id, call.end_user)
        candidates = request.route.candidates(sticky_key, request.at_ms, principal.team_id, request.named_draft)
        if not candidates:
            raise no_deployment_available(call.model, request.route.rest_ms(request.at_ms))
        ticket = await self._limiter.admit(principal, call.model, call.end_user, call.estimated_tokens)
        try:
            hold = await self._gate.hold(request.ask(candidates[0]))
        except AlreadyAnswered as done:
            ticket.cancel()
            await replay(self._gate.db, request.dialect, call, done.request_id, done.answer, reply)
            return
        except BaseException as error:
            ticket.cancel()
            if isinstance(error, InsufficientQuota) and self._notices is not None:
                self._notices.refused(principal, error)
            raise
        watch = Watch(receive, candidates[0].upstream.patience.total)
        run = Run(request, hold, ticket, watch, reply)
        status: Status = "failed"
        try:
            await self._forward(run, candidates)
        except Refusal:
            ticket.cancel()
            raise
        except Interrupted:  # the client has gone, and nothing was delivered
            status = "cancelled"
            self._metrics.refused("client_gone")
        finally:
            watch.close()
            ticket.release()
            await let_go(run, status, "gone" if status == "cancelled" else "no answer")

    # Who answers

    async def _forward(self, run: Run, candidates: list[Deployment]) -> None:
        """Ask one deployment after the other until one begins to answer."""
        failure: UpstreamFailed | None = None
        last: UpstreamFailed | None = None  # of the try before this one; None: it was not asked
        for deployment, tries in attempts(candidates):
            if tries > 1 and not await worth_another_try(run, deployment, last, tries):
                continue
            patience = deployment.upstream.patience
            slot = self._admission.slot(deployment.upstream.name, run.request.principal.team_id)
            try:
                if not slot.take():
                    run.watch.restart(QUEUE_S)
                    await in_time(run, deployment, slot.acquire(), QUEUE_S)
                run.deployment = deployment
                run.attempts += 1
                run.watch.restart(patience.total)
                if run.request.call.streamed:
                    broke = await self._stream(run, deployment, patience, slot)
                else:
                    broke = False
                    await self._answer(run, deployment, slot)
            except Interrupted:
                await note_left(run, deployment)
                raise
            except Refusal:  # its queue is full, or was too slow: it was not asked
                last = None
                if deployment is candidates[-1]:
                    if failure is None:
                        raise
                    break  # what an upstream said before tells whether to ask again
            except UpstreamFailed as error:
                failure = last = error
                slot.release()
                again = deployment.upstream.retries.pause_s(error, tries) is not None
                self._failed(run, deployment, error.kind, error.pause_ms, again=again)
                await note_cost(run, deployment, error)
                if error.kind == "request":
                    break
            else:
                if broke:
                    self._failed(run, deployment, "broken")
                else:
                    deployment.fitness.succeeded()
                return
            finally:
                slot.release()
        assert failure is not None
        run.ticket.release(0)
        raise failure.error

    def _failed(
        self, run: Run, deployment: Deployment, kind: Kind, pause_ms: int | None = None, *, again: bool = False
    ) -> None:
        deployment.fitness.failed(kind, now_ms(), pause_ms, again=again)
        self._metrics.upstream_failed(run.request.call.model, deployment.name, kind)

    async def _send(self, run: Run, deployment: Deployment) -> Answer:
        """The request as this deployment wants it. Returns a 2xx answer. Raises UpstreamFailed."""
        request, upstream = run.request, deployment.upstream
        dialect = run.dialect
        limit = run.lowered_limit()
        body = dialect.forward(request.call, deployment.model, limit, continuous_usage=upstream.is_backend)
        headers = b"x-request-id: %b\r\n%b" % (request.id.encode(), dialect.forward_headers(request.headers))
        traceparent = request.headers.get(b"traceparent")
        if traceparent is not None:
            headers += b"traceparent: %b\r\n" % traceparent
        speculation = request.speculation
        run.draft_model = deployment.draft
        if deployment.speculates:
            headers += b"x-speculative-decoding: %b\r\n" % speculation.mode.encode()
            headers += b"x-tallygate-team: %b\r\n" % request.principal.team_id.encode()  # its queue is fair among teams
            if speculation.draft is not None:
                run.draft_model = speculation.draft
                headers += b"x-draft-model: %b\r\n" % speculation.draft.encode()
        answer = await upstream.post(dialect.upstream_path, body, headers, x_api_key=dialect.sends_x_api_key)
        if 200 <= answer.status < 300 and answer.status != 204:
            return answer
        try:
            body = await read_all(answer, 2**20)
        except ConnectionLost:
            body = b""
        if answer.status == 404 and not dialect.generates and b"model_not_found" not in body:
            raise UpstreamFailed("request", no_embeddings(request.call.model, upstream.name))
        raise failure_of(upstream.name, answer.status, answer.headers, body)

    # The answer in one piece

    async def _answer(self, run: Run, deployment: Deployment, slot: Slot) -> None:
        request = run.request
        came = await whole(run, deployment, self._whole(run, deployment))
        slot.release()  # the deployment is done with it; settling need not keep the next one waiting
        try:
            plain = run.dialect.plain(request.id, request.call, came.body)
        except NoAnswer as error:
            if came.gone:
                raise Interrupted("client_gone") from None
            raise broken(deployment, f"its answer is none: {error}") from error
        counting = deployment.upstream.counting
        told = plain.usage if request.dialect.generates else without_generation(plain.usage)
        if came.cut and told is not None and not told.generated_tokens:
            raise Interrupted("client_gone")  # ended before its first token
        tokens = await used(
            run,
            counting,
            told,
            generated_tokens=lambda: counting.answer_tokens(plain.text(), None) if request.dialect.generates else 0,
            reason="no_usage",
            absurd=plain.absurd,
        )
        answer = keep(False, came.body, run.dialect.native) if request.once is not None and not came.cut else None
        status: Status = "cancelled" if came.gone else "completed"
        settled = await charge(run, self._metrics, status, tokens, told, answer=answer)
        if came.gone:
            return
        body = plain.body(settled.usage(generates=request.dialect.generates))
        await run.reply.whole(200, body, [JSON, *run.headers(settled)])

    async def _whole(self, run: Run, deployment: Deployment) -> bytes:
        answer = await self._send(run, deployment)
        try:
            return await read_all(answer)
        except ConnectionLost as error:
            raise broken(deployment, str(error)) from error

    # The answer as it comes

    async def _stream(self, run: Run, deployment: Deployment, patience: Patience, slot: Slot) -> bool:
        """Whether it broke off after the client had seen its beginning. Raises UpstreamFailed before that."""
        call = run.request.call
        reader = run.dialect.reader(run.request.id, call)
        answer = await in_time(run, deployment, self._send(run, deployment), patience.first_byte)
        if not run.dialect.native and is_unstreamed(answer):
            answer = Unstreamed(answer, reader)
            patience = patience.for_one_piece()
        if deployment.upstream.counting.needs_text:
            reader.keep_text()
        relay = Relay(deployment.upstream.name, answer, reader, run.watch, patience)
        try:
            await relay.open()
            if run.request.once is not None:
                relay.recorder = Recorder(run.dialect.native)
            ending = await relay.run(run.hold, run.reply, run.headers(), call.least_prompt_tokens)
            if ending.how == "gone" and run.request.route.settings.on_hangup == "finish":
                await relay.finish(run.hold, run.request.route.settings.finish_s)
            relay.leave()
            slot.release()
            await self._finish(run, deployment, ending, reader, relay)
            return ending.how == "broken" and not ending.long
        except (UpstreamFailed, Interrupted):
            raise
        except BaseException as error:  # this worker is stopping, or has failed: what was delivered is settled first
            if not run.settled:
                stopped = isinstance(error, asyncio.CancelledError)
                ending = Ending("stopped", shutting_down(begun=True)) if stopped else Ending("broken", internal_error())
                await self._finish(run, deployment, ending, reader, relay)
            raise
        finally:
            relay.leave()

    async def _finish(
        self, run: Run, deployment: Deployment, ending: Ending, reader: StreamReader, relay: Relay
    ) -> None:
        """Settle what was delivered, then let the client see the end."""
        told, counting = reader.usage, deployment.upstream.counting
        if told is None and not reader.delivered_deltas and ending.how in ("gone", "stopped", "broken"):
            return await self._nothing(run, ending, reader)
        tokens = await used(
            run,
            counting,
            told,
            generated_tokens=lambda: counting.answer_tokens(
                reader.text(), None if reader.is_whole else reader.delivered_deltas
            ),
            reason="no_usage" if ending.how == "done" else ending.how,
            absurd=reader.absurd,
            unreported=reader.unreported,
        )
        answer = relay.recorder.kept() if relay.recorder is not None and ending.how == "done" else None
        settled = await charge(run, self._metrics, ending.status, tokens, told, relay.first_token_ns, answer)
        if ending.how == "gone":
            return None
        if ending.error is not None:
            return await self._end(run, reader.error_event(ending.error))
        return await self._end(run, reader.tail(settled.usage(), cut=ending.how == "cut"))

    async def _nothing(self, run: Run, ending: Ending, reader: StreamReader) -> None:
        """A stream that brought no token costs nothing."""
        await let_go(run, ending.status, ending.how)
        run.ticket.release(0)
        if ending.error is not None and run.reply.begun:
            await self._end(run, reader.error_event(ending.error))

    async def _end(self, run: Run, data: bytes) -> None:
        """The last bytes of a stream. A client that does not take them keeps no place on the upstream."""
        assert run.deployment is not None
        patience = run.deployment.upstream.patience
        run.watch.restart(patience.idle)
        with contextlib.suppress(Interrupted):
            await run.watch.wait(run.reply.end(data), "idle", patience.idle)

    async def _refuse(self, dialect: Dialect, reply: Reply, error: ApiError) -> None:
        self._metrics.refused(error.code or error.type)
        if reply.ended:
            return
        if reply.begun:
            await reply.end(dialect.error_event(error))
        else:
            await reply.whole(error.status, dialect.error_body(error), [JSON, *dialect.head(error.headers())])
