"""What an operator decides about journals: which will never come back, and what becomes of records that SQL refused."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ledger import lost_journals, suspense
from ledger.audit import By
from ledger.money import format_amount
from ledger.suspense import Suspended
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Strict
from proxy.admin.times import iso, required_iso

Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=500)]


class Locked(msgspec.Struct, frozen=True):
    """What an epoch holds of an account."""

    account: str
    currency: str
    amount: str


class EpochAnswer(msgspec.Struct, frozen=True):
    """An epoch that is not closed. `live`: a worker writes it. `locked`: the most that its loss costs."""

    slot: str
    epoch: int
    live: bool
    locked: list[Locked]


class LostEpoch(Strict, frozen=True, kw_only=True):
    """`reason` is kept in the audit chain."""

    slot: str
    epoch: int
    reason: Reason


class SuspendedAnswer(msgspec.Struct, frozen=True):
    """A record that SQL refused. Until somebody decides, its amount stays locked and the proof fails."""

    slot: str
    epoch: int
    frame: int
    request_id: str | None
    refused_because: str
    at: str
    resolved_at: str | None

    @classmethod
    def of(cls, item: Suspended) -> SuspendedAnswer:
        times = (required_iso(item.at_ms), iso(item.resolved_ms))
        return cls(item.slot_id, item.epoch, item.seq, item.request_id, item.reason, *times)


class SuspenseFilter(Strict, frozen=True, kw_only=True):
    resolved: bool = False
    """Also those that were decided."""


class Decision(Strict, frozen=True, kw_only=True):
    """Which record, as the list names it. `reason` is kept in the audit chain."""

    slot: str
    epoch: int
    frame: int
    reason: Reason


async def list_epochs(call: Call) -> Listing[EpochAnswer]:
    found = []
    for slot, epoch, live in await lost_journals.list_open_epochs(call.c):
        found.append(EpochAnswer(slot, epoch, live, _locked(await lost_journals.open_leases(call.c, slot, epoch))))
    return Listing(found)


async def declare_lost(call: Call) -> Listing[Locked]:
    """Returns what is free again."""
    body: LostEpoch = call.body
    return Listing(_locked(await lost_journals.declare_lost(call.c, _by(call, body.reason), body.slot, body.epoch)))


async def list_suspense(call: Call) -> Listing[SuspendedAnswer]:
    query: SuspenseFilter = call.query
    found = await suspense.list_suspended(call.c, resolved=query.resolved)
    return Listing([SuspendedAnswer.of(item) for item in found])


async def retry(call: Call) -> SuspendedAnswer:
    """Post it as it stands, once its obstacle is gone."""
    body: Decision = call.body
    await suspense.retry(call.c, _by(call, body.reason), body.slot, body.epoch, body.frame)
    return await _one(call)


async def write_off(call: Call) -> SuspendedAnswer:
    """Give it up: nobody is billed for it."""
    body: Decision = call.body
    await suspense.write_off(call.c, _by(call, body.reason), body.slot, body.epoch, body.frame)
    return await _one(call)


async def _one(call: Call) -> SuspendedAnswer:
    body: Decision = call.body
    return SuspendedAnswer.of(await suspense.get_suspended(call.c, body.slot, body.epoch, body.frame))


def _by(call: Call, reason: str) -> By:
    return By(call.by.actor, call.by.at_ms, reason)


def _locked(amounts: list[tuple[str, str, int]]) -> list[Locked]:
    return [Locked(account, currency, format_amount(pico)) for account, currency, pico in amounts]


ENDPOINTS = [
    Endpoint(
        "GET",
        "/journals",
        "Epochs that are not closed, and what they lock",
        list_epochs,
        Listing[EpochAnswer],
        EVERYONE,
    ),
    Endpoint("POST", "/journals/declare-lost", "Give up a lost journal", declare_lost, Listing[Locked], body=LostEpoch),
    Endpoint(
        "GET",
        "/suspense",
        "Records that could not be posted",
        list_suspense,
        Listing[SuspendedAnswer],
        EVERYONE,
        query=SuspenseFilter,
    ),
    Endpoint("POST", "/suspense/retry", "Post a record in suspense", retry, SuspendedAnswer, body=Decision),
    Endpoint("POST", "/suspense/write-off", "Give up a record in suspense", write_off, SuspendedAnswer, body=Decision),
]
