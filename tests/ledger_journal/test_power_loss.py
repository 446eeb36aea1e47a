"""Power failures at every operation, with and without failing syncs: what was acknowledged is there afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
from pathlib import Path

import pytest

from ledger.errors import LedgerUnavailable
from ledger.journal import JournalWriter, list_epochs
from ledger.records import Record, Void
from tests.ledger_journal.material import UnsyncedFiles, open_writer, records_of, void
from tests.ledger_journal.power import PowerFiles


class Machine:
    """A slot on a disk that may lose power at any operation; each time it does, a copy restarts and is examined."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.slot = directory / "0"
        self.files = PowerFiles(seed)
        self.acknowledged: set[int] = set()
        self.losses = 0
        self.problem: Exception | None = None
        self._directory = directory
        self._chance = random.Random(seed)

    def maybe_lose_power(self) -> None:
        if self.problem is None and self._chance.random() < 0.2:
            try:
                self.lose_power()
            except Exception as problem:  # the journal's thread must not swallow it
                self.problem = problem

    def lose_power(self, promised: list[Record] | None = None) -> None:
        self.losses += 1
        copy = self._directory / f"copy-{self.losses}" / "0"
        copy.mkdir(parents=True)
        self.files.after_power_loss(self.slot, copy)
        epochs = list_epochs(copy)
        open_writer(copy, 9, files=UnsyncedFiles()).abandon()
        found = [record for info in epochs for record in records_of(info.path)]
        if promised is not None:
            assert records_of(epochs[0].path) == promised
        numbers = [int(record.request_id[8:]) for record in found if isinstance(record, Void)]
        assert len(numbers) == len(set(numbers)), "a record is there twice"
        assert self.acknowledged <= set(numbers)
        shutil.rmtree(copy.parent)

    async def use(self, writer: JournalWriter, first: int, count: int) -> None:
        """Several clients append; each acknowledgement is remembered at once. Ends early when the journal stops."""

        async def client(start: int) -> None:
            for number in range(first + start, first + count, 5):
                writer.append(void(100_000 + number))
                await writer.append_durable(void(number, size=self._chance.randrange(1_500)))
                self.acknowledged.add(number)

        await asyncio.gather(*(client(start) for start in range(5)), return_exceptions=True)
        if self.problem is not None:
            raise self.problem


@pytest.mark.parametrize("seed", range(8))
async def test_power_loss_at_any_operation_keeps_every_acknowledged_record(tmp_path: Path, seed: int) -> None:
    machine = Machine(tmp_path, seed)
    machine.files.before = machine.maybe_lose_power
    for epoch in (1, 2):
        writer = open_writer(machine.slot, epoch, files=machine.files)
        await machine.use(writer, epoch * 1_000, 60)
        assert writer.unhealthy() is None
        if epoch == 1:
            writer.abandon()
        else:
            await writer.close()
    machine.lose_power()
    assert len(machine.acknowledged) == 120
    assert machine.losses > 20


@pytest.mark.parametrize("seed", range(8))
async def test_power_loss_with_failing_syncs_keeps_every_acknowledged_record(tmp_path: Path, seed: int) -> None:
    machine = Machine(tmp_path, seed)
    writer = open_writer(machine.slot, files=machine.files)
    machine.files.before = machine.maybe_lose_power
    machine.files.sync_failures = 0.15
    await machine.use(writer, 1_000, 100)
    machine.lose_power()
    machine.files.sync_failures = 0.0
    with contextlib.suppress(LedgerUnavailable):
        await writer.close()
    assert machine.losses > 5


@pytest.mark.parametrize("seed", range(8))
async def test_what_a_restart_reads_after_failed_syncs_is_there_after_a_power_loss_too(
    tmp_path: Path, seed: int
) -> None:
    machine = Machine(tmp_path, seed)
    first = open_writer(machine.slot, files=machine.files)
    await machine.use(first, 1_000, 20)
    machine.files.sync_failures = 1.0
    await machine.use(first, 2_000, 20)
    assert first.unhealthy()
    first.abandon()
    machine.files.sync_failures = 0.0
    second = open_writer(machine.slot, 2, files=machine.files)
    promised = records_of(first.path)
    assert len(promised) > 40  # what the page cache showed is taken, and made durable
    machine.lose_power(promised)
    second.abandon()
