"""Clients that leave before an answer in one piece: it is on record, and what our own engine made of it is billed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backend.server import ServerState
from backend.service import Settings
from ledger.database import Database
from ledger.verify import Report, verify
from tests.backend.serving import served, write_model
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.services import wait_until
from tests.upstream.process import FakeUpstream

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi there"}]}
MODEL = "deepseek-v3.2"
ENDLESS = {"model": MODEL, "max_tokens": 100_000_000, "ignore_eos": True}
"""As far as the context reaches, that is."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ServerState]]:
    directory = write_model(tmp_path_factory.mktemp("models") / "target")
    with served(Settings(str(directory), {}, (MODEL,), Path("data"), max_batch=2, dtype="float32")) as found:
        yield found


@pytest.fixture(scope="module")
def house(engine: tuple[str, ServerState], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    place = {"deployments": [{"to": "backend", "model": MODEL}], "price": PRICE}
    config = configuration({"unused": "http://127.0.0.1:9/v1"}, **{MODEL: place})
    config["backend"] = {"url": f"{engine[0]}/v1"}
    with Gateway(tmp_path_factory.mktemp("gateway"), config) as gateway:
        yield gateway


async def leave(gateway: Gateway, body: dict[str, Any], when: Callable[[], bool], **headers: str) -> None:
    """Ask, and close the socket once `when` says so."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    data = json.dumps({**BODY, **body}).encode()
    lines = [f"{name}: {value}" for name, value in headers.items()]
    lines += ["host: x", f"authorization: Bearer {gateway.key}", f"content-length: {len(data)}"]
    writer.write("\r\n".join(["POST /v1/chat/completions HTTP/1.1", *lines, "", ""]).encode() + data)
    await asyncio.to_thread(wait_until, when, 60)
    writer.transport.abort()


def generating(state: ServerState, tokens: int) -> bool:
    assert state.service is not None
    return any(sequence.generated_tokens >= tokens for sequence in list(state.service.engine.scheduler.running))


def is_free(state: ServerState) -> bool:
    assert state.service is not None
    return state.service.engine.scheduler.free_slots == 2 and not state.service.engine.scheduler.waiting


def settled(gateway: Gateway, count: int) -> list[dict[str, Any]]:
    wait_until(lambda: len(gateway.rows()) == count, 60, f"{count} rows")
    return sorted(gateway.rows(), key=lambda row: str(row["request_id"]))


def test_what_our_engine_had_generated_is_billed_to_the_token_and_its_slot_is_free(
    house: Gateway, engine: tuple[str, ServerState]
) -> None:
    state, before = engine[1], len(house.rows())
    asyncio.run(leave(house, ENDLESS, lambda: generating(state, 5)))
    row = settled(house, before + 1)[-1]
    wait_until(lambda: is_free(state), 60)
    assert (row["status"], bool(row["estimated"]), row["waiver_reason"]) == ("cancelled", False, None)
    assert row["prompt_tokens"] > 0
    assert 5 <= row["generated_tokens"] < 900, "the context has room for more"
    assert row["billed_tokens"] == row["prompt_tokens"] + row["generated_tokens"]
    produced = "tallygate_backend_generated_tokens_total"
    with house.http() as http:
        counted = http.get(f"{engine[0]}/metrics").text
        seen = http.get("/usage").json()["data"]
    assert [one["status"] for one in seen if one["request_id"] == row["request_id"]] == ["cancelled"]
    made = sum(float(line.split()[-1]) for line in counted.splitlines() if line.startswith(produced))
    assert made == sum(one["generated_tokens"] for one in house.rows())


def test_one_that_still_waits_for_the_engine_costs_nothing_and_is_on_record(
    house: Gateway, engine: tuple[str, ServerState]
) -> None:
    state, before = engine[1], len(house.rows())
    assert state.service is not None
    scheduler = state.service.engine.scheduler

    async def crowd() -> None:
        third = asyncio.Event()

        async def one_of_two() -> None:
            await leave(house, ENDLESS, third.is_set)

        two = [asyncio.create_task(one_of_two()) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: scheduler.free_slots == 0, 60)
        await leave(house, ENDLESS, lambda: scheduler.waiting == 1 or scheduler.free_slots > 0)
        third.set()
        await asyncio.gather(*two)

    asyncio.run(crowd())
    rows = settled(house, before + 3)[-3:]
    assert [row["status"] for row in rows] == ["cancelled"] * 3
    for row in rows:
        nothing = row["generated_tokens"] == 0
        assert row["billed_tokens"] == (0 if nothing else row["prompt_tokens"] + row["generated_tokens"])
    wait_until(lambda: is_free(state), 60)


def test_an_engine_that_is_asked_under_a_key_is_hung_up_on_and_the_key_is_free_again(
    house: Gateway, engine: tuple[str, ServerState]
) -> None:
    state, before, headers = engine[1], len(house.rows()), {"idempotency-key": "half"}
    asyncio.run(leave(house, ENDLESS, lambda: generating(state, 5), **headers))
    wait_until(lambda: is_free(state), 60)
    wait_until(lambda: house.app.state.worker.gate._open_holds == 0, 60)
    body = {**BODY, "model": MODEL, "max_tokens": 3, "ignore_eos": True}
    with house.http() as http:
        wait_until(lambda: http.post("/chat/completions", json=body, headers=headers).status_code == 200, 60)
    (row,) = settled(house, before + 1)[before:]
    assert (row["status"], row["generated_tokens"]) == ("completed", 3)


def test_a_route_may_let_an_upstream_finish_and_bills_what_it_says(upstream: FakeUpstream, tmp_path: Path) -> None:
    def model(**more: Any) -> dict[str, Any]:
        return {"deployments": [{"to": "legacy", "model": "gpt-4"}], "price": PRICE, "on_hangup": "finish", **more}

    config = configuration({"legacy": upstream.base_url}, finishes=model(), bounded=model(finish_s=0.3))
    with Gateway(tmp_path, config) as gateway:
        late = {"model": "finishes", "x_fault": {"headers_delay_ms": 1_500, "tokens": 7}}
        asyncio.run(leave(gateway, late, lambda: gateway.app.state.worker.gate._open_holds == 1))
        (row,) = settled(gateway, 1)
        assert (row["status"], row["generated_tokens"], bool(row["estimated"])) == ("cancelled", 7, False)
        assert row["billed_tokens"] == row["prompt_tokens"] + 7
        never = {"model": "bounded", "x_fault": "hang"}
        asyncio.run(leave(gateway, never, lambda: gateway.app.state.worker.gate._open_holds == 1))
        row = settled(gateway, 2)[-1]
        assert (row["status"], row["billed_tokens"], row["generated_tokens"]) == ("cancelled", 0, 0)
        assert upstream.entry(row["request_id"])["outcome"] in ("client_gone", "hang")


def test_a_key_whose_client_left_before_anything_came_may_be_used_again(upstream: FakeUpstream, tmp_path: Path) -> None:
    place = {"deployments": [{"to": "legacy", "model": "gpt-4"}], "price": PRICE}
    with Gateway(tmp_path, configuration({"legacy": upstream.base_url}, m=place)) as gateway:
        gate = gateway.app.state.worker.gate
        upstream.standing_fault("hang")
        body, headers = {"model": "m"}, {"idempotency-key": "once"}
        asyncio.run(leave(gateway, body, lambda: gate._open_holds == 1, **headers))
        wait_until(lambda: gate._open_holds == 0)
        upstream.standing_fault(None)
        with gateway.http() as http:

            def answered() -> bool:
                data = json.dumps({**BODY, **body})
                answer = http.post("/chat/completions", content=data, headers=headers)
                assert answer.status_code in (200, 409)
                return answer.status_code == 200

            wait_until(answered, 30)
        assert [row["status"] for row in settled(gateway, 1)] == ["completed"]


def test_the_books_prove(house: Gateway) -> None:
    async def prove() -> Report:
        db = await Database.open(house.settings.storage.database)
        try:
            return await verify(db, None)
        finally:
            await db.close()

    assert asyncio.run(prove()).first_difference is None
