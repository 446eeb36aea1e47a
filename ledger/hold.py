"""One request's money, from the moment it is set aside to the receipt. Made by `Gate.hold`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import msgspec

from ledger.billing import Bill, ByMeter, bill, cost, next_window, split, waive_all
from ledger.errors import InsufficientQuota, LedgerError, LedgerUnavailable
from ledger.plans import Part, Plan
from ledger.prices import PinnedPrice
from ledger.records import Answer, Charge, Progress, Settle, Usage, Void
from ledger.requests import Ask, Outcome, Receipt, Tokens

if TYPE_CHECKING:
    from ledger.gate import Gate

PROGRESS_TOKENS = 256
"""PROGRESS is journalled at least this often; and each PROGRESS_S, by the gate."""
MAX_RAW_BYTES = 64 << 10
MAX_ANSWER_BYTES = 1 << 20
"""A larger answer is not kept for replay."""


class Hold:
    """Money set aside for one request. End it with `settle` or `void`: until then nobody else can spend it."""

    __slots__ = (
        "_counted_prompt",
        "_gate",
        "_held_cny",
        "_held_usd",
        "_journalled_tokens",
        "_parts",
        "_plan",
        "_receipt",
        "_state",
        "_turn",
        "ask",
        "delivered_tokens",
        "month",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(
        self, gate: Gate, ask: Ask, plan: Plan, parts: list[Part], held_usd: int, held_cny: int, output_tokens: int
    ) -> None:
        self.ask = ask
        self.output_tokens = output_tokens
        """Covered now. Plain answers: the most to ask the upstream for. Streams: the current window."""
        self.prompt_tokens: int | Callable[[], int] = 0
        self.delivered_tokens = 0
        self.month = gate.months.admit(plan.month)
        self._gate = gate
        self._plan = plan
        self._parts = parts
        self._held_usd = held_usd
        self._held_cny = held_cny
        self._journalled_tokens = 0
        self._counted_prompt: int | None = None
        self._state: Literal["open", "settling", "settled", "voided", "failed"] = "open"
        self._receipt: Receipt | None = None
        self._turn: asyncio.Lock | None = None

    @property
    def price(self) -> PinnedPrice:
        return self._plan.price

    def _is_open(self) -> bool:
        return self._state == "open"

    def covers(self, generated_tokens: int) -> bool:
        return generated_tokens <= self.output_tokens

    async def extend(self, generated_tokens: int) -> bool:
        """Cover at least one token after `generated_tokens`, and a window of them when the money is there.

        False: there is none, or `max_output_tokens` is reached. Stop the upstream and finish with `length`.
        """
        plan, wanted = self._plan, next_window(generated_tokens, self.ask.max_output_tokens)
        more = wanted - self.output_tokens
        if self._state == "open" and more > 0:
            usd, cny = more * plan.output_usd, more * plan.output_cny
            parts = plan.draw(usd, cny)
            if parts is None:
                try:
                    parts, more = await self._gate.draw_slowly(plan, 0, more)
                    usd, cny = more * plan.output_usd, more * plan.output_cny
                except (InsufficientQuota, LedgerUnavailable):
                    return self.output_tokens > generated_tokens
                if not self._is_open():  # it was settled or voided while we waited
                    plan.give_back(parts, usd, cny)
                    return False
            self._add(parts, usd, cny)
            self.output_tokens += more
        return self.output_tokens > generated_tokens

    def progress(self, prompt_tokens: int | Callable[[], int], generated_tokens: int) -> None:
        """Tell how much the client has got so far. What is journalled of it is all that a crash can bill.

        prompt_tokens: or what counts them, called when they are journalled."""
        self.prompt_tokens = prompt_tokens
        self.delivered_tokens = generated_tokens
        if generated_tokens - self._journalled_tokens >= PROGRESS_TOKENS:
            self.journal_progress()
        else:
            self._gate.moving.add(self)

    def journal_progress(self) -> None:
        """Raises LedgerUnavailable when the journal has failed."""
        if self._state == "open" and self.delivered_tokens > self._journalled_tokens:
            self._journalled_tokens = self.delivered_tokens
            gate, prompt = self._gate, self.prompt_tokens
            if not isinstance(prompt, int):
                if self._counted_prompt is None:
                    self._counted_prompt = prompt()
                prompt = self._counted_prompt
            gate.journal.append(Progress(self.ask.request_id, gate.clock(), prompt, self.delivered_tokens))

    async def settle(self, outcome: Outcome) -> Receipt:
        """Book what was used. It is durable when this returns; a second call returns the same receipt.

        Raises LedgerUnavailable when the journal fails: what the client was told is then not final.
        """
        if self._state == "open":
            usage = _usage(outcome.tokens)
            tokens = (
                usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
                usage.cached_tokens,
                usage.cache_write_tokens,
                usage.generated_tokens - usage.reasoning_tokens,
                usage.reasoning_tokens,
            )
            price = self._plan.price
            usd, cny = cost(tokens, price.usd), cost(tokens, price.cny)
            if outcome.waive is not None:
                return await self._settle(outcome, usage, waive_all(tokens, price.usd, price.cny), outcome.waive)
            if usd <= self._held_usd and cny <= self._held_cny:
                used = usage.prompt_tokens + usage.generated_tokens
                return await self._settle(outcome, usage, Bill(used, usd, cny, 0, 0), None)
            return await self._settle_overrun(outcome, usage, tokens, usd, cny)
        if self._state == "settling":
            assert self._turn is not None
            async with self._turn:
                pass
            return await self.settle(outcome)
        if self._receipt is None:
            if self._state == "failed":
                raise LedgerUnavailable(f"the journal failed while request {self.ask.request_id} was settled")
            raise LedgerError(f"request {self.ask.request_id} was voided: it cannot be settled")
        await self._gate.journal.flush()
        return self._receipt

    async def void(self, reason: str) -> None:
        """The request cost nothing: everything held is free again. After a settlement this does nothing."""
        if self._state != "open":
            return
        self._state = "voided"
        ask = self.ask
        self._plan.give_back(self._parts, self._held_usd, self._held_cny)
        self._gate.ended(self)
        spender = ask.spender
        void = Void(
            ask.request_id,
            self._gate.clock(),
            reason,
            idempotency_key=ask.idempotency_key,
            team_id=spender.team_id,
            key_id=spender.key_id,
        )
        if ask.idempotency_key is None:
            self._gate.journal.append(void)
        else:  # the poster frees the key, and it reads what is durable
            await self._gate.journal.append_durable(void)

    def charges_held(self) -> list[Charge]:
        """What is held where, for the INTENT: funding accounts in the order in which they pay, then budgets."""
        held = [Charge(slice.account_id, amount) for slice, amount in self._parts]
        for slice, in_usd in self._plan.budgets:
            held.append(Charge(slice.account_id, self._held_usd if in_usd else self._held_cny))
        return held

    async def _settle_overrun(self, outcome: Outcome, usage: Usage, tokens: ByMeter, usd: int, cny: int) -> Receipt:
        """More was used than is held: take what the accounts can still give, waive the rest in whole tokens."""
        plan, price = self._plan, self._plan.price
        self._state, self._turn = "settling", asyncio.Lock()
        async with self._turn:
            cancelled: asyncio.CancelledError | None = None
            try:
                await self._gate.fill(plan, max(0, usd - self._held_usd), max(0, cny - self._held_cny))
            except LedgerUnavailable:
                pass  # then with what is here
            except asyncio.CancelledError as error:  # nobody may come back to settle: book it before we go
                cancelled = error
            finally:
                self._state = "open"
            limit_usd, limit_cny = self._limits()
            paid = bill(tokens, price.usd, price.cny, limit_usd, limit_cny)
            more_usd, more_cny = max(0, paid.usd_pico - self._held_usd), max(0, paid.cny_pico - self._held_cny)
            parts = plan.draw(more_usd, more_cny, past_dry=True)
            assert parts is not None, "the bill was cut to what is free"
            self._add(parts, more_usd, more_cny)
            used = usage.prompt_tokens + usage.generated_tokens
            reason = "overrun" if paid.billed_tokens < used else None
            receipt = await self._settle(outcome, usage, paid, reason)
            if cancelled is not None:
                raise cancelled
            return receipt

    def _limits(self) -> tuple[int | None, int | None]:
        """The most that can be billed, in USD and CNY: what is held and what is still free beside it."""
        plan = self._plan
        usd: list[int] = []
        cny: list[int] = []
        if plan.funding_in_usd:
            usd.append(self._held_usd + plan.free_funding())
        else:
            cny.append(self._held_cny + plan.free_funding())
        for slice, in_usd in plan.budgets:
            (usd if in_usd else cny).append((self._held_usd if in_usd else self._held_cny) + max(0, slice.free))
        return min(usd, default=None), min(cny, default=None)

    async def _settle(self, outcome: Outcome, usage: Usage, paid: Bill, waiver: str | None) -> Receipt:
        ask, gate, plan = self.ask, self._gate, self._plan
        spender = ask.spender
        usage = msgspec.structs.replace(usage, billed_tokens=paid.billed_tokens, waiver_reason=waiver)
        settle = Settle(
            ask.request_id,
            ask.at_ms,
            gate.clock(),
            self.month.period,
            spender.team_id,
            spender.key_id,
            spender.end_user,
            ask.model,
            outcome.deployment,
            outcome.draft_model,
            outcome.status,
            usage,
            plan.price.version_id,
            paid.usd_pico,
            paid.cny_pico,
            outcome.total_provider_cost_usd_pico,
            self._charge(paid),
            paid.waived_usd_pico if plan.funding_in_usd else paid.waived_cny_pico,
            outcome.attempts,
            outcome.latency_ms,
            outcome.ttft_ms,
            None,
            ask.idempotency_key,
            spender.billing_currency,
            plan.price.scope,
            outcome.failed_attempts,
        )
        self._state = "settled"
        gate.ended(self)
        if ask.idempotency_key is not None and outcome.answer is not None and len(outcome.answer) <= MAX_ANSWER_BYTES:
            gate.journal.append(
                Answer(ask.request_id, spender.team_id, spender.key_id, ask.idempotency_key, outcome.answer)
            )
        self._receipt = Receipt(
            ask.request_id, paid.billed_tokens, waiver, paid.usd_pico, paid.cny_pico, plan.price.version_id
        )
        try:
            await gate.journal.append_durable(settle)
        except LedgerError as error:
            self._state, self._receipt = "failed", None
            gate.journal_failed(error)
            raise
        return self._receipt

    def _charge(self, paid: Bill) -> list[Charge]:
        """Move the cost from held to spent, free the rest, and say which account pays what."""
        plan = self._plan
        amount = paid.usd_pico if plan.funding_in_usd else paid.cny_pico
        charges: list[Charge] = []
        for slice, part in split(amount, self._parts):
            slice.spent += part
            slice.free -= part
            charges.append(Charge(slice.account_id, part))
        for slice, part in self._parts:
            slice.free += part
        for slice, in_usd in plan.budgets:
            part = paid.usd_pico if in_usd else paid.cny_pico
            slice.spent += part
            slice.free += (self._held_usd if in_usd else self._held_cny) - part
            if part:
                charges.append(Charge(slice.account_id, part))
        return charges

    def _add(self, parts: list[Part], usd: int, cny: int) -> None:
        """Merge a further draw into what is held."""
        for slice, amount in parts:
            for index, (known, held) in enumerate(self._parts):
                if known is slice:
                    self._parts[index] = (slice, held + amount)
                    break
            else:
                self._parts.append((slice, amount))
        self._held_usd += usd
        self._held_cny += cny


def _usage(t: Tokens) -> Usage:
    """The counts as they go into the ledger: subsets are never larger than what they are part of, nothing is
    negative."""
    prompt, generated, draft = max(0, t.prompt_tokens), max(0, t.generated_tokens), max(0, t.draft_tokens)
    cached = min(max(0, t.cached_tokens), prompt)
    return Usage(
        prompt,
        cached,
        min(max(0, t.cache_write_tokens), prompt - cached),
        generated,
        min(max(0, t.reasoning_tokens), generated),
        0,
        None,
        draft,
        min(max(0, t.accepted_tokens), draft),
        max(0, t.target_passes),
        t.estimated,
        t.estimate_reason,
        None if t.raw is None else t.raw[:MAX_RAW_BYTES],
    )
