"""Whatever a client sends, and whatever an upstream answers, to a served gateway: no failure of ours, no hang, no hold
that stays open, and books that still prove. Seeded and short here; `make soak SECONDS=600` goes on with more seeds,
from `SEED` on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from ledger.verify import verify
from tests.conftest import run_apart
from tests.proxy.scripted import Script, ScriptedUpstream, post
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.proxy.test_fuzz import CHUNK, EVENT, JSON
from tests.services import wait_until

SECONDS = float(os.environ.get("SECONDS", "0"))
SEED = int(os.environ.get("SEED", "0"))
EXAMPLES = 60
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages")
PLAIN = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
        "data": [{"index": 0, "embedding": [0.5]}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    }
).encode()
GOOD = Script((b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n", PLAIN))
"""Answers whatever is asked."""

ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | JSON
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "image_url", "input_text", "input_image", "tool_use", "tool_result"]) | JSON},
    optional={"text": JSON, "image_url": JSON, "input": JSON, "id": JSON, "content": JSON, "tool_use_id": JSON},
)
MESSAGE = st.fixed_dictionaries({"role": ROLES, "content": st.text(max_size=8) | st.lists(PART, max_size=2) | JSON})
FIELDS = ["stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "user", "tools", "tool_choice"]
FIELDS += ["response_format", "instructions", "system", "metadata", "thinking", "best_of", "stop", "text", "reasoning"]
PROMPTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
}
PROMPT = st.lists(MESSAGE, max_size=3) | st.lists(PART, max_size=2) | JSON
CHANGES = st.dictionaries(st.sampled_from(FIELDS), JSON | st.booleans() | st.integers(-1, 9), max_size=3)
HEADERS = st.sampled_from(
    [
        b"",
        b"",
        b"",
        b"x-draft-model: nonsense\r\n",
        b"x-speculative-decoding: \xff\r\n",
        b"idempotency-key: one\r\n",
        b"traceparent: \xe4\r\n",
        b"content-encoding: gzip\r\n",
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes, bytes]:
    """(path, body, headers): bytes, or a request that is right but for what was changed."""
    path = draw(st.sampled_from(PATHS))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=60)), draw(HEADERS)
    body: dict[str, Any] = {"model": "steady", **PROMPTS[path], **draw(CHANGES)}
    if draw(st.booleans()):
        body[next(iter(PROMPTS[path]))] = draw(PROMPT)
    return path, json.dumps(body).encode(), draw(HEADERS)


STATUS = st.sampled_from([200, 200, 200, 200, 201, 204, 206, 302, 400, 401, 404, 413, 422, 429, 500, 503, 599, 99, 0])
HEADER = st.sampled_from(
    [
        b"content-type: text/event-stream",
        b"content-type: application/json",
        b"content-length: 5",
        b"content-length: -1",
        b"transfer-encoding: chunked",
        b"content-encoding: gzip",
        b"content-encoding: br",
        b"retry-after: soon",
        b"retry-after: 1e999",
        b"connection: keep-alive",
        b"no colon here",
        b"x: " + b"y" * 3000,
    ]
)
TYPES = ["message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "ping"]
TYPES += ["message_stop", "error", "response.created", "response.output_item.added", "response.output_text.delta"]
TYPES += ["response.completed", "response.incomplete", "response.failed", "message", "response"]
COUNTS = st.dictionaries(
    st.sampled_from(["input_tokens", "output_tokens", "cache_read_input_tokens"]), JSON, max_size=3
)
INNER = st.dictionaries(st.sampled_from(["usage", "content", "output", "id", "status", "text", "type"]), COUNTS | JSON)
NATIVE = st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES) | JSON},
    optional=dict.fromkeys(("message", "response", "delta", "usage", "content", "output", "index"), INNER | JSON),
)
"""What `/messages` and `/responses` say, or nearly."""
SPOKEN = EVENT | NATIVE.map(lambda told: b"data: " + json.dumps(told).encode() + b"\n\n")
BODIES = st.one_of(
    st.lists(SPOKEN, max_size=6).map(b"".join),
    (CHUNK | NATIVE).map(lambda said: json.dumps(said).encode()),
    st.binary(max_size=80),
    st.just(PLAIN),
    st.just(b"5\r\nhello\r\n0\r\n\r\n"),
)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    kind = draw(st.integers(0, 9))
    if kind == 0:
        data = draw(st.binary(max_size=120))
    elif kind < 6:  # so that it is the body that matters
        form = draw(st.sampled_from([b"text/event-stream", b"application/json"]))
        data = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n" % form + draw(BODIES)
    else:
        lines = [b"HTTP/1.1 %d X" % draw(STATUS), *draw(st.lists(HEADER, max_size=3))]
        data = b"\r\n".join([*lines, b"", b""]) + draw(BODIES)
    size = draw(st.sampled_from([1, 7, 64, 4096]))
    packets = tuple(data[at : at + size] for at in range(0, len(data), size))
    return Script(packets, resets=draw(st.booleans()), stays=draw(st.integers(0, 40)) == 0)


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory, scripted: ScriptedUpstream) -> Iterator[Gateway]:
    """`m` speaks chat only, `native` all dialects, and nobody waits long for them; `steady` has time, is well."""
    model = {"deployments": [{"to": "chat", "model": "gpt-4"}], "price": PRICE}
    native = {"deployments": [{"to": "native", "model": "gpt-4"}], "price": PRICE}
    steady = {"deployments": [{"to": "steady", "model": "gpt-4"}], "price": PRICE}
    places = dict.fromkeys(("chat", "native", "steady"), scripted.base_url)
    config = configuration(places, m=model, native=native, steady=steady)
    config["upstreams"]["native"]["native"] = ["responses", "messages"]
    for name in ("chat", "native"):
        config["upstreams"][name] |= {"first_byte_timeout_s": 0.3, "idle_timeout_s": 0.3, "read_timeout_s": 1.0}
    with Gateway(tmp_path_factory.mktemp("fuzzed"), config) as gateway:
        yield gateway


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """One seeded round, and others until the time is over."""
    number, until = SEED, time.monotonic() + SECONDS
    while True:
        wanted = hypothesis.settings(
            max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        hypothesis.seed(number)(wanted(hypothesis.given(strategy)(lambda value: check(value))))()
        number += 1
        if time.monotonic() >= until:
            return


def ask(gateway: Gateway, path: str, body: bytes, headers: bytes = b"") -> int:
    """The status of an answer that came in time, was no failure of ours and left nothing open."""
    worker = gateway.app.state.worker
    for route in worker.routes.values():
        for deployment in route.deployments:
            deployment.fitness.succeeded()
    status, answer = post(gateway.port, path, gateway.key, body, headers)
    assert status != 500, answer
    assert b"internal_error" not in answer
    running = worker.admission.running
    wait_until(
        lambda: worker.gate._open_holds == 0 and not any(map(running, ("chat", "native", "steady"))), 30, "the end"
    )
    return status


def prove(gateway: Gateway) -> None:
    """Every row ties to transfers and balances."""
    from ledger.database import Database

    async def check() -> Any:
        db = await Database.open(gateway.settings.storage.database)
        try:
            return await verify(db, gateway.settings.storage.journal_path, None)
        finally:
            await db.close()

    time.sleep(0.5)
    report = run_apart(check)
    assert report.ok, report


@pytest.mark.soak
@pytest.mark.timeout(180 + 2 * SECONDS)
def test_no_request_makes_a_failure_a_hang_or_an_open_hold(fuzzed: Gateway, scripted: ScriptedUpstream) -> None:
    scripted.script = GOOD

    def check(request: tuple[str, bytes, bytes]) -> None:
        assert ask(fuzzed, *request) < 500, request

    fuzz(requests(), check)
    prove(fuzzed)


@pytest.mark.soak
@pytest.mark.timeout(180 + 2 * SECONDS)
def test_no_answer_of_an_upstream_makes_a_failure_a_hang_or_an_open_hold(
    fuzzed: Gateway, scripted: ScriptedUpstream
) -> None:
    asked = st.tuples(st.sampled_from(PATHS), st.sampled_from(["m", "native"]), st.booleans(), scripts())

    def check(case: tuple[str, str, bool, Script]) -> None:
        path, model, stream, script = case
        scripted.script = script
        body = {"model": model, **PROMPTS[path], "stream": stream}
        ask(fuzzed, path, json.dumps(body).encode())

    fuzz(asked, check)
    scripted.script = replace(GOOD)
    prove(fuzzed)
