"""Routes that change while everything runs: weights set by hand, drafts that choose, retries, health checks."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from proxy.cli import main
from proxy.openai.errors import upstream_error
from proxy.routing import Deployment, Route
from proxy.settings import Deployment as DeploymentSettings
from proxy.settings import Model
from proxy.upstream import Kind, Patience, Retries, Upstream, UpstreamFailed
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import wait_until
from tests.upstream.process import FakeUpstream

HELLO: Any = [{"role": "user", "content": "hi there"}]


def place(name: str, weight: int, draft: str | None = None) -> Deployment:
    return Deployment(name, Upstream(name, "http://127.0.0.1:9/v1", None, Patience()), "m", weight, draft=draft)


def route(*deployments: Deployment) -> Route:
    return Route("m", Model(deployments=(DeploymentSettings(to="a"),)), deployments, (), frozenset())


def shares(there: Route, team_id: str | None = None, draft: Any = None) -> Counter[str]:
    return Counter(there.choose(f"key_{n}", team_id, draft).name for n in range(2_000))


def test_weights_of_a_team_win_over_those_of_all_and_those_over_the_configured() -> None:
    there = route(place("a", 50), place("b", 50))
    assert 900 < shares(there)["a"] < 1_100
    there.set_weights[None] = (100, 0)
    assert shares(there) == {"a": 2_000}
    there.set_weights["team_x"] = (0, 1)
    assert (shares(there, "team_x"), shares(there, "team_y")) == ({"b": 2_000}, {"a": 2_000})


def test_a_named_draft_chooses_among_deployments_that_have_one_each() -> None:
    there = route(place("plain", 80), place("qwen", 10, "qwen-0.5b"), place("llama", 10, "llama-3.2-1b"))
    assert set(shares(there)) == {"plain", "qwen", "llama"}
    assert set(shares(there, draft="qwen-0.5b")) == {"qwen"}
    assert set(shares(there, draft="llama-3.2-1b")) == {"llama"}
    assert set(shares(there, draft=False)) == {"plain"}
    assert shares(there, draft="gpt2-small") == shares(there)  # nobody has it: whoever answers says so


def test_a_named_draft_does_not_disturb_the_split_of_deployments_without_one() -> None:
    there = route(place("a", 90), place("b", 10))
    assert shares(there, draft="qwen-0.5b") == shares(there)


def test_the_deployment_of_a_named_draft_is_asked_even_when_it_has_no_share_of_the_rest() -> None:
    there = route(place("plain", 100), place("qwen", 0, "qwen-0.5b"))
    assert set(shares(there, draft="qwen-0.5b")) == {"qwen"}


@pytest.mark.parametrize(
    ("kind", "wanted_ms", "tries", "pause_s"),
    [
        ("connect", None, 1, 0.1),
        ("connect", None, 2, 0.2),
        ("connect", None, 3, None),  # used up
        ("busy", 300, 1, 0.3),
        ("busy", 7_000, 1, None),  # too long to wait here
        ("broken", None, 1, None),  # not among those that are retried
        ("timeout", None, 1, None),
        ("request", None, 1, None),
    ],
)
def test_a_retry_goes_by_the_kind_of_failure(
    kind: Kind, wanted_ms: int | None, tries: int, pause_s: float | None
) -> None:
    retries = Retries(2, frozenset({"connect", "busy"}))
    assert retries.pause_s(UpstreamFailed(kind, upstream_error("x"), wanted_ms), tries) == pause_s


@pytest.fixture
def routed(tmp_path: Path, upstream: FakeUpstream) -> Iterator[Gateway]:
    """`both` is served by two places; `patient` retries, `dear` does not; `checked` has a health check."""
    two = [{"to": "first", "model": "gpt-4", "weight": 1}, {"to": "second", "model": "gpt-4", "weight": 0}]
    names = ("first", "second", "patient", "dear", "checked")
    models = {name: {"deployments": [{"to": name, "model": "gpt-4"}], "price": PRICE} for name in names[2:]}
    config = configuration(dict.fromkeys(names, upstream.base_url), both={"deployments": two, "price": PRICE}, **models)
    config["upstreams"]["patient"] |= {"retries": 2, "retry_on": ["busy", "broken"]}
    config["upstreams"]["checked"] |= {"health_check": {"path": "/health", "interval_s": 0.05}}
    with Gateway(tmp_path, config) as gateway:
        yield gateway


def deployment_of(gateway: Gateway, model: str = "both") -> str:
    raw = gateway.client().chat.completions.with_raw_response.create(model=model, messages=HELLO)
    return raw.headers["x-tallygate-deployment"]


def admin(gateway: Gateway) -> httpx.Client:
    headers = {"authorization": f"Bearer {'t' * 32}", "x-audit-reason": "their own cluster"}
    return httpx.Client(base_url=f"http://127.0.0.1:{gateway.port}/admin/v1", headers=headers)


def test_weights_set_over_the_admin_api_are_in_force_within_a_second_and_audited(routed: Gateway) -> None:
    assert deployment_of(routed) == "first"
    with admin(routed) as http:
        body = {"model": "both", "team": "demo", "weights": {"second": 1}}
        assert http.put("/routes", json=body).json()["weights"] == {"second": 1}
        wait_until(lambda: deployment_of(routed) == "second", 30, "the new weights")
        entry = http.get("/audit").json()["data"][0]
        assert (entry["action"], entry["team_id"], entry["reason"]) == ("route.set", "team_demo", "their own cluster")
        listed = [item for item in http.get("/routes").json()["data"] if item["model"] == "both"]
        assert [(item["team_id"], item["weights"]) for item in listed] == [
            (None, {"first": 1, "second": 0}),
            ("team_demo", {"second": 1}),
        ]
        assert http.delete("/routes", params={"model": "both", "team": "demo"}).status_code == 200
        wait_until(lambda: deployment_of(routed) == "first", 30, "the configured weights")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "both", "weights": {"third": 1}}, 400),
        ({"model": "both", "weights": {"first": 0}}, 400),
        ({"model": "both", "weights": {"first": -1}}, 400),
        ({"model": "unknown", "weights": {"first": 1}}, 404),
        ({"model": "both", "team": "nobody", "weights": {"first": 1}}, 404),
    ],
)
def test_weights_that_cannot_be_are_refused(routed: Gateway, body: dict[str, Any], status: int) -> None:
    with admin(routed) as http:
        assert http.put("/routes", json=body).status_code == status
        assert http.delete("/routes", params={"model": "both"}).status_code == 404


def test_weights_are_set_from_a_shell_too(routed: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--config", str(routed.folder / "tallygate.yaml"), "--data-dir", str(routed.folder)]

    def tallygate(*words: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main([*words, *where])
        assert ended.value.code == 0

    tallygate("route", "set", "--model", "both", "second=1")
    wait_until(lambda: deployment_of(routed) == "second", 30, "the new weights")
    capsys.readouterr()
    tallygate("route", "list", "--json")
    found = json.loads(capsys.readouterr().out)["data"]
    assert {"second": 1} in [item["weights"] for item in found]
    tallygate("route", "clear", "--model", "both")
    wait_until(lambda: deployment_of(routed) == "first", 30, "the configured weights")


@pytest.mark.parametrize("fault", ["500", {"status": 429, "headers": {"retry-after-ms": "50"}, "body": "{}"}])
@pytest.mark.parametrize("stream", [False, True])
def test_the_same_place_is_asked_again_before_the_first_byte_and_billed_once(
    routed: Gateway, upstream: FakeUpstream, fault: Any, stream: bool
) -> None:
    upstream.standing_fault(fault, times=2)
    with routed.http() as http:
        answer = http.post("/chat/completions", json={"model": "patient", "messages": HELLO, "stream": stream})
    assert answer.status_code == 200
    row = routed.row(answer.headers["x-request-id"])
    assert (row["attempts"], row["generated_tokens"], row["deployment"]) == (3, 16, "patient")
    assert len(upstream.wait_for_entries(3)) == 3
    assert len(routed.rows()) == 1


def test_the_tries_of_one_request_are_one_failure_and_rest_nobody(routed: Gateway, upstream: FakeUpstream) -> None:
    ask = {"model": "patient", "messages": HELLO}
    upstream.standing_fault("500", times=9)
    with routed.http() as http:
        for _ in range(2):
            assert http.post("/chat/completions", json=ask).status_code == 502
        fitness = routed.app.state.worker.routes["patient"].deployments[0].fitness
        assert fitness.failures == 2
        assert len(upstream.wait_for_entries(6)) == 6
        http.post("/chat/completions", json=ask)
        assert http.post("/chat/completions", json=ask).status_code == 503  # after the third it rests, as any other
    assert len(upstream.wait_for_entries(9)) == 9


def test_what_is_not_to_be_retried_is_asked_once(routed: Gateway, upstream: FakeUpstream) -> None:
    for model, fault in (("dear", "500"), ("patient", "400")):
        upstream.reset()
        upstream.standing_fault(fault)
        with pytest.raises(openai.APIStatusError):
            routed.client().chat.completions.create(model=model, messages=HELLO)
        upstream.wait_for_entries(1)
        time.sleep(0.3)
        assert len(upstream.entries()) == 1


def test_a_place_whose_health_check_fails_is_left_out_until_it_is_well(routed: Gateway, upstream: FakeUpstream) -> None:
    assert deployment_of(routed, "checked") == "checked"
    upstream.health(503)
    checked = routed.app.state.worker.upstreams["checked"]
    wait_until(lambda: not checked.up, 30, "the failed checks")
    with pytest.raises(openai.InternalServerError) as caught:
        deployment_of(routed, "checked")
    assert (caught.value.status_code, caught.value.code) == (503, "no_deployment_available")
    assert upstream.entries()[1:] == []
    upstream.health(200)
    wait_until(lambda: checked.up, 30, "a check that succeeds")
    assert deployment_of(routed, "checked") == "checked"


@pytest.mark.parametrize("fault", [{}, {"calls": 1}, {"usage": "none"}, {"usage": "none", "calls": 1}])
def test_a_plain_answer_to_a_stream_request_arrives_as_a_stream_and_is_billed_as_one(
    gateway: Gateway, upstream: FakeUpstream, fault: dict[str, Any]
) -> None:
    with gateway.client().chat.completions.stream(
        model="m",
        messages=HELLO,
        stream_options={"include_usage": True},
        extra_body={"x_fault": {"answers_as": "plain", **fault}},
    ) as events:
        answer = events.get_final_completion()
        request_id = events._response.headers["x-request-id"]
    row, entry = gateway.row(request_id), upstream.entry(request_id)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == row["generated_tokens"]
    if "usage" not in fault:
        assert (row["generated_tokens"], bool(row["estimated"])) == (entry["produced_tokens"], False)
    else:
        assert 3 <= row["generated_tokens"] <= 16
        assert row["estimated"]
    message = answer.choices[0].message
    if "calls" in fault:
        assert message.tool_calls is not None
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Berlin"}
    else:
        assert message.content == entry["text"]


def test_the_canary_report_tells_before_and_after_failures_and_how_busy_the_device_was(
    routed: Gateway, upstream: FakeUpstream, capsys: pytest.CaptureFixture[str]
) -> None:
    from ledger.deployments import add_sample

    def ask() -> str:
        raw = routed.client().chat.completions.with_raw_response.create(model="both", messages=HELLO)
        return raw.headers["x-request-id"]

    routed.row(ask())
    change = time.time_ns() // 1_000_000
    time.sleep(0.01)
    upstream.standing_fault("500", times=2)  # there, and where the other one is asked, which has no share
    with pytest.raises(openai.InternalServerError):
        ask()
    upstream.standing_fault({"headers_delay_ms": 5})  # less than a millisecond, as here, has no speed
    ids = [ask() for _ in range(3)]
    for request_id in ids:
        routed.row(request_id)

    async def busy(c: Any) -> None:
        for utilisation in (0.5, 0.74):
            await add_sample(c, "first", change, draft_tokens=0, accepted_tokens=0, utilisation=utilisation)

    routed.ledger(busy)
    query = {"model": "both", "change": datetime.fromtimestamp(change / 1000, UTC).isoformat()}

    def report(**more: str) -> list[dict[str, Any]]:
        with admin(routed) as http:
            found = http.get("/reports/canary", params=query | more).json()["data"]
            return [item for item in found if item["deployment"] == "first"]

    wait_until(lambda: report()[-1]["failures"] == 1, 30, "the failure")
    before, after = report()
    assert [(item["period"], item["deployment"], item["completed"]) for item in (before, after)] == [
        ("before", "first", 1),
        ("after", "first", 3),
    ]
    assert after["utilisation"] == 0.62
    assert after["tokens_per_s"] > 0
    assert after["cost_usd"] == "0.00002436"
    assert [item["draft_model"] for item in report(by_draft="true")] == [None, None]
    where = ["--config", str(routed.folder / "tallygate.yaml"), "--data-dir", str(routed.folder)]
    with pytest.raises(SystemExit):
        main(["report", "canary", "--model", "both", *where])
    assert "utilisation\t0.62" in capsys.readouterr().out
