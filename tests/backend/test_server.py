"""What SDKs rely on, against a served backend with a tiny random model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from backend.errors import DraftNotSupported, ModelNotSupported, WeightsNotFound
from backend.server import ServerState, build_app
from backend.service import Settings, load_service
from tests.backend.serving import served, write_model
from tests.services import wait_until

MODEL = "deepseek-v3.2"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def backend(directory: Path) -> Iterator[tuple[str, ServerState]]:
    drafts = {"qwen-0.5b": str(directory), "lookup": "ngram", "both": f"ngram+{directory}"}
    settings = Settings(str(directory), drafts, (MODEL,), Path("data"), max_batch=4, dtype="float32", queue_limit=150)
    with served(settings) as (url, state):
        yield url, state


@pytest.fixture
def client(backend: tuple[str, ServerState]) -> openai.OpenAI:
    return openai.OpenAI(base_url=backend[0] + "/v1", api_key="none", max_retries=0)


def speculate(mode: str, draft: str | None = None) -> dict[str, str]:
    return {"X-Speculative-Decoding": mode, **({"X-Draft-Model": draft} if draft else {})}


def wait_until_free(state: ServerState, slots: int = 4) -> None:
    assert state.service is not None
    deadline = time.monotonic() + 60
    while state.service.engine.scheduler.free_slots < slots or state.service.engine.scheduler.waiting:
        assert time.monotonic() < deadline, "a slot is still taken"
        time.sleep(0.02)


def test_models_name_the_weights_behind_the_names(backend: tuple[str, ServerState], directory: Path) -> None:
    (item,) = httpx.get(backend[0] + "/v1/models").json()["data"]
    assert item["id"] == MODEL
    assert item["tallygate"]["weights"] == str(directory)
    assert item["tallygate"]["drafts"]["lookup"] == "ngram"
    assert httpx.get(f"{backend[0]}/v1/models/{MODEL}").json() == item


@pytest.mark.parametrize("draft", ["qwen-0.5b", "lookup", "both"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_streamed_and_speculative_answers_are_equal(
    client: openai.OpenAI, draft: str, temperature: float
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "temperature": temperature, "seed": 7, "max_tokens": 30}
    plain = client.chat.completions.create(**asked, extra_headers=speculate("disabled"))
    assert plain.usage is not None
    fast = client.chat.completions.create(**asked, extra_headers=speculate("enabled", draft))
    assert fast.choices[0].message.content == plain.choices[0].message.content
    assert fast.usage is not None
    assert fast.usage.completion_tokens == plain.usage.completion_tokens
    block = fast.usage.model_extra["tallygate"]["speculative"]  # type: ignore[index]
    assert block["draft_model"] == draft
    assert 0 <= block["accepted_tokens"] <= block["draft_tokens"]
    stream = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_headers=speculate("enabled", draft)
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chunks[-1].choices == []


def test_continuous_usage_is_cumulative_and_exact_at_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options=options, max_tokens=12, seed=1,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_n_choices_differ_and_the_first_is_the_single_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 5, "max_tokens": 16}
    three = client.chat.completions.create(**asked, n=3)
    one = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in three.choices]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3
    assert three.usage is not None
    assert one.usage is not None
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens > one.usage.completion_tokens


def test_unseeded_requests_do_not_share_noise(client: openai.OpenAI) -> None:
    answers = {
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=12).choices[0].message.content
        for _ in range(3)
    }
    assert len(answers) == 3


def test_chunked_long_answers_continue_the_text_also_an_empty_one(client: openai.OpenAI) -> None:
    """Bytes are tokens here, so re-tokenising is exact as long as the text is valid UTF-8."""
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "logit_bias": {str(t): -100 for t in range(94, 264)}}
    whole = client.chat.completions.create(**asked, messages=HELLO, max_tokens=40).choices[0].message.content
    text = ""
    for _ in range(4):
        messages: list[Any] = [*HELLO, {"role": "assistant", "content": text}]
        text += (
            client.chat.completions.create(**asked, messages=messages, max_tokens=10).choices[0].message.content or ""
        )
    assert text == whole


def test_logprobs_have_the_sdks_shape(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert len(entries) == 5
    assert all(len(e.top_logprobs) == 3 and e.top_logprobs[0].logprob == e.logprob < 0 for e in entries)
    assert all(e.bytes is not None and len(e.bytes) >= 1 for e in entries)


def test_completions_take_text_and_tokens(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="abc", max_tokens=4, temperature=0, logprobs=2)
    assert text.usage is not None
    tokens = client.completions.create(model=MODEL, prompt=[64, 65, 66], max_tokens=4, temperature=0)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == text.usage.prompt_tokens == 3
    assert text.choices[0].logprobs is not None
    assert len(text.choices[0].logprobs.tokens or []) == 4


def test_echo_puts_the_prompt_before_the_answer_plain_and_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == "abc" + answer
    assert client.completions.create(**{**asked, "prompt": [64, 65, 66]}, echo=True, best_of=1).choices[0].text == (
        "abc" + answer
    )
    stream = client.completions.create(**asked, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == "abc" + answer


@pytest.mark.parametrize(
    ("change", "param"),
    [({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"echo": True, "logprobs": 1}, "echo")],
)
def test_what_completions_do_not_offer_is_refused_naming_the_field(
    backend: tuple[str, ServerState], change: dict[str, Any], param: str
) -> None:
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 2, **change}
    answer = httpx.post(backend[0] + "/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


REFUSED = [
    ({"model": "gpt-9"}, 404, "model_not_found", "model"),
    ({"max_tokens": 0}, 400, None, "max_tokens"),
    ({"max_completion_tokens": -5}, 400, None, "max_completion_tokens"),
    ({"stop": ["a", "b", "c", "d", "e"]}, 400, None, "stop"),
    ({"logit_bias": {"264": 1}}, 400, None, "logit_bias"),
    ({"logit_bias": {"3": 101}}, 400, None, "logit_bias"),
    ({"temperature": 3}, 400, None, "temperature"),
    ({"top_p": "high"}, 400, None, "top_p"),
    ({"n": 0}, 400, None, "n"),
    ({"messages": []}, 400, None, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, None, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, 400, "context_length_exceeded", "messages"),
    ({"response_format": {"type": "xml"}}, 400, None, "response_format.type"),
    ({"tools": [{"type": "function"}]}, 400, None, "tools[0]"),
    ({"top_logprobs": 2}, 400, None, "top_logprobs"),
]


@pytest.mark.parametrize(("change", "status", "code", "param"), REFUSED, ids=[str(r[0])[:40] for r in REFUSED])
def test_bad_input_is_refused_naming_the_field(
    backend: tuple[str, ServerState], change: dict[str, Any], status: int, code: str | None, param: str
) -> None:
    body = {"model": MODEL, "messages": HELLO, **change}
    answer = httpx.post(backend[0] + "/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param), error
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("GET", "/nowhere", b"", 404),
        ("GET", "/v1/chat/completions", b"", 405),
        ("POST", "/v1/chat/completions", b"{not json", 400),
        ("POST", "/v1/chat/completions", b'"text"', 400),
        ("POST", "/v1/chat/completions", b'{"messages": []}', 400),
        ("POST", "/v1/chat/completions", b"x" * (33 * 1024 * 1024), 413),
    ],
)
def test_every_error_has_the_openai_shape(
    backend: tuple[str, ServerState], method: str, path: str, content: bytes, status: int
) -> None:
    answer = httpx.request(method, backend[0] + path, content=content)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_draft_is_refused_naming_the_available_ones(client: openai.OpenAI) -> None:
    for mode in ("enabled", "disabled", "auto"):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=HELLO, extra_headers=speculate(mode, "nonsense"))
        assert refused.value.code == "speculative_model_not_supported"
        assert "qwen-0.5b, lookup, both" in refused.value.message
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=HELLO, extra_headers=speculate("perhaps"))


async def test_hanging_up_frees_the_slot_within_a_round(backend: tuple[str, ServerState]) -> None:
    url, state = backend
    assert state.service is not None
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 150, "ignore_eos": True}
    async with httpx.AsyncClient() as http:
        async with http.stream("POST", url + "/v1/chat/completions", json={**body, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                break
        plain = asyncio.create_task(http.post(url + "/v1/chat/completions", json=body))
        await asyncio.sleep(0.05)
        plain.cancel()
    await asyncio.to_thread(wait_until_free, state)


async def test_a_plain_request_that_is_ended_early_answers_with_what_it_generated(
    backend: tuple[str, ServerState],
) -> None:
    url, state = backend
    assert state.service is not None
    running = state.service.engine.scheduler.running
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 100_000_000, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60) as http:
        asked = http.post(url + "/v1/chat/completions", json=body, headers={"x-request-id": "this one"})
        plain = asyncio.create_task(asked)
        begun = lambda: any(sequence.generated_tokens > 2 for sequence in list(running))  # noqa: E731
        await asyncio.to_thread(wait_until, begun, 60)
        ended = await http.post(f"{url}/v1/requests/this%20one/cancel")
        assert (ended.status_code, ended.json()["cancelled"]) == (200, True)
        answer = (await plain).json()
        assert answer["choices"][0]["finish_reason"] == "cancelled"
        assert 2 < answer["usage"]["completion_tokens"] < 900, "the context has room for more"
        unknown = await http.post(f"{url}/v1/requests/this%20one/cancel")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    await asyncio.to_thread(wait_until_free, state)


async def test_100_requests_at_once_queue_and_flow(backend: tuple[str, ServerState]) -> None:
    url, state = backend
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=120)) as http:
        answers = await asyncio.gather(*(http.post(url + "/v1/chat/completions", json=body) for _ in range(100)))
    assert [a.status_code for a in answers] == [200] * 100
    assert {a.json()["usage"]["completion_tokens"] for a in answers} == {4}
    await asyncio.to_thread(wait_until_free, state)


async def test_a_full_queue_says_when_to_come_back(backend: tuple[str, ServerState]) -> None:
    url, state = backend
    assert state.service is not None
    scheduler = state.service.engine.scheduler
    scheduler.queue_limit, before = 0, scheduler.queue_limit
    try:
        answer = await httpx.AsyncClient().post(
            url + "/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "max_tokens": 1}
        )
    finally:
        scheduler.queue_limit = before
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.headers["x-should-retry"] == "true"


def test_json_answers_are_json_with_and_without_speculation(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["a", "b"]}},
        "required": ["ok", "kind"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=HELLO, response_format=wanted, seed=3, max_tokens=300, extra_headers=headers
        )
        for headers in (speculate("disabled"), speculate("enabled", "qwen-0.5b"), speculate("enabled", "lookup"))
    ]
    texts = {answer.choices[0].message.content or "" for answer in answers}
    assert len(texts) == 1
    found = json.loads(texts.pop())
    assert set(found) == {"ok", "kind"}
    assert isinstance(found["ok"], bool)


def test_a_forced_tool_call_is_parsed_plain_and_streamed(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": ["kg", "lb"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    asked: Any = {
        "model": MODEL,
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "weigh", "parameters": parameters}}],
        "tool_choice": "required",
        "seed": 2,
        "max_tokens": 300,
    }
    answer = client.chat.completions.create(**asked)
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weigh"
    assert json.loads(call.function.arguments)["unit"] in ("kg", "lb")
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = [d for c in chunks for d in (c.choices[0].delta.tool_calls or [])]
    assert streamed[0].function.arguments == call.function.arguments
    assert not any(c.choices[0].delta.content for c in chunks)


def test_health_tells_loading_from_ready(backend: tuple[str, ServerState]) -> None:
    assert httpx.get(backend[0] + "/health").json()["status"] == "ok"


async def test_a_loading_backend_answers_503_and_says_how_far_it_is() -> None:
    state = ServerState((MODEL,), progress="loading the target")
    transport = httpx.ASGITransport(app=build_app(state))
    async with httpx.AsyncClient(transport=transport, base_url="http://backend") as http:
        health = await http.get("/health")
        assert (health.status_code, health.json()["progress"]) == (503, "loading the target")
        answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_loading")


def test_metrics_count_draft_and_accepted_tokens(backend: tuple[str, ServerState], client: openai.OpenAI) -> None:
    client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=10, extra_headers=speculate("enabled", "qwen-0.5b")
    )
    text = httpx.get(backend[0] + "/metrics").text
    for name in ("draft_tokens_total", "accepted_tokens_total", "slots_free", "queue_depth", "rounds_total"):
        assert f"tallygate_backend_{name}" in text


def load(target: Path, drafts: dict[str, str] | None = None) -> None:
    load_service(Settings(str(target), drafts or {}, (MODEL,), Path("data"), dtype="float32"), lambda _: None)


def test_a_draft_with_another_tokenizer_is_refused_at_load(directory: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", swap=True)
    with pytest.raises(DraftNotSupported, match="token 65"):
        load(directory, {"other": str(other)})


def test_damaged_weights_are_refused_at_load(tmp_path: Path) -> None:
    damaged = write_model(tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(WeightsNotFound, match="cannot be read"):
        load(damaged)
    with pytest.raises(WeightsNotFound, match=r"config\.json"):
        load(tmp_path)
    with pytest.raises(WeightsNotFound, match="neither"):
        load(Path("/no/such/dir/anywhere"))


def test_sliding_window_models_are_refused_at_load(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "sliding", family="mistral")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "sliding_window": 16}))
    with pytest.raises(ModelNotSupported, match="sliding-window"):
        load(directory)
