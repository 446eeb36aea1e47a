"""The automatic ramp: up while everything holds, back at once when it does not, each step in the audit log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from sqlalchemy import insert

from ledger import routes
from ledger.audit import By, list_entries
from ledger.database import Database
from ledger.deployments import add_failures, failures_of
from ledger.schema import ramps
from proxy.ids import now_ms
from proxy.observer import Observer
from proxy.ramp import Figures, Standing, State, Step, decide, find_standing, take_step, weights
from proxy.settings import Deployment, Model, Ramp, Settings
from proxy.settings import Upstream as UpstreamSettings
from tests.proxy.scripted import Script, ScriptedUpstream
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import wait_until
from tests.upstream.process import FakeUpstream

RAMP = Ramp(deployment="new", steps=(10, 50, 90), hold_s=60, min_requests=100)
GOOD = Figures(200, 1, 310, 5_000, 0.8, 900, 300)
WHOLE = Model(deployments=(Deployment(to="old", weight=3), Deployment(to="older", weight=1), Deployment(to="new")))


def test_it_climbs_step_by_step_and_is_done_at_the_last() -> None:
    standing = None
    shares: list[tuple[int, int, State]] = []
    for now in range(300):  # a clock of seconds
        step = decide(RAMP, standing, GOOD, now * 1000)
        if step is not None:
            standing = Standing("m", step.state, step.share_percent, now * 1000)
            shares.append((now, step.share_percent, step.state))
    assert shares == [(0, 10, "climbing"), (60, 50, "climbing"), (120, 90, "climbing"), (180, 90, "done")]


@pytest.mark.parametrize("state", ["climbing", "done"])
@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (replace(GOOD, failures=20), "attempts failed"),
        (replace(GOOD, acceptance_rate=0.69), "acceptance rate is 69.0%"),
        (replace(GOOD, p99_ms=361), "P99 is 361 ms"),
    ],
)
def test_it_falls_back_at_once_and_says_why(state: State, figures: Figures, says: str) -> None:
    step = decide(RAMP, Standing("m", state, 50, 0), figures, 1_000)
    assert step is not None
    assert (step.state, step.share_percent) == ("fallen_back", 0)
    assert says in step.reason
    assert decide(RAMP, Standing("m", "fallen_back", 0, 0), GOOD, 10**9) is None  # until somebody looked at it


def test_what_goes_wrong_late_in_a_long_step_shows_at_once() -> None:
    whole, recent = replace(GOOD, requests=10_000, failures=101), replace(GOOD, requests=20, failures=100)
    assert decide(RAMP, Standing("m", "climbing", 10, 0), whole, 1_000) is None
    step = decide(RAMP, Standing("m", "climbing", 10, 0), whole, 1_000, recent)
    assert step is not None
    assert step.state == "fallen_back"


@pytest.mark.parametrize(
    "figures",
    [
        replace(GOOD, requests=99, failures=0),
        replace(GOOD, requests=20, failures=70),  # too few to say anything
        Figures(),
    ],
)
def test_it_waits_while_there_is_little_to_judge_by(figures: Figures) -> None:
    assert decide(RAMP, Standing("m", "climbing", 10, 0), figures, 10**9) is None


def test_what_was_drafted_too_little_and_what_nobody_compares_with_says_nothing() -> None:
    figures = replace(GOOD, acceptance_rate=0.1, draft_tokens=10, p99_ms=9_999, others_requests=3)
    step = decide(RAMP, Standing("m", "climbing", 10, 0), figures, 60_000)
    assert step is not None
    assert step.share_percent == 50


def test_the_rest_is_split_by_the_configured_weights() -> None:
    assert weights(RAMP, "m", WHOLE, 10) == {"new": 4, "old": 27, "older": 9}
    assert weights(RAMP, "m", WHOLE, 0) == {"new": 0, "old": 3, "older": 1}


@pytest.mark.parametrize(
    ("configured", "share", "expected"),
    [
        ((100_000, 0, 0), 10, (9, 0, 1)),
        ((routes.MAX_WEIGHT, 0, 0), 0, (1, 0, 0)),
        ((999_983, 1, 0), 90, (111_109, 1, 999_984)),  # nothing divides these
    ],
)
def test_whatever_may_be_configured_gives_weights_that_may_be_set(
    configured: tuple[int, ...], share: int, expected: tuple[int, ...]
) -> None:
    places = zip(("old", "older", "new"), configured, strict=True)
    model = Model(deployments=tuple(Deployment(to=name, weight=weight) for name, weight in places))
    found = weights(RAMP, "m", model, share)
    assert tuple(found[name] for name in ("old", "older", "new")) == expected
    assert max(expected) <= routes.MAX_WEIGHT


@pytest.fixture
def ramped(tmp_path: Path, upstream: FakeUpstream) -> Iterator[Gateway]:
    two = [{"to": "old", "model": "gpt-4", "weight": 100}, {"to": "new", "model": "gpt-4", "weight": 0}]
    model = {"deployments": two, "price": PRICE, "sticky_by": "none"}
    config = configuration({"old": upstream.base_url, "new": upstream.base_url}, m=model)
    with Gateway(tmp_path, config) as gateway:
        yield gateway


class Ramping:
    """An observer of the gateway's ledger whose settings have the ramp; each look is a call."""

    def __init__(self, gateway: Gateway) -> None:
        from msgspec.structs import replace as changed

        ramp = Ramp(deployment="new", steps=(50, 90), hold_s=0.5, min_requests=3, max_p99_ratio=1_000)
        model = changed(gateway.settings.models["m"], ramp=ramp)
        self.settings = changed(gateway.settings, models={"m": model})
        self.gateway = gateway

    def look(self) -> None:
        async def act() -> None:
            db = await Database.open(self.gateway.settings.storage.database)
            try:
                await Observer(db, self.settings).look()
            finally:
                await db.close()

        asyncio.run(act())

    def steps(self) -> list[tuple[str, Any, str]]:
        """(actor, weights, reason) of each change of the route, oldest first."""
        acts = [item for item in self._audit() if item["action"].startswith("route.")]
        return [(item["actor"], item["after"], item["reason"]) for item in acts]

    def acts(self) -> list[tuple[str, str]]:
        """(actor, action) of all that was done to routes, oldest first."""
        return [(item["actor"], item["action"]) for item in self._audit() if item["subject_kind"] == "route"]

    def _audit(self) -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {'t' * 32}"}
        found = httpx.get(f"http://127.0.0.1:{self.gateway.port}/admin/v1/audit?limit=1000", headers=headers).json()
        return list(reversed(found["data"]))

    def use(self, requests: int) -> None:
        """So many requests, and their rows posted."""
        create = self.gateway.client().chat.completions.with_raw_response.create
        ids = [
            create(model="m", messages=[{"role": "user", "content": "hi"}]).headers["x-request-id"]
            for _ in range(requests)
        ]
        for request_id in ids:
            self.gateway.row(request_id)


