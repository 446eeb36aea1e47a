"""What a stretch of journal means in SQL: usage rows, transfers, debits, rollups. Pure; the poster writes it.

Every figure is a sum over the records, so any division of the journal into batches gives the same balances.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from ledger.money import Currency
from ledger.periods import HOUR_MS
from ledger.records import Answer, Charge, Seal, Settle, Usage, Void

ANSWER_KEPT_MS = 24 * HOUR_MS

USAGE_COLUMNS = (
    "request_id",
    "created_ms",
    "settled_ms",
    "period",
    "billed_in",
    "team_id",
    "key_id",
    "end_user",
    "model",
    "deployment",
    "draft_model",
    "status",
    "prompt_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "generated_tokens",
    "reasoning_tokens",
    "billed_tokens",
    "waiver_reason",
    "draft_tokens",
    "accepted_tokens",
    "target_passes",
    "estimated",
    "estimate_reason",
    "attempts",
    "price_version",
    "cost_usd_pico",
    "cost_cny_pico",
    "provider_cost_usd_pico",
    "loss_pico",
    "charges",
    "latency_ms",
    "ttft_ms",
    "slot_id",
    "epoch",
    "seq",
    "batch_id",
    "record",
)
ROLLUP_KEYS = (
    "hour_ms",
    "period",
    "billed_in",
    "team_id",
    "key_id",
    "model",
    "deployment",
    "draft_model",
    "price_version",
    "slot_id",
)
ROLLUP_SUMS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "cache_write_tokens",
    "generated_tokens",
    "reasoning_tokens",
    "billed_tokens",
    "draft_tokens",
    "accepted_tokens",
    "target_passes",
    "cost_usd_pico",
    "cost_cny_pico",
    "provider_cost_usd_pico",
    "loss_pico",
)


REVERSAL = "_reversal"
"""Ends the kind of a correction that takes back: its source is the destination of what it takes back."""
LateMonths = Mapping[tuple[str, str], str]
"""(team, period) → the later month that bills it, for the periods that are closed."""


class AccountInfo(NamedTuple):
    """What never changes about an account."""

    kind: str
    currency: Currency


class TransferKey(NamedTuple):
    """Amounts of the same key within a batch are one transfer."""

    kind: str
    source: str
    destination: str
    currency: str
    team_id: str
    period: str


class RefusedRecord(Exception):
    """A record that cannot be booked as it stands: it goes to suspense, and posting goes on."""


class Entries:
    """Collects the effects of records of one epoch's journal, in order."""

    def __init__(
        self,
        slot_id: str,
        epoch: int,
        batch_id: str,
        accounts: Mapping[str, AccountInfo],
        late: LateMonths = MappingProxyType({}),
    ) -> None:
        self.slot_id = slot_id
        self.epoch = epoch
        self.batch_id = batch_id
        self.rows: list[tuple[Any, ...]] = []
        self.transfers: dict[TransferKey, int] = {}
        self.debits: dict[tuple[int, str], int] = {}
        """(epoch whose lease pays, account) → pico."""
        self.rollups: dict[tuple[Any, ...], list[int]] = {}
        self.unbelieved: list[tuple[int, str, bytes]] = []
        """(seq, request, usage object of the upstream as received)."""
        self.answers: list[Answer] = []
        self.done_claims: list[tuple[int, str, str, str, str]] = []
        """(answer expires at, team, key, idempotency key, request)."""
        self.released_claims: list[tuple[str, str, str, str]] = []
        self.seals: list[tuple[str, str, int]] = []
        """(period, time zone, seq)."""
        self._accounts = accounts
        self._late = late

    def add(self, seq: int, payload: bytes, record: Any) -> None:
        """Raises RefusedRecord for an account or a currency that does not exist."""
        match record:
            case Settle():
                self._settle(seq, payload, record)
            case Answer():
                self.answers.append(record)
            case Void(idempotency_key=str() as key, team_id=str() as team, key_id=str() as owner):
                self.released_claims.append((team, owner, key, record.request_id))
            case Seal(timezone=str() as timezone):
                self.seals.append((record.period, timezone, seq))

    def _settle(self, seq: int, payload: bytes, s: Settle) -> None:
        billed_in = self._late.get((s.team_id, s.period))
        self.rows.append(usage_row(s, self.slot_id, self.epoch, seq, self.batch_id, payload, billed_in))
        lease_epoch = self.epoch if s.recovered_epoch is None else s.recovered_epoch
        for charge in s.charges:
            debit = (lease_epoch, charge.account_id)
            self.debits[debit] = self.debits.get(debit, 0) + charge.amount_pico
        add_transfers(self.transfers, s, self._accounts, billed_in)
        add_rollup(self.rollups, s, self.slot_id, billed_in)
        if s.usage.raw is not None:
            self.unbelieved.append((seq, s.request_id, s.usage.raw))
        if s.idempotency_key is not None:
            claim = (s.team_id, s.key_id, s.idempotency_key, s.request_id)
            if s.usage.billed_tokens == 0 and s.status != "completed":
                self.released_claims.append(claim)
            else:
                self.done_claims.append((s.settled_ms + ANSWER_KEPT_MS, *claim))


