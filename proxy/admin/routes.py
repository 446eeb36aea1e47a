"""Routes: who serves a model, by which weights, and weights that are set at run time."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ledger import routes, teams
from ledger.errors import Invalid, NotFound
from ledger.routes import MAX_WEIGHT, RouteWeights
from proxy.admin.endpoints import EVERYONE, Call, Endpoint, Listing, Strict
from proxy.admin.times import required_iso
from proxy.routing import deployment_names

Weight = Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT)]


class RouteBody(Strict, frozen=True, kw_only=True):
    """Deployment → weight; a deployment that is not named gets nothing. Without a team: of all that have none of their
    own."""

    model: str
    team: str | None = None
    weights: dict[str, Weight]


class RouteKey(Strict, frozen=True, kw_only=True):
    """Which weights are meant."""

    model: str
    team: str | None = None


class RouteAnswer(msgspec.Struct, frozen=True):
    """`set_at` null: as configured. `team_id` null: every team that has none of its own."""

    model: str
    team_id: str | None
    weights: dict[str, int]
    fallback: tuple[str, ...]
    set_at: str | None


def _configured(call: Call, model: str) -> RouteAnswer:
    """Raises NotFound."""
    found = call.installation.settings.models.get(model)
    if found is None:
        raise NotFound(f"no model {model!r}")
    weights = [item.weight for item in found.deployments]
    return RouteAnswer(
        model, None, dict(zip(deployment_names(model, found), weights, strict=True)), found.fallback, None
    )


def _answer(call: Call, item: RouteWeights) -> RouteAnswer:
    fallback = _configured(call, item.model).fallback
    return RouteAnswer(item.model, item.team_id, item.weights, fallback, required_iso(item.set_ms))


async def _team_id(call: Call, team: str | None) -> str | None:
    return None if team is None else (await teams.find_team(call.c, team)).id


async def list_(call: Call) -> Listing[RouteAnswer]:
    """Every model as configured, then what was set for it."""
    models = call.installation.settings.models
    found = [item for item in await routes.list_weights(call.c) if item.model in models]
    answers = []
    for model in models:
        answers.append(_configured(call, model))
        answers += [_answer(call, item) for item in found if item.model == model]
    return Listing(answers)


async def set_(call: Call) -> RouteAnswer:
    body: RouteBody = call.body
    known = _configured(call, body.model).weights
    if unknown := sorted(body.weights.keys() - known.keys()):
        raise Invalid(f"{body.model!r} has no deployment {unknown[0]!r}; it has: {', '.join(known)}", "weights")
    team_id = await _team_id(call, body.team)
    return _answer(call, await routes.set_weights(call.c, call.by, body.model, body.weights, team_id=team_id))


async def clear(call: Call) -> RouteAnswer:
    query: RouteKey = call.query
    team_id = await _team_id(call, query.team)
    await routes.clear_weights(call.c, call.by, query.model, team_id=team_id)
    return _configured(call, query.model)


ENDPOINTS = [
    Endpoint("GET", "/routes", "Each model's deployments and their weights", list_, Listing[RouteAnswer], EVERYONE),
    Endpoint("PUT", "/routes", "Set a model's weights, for all teams or one", set_, RouteAnswer, body=RouteBody),
    Endpoint("DELETE", "/routes", "Back to the configured weights", clear, RouteAnswer, query=RouteKey),
]
