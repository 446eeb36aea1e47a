"""Weights that were set for a model's deployments at run time, for every team or for one; they win over the configured.

Every change is audited, and seen by all workers over the change feed. The names of deployments are the gateway's: they
are not checked here.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit
from ledger.audit import By
from ledger.errors import Invalid, NotFound
from ledger.schema import route_weights, teams

SUBJECT = "route"
MAX_WEIGHT = 1_000_000
_weights = msgspec.json.Decoder(dict[str, int])


class RouteWeights(msgspec.Struct, frozen=True):
    """Deployment → weight; one that is not named gets nothing. `team_id` None: all teams without their own."""

    model: str
    team_id: str | None
    weights: dict[str, int]
    set_ms: int


async def set_weights(
    c: AsyncConnection, by: By, model: str, weights: Mapping[str, int], *, team_id: str | None = None
) -> RouteWeights:
    """From now on. Raises Invalid (a weight that is none, or no weight above 0), NotFound for an unknown team."""
    if any(type(weight) is not int or not 0 <= weight <= MAX_WEIGHT for weight in weights.values()):
        raise Invalid(f"a weight is a whole number from 0 to {MAX_WEIGHT}", "weights")
    if not any(weights.values()):
        raise Invalid("every weight is 0: no request could be served", "weights")
    await audit.lock(c)
    await _check_team(c, team_id)
    before = await find_weights(c, model, team_id)
    after = RouteWeights(model, team_id, dict(weights), by.at_ms)
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    values = {"weights": msgspec.json.encode(after.weights, order="sorted").decode(), "set_ms": by.at_ms}
    row = {"team_id": team_id or "", "model": model, **values}
    await c.execute(
        build(route_weights).values(row).on_conflict_do_update(index_elements=["team_id", "model"], set_=values)
    )
    lists = {"before": None if before is None else before.weights, "after": after.weights}
    await audit.record(c, by, "route.set", SUBJECT, model, team_id=team_id, **lists)
    return after


async def clear_weights(c: AsyncConnection, by: By, model: str, *, team_id: str | None = None) -> None:
    """Back to what is configured (of a team: to every team's). Raises NotFound when nothing was set."""
    await audit.lock(c)
    before = await find_weights(c, model, team_id)
    if before is None:
        raise NotFound(f"no weights were set for the model {model!r}" + (f" and {team_id}" if team_id else ""))
    await c.execute(delete(route_weights).where(*_at(model, team_id)))
    await audit.record(c, by, "route.clear", SUBJECT, model, team_id=team_id, before=before.weights)


async def find_weights(c: AsyncConnection, model: str, team_id: str | None = None) -> RouteWeights | None:
    """What is set for exactly this team, or for every team."""
    row = (await c.execute(select(route_weights).where(*_at(model, team_id)))).one_or_none()
    return None if row is None else _read(row)


async def list_weights(c: AsyncConnection) -> list[RouteWeights]:
    """All that is set, by model, every team's first."""
    query = select(route_weights).order_by(route_weights.c.model, route_weights.c.team_id)
    return [_read(row) for row in await c.execute(query)]


def _at(model: str, team_id: str | None) -> tuple[ColumnElement[bool], ...]:
    return route_weights.c.model == model, route_weights.c.team_id == (team_id or "")


def _read(row: object) -> RouteWeights:
    values = row._mapping  # type: ignore[attr-defined]
    return RouteWeights(
        values["model"], values["team_id"] or None, _weights.decode(values["weights"]), values["set_ms"]
    )


async def _check_team(c: AsyncConnection, team_id: str | None) -> None:
    if team_id is None:
        return
    if (await c.execute(select(teams.c.id).where(teams.c.id == team_id))).scalar_one_or_none() is None:
        raise NotFound(f"no team {team_id!r}")
