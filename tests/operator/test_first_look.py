"""What somebody gets who tries the address, with nothing or the wrong thing in hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.proxy.serving import PRICE, Gateway, configuration
from tests.upstream.process import FakeUpstream


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream_process: FakeUpstream) -> Iterator[Gateway]:
    folder: Path = tmp_path_factory.mktemp("first-look")
    mute = {"deployments": [{"to": "mute"}], "price": PRICE}
    places = {"legacy": upstream_process.base_url, "mute": f"{upstream_process.base_url}/mute"}
    with Gateway(folder, configuration(places, m={}, mute=mute)) as gateway:
        yield gateway


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    root = f"http://127.0.0.1:{gateway.port}"
    with httpx.Client(base_url=root, headers={"authorization": f"Bearer {gateway.key}"}, timeout=30) as client:
        yield client


def test_the_root_names_what_is_below_it(http: httpx.Client) -> None:
    answer = http.get("/", headers={"authorization": ""})
    assert answer.status_code == 200
    found = answer.json()
    assert found["base_url"] == f"{http.base_url}/v1"
    assert found["admin_api"] == "/admin/v1/openapi.json"
    assert all(http.get(path).status_code == 200 for path in found["health"])


@pytest.mark.parametrize(
    ("token", "shown"), [("sk-tg-nonsense", "provided: ask"), ("sk-tg-" + "x" * 40, "provided (sk-tg-…xxxx): ask")]
)
def test_a_wrong_key_is_named_where_it_is_long_enough_to_be(http: httpx.Client, token: str, shown: str) -> None:
    answer = http.post("/v1/chat/completions", json={}, headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == 401
    assert shown in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "embeddings", "responses", "messages"])
def test_an_empty_body_is_called_empty(http: httpx.Client, path: str) -> None:
    answer = http.post(f"/v1/{path}")
    assert (answer.status_code, "The request body is empty" in answer.text) == (400, True)


def test_a_place_without_embeddings_is_named_with_the_model(http: httpx.Client) -> None:
    answer = http.post("/v1/embeddings", json={"model": "mute", "input": "hello"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "embeddings_not_supported", "model")
    assert error["message"] == "The model `mute` makes no embeddings: `mute`, which serves it, has no such endpoint."
