"""Events for webhooks: written once, in the transaction of whoever notices, and delivered at least once.

`record_event` may be called by many workers for the same thing: `key` says what happened, and the first one wins.
Deliveries are rows too, one for each webhook that wants the event, so a restart forgets none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec
from sqlalchemy import Select, delete, exists, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.audit import By, record
from ledger.errors import Conflict, NotFound
from ledger.ids import new_id
from ledger.paging import Page, page
from ledger.schema import webhook_deliveries, webhook_events

EventKind = Literal["budget", "balance", "acceptance"]
State = Literal["waiting", "delivered", "given_up"]
ROUTED_AT_ONCE = 100
CLAIM_MS = 60_000
"""How long a delivery is left to whoever claimed it; a poster that dies meanwhile delays it by this."""
BATCH = 40
"""So many are claimed at once, of all hooks: they must be through within CLAIM_MS also if every hook is silent."""
TRIED_AT_ONCE = 4
"""Of a hook that did not take an earlier one: fewer than are under way at once, so that the others need not wait."""
FIRST_PAUSE_MS = 5_000
LONGEST_PAUSE_MS = 3_600_000
GIVE_UP_AFTER = 40
"""Attempts. With pauses that double up to an hour: about a day and a half."""
DAY_MS = 86_400_000
DELIVERIES_KEPT_MS = 30 * DAY_MS
EVENTS_KEPT_MS = 400 * DAY_MS
"""Longer than any period but `total`: what is still so is noticed again once its event is gone."""
UNWANTED_AFTER_MS = 3_600_000


class Event(msgspec.Struct, frozen=True):
    """What happened. `id` stays the same in every attempt, so that a receiver can tell repetitions."""

    id: str
    kind: EventKind
    at_ms: int
    payload: dict[str, Any]


class Delivery(msgspec.Struct, frozen=True):
    """An event on its way to one webhook. `attempts` counts this one."""

    event: Event
    hook: str
    attempts: int


class DeliveryState(msgspec.Struct, frozen=True):
    """How far an event has come on its way to one webhook. next_ms: not tried before then, while it waits."""

    event_id: str
    hook: str
    kind: EventKind
    at_ms: int
    state: State
    attempts: int
    next_ms: int
    done_ms: int | None
    error: str | None
    """Of the last attempt."""


async def record_event(c: AsyncConnection, kind: EventKind, key: str, payload: Mapping[str, Any], at_ms: int) -> bool:
    """Adds an event in the caller's transaction; False when it is there already.

    key: unique for what happened, such as "draft_unfit:MODEL:DRAFT:HOUR_MS". payload: what msgspec can write as JSON.
    """
    row = {
        "id": new_id("event", at_ms),
        "kind": kind,
        "key": key,
        "payload": msgspec.json.encode(dict(payload), order="sorted").decode(),
        "at_ms": at_ms,
    }
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    return (await c.execute(build(webhook_events).values(row).on_conflict_do_nothing())).rowcount == 1


async def route(c: AsyncConnection, wanted: Mapping[str, Collection[EventKind]], now_ms: int) -> int:
    """Makes a delivery of each new event for each hook that wants its kind; returns how many events there were.

    wanted: hook → kinds. With no hooks at all, events wait until they are unwanted (`tidy`).
    """
    if not wanted:
        return 0
    e = webhook_events.c
    query = select(e.id, e.kind).where(e.routed_ms.is_(None)).order_by(e.id).limit(ROUTED_AT_ONCE)
    found = (await c.execute(query.with_for_update(skip_locked=True))).all()
    rows = [
        {"event_id": event.id, "hook": hook, "state": "waiting", "next_ms": now_ms}
        for event in found
        for hook, kinds in wanted.items()
        if event.kind in kinds
    ]
    if rows:
        await c.execute(insert(webhook_deliveries), rows)
    if found:
        await c.execute(update(webhook_events).where(e.id.in_([event.id for event in found])).values(routed_ms=now_ms))
    return len(found)


async def claim(c: AsyncConnection, hooks: Collection[str], now_ms: int) -> list[Delivery]:
    """Deliveries that are due, of each hook its oldest; nobody else gets them for CLAIM_MS."""
    failing = await _failing(c, hooks)
    fair = max(1, BATCH // max(1, len(hooks)))
    claimed: list[Delivery] = []
    for hook in sorted(hooks, key=lambda hook: hook in failing):
        most = min(fair, BATCH - len(claimed), TRIED_AT_ONCE if hook in failing else BATCH)
        claimed += await _claim(c, hook, most, now_ms)
    return claimed


async def _failing(c: AsyncConnection, hooks: Collection[str]) -> set[str]:
    """Those that something was not delivered to, or not yet."""
    d = webhook_deliveries.c
    query = select(d.hook).where(d.state == "waiting", d.attempts > 0, d.hook.in_(hooks)).distinct()
    return set((await c.execute(query)).scalars())


async def _claim(c: AsyncConnection, hook: str, most: int, now_ms: int) -> list[Delivery]:
    d, e = webhook_deliveries.c, webhook_events.c
    query = (
        select(d.event_id, d.attempts, e.kind, e.at_ms, e.payload)
        .join(webhook_events, e.id == d.event_id)
        .where(d.state == "waiting", d.next_ms <= now_ms, d.hook == hook)
        .order_by(d.next_ms, d.event_id)
        .limit(most)
        .with_for_update(skip_locked=True, of=webhook_deliveries)
    )
    claimed = []
    for row in (await c.execute(query)).all():
        mine = (d.event_id == row.event_id, d.hook == hook)
        await c.execute(
            update(webhook_deliveries).where(*mine).values(next_ms=now_ms + CLAIM_MS, attempts=row.attempts + 1)
        )
        event = Event(row.event_id, row.kind, row.at_ms, msgspec.json.decode(row.payload))
        claimed.append(Delivery(event, hook, row.attempts + 1))
    return claimed


async def finish(c: AsyncConnection, delivery: Delivery, error: str | None, now_ms: int) -> None:
    """What became of an attempt: delivered (error None), else again later, and given up after GIVE_UP_AFTER."""
    d = webhook_deliveries.c
    mine = (d.event_id == delivery.event.id, d.hook == delivery.hook, d.state == "waiting")
    if error is None:
        values: dict[str, Any] = {"state": "delivered", "done_ms": now_ms, "error": None}
    elif delivery.attempts >= GIVE_UP_AFTER:
        values = {"state": "given_up", "done_ms": now_ms, "error": error[:500]}
    else:
        values = {"next_ms": now_ms + pause_ms(delivery.attempts), "error": error[:500]}
    await c.execute(update(webhook_deliveries).where(*mine).values(values))


async def list_deliveries(
    c: AsyncConnection, *, state: State | None = None, cursor: str | None = None, limit: int = 100
) -> Page[DeliveryState]:
    """Of the newest events first."""
    d = webhook_deliveries.c
    query = _deliveries()
    if state is not None:
        query = query.where(d.state == state)
    return await page(c, query, [d.event_id, d.hook], _delivery_state, cursor=cursor, limit=limit, newest_first=True)


async def retry(c: AsyncConnection, by: By, event_id: str) -> list[DeliveryState]:
    """Try at once what of this event was not delivered, given up or not, with all attempts before it again. Raises
    NotFound, and Conflict where there is nothing to try."""
    d = webhook_deliveries.c
    found = (await c.execute(_deliveries().where(d.event_id == event_id).with_for_update(of=webhook_deliveries))).all()
    if not found:
        raise NotFound(f"no webhook was to hear of an event {event_id!r}")
    open_hooks = [row.hook for row in found if row.state != "delivered"]
    if not open_hooks:
        raise Conflict(f"{event_id} was delivered to every webhook that wants it")
    again = {"state": "waiting", "attempts": 0, "next_ms": by.at_ms, "done_ms": None}
    await c.execute(update(webhook_deliveries).where(d.event_id == event_id, d.hook.in_(open_hooks)).values(again))
    await record(c, by, "retry", "webhook_event", event_id, after={"webhooks": open_hooks})
    rows = await c.execute(_deliveries().where(d.event_id == event_id).order_by(d.hook))
    return [_delivery_state(row) for row in rows]


def _deliveries() -> Select[Any]:
    d, e = webhook_deliveries.c, webhook_events.c
    columns = (d.event_id, d.hook, e.kind, e.at_ms, d.state, d.attempts, d.next_ms, d.done_ms, d.error)
    return select(*columns).join(webhook_events, e.id == d.event_id)


def _delivery_state(row: Any) -> DeliveryState:
    return DeliveryState(*row)


async def tidy(c: AsyncConnection, now_ms: int, *, any_hooks: bool) -> None:
    """Forgets what is long done, and what waits for a hook that is no more. Without any hooks, what happened is for
    nobody: the first hook hears of what happens from then on."""
    d, e = webhook_deliveries.c, webhook_events.c
    old = func.coalesce(d.done_ms, d.next_ms) < now_ms - DELIVERIES_KEPT_MS
    await c.execute(delete(webhook_deliveries).where(old))
    if not any_hooks:
        unwanted = (e.routed_ms.is_(None), e.at_ms < now_ms - UNWANTED_AFTER_MS)
        await c.execute(update(webhook_events).where(*unwanted).values(routed_ms=now_ms))
    waited_for = exists().where(d.event_id == e.id)
    await c.execute(
        delete(webhook_events).where(e.routed_ms.is_not(None), e.at_ms < now_ms - EVENTS_KEPT_MS, ~waited_for)
    )


def pause_ms(attempts: int) -> int:
    """How long to wait after so many attempts: 5 s, 10 s, 20 s … an hour."""
    return min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS << min(attempts - 1, 20))