def usage_row(
    s: Settle, slot_id: str, epoch: int, seq: int, batch_id: str, payload: bytes, billed_in: str | None = None
) -> tuple[Any, ...]:
    """The row of USAGE_COLUMNS."""
    u = s.usage
    return (
        s.request_id,
        s.admitted_ms,
        s.settled_ms,
        s.period,
        billed_in,
        s.team_id,
        s.key_id,
        s.end_user,
        s.model,
        s.deployment,
        s.draft_model,
        s.status,
        u.prompt_tokens,
        u.cached_tokens,
        u.cache_write_tokens,
        u.generated_tokens,
        u.reasoning_tokens,
        u.billed_tokens,
        u.waiver_reason,
        u.draft_tokens,
        u.accepted_tokens,
        u.target_passes,
        int(u.estimated),
        u.estimate_reason,
        s.attempts,
        s.price_version,
        s.cost_usd_pico,
        s.cost_cny_pico,
        s.provider_cost_usd_pico,
        s.loss_pico,
        charges_json(s.charges),
        s.latency_ms,
        s.ttft_ms,
        slot_id,
        epoch,
        seq,
        batch_id,
        payload,
    )


def charges_json(charges: list[Charge]) -> str:
    return msgspec.json.encode(charges).decode()


def transfers_of(
    s: Settle, accounts: Mapping[str, AccountInfo], billed_in: str | None = None
) -> Iterator[tuple[TransferKey, int]]:
    """The two-sided entries of one request, in the month that bills it. Raises RefusedRecord for an account that does
    not exist."""
    model, team, period = s.model, s.team_id, billed_in or s.period
    for charge in s.charges:
        account = accounts.get(charge.account_id)
        if account is None:
            raise RefusedRecord(f"request {s.request_id} charges account {charge.account_id}, which does not exist")
        kind, destination = ("budget", f"spent:{model}") if account.kind == "budget" else ("usage", f"revenue:{model}")
        key = TransferKey(kind, charge.account_id, destination, account.currency, team, period)
        yield key, charge.amount_pico
    own_cost = s.provider_cost_usd_pico
    for failed in s.failed_attempts:
        own_cost -= failed.provider_cost_usd_pico
        key = TransferKey("provider_cost", f"cost:{model}", f"provider:{failed.deployment}", "USD", team, period)
        yield key, failed.provider_cost_usd_pico
    if own_cost:
        key = TransferKey("provider_cost", f"cost:{model}", f"provider:{s.deployment}", "USD", team, period)
        yield key, own_cost
    if s.loss_pico:
        reason = s.usage.waiver_reason or "unknown"
        key = TransferKey("loss", f"unbilled:{model}", f"loss:{reason}", s.billing_currency, team, period)
        yield key, s.loss_pico


def add_transfers(
    transfers: dict[TransferKey, int], s: Settle, accounts: Mapping[str, AccountInfo], billed_in: str | None = None
) -> None:
    for key, amount in transfers_of(s, accounts, billed_in):
        transfers[key] = transfers.get(key, 0) + amount


def add_rollup(
    rollups: dict[tuple[Any, ...], list[int]], s: Settle, slot_id: str, billed_in: str | None = None
) -> None:
    hour = s.admitted_ms - s.admitted_ms % HOUR_MS
    draft = s.draft_model or ""
    key = (hour, s.period, billed_in or "", s.team_id, s.key_id, s.model, s.deployment, draft, s.price_version, slot_id)
    sums = rollups.get(key)
    if sums is None:
        sums = rollups[key] = [0] * len(ROLLUP_SUMS)
    for index, value in enumerate(rollup_values(s, s.usage)):
        sums[index] += value


def rollup_values(s: Settle, u: Usage) -> tuple[int, ...]:
    """In the order of ROLLUP_SUMS."""
    return (
        1,
        u.prompt_tokens,
        u.cached_tokens,
        u.cache_write_tokens,
        u.generated_tokens,
        u.reasoning_tokens,
        u.billed_tokens,
        u.draft_tokens,
        u.accepted_tokens,
        u.target_passes,
        s.cost_usd_pico,
        s.cost_cny_pico,
        s.provider_cost_usd_pico,
        s.loss_pico,
    )
