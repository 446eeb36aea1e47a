"""What an attempt cost us stays under the request that it was made for, also when another one answered, or none."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select

from ledger.schema import transfers
from policies.admission import Capacity
from proxy.counting import RulesOfThumb
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import wait_until
from tests.upstream.process import FakeUpstream

COST = {"currency": "USD", "input": "0.10", "output": "0.20"}
PROMPT = [{"role": "user", "content": "three short words"}]


def place(name: str, model: str) -> dict[str, Any]:
    return {"to": name, "model": model, "cost": COST}


def model(first: str, last: str) -> dict[str, Any]:
    """Two places that meet these faults; the second is only asked when the first has failed."""
    places = [place("one", f"gpt-4@{first}"), {**place("two", f"gpt-4@{last}"), "weight": 0}]
    return {"deployments": places, "fallback": ["two"], "price": PRICE}


def on_two_places(upstream: FakeUpstream, **models: Any) -> dict[str, Any]:
    return configuration({"one": upstream.base_url, "two": upstream.base_url}, **models)


def test_failed_attempts_keep_their_provider_cost(tmp_path: Path, upstream: FakeUpstream) -> None:
    models = {"saved": model("200-not-json", "none"), "refused": model("500", "none"), "lost": model("cut", "cut")}
    with Gateway(tmp_path, on_two_places(upstream, **models)) as gateway:
        client = gateway.client()
        for name in ("saved", "refused"):
            client.chat.completions.create(model=name, messages=PROMPT, max_tokens=5)
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model="lost", messages=PROMPT, max_tokens=5)
    rows = {row["model"]: row for row in gateway.rows()}

    async def booked(c: Any) -> list[tuple[str, str]]:
        moved = select(transfers.c.source, transfers.c.destination).where(transfers.c.kind == "provider_cost")
        return [tuple(row) for row in await c.execute(moved)]

    prompt = rows["refused"]["prompt_tokens"] * 100_000
    answered = prompt + 5 * 200_000
    assert rows["refused"]["provider_cost_usd_pico"] == answered
    assert rows["saved"]["provider_cost_usd_pico"] > answered
    assert (rows["saved"]["attempts"], rows["saved"]["status"]) == (2, "completed")
    lost = rows["lost"]
    assert (lost["status"], lost["billed_tokens"], lost["cost_usd_pico"], lost["waiver_reason"]) == (
        "failed",
        0,
        0,
        None,
    )
    assert lost["provider_cost_usd_pico"] > 0
    assert set(gateway.ledger(booked)) == {
        ("cost:saved", "provider:one"),
        ("cost:saved", "provider:two"),
        ("cost:refused", "provider:two"),
        ("cost:lost", "provider:one"),
        ("cost:lost", "provider:two"),
    }


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_during_a_later_attempt_leaves_the_cost_of_the_first(
    tmp_path: Path, upstream: FakeUpstream, streamed: bool
) -> None:
    body = {"model": "left", "messages": PROMPT, "max_tokens": 5, "stream": streamed}
    with Gateway(tmp_path, on_two_places(upstream, left=model("200-not-json", "hang"))) as gateway:
        with gateway.http() as http, pytest.raises(httpx.ReadTimeout):
            http.post("/chat/completions", json=body, timeout=2)
        wait_until(lambda: bool(gateway.rows()), 30, "the row of what failed")
        (row,) = gateway.rows()
    assert (row["status"], row["billed_tokens"], row["attempts"], row["deployment"]) == ("cancelled", 0, 2, "two")
    assert row["provider_cost_usd_pico"] > 0


def test_a_stream_that_is_left_before_its_first_token_keeps_the_cost_of_the_attempt_before_it(
    tmp_path: Path, upstream: FakeUpstream
) -> None:
    begins_only = {"tokens": 3, "end": "stall", "end_after": 0}
    config = on_two_places(upstream, left=model("200-not-json", "none"))
    config["models"]["left"]["deployments"][1]["model"] = "gpt-4"
    upstream.standing_fault(begins_only)
    with Gateway(tmp_path, config) as gateway:
        with (
            gateway.http() as http,
            http.stream(
                "POST", "/chat/completions", json={"model": "left", "messages": PROMPT, "stream": True}
            ) as told,
        ):
            next(told.iter_bytes())
        row = gateway.row(told.headers["x-request-id"])
    assert (row["status"], row["billed_tokens"], row["attempts"]) == ("cancelled", 0, 2)
    assert row["provider_cost_usd_pico"] > 0


def test_a_full_queue_behind_a_failed_attempt_does_not_make_a_client_generate_again(
    tmp_path: Path, upstream: FakeUpstream
) -> None:
    with Gateway(tmp_path, on_two_places(upstream, m=model("200-not-json", "none"))) as gateway:
        admission = gateway.app.state.worker.admission
        admission.update({"two": Capacity(1, max_queue=0)})
        assert admission.slot("two", "another team")._lane.take()
        with gateway.http() as http:
            answer = http.post("/chat/completions", json={"model": "m", "messages": PROMPT})
        row = gateway.row(answer.headers["x-request-id"])
    assert (answer.status_code, answer.headers["x-should-retry"]) == (502, "false")
    assert (row["status"], row["attempts"], row["deployment"]) == ("failed", 1, "one")
    assert row["provider_cost_usd_pico"] > 0


class SlowCounting(RulesOfThumb):
    """Takes as long as a tokenizer with a long prompt."""

    needs_text = True

    def __init__(self) -> None:
        self.prompts = 0

    def prompt_tokens(self, text: str) -> int:
        self.prompts += 1
        time.sleep(1.5)
        return super().prompt_tokens(text)


def test_a_prompt_is_counted_once_for_all_attempts_and_nobody_waits_for_it(
    tmp_path: Path, upstream: FakeUpstream
) -> None:
    config = on_two_places(upstream, m=model("200-not-json", "usage-none"))
    config["upstreams"]["one"] |= {"retries": 2, "retry_on": ["broken"]}
    with Gateway(tmp_path, config) as gateway, gateway.http() as http:
        route, counting = gateway.app.state.worker.routes["m"], SlowCounting()
        for deployment in (*route.deployments, *route.fallbacks):
            deployment.upstream.counting = counting
        asking = threading.Thread(
            target=http.post, args=("/chat/completions",), kwargs={"json": {"model": "m", "messages": PROMPT}}
        )
        asking.start()
        slowest_s = 0.0
        while asking.is_alive():
            began = time.monotonic()
            httpx.get(f"http://127.0.0.1:{gateway.port}/health/live", timeout=10)
            slowest_s = max(slowest_s, time.monotonic() - began)
        wait_until(lambda: bool(gateway.rows()), 30, "the row")
        (row,) = gateway.rows()
    assert (row["attempts"], row["status"], bool(row["estimated"])) == (4, "completed", True)
    assert counting.prompts == 1
    assert slowest_s < 1.4  # the counting alone takes longer
