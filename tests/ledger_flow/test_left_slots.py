"""Slots without a process are recovered by another one of the host: each once, and none that somebody has."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import func, select

from ledger.audit import By
from ledger.errors import JournalDamaged
from ledger.journal import Files, list_epochs
from ledger.journal.opening import close_epochs
from ledger.left_slots import LeftSlots
from ledger.lost_journals import declare_lost
from ledger.schema import epochs
from tests.ledger_flow.material import House, crash, now_ms, run, used
from tests.ledger_flow.test_holds import proven


async def open_epochs(house: House) -> list[tuple[int, int]]:
    query = select(epochs.c.slot_id, epochs.c.epoch).where(epochs.c.state == "open")
    async with house.db.read() as c:
        return sorted((int(row.slot_id[-1]), row.epoch) for row in await c.execute(query))


async def test_workers_that_died_or_ended_with_requests_open_are_recovered_whatever_their_slot(either: House) -> None:
    dead, living, ended = await either.gate(0), await either.gate(1), await either.gate(2)
    delivered = await dead.hold(either.ask(streamed=True))
    delivered.progress(100, 50)
    delivered.journal_progress()
    await dead.journal.flush()
    crash(either, dead)
    await ended.hold(either.ask())
    await ended.close(patience_s=0.1)
    either.gates.remove(ended)
    await run(living, either.ask(), used())
    left = LeftSlots(either.db, either.journal_dir)
    assert await left.recover() == [0, 2]
    await either.post()
    assert await open_epochs(either) == [(1, 1)]
    assert sorted(row.billed_tokens for row in await either.rows()) == [150, 300]
    await living.close()
    await either.post()
    assert await either.leased() == 0
    await proven(either)


async def test_slots_whose_workers_are_about_to_start_are_left_to_them(house: House) -> None:
    for slot in (0, 1):
        crash(house, await house.gate(slot))
    assert await LeftSlots(house.db, house.journal_dir).recover(in_use=range(1)) == [1]


async def test_a_slot_is_recovered_again_only_after_somebody_used_it(house: House) -> None:
    crash(house, await house.gate())
    left = LeftSlots(house.db, house.journal_dir)
    assert [await left.recover() for _ in range(3)] == [[0], [], []]  # nothing is posted: its epochs are still open
    crash(house, await house.gate())
    assert await left.recover() == [0]


def damage(epoch_dir: Path) -> None:
    """A frame that was durable does not read any more."""
    segment = max(epoch_dir.glob("*.seg"), key=lambda path: path.stat().st_size)
    with segment.open("r+b") as file:
        file.seek(4096 + 40)
        byte = file.read(1)[0]
        file.seek(4096 + 40)
        file.write(bytes([byte ^ 255]))


async def test_a_damaged_slot_gains_no_epochs_however_often_it_is_tried(house: House) -> None:
    gate = await house.gate()
    await run(gate, house.ask())
    await house.post()
    crash(house, gate)
    damage(gate.journal.path)
    left = LeftSlots(house.db, house.journal_dir)
    for _ in range(3):
        assert await left.recover() == []
        with pytest.raises(JournalDamaged):
            await house.gate()
    async with house.db.read() as c:
        assert (await c.execute(select(func.count()).select_from(epochs))).scalar_one() == 1


async def test_damage_in_an_epoch_that_was_ended_before_leaves_no_epochs_behind_either(either: House) -> None:
    """The start before this one ended the epoch and died; what lies on disk has rotted since then."""
    gate = await either.gate()
    slot_id = gate.leases.slot_id
    await run(gate, either.ask())
    crash(either, gate)
    close_epochs(Files(), either.journal_dir / "0", now_ms())
    damage(gate.journal.path)
    for accepted in (None, None, None, None, "no copy exists"):
        with pytest.raises(JournalDamaged, match=f"declare-lost {slot_id} 1"):
            await either.gate(accept_damage=accepted)
        assert await LeftSlots(either.db, either.journal_dir).recover() == []
    assert [info.epoch for info in list_epochs(either.journal_dir / "0")] == [1]
    assert await open_epochs(either) == [(0, 1)]
    async with either.db.begin() as c:
        await declare_lost(c, By("ops", now_ms() + 60_000, "no copy exists"), slot_id, 1)
    await run(await either.gate(), either.ask())
    await either.gates.pop().close()
    await either.post()
    assert (len(await either.rows()), await either.leased()) == (1, 0)
