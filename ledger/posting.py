"""The poster: settled records go from the journals into SQL, in batches, exactly once in effect.

A batch is one transaction: the cursor is moved first, by compare-and-set under the epoch's fence, then everything the
frames up to it mean is written. Posting again, from another process or in other batches, finds the cursor moved on.
What SQL refuses is narrowed down to the one record, which goes to suspense, and posting goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.audit import By
from ledger.database import Database
from ledger.entries import AccountInfo, Entries, RefusedRecord
from ledger.errors import JournalDamaged, LedgerError, LedgerUnavailable
from ledger.journal.format import EPOCH_CLOSED, INTENT, PROGRESS, Frame
from ledger.journal.pruning import prune
from ledger.journal.reader import JournalReader
from ledger.journal.slots import EpochInfo, host_id, list_epochs, list_slots
from ledger.months import late_for_teams
from ledger.partitions import ensure_partitions
from ledger.periods import still_ahead
from ledger.posting_sql import account_infos, close_epoch, cover_again, is_outage, is_refusal, suspend, write_entries
from ledger.records import EpochClosed, Settle, decode
from ledger.schema import batches, epochs, idempotency_claims
from ledger.topups import expire_grants

log = structlog.get_logger(__name__)

BATCH_FRAMES = 4_000
POLL_S = 0.05
HOUSEKEEPING_MS = 600_000
KEPT_MS = 7 * 86_400_000
"""Journals are kept for this long after they are posted: a database restored from a backup needs them."""


GIVEN_UP = 1 << 62
"""What a lost epoch had not posted counts as posted: nobody waits for it any more."""


class LostRace(LedgerError):
    """Another poster moved the cursor, or the epoch was closed or declared lost: look again."""


class _Epoch:
    """One epoch that is being posted: its reader, and where its cursor stood when we last looked."""

    def __init__(self, slot_id: str, info: EpochInfo, cursor: int) -> None:
        self.slot_id = slot_id
        self.info = info
        self.cursor = cursor
        self.reader = JournalReader(info.path)


class Poster:
    """Posts every slot under one journal directory. One is enough; two do not harm each other."""

    def __init__(
        self,
        db: Database,
        journal_dir: Path,
        *,
        batch_frames: int = BATCH_FRAMES,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self.db = db
        self.journal_dir = journal_dir
        self.batch_frames = batch_frames
        self._clock = clock or (lambda: time.time_ns() // 1_000_000)
        self._open: dict[Path, _Epoch] = {}
        self._closed: set[Path] = set()
        self._accounts: dict[str, AccountInfo] = {}
        self._zones: dict[str, str] = {}
        self._next_housekeeping_ms = 0
        self._partitioned = False
        self._complaints: dict[str, str] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Post until told to stop, then what is left. SQL away: try again, a little later each time, for ever."""
        pause = POLL_S
        while not stop.is_set():
            try:
                await self._partition()
                posted = await self.post_once()
                await self._keep_house()
                pause = 0.0 if posted >= self.batch_frames else POLL_S
            except LedgerUnavailable as error:
                pause = min(2.0, max(0.25, pause * 2))
                log.warning("posting waits", error=str(error), again_in_s=pause)
            try:
                await asyncio.wait_for(stop.wait(), pause or 0.001)
            except TimeoutError:
                pass
        try:
            await self.drain()
        except LedgerUnavailable as error:
            log.warning("stopped with records unposted", error=str(error))
        self.close()

    async def drain(self) -> None:
        """Post until nothing durable is left."""
        await self._partition()
        while await self.post_once(whole=True):
            pass

    async def post_once(self, *, whole: bool = False) -> int:
        """One pass over all slots, a batch or so each. Returns how many frames were posted.

        `whole`: post also a stretch that means nothing in SQL yet (intents alone), which otherwise waits for more.
        """
        posted = 0
        for slot_dir in list_slots(self.journal_dir):
            slot_id = f"{host_id(self.journal_dir)}/{slot_dir.name}"
            try:
                posted += await self._post_slot(slot_id, slot_dir, whole)
            except LostRace:
                self._forget(slot_dir)
            except JournalDamaged as error:
                self._complain(slot_id, error)
            except BaseException as error:
                self._forget(slot_dir)
                if is_outage(error):
                    raise LedgerUnavailable(f"the database is not available: {error}") from error
                raise
        return posted

    def close(self) -> None:
        for epoch in self._open.values():
            epoch.reader.close()
        self._open.clear()

    async def _post_slot(self, slot_id: str, slot_dir: Path, whole: bool) -> int:
        """The slot's epochs in order; a later one begins when the one before it has nothing left."""
        posted = 0
        for info in list_epochs(slot_dir):
            if info.path in self._closed:
                continue
            epoch = await self._epoch(slot_id, info)
            if epoch is None:
                continue
            done = await self._post_epoch(epoch, whole)
            posted += done
            if done >= self.batch_frames:
                break
        return posted

    async def _epoch(self, slot_id: str, info: EpochInfo) -> _Epoch | None:
        found = self._open.get(info.path)
        if found is not None:
            return found
        query = select(epochs.c.cursor_seq, epochs.c.state, epochs.c.journal_uuid).where(
            epochs.c.slot_id == slot_id, epochs.c.epoch == info.epoch
        )
        async with self.db.read() as c:
            row = (await c.execute(query)).one_or_none()
        if row is None:
            return None  # SQL is told of an epoch before its first frame; a restored database is told at recovery
        if row.state != "open" or row.journal_uuid != info.journal_uuid:
            self._closed.add(info.path)
            return None
        epoch = self._open[info.path] = _Epoch(slot_id, info, row.cursor_seq)
        return epoch

    async def _post_epoch(self, epoch: _Epoch, whole: bool) -> int:
        frames = epoch.reader.read(epoch.cursor, self.batch_frames)
        if not frames:
            return 0
        if len(frames) < self.batch_frames and not whole and all(f.type in (INTENT, PROGRESS) for f in frames):
            mark = epoch.reader.mark()
            if mark is None or not mark.closed:
                return 0
        closing = next((i for i, frame in enumerate(frames) if frame.type == EPOCH_CLOSED), None)
        if closing == 0:
            record = frames[0].record
            assert isinstance(record, EpochClosed)
            await self._close_epoch(epoch, frames[0], record.epoch)
            return 1
        frames = frames[:closing]
        await self._post(epoch, frames)
        return len(frames)

    async def _post(self, epoch: _Epoch, frames: list[Frame]) -> None:
        """One batch; when SQL refuses it, once more with what its leases lack; then its halves, down to the record that
        is refused."""
        if await self._refused(epoch, frames) is None:
            return
        reason = await self._refused(epoch, frames, cover=True)
        if reason is None:
            return
        if len(frames) > 1:
            middle = len(frames) // 2
            await self._post(epoch, frames[:middle])
            await self._post(epoch, frames[middle:])
        else:
            await self._suspend(epoch, frames[0], reason)

    async def _refused(self, epoch: _Epoch, frames: list[Frame], *, cover: bool = False) -> str | None:
        """Why SQL refuses the frames; None: they are posted."""
        try:
            await self._apply(epoch, frames, cover)
        except RefusedRecord as refused:
            return str(refused)
        except Exception as error:
            if not is_refusal(error):
                raise
            return f"{type(error).__name__}: {error}"
        return None

    async def _apply(self, epoch: _Epoch, frames: list[Frame], cover: bool) -> None:
        now_ms = self._clock()
        records = [(f, decode(f.payload)) for f in frames if f.type not in (INTENT, PROGRESS)]
        settled = [record for _, record in records if isinstance(record, Settle)]
        async with self.db.begin() as c:
            batch_id = await self._advance(c, epoch, frames, len(settled))
            new = {charge.account_id for settle in settled for charge in settle.charges} - self._accounts.keys()
            if new:
                self._accounts |= await account_infos(c, new)
            late = await self._late(c, settled)
            entries = Entries(epoch.slot_id, epoch.info.epoch, batch_id, self._accounts, late)
            for frame, record in records:
                entries.add(frame.seq, frame.payload, record)
            if cover:
                await cover_again(c, entries)
            await write_entries(c, entries, now_ms)
        epoch.cursor = frames[-1].seq

    async def _late(self, c: AsyncConnection, settled: list[Settle]) -> dict[tuple[str, str], str]:
        """(team, period) → the month that bills what comes too late for it. No close comes before our COMMIT."""
        wanted = {(settle.team_id, settle.period) for settle in settled}
        return await late_for_teams(c, wanted, self._zones)

    async def _suspend(self, epoch: _Epoch, frame: Frame, reason: str) -> None:
        async with self.db.begin() as c:
            await self._advance(c, epoch, [frame], 0)
            known = await suspend(c, epoch.slot_id, epoch.info.epoch, frame, reason, self._clock())
        if not known:
            log.error("record in suspense", slot=epoch.slot_id, seq=frame.seq, reason=reason)
        epoch.cursor = frame.seq

    async def _close_epoch(self, epoch: _Epoch, frame: Frame, closing: int) -> None:
        """All that `closing` left open is posted above; if its journal is posted to the end, its leases go back."""
        if closing != epoch.info.epoch:
            await self._drain_older(epoch, closing)
        async with self.db.begin() as c:
            await self._advance(c, epoch, [frame], 0)
            await close_epoch(c, epoch.slot_id, closing)
        log.info("epoch closed", slot=epoch.slot_id, epoch=closing)
        epoch.cursor = frame.seq
        for info in list_epochs(epoch.info.path.parent):
            if info.epoch == closing:
                self._closed.add(info.path)
                if info.path in self._open:
                    self._open.pop(info.path).reader.close()

    async def _drain_older(self, epoch: _Epoch, closing: int) -> None:
        """Raises JournalDamaged while the older epoch is not here, or not posted to its very end."""
        query = select(epochs.c.journal_uuid, epochs.c.state).where(
            epochs.c.slot_id == epoch.slot_id, epochs.c.epoch == closing
        )
        async with self.db.read() as c:
            row = (await c.execute(query)).one_or_none()
        if row is None or row.state != "open":
            return
        for info in list_epochs(epoch.info.path.parent):
            if (info.epoch, info.journal_uuid) != (closing, row.journal_uuid):
                continue
            older = await self._epoch(epoch.slot_id, info)
            while older is not None and await self._post_epoch(older, whole=True):
                pass
            mark = older.reader.mark() if older is not None else None
            if older is not None and mark is not None and mark.closed and mark.seq == older.cursor:
                return
        raise JournalDamaged(f"epoch {closing} of {epoch.slot_id} is not posted to its end: its leases stay locked")

    async def _advance(self, c: AsyncConnection, epoch: _Epoch, frames: list[Frame], rows: int) -> str:
        """Compare-and-set of the cursor, and the batch that it stands for; returns the batch's id. Raises LostRace."""
        e, last = epochs.c, frames[-1]
        moved = await c.execute(
            update(epochs)
            .where(e.slot_id == epoch.slot_id, e.epoch == epoch.info.epoch, e.journal_uuid == epoch.info.journal_uuid)
            .where(e.cursor_seq == epoch.cursor, e.state == "open")
            .values(cursor_seq=last.seq, chain_hash=last.chain_hash.hex())
        )
        if moved.rowcount != 1 or frames[0].seq != epoch.cursor + 1:
            raise LostRace(f"the cursor of {epoch.slot_id} in epoch {epoch.info.epoch} is not at {epoch.cursor}")
        batch = {
            "id": f"{epoch.slot_id}:{epoch.info.epoch}:{frames[0].seq}",
            "slot_id": epoch.slot_id,
            "epoch": epoch.info.epoch,
            "first_seq": frames[0].seq,
            "last_seq": last.seq,
            "chain_hash": last.chain_hash.hex(),
            "rows": rows,
            "at_ms": self._clock(),
        }
        await c.execute(insert(batches).values(batch))
        return str(batch["id"])

    def _forget(self, slot_dir: Path) -> None:
        """What we remember of a slot may be out of date: read it again from SQL."""
        for path in [path for path in self._open if path.parent == slot_dir]:
            self._open.pop(path).reader.close()

    def _complain(self, slot_id: str, error: JournalDamaged) -> None:
        if self._complaints.get(slot_id) != str(error):
            self._complaints[slot_id] = str(error)
            log.error("posting of this slot stands still", slot=slot_id, error=str(error))

    async def _partition(self) -> None:
        """Before the first row of a new ledger: one that is moved later vanishes from a snapshot that is being read, as
        by the proof."""
        if not self._partitioned:
            async with self.db.begin() as c:
                await ensure_partitions(c, self._clock())
            self._partitioned = True

    async def _keep_house(self) -> None:
        """Now and then: make partitions, book what expired, forget replayable answers after their day, remove old
        posted segments."""
        now_ms = self._clock()
        if still_ahead(self._next_housekeeping_ms, now_ms, HOUSEKEEPING_MS):
            return
        self._next_housekeeping_ms = now_ms + HOUSEKEEPING_MS
        await self._prune(now_ms - KEPT_MS)
        claims = idempotency_claims.c
        async with self.db.begin() as c:
            await ensure_partitions(c, now_ms)
        async with self.db.begin() as c:
            await expire_grants(c, By("poster", now_ms))
        async with self.db.begin() as c:
            await c.execute(
                update(idempotency_claims)
                .where(claims.answer_expires_ms < now_ms, claims.answer.is_not(None))
                .values(answer=None)
            )

    async def _prune(self, before_ms: int) -> None:
        """Posted segments are kept for as long as the database's backups may be behind."""
        async with self.db.read() as c:
            query = select(epochs.c.slot_id, epochs.c.epoch, epochs.c.cursor_seq, epochs.c.state)
            rows = (await c.execute(query)).all()
        posted = {(row.slot_id, row.epoch): GIVEN_UP if row.state == "lost" else row.cursor_seq for row in rows}
        unrecovered = {(row.slot_id, row.epoch) for row in rows if row.state == "open"}
        for slot_dir in list_slots(self.journal_dir):
            slot_id = f"{host_id(self.journal_dir)}/{slot_dir.name}"
            found = list_epochs(slot_dir)
            for info in found:
                seq = posted.get((slot_id, info.epoch))
                if seq is None or (info is not found[-1] and (slot_id, info.epoch) in unrecovered):
                    continue  # an older one that SQL has still open is the only evidence that frees its leases
                try:
                    removed = await asyncio.to_thread(prune, info.path, posted_seq=seq, before_ms=before_ms)
                except (JournalDamaged, OSError) as error:
                    log.warning("a journal cannot be pruned", epoch=str(info.path), error=str(error))
                    continue
                if removed:
                    log.info("pruned", epoch=str(info.path), segments=removed)
