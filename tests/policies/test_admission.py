"""A deployment that likes few at once: what runs, who waits, who is told to come back."""

from __future__ import annotations

import asyncio

import pytest

from policies.admission import Admission, Capacity
from policies.refusal import Refusal


async def test_never_more_run_than_the_cap_and_all_get_their_turn() -> None:
    admission = Admission({"gpu": Capacity(8)})
    running = most = done = 0

    async def request(i: int) -> None:
        nonlocal running, most, done
        async with admission.slot("gpu", f"team-{i % 3}"):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            done += 1

    await asyncio.gather(*(request(i) for i in range(200)))
    assert (most, done) == (8, 200)
    assert admission.running("gpu") == admission.waiting("gpu") == 0


async def test_a_burst_of_100_to_a_backend_of_8_flows() -> None:
    """100 requests of one length on 8 places: done in 100/8 rounds, because no place that comes free stays so."""
    admission = Admission({"gpu": Capacity(8)})
    served = rounds = 0
    ends = asyncio.Event()

    async def request() -> None:
        nonlocal served
        async with admission.slot("gpu", "team"):
            await ends.wait()
            served += 1

    asking = [asyncio.create_task(request()) for _ in range(100)]
    while served < 100:
        await asyncio.sleep(0)
        rounds += 1
        assert admission.running("gpu") == min(8, 100 - served)
        ends.set()
        ends = asyncio.Event()
        for _ in range(5):
            await asyncio.sleep(0)
    await asyncio.gather(*asking)
    assert rounds == 13


async def test_tenants_take_turns_so_one_burst_delays_another_by_one_round() -> None:
    admission = Admission({"gpu": Capacity(1)})
    order: list[str] = []

    async def request(tenant: str) -> None:
        async with admission.slot("gpu", tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(request(tenant) for tenant in ["loud"] * 50 + ["quiet"] * 3))
    assert [i for i, tenant in enumerate(order) if tenant == "quiet"] == [2, 4, 6]


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    admission = Admission({"gpu": Capacity(1, max_queue=2)})
    first = admission.slot("gpu", "a")
    await first.acquire()
    waiting = [asyncio.create_task(admission.slot("gpu", "a").acquire()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Refusal) as refused:
        await admission.slot("gpu", "b").acquire()
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.retry_after_ms is not None
    assert refused.value.should_retry is True
    first.release()
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


async def test_waiting_has_an_end() -> None:
    admission = Admission({"gpu": Capacity(1, queue_timeout_s=0.02)})
    async with admission.slot("gpu", "a"):
        with pytest.raises(Refusal) as refused:
            await admission.slot("gpu", "a").acquire()
        assert refused.value.status == 429
        assert admission.waiting("gpu") == 0
    async with admission.slot("gpu", "a"):
        assert admission.running("gpu") == 1


@pytest.mark.parametrize("moment", ["queued", "just admitted"])
async def test_one_who_hangs_up_takes_no_place_with_it(moment: str) -> None:
    admission = Admission({"gpu": Capacity(1)})
    first = admission.slot("gpu", "a")
    await first.acquire()
    gone = asyncio.create_task(admission.slot("gpu", "b").acquire())
    await asyncio.sleep(0)
    if moment == "just admitted":
        first.release()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    if moment == "queued":
        first.release()
    assert admission.running("gpu") == admission.waiting("gpu") == 0
    async with asyncio.timeout(30), admission.slot("gpu", "c"):
        pass


async def test_a_repeated_release_frees_one_place_only() -> None:
    admission = Admission({"gpu": Capacity(2)})
    slots = [admission.slot("gpu", "a") for _ in range(2)]
    for slot in slots:
        await slot.acquire()
    slots[0].release()
    slots[0].release()
    assert admission.running("gpu") == 1


async def test_a_raised_cap_lets_waiting_requests_in_and_a_missing_one_lets_all() -> None:
    admission = Admission({"gpu": Capacity(1)})
    tasks = [asyncio.create_task(admission.slot("gpu", "a").acquire()) for _ in range(5)]
    await asyncio.sleep(0)
    assert admission.running("gpu") == 1
    admission.update({"gpu": Capacity(3)})
    assert admission.running("gpu") == 3
    admission.update({})
    assert admission.running("gpu") == 5
    await asyncio.gather(*tasks)


async def test_no_cap_means_no_wait() -> None:
    admission = Admission({})
    for _ in range(1_000):
        await admission.slot("elsewhere", "a").acquire()
    assert admission.running("elsewhere") == 1_000
