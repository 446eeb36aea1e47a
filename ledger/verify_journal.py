"""The equations between SQL and the journals: batches cover every frame up to the cursor, and frames are the rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import exists, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.errors import JournalDamaged
from ledger.journal import SETTLE, EpochInfo, Frame, JournalReader, host_id, list_epochs, list_slots
from ledger.records import Settle
from ledger.schema import batches, epochs, leases, suspense, usage
from ledger.suspense import RETRIED

PAGE = 1_000


async def check_batches(c: AsyncConnection) -> tuple[int, str | None]:
    """Of each epoch, batches follow each other without gap or overlap up to the cursor, and hold the rows they say."""
    rows = select(usage.c.slot_id, usage.c.epoch, func.count().label("rows")).group_by(usage.c.slot_id, usage.c.epoch)
    rows = rows.where(usage.c.batch_id.not_like(f"{RETRIED}%"))
    posted = {(row.slot_id, row.epoch): row.rows for row in await c.execute(rows)}
    counted = 0
    for epoch in (await c.execute(select(epochs).order_by(epochs.c.slot_id, epochs.c.epoch))).all():
        seq, chain, held = 0, "", 0
        where = f"epoch {epoch.epoch} of slot {epoch.slot_id}"
        async for batch in _batches(c, epoch.slot_id, epoch.epoch):
            counted += 1
            if batch.first_seq != seq + 1:
                return counted, f"{where}: a batch begins at frame {batch.first_seq}, the one before ended at {seq}"
            seq, chain, held = batch.last_seq, batch.chain_hash, held + batch.rows
        if (seq, chain) != (epoch.cursor_seq, epoch.chain_hash):
            return counted, f"{where}: batches end at frame {seq}, the cursor is at {epoch.cursor_seq}"
        there = posted.pop((epoch.slot_id, epoch.epoch), 0)
        if held != there:
            return counted, f"{where}: batches hold {held} requests, there are {there}"
    for (slot_id, number), there in posted.items():
        return counted, f"{there} requests belong to epoch {number} of slot {slot_id}, which is not known"
    return counted, None


async def check_journals(c: AsyncConnection, journal_dir: Path) -> tuple[int, str | None, int]:
    """(frames compared, first difference, settled and not yet posted) of all the epochs on this disk."""
    counted = unposted = 0
    lost = await _lost_epoch(c, journal_dir)
    if lost is not None:
        return counted, lost, unposted
    known = {(row.slot_id, row.epoch): row for row in await c.execute(select(epochs))}
    for slot_dir in list_slots(journal_dir):
        slot_id = f"{host_id(journal_dir)}/{slot_dir.name}"
        for info in list_epochs(slot_dir):
            row = known.get((slot_id, info.epoch))
            if row is None or row.journal_uuid != info.journal_uuid:
                # begun after our snapshot, or before a restored one: the next start enters it
                unposted += await asyncio.to_thread(_count_settles, info)
                continue
            check = _Epoch(c, info, slot_id, row.cursor_seq)
            try:
                difference = await check.run()
            except JournalDamaged as error:
                difference = str(error)
            counted += check.counted
            unposted += check.unposted
            if difference is not None:
                return counted, f"epoch {info.epoch} of slot {slot_id}: {difference}", unposted
    return counted, None, unposted


class LostRow(msgspec.Struct, frozen=True):
    """A settled request that was posted, as the journal says it, and whose row is gone."""

    slot_id: str
    epoch: int
    seq: int
    request_id: str
    record: bytes


async def lost_rows(c: AsyncConnection, journal_dir: Path, limit: int) -> list[LostRow]:
    """The posted requests of this host's journals that are neither in the ledger nor in suspense. JournalDamaged."""
    known = {(row.slot_id, row.epoch): row for row in await c.execute(select(epochs))}
    found: list[LostRow] = []
    for slot_dir in list_slots(journal_dir):
        slot_id = f"{host_id(journal_dir)}/{slot_dir.name}"
        for info in list_epochs(slot_dir):
            row = known.get((slot_id, info.epoch))
            if row is not None and row.journal_uuid == info.journal_uuid:
                found += await _Epoch(c, info, slot_id, row.cursor_seq).lost(limit - len(found))
    return found


async def _lost_epoch(c: AsyncConnection, journal_dir: Path) -> str | None:
    """An open epoch of this host that leased or posted something, and whose journal is not here, as after
    `rm -r data/journal`. One that has just begun has done neither."""
    file = journal_dir / "host-id"
    host = file.read_text().strip() if file.exists() else None
    if host is None and c.dialect.name != "sqlite":
        return None  # a machine without gateways proves what is in SQL; the journals are on other hosts
    here = {(f"{host}/{path.name}", info.epoch) for path in list_slots(journal_dir) for info in list_epochs(path)}
    e = epochs.c
    leased = exists().where(leases.c.slot_id == e.slot_id, leases.c.epoch == e.epoch)
    query = select(e.slot_id, e.epoch, e.cursor_seq).where(e.state == "open", (e.cursor_seq > 0) | leased)
    for row in await c.execute(query.order_by(e.slot_id, e.epoch)):
        if host in (None, row.slot_id.rsplit("/", 1)[0]) and (row.slot_id, row.epoch) not in here:
            return (
                f"the journal of epoch {row.epoch} of slot {row.slot_id} is not in {journal_dir}: what it "
                f"settled after frame {row.cursor_seq} is lost. Put it back, or `tallygate journal declare-lost`"
            )
    return None


