"""How drafts do: states with hysteresis, told once; read from answers, or from a place's own metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from ledger.acceptance import Drafted, Key, State, judge, list_states, update_states
from ledger.database import Database
from ledger.schema import webhook_events
from proxy.observer import Observer
from proxy.scraping import Reading, Sample, between, read_metrics
from proxy.settings import load_settings
from tests.proxy.scripted import Script, ScriptedUpstream
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import wait_until
from tests.upstream.process import FakeUpstream


@pytest.mark.parametrize(
    ("before", "percent", "after"),
    [
        (None, 70, "healthy"),
        (None, 69, "watch"),
        (None, 50, "watch"),
        (None, 49, "wrong_draft"),
        ("healthy", 68, "healthy"),  # wavers: nobody is told
        ("healthy", 67, "watch"),
        ("watch", 69, "watch"),
        ("watch", 70, "healthy"),
        ("watch", 50, "watch"),
        ("wrong_draft", 51, "wrong_draft"),
        ("wrong_draft", 52, "watch"),
        ("healthy", 30, "wrong_draft"),
        ("wrong_draft", 90, "healthy"),
    ],
)
def test_a_state_is_left_only_beyond_its_border(before: State | None, percent: int, after: State) -> None:
    assert judge(before, Drafted(10_000, 100 * percent)) == after


@pytest.mark.parametrize("before", [None, "healthy", "wrong_draft"])
def test_few_tokens_change_nothing(before: State | None) -> None:
    assert judge(before, Drafted(999, 0)) == before
    assert judge(before, Drafted()) == before


async def test_a_change_is_told_once_and_a_healthy_beginning_not_at_all(ledger_url: str) -> None:
    db = await Database.open(ledger_url)
    key, told = Key("backend", "qwen-0.5b"), []
    try:
        for minute, percent in enumerate((80, 69, 69, 40, 51, 40, 75)):
            async with db.begin() as c:
                await update_states(c, {key: Drafted(2_000, 20 * percent)}, minute * 60_000)
        async with db.read() as c:
            rows = (await c.execute(select(webhook_events).order_by(webhook_events.c.at_ms))).all()
            told = [json.loads(row.payload) for row in rows]
            (state,) = await list_states(c)
    finally:
        await db.close()
    assert [(item["before"], item["state"], item["acceptance_rate"]) for item in told] == [
        ("healthy", "wrong_draft", 0.4),
        ("wrong_draft", "healthy", 0.75),
    ]
    assert (state.state, state.since_ms, state.seen_ms) == ("healthy", 360_000, 360_000)


VLLM = """\
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0"} %d
vllm:spec_decode_num_draft_tokens_total{engine="1"} 0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0"} %d
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0"} 62
"""


def test_vllm_tells_counts() -> None:
    before, after = read_metrics(VLLM % (100, 70)), read_metrics(VLLM % (2_100, 1_470))
    assert between(before, after, 5) == Sample(2_000, 1_400, 0.62)
    assert between(after, read_metrics(VLLM % (500, 400)), 5) == Sample(500, 400, 0.62)  # it was restarted


def test_sglang_tells_rates() -> None:
    text = "sglang:spec_accept_rate 0.75\nsglang:spec_accept_length 4.0\nsglang:generation_tokens_total %d\n"
    sample = between(read_metrics(text % 0), read_metrics(text % 4_000), 5)
    assert sample == Sample(4_000, 3_000, None)  # 1 000 passes, three accepted tokens each


def test_our_backend_tells_how_busy_it_was() -> None:
    text = "tallygate_backend_busy_seconds_total %g\n"
    assert between(read_metrics(text % 10), read_metrics(text % 13), 5).utilisation == pytest.approx(0.6)
    assert read_metrics("tallygate_backend_device_utilization 0.5\n").utilisation == 0.5
    assert read_metrics("something_else 1\n") == Reading()


def test_a_gauge_that_is_no_number_says_nothing_and_a_counter_that_is_none_is_refused() -> None:
    text = "sglang:spec_accept_rate %s\nsglang:spec_accept_length %s\nsglang:generation_tokens_total %s\n"
    idle, busy = read_metrics(text % ("NaN", "NaN", 0)), read_metrics(text % (0.75, 4, 4_000))
    assert between(busy, idle, 5) == Sample(0, 0, None)
    assert between(idle, busy, 5) == Sample(4_000, 3_000, None)
    for count in ("NaN", "+Inf", "-3", "1e300"):
        with pytest.raises(ValueError, match="no count"):
            read_metrics(text % (0.75, 4, count))
    with pytest.raises(ValueError, match="no count"):
        between(idle, read_metrics(text % ("1e-300", 4, 4_000)), 5)


def speculated(accepted: int) -> dict[str, Any]:
    """A backend's answer that drafted 1 000 tokens."""
    speculative = {"draft_model": "qwen-0.5b", "draft_tokens": 1_000, "accepted_tokens": accepted, "target_passes": 9}
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "tallygate": {"speculative": speculative}}
    choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
    return {"body": json.dumps({"id": "c", "choices": [choice], "usage": usage})}