def test_a_ramp_climbs_on_real_requests_and_falls_back_when_they_fail(ramped: Gateway, upstream: FakeUpstream) -> None:
    ramping = Ramping(ramped)
    ramping.look()
    route = ramped.app.state.worker.routes["m"]
    wait_until(lambda: route.weights() == (1, 1), 30, "the first step everywhere")
    ramping.use(40)
    time.sleep(0.5)
    ramping.look()
    wait_until(lambda: route.weights() == (1, 9), 30, "the second step everywhere")
    upstream.standing_fault("500")
    for _ in range(10):
        with pytest.raises(openai.InternalServerError):
            ramping.use(1)
        for deployment in route.deployments:
            deployment.fitness.succeeded()

    async def failures(c: Any) -> int:
        return (await failures_of(c, "m")).get("new", 0)

    wait_until(lambda: ramped.ledger(failures) >= 3, 30, "the failures in the ledger")
    ramping.look()
    wait_until(lambda: route.weights() == (1, 0), 30, "the way back everywhere")
    steps = ramping.steps()
    assert [actor for actor, _, _ in steps] == ["ramp"] * 3
    assert "begins" in steps[0][2]
    assert "50 % held" in steps[1][2]
    assert "falls back from 90 %" in steps[2][2]
    ramping.look()
    assert len(ramping.steps()) == 3


def test_weights_that_were_set_by_hand_are_left_alone(ramped: Gateway) -> None:
    ramping = Ramping(ramped)

    async def by_hand(c: Any) -> None:
        await routes.set_weights(c, By("ann", 1), "m", {"old": 1, "new": 1})

    ramping.look()
    ramped.ledger(by_hand)
    ramping.look()
    ramping.look()
    assert [(actor, action) for actor, action in ramping.acts() if action != "route.set"] == [("ramp", "ramp.end")]
    assert [actor for actor, _, _ in ramping.steps()] == ["ramp", "ann"]

    async def clear(c: Any) -> None:
        await routes.clear_weights(c, By("ann", 2), "m")

    ramped.ledger(clear)
    ramping.look()
    assert ramping.steps()[-1][:2] == ("ramp", {"old": 1, "new": 1})  # it begins anew


OLD, NEW, THIRD = (Deployment(to=name) for name in ("old", "new", "third"))


class Ledger:
    """A ledger and a clock, on which ramps are looked at with one configuration after the other."""

    def __init__(self, db: Database) -> None:
        self.db = db
        self.now = 0

    async def look(self, *deployments: Deployment, ramp: Ramp = RAMP) -> Step | None:
        self.now += 1_000
        model = Model(deployments=deployments, ramp=ramp)
        async with self.db.begin() as c:
            return await take_step(c, "m", model, ramp, self.now)

    async def weights(self) -> dict[str, int]:
        async with self.db.read() as c:
            found = await routes.find_weights(c, "m")
        assert found is not None
        return found.weights

    async def standing(self) -> Standing:
        async with self.db.read() as c:
            found = await find_standing(c, "m")
        assert found is not None
        return found


