"""A deployment's share of a model's requests: raised by steps while it does well, taken back at once when it does not.

Decisions are functions of the figures and the clock; every step is an entry in the audit log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec
from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger import audit, routes
from ledger.acceptance import Drafted, list_states
from ledger.audit import By
from ledger.comparison import DeploymentFigures, compare_deployments
from ledger.deployments import failures_of
from ledger.schema import ramps
from proxy.routing import deployment_names
from proxy.settings import Model, Ramp

ACTOR = "ramp"
RECENT_MS = 5 * 60_000
State = Literal["climbing", "done", "fallen_back"]


class Standing(msgspec.Struct, frozen=True):
    """Where a ramp is. `step_ms`: since when."""

    model: str
    state: State
    share_percent: int
    step_ms: int
    deployment: str | None = None
    """Whose ramp it is. None, as in the next two: it stands since before this was kept."""
    weights: dict[str, int] | None = None
    """As it set them, at `set_ms`: what is set otherwise was set by hand."""
    set_ms: int | None = None


@dataclass(frozen=True)
class Figures:
    """What the ramped deployment and all others did since the step began."""

    requests: int = 0
    failures: int = 0
    p99_ms: int | None = None
    draft_tokens: int = 0
    acceptance_rate: float | None = None
    others_requests: int = 0
    others_p99_ms: int | None = None

    @property
    def error_rate(self) -> float:
        attempts = self.requests + self.failures
        return self.failures / attempts if attempts else 0.0


@dataclass(frozen=True)
class Step:
    """What to do, and why in words."""

    state: State | Literal["ended"]
    share_percent: int
    reason: str
    since_ms: int | None = None
    """None: it begins now."""


def trouble(ramp: Ramp, figures: Figures) -> str | None:
    """What does not hold; None: all does, or too little is known to say."""
    if figures.requests + figures.failures < ramp.min_requests:
        return None
    if figures.error_rate > ramp.max_error_rate:
        return f"{figures.error_rate:.1%} of its attempts failed, more than {ramp.max_error_rate:.1%}"
    rate = figures.acceptance_rate
    if rate is not None and figures.draft_tokens >= ramp.min_draft_tokens and rate < ramp.min_acceptance_rate:
        return f"its acceptance rate is {rate:.1%}, below {ramp.min_acceptance_rate:.1%}"
    if figures.p99_ms is None:
        return None
    if ramp.max_p99_ms is not None and figures.p99_ms > ramp.max_p99_ms:
        return f"its P99 is {figures.p99_ms} ms, above {ramp.max_p99_ms} ms"
    others = figures.others_p99_ms
    if others and figures.others_requests >= ramp.min_requests and figures.p99_ms > ramp.max_p99_ratio * others:
        return f"its P99 is {figures.p99_ms} ms, above {ramp.max_p99_ratio:g} times the others' {others} ms"
    return None


def decide(
    ramp: Ramp, standing: Standing | None, figures: Figures, now_ms: int, recent: Figures | None = None
) -> Step | None:
    """The next step, if one is due. Pure. figures: since the step began. recent: of its last minutes, so that what goes
    wrong late in a long step shows at once."""
    first, last = ramp.steps[0], ramp.steps[-1]
    if standing is None:
        return Step("climbing", first, f"the ramp of {ramp.deployment} begins")
    if standing.state == "fallen_back":
        return None
    wrong = trouble(ramp, figures) or (trouble(ramp, recent) if recent is not None else None)
    if wrong is not None:
        return Step("fallen_back", 0, f"{ramp.deployment} falls back from {standing.share_percent} %: {wrong}")
    held_s = (now_ms - standing.step_ms) / 1000
    if standing.state == "done" or held_s < ramp.hold_s or figures.requests < ramp.min_requests:
        return None
    higher = [share for share in ramp.steps if share > standing.share_percent]
    share = higher[0] if higher else last
    held = f"{standing.share_percent} % held for {held_s:.0f} s and {figures.requests} requests"
    return Step("climbing" if higher else "done", share, held)


def weights(ramp: Ramp, name: str, model: Model, share_percent: int) -> dict[str, int]:
    """The share for the ramped deployment, the rest for the others by their configured weights (in equal parts where
    these are 0), in the smallest whole numbers."""
    names = deployment_names(name, model)
    configured = {
        other: item.weight for other, item in zip(names, model.deployments, strict=True) if other != ramp.deployment
    }
    if not any(configured.values()):
        configured = dict.fromkeys(configured, 1)
    rest = sum(configured.values())
    others = {other: weight * (100 - share_percent) for other, weight in configured.items()}
    exact = _divided({ramp.deployment: share_percent * rest, **others})
    beyond = -(-max(exact.values()) // routes.MAX_WEIGHT)  # above 1 where nothing divides large ones: rounded then
    return {name: max(min(1, weight), weight // beyond) for name, weight in exact.items()}


def _divided(found: dict[str, int]) -> dict[str, int]:
    common = math.gcd(*found.values())
    return {name: weight // common for name, weight in found.items()}


async def take_step(c: AsyncConnection, name: str, model: Model, ramp: Ramp, now_ms: int) -> Step | None:
    """Look at a model's ramp and do what is due, in the caller's transaction. Returns what was done.

    Weights that somebody set by hand end the ramp; once they are cleared, it begins anew.
    """
    standing, set_now = seen = await _seen(c, name)
    step = await _due(c, name, model, ramp, standing, set_now, now_ms)
    if step is None:
        return None
    await audit.lock(c)  # where there is no row yet, nothing else keeps two hosts from beginning both
    if await _seen(c, name) != seen:
        return None  # somebody was faster: look again
    by = By(ACTOR, now_ms, step.reason)
    if step.state == "ended":
        await c.execute(delete(ramps).where(ramps.c.model == name))
        await audit.record(c, by, "ramp.end", routes.SUBJECT, name, before=standing, after=set_now)
        return step
    shares = weights(ramp, name, model, step.share_percent)
    set_ms = now_ms
    if set_now is not None and set_now.weights == shares:
        set_ms = set_now.set_ms
    else:
        await routes.set_weights(c, by, name, shares)
    since_ms = now_ms if step.since_ms is None else step.since_ms
    await _store(c, Standing(name, step.state, step.share_percent, since_ms, ramp.deployment, shares, set_ms))
    return step


async def _due(
    c: AsyncConnection,
    name: str,
    model: Model,
    ramp: Ramp,
    standing: Standing | None,
    set_now: routes.RouteWeights | None,
    now_ms: int,
) -> Step | None:
    if standing is None and set_now is not None:
        return None
    if standing is None or set_now is None:
        return decide(ramp, None, Figures(), now_ms)
    shares = weights(ramp, name, model, standing.share_percent)
    if standing.weights is None:
        by_hand = _divided(set_now.weights) != shares
    else:
        by_hand = (standing.weights, standing.set_ms) != (set_now.weights, set_now.set_ms)
    if by_hand:
        return Step("ended", standing.share_percent, f"the ramp of {ramp.deployment} ends: weights were set by hand")
    if standing.deployment not in (None, ramp.deployment):
        return decide(ramp, None, Figures(), now_ms)
    figures, recent = await _since(c, name, ramp, standing, now_ms)
    step = decide(ramp, standing, figures, now_ms, recent)
    if step is None and (standing.weights is None or standing.weights != shares):
        reason = f"{standing.share_percent} % for {ramp.deployment}, by the configuration as it is now"
        step = Step(standing.state, standing.share_percent, reason, standing.step_ms)
    return step


async def _seen(c: AsyncConnection, name: str) -> tuple[Standing | None, routes.RouteWeights | None]:
    return await find_standing(c, name), await routes.find_weights(c, name)


async def find_standing(c: AsyncConnection, name: str) -> Standing | None:
    row = (await c.execute(select(ramps).where(ramps.c.model == name))).one_or_none()
    if row is None:
        return None
    found = dict(row._mapping)
    found["weights"] = None if found["weights"] is None else msgspec.json.decode(found["weights"], type=dict[str, int])
    return Standing(**found)


async def _store(c: AsyncConnection, standing: Standing) -> None:
    build = postgresql.insert if c.dialect.name == "postgresql" else sqlite.insert
    row = msgspec.structs.asdict(standing)
    row["weights"] = msgspec.json.encode(standing.weights, order="sorted").decode()
    await c.execute(build(ramps).values(row).on_conflict_do_update(index_elements=["model"], set_=row))


async def _since(c: AsyncConnection, name: str, ramp: Ramp, standing: Standing, now_ms: int) -> tuple[Figures, Figures]:
    """(since the step began, of its last minutes). The former costs a look at every request of it: taken where the
    step is due, or there were few."""
    hold_ms = round(ramp.hold_s * 1000)
    since = standing.step_ms
    if standing.state == "done":  # it goes on for ever, and what was long ago says nothing of now
        since = max(since, now_ms - hold_ms)
    recent = await _figures(c, name, ramp, max(since, now_ms - RECENT_MS))
    due = standing.state == "climbing" and now_ms - since >= hold_ms
    if since < now_ms - RECENT_MS and (due or recent.requests + recent.failures < ramp.min_requests):
        return await _figures(c, name, ramp, since), recent
    return recent, recent


async def _figures(c: AsyncConnection, name: str, ramp: Ramp, from_ms: int) -> Figures:
    found = await compare_deployments(c, name, from_ms=from_ms)
    failures = await failures_of(c, name, from_ms)
    own = next((item for item in found if item.deployment == ramp.deployment), None)
    others = [item for item in found if item.deployment != ramp.deployment]
    drafted = Drafted(own.draft_tokens, own.accepted_tokens) if own else Drafted()
    if not drafted.draft_tokens:  # its answers do not tell; its metrics may have
        states = [item for item in await list_states(c) if item.deployment == ramp.deployment]
        worst = min(states, key=lambda item: item.rate, default=None)
        drafted = Drafted(worst.draft_tokens, worst.accepted_tokens) if worst else drafted
    slowest: DeploymentFigures | None = max(others, key=lambda item: item.p99_ms or 0, default=None)
    return Figures(
        requests=own.completed if own else 0,
        failures=failures.get(ramp.deployment, 0),
        p99_ms=own.p99_ms if own else None,
        draft_tokens=drafted.draft_tokens,
        acceptance_rate=drafted.rate,
        others_requests=slowest.completed if slowest else 0,
        others_p99_ms=slowest.p99_ms if slowest else None,
    )
