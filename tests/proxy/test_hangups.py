"""Clients that hang up, early and late: the generation stops, and what was produced is billed, no more and no less."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.proxy.lag import Lag, assert_in_time
from tests.proxy.scripted import Script, ScriptedUpstream
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import wait_until
from tests.upstream.process import FakeUpstream

MESSAGES = [{"role": "user", "content": "hi there"}]


async def read_some(gateway: Gateway, model: str, tokens: int) -> tuple[str, int, float]:
    """Read so many tokens of a stream and hang up: (request id, tokens read, when)."""
    body = {"model": model, "messages": MESSAGES, "stream": True}
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with (
        httpx.AsyncClient(timeout=20) as http,
        http.stream("POST", f"{gateway.base_url}/chat/completions", json=body, headers=headers) as answer,
    ):
        seen = 0
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line[6:])["choices"]
                seen += bool(choices and choices[0]["delta"].get("content"))
            if seen >= tokens:
                break
        request_id = answer.headers["x-request-id"]
    return request_id, seen, time.time()


async def test_a_hangup_stops_the_generation_within_100_ms(gateway: Gateway, upstream: FakeUpstream) -> None:
    late = []
    async with Lag() as lag:
        found = [await read_some(gateway, "m@slow-chunks", 5) for _ in range(3)]
        entries = [await asyncio.to_thread(upstream.entry, request_id) for request_id, _, _ in found]
    for (request_id, _, hung_up), entry in zip(found, entries, strict=True):
        assert entry["outcome"] == "client_gone"
        late.append(entry["ended"] - hung_up)
        row = await asyncio.to_thread(gateway.row, request_id)
        assert (row["status"], bool(row["estimated"])) == ("cancelled", True)
        assert 5 <= row["generated_tokens"] <= entry["produced_tokens"]
    assert_in_time(late, lag.seconds)


async def test_a_client_that_leaves_before_a_plain_answer_stops_it_and_pays_nothing(
    gateway: Gateway, upstream: FakeUpstream
) -> None:
    hung_up = []
    async with Lag() as lag:
        for number in range(1, 4):
            async with httpx.AsyncClient(timeout=1) as http:
                with pytest.raises(httpx.ReadTimeout):
                    await http.post(
                        f"{gateway.base_url}/chat/completions",
                        json={"model": "m@hang", "messages": MESSAGES},
                        headers={"authorization": f"Bearer {gateway.key}"},
                    )
            hung_up.append(time.time())
            entries = await asyncio.to_thread(upstream.wait_for_entries, number)
    assert {entry["outcome"] for entry in entries} <= {"client_gone", "hang"}
    assert_in_time([entry["ended"] - at for entry, at in zip(entries, hung_up, strict=True)], lag.seconds)
    worker = gateway.app.state.worker
    await asyncio.to_thread(wait_until, lambda: worker.gate._open_holds == 0, 30)
    for entry in entries:
        row = await asyncio.to_thread(gateway.row, entry["id"])
        assert (row["status"], row["billed_tokens"], row["cost_usd_pico"]) == ("cancelled", 0, 0)
        assert (row["estimate_reason"], bool(row["estimated"])) == ("gone", True), "nobody said what it had generated"


def test_a_stopping_worker_settles_what_its_streams_delivered(upstream: FakeUpstream, tmp_path: Any) -> None:
    model = {"deployments": [{"to": "legacy", "model": "gpt-4@endless"}], "price": PRICE}
    gateway = Gateway(tmp_path, configuration({"legacy": upstream.base_url}, endless=model))
    with (
        gateway,
        gateway.http() as http,
        http.stream(
            "POST", "/chat/completions", json={"model": "endless", "messages": MESSAGES, "stream": True}
        ) as answer,
    ):
        lines = answer.iter_lines()
        for _ in range(20):
            next(lines)
        gateway._server.should_exit = True
        rest = [line for line in lines if line.startswith("data: {")]
        said = json.loads(rest[-1][6:])["error"]
        assert said["code"] == "shutting_down"
        assert "cut this answer short" in said["message"]
        request_id = answer.headers["x-request-id"]
    row = gateway.row(request_id)
    delivered = sum(bool(json.loads(line[6:]).get("choices")) for line in rest)
    assert (row["status"], row["estimate_reason"]) == ("cancelled", "stopped")
    assert row["billed_tokens"] > row["generated_tokens"] >= delivered
    assert upstream.entry(request_id)["outcome"] == "client_gone"


def test_a_stopping_worker_answers_what_is_not_finished_in_openais_shape_and_bills_nothing(
    upstream: FakeUpstream, tmp_path: Any
) -> None:
    model = {"deployments": [{"to": "legacy", "model": "gpt-4@hang"}], "price": PRICE}
    with Gateway(tmp_path, configuration({"legacy": upstream.base_url}, hangs=model)) as gateway:

        def stop_when_asked() -> None:
            wait_until(lambda: gateway.app.state.worker.gate._open_holds == 1)
            gateway._server.should_exit = True

        with gateway.http() as http, ThreadPoolExecutor() as pool:
            pool.submit(stop_when_asked)
            answer = http.post("/chat/completions", json={"model": "hangs", "messages": MESSAGES})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert answer.headers["x-should-retry"] == "true"
    assert gateway.rows() == []


async def test_a_route_may_read_on_to_learn_what_was_really_used(upstream: FakeUpstream, tmp_path: Any) -> None:
    def model(**more: Any) -> dict[str, Any]:
        fault = "fifty-chunks" if "finish_s" not in more else "endless"
        place = {"to": "legacy", "model": f"gpt-4@{fault}"}
        return {"deployments": [place], "price": PRICE, "on_hangup": "finish", **more}

    config = configuration({"legacy": upstream.base_url}, finishes=model(), bounded=model(finish_s=0.3))
    gateway = await asyncio.to_thread(Gateway, tmp_path, config)
    await asyncio.to_thread(gateway.__enter__)
    try:
        request_id, delivered, _ = await read_some(gateway, "finishes", 5)
        row = await asyncio.to_thread(gateway.row, request_id)
        assert (row["status"], row["generated_tokens"], bool(row["estimated"])) == ("cancelled", 50, False)
        assert (await asyncio.to_thread(upstream.entry, request_id))["outcome"] == "done"
        request_id, delivered, hung_up = await read_some(gateway, "bounded", 5)
        entry = await asyncio.to_thread(upstream.entry, request_id)
        row = await asyncio.to_thread(gateway.row, request_id)
        assert entry["outcome"] == "client_gone"
        assert 0.2 < entry["ended"] - hung_up < 10
        assert delivered <= row["generated_tokens"] <= entry["produced_tokens"]
    finally:
        await asyncio.to_thread(gateway.stop)


async def test_a_last_event_without_its_blank_line_is_read_after_a_hangup_too(tmp_path: Any) -> None:
    begins = b'data: {"choices": [{"index": 0, "delta": {"content": "one"}}]}\n\n'
    ends = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 99, "total_tokens": 106}}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
    with ScriptedUpstream() as upstream:
        upstream.script = Script((head + begins, ends), pause_s=0.5)
        model = {"deployments": [{"to": "legacy", "model": "gpt-4"}], "price": PRICE, "on_hangup": "finish"}
        gateway = await asyncio.to_thread(Gateway, tmp_path, configuration({"legacy": upstream.base_url}, m=model))
        await asyncio.to_thread(gateway.__enter__)
        try:
            request_id, _, _ = await read_some(gateway, "m", 1)
            row = await asyncio.to_thread(gateway.row, request_id)
        finally:
            await asyncio.to_thread(gateway.stop)
    assert (row["status"], row["prompt_tokens"], row["generated_tokens"]) == ("cancelled", 7, 99)
    assert not row["estimated"]
