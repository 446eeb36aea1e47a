"""How a request's money ends: charged for what was used, kept as our own cost where nobody answered, or free again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from ledger.gate import Outcome, Tokens
from ledger.records import FailedAttempt, Status
from proxy.counting import Counting
from proxy.metering import Settled, measured
from proxy.metrics import Metrics
from proxy.openai.usage import Counts
from proxy.routing import Deployment
from proxy.run import Run
from proxy.upstream import UpstreamFailed

T = TypeVar("T")

LONG_BYTES = 32_768
"""Of a request that is read again to be counted: a longer one would keep everybody else waiting."""


async def used(
    run: Run,
    counting: Counting,
    told: Counts | None,
    *,
    generated_tokens: Callable[[], int],
    reason: str,
    absurd: bytes | None = None,
    unreported: int = 0,
) -> Tokens:
    """What is to be settled, as `measured` has it."""

    def measure() -> Tokens:
        return measured(
            told,
            prompt_tokens=lambda: run.prompt_tokens(counting),
            generated_tokens=generated_tokens,
            reason=reason,
            absurd=absurd,
            unreported=unreported,
        )

    if told is not None and told.prompt_tokens is not None and told.generated_tokens is not None:
        return measure()
    return await _aside(run, counting, measure)


async def note_cost(run: Run, deployment: Deployment, error: UpstreamFailed) -> None:
    """What a failed attempt costs at least: the prompt, if the provider took it."""
    if not error.refused:
        await _note_prompt(run, deployment)


async def note_left(run: Run, deployment: Deployment) -> None:
    """The same of an attempt that the client did not wait for."""
    if run.deployment is deployment and run.leaves_a_row:
        await _note_prompt(run, deployment)


async def _note_prompt(run: Run, deployment: Deployment) -> None:
    if deployment.price is not None:
        counting = deployment.upstream.counting
        prompt_tokens = await _aside(run, counting, lambda: run.prompt_tokens(counting))
        cost = deployment.price.cost(prompt_tokens, 0, 0)
        if cost:
            run.failed_attempts.append(FailedAttempt(deployment.name, cost))


async def _aside(run: Run, counting: Counting, work: Callable[[], T]) -> T:
    """Beside the loop where it may take long: a tokenizer needs a second for a megabyte."""
    slow = counting.needs_text or run.request.call.body_bytes > LONG_BYTES
    return await asyncio.to_thread(work) if slow else work()


async def charge(
    run: Run,
    metrics: Metrics,
    status: Status,
    tokens: Tokens,
    told: Counts | None,
    first_token_ns: int | None = None,
    answer: bytes | None = None,
) -> Settled:
    """The client pays for what it got. Durable on return. Raises LedgerUnavailable."""
    deployment = run.deployment
    assert deployment is not None
    if told is not None:
        run.draft_model = told.draft_model or deployment.draft
    price = deployment.price
    outcome = Outcome(
        status,
        deployment.name,
        run.draft_model,
        tokens,
        attempts=run.attempts,
        provider_cost_usd_pico=0
        if price is None
        else price.cost(tokens.prompt_tokens, tokens.cached_tokens, tokens.generated_tokens),
        latency_ms=run.reply.elapsed_ms(),
        ttft_ms=None if first_token_ns is None else run.reply.elapsed_ms(first_token_ns),
        answer=answer,
        failed_attempts=run.failed_attempts,
    )
    receipt = await run.hold.settle(outcome)
    run.settled = True
    run.ticket.release(tokens.prompt_tokens + tokens.generated_tokens)
    metrics.settled(run.request.call.model, outcome, receipt)
    return Settled(tokens, receipt, run.draft_model)


async def let_go(run: Run, status: Status, reason: str) -> None:
    """The client got nothing and pays nothing. What attempts in vain cost us is kept under its request, and that it
    left while somebody worked for it. Does nothing once the money is decided. Raises LedgerUnavailable."""
    if run.settled:
        return
    try:
        if run.failed_attempts or (status == "cancelled" and run.leaves_a_row):
            assert run.deployment is not None
            untold = reason if status == "cancelled" else None  # what had been generated for it by then
            nothing = Tokens(prompt_tokens=0, estimated=untold is not None, estimate_reason=untold)
            name, took_ms = run.deployment.name, run.reply.elapsed_ms()
            failed = run.failed_attempts
            await run.hold.settle(
                Outcome(status, name, None, nothing, run.attempts, 0, took_ms, failed_attempts=failed)
            )
    finally:
        await run.hold.void(reason)  # does nothing once it is settled
    run.settled = True
