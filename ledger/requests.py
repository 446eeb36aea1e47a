"""A request as the ledger sees it: what it may cost, what was used, what is billed. Plain values."""

from __future__ import annotations

import msgspec

from ledger.money import Currency
from ledger.records import FailedAttempt, Status


class Spender(msgspec.Struct, frozen=True):
    """On whose account a request runs."""

    team_id: str
    key_id: str
    end_user: str | None
    billing_currency: Currency
    timezone: str


class Ask(msgspec.Struct, frozen=True):
    """What a request may cost at most: `prompt_tokens_bound` is an upper bound, `max_output_tokens` over all
    choices."""

    request_id: str
    at_ms: int
    spender: Spender
    model: str
    prompt_tokens_bound: int
    max_output_tokens: int
    streamed: bool
    deployment: str
    idempotency_key: str | None = None
    body_hash: str | None = None


class Tokens(msgspec.Struct, frozen=True):
    """What was used, as counted or as the upstream said. `raw`: the upstream's own words, when they were not
    believed."""

    prompt_tokens: int
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    target_passes: int = 0
    estimated: bool = False
    estimate_reason: str | None = None
    raw: bytes | None = None


class Outcome(msgspec.Struct, frozen=True):
    """How a request ended. `waive`: bill nothing, for this reason. `answer`: for replay under its Idempotency-Key.

    provider_cost_usd_pico: what `deployment` costs; `failed_attempts` come on top."""

    status: Status
    deployment: str
    draft_model: str | None
    tokens: Tokens
    attempts: int = 1
    provider_cost_usd_pico: int = 0
    latency_ms: int = 0
    ttft_ms: int | None = None
    answer: bytes | None = None
    waive: str | None = None
    failed_attempts: list[FailedAttempt] = []

    @property
    def total_provider_cost_usd_pico(self) -> int:
        return self.provider_cost_usd_pico + sum(failed.provider_cost_usd_pico for failed in self.failed_attempts)


class Receipt(msgspec.Struct, frozen=True):
    """What is billed, as it stands in the durable SETTLE."""

    request_id: str
    billed_tokens: int
    waiver_reason: str | None
    cost_usd_pico: int
    cost_cny_pico: int
    price_version: str
