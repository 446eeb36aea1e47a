from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import JournalDamaged
from ledger.journal import JournalReader, JournalWriter, broken_link, list_epochs, prune
from ledger.journal.format import DATA_START
from ledger.records import Void
from tests.ledger_journal.material import SMALL_SEGMENT, UUID_1, FailingFiles, open_writer, records_of, void


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    return tmp_path / "0"


async def write(slot: Path, count: int, *, epoch: int = 1, size: int = 200) -> JournalWriter:
    writer = open_writer(slot, epoch)
    for number in range(count):
        writer.append(void(number, size=size))
    await writer.flush()
    return writer


async def test_a_poller_sees_each_durable_frame_once_and_goes_on_where_it_was(slot: Path) -> None:
    writer = open_writer(slot)
    reader = JournalReader(writer.path)
    seen: list[int] = []
    for number in range(200):
        await writer.append_durable(void(number, size=250))
        seen += [frame.seq for frame in reader.read(seen[-1] if seen else 0, 3)]
    assert seen == list(range(1, 201))
    assert reader.read(200, 10) == []
    await writer.close()
    reader.close()


async def test_any_position_and_batch_size_read_the_same_frames(slot: Path) -> None:
    writer = await write(slot, 300)
    whole = list(JournalReader(writer.path).frames(0))
    for batch in (1, 7, 64, 1_000):
        assert list(JournalReader(writer.path).frames(0, batch=batch)) == whole
    reader = JournalReader(writer.path)
    for after in (299, 0, 150, 151, 37, 300, 299):
        assert reader.read(after, 5) == whole[after : after + 5]
    await writer.close()