class _Epoch:
    """One epoch's frames against the batches, rows and suspense that they became."""

    def __init__(self, c: AsyncConnection, info: EpochInfo, slot_id: str, cursor: int) -> None:
        self.counted = 0
        self.unposted = 0
        self._c = c
        self._info = info
        self._slot_id = slot_id
        self._cursor = cursor
        self._found = 0

    async def run(self) -> str | None:
        reader = JournalReader(self._info.path)
        try:
            start = reader.start().seq
            mark = reader.mark()
            if self._cursor > (mark.seq if mark is not None else 0):
                return f"SQL has posted up to frame {self._cursor}, the journal ends before"
            after = start
            marks = _batches(self._c, self._slot_id, self._info.epoch, start)
            batch: Any = await anext(marks, None)
            while frames := await asyncio.to_thread(reader.read, after, PAGE):
                after = frames[-1].seq
                for frame in frames:
                    if batch is not None and frame.seq == batch.last_seq:
                        if frame.chain_hash.hex() != batch.chain_hash:
                            return f"the hash chain at frame {frame.seq} is not the one that was posted"
                        batch = await anext(marks, None)
                difference = await self._compare([frame for frame in frames if frame.type == SETTLE])
                self.counted += len(frames)
                if difference is not None:
                    return difference
            return await self._none_invented(start)
        finally:
            reader.close()

    async def _compare(self, frames: list[Frame]) -> str | None:
        posted = [frame for frame in frames if frame.seq <= self._cursor]
        self.unposted += len(frames) - len(posted)
        ids = {frame.seq: _request_id(frame) for frame in posted}
        known = [request_id for request_id in ids.values() if request_id is not None]
        query = select(usage.c.request_id, usage.c.slot_id, usage.c.epoch, usage.c.seq, usage.c.record)
        rows = {str(row.request_id): row for row in await self._c.execute(query.where(usage.c.request_id.in_(known)))}
        aside = await self._suspended([frame.seq for frame in posted]) if len(rows) < len(posted) else set()
        for frame in posted:
            row = rows.get(ids[frame.seq] or "")
            if row is not None and (row.slot_id, row.epoch, row.seq) == (self._slot_id, self._info.epoch, frame.seq):
                self._found += 1
                if bytes(row.record) != frame.payload:
                    return f"request {row.request_id} is not what frame {frame.seq} says"
            elif frame.seq not in aside and (row is None or bytes(row.record) != frame.payload):
                return f"frame {frame.seq} was posted, and its request is not in the ledger"
        return None

    async def lost(self, limit: int) -> list[LostRow]:
        found: list[LostRow] = []
        reader = JournalReader(self._info.path)
        try:
            after = reader.start().seq
            while len(found) < limit and (frames := await asyncio.to_thread(reader.read, after, PAGE)):
                after = frames[-1].seq
                posted = {f.seq: f for f in frames if f.type == SETTLE and f.seq <= self._cursor}
                ids = {seq: name for seq, frame in posted.items() if (name := _request_id(frame)) is not None}
                query = select(usage.c.request_id).where(usage.c.request_id.in_(ids.values()))
                there = {str(request_id) for request_id in (await self._c.execute(query)).scalars()}
                gone = {seq: name for seq, name in ids.items() if name not in there}
                aside = await self._suspended(list(gone)) if gone else set()
                found += [
                    LostRow(self._slot_id, self._info.epoch, seq, name, posted[seq].payload)
                    for seq, name in gone.items()
                    if seq not in aside
                ]
        finally:
            reader.close()
        return found[:limit]

    async def _suspended(self, seqs: list[int]) -> set[int]:
        query = select(suspense.c.seq).where(
            suspense.c.slot_id == self._slot_id, suspense.c.epoch == self._info.epoch, suspense.c.seq.in_(seqs)
        )
        return set((await self._c.execute(query)).scalars())

    async def _none_invented(self, start: int) -> str | None:
        query = select(func.count()).where(
            usage.c.slot_id == self._slot_id, usage.c.epoch == self._info.epoch, usage.c.seq > start
        )
        there = (await self._c.execute(query)).scalar_one()
        if there != self._found:
            return f"the ledger has {there} requests of it, the journal {self._found}"
        return None


def _request_id(frame: Frame) -> str | None:
    """None: nothing that could be a row."""
    try:
        record = frame.record
        return str(UUID(record.request_id)) if isinstance(record, Settle) else None
    except (msgspec.DecodeError, ValueError):
        return None


def _count_settles(info: EpochInfo) -> int:
    """Of an epoch that SQL does not know. What does not read is left to the start that has to decide on it."""
    counted, after = 0, 0
    try:
        reader = JournalReader(info.path)
    except (JournalDamaged, OSError):
        return 0
    try:
        after = reader.start().seq
        while frames := reader.read(after, PAGE):
            counted += sum(frame.type == SETTLE for frame in frames)
            after = frames[-1].seq
    except (JournalDamaged, OSError):
        pass
    finally:
        reader.close()
    return counted


async def _batches(c: AsyncConnection, slot_id: str, epoch: int, after_seq: int = 0) -> AsyncIterator[Any]:
    """In order; of a pruned epoch those that end after what is gone."""
    b = batches.c
    while True:
        query = select(b.first_seq, b.last_seq, b.chain_hash, b.rows).where(
            b.slot_id == slot_id, b.epoch == epoch, b.last_seq > after_seq
        )
        page = (await c.execute(query.order_by(b.first_seq).limit(PAGE))).all()
        if not page:
            return
        for row in page:
            yield row
        after_seq = page[-1].last_seq
