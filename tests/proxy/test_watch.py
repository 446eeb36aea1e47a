"""Promises about patience: a wait ends when the client leaves or its time is over, and nothing else is interrupted."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import uvloop

from proxy.watch import Interrupted, Watch


class Client:
    """The receiving half of an ASGI connection whose client leaves when told."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


@pytest.mark.parametrize(("reason", "total"), [("first_byte", 5.0), ("total", 0.1)])
async def test_a_wait_ends_when_its_time_is_over(reason: str, total: float) -> None:
    watch = Watch(Client().receive, total)
    started = time.monotonic()
    with pytest.raises(Interrupted) as caught:
        await watch.wait(asyncio.sleep(10), "first_byte", 0.1 if reason == "first_byte" else 5)
    assert caught.value.reason == reason
    assert 0.08 < time.monotonic() - started < 4  # and not the other end of patience, at 5 s
    watch.close()


async def test_a_client_that_leaves_ends_the_wait_within_100_ms() -> None:
    took_s = []
    for _ in range(5):  # one of which a busy machine may hold up
        client = Client()
        watch = Watch(client.receive, 5)
        left: list[float] = []

        def leave(client: Client = client, left: list[float] = left) -> None:
            left.append(time.monotonic())
            client.left.set()

        asyncio.get_running_loop().call_later(0.02, leave)
        with pytest.raises(Interrupted) as caught:
            await watch.wait(asyncio.sleep(10), "idle", 5)
        assert caught.value.reason == "client_gone"
        took_s.append(time.monotonic() - left[0])
        watch.close()
    assert min(took_s) < 0.1


async def test_what_runs_outside_a_wait_is_never_interrupted() -> None:
    client = Client()
    watch = Watch(client.receive, 0.05)
    client.left.set()
    await asyncio.sleep(0.2)
    assert watch.client_gone
    with pytest.raises(Interrupted):
        await watch.wait(asyncio.sleep(0), "idle", 1)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    watch.close()


async def test_each_wait_starts_its_time_anew() -> None:
    watch = Watch(Client().receive, 5)
    for _ in range(4):
        await watch.wait(asyncio.sleep(0.3), "idle", 1)
    with pytest.raises(Interrupted):
        await watch.wait(asyncio.sleep(10), "idle", 0.1)
    watch.close()


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def serve() -> None:
        watch = Watch(Client().receive, 5)
        try:
            await watch.wait(asyncio.sleep(10), "idle", 5)
        finally:
            watch.close()

    task = asyncio.create_task(serve())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_wait_after_one_that_ran_out_is_like_any_other_on_the_loop_that_serves() -> None:
    """uvloop gives another kind of handle for a delay that rounds to nothing."""

    async def quiet_stream() -> None:
        watch = Watch(Client().receive, 60)
        for _ in range(5):
            with pytest.raises(Interrupted):
                await watch.wait(asyncio.sleep(10), "quiet", 0.04)
            await watch.wait(asyncio.sleep(0), "idle", 30)
        watch.close()

    async def many() -> None:
        await asyncio.gather(*(quiet_stream() for _ in range(500)))

    uvloop.run(many())
