"""Posted segments are kept for a week, and then they go; what recovery or a proof may still want stays."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ledger.audit import By
from ledger.journal import JournalWriter, SlotLock, host_id, list_epochs
from ledger.lost_journals import declare_lost
from ledger.posting import KEPT_MS
from ledger.recovery import begin_epoch
from ledger.topups import grant
from ledger.verify import verify
from tests.ledger_flow.material import USD, House, crash, now_ms, price, run, used

SEGMENT_BYTES = 1 << 20


def segments(house: House) -> list[Path]:
    return sorted(house.journal_dir.glob("0/epoch-*/*.seg"))


async def fill(house: House) -> None:
    """Some segments of settled requests in the slot's running epoch."""
    gate = await house.gate(segment_bytes=SEGMENT_BYTES)
    for _ in range(40):
        await run(gate, house.ask(), used(tokens={"raw": b"x" * 100_000}))
    await gate.journal.flush()


async def keep_house(house: House, after_ms: int) -> None:
    """A poster that starts so much later, and posts and tidies."""
    poster = house.poster(clock=lambda: now_ms() + after_ms)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.5, stop.set)
    await poster.run(stop)


async def proves(house: House) -> bool:
    return (await verify(house.db, house.journal_dir)).ok


async def test_posted_segments_go_after_a_week_and_not_before(house: House) -> None:
    await fill(house)
    before = segments(house)
    assert len(before) > 2
    await keep_house(house, KEPT_MS - 60_000)
    assert segments(house) == before
    await keep_house(house, KEPT_MS + 60_000)
    assert len(segments(house)) < len(before)
    assert segments(house)[-1] == before[-1]
    assert await proves(house)


async def test_a_slot_goes_on_after_its_old_segments_are_gone(house: House) -> None:
    await fill(house)
    await keep_house(house, KEPT_MS + 60_000)
    await house.gates[-1].close()
    house.gates.pop()
    gate = await house.gate(segment_bytes=SEGMENT_BYTES)
    assert gate.lost_epochs == {}
    await run(gate, house.ask())
    await house.post()
    assert await proves(house)
    assert len(list_epochs(house.journal_dir / "0")) == 2
    await keep_house(house, KEPT_MS + 60_000)
    assert [info.epoch for info in list_epochs(house.journal_dir / "0")] == [2], (
        "closed, posted and old: it goes altogether"
    )
    assert await proves(house)


async def test_what_is_not_posted_stays_however_old_it_is(house: House) -> None:
    await fill(house)
    await house.gates[-1].close()
    house.gates.pop()
    before = segments(house)
    poster = house.poster(clock=lambda: now_ms() + 3 * KEPT_MS)
    await poster._keep_house()
    assert segments(house) == before
    await house.post()
    assert await proves(house)


async def test_the_journal_of_an_epoch_that_nobody_recovered_stays_however_old_it_is(house: House) -> None:
    """Its process died, and the next one before it could recover it; weeks later only a poster starts at first."""
    gate = await house.gate(segment_bytes=SEGMENT_BYTES)
    hold = await gate.hold(house.ask(prompt=90, output=2_000, streamed=True))
    hold.progress(90, 300)
    await gate.journal.flush()
    crash(house, gate)
    slot_dir = house.journal_dir / "0"
    lock = SlotLock.acquire(slot_dir)
    epoch, journal_uuid = await begin_epoch(house.db, f"{host_id(house.journal_dir)}/0", slot_dir, now_ms())
    JournalWriter.open(slot_dir, epoch=epoch, journal_uuid=journal_uuid, lock=lock).abandon()
    await keep_house(house, 3 * KEPT_MS)
    gate = await house.gate(segment_bytes=SEGMENT_BYTES)
    assert gate.lost_epochs == {}
    await house.post()
    (row,) = await house.rows()
    assert row.cost_usd_pico == price(90, 300)
    await gate.close()
    await house.post()
    assert await house.leased() == 0
    assert await proves(house)


async def test_what_is_left_of_a_journal_that_was_declared_lost_goes_after_a_week_too(house: House) -> None:
    gate = await house.gate(segment_bytes=SEGMENT_BYTES)
    await run(gate, house.ask())
    crash(house, gate)
    async with house.db.begin() as c:
        await declare_lost(c, By("ops", now_ms() + 60_000, "the disk cannot be trusted"), gate.leases.slot_id, 1)
    await house.gate(segment_bytes=SEGMENT_BYTES)
    await keep_house(house, 0)
    assert [info.epoch for info in list_epochs(house.journal_dir / "0")] == [1, 2]
    await keep_house(house, KEPT_MS + 60_000)
    assert [info.epoch for info in list_epochs(house.journal_dir / "0")] == [2]


async def test_what_is_left_of_an_expired_grant_is_booked_without_anybody_asking(house: House) -> None:
    soon = now_ms() + 60_000
    async with house.db.begin() as c:
        await grant(c, By("test", now_ms()), house.team_id, USD, currency="USD", reference="g", expires_at_ms=soon)
    gate = await house.gate()
    await run(gate, house.ask(prompt=100, output=200))
    await gate.close()
    await keep_house(house, 0)
    assert (await house.account("grant")).debits_pico == price(100, 200)
    await keep_house(house, 120_000)
    assert (await house.account("grant")).debits_pico == USD
    assert await proves(house)
