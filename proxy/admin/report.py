"""A canary's figures: the deployments of a model side by side."""

from __future__ import annotations

import msgspec

from ledger import teams
from ledger.comparison import DeploymentFigures, compare_deployments
from ledger.money import format_amount
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Strict
from proxy.admin.times import Instant, parse_instant


class CanaryQuery(Strict, frozen=True, kw_only=True, rename={"from_": "from"}):
    model: str
    team: str | None = None
    from_: Instant | None = None
    to: Instant | None = None


class Comparison(msgspec.Struct, frozen=True):
    """Times in milliseconds, of completed requests; costs are sums."""

    deployment: str
    requests: int
    completed: int
    p50_ms: int | None
    p99_ms: int | None
    ttft_p50_ms: int | None
    prompt_tokens: int
    generated_tokens: int
    billed_tokens: int
    cost_usd: str
    cost_cny: str
    provider_cost_usd: str
    draft_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None

    @classmethod
    def of(cls, figures: DeploymentFigures) -> Comparison:
        rate = figures.acceptance_rate
        return cls(
            figures.deployment,
            figures.requests,
            figures.completed,
            figures.p50_ms,
            figures.p99_ms,
            figures.ttft_p50_ms,
            figures.prompt_tokens,
            figures.generated_tokens,
            figures.billed_tokens,
            format_amount(figures.cost_usd_pico),
            format_amount(figures.cost_cny_pico),
            format_amount(figures.provider_cost_usd_pico),
            figures.draft_tokens,
            figures.accepted_tokens,
            None if rate is None else round(rate, 4),
        )


async def compare(call: Call) -> Listing[Comparison]:
    query: CanaryQuery = call.query
    zone, team_id = call.installation.settings.billing.timezone, None
    if query.team is not None:
        team = await teams.find_team(call.c, query.team)
        zone, team_id = team.timezone, team.id
    start, end = parse_instant(query.from_, "from", zone), parse_instant(query.to, "to", zone)
    found = await compare_deployments(call.c, query.model, team_id=team_id, from_ms=start, to_ms=end)
    return Listing([Comparison.of(figures) for figures in found])


ENDPOINTS = [
    Endpoint(
        "GET",
        "/reports/canary",
        "The deployments of a model side by side",
        compare,
        Listing[Comparison],
        EVERYONE,
        query=CanaryQuery,
    ),
]
