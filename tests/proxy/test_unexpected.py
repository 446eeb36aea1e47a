"""Promises about what nobody expected: an answer that can be traced, and parts that go on."""

from __future__ import annotations

import json
from typing import Any

from proxy.app import RequestId


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
