"""What the journal says: the records of a request's life, as plain immutable values.

`INTENT → PROGRESS* → ANSWER? → SETTLE | VOID`. A SETTLE is complete: it carries the usage row and the final split of
its price over accounts, so whoever reads it (the poster, the proof, an auditor) decides nothing. Records are
MessagePack arrays in field order: new fields go to the end, with a default.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ledger.money import Currency

Status = Literal["completed", "cancelled", "failed", "crashed"]
"""completed: it ended by itself · cancelled: the client hung up, or we were stopped · failed: upstream broke off ·
crashed: we did."""


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """One part of a request's price, taken from one account that the slot holds a lease on."""

    account_id: str
    amount_pico: int


class Intent(msgspec.Struct, frozen=True, array_like=True, tag="intent"):
    """Written before the first upstream byte: what may be spent, and who pays if we die now."""

    request_id: str
    at_ms: int
    period: str
    team_id: str
    key_id: str
    end_user: str | None
    model: str
    price_version: str
    prompt_tokens_bound: int
    held: list[Charge]
    """What is held in each account, in the order in which funding accounts are drawn; budgets are among them."""
    idempotency_key: str | None = None
    deployment: str | None = None
    price_scope: str | None = None
    """Which of the version's prices was pinned ("default", "plan:NAME", "team:ID"). None: not kept then."""
    billing_currency: Currency | None = None
    """Of the team at admission. None: as above."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Tokens delivered to the client so far."""

    request_id: str
    at_ms: int
    prompt_tokens: int
    generated_tokens: int


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Token counts of one request: cached and cache_write ⊂ prompt, reasoning ⊂ generated, accepted ⊂ draft."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    generated_tokens: int = 0
    reasoning_tokens: int = 0
    billed_tokens: int = 0
    waiver_reason: str | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    target_passes: int = 0
    estimated: bool = False
    estimate_reason: str | None = None
    raw: bytes | None = None
    """The usage object as the upstream sent it, when it was not believed."""


class FailedAttempt(msgspec.Struct, frozen=True, array_like=True):
    """A deployment that was asked in vain, and what it costs us all the same."""

    deployment: str
    provider_cost_usd_pico: int


class Settle(msgspec.Struct, frozen=True, array_like=True, tag="settle"):
    """The final word on a request that cost something. Posted to SQL exactly as it stands."""

    request_id: str
    admitted_ms: int
    settled_ms: int
    period: str
    team_id: str
    key_id: str
    end_user: str | None
    model: str
    deployment: str
    draft_model: str | None
    status: Status
    usage: Usage
    price_version: str
    cost_usd_pico: int
    cost_cny_pico: int
    provider_cost_usd_pico: int
    """Of all attempts together."""
    charges: list[Charge]
    """The split: funding accounts (they sum to the cost in the billing currency) and every budget that applies."""
    loss_pico: int
    """What was used and neither billed nor held, in the team's billing currency: booked to the loss account."""
    attempts: int = 1
    latency_ms: int = 0
    ttft_ms: int | None = None
    recovered_epoch: int | None = None
    """Set when a later epoch settles what a crashed one left: its leases pay."""
    idempotency_key: str | None = None
    billing_currency: Currency = "USD"
    """Of the team at that time: what `loss_pico` and the funding charges are in."""
    price_scope: str | None = None
    """As in the INTENT."""
    failed_attempts: list[FailedAttempt] = []
    """Those that cost something; the rest of `provider_cost_usd_pico` is `deployment`'s."""


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """What the client of an Idempotency-Key gets when it asks again. Written above its SETTLE and kept for a day only,
    so it is a record of its own: the bytes of a SETTLE stay for ever."""

    request_id: str
    team_id: str
    key_id: str
    idempotency_key: str
    body: bytes


class Void(msgspec.Struct, frozen=True, array_like=True, tag="void"):
    """A request that cost nothing: refused upstream, or lost before the first token."""

    request_id: str
    at_ms: int
    reason: str
    recovered_epoch: int | None = None
    idempotency_key: str | None = None
    team_id: str | None = None
    key_id: str | None = None


class EpochClosed(msgspec.Struct, frozen=True, array_like=True, tag="epoch_closed"):
    """All that `epoch` of this slot left open is settled or voided above this frame: its leases may return."""

    epoch: int


class Seal(msgspec.Struct, frozen=True, array_like=True, tag="seal"):
    """From here on this slot admits nothing into `period` ("YYYY-MM") of `timezone` or an earlier one, whatever its
    clock says; and what this epoch had admitted there has ended above this frame."""

    period: str
    timezone: str | None = None


Record = Intent | Progress | Answer | Settle | Void | EpochClosed | Seal

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode(record: Record) -> bytes:
    """Canonical bytes: the same record always gives the same bytes."""
    return _encoder.encode(record)


def decode(payload: bytes) -> Record:
    """Raises msgspec.DecodeError (ValidationError when the shape is wrong)."""
    return _decoder.decode(payload)
