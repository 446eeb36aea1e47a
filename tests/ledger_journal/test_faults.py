"""Disks that fail: a sync that failed is never asked again on the same file, and nothing unsynced is called durable."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from ledger.errors import LedgerUnavailable
from ledger.journal import JournalReader
from tests.ledger_journal.material import FailingFiles, open_writer, records_of, void


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    return tmp_path / "0"


@pytest.mark.parametrize(("operation", "error"), [("sync", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)])
async def test_after_a_failed_sync_or_write_the_records_move_to_a_new_segment(
    slot: Path, operation: str, error: int
) -> None:
    files = FailingFiles()
    writer = open_writer(slot, files=files)
    await writer.append_durable(void(0))
    await writer.append_durable(void(1))
    files.fail(operation, error)
    await asyncio.gather(*(writer.append_durable(void(number)) for number in range(2, 20)))
    assert writer.unhealthy() is None
    mark = JournalReader(writer.path).mark()
    assert mark is not None
    assert mark.place.segment == 2
    await writer.append_durable(void(20))
    await writer.close()
    assert records_of(writer.path) == [void(number) for number in range(21)]


async def test_the_failed_segment_is_not_synced_again(slot: Path) -> None:
    synced: list[int] = []

    class Watched(FailingFiles):
        def sync_data(self, fd: int) -> None:
            synced.append(os.fstat(fd).st_ino)
            super().sync_data(fd)

    files = Watched()
    writer = open_writer(slot, files=files)
    await writer.append_durable(void(0))
    failing = synced[-1]
    synced.clear()
    files.fail("sync")
    await writer.append_durable(void(1))
    await writer.append_durable(void(2))
    assert synced[0] == failing
    assert failing not in synced[1:]
    await writer.close()


async def test_records_that_come_while_a_segment_fails_wait_for_the_new_one(slot: Path) -> None:
    files = FailingFiles()
    writer = open_writer(slot, files=files)
    await writer.append_durable(void(0))
    files.fail("sync")

    async def late(number: int) -> None:
        for _ in range(number % 7):
            await asyncio.sleep(0)
        await writer.append_written(void(number))
        await writer.append_durable(void(1_000 + number))

    await asyncio.gather(*(late(number) for number in range(1, 200)))
    await writer.close()
    kept = {record.request_id for record in records_of(writer.path)}  # type: ignore[union-attr]
    assert len(kept) == 399


@pytest.mark.parametrize("operation", ["sync", "write"])
async def test_a_second_failure_stops_the_journal_and_says_so(slot: Path, operation: str) -> None:
    files = FailingFiles()
    writer = open_writer(slot, files=files)
    await writer.append_durable(void(0))
    files.fail(operation, times=1_000)
    outcomes = await asyncio.gather(
        *(writer.append_durable(void(number)) for number in range(1, 5)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [LedgerUnavailable] * 4
    assert "cannot be written" in (writer.unhealthy() or "")
    with pytest.raises(LedgerUnavailable, match="cannot be written"):
        writer.append(void(9))
    assert records_of(writer.path) == [void(0)]
    files.heal()
    with pytest.raises(LedgerUnavailable):
        await writer.close()
    second = open_writer(slot, 2)  # the lock is free; what was written is found, or not, but never half of it
    found = records_of(writer.path)
    assert found == [void(number) for number in range(len(found))]
    await second.close()


async def test_a_full_disk_at_the_end_of_a_segment_stops_admission_and_keeps_what_was_acknowledged(slot: Path) -> None:
    files = FailingFiles()
    writer = open_writer(slot, files=files)
    await writer.append_durable(void(0))
    (writer.path / "spare").unlink(missing_ok=True)
    files.fail("allocate", errno.ENOSPC, times=1_000)
    acknowledged = 1

    async def append_on() -> None:
        nonlocal acknowledged
        for number in range(1, 400):
            await writer.append_durable(void(number, size=100))
            acknowledged += 1

    with pytest.raises(LedgerUnavailable):
        await append_on()
    assert "No space left" in (writer.unhealthy() or "")
    assert len(records_of(writer.path)) >= acknowledged
    writer.abandon()


async def test_a_position_that_cannot_be_written_is_told_and_made_good_by_the_next(slot: Path) -> None:
    files = FailingFiles()
    writer = open_writer(slot, files=files)
    await writer.append_durable(void(0))
    files.fail("mark", errno.EIO)
    await writer.append_durable(void(1))  # it is durable all the same
    assert "position" in (writer.unhealthy() or "")
    assert records_of(writer.path) == [void(0)]
    await writer.append_durable(void(2))
    assert writer.unhealthy() is None
    assert records_of(writer.path) == [void(0), void(1), void(2)]
    await writer.close()


@pytest.mark.parametrize("operation", ["write", "sync", "allocate", "rename", "sync_directory"])
async def test_an_epoch_that_cannot_begin_leaves_the_slot_free_and_no_trace(slot: Path, operation: str) -> None:
    files = FailingFiles()
    files.fail(operation, errno.ENOSPC)
    with pytest.raises(LedgerUnavailable, match="cannot be opened"):
        open_writer(slot, files=files)
    second = open_writer(slot, 2)
    await second.append_durable(void(1))
    await second.close()
    assert records_of(second.path) == [void(1)]
