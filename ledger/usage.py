"""What was used: single requests, lists of them, and sums by model, key, day and the like.

Only what the poster has brought into SQL is seen, a fraction of a second after the answer. Sums over whole hours come
from the hourly rollups; others from the rows themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, get_args
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, Select, func, literal, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.entries import ROLLUP_SUMS, AccountInfo, TransferKey, transfers_of
from ledger.errors import Invalid, NotFound
from ledger.money import Currency
from ledger.paging import Page, page
from ledger.periods import DEFAULT_TIMEZONE, HOUR_MS, whole_hours, zone
from ledger.records import Charge, Settle, decode
from ledger.schema import accounts, rollups, usage
from ledger.sums import exact_sum, read_sum

GROUPS = ("team", "key", "model", "deployment", "draft_model", "price_version", "period", "day", "hour", "end_user")
"""What sums can be grouped by. `day` is a date in the asked time zone, `hour` an instant in UTC milliseconds."""
QUARTER_MS = HOUR_MS // 4
_AMOUNTS = tuple(name for name in ROLLUP_SUMS if name.endswith("_pico"))
_COLUMNS = {
    "team": "team_id",
    "key": "key_id",
    "model": "model",
    "deployment": "deployment",
    "draft_model": "draft_model",
    "price_version": "price_version",
    "period": "period",
    "end_user": "end_user",
}


class UsageFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests: admitted in [from_ms, to_ms), all conditions at once; None: no condition."""

    team_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    deployment: str | None = None
    end_user: str | None = None
    period: str | None = None
    from_ms: int | None = None
    to_ms: int | None = None


class UsageRow(msgspec.Struct, frozen=True):
    """One request as it is billed."""

    request_id: str
    created_ms: int
    settled_ms: int
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
    price_version: str
    cost_usd_pico: int
    cost_cny_pico: int
    provider_cost_usd_pico: int
    loss_pico: int
    latency_ms: int
    ttft_ms: int | None


class UsageSum(msgspec.Struct, frozen=True):
    """Sums of the requests that share `group` (group name → value)."""

    group: dict[str, str | int | None]
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
    cost_usd_pico: int
    cost_cny_pico: int
    provider_cost_usd_pico: int


class Entry(msgspec.Struct, frozen=True):
    """One transfer of a request, as it went into the aggregated ones of its batch."""

    kind: str
    source: str
    destination: str
    amount_pico: int
    currency: Currency


class RequestDetail(msgspec.Struct, frozen=True):
    """One request, the entries that it made, and where its record lies in the journal."""

    usage: UsageRow
    transfers: list[Entry]
    charges: list[Charge]
    slot_id: str
    epoch: int
    seq: int
    batch_id: str


_ROW_COLUMNS = [usage.c[name] for name in UsageRow.__struct_fields__]


async def list_usage(
    c: AsyncConnection,
    wanted: UsageFilter,
    *,
    cursor: str | None = None,
    limit: int = 100,
    newest_first: bool = True,
) -> Page[UsageRow]:
    """Requests by request_id, that is by time of admission. Raises Invalid for a bad cursor or limit."""
    query = _filtered(select(*_ROW_COLUMNS), wanted, by_rows=True)
    return await page(c, query, [usage.c.request_id], _row, cursor=cursor, limit=limit, newest_first=newest_first)


async def get_request(c: AsyncConnection, request_id: str) -> RequestDetail:
    """Raises NotFound: no such request, or it is not posted yet."""
    try:
        UUID(request_id)
    except ValueError:
        raise NotFound(f"no request {request_id!r}: a request id is a UUID") from None
    row = (await c.execute(select(usage).where(usage.c.request_id == request_id))).one_or_none()
    if row is None:
        raise NotFound(f"no request {request_id} (a new one appears here shortly after its answer)")
    settle = decode(bytes(row.record))
    assert isinstance(settle, Settle), "a usage row's record is a SETTLE"
    ids = [charge.account_id for charge in settle.charges]
    query = select(accounts.c.id, accounts.c.kind, accounts.c.currency).where(accounts.c.id.in_(ids))
    infos = {found.id: AccountInfo(found.kind, found.currency) for found in await c.execute(query)}
    return RequestDetail(
        usage=UsageRow(*(_value(name, row._mapping[name]) for name in UsageRow.__struct_fields__)),
        transfers=[_entry(key, amount) for key, amount in transfers_of(settle, infos)],
        charges=settle.charges,
        slot_id=row.slot_id,
        epoch=row.epoch,
        seq=row.seq,
        batch_id=row.batch_id,
    )


