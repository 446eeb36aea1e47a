"""A canary on real requests: split by its weights, sticky to the byte, and billed once whoever answers in the end.

1 000 requests here; `make soak` makes them 10 000.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from proxy.upstream import Patience, Upstream, read_all
from tests.proxy.serving import PRICE, Gateway, configuration
from tests.upstream.process import FakeUpstream

REQUESTS = 10_000 if os.environ.get("SECONDS") else 1_000
WITHIN = 0.01 if REQUESTS == 10_000 else 0.03
"""More than three standard deviations of a split of so many."""
AT_ONCE = 32


@pytest.mark.soak
@pytest.mark.timeout(180)
async def test_a_canary_is_split_by_weight_sticky_and_billed_once_where_it_falls_back(
    tmp_path: Path, upstream: FakeUpstream
) -> None:
    deployments = [{"to": "old", "model": "gpt-4", "weight": 90}, {"to": "new", "model": "gpt-4", "weight": 10}]
    model = {"deployments": deployments, "price": PRICE, "sticky_by": "user", "fallback": ["old"]}
    config = configuration(dict.fromkeys(("old", "new"), upstream.base_url), m=model)
    gateway = await asyncio.to_thread(Gateway, tmp_path, config)
    await asyncio.to_thread(gateway.__enter__)
    caller = Upstream("caller", gateway.base_url, gateway.key, Patience())
    route = gateway.app.state.worker.routes["m"]
    places = asyncio.Semaphore(AT_ONCE)

    async def ask(user: int) -> tuple[int, str]:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "user": f"user_{user}"}
        async with places:
            answer = await caller.post(b"/chat/completions", json.dumps(body).encode())
            await read_all(answer)
        assert answer.status == 200
        return user, answer.headers[b"x-tallygate-deployment"].decode()

    try:
        served = dict(await asyncio.gather(*(ask(user) for user in range(REQUESTS))))
        share = Counter(served.values())["new"] / REQUESTS
        assert abs(share - 0.10) < WITHIN, share
        assert served == {n: route.choose(f"team_demo\0user_{n}").name for n in range(REQUESTS)}
        again = dict(await asyncio.gather(*(ask(user) for user in range(200))))
        assert again == {user: served[user] for user in range(200)}

        for user in [user for user, place in served.items() if place == "new"][:20]:
            await asyncio.to_thread(upstream.standing_fault, "500", 1)
            assert await ask(user) == (user, "old")
            assert await ask(user) == (user, "new")
    finally:
        caller.close()
        await asyncio.to_thread(gateway.stop)
    rows = await asyncio.to_thread(gateway.rows)
    assert len({row["request_id"] for row in rows}) == len(rows) == REQUESTS + 200 + 40
    assert Counter(row["attempts"] for row in rows) == {1: REQUESTS + 220, 2: 20}
    assert {row["billed_tokens"] for row in rows} == {5}
