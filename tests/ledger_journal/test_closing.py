"""What the next start makes of a journal whose process is gone: a torn tail is cut, damage is refused."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import msgspec
import pytest

from ledger.errors import JournalDamaged
from ledger.journal import JournalReader, JournalWriter, Override
from ledger.journal.closing import close_epoch
from ledger.journal.format import DATA_START
from ledger.records import Record
from tests.ledger_journal.material import UUID_2, UnsyncedFiles, open_writer, records_of, void


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    return tmp_path / "0"


async def killed(slot: Path, durable: int, unsynced: int = 0, size: int = 30) -> Path:
    """The epoch of a process that was killed after so many durable records and so many that were only written."""
    writer = open_writer(slot)
    for number in range(durable):
        await writer.append_durable(void(number, size=size))
    for number in range(durable, durable + unsynced):
        await writer.append_written(void(number, size=size))
    writer.abandon()
    return writer.path


def copy_with(epoch_dir: Path, target: Path, segment: bytes) -> Path:
    target.mkdir()
    (target / "durable").write_bytes((epoch_dir / "durable").read_bytes())
    (target / "000001.seg").write_bytes(segment)
    return target


def written_size(segment: Path) -> int:
    return len(segment.read_bytes().rstrip(b"\0"))


def closed(epoch_dir: Path) -> list[Record]:
    mark, override = close_epoch(UnsyncedFiles(), epoch_dir, at_ms=9)
    assert mark.closed
    assert override is None
    return records_of(epoch_dir)


def expected(count: int, size: int = 30) -> list[Record]:
    return [void(number, size=size) for number in range(count)]


async def test_what_a_killed_process_wrote_is_kept_also_when_it_was_not_synced(slot: Path) -> None:
    epoch_dir = await killed(slot, durable=3, unsynced=4)
    assert records_of(epoch_dir) == expected(3)
    second = open_writer(slot, 2)
    assert records_of(epoch_dir) == expected(7)
    await second.close()


async def test_unsynced_frames_are_written_anew_and_not_synced_where_a_sync_may_have_failed(slot: Path) -> None:
    epoch_dir = await killed(slot, durable=3, unsynced=4)
    assert closed(epoch_dir) == expected(7)
    mark = JournalReader(epoch_dir).mark()
    assert mark is not None
    assert mark.place.segment == 2
    assert sorted(path.name for path in epoch_dir.iterdir()) == ["000001.seg", "000002.seg", "durable"]


async def test_closing_twice_changes_nothing(slot: Path) -> None:
    epoch_dir = await killed(slot, durable=3, unsynced=4)
    closed(epoch_dir)
    before = {path.name: path.read_bytes() for path in epoch_dir.iterdir()}
    closed(epoch_dir)
    assert {path.name: path.read_bytes() for path in epoch_dir.iterdir()} == before


async def test_every_length_of_the_last_segment_restarts_or_refuses_and_never_loses_a_durable_record(
    slot: Path, tmp_path: Path
) -> None:
    epoch_dir = await killed(slot, durable=6, unsynced=6)
    original = epoch_dir / "000001.seg"
    mark = JournalReader(epoch_dir).mark()
    assert mark is not None
    whole = original.read_bytes()
    for length in [*range(0, DATA_START, 127), *range(DATA_START, written_size(original) + 1)]:
        copy = copy_with(epoch_dir, tmp_path / f"copy-{length}", whole[:length])
        if length < mark.place.offset:
            with pytest.raises(JournalDamaged, match=r"durable|header does not read"):
                close_epoch(UnsyncedFiles(), copy, at_ms=9)
        else:
            found = closed(copy)
            assert expected(12)[: len(found)] == found
            assert len(found) >= 6
        shutil.rmtree(copy)


async def test_every_torn_suffix_is_cut(slot: Path, tmp_path: Path) -> None:
    epoch_dir = await killed(slot, durable=6, unsynced=6)
    mark = JournalReader(epoch_dir).mark()
    assert mark is not None
    chance = random.Random(1)
    whole = (epoch_dir / "000001.seg").read_bytes()
    for start in range(mark.place.offset, written_size(epoch_dir / "000001.seg"), 3):
        torn = bytearray(whole)
        torn[start : start + 40] = chance.choice([chance.randbytes(40), bytes(40)])
        copy = copy_with(epoch_dir, tmp_path / f"copy-{start}", torn)
        found = closed(copy)
        assert 6 <= len(found) <= 12
        assert found == expected(len(found))
        shutil.rmtree(copy)


async def test_every_changed_byte_before_the_durable_position_is_refused(slot: Path, tmp_path: Path) -> None:
    epoch_dir = await killed(slot, durable=6, unsynced=2)
    mark = JournalReader(epoch_dir).mark()
    assert mark is not None
    whole = (epoch_dir / "000001.seg").read_bytes()
    for at in [*range(128), *range(DATA_START, mark.place.offset)]:
        changed = bytearray(whole)
        changed[at] ^= 0x40
        (epoch_dir / "000001.seg").write_bytes(changed)
        with pytest.raises(JournalDamaged, match="Restore the file from a copy, or start once with damage accepted"):
            close_epoch(UnsyncedFiles(), epoch_dir, at_ms=9)
    (epoch_dir / "000001.seg").write_bytes(whole)
    assert closed(epoch_dir) == expected(8)


async def test_damage_is_known_from_later_frames_when_the_position_file_is_stale_or_gone(slot: Path) -> None:
    epoch_dir = await killed(slot, durable=9)
    (epoch_dir / "durable").unlink()
    segment = epoch_dir / "000001.seg"
    data = bytearray(segment.read_bytes())
    data[DATA_START + 60] ^= 1  # in the first frame; the ninth was written when the eighth was durable
    segment.write_bytes(data)
    with pytest.raises(JournalDamaged, match="no valid frame 1 at byte 4096, and frames up to 8 were durable"):
        close_epoch(UnsyncedFiles(), epoch_dir, at_ms=9)


async def test_a_lost_position_file_costs_nothing_when_the_frames_are_whole(slot: Path) -> None:
    epoch_dir = await killed(slot, durable=200, unsynced=5)
    (epoch_dir / "durable").write_bytes(bytes(1_024))
    assert records_of(epoch_dir) == []
    assert closed(epoch_dir) == expected(205)


async def test_damage_in_an_earlier_segment_is_refused(slot: Path) -> None:
    epoch_dir = await killed(slot, durable=400)
    data = bytearray((epoch_dir / "000001.seg").read_bytes())
    data[9_000] ^= 1
    (epoch_dir / "000001.seg").write_bytes(data)
    with pytest.raises(JournalDamaged, match=r"000001.seg: no valid frame \d+ at byte \d+"):
        open_writer(slot, 2)
    with pytest.raises(JournalDamaged, match="Restore the file"):
        open_writer(slot, 2)  # the lock was free again: the same message


@pytest.mark.parametrize("name", ["000001.seg", "000003.seg"])
async def test_a_lost_segment_is_refused(slot: Path, name: str) -> None:
    epoch_dir = await killed(slot, durable=400)
    (epoch_dir / name).unlink()
    with pytest.raises(JournalDamaged):
        close_epoch(UnsyncedFiles(), epoch_dir, at_ms=9)


async def test_accepting_damage_keeps_what_is_before_it_and_writes_down_who_said_so(slot: Path) -> None:
    epoch_dir = await killed(slot, durable=9)
    segment = epoch_dir / "000001.seg"
    data = bytearray(segment.read_bytes())
    frame = (written_size(segment) - DATA_START) // 9
    data[DATA_START + 4 * frame + 50] ^= 1
    segment.write_bytes(data)
    second = JournalWriter.open(slot, epoch=2, journal_uuid=UUID_2, accept_damage="disk replaced, ticket 4711")
    assert records_of(epoch_dir) == expected(4)
    (override,) = second.overrides
    assert override.reason == "disk replaced, ticket 4711"
    assert override.last_good_seq == 4
    assert "no valid frame 5" in override.damage
    assert msgspec.json.decode((epoch_dir / "damage.json").read_bytes(), type=Override) == override
    assert segment.read_bytes() == data  # the evidence stays
    await second.close()
    third = open_writer(slot, 3)  # decided once
    assert third.overrides == []
    await third.close()


async def test_an_epoch_that_was_never_finished_opening_does_not_exist(slot: Path) -> None:
    (slot / "opening-epoch-000001-00000000-0000-0000-0000-000000000001").mkdir(parents=True)
    writer = open_writer(slot)
    await writer.append_durable(void(1))
    await writer.close()
    assert sorted(os.listdir(slot)) == [writer.path.name, "lock"]