async def sum_usage(
    c: AsyncConnection, wanted: UsageFilter, group_by: Sequence[str] = (), *, timezone: str = DEFAULT_TIMEZONE
) -> list[UsageSum]:
    """Sums by the groups asked for (see GROUPS), sorted by them; one row without groups. Raises Invalid."""
    unknown = [name for name in group_by if name not in GROUPS]
    if unknown:
        raise Invalid(f"cannot group by {unknown[0]!r}: use {', '.join(GROUPS)}", "group_by")
    by_rows = _needs_rows(wanted, group_by, timezone)
    table = usage if by_rows else rollups
    time = usage.c.created_ms if by_rows else rollups.c.hour_ms
    bucket = time - time % (QUARTER_MS if by_rows and "hour" not in group_by else HOUR_MS)
    names = [name for name in group_by if name in _COLUMNS]
    columns: list[ColumnElement[Any]] = [_group_column(table, name, by_rows).label(f"g_{name}") for name in names]
    if "day" in group_by or "hour" in group_by:
        columns.append(bucket.label("bucket"))
    summed: list[ColumnElement[Any]] = [func.count().label("requests")] if by_rows else []
    for name in ROLLUP_SUMS:
        if name in _AMOUNTS:
            summed += exact_sum(table.c[name])
        elif not (by_rows and name == "requests"):
            summed.append(func.coalesce(func.sum(table.c[name]), 0).label(name))
    query = _filtered(select(*columns, *summed), wanted, by_rows=by_rows).select_from(table)
    if columns:
        query = query.group_by(*columns)
    totals: dict[tuple[Any, ...], list[int]] = {}
    for row in (await c.execute(query)).mappings():
        key = tuple(_group_value(name, row, timezone) for name in group_by)
        sums = totals.setdefault(key, [0] * len(ROLLUP_SUMS))
        for index, name in enumerate(ROLLUP_SUMS):
            sums[index] += read_sum(row, name) if name in _AMOUNTS else int(row[name])
    return [_sum(group_by, key, totals[key]) for key in sorted(totals, key=lambda key: [str(part) for part in key])]


def _needs_rows(wanted: UsageFilter, group_by: Sequence[str], timezone: str) -> bool:
    """The rollups know whole hours of UTC, and no end users."""
    edges = [edge for edge in (wanted.from_ms, wanted.to_ms) if edge is not None]
    if any(edge % HOUR_MS for edge in edges) or wanted.end_user is not None or "end_user" in group_by:
        return True
    return "day" in group_by and not whole_hours(timezone, wanted.from_ms, wanted.to_ms)


def _group_column(table: Any, name: str, by_rows: bool) -> ColumnElement[Any]:
    column: ColumnElement[Any] = table.c[_COLUMNS[name]]
    if name == "draft_model" and by_rows:
        return func.coalesce(column, literal(""))
    return column


def _group_value(name: str, row: Any, timezone: str) -> str | int | None:
    if name == "hour":
        return int(row["bucket"])
    if name == "day":
        return datetime.fromtimestamp(int(row["bucket"]) / 1000, UTC).astimezone(zone(timezone)).date().isoformat()
    value = row[f"g_{name}"]
    return None if value is None or (name == "draft_model" and value == "") else str(value)


def _sum(group_by: Sequence[str], key: tuple[Any, ...], sums: list[int]) -> UsageSum:
    values = dict(zip(ROLLUP_SUMS, sums, strict=True))
    del values["loss_pico"]  # of teams with different currencies
    return UsageSum(group=dict(zip(group_by, key, strict=True)), **values)


def _filtered(query: Select[Any], wanted: UsageFilter, *, by_rows: bool) -> Select[Any]:
    table = usage if by_rows else rollups
    time = usage.c.created_ms if by_rows else rollups.c.hour_ms
    for name in ("team_id", "key_id", "model", "deployment", "end_user", "period"):
        value = getattr(wanted, name)
        if value is not None:
            query = query.where(table.c[name] == value)
    if wanted.from_ms is not None:
        query = query.where(time >= wanted.from_ms)
    if wanted.to_ms is not None:
        query = query.where(time < wanted.to_ms)
    return query


def _row(row: Any) -> UsageRow:
    return UsageRow(*(_value(name, value) for name, value in zip(UsageRow.__struct_fields__, row, strict=True)))


def _value(name: str, value: Any) -> Any:
    return bool(value) if name == "estimated" else value


def _entry(key: TransferKey, amount_pico: int) -> Entry:
    currency: Currency = key.currency  # type: ignore[assignment]
    assert currency in get_args(Currency)
    return Entry(key.kind, key.source, key.destination, amount_pico, currency)