async def test_an_idle_poll_opens_nothing(slot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = await write(slot, 10)
    reader = JournalReader(writer.path)
    reader.read(0, 10)
    monkeypatch.setattr("os.open", None)
    monkeypatch.setattr("os.listdir", None)
    assert reader.read(10, 10) == []
    monkeypatch.undo()
    await writer.close()


async def test_a_reader_that_comes_before_the_first_record_waits(slot: Path) -> None:
    writer = open_writer(slot)
    reader = JournalReader(writer.path)
    assert reader.read(0, 10) == []
    await writer.append_durable(void(1))
    assert [frame.record for frame in reader.read(0, 10)] == [void(1)]
    await writer.close()


async def test_good_frames_before_damage_come_first_and_then_the_place_is_named(slot: Path) -> None:
    writer = await write(slot, 30)
    path = writer.path / "000001.seg"
    data = bytearray(path.read_bytes())
    offset = DATA_START + 10 * ((len(data.rstrip(b"\0")) - DATA_START) // 30)
    data[offset + 100] ^= 1
    path.write_bytes(data)
    reader = JournalReader(writer.path)
    good = reader.read(0, 100)
    assert [frame.seq for frame in good] == list(range(1, len(good) + 1))
    assert 9 <= len(good) <= 11
    with pytest.raises(JournalDamaged, match=rf"000001.seg: no valid frame {len(good) + 1} at byte \d+, and frames up"):
        reader.read(good[-1].seq, 100)
    await writer.close()


async def test_a_missing_segment_is_named(slot: Path) -> None:
    writer = await write(slot, 300)
    await writer.close()
    (writer.path / "000002.seg").unlink()
    with pytest.raises(JournalDamaged, match=r"000002.seg is missing"):
        records_of(writer.path)


async def test_a_segment_of_another_history_is_noticed(slot: Path, tmp_path: Path) -> None:
    mine = await write(slot, 300)
    other = await write(tmp_path / "1", 300, size=199)
    await mine.close()
    await other.close()
    (mine.path / "000002.seg").write_bytes((other.path / "000002.seg").read_bytes())
    with pytest.raises(JournalDamaged):
        records_of(mine.path)


async def test_posted_and_old_segments_go_and_the_rest_stays_readable(slot: Path) -> None:
    time_ms = 0

    def clock() -> int:
        return time_ms

    writer = JournalWriter.open(slot, epoch=1, journal_uuid=UUID_1, segment_bytes=SMALL_SEGMENT, clock=clock)
    for number in range(300):
        time_ms = number
        await writer.append_durable(void(number, size=200))
    segments = len(list(writer.path.glob("*.seg")))
    assert prune(writer.path, posted_seq=300, before_ms=0) == 0
    assert prune(writer.path, posted_seq=0, before_ms=10_000) == 0
    removed = prune(writer.path, posted_seq=150, before_ms=10_000)
    assert 0 < removed < segments - 1
    reader = JournalReader(writer.path)
    assert [frame.record for frame in reader.frames(150)] == [void(number, size=200) for number in range(150, 300)]
    with pytest.raises(JournalDamaged, match="frame 1 is not there any more"):
        reader.read(0, 1)
    assert removed + prune(writer.path, posted_seq=300, before_ms=10_000) == segments - 1
    await writer.close()


async def test_a_closed_epoch_goes_when_all_of_it_is_posted_and_old_but_never_the_newest(slot: Path) -> None:
    first = await write(slot, 10)
    await first.close()
    assert prune(first.path, posted_seq=10, before_ms=1_000) == 0
    second = await write(slot, 10, epoch=2)
    assert prune(first.path, posted_seq=9, before_ms=1_000) == 0
    assert prune(first.path, posted_seq=10, before_ms=7) == 0
    assert prune(first.path, posted_seq=10, before_ms=8) == 1
    assert not first.path.exists()
    await second.close()
    third = open_writer(slot, 3)  # and the chain goes on
    await third.close()
    assert broken_link(slot) is None


async def test_epochs_that_are_not_one_history_are_named(slot: Path, tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        await (await write(slot, 5, epoch=epoch)).close()
        await (await write(tmp_path / "1", 6, epoch=epoch)).close()
    assert broken_link(slot) is None
    second = list_epochs(slot)[1].path
    (second / "000001.seg").write_bytes((list_epochs(tmp_path / "1")[1].path / "000001.seg").read_bytes())
    assert "does not continue" in (broken_link(slot) or "")
    (second / "000001.seg").write_bytes((list_epochs(slot)[0].path / "000001.seg").read_bytes())
    assert "belong to epoch 1" in (broken_link(slot) or "")


@given(
    st.lists(
        st.sampled_from(["durable", "written", "burst", "poll", "poll one", "crash", "end", "prune", "sync fails"]),
        min_size=5,
        max_size=40,
    )
)
@settings(max_examples=20, deadline=None)
def test_over_any_history_a_poster_gets_each_record_once_and_in_order(steps: list[str]) -> None:
    with TemporaryDirectory() as directory:
        asyncio.run(History(Path(directory) / "0").live(steps))


class History:
    """A slot's life against its plain model: the list of what was written."""

    def __init__(self, slot: Path) -> None:
        self.slot = slot
        self.files = FailingFiles()
        self.written: list[str] = []
        self.posted: list[str] = []
        self.cursors: dict[Path, int] = {}
        self.readers: dict[Path, JournalReader] = {}
        self.epoch = 0
        self.writer = self.restart()

    def restart(self) -> JournalWriter:
        self.epoch += 1
        return open_writer(self.slot, self.epoch, files=self.files)

    async def live(self, steps: list[str]) -> None:
        for step in steps:
            await self.take(step)
        self.files.heal()
        await self.writer.close()
        self.poll(1_000)
        assert self.posted == self.written
        for reader in self.readers.values():
            reader.close()

    async def take(self, step: str) -> None:
        if step == "durable":
            await self.writer.append_durable(self.next())
        elif step == "written":
            await self.writer.append_written(self.next())
        elif step == "burst":
            await asyncio.gather(*(self.writer.append_durable(self.next()) for _ in range(40)))
        elif step == "sync fails":
            self.files.fail("sync")
        elif step == "prune":
            for path, cursor in self.cursors.items():
                if path.exists():
                    prune(path, posted_seq=cursor, before_ms=8)
        elif step in ("crash", "end"):
            self.files.heal()
            await self.end(step)
        else:
            self.poll(1 if step == "poll one" else 1_000)

    async def end(self, step: str) -> None:
        if step == "crash":
            self.writer.abandon()
        else:
            await self.writer.close()
        self.writer = self.restart()

    def next(self) -> Void:
        record = void(len(self.written), size=len(self.written) * 131 % 900)
        self.written.append(record.request_id)
        return record

    def poll(self, limit: int) -> None:
        for info in list_epochs(self.slot):
            reader = self.readers.setdefault(info.path, JournalReader(info.path))
            frames = reader.read(self.cursors.get(info.path, 0), limit)
            for frame in frames:
                assert isinstance(frame.record, Void)
                self.posted.append(frame.record.request_id)
                self.cursors[info.path] = frame.seq
            if len(frames) == limit:
                return
        assert self.posted == self.written[: len(self.posted)]
