"""The real openai SDK against a served gateway: answers, streams, errors, and the ledger rows behind them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.proxy.serving import Gateway
from tests.upstream.process import FakeUpstream

HELLO: Any = [{"role": "user", "content": "say hello to the ledger"}]


def test_a_plain_answer_carries_usage_cost_and_the_request_id_of_its_ledger_row(gateway: Gateway) -> None:
    raw = gateway.client().chat.completions.with_raw_response.create(model="m", messages=HELLO, max_tokens=7)
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    usage = json.loads(raw.text)["usage"]
    row = gateway.row(raw.headers["x-request-id"])
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (row["prompt_tokens"], row["generated_tokens"])
    assert usage["total_tokens"] == usage["tallygate"]["billed_tokens"] == row["billed_tokens"] == 8 + 7
    assert row["cost_usd_pico"] == 8 * 280_000 + 7 * 420_000
    assert row["cost_cny_pico"] * 10 == row["cost_usd_pico"] * 73
    assert raw.headers["x-tallygate-cost-usd"] == usage["tallygate"]["cost_usd"] == "0.00000518"
    assert raw.headers["x-tallygate-cost-cny"] == usage["tallygate"]["cost_cny"] == "0.000037814"
    assert raw.headers["x-tallygate-deployment"] == row["deployment"] == "legacy"
    assert raw.headers["x-tallygate-draft-model"] == "none"


def test_what_the_provider_says_beside_usage_is_kept(gateway: Gateway) -> None:
    raw = gateway.client().chat.completions.with_raw_response.create(model="m", messages=HELLO)
    assert json.loads(raw.text)["x_provider"] == {"kept": "as it is"}
    assert '"message": {"role": "assistant"' in raw.text


def test_a_stream_with_usage_ends_with_one_chunk_of_it(gateway: Gateway) -> None:
    chunks = list(
        gateway.client().chat.completions.create(
            model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text.startswith("the bill is what was used")
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    last = chunks[-1]
    assert last.usage is not None
    assert (last.choices, last.usage.completion_tokens) == ([], 16)
    assert last.usage.model_extra is not None
    assert last.usage.model_extra["tallygate"]["cost_usd"] == "0.00000896"


def test_a_stream_without_usage_shows_none_and_is_billed_all_the_same(gateway: Gateway, upstream: FakeUpstream) -> None:
    raw = gateway.client().chat.completions.with_raw_response.create(model="m", messages=HELLO, stream=True)
    chunks = list(raw.parse())
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    row = gateway.row(raw.headers["x-request-id"])
    assert (row["status"], row["generated_tokens"], row["estimated"]) == ("completed", 16, 0)
    assert row["ttft_ms"] is not None
    assert raw.headers["x-accel-buffering"] == "no"
    assert upstream.entry(raw.headers["x-request-id"])["body"]["stream_options"] == {"include_usage": True}


async def test_the_async_client_streams_too(gateway: Gateway) -> None:
    client = openai.AsyncOpenAI(base_url=gateway.base_url, api_key=gateway.key, max_retries=0)
    stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True, max_tokens=3)
    assert len([chunk async for chunk in stream if chunk.choices[0].delta.content]) == 3
    await client.close()


def test_completions_and_embeddings_pass_the_same_gate(gateway: Gateway) -> None:
    client = gateway.client()
    completion = client.completions.with_raw_response.create(model="m", prompt="one two", max_tokens=4)
    assert completion.parse().choices[0].text
    row = gateway.row(completion.headers["x-request-id"])
    assert (row["prompt_tokens"], row["generated_tokens"]) == (2, 4)
    embedding = client.embeddings.with_raw_response.create(model="m", input="one two three", encoding_format="float")
    assert embedding.parse().data[0].embedding
    row = gateway.row(embedding.headers["x-request-id"])
    assert (row["prompt_tokens"], row["generated_tokens"], row["billed_tokens"]) == (3, 0, 3)


def test_completions_stream(gateway: Gateway) -> None:
    stream = gateway.client().completions.create(model="m", prompt="one", stream=True, max_tokens=4)
    assert "".join(chunk.choices[0].text for chunk in stream) == "the bill is what "


def test_the_same_paths_work_without_v1(gateway: Gateway) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{gateway.port}", api_key=gateway.key, max_retries=0)
    assert client.chat.completions.create(model="m", messages=HELLO).choices
    assert client.models.list().data


@pytest.mark.parametrize(
    ("request_fields", "error", "code", "param"),
    [
        ({"model": "unknown"}, openai.NotFoundError, "model_not_found", None),
        ({"model": "free"}, openai.PermissionDeniedError, "price_not_found", None),
        ({"messages": "hello"}, openai.BadRequestError, None, "messages"),
        ({"max_tokens": "many"}, openai.BadRequestError, None, "max_tokens"),
        (
            {"extra_headers": {"X-Speculative-Decoding": "perhaps"}},
            openai.BadRequestError,
            "invalid_speculative_mode",
            "X-Speculative-Decoding",
        ),
    ],
)
def test_refusals_are_the_sdks_own_exceptions(
    gateway: Gateway, request_fields: dict[str, Any], error: type[openai.APIStatusError], code: str, param: str
) -> None:
    with pytest.raises(error) as caught:
        gateway.client().chat.completions.create(**{"model": "m", "messages": HELLO, **request_fields})
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.request_id
    assert caught.value.response.headers["content-type"] == "application/json"


def test_a_wrong_draft_is_400_and_names_the_allowed_ones(gateway: Gateway, upstream: FakeUpstream) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        gateway.client().chat.completions.create(
            model="deepseek-v3.2", messages=HELLO, extra_headers={"X-Draft-Model": "nonsense"}
        )
    assert caught.value.code == "speculative_model_not_supported"
    assert caught.value.param == "X-Draft-Model"
    assert all(draft in caught.value.message for draft in ("qwen-0.5b", "llama-3.2-1b", "gpt2-small"))
    assert upstream.entries() == []


@pytest.mark.parametrize(
    ("headers", "mode", "draft"),
    [
        ({}, "auto", "qwen-0.5b"),
        ({"X-Speculative-Decoding": "enabled"}, "enabled", "qwen-0.5b"),
        ({"X-Speculative-Decoding": "enabled", "X-Draft-Model": "gpt2-small"}, "enabled", "gpt2-small"),
        ({"X-Speculative-Decoding": "disabled"}, "disabled", None),
    ],
)
def test_the_backend_is_told_what_to_speculate_with(
    gateway: Gateway, upstream: FakeUpstream, headers: dict[str, str], mode: str, draft: str | None
) -> None:
    raw = gateway.client().chat.completions.with_raw_response.create(
        model="deepseek-v3.2", messages=HELLO, extra_headers=headers
    )
    sent = upstream.entry(raw.headers["x-request-id"])["headers"]
    assert (sent["x-speculative-decoding"], sent.get("x-draft-model")) == (mode, draft)
    assert sent["x-tallygate-team"] == "team_demo"
    assert "authorization" not in sent


def test_no_key_and_a_wrong_key_are_401(gateway: Gateway) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        gateway.client("sk-tg-wrong").chat.completions.create(model="m", messages=HELLO)
    assert caught.value.code == "invalid_api_key"
    with gateway.http() as http:
        answer = http.post("/chat/completions", headers={"authorization": ""}, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


def test_a_team_without_money_gets_429_that_no_sdk_retries(gateway: Gateway, upstream: FakeUpstream) -> None:
    key = gateway.new_key(money="0")
    with pytest.raises(openai.RateLimitError) as caught:
        gateway.client(key, max_retries=2).chat.completions.create(model="m", messages=HELLO)
    assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert upstream.entries() == []


def test_a_key_may_be_limited_to_models_addresses_and_time(gateway: Gateway) -> None:
    cases = [
        ({"models": ["other"]}, "model_not_allowed"),
        ({"allowed_ips": ["10.0.0.0/8"]}, "ip_not_allowed"),
        ({"expires_at_ms": 1}, "key_expired"),
    ]
    for limits, code in cases:
        with pytest.raises(openai.PermissionDeniedError) as caught:
            gateway.client(gateway.new_key(**limits)).chat.completions.create(model="m", messages=HELLO)
        assert (caught.value.code, caught.value.type) == (code, "permission_error")
        assert caught.value.response.headers["x-should-retry"] == "false"


def test_models_are_scoped_to_the_key_and_name_drafts_and_weights(gateway: Gateway) -> None:
    key = gateway.new_key(models=["m", "deepseek-v3.2"], drafts=["gpt2-small"])
    models = {model.id: model.model_extra for model in gateway.client(key).models.list().data}
    assert set(models) == {"m", "deepseek-v3.2"}
    assert models["deepseek-v3.2"]["tallygate"]["drafts"] == ["gpt2-small"]
    assert models["m"]["tallygate"]["deployments"]["legacy"]["weights"] == "gpt-4"
    assert gateway.client(key).models.retrieve("m").id == "m"
    with pytest.raises(openai.NotFoundError):
        gateway.client(key).models.retrieve("m@none")


def test_the_providers_account_headers_stay_with_us(gateway: Gateway) -> None:
    raw = gateway.client().chat.completions.with_raw_response.create(model="m@provider-headers", messages=HELLO)
    assert not {"openai-organization", "set-cookie", "x-ratelimit-remaining-requests"} & set(raw.headers)


def test_balance_falls_by_what_was_billed(gateway: Gateway) -> None:
    key = gateway.new_key(money="1", currency="CNY")
    raw = gateway.client(key).chat.completions.with_raw_response.create(model="m", messages=HELLO, max_tokens=10)
    row = gateway.row(raw.headers["x-request-id"])
    with gateway.http(key) as http:
        money = http.get("/balance").json()
    assert money["currency"] == "CNY"
    assert round(float(money["prepaid"]) * 10**12) == 10**12 - row["cost_cny_pico"]