@pytest.fixture
async def ledger(ledger_url: str) -> AsyncIterator[Ledger]:
    db = await Database.open(ledger_url)
    yield Ledger(db)
    await db.close()


async def test_another_configuration_is_followed_and_does_not_disarm_the_ramp(ledger: Ledger) -> None:
    await ledger.look(OLD, NEW)
    assert await ledger.weights() == {"old": 9, "new": 1}
    step = await ledger.look(OLD, msgspec.structs.replace(THIRD, weight=200), NEW)
    assert step is not None
    assert await ledger.weights() == {"old": 3, "third": 6, "new": 1}
    assert await ledger.look(OLD, msgspec.structs.replace(THIRD, weight=200), NEW) is None
    assert (await ledger.standing()).step_ms == 1_000  # the step has held since it began
    async with ledger.db.begin() as c:
        await add_failures(c, {("m", "new"): 100}, ledger.now)
    await ledger.look(OLD, NEW)
    assert await ledger.weights() == {"old": 1, "new": 0}
    await ledger.look(OLD, msgspec.structs.replace(THIRD, weight=200), NEW)
    assert await ledger.weights() == {"old": 1, "third": 2, "new": 0}
    assert (await ledger.standing()).state == "fallen_back"


async def test_a_ramp_of_another_deployment_begins_at_its_own_first_step(ledger: Ledger) -> None:
    await ledger.look(OLD, NEW, ramp=msgspec.structs.replace(RAMP, steps=(50,)))
    step = await ledger.look(OLD, NEW, THIRD, ramp=msgspec.structs.replace(RAMP, deployment="third"))
    assert step is not None
    assert (step.share_percent, (await ledger.standing()).deployment) == (10, "third")


@pytest.mark.parametrize("by_hand", [False, True])
async def test_a_ramp_of_an_older_release_goes_on_unless_weights_were_set_by_hand(
    ledger: Ledger, by_hand: bool
) -> None:
    old = {"old": 1, "new": 1} if by_hand else {"old": 9_000, "new": 1_000}
    async with ledger.db.begin() as c:
        await c.execute(insert(ramps).values(model="m", state="climbing", share_percent=10, step_ms=5))
        await routes.set_weights(c, By("ramp", 5), "m", old)
    step = await ledger.look(OLD, NEW)
    assert step is not None
    if by_hand:
        assert (step.state, await ledger.weights()) == ("ended", old)
        assert await ledger.look(OLD, NEW) is None
    else:
        assert (await ledger.weights(), (await ledger.standing()).step_ms) == ({"old": 9, "new": 1}, 5)


async def test_two_hosts_that_look_at_once_begin_once(ledger: Ledger) -> None:
    first = await asyncio.gather(*(ledger.look(OLD, NEW) for _ in range(4)))
    assert len([step for step in first if step is not None]) == 1
    async with ledger.db.read() as c:
        assert len((await list_entries(c, subject_kind="route")).items) == 1


async def test_one_model_that_cannot_be_looked_at_keeps_no_other_from_its_ramp(ledger_sqlite_url: str) -> None:
    ramp = Ramp(deployment="new", steps=(10,))
    good = Model(deployments=(Deployment(to="old"), Deployment(to="new", weight=0)), ramp=ramp)
    impossible = Model(deployments=(Deployment(to="old", weight=-1), Deployment(to="new")), ramp=ramp)
    db = await Database.open(ledger_sqlite_url)
    try:
        await Observer(db, Settings(models={"bad": impossible, "m": good})).look()
        async with db.read() as c:
            (found,) = await routes.list_weights(c)
    finally:
        await db.close()
    assert (found.model, found.weights) == ("m", {"old": 9, "new": 1})


@pytest.mark.parametrize("says", [f"vllm:spec_decode_num_draft_tokens_total {value}" for value in ("NaN", "+Inf")])
async def test_a_place_that_talks_nonsense_keeps_no_ramp_from_falling_back(ledger_sqlite_url: str, says: str) -> None:
    ramp = Ramp(deployment="new", steps=(10, 50), min_requests=3)
    model = Model(deployments=(Deployment(to="old"), Deployment(to="new", weight=0)), ramp=ramp)
    db = await Database.open(ledger_sqlite_url)
    with ScriptedUpstream() as upstream:
        upstream.script = Script((f"HTTP/1.1 200 OK\r\n\r\n{says}\n".encode(),))
        place = UpstreamSettings(base_url=upstream.base_url, metrics="/metrics")
        observer = Observer(db, Settings(upstreams={"old": place}, models={"m": model}))
        try:
            await observer.look()
            async with db.begin() as c:
                await add_failures(c, {("m", "new"): 5}, now_ms())
            await observer.look()
            async with db.read() as c:
                found = await routes.find_weights(c, "m")
        finally:
            await db.close()
    assert found is not None
    assert found.weights == {"old": 1, "new": 0}
