from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from ledger.errors import Invalid, LedgerUnavailable
from ledger.journal import Files, JournalReader, JournalWriter, SlotLock, host_id, list_epochs, list_slots
from ledger.journal.committer import IDLE_SYNC_S
from tests.ledger_journal.material import UUID_1, CountingFiles, FailingFiles, open_writer, records_of, settle, void


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    return tmp_path / "0"


async def test_durable_records_are_there_in_order_with_their_numbers(slot: Path) -> None:
    writer = open_writer(slot)
    numbers = [await writer.append_durable(settle(number)) for number in range(5)]
    assert numbers == [1, 2, 3, 4, 5]
    assert records_of(writer.path) == [settle(number) for number in range(5)]
    assert writer.durable_seq == writer.seq == 5
    await writer.close()


async def test_an_appended_record_is_with_the_system_after_one_loop_turn_and_hidden_until_durable(slot: Path) -> None:
    writer = open_writer(slot)
    writer.append(void(1))
    await asyncio.sleep(0)
    assert records_of(writer.path, durable_only=False) == [void(1)]
    assert records_of(writer.path) == []
    await writer.flush()
    assert records_of(writer.path) == [void(1)]
    await writer.close()


async def test_append_written_returns_when_the_system_has_the_record(slot: Path) -> None:
    writer = open_writer(slot)
    assert await writer.append_written(void(1)) == 1
    assert records_of(writer.path, durable_only=False) == [void(1)]
    writer.abandon()


async def test_a_record_that_nobody_waits_for_is_durable_soon(slot: Path) -> None:
    writer = open_writer(slot)
    await writer.append_written(void(1))
    async with asyncio.timeout(IDLE_SYNC_S + 30):
        while records_of(writer.path) != [void(1)]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await writer.close()


async def test_many_waiters_share_a_write_and_a_few_syncs(slot: Path) -> None:
    files = CountingFiles()
    writer = open_writer(slot, files=files, segment_bytes=1 << 20)
    await writer.append_durable(void(0))
    before = dict(files.counts)
    await asyncio.gather(*(writer.append_durable(void(number)) for number in range(500)))
    assert files.counts["write"] - before["write"] <= 4  # the group, and the mark after each sync
    assert files.counts["sync"] - before["sync"] <= 2
    await writer.close()


async def test_the_next_group_forms_while_a_sync_runs(slot: Path) -> None:
    writer = open_writer(slot, segment_bytes=1 << 20)
    first = asyncio.create_task(writer.append_durable(void(1)))
    await asyncio.sleep(0)
    seconds = [asyncio.create_task(writer.append_durable(void(number))) for number in range(2, 50)]
    await asyncio.gather(first, *seconds)
    assert records_of(writer.path) == [void(number) for number in range(1, 50)]
    await writer.close()


async def test_segments_follow_each_other_without_a_gap(slot: Path) -> None:
    writer = open_writer(slot)
    expected = [void(number, size=number % 700) for number in range(400)]
    await asyncio.gather(*(writer.append_durable(record) for record in expected))
    assert len(list(writer.path.glob("*.seg"))) > 8
    assert records_of(writer.path) == expected
    await writer.close()
    assert records_of(writer.path) == expected
    assert not (writer.path / "spare").exists()


async def test_a_cancelled_wait_leaves_the_record_and_the_others(slot: Path) -> None:
    writer = open_writer(slot)
    tasks = [asyncio.create_task(writer.append_durable(void(number))) for number in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in done] == [int, asyncio.CancelledError, int]
    assert records_of(writer.path) == [void(0), void(1), void(2)]
    await writer.close()


async def test_a_too_large_record_is_refused_and_leaves_no_gap(slot: Path) -> None:
    writer = open_writer(slot)
    with pytest.raises(Invalid, match="too large"):
        writer.append(void(1, size=20_000))
    assert await writer.append_durable(void(2, size=12_000)) == 1
    await writer.close()


async def test_a_large_record_reads_back(slot: Path) -> None:
    writer = open_writer(slot, segment_bytes=8 << 20)
    await writer.append_durable(void(1, size=3 << 20))
    await writer.append_durable(void(2))
    assert records_of(writer.path) == [void(1, size=3 << 20), void(2)]
    await writer.close()


async def test_a_slot_has_one_process(slot: Path) -> None:
    writer = open_writer(slot)
    with pytest.raises(LedgerUnavailable, match=r"belongs to process \d+: stop it first"):
        SlotLock.acquire(slot)
    code = f"from pathlib import Path; from ledger.journal import SlotLock; SlotLock.acquire(Path({str(slot)!r}))"
    other = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert "belongs to process" in other.stderr
    await writer.close()
    SlotLock.acquire(slot).release()


