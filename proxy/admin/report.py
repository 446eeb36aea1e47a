"""A canary's figures: the deployments of a model side by side, before and after; and how drafts do."""

from __future__ import annotations

import msgspec

from ledger import teams
from ledger.acceptance import Acceptance, list_states
from ledger.comparison import DeploymentFigures, compare_deployments
from ledger.deployments import failures_of, utilisation_of
from ledger.errors import Invalid
from ledger.money import format_amount
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Strict
from proxy.admin.times import Instant, parse_instant, required_iso
from proxy.routing import deployment_names


class CanaryQuery(Strict, frozen=True, kw_only=True, rename={"from_": "from"}):
    """`change` splits the time: what was before it and what came after are told apart. `by_draft`: drafts too."""

    model: str
    team: str | None = None
    from_: Instant | None = None
    to: Instant | None = None
    change: Instant | None = None
    by_draft: bool = False


class Comparison(msgspec.Struct, frozen=True):
    """Times in milliseconds, of completed requests; costs are sums. `failures`: attempts that failed, also where
    another deployment then answered. `utilisation`: of its device, 0 to 1, where the place tells it."""

    deployment: str
    draft_model: str | None
    period: str | None
    requests: int
    completed: int
    failures: int | None
    p50_ms: int | None
    p99_ms: int | None
    ttft_p50_ms: int | None
    ttft_p99_ms: int | None
    tokens_per_s: float | None
    prompt_tokens: int
    generated_tokens: int
    billed_tokens: int
    cost_usd: str
    cost_cny: str
    provider_cost_usd: str
    draft_tokens: int
    accepted_tokens: int
    acceptance_rate: float | None
    utilisation: float | None

    @classmethod
    def of(
        cls, figures: DeploymentFigures, period: str | None, failures: int | None, utilisation: float | None
    ) -> Comparison:
        rate, speed = figures.acceptance_rate, figures.tokens_per_s
        return cls(
            figures.deployment,
            figures.draft_model,
            period,
            figures.requests,
            figures.completed,
            failures,
            figures.p50_ms,
            figures.p99_ms,
            figures.ttft_p50_ms,
            figures.ttft_p99_ms,
            None if speed is None else round(speed, 1),
            figures.prompt_tokens,
            figures.generated_tokens,
            figures.billed_tokens,
            format_amount(figures.cost_usd_pico),
            format_amount(figures.cost_cny_pico),
            format_amount(figures.provider_cost_usd_pico),
            figures.draft_tokens,
            figures.accepted_tokens,
            None if rate is None else round(rate, 4),
            None if utilisation is None else round(utilisation, 3),
        )


class AcceptanceAnswer(msgspec.Struct, frozen=True):
    """`state`: healthy (70 % and more), watch, wrong_draft (below 50 %); by what was drafted in the last 15 minutes."""

    deployment: str
    draft_model: str
    state: str
    acceptance_rate: float
    draft_tokens: int
    accepted_tokens: int
    since: str
    seen: str

    @classmethod
    def of(cls, item: Acceptance) -> AcceptanceAnswer:
        return cls(
            item.deployment,
            item.draft_model,
            item.state,
            round(item.rate, 4),
            item.draft_tokens,
            item.accepted_tokens,
            required_iso(item.since_ms),
            required_iso(item.seen_ms),
        )


async def compare(call: Call) -> Listing[Comparison]:
    query: CanaryQuery = call.query
    zone, team_id = call.installation.settings.billing.timezone, None
    if query.team is not None:
        team = await teams.find_team(call.c, query.team)
        zone, team_id = team.timezone, team.id
    start, end = parse_instant(query.from_, "from", zone), parse_instant(query.to, "to", zone)
    change = parse_instant(query.change, "change", zone)
    if change is None:
        return Listing(await _compare(call, team_id, start, end, None))
    if (start is not None and change <= start) or (end is not None and change >= end):
        raise Invalid("`change` must lie between `from` and `to`", "change")
    before = await _compare(call, team_id, start, change, "before")
    return Listing(before + await _compare(call, team_id, change, end, "after"))


async def _compare(
    call: Call, team_id: str | None, start: int | None, end: int | None, period: str | None
) -> list[Comparison]:
    query: CanaryQuery = call.query
    found = await compare_deployments(
        call.c, query.model, team_id=team_id, from_ms=start, to_ms=end, by_draft=query.by_draft
    )
    failures = await failures_of(call.c, query.model, start, end)
    utilisation = await utilisation_of(call.c, start, end)
    model = call.installation.settings.models.get(query.model)
    places = (
        {}
        if model is None
        else dict(zip(deployment_names(query.model, model), (item.to for item in model.deployments), strict=True))
    )
    return [
        Comparison.of(
            item,
            period,
            failures.get(item.deployment, 0) if team_id is None and not query.by_draft else None,
            utilisation.get(places.get(item.deployment, item.deployment)),
        )
        for item in found
    ]


async def acceptance(call: Call) -> Listing[AcceptanceAnswer]:
    return Listing([AcceptanceAnswer.of(item) for item in await list_states(call.c)])


ENDPOINTS = [
    Endpoint(
        "GET",
        "/reports/canary",
        "The deployments of a model side by side, before and after",
        compare,
        Listing[Comparison],
        EVERYONE,
        query=CanaryQuery,
    ),
    Endpoint(
        "GET",
        "/reports/acceptance",
        "How drafts do: a state for each deployment and draft",
        acceptance,
        Listing[AcceptanceAnswer],
        EVERYONE,
    ),
]
