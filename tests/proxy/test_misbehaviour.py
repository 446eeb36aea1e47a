"""Every way in which a provider can misbehave, plain and streamed: the right status, the right bytes, the right row.

One row of EXPECTED is one promise. `row`: the status in the ledger, None for no row at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.scripted import Script, ScriptedUpstream
from tests.proxy.serving import Gateway, configuration
from tests.services import wait_until
from tests.upstream.faults import FAULTS
from tests.upstream.process import FakeUpstream


@dataclass(frozen=True)
class Expected:
    status: int
    code: str | None = None
    row: str | None = None
    generated: int | None = None
    """Generated tokens in the row and in the answer; None: as many as the provider produced."""
    estimated: bool = False
    event: str | None = None
    """The code of the error event that ends a stream."""


GOOD = Expected(200, row="completed")
BROKEN = Expected(502, "upstream_error")
TIMEOUT = Expected(504, "upstream_timeout")
GUESSED = Expected(200, row="completed", estimated=True)
BROKE_OFF = Expected(200, row="failed", generated=3, estimated=True, event="upstream_error")

BOTH = (
    dict.fromkeys(FAULTS, GOOD)
    | dict.fromkeys(("close", "reset", "wrong-encoding", "401", "403", "500", "502-html", "503", "529"), BROKEN)
    | dict.fromkeys(("redirect", "204", *(name for name in FAULTS if name.startswith("200-"))), BROKEN)
    | {"hang": TIMEOUT}
    | {
        "400": Expected(400, "unknown_parameter"),
        "404": Expected(404, "model_not_found"),
        "413": Expected(413, "request_too_large"),
        "422": Expected(422, "unprocessable"),
        "429": Expected(429, "rate_limit_exceeded"),
        "429-retry-after": Expected(429, "rate_limit_exceeded"),
        "429-quota": Expected(429, "insufficient_quota"),
        "400-html": Expected(400),
        "400-text-error": Expected(400),
    }
    | {f"usage-{kind}": GUESSED for kind in ("none", "null", "negative", "absurd", "fraction", "text", "list")}
    | {
        "usage-partial": GUESSED,
        "usage-zero": Expected(200, row="completed", generated=0),
        "usage-decreasing": Expected(200, row="completed", generated=84),
        "slow-chunks": Expected(200, row="completed", generated=50),
        "fifty-chunks": Expected(200, row="completed", generated=50),
        "byte-by-byte": Expected(200, row="completed", generated=6),
    }
)
PLAIN = BOTH | {
    "short-body": BROKEN,
    "long-body": BROKEN,
    "cut": BROKEN,
    "cut-at-once": BROKEN,
    "usage-first-then-cut": BROKEN,
    "reset-midway": BROKEN,
    "half-event": BROKEN,
    "stream-for-plain": BROKEN,
}
STREAMED = BOTH | {
    "long-body": BROKEN,
    "cut": BROKE_OFF,
    "reset-midway": BROKE_OFF,
    "half-event": BROKE_OFF,
    "ends-early": BROKE_OFF,
    "error-midway": BROKE_OFF,
    "garbage-midway": BROKE_OFF,
    "stall": Expected(200, row="failed", generated=3, estimated=True, event="upstream_timeout"),
    "cut-at-once": Expected(200, event="upstream_error"),
    "error-first": Expected(200, event="upstream_error"),
    "stall-at-once": Expected(200, event="upstream_timeout"),
    "usage-twice": Expected(200, row="completed", generated=17),
    "usage-first": GUESSED,
    "usage-first-then-cut": BROKE_OFF,
}
TAKES_TOO_LONG = {"endless"}
ONLY_STREAMS = {"stall", "stall-at-once", "ends-early", "error-midway", "error-first", "garbage-midway", "hang"}
"""Plain answers of these wait for the whole time-out; one of them is tested in test_timeouts."""


def ask(gateway: Gateway, fault: str, **fields: Any) -> httpx.Response:
    body = {"model": f"m@{fault}", "messages": [{"role": "user", "content": "hi there"}], **fields}
    with gateway.http() as http:
        return http.post("/chat/completions", json=body)


def check_row(gateway: Gateway, answer: httpx.Response, expected: Expected) -> dict[str, Any] | None:
    worker = gateway.app.state.worker
    wait_until(lambda: worker.gate._open_holds == worker.admission.running("legacy") == 0, 30, "the end of every hold")
    request_id = answer.headers["x-request-id"]
    if expected.row is None:
        return None
    row = gateway.row(request_id)
    assert (row["status"], bool(row["estimated"])) == (expected.row, expected.estimated)
    return row


def wanted(upstream: FakeUpstream, answer: httpx.Response, expected: Expected) -> int:
    if expected.generated is not None:
        return expected.generated
    produced: int = upstream.entry(answer.headers["x-request-id"])["produced_tokens"]
    return produced


def check_refusal(answer: httpx.Response, expected: Expected) -> None:
    error = answer.json()["error"]
    if isinstance(error, dict):
        assert error["code"] == expected.code
    if expected.status >= 500:
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("fault", sorted(PLAIN.keys() - TAKES_TOO_LONG - ONLY_STREAMS))
def test_plain(gateway: Gateway, upstream: FakeUpstream, fault: str) -> None:
    expected = PLAIN[fault]
    answer = ask(gateway, fault)
    assert answer.status_code == expected.status
    row = check_row(gateway, answer, expected)
    if answer.status_code != 200:
        return check_refusal(answer, expected)
    assert row is not None
    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == row["generated_tokens"]
    assert usage["total_tokens"] == row["billed_tokens"]
    if expected.estimated:
        assert 0 < row["generated_tokens"] <= upstream.entry(answer.headers["x-request-id"])["produced_tokens"]
    else:
        assert row["generated_tokens"] == wanted(upstream, answer, expected)
    return None


@pytest.mark.parametrize("fault", sorted(STREAMED.keys() - TAKES_TOO_LONG))
def test_streamed(gateway: Gateway, upstream: FakeUpstream, fault: str) -> None:
    expected = STREAMED[fault]
    answer = ask(gateway, fault, stream=True, stream_options={"include_usage": True})
    assert answer.status_code == expected.status
    row = check_row(gateway, answer, expected)
    if answer.status_code != 200:
        return check_refusal(answer, expected)
    *chunks, last = payloads(answer.content)
    if expected.event is not None:
        assert json.loads(last)["error"]["code"] == expected.event
    else:
        assert last == "[DONE]"
        assert json.loads(chunks[-1])["usage"]["completion_tokens"] == wanted(upstream, answer, expected)
    if row is not None:
        assert row["generated_tokens"] == wanted(upstream, answer, expected)
    sent = upstream.entry(answer.headers["x-request-id"])["text"]
    if expected.event is None and sent is not None:
        assert text_of(chunks) == sent
    return None


def payloads(body: bytes) -> list[str]:
    """The payloads of a stream, read by a reader that is not ours."""
    lines = body.decode(errors="replace").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [line[5:].strip() for line in lines if line.startswith("data:") and line[5:].strip().startswith(("{", "["))]


def text_of(chunks: list[str]) -> str:
    choices = [choice for chunk in chunks for choice in json.loads(chunk).get("choices", [])]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_a_429_keeps_its_retry_after(gateway: Gateway) -> None:
    assert ask(gateway, "429-retry-after").headers["retry-after"] == "7"


def test_raw_usage_that_was_not_believed_is_kept(gateway: Gateway) -> None:
    from ledger.records import Settle, decode

    row = gateway.row(ask(gateway, "usage-negative").headers["x-request-id"])
    record = decode(bytes(row["record"]))
    assert isinstance(record, Settle)
    assert record.usage.raw is not None
    assert json.loads(record.usage.raw)["completion_tokens"] == -16
    assert record.usage.estimate_reason == "absurd_usage"


def test_an_answer_in_one_piece_to_a_stream_request_may_take_as_long_as_a_plain_one(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    body = b'{"choices": [{"index": 0, "message": {"role": "assistant", "content": "whole"}, "finish_reason": "stop"}]}'
    with ScriptedUpstream() as slow:
        slow.script = Script((head, b"", b"", b"", body), pause_s=0.5)
        config = configuration({"slow": slow.base_url}, m={})
        config["upstreams"]["slow"] |= {"first_byte_timeout_s": 1.5, "read_timeout_s": 20}
        with Gateway(tmp_path, config) as gateway, gateway.http() as http:
            answer = http.post(
                "/chat/completions",
                json={"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True},
            )
    assert answer.status_code == 200
    assert text_of([line for line in payloads(answer.content) if line.startswith("{")]) == "whole"
