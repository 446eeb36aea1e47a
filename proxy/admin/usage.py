"""What was used: rows, sums, and one request with its transfers and its receipt."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ledger import teams, usage
from ledger.money import format_amount
from ledger.receipts import Receipt, receipt_of
from ledger.usage import RequestDetail, UsageFilter, UsageRow, UsageSum
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Paging, Strict
from proxy.admin.times import Instant, parse_instant, required_iso


class UsageQuery(Paging, frozen=True, kw_only=True, rename={"from_": "from"}):
    """Admitted in [from, to); dates mean midnights in the team's zone. `group_by` is a comma-separated list."""

    team: str | None = None
    key: str | None = None
    model: str | None = None
    deployment: str | None = None
    end_user: str | None = None
    period: str | None = None
    from_: Instant | None = None
    to: Instant | None = None
    group_by: str | None = None


class UsageAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it is billed. `request_id` is the `x-request-id` of its response."""

    request_id: str
    created_at: str
    period: str
    billed_in: str | None
    """The later month that bills it, when `period` was closed before it came."""
    team_id: str
    key_id: str
    end_user: str | None
    model: str
    deployment: str
    draft_model: str | None
    status: str
    prompt_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    generated_tokens: int
    reasoning_tokens: int
    billed_tokens: int
    waiver_reason: str | None
    draft_tokens: int
    accepted_tokens: int
    target_passes: int
    estimated: bool
    estimate_reason: str | None
    attempts: int
    cost_usd: str
    cost_cny: str
    provider_cost_usd: str
    price_version: str
    latency_ms: int
    ttft_ms: int | None

    @classmethod
    def of(cls, row: UsageRow) -> UsageAnswer:
        return cls(**_amounts(row), **_same(cls, row), created_at=required_iso(row.created_ms))


class UsageSumAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of the requests that share the groups asked for; only those are present."""

    team_id: str | UnsetType = UNSET
    key_id: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    deployment: str | UnsetType = UNSET
    draft_model: str | UnsetType | None = UNSET
    price_version: str | UnsetType = UNSET
    period: str | UnsetType = UNSET
    day: str | UnsetType = UNSET
    hour: str | UnsetType = UNSET
    end_user: str | UnsetType | None = UNSET
    requests: int
    prompt_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    generated_tokens: int
    reasoning_tokens: int
    billed_tokens: int
    draft_tokens: int
    accepted_tokens: int
    target_passes: int
    cost_usd: str
    cost_cny: str
    provider_cost_usd: str

    @classmethod
    def of(cls, found: UsageSum) -> UsageSumAnswer:
        names = {"team": "team_id", "key": "key_id"}
        group: dict[str, Any] = {names.get(name, name): value for name, value in found.group.items()}
        if "hour" in group:
            group["hour"] = required_iso(group["hour"])
        return cls(**group, **_amounts(found), **_same(cls, found))


def _amounts(row: UsageRow | UsageSum) -> dict[str, Any]:
    return {name: format_amount(getattr(row, f"{name}_pico")) for name in ("cost_usd", "cost_cny", "provider_cost_usd")}


def _same(answer: type[msgspec.Struct], row: msgspec.Struct) -> dict[str, Any]:
    """The fields that the ledger and the API call by the same name."""
    return {name: getattr(row, name) for name in row.__struct_fields__ if name in answer.__struct_fields__}


class TransferAnswer(msgspec.Struct, frozen=True):
    kind: str
    source: str
    destination: str
    amount: str
    currency: str


class ChargeAnswer(msgspec.Struct, frozen=True):
    """What one account paid; budgets are among them."""

    account: str
    amount: str


class JournalPlace(msgspec.Struct, frozen=True):
    slot: str
    epoch: int
    seq: int
    batch: str


class RequestQuery(Strict, frozen=True, kw_only=True):
    """The receipt is computed from all records of the month; leave it out where that is not needed."""

    receipt: bool = True


class RequestAnswer(msgspec.Struct, frozen=True):
    """One request, the entries that it made, and the proof that it is among the month's records."""

    usage: UsageAnswer
    transfers: list[TransferAnswer]
    charges: list[ChargeAnswer]
    journal: JournalPlace
    receipt: Receipt | None


async def list_usage(call: Call) -> Listing[Any]:
    query: UsageQuery = call.query
    zone = call.installation.settings.billing.timezone
    team_id = None
    if query.team is not None:
        team = await teams.find_team(call.c, query.team)
        team_id, zone = team.id, team.timezone
    wanted = UsageFilter(
        team_id=team_id,
        key_id=query.key,
        model=query.model,
        deployment=query.deployment,
        end_user=query.end_user,
        period=query.period,
        from_ms=parse_instant(query.from_, "from", zone),
        to_ms=parse_instant(query.to, "to", zone),
    )
    if query.group_by is None:
        rows = await usage.list_usage(call.c, wanted, cursor=query.cursor, limit=query.limit)
        return Listing([UsageAnswer.of(row) for row in rows.items], rows.next_cursor)
    groups = [name.strip() for name in query.group_by.split(",") if name.strip()]
    return Listing([UsageSumAnswer.of(one) for one in await usage.sum_usage(call.c, wanted, groups, timezone=zone)])


async def get_request(call: Call) -> RequestAnswer:
    query: RequestQuery = call.query
    detail = await usage.get_request(call.c, call.path["request"])
    receipt = await receipt_of(call.c, detail.usage.request_id) if query.receipt else None
    return request_answer(detail, receipt)


def request_answer(detail: RequestDetail, receipt: Receipt | None) -> RequestAnswer:
    return RequestAnswer(
        UsageAnswer.of(detail.usage),
        [
            TransferAnswer(item.kind, item.source, item.destination, format_amount(item.amount_pico), item.currency)
            for item in detail.transfers
        ],
        [ChargeAnswer(charge.account_id, format_amount(charge.amount_pico)) for charge in detail.charges],
        JournalPlace(detail.slot_id, detail.epoch, detail.seq, detail.batch_id),
        receipt,
    )


ENDPOINTS = [
    Endpoint(
        "GET",
        "/usage",
        "Requests, or sums of them with group_by",
        list_usage,
        (Listing[UsageAnswer], Listing[UsageSumAnswer]),
        EVERYONE,
        query=UsageQuery,
    ),
    Endpoint(
        "GET",
        "/requests/{request}",
        "One request, its transfers, its receipt",
        get_request,
        RequestAnswer,
        EVERYONE,
        query=RequestQuery,
    ),
]