def test_a_slot_that_cannot_be_written_is_refused(slot: Path) -> None:
    slot.write_text("in the way")
    with pytest.raises(LedgerUnavailable, match="cannot be used"):
        open_writer(slot)


async def test_a_lock_taken_before_the_epoch_is_known_passes_to_the_writer(slot: Path) -> None:
    lock = SlotLock.acquire(slot)
    writer = JournalWriter.open(slot, epoch=1, journal_uuid=UUID_1, lock=lock)
    with pytest.raises(LedgerUnavailable):
        SlotLock.acquire(slot)
    await writer.close()
    SlotLock.acquire(slot).release()


async def test_an_epoch_that_is_not_newer_is_refused(slot: Path) -> None:
    await open_writer(slot, 3).close()
    with pytest.raises(LedgerUnavailable, match="the database is older than the journal"):
        open_writer(slot, 3)
    with pytest.raises(LedgerUnavailable, match="the database is older than the journal"):
        open_writer(slot, 2)
    await open_writer(slot, 4).close()  # and the lock was free again


async def test_an_older_epoch_never_changes_again(slot: Path) -> None:
    first = open_writer(slot)
    await first.append_durable(void(1))
    await first.close()
    before = {path.name: path.read_bytes() for path in first.path.iterdir()}
    second = open_writer(slot, 2)
    await second.append_durable(void(2))
    await second.close()
    assert {path.name: path.read_bytes() for path in first.path.iterdir()} == before


async def test_the_chain_of_an_epoch_goes_on_from_the_one_before(slot: Path, tmp_path: Path) -> None:
    async def start_of_second(record_number: int, place: Path) -> bytes:
        first = open_writer(place)
        await first.append_durable(void(record_number))
        await first.close()
        second = open_writer(place, 2)
        await second.close()
        return JournalReader(second.path).start().chain

    assert await start_of_second(1, tmp_path / "a") == await start_of_second(1, tmp_path / "b")
    assert await start_of_second(1, tmp_path / "c") != await start_of_second(2, tmp_path / "d")


async def test_a_clean_end_leaves_no_unused_space_and_refuses_more(slot: Path) -> None:
    writer = open_writer(slot)
    await writer.append_durable(void(1))
    await writer.close()
    await writer.close()
    assert sorted(path.name for path in writer.path.iterdir()) == ["000001.seg", "durable"]
    assert (writer.path / "000001.seg").stat().st_size < 4_200
    with pytest.raises(LedgerUnavailable, match="closed"):
        writer.append(void(2))


async def test_closing_makes_pending_records_durable(slot: Path) -> None:
    writer = open_writer(slot)
    for number in range(300):
        writer.append(void(number, size=100))
    await writer.close()
    assert records_of(writer.path) == [void(number, size=100) for number in range(300)]
    mark = JournalReader(writer.path).mark()
    assert mark is not None
    assert mark.closed


async def test_low_disk_is_told_before_anything_is_lost(slot: Path) -> None:
    class FullDisk(Files):
        def free_bytes(self, path: Path) -> int:
            return 3 * (16 << 10)

    writer = open_writer(slot, files=FullDisk())
    assert "free space on the file system" in (writer.unhealthy() or "")
    await writer.append_durable(void(1))  # what was admitted still settles
    await writer.close()


async def test_a_segment_that_cannot_be_reserved_is_told_while_the_current_one_goes_on(slot: Path) -> None:
    files = FailingFiles()
    writer = open_writer(slot, files=files)
    files.fail("allocate", errno.ENOSPC)
    await writer.append_durable(void(1))
    await writer.append_durable(void(2))
    assert "cannot reserve its next segment" in (writer.unhealthy() or "")
    assert records_of(writer.path) == [void(1), void(2)]
    await writer.close()


async def test_too_many_unposted_records_are_told(slot: Path) -> None:
    writer = open_writer(slot)
    writer.health.backlog_limit_frames = 2
    for number in range(4):
        await writer.append_durable(void(number))
    writer.posted(1)
    assert "wait to be posted" in (writer.unhealthy() or "")
    writer.posted(3)
    assert writer.unhealthy() is None
    await writer.close()


def test_slots_and_epochs_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("10", "2", "host-id.d", "x"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_slots(tmp_path)] == ["2", "10"]
    assert list_slots(tmp_path / "none") == list_epochs(tmp_path / "none") == []
    for epoch in (12, 2):
        (tmp_path / "2" / f"epoch-{epoch:06d}-{uuid4()}").mkdir()
    (tmp_path / "2" / f"opening-epoch-000013-{uuid4()}").mkdir()
    assert [info.epoch for info in list_epochs(tmp_path / "2")] == [2, 12]


def test_a_host_keeps_its_identity(tmp_path: Path) -> None:
    first = host_id(tmp_path / "journal")
    assert host_id(tmp_path / "journal") == first
    assert host_id(tmp_path / "other") != first
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["host-id"]
