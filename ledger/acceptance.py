"""How well drafts do where they draft: a state for each deployment and draft, kept in SQL, told to webhooks on change.

Healthy is from 70 % accepted on; below 50 % the draft is wrong for its target; between them it is watched. A state is
left only once the rate is 2 points beyond its border, and never judged by few tokens: what wavers is told once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.outbox import record_event
from ledger.schema import acceptance_states, rollups

State = Literal["healthy", "watch", "wrong_draft"]
HEALTHY_FROM = 0.70
WRONG_BELOW = 0.50
MARGIN = 0.02
MIN_DRAFT_TOKENS = 1_000


class Key(msgspec.Struct, frozen=True, order=True):
    """Which draft, and where."""

    deployment: str
    draft_model: str


class Drafted(msgspec.Struct, frozen=True):
    """Sums of some stretch of time."""

    draft_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: Drafted) -> Drafted:
        return Drafted(self.draft_tokens + other.draft_tokens, self.accepted_tokens + other.accepted_tokens)

    @property
    def rate(self) -> float | None:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None


class Acceptance(msgspec.Struct, frozen=True):
    """A state, what it was last judged by, since when it holds, and when it was last looked at."""

    deployment: str
    draft_model: str
    state: State
    draft_tokens: int
    accepted_tokens: int
    since_ms: int
    seen_ms: int

    @property
    def rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens


def judge(before: State | None, drafted: Drafted) -> State | None:
    """The state after these tokens; `before` where they are too few to say. Pure."""
    rate = drafted.rate
    if rate is None or drafted.draft_tokens < MIN_DRAFT_TOKENS:
        return before
    if rate >= HEALTHY_FROM - (MARGIN if before == "healthy" else 0):
        return "healthy"
    if rate < WRONG_BELOW + (MARGIN if before == "wrong_draft" else 0):
        return "wrong_draft"
    return "watch"


async def drafted_by_hour(c: AsyncConnection, from_ms: int) -> dict[tuple[int, Key], Drafted]:
    """What was drafted since an hour began, by hour: sums that only grow, and few rows however many the requests."""
    drafts, accepted = func.sum(rollups.c.draft_tokens), func.sum(rollups.c.accepted_tokens)
    at = (rollups.c.hour_ms, rollups.c.deployment, rollups.c.draft_model)
    query = select(*at, drafts, accepted).where(rollups.c.hour_ms >= from_ms, rollups.c.draft_tokens > 0).group_by(*at)
    return {
        (hour_ms, Key(deployment, draft)): Drafted(int(drafted), int(taken))
        for hour_ms, deployment, draft, drafted, taken in await c.execute(query)
    }


async def update_states(c: AsyncConnection, measured: Mapping[Key, Drafted], now_ms: int) -> list[Acceptance]:
    """Judge anew; returns what changed. A change is an event for webhooks, but for a draft that begins healthy."""
    known = {Key(item.deployment, item.draft_model): item for item in await list_states(c, for_update=True)}
    changed = []
    for key, drafted in sorted(measured.items()):
        before = known.get(key)
        state = judge(before.state if before else None, drafted)
        if state is None or drafted.draft_tokens < MIN_DRAFT_TOKENS:
            continue
        same = before is not None and before.state == state
        since_ms = before.since_ms if before is not None and same else now_ms
        after = Acceptance(
            key.deployment, key.draft_model, state, drafted.draft_tokens, drafted.accepted_tokens, since_ms, now_ms
        )
        await _store(c, after)
        if not same:
            changed.append(after)
            if before is not None or state != "healthy":
                await _tell(c, before, after)
    return changed


async def list_states(c: AsyncConnection, *, for_update: bool = False) -> list[Acceptance]:
    """All that are known, by deployment and draft."""
    query = select(acceptance_states).order_by(acceptance_states.c.deployment, acceptance_states.c.draft_model)
    if for_update:
        query = query.with_for_update()
    return [Acceptance(**row._mapping) for row in await c.execute(query)]


async def _store(c: AsyncConnection, item: Acceptance) -> None:
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    row = msgspec.structs.asdict(item)
    place = ["deployment", "draft_model"]
    values = {name: value for name, value in row.items() if name not in place}
    await c.execute(build(acceptance_states).values(row).on_conflict_do_update(index_elements=place, set_=values))


async def _tell(c: AsyncConnection, before: Acceptance | None, after: Acceptance) -> None:
    minute = after.since_ms // 60_000  # two hosts that see the same change tell it once
    payload = {
        "deployment": after.deployment,
        "draft_model": after.draft_model,
        "state": after.state,
        "before": before.state if before else None,
        "acceptance_rate": round(after.rate, 4),
        "draft_tokens": after.draft_tokens,
    }
    key = f"{after.deployment}:{after.draft_model}:{after.state}:{minute}"
    await record_event(c, "acceptance", key, payload, after.since_ms)
