from __future__ import annotations

import pytest

from ledger.errors import Invalid, NotFound
from ledger.periods import HOUR_MS
from ledger.quotas import Scope
from ledger.usage import UsageFilter, get_request, list_usage, sum_usage
from tests.ledger_flow.material import USD, House, now_ms, price, request_id, run


async def used_house(house: House) -> int:
    start = now_ms() // HOUR_MS * HOUR_MS - 5 * HOUR_MS
    gate = await house.gate()
    for n in range(10):
        at_ms = start + n * HOUR_MS // 2
        await run(gate, house.ask(at_ms=at_ms, request_id=request_id(at_ms), end_user="ann" if n % 2 else None))
    await house.post()
    return start


async def test_sums_are_the_same_from_rollups_and_from_rows(either: House) -> None:
    start = await used_house(either)
    async with either.db.read() as c:
        (all_,) = await sum_usage(c, UsageFilter(team_id=either.team_id))
        (hours,) = await sum_usage(c, UsageFilter(from_ms=start, to_ms=start + 5 * HOUR_MS))
        (rows,) = await sum_usage(c, UsageFilter(from_ms=start + 1, to_ms=start + 5 * HOUR_MS))
        by_user = await sum_usage(c, UsageFilter(), ["end_user", "model"])
        days = await sum_usage(c, UsageFilter(), ["day"])
        kolkata = await sum_usage(c, UsageFilter(), ["day"], timezone="Asia/Kolkata")
        hourly = await sum_usage(c, UsageFilter(), ["hour"])
        with pytest.raises(Invalid):
            await sum_usage(c, UsageFilter(), ["weather"])
    assert all_ == hours
    assert (all_.requests, all_.cost_usd_pico) == (10, 10 * price(100, 200))
    assert rows.requests == 9
    assert [(s.group["end_user"], s.requests) for s in by_user] == [(None, 5), ("ann", 5)]
    assert sum(s.requests for s in days) == sum(s.requests for s in kolkata) == 10
    assert [s.requests for s in hourly] == [2] * 5


async def test_a_list_is_paged_newest_first(either: House) -> None:
    await used_house(either)
    async with either.db.read() as c:
        first = await list_usage(c, UsageFilter(team_id=either.team_id), limit=7)
        rest = await list_usage(c, UsageFilter(team_id=either.team_id), limit=7, cursor=first.next_cursor)
    ids = [row.request_id for row in (*first.items, *rest.items)]
    assert ids == sorted(ids, reverse=True)
    assert len(set(ids)) == 10
    assert rest.next_cursor is None


async def test_one_request_shows_its_transfers(either: House) -> None:
    await either.budget(Scope.of_key(either.key_id), USD)
    gate = await either.gate()
    hold = await run(gate, either.ask())
    await either.post()
    async with either.db.read() as c:
        detail = await get_request(c, hold.ask.request_id)
        for wrong in ("nonsense", request_id()):
            with pytest.raises(NotFound):
                await get_request(c, wrong)
    assert detail.usage.cost_usd_pico == price(100, 200)
    assert [(entry.kind, entry.amount_pico) for entry in detail.transfers] == [
        ("usage", price(100, 200)),
        ("budget", price(100, 200)),
    ]
