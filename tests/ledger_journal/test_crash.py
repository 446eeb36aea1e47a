"""kill -9 of real processes: whatever the moment, an acknowledged record is there and the journal opens again."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ledger.journal import Files, JournalReader, JournalWriter, list_epochs
from ledger.records import Record, Void
from tests.ledger_journal.material import DyingFiles, open_writer, records_of, void

RECORDS = 60


def in_child(work: Callable[[int], Coroutine[Any, Any, None]]) -> tuple[int, int]:
    """Runs `work(pipe)` in a forked process; returns its pid and the end of the pipe to read from."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            asyncio.run(work(writing))
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(writing)
    return pid, reading


def acknowledged(reading: int) -> set[int]:
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    return {int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)}


async def append_all(writer: JournalWriter, pipe: int, count: int, clients: int) -> None:
    """Each client appends its share, one durable record after the other, and reports each on the pipe."""

    async def client(first: int) -> None:
        for number in range(first, count, clients):
            writer.append(void(100_000 + number))
            await writer.append_durable(void(number, size=number * 37 % 900))
            os.write(pipe, number.to_bytes(4, "little"))

    await asyncio.gather(*(client(first) for first in range(clients)))


def assert_kept(found: list[Record], acks: set[int]) -> None:
    kept = {record.request_id for record in found if isinstance(record, Void)}
    missing = [number for number in acks if void(number).request_id not in kept]
    assert missing == []
    for record in found:
        assert isinstance(record, Void)
        number = int(record.request_id[8:])
        assert record == (void(number) if number >= 100_000 else void(number, size=number * 37 % 900))
    assert len(kept) == len(found), "a record is there twice"


@pytest.mark.parametrize("seed", range(12))
def test_kill_9_at_any_moment_keeps_every_acknowledged_record(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    slot = tmp_path / "0"
    acks_before: list[set[int]] = []
    epochs: list[Path] = []
    for epoch in (1, 2, 3):
        wait_s = chance.uniform(0.0, 0.12)

        async def work(pipe: int, epoch: int = epoch) -> None:
            await append_all(open_writer(slot, epoch), pipe, 100_000, clients=16)

        pid, reading = in_child(work)
        while not (found := sorted(slot.glob(f"epoch-{epoch:06d}-*"))):
            time.sleep(0.002)
        time.sleep(wait_s)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        acks_before.append(acknowledged(reading))
        epochs += found
    open_writer(slot, 4).abandon()
    for epoch_dir, acks in zip(epochs, acks_before, strict=True):
        assert_kept(records_of(epoch_dir), acks)


def test_a_reader_in_another_process_follows_a_writer_through_its_segments(tmp_path: Path) -> None:
    slot = tmp_path / "0"

    async def work(pipe: int) -> None:
        writer = open_writer(slot)
        await append_all(writer, pipe, 400, clients=8)
        await writer.close()

    pid, reading = in_child(work)
    while not (epochs := list_epochs(slot)):
        time.sleep(0.002)
    reader = JournalReader(epochs[0].path)
    found: list[Record] = []
    while (mark := reader.mark()) is None or not mark.closed or len(found) < mark.seq:
        frames = reader.read(len(found), 50)
        assert [frame.seq for frame in frames] == [len(found) + 1 + index for index in range(len(frames))]
        found += [frame.record for frame in frames]
    os.waitpid(pid, 0)
    assert_kept(found, acknowledged(reading))
    assert len(found) == 800


def test_death_before_every_operation_of_an_epochs_life_keeps_every_acknowledged_record(tmp_path: Path) -> None:
    at, finished = 0, False
    while not finished:
        at += 1
        slot = tmp_path / str(at)

        async def work(pipe: int, at: int = at, slot: Path = slot) -> None:
            writer = open_writer(slot, files=DyingFiles(at))
            await append_all(writer, pipe, RECORDS, clients=8)
            await writer.close()

        pid, reading = in_child(work)
        acks = acknowledged(reading)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, 99)
        finished = code == 0
        open_writer(slot, 2).abandon()
        found = [path for path in slot.iterdir() if path.name.startswith("epoch-000001")]
        assert found or not acks
        if found:
            assert_kept(records_of(found[0]), acks)
        shutil.rmtree(slot)
    assert at > 60


def test_death_before_every_operation_of_a_restart_loses_nothing(tmp_path: Path) -> None:
    async def life(pipe: int) -> None:
        writer = open_writer(tmp_path / "original")
        await append_all(writer, pipe, RECORDS, clients=8)
        for number in range(RECORDS, RECORDS + 9):
            await writer.append_written(void(number, size=number * 37 % 900))
        os._exit(0)

    pid, reading = in_child(life)
    acks = acknowledged(reading) | set(range(RECORDS, RECORDS + 9))
    os.waitpid(pid, 0)
    at, code = 0, 99
    while code == 99:
        at += 1
        slot = tmp_path / str(at)
        shutil.copytree(tmp_path / "original", slot)

        async def restart(_pipe: int, at: int = at, slot: Path = slot) -> None:
            open_writer(slot, 2, files=DyingFiles(at)).abandon()

        pid, reading = in_child(restart)
        os.close(reading)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        open_writer(slot, 3).abandon()
        (epoch_dir,) = (path for path in slot.iterdir() if path.name.startswith("epoch-000001"))
        assert_kept(records_of(epoch_dir), acks)
        shutil.rmtree(slot)
    assert code == 0
    assert at > 10


def test_files_write_on_after_a_short_write(tmp_path: Path) -> None:
    class Short(Files):
        def pwrite(self, fd: int, data: bytes, offset: int) -> int:
            return super().pwrite(fd, data[:7], offset)

    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    Short().write_all(fd, bytes(range(50)), 3)
    os.close(fd)
    assert (tmp_path / "file").read_bytes() == bytes(3) + bytes(range(50))