@pytest.fixture
def drafting(tmp_path: Path, upstream: FakeUpstream) -> Iterator[Gateway]:
    config = configuration({"legacy": upstream.base_url}, m={})
    config["backend"] = {"url": upstream.base_url, "drafts": {"qwen-0.5b": "ngram"}}
    config["models"]["m"] = {
        "deployments": [{"to": "backend", "model": "gpt-4"}],
        "drafts": ["qwen-0.5b"],
        "price": PRICE,
    }
    with Gateway(tmp_path, config) as gateway:
        yield gateway


async def test_what_answers_tell_of_drafts_becomes_a_state_a_metric_and_an_event(drafting: Gateway) -> None:
    def ask(accepted: int) -> None:
        raw = drafting.client().chat.completions.with_raw_response.create(
            model="m", messages=[{"role": "user", "content": "hi"}], extra_body={"x_fault": speculated(accepted)}
        )
        drafting.row(raw.headers["x-request-id"])

    def states() -> list[dict[str, Any]]:
        headers = {"authorization": f"Bearer {'t' * 32}"}
        url = f"http://127.0.0.1:{drafting.port}/admin/v1/reports/acceptance"
        found: list[dict[str, Any]] = httpx.get(url, headers=headers).json()["data"]
        return found

    db = await Database.open(drafting.settings.storage.database)
    try:
        observer = Observer(db, drafting.settings)
        await observer.look()
        await asyncio.to_thread(ask, 400)
        await observer.look()
        (state,) = await asyncio.to_thread(states)
        assert (state["deployment"], state["draft_model"], state["state"]) == ("backend", "qwen-0.5b", "wrong_draft")
        assert (state["acceptance_rate"], state["draft_tokens"]) == (0.4, 1_000)
        async with db.read() as c:
            (event,) = (await c.execute(select(webhook_events))).all()
        assert (event.kind, json.loads(event.payload)["state"]) == ("acceptance", "wrong_draft")
    finally:
        await db.close()
    line = 'tallygate_acceptance_state{deployment="backend",draft="qwen-0.5b",state="wrong_draft"} 1'
    url = f"http://127.0.0.1:{drafting.port}/metrics"
    await asyncio.to_thread(wait_until, lambda: line in httpx.get(url).text, 30, "the metric")


async def test_what_only_a_places_metrics_tell_becomes_a_state_and_its_utilisation_is_reported(
    ledger_sqlite_url: str, tmp_path: Path
) -> None:
    from ledger.deployments import utilisation_of

    def metrics(drafted: int, accepted: int) -> Script:
        return Script((b"HTTP/1.1 200 OK\r\n\r\n", (VLLM % (drafted, accepted)).encode()))

    with ScriptedUpstream() as upstream:
        config = configuration({"vllm": upstream.base_url}, m={})
        config["upstreams"]["vllm"]["metrics"] = "/metrics"
        config["models"]["m"] |= {"drafts": ["qwen-0.5b"]}
        config["models"]["m"]["deployments"][0]["draft"] = "qwen-0.5b"
        (tmp_path / "c.yaml").write_text(json.dumps(config))
        db = await Database.open(ledger_sqlite_url)
        observer = Observer(db, load_settings(tmp_path / "c.yaml", tmp_path))
        try:
            for drafted, accepted in ((1_000, 0), (3_000, 1_600)):
                upstream.script = metrics(drafted, accepted)
                await observer.look()
            async with db.read() as c:
                (state,) = await list_states(c)
                assert (state.deployment, state.state, state.rate) == ("vllm", "healthy", 0.8)
                assert await utilisation_of(c) == {"vllm": 0.62}
        finally:
            await db.close()
        assert upstream.received[0].startswith(b"GET /metrics HTTP/1.1\r\n")
