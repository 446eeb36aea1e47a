"""What an attempt cost us stays under the request that it was made for, also when another one answered, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import select

from ledger.schema import transfers
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.upstream.process import FakeUpstream

COST = {"currency": "USD", "input": "0.10", "output": "0.20"}
PROMPT = [{"role": "user", "content": "three short words"}]


def test_failed_attempts_keep_their_provider_cost(tmp_path: Path, upstream: FakeUpstream) -> None:
    def place(name: str, model: str) -> dict[str, Any]:
        return {"to": name, "model": model, "cost": COST}

    def model(first: str, last: str) -> dict[str, Any]:
        places = [place("one", f"gpt-4@{first}"), {**place("two", f"gpt-4@{last}"), "weight": 0}]
        return {"deployments": places, "fallback": ["two"], "price": PRICE}

    models = {"saved": model("200-not-json", "none"), "refused": model("500", "none"), "lost": model("cut", "cut")}
    upstreams = {"one": upstream.base_url, "two": upstream.base_url}
    with Gateway(tmp_path, configuration(upstreams, **models)) as gateway:
        client = gateway.client()
        for name in ("saved", "refused"):
            client.chat.completions.create(model=name, messages=PROMPT, max_tokens=5)
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model="lost", messages=PROMPT, max_tokens=5)
    rows = {row["model"]: row for row in gateway.rows()}

    async def booked(c: Any) -> list[tuple[str, str]]:
        moved = select(transfers.c.source, transfers.c.destination).where(transfers.c.kind == "provider_cost")
        return [tuple(row) for row in await c.execute(moved)]

    prompt = rows["refused"]["prompt_tokens"] * 100_000
    answered = prompt + 5 * 200_000
    assert rows["refused"]["provider_cost_usd_pico"] == answered
    assert rows["saved"]["provider_cost_usd_pico"] > answered
    assert (rows["saved"]["attempts"], rows["saved"]["status"]) == (2, "completed")
    lost = rows["lost"]
    assert (lost["status"], lost["billed_tokens"], lost["cost_usd_pico"], lost["waiver_reason"]) == (
        "failed",
        0,
        0,
        None,
    )
    assert lost["provider_cost_usd_pico"] > 0
    assert set(gateway.ledger(booked)) == {
        ("cost:saved", "provider:one"),
        ("cost:saved", "provider:two"),
        ("cost:refused", "provider:two"),
        ("cost:lost", "provider:one"),
        ("cost:lost", "provider:two"),
    }
