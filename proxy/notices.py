"""What a gateway notices for webhooks: limits on requests and tokens that fill up, and requests that nobody can pay.

Noticing costs nothing on the way of a request; writing happens beside it, and waits while the database is away.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.database import Database
from ledger.errors import InsufficientQuota
from ledger.noticing import exhausted
from ledger.outbox import record_event
from policies.access import Principal
from policies.quotas import Limiter, Threshold
from proxy.ids import now_ms

DAY_MS = 86_400_000
MAX_REMEMBERED = 50_000


@dataclass(frozen=True, slots=True)
class _Refusal:
    team_id: str
    key_id: str
    account_kind: str
    message: str


class Notices:
    """`refused` on the hot path, `write` beside it. One per worker; what several notice becomes one event."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter
        self._thresholds: list[Threshold] = []
        self._refusals: dict[tuple[str, str, bool], _Refusal] = {}
        self._written: set[str] = set()

    def refused(self, principal: Principal, error: InsufficientQuota) -> None:
        about = (principal.team_id, principal.key_id, error.account_kind == "budget")
        if about not in self._refusals and len(self._refusals) < MAX_REMEMBERED:
            self._refusals[about] = _Refusal(principal.team_id, principal.key_id, error.account_kind, str(error))

    async def write(self, db: Database) -> None:
        """Raises LedgerError; what could not be written is written the next time, with what came meanwhile."""
        thresholds = (self._thresholds + self._limiter.take_thresholds())[-MAX_REMEMBERED:]
        noticed, self._thresholds, self._refusals = self._refusals, [], {}
        now = now_ms()
        fresh = {key: event for event in thresholds if (key := key_of(event)) not in self._written}
        refusals = {key: one for one in noticed.values() if (key := _key(one, now)) not in self._written}
        if fresh or refusals:
            try:
                async with db.begin() as c:
                    await _record(c, fresh, refusals, now)
            except BaseException:
                self._thresholds, self._refusals = thresholds, noticed | self._refusals
                raise
        if len(self._written) > MAX_REMEMBERED:
            self._written.clear()
        self._written |= fresh.keys() | refusals.keys()


async def _record(c: AsyncConnection, fresh: dict[str, Threshold], refusals: dict[str, _Refusal], now: int) -> None:
    for key, event in fresh.items():
        await record_event(c, "budget", key, payload_of(event), event.at_ms)
    for key, one in refusals.items():
        if one.account_kind == "budget":
            told = {"metric": "spend", "hard": True, "percent": 100, "refused": one.message}
            about = {"team_id": one.team_id, "key_id": one.key_id}
            await record_event(c, "budget", key, told | about, now)
        else:
            await exhausted(c, one.team_id, one.message, now)


def key_of(event: Threshold) -> str:
    """The same for every worker that sees this limit reach this part in this window."""
    quota = event.quota
    whose = "" if quota.scope != "end_user" else hashlib.sha256((event.end_user or "").encode()).hexdigest()[:16]
    return f"{quota.id}:{whose}:{event.since_ms}:{quota.limit}:{event.percent}"


def payload_of(event: Threshold) -> dict[str, Any]:
    quota = event.quota
    told: dict[str, Any] = {
        name: getattr(quota, name) for name in ("scope", "metric", "window", "model", "limit", "hard")
    }
    told |= {"quota_id": quota.id, "percent": event.percent, "used": event.used, "period_start_ms": event.since_ms}
    if quota.scope != "global":
        told["team_id"] = event.team_id
    if quota.scope == "key":
        told["key_id"] = event.key_id
    if quota.scope == "end_user":
        told["end_user"] = event.end_user
    return told


def _key(refusal: _Refusal, now: int) -> str:
    """At most once a minute is looked up whether a balance is still the one that ran out."""
    if refusal.account_kind == "budget":
        return f"refused:{refusal.team_id}:{refusal.key_id}:{now // DAY_MS}"
    return f"exhausted:{refusal.team_id}:{now // 60_000}"
