"""Idempotency-Key: one run, one charge, the same answer and usage again."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.proxy.serving import Gateway
from tests.services import wait_until
from tests.upstream.process import FakeUpstream

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi there"}], "max_tokens": 6}


def post(gateway: Gateway, key: str, **fields: Any) -> httpx.Response:
    with gateway.http() as http:
        return http.post("/chat/completions", json={**BODY, **fields}, headers={"idempotency-key": key})


def again(gateway: Gateway, key: str, **fields: Any) -> httpx.Response:
    """Ask until the first answer has been posted."""
    answers: list[httpx.Response] = []

    def answered() -> bool:
        answers.append(post(gateway, key, **fields))
        return answers[-1].status_code != 409

    wait_until(answered, 30, "the kept answer")
    return answers[-1]


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_the_same_key_gives_the_same_answer_and_charges_once(
    gateway: Gateway, upstream: FakeUpstream, fields: dict[str, Any]
) -> None:
    key = uuid.uuid4().hex
    first = post(gateway, key, **fields)
    second = again(gateway, key, **fields)
    assert (first.status_code, second.status_code) == (200, 200)
    assert second.content == first.content
    assert second.headers["idempotent-replayed"] == "true"
    assert second.headers["x-request-id"] == first.headers["x-request-id"]
    assert len(upstream.wait_for_entries(1)) == 1
    row = gateway.row(first.headers["x-request-id"])
    assert row["generated_tokens"] == 6
    if not fields:
        assert second.headers["x-tallygate-cost-usd"] == first.headers["x-tallygate-cost-usd"]


def test_another_body_under_the_same_key_is_422(gateway: Gateway) -> None:
    key = uuid.uuid4().hex
    post(gateway, key)
    answer = post(gateway, key, max_tokens=7)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "idempotency_mismatch")
    assert answer.headers["x-should-retry"] == "false"


def test_a_key_whose_request_still_runs_is_409(gateway: Gateway, upstream: FakeUpstream) -> None:
    key = uuid.uuid4().hex
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(post, gateway, key, model="m@slow-chunks") for _ in range(2)]  # whoever comes first
        assert sorted(answer.result().status_code for answer in both) == [200, 409]


def test_a_request_that_failed_frees_its_key(gateway: Gateway, upstream: FakeUpstream) -> None:
    key = uuid.uuid4().hex
    upstream.standing_fault("500", 1)
    assert post(gateway, key).status_code == 502
    assert again(gateway, key).status_code == 200


def test_a_key_of_control_characters_is_400(gateway: Gateway) -> None:
    answer = post(gateway, "x" * 300)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_a_key_sees_its_own_use_and_its_teams_but_not_what_the_provider_charged(gateway: Gateway) -> None:
    secret = gateway.new_key()
    with gateway.http(secret) as http:
        answer = http.post("/chat/completions", json=BODY)
        gateway.row(answer.headers["x-request-id"])
        rows = http.get("/usage").json()["data"]
        assert [row["request_id"] for row in rows] == [answer.headers["x-request-id"]]
        assert "provider_cost_usd" not in rows[0]
        sums = http.get("/usage", params={"scope": "team", "group_by": "model"}).json()["data"]
        assert [(one["model"], one["requests"], one["generated_tokens"]) for one in sums] == [("m", 1, 6)]
        assert json.loads(answer.text)["usage"]["tallygate"]["cost_cny"] == sums[0]["cost_cny"]
        for query in ({"scope": "all"}, {"nonsense": "1"}, {"from": "yesterday"}, {"group_by": "mood"}):
            wrong = http.get("/usage", params=query)
            assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
