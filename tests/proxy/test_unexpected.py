"""Promises about what nobody expected: an answer that can be traced, and parts that go on."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import text

from ledger import keys
from ledger.audit import By
from proxy.app import RequestId
from proxy.openai.sse import EventCutter
from tests.proxy.serving import Gateway, configuration
from tests.services import wait_until

HELLO: Any = [{"role": "user", "content": "hi"}]


async def _fails(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("what a user must not see")


async def test_an_unexpected_failure_is_a_500_in_our_shape_whose_request_id_is_in_the_log(capfd: Any) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/models", "method": "GET", "headers": []}
    await RequestId(_fails)(scope, None, send)  # type: ignore[arg-type]
    start, body = sent
    assert start["status"] == 500
    assert json.loads(body["body"])["error"]["code"] == "internal_error"
    assert b"what a user" not in body["body"]
    (request_id,) = [value for name, value in start["headers"] if name == b"x-request-id"]
    assert request_id.decode() in capfd.readouterr().out


def test_what_was_delivered_before_an_unexpected_failure_is_billed(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(EventCutter):
        left = 10

        def feed(self, packet: bytes) -> list[bytes]:
            self.left -= 1
            if not self.left:
                raise RuntimeError("a fault of ours")
            return super().feed(packet)

    monkeypatch.setattr("proxy.relay.EventCutter", Failing)
    with gateway.http() as http:
        answer = http.post("/chat/completions", json={"model": "m@slow-chunks", "messages": HELLO, "stream": True})
    payloads = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert payloads[-1]["error"]["code"] == "internal_error"
    delivered = sum(bool(choice["delta"].get("content")) for event in payloads[:-1] for choice in event["choices"])
    row = gateway.row(answer.headers["x-request-id"])
    assert 0 < delivered == row["generated_tokens"] == row["billed_tokens"] - row["prompt_tokens"]


def test_a_key_blocked_after_the_database_said_something_odd_is_still_refused(tmp_path: Path) -> None:
    with Gateway(tmp_path, configuration({"nobody": "http://127.0.0.1:9/v1"})) as gateway:
        gateway.client().models.list()
        worker = gateway.app.state.worker
        gateway.ledger(lambda c: c.execute(text("ALTER TABLE audit RENAME TO hidden")))
        wait_until(lambda: time.monotonic() - worker._refreshed_at > 0.6, 30, "a refresh that fails")
        gateway.ledger(lambda c: c.execute(text("ALTER TABLE hidden RENAME TO audit")))

        async def block(c: Any) -> None:
            (key,) = (await keys.list_keys(c)).items
            await keys.block_key(c, By("test", time.time_ns() // 1_000_000), key.id)

        gateway.ledger(block)

        def refused() -> bool:
            try:
                gateway.client().models.list()
            except openai.PermissionDeniedError as error:
                return error.code == "key_blocked"
            return False

        wait_until(refused, 30, "the key to be refused")
