"""Quotas: one list for everyone, each team, each key, each end user; a PUT replaces the list."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ledger import keys, quotas, teams
from ledger.errors import Invalid
from ledger.money import Currency, format_amount, parse_amount
from ledger.periods import Window
from ledger.quotas import Limit, Metric, Quota, Scope
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Strict

MAX_QUOTAS = 1_000


class QuotaBody(Strict, frozen=True, kw_only=True):
    """`limit` is a count; for spend an amount as a decimal string. `window` is left out for concurrency."""

    metric: Metric
    window: Window | None = None
    limit: Annotated[int, msgspec.Meta(ge=0)] | str
    currency: Currency | None = None
    model: str | None = None
    hard: bool = True
    timezone: str | None = None

    def wanted(self) -> Limit:
        return Limit(
            metric=self.metric,
            window=self.window,
            limit=self._value(),
            model=self.model,
            currency=self.currency,
            hard=self.hard,
            timezone=self.timezone,
        )

    def _value(self) -> int:
        if self.metric == "spend":
            return parse_amount(str(self.limit))
        if isinstance(self.limit, str) and not self.limit.isascii():
            raise Invalid(f"a limit on {self.metric} is a whole number, not {self.limit!r}", "limit")
        try:
            return int(self.limit)
        except ValueError:
            raise Invalid(f"a limit on {self.metric} is a whole number, not {self.limit!r}", "limit") from None


class QuotaAnswer(msgspec.Struct, frozen=True):
    id: str
    scope: str
    team_id: str | None
    key_id: str | None
    end_user: str | None
    metric: str
    window: str | None
    limit: int | str
    currency: str | None
    model: str | None
    hard: bool
    timezone: str | None

    @classmethod
    def of(cls, quota: Quota) -> QuotaAnswer:
        return cls(
            quota.id,
            quota.scope,
            quota.team_id,
            quota.key_id,
            quota.end_user,
            quota.metric,
            quota.window,
            format_amount(quota.limit) if quota.metric == "spend" else quota.limit,
            quota.currency,
            quota.model,
            quota.hard,
            quota.timezone,
        )


async def _scope(call: Call) -> Scope:
    """Whom the path means. Raises NotFound."""
    path = call.path
    if "key" in path:
        key = await keys.get_key(call.c, path["key"])
        return Scope.of_key(key.id)
    if "team" not in path:
        return Scope.everyone()
    team = await teams.find_team(call.c, path["team"])
    return Scope.of_end_user(team.id, path["user"]) if "user" in path else Scope.of_team(team.id)


async def replace(call: Call) -> Listing[QuotaAnswer]:
    body: list[QuotaBody] = call.body
    if len(body) > MAX_QUOTAS:
        raise Invalid(f"at most {MAX_QUOTAS} quotas in one list")
    found = await quotas.replace_quotas(call.c, call.by, await _scope(call), [item.wanted() for item in body])
    return Listing([QuotaAnswer.of(quota) for quota in found])


async def get(call: Call) -> Listing[QuotaAnswer]:
    return Listing([QuotaAnswer.of(quota) for quota in await quotas.quotas_of(call.c, await _scope(call))])


def _endpoints(path: str, whose: str) -> list[Endpoint]:
    answer = Listing[QuotaAnswer]
    return [
        Endpoint("PUT", path, f"Replace the quotas of {whose}", replace, answer, body=list[QuotaBody]),
        Endpoint("GET", path, f"The quotas of {whose}", get, answer, EVERYONE),
    ]


ENDPOINTS = [
    *_endpoints("/quotas", "everyone"),
    *_endpoints("/teams/{team}/quotas", "a team"),
    *_endpoints("/keys/{key}/quotas", "a key"),
    *_endpoints("/teams/{team}/end-users/{user}/quotas", "an end user"),
]
