"""Slices of money and budget that this slot takes from SQL and spends without a round trip.

SQL is the authority: a slice is taken by one conditional UPDATE of its account and a lease row in the same
transaction, so Σ leased over all slots never exceeds what an account can give. A lease is freed only by whoever holds
it, or by the poster once the journal of a closed epoch is posted; never by a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from sqlalchemy import and_, func, or_, select, update
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from ledger.billing import slice_size
from ledger.database import CommitUnknown, Database
from ledger.errors import LedgerUnavailable
from ledger.money import Currency
from ledger.periods import still_ahead
from ledger.schema import accounts, leases, slots
from ledger.slices import Slice, adopt

log = structlog.get_logger(__name__)

HEARTBEAT_FRESH_MS = 10_000
"""A slot that has not been heard of for so long is not waited for. Its leases stay its own all the same."""
RECALL_PATIENCE_S = 1.5
RECALL_POLL_S = 0.03
EMPTY_FOR_MS = 50
"""After an account had nothing more and nobody returned anything, it is not asked again for so long."""
DRY_FOR_MS = 5_000
"""For so long a funding account that had nothing more is passed over for the next one."""
RETRY_AFTER_MS = 1_000
DOWN_FOR_MS = 500
"""After SQL failed, do not knock again for so long: who needs it is told at once."""


class Fenced(LedgerUnavailable):
    """Another process owns this slot now: this one may not spend another pico."""


class Leases:
    """All slices of one slot in one epoch."""

    def __init__(self, db: Database, slot_id: str, epoch: int, journal_uuid: str, clock: Callable[[], int]) -> None:
        self.db = db
        self.slot_id = slot_id
        self.epoch = epoch
        self.journal_uuid = journal_uuid
        self.slices: dict[str, Slice] = {}
        self.live_slots = 1
        self.fenced = False
        self.down_since_ms: int | None = None
        self._last_failure_ms = -DOWN_FOR_MS
        self._recalls: dict[str, asyncio.Task[bool]] = {}
        self._recalled_in_vain_until_ms: dict[str, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clock = clock

    def slice(self, account_id: str, kind: str, currency: Currency) -> Slice:
        """The slice of an account; empty until something is taken."""
        found = self.slices.get(account_id)
        if found is None:
            found = self.slices[account_id] = Slice(account_id, kind, currency, self._clock())
        return found

    async def take(self, slice: Slice, needed_pico: int) -> int:
        """Lease more of an account: at least `needed_pico` if it is there, else what is left. Returns how much came.

        Those who ask at the same time share one trip. Raises LedgerUnavailable (Fenced when the slot was taken over).
        """
        if still_ahead(slice.empty_until_ms, self._clock(), EMPTY_FOR_MS):
            return 0
        slice.wanted += needed_pico
        try:
            if slice.refill is None:
                slice.refill = self._spawn(self._refill(slice))
            return await asyncio.shield(slice.refill)
        finally:
            slice.wanted -= needed_pico

    def take_ahead(self, slice: Slice) -> None:
        """Start leasing more before the slice runs out; nobody waits for it."""
        if slice.refill is None and not self._knocked_in_vain():
            slice.refill = self._spawn(self._refill(slice))
            slice.refill.add_done_callback(_forget_failure)

    async def give_back(self, slice: Slice, amount_pico: int | None = None) -> int:
        """Return what is owed, and of what nobody has drawn so much, all of it by default. Clears a recall, also with
        nothing to return."""
        return await asyncio.shield(self._spawn(self._give_back(slice, amount_pico)))

    async def recall(self, account_id: str) -> bool:
        """Ask the other slots for what lies idle there; wait a bounded moment. True: something is free in SQL now."""
        if still_ahead(self._recalled_in_vain_until_ms.get(account_id, 0), self._clock(), EMPTY_FOR_MS):
            return False
        running = self._recalls.get(account_id)
        if running is None:
            running = self._recalls[account_id] = self._spawn(self._recall(account_id))
            running.add_done_callback(lambda _: self._recalls.pop(account_id, None))
        return await asyncio.shield(running)

    async def recalled(self, c: AsyncConnection) -> list[Slice]:
        """Which slices other slots are waiting for. Also learns how many slots are alive and whether we are fenced."""
        fresh = and_(slots.c.live == 1, slots.c.heartbeat_ms >= self._clock() - HEARTBEAT_FRESH_MS)
        mine = slots.c.id == self.slot_id
        found = (await c.execute(select(slots.c.id, slots.c.epoch, slots.c.journal_uuid).where(or_(fresh, mine)))).all()
        own = [row for row in found if row.id == self.slot_id]
        self._check_epoch(own[0] if own else None)
        self.live_slots = len(found)
        wanted = await c.execute(select(leases.c.account_id).where(self._mine(), leases.c.recall == 1))
        return [self.slices[row.account_id] for row in wanted if row.account_id in self.slices]

    async def reread(self, c: AsyncConnection) -> list[str]:
        """After a reconnect: believe SQL, not memory. Returns the accounts whose lease is smaller there than here (a
        fail-over lost commits): their free amount shrinks, below zero if need be, and so they stop being spent."""
        revisions = {slice.account_id: slice.revision for slice in self.slices.values()}
        rows = {row.account_id: row for row in await c.execute(select(leases).where(self._mine()))}
        lost = []
        for slice in list(self.slices.values()):
            if slice.lock.locked() or revisions.get(slice.account_id) != slice.revision:
                continue  # an operation of ours is under way, or was while we read: it knows better
            if not slice.synced:
                continue  # the server may still be committing what we lost sight of: `resync` reads under its lock
            before = slice.taken - slice.returned
            adopt(slice, rows.get(slice.account_id))
            if slice.taken - slice.returned < before:
                lost.append(slice.account_id)
        return lost

    def resync(self) -> None:
        """Start to find out how the operations ended whose COMMIT we lost sight of; nobody waits for it."""
        for slice in self.slices.values():
            if not slice.synced and not slice.lock.locked():
                self._spawn(self._resync(slice)).add_done_callback(_forget_failure)

    async def close(self) -> int:
        """Return everything that is free. Returns how much open holds still keep."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for slice in self.slices.values():
            if slice.free > 0 or slice.owed or not slice.synced:
                await self._give_back(slice, None)
        return sum(slice.held() for slice in self.slices.values())

    def hope_again(self) -> None:
        """Something changed: accounts that had nothing more may have."""
        self._recalled_in_vain_until_ms.clear()
        for slice in self.slices.values():
            slice.dry = False
            slice.empty_until_ms = 0

    def failed(self) -> None:
        """SQL did not answer."""
        self._last_failure_ms = self._clock()
        if self.down_since_ms is None:
            self.down_since_ms = self._last_failure_ms

    # -- in SQL -----------------------------------------------------------------------------------------------------

    async def _refill(self, slice: Slice) -> int:
        await asyncio.sleep(0)  # let all who are short in this tick add what they need
        try:
            async with slice.lock:
                return await self._guarded(slice, self._take, slice)
        finally:
            slice.refill = None

    async def _give_back(self, slice: Slice, amount_pico: int | None) -> int:
        async with slice.lock:
            return await self._guarded(slice, self._return, slice, amount_pico)

    async def _resync(self, slice: Slice) -> int:
        async def nothing() -> int:
            return 0

        async with slice.lock:
            return await self._guarded(slice, nothing)

    async def _guarded(self, slice: Slice, operation: Callable[..., Any], *args: Any) -> int:
        if self.fenced:
            raise Fenced("another process has taken over this slot; restart this worker")
        if self._knocked_in_vain():
            raise LedgerUnavailable("the database is not available", RETRY_AFTER_MS)
        try:
            if not slice.synced:
                await self._sync(slice)
            done: int = await operation(*args)
        except CommitUnknown:
            slice.synced = False
            self.failed()
            raise
        except LedgerUnavailable:
            if slice.synced:  # else an earlier return may have arrived: only SQL can tell
                slice.free += slice.on_its_way
                slice.on_its_way = 0
            self.failed()
            raise
        except BaseException as error:  # SQL refused what it never should: read what it says before going on
            slice.synced = False
            if isinstance(error, DBAPIError):
                log.error("lease refused", account=slice.account_id, error=str(error.orig))
                raise LedgerUnavailable(f"a lease on {slice.account_id} was refused", RETRY_AFTER_MS) from error
            raise
        return done

    async def _sync(self, slice: Slice) -> None:
        """Read what SQL says about the slice; waits for a transaction of ours whose end we have not seen."""
        query = select(leases).where(self._mine(), leases.c.account_id == slice.account_id).with_for_update()
        async with self.db.begin() as c:
            row = (await c.execute(query)).one_or_none()
        adopt(slice, row)

    async def _take(self, slice: Slice) -> int:
        async with self.db.begin() as c:
            await self._require_epoch(c)
            free = await self._free(c, slice.account_id, lock=True)
            wanted = max(0, slice.wanted - slice.free)
            amount = slice_size(wanted, free, self.live_slots)
            if amount:
                await self._lease(c, slice, amount)
        if amount:
            slice.taken += amount
            slice.revision += 1
            slice.free += amount
        slice.low_water = amount // 4 if amount < free else 0
        if amount >= free:
            now = self._clock()
            slice.dry, slice.dry_until_ms = True, now + DRY_FOR_MS
            slice.empty_until_ms = now + EMPTY_FOR_MS if amount < wanted else 0
        return amount

    async def _lease(self, c: AsyncConnection, slice: Slice, amount: int) -> None:
        a = accounts.c
        done = await c.execute(
            update(accounts)
            .where(a.id == slice.account_id, a.target_pico - a.debits_pico - a.leased_pico >= amount)
            .values(leased_pico=a.leased_pico + amount)
        )
        if done.rowcount != 1:
            raise LedgerUnavailable(f"account {slice.account_id} changed while it was leased from", 100)
        make = pg_insert if self.db.dialect == "postgresql" else sqlite_insert
        row = {"slot_id": self.slot_id, "epoch": self.epoch, "account_id": slice.account_id}
        done = await c.execute(
            make(leases)
            .values(**row, taken_pico=amount, returned_pico=0, posted_pico=0, revision=slice.revision + 1, recall=0)
            .on_conflict_do_update(
                index_elements=["slot_id", "epoch", "account_id"],
                set_={"taken_pico": leases.c.taken_pico + amount, "revision": leases.c.revision + 1},
                where=leases.c.revision == slice.revision,
            )
        )
        if done.rowcount != 1:
            slice.synced = False
            raise LedgerUnavailable(f"the lease on {slice.account_id} is not the one this worker knows", 100)

    async def _return(self, slice: Slice, amount_pico: int | None) -> int:
        owed = slice.returnable_debt()
        free = max(0, slice.free if amount_pico is None else min(amount_pico, slice.free))
        slice.free -= free
        slice.on_its_way = free  # what is owed stays so until it has arrived
        amount = free + owed
        async with self.db.begin() as c:
            await self._require_epoch(c)
            if amount:
                await c.execute(
                    update(accounts)
                    .where(accounts.c.id == slice.account_id)
                    .values(leased_pico=accounts.c.leased_pico - amount)
                )
            done = await c.execute(
                update(leases)
                .where(self._mine(), leases.c.account_id == slice.account_id, leases.c.revision == slice.revision)
                .values(returned_pico=leases.c.returned_pico + amount, revision=leases.c.revision + 1, recall=0)
            )
            if done.rowcount != 1 and amount:
                slice.synced = False
                raise LedgerUnavailable(f"the lease on {slice.account_id} is not the one this worker knows", 100)
        slice.revision += done.rowcount
        slice.returned += amount
        slice.owed -= owed
        slice.on_its_way = 0
        return amount

    async def _recall(self, account_id: str) -> bool:
        alive = (
            select(slots.c.id)
            .where(slots.c.id == leases.c.slot_id, slots.c.epoch == leases.c.epoch, slots.c.live == 1)
            .where(slots.c.heartbeat_ms >= self._clock() - HEARTBEAT_FRESH_MS)
            .exists()
        )
        outstanding = leases.c.taken_pico - leases.c.returned_pico - leases.c.posted_pico
        others = and_(leases.c.account_id == account_id, leases.c.slot_id != self.slot_id)
        try:
            async with self.db.begin() as c:
                asked = await c.execute(update(leases).where(others, outstanding > 0, alive).values(recall=1))
            deadline = asyncio.get_running_loop().time() + RECALL_PATIENCE_S
            pending = asked.rowcount
            while True:
                async with self.db.read() as c:
                    if pending:
                        waiting = select(func.count()).select_from(leases).where(others, leases.c.recall == 1, alive)
                        pending = (await c.execute(waiting)).scalar_one()
                    free = await self._free(c, account_id)
                if free > 0 or not pending or asyncio.get_running_loop().time() > deadline:
                    return self._after_recall(account_id, free > 0)
                await asyncio.sleep(RECALL_POLL_S)
        except LedgerUnavailable:
            self.failed()
            raise

    def _after_recall(self, account_id: str, freed: bool) -> bool:
        if freed:
            self._recalled_in_vain_until_ms.pop(account_id, None)
            if account_id in self.slices:
                self.slices[account_id].empty_until_ms = 0
        else:
            self._recalled_in_vain_until_ms[account_id] = self._clock() + EMPTY_FOR_MS
        return freed

    async def _free(self, c: AsyncConnection, account_id: str, *, lock: bool = False) -> int:
        a = accounts.c
        query = select(a.target_pico, a.debits_pico, a.leased_pico).where(a.id == account_id)
        row = (await c.execute(query.with_for_update() if lock else query)).one_or_none()
        return 0 if row is None else int(row.target_pico - row.debits_pico - row.leased_pico)

    async def _require_epoch(self, c: AsyncConnection) -> None:
        query = select(slots.c.epoch, slots.c.journal_uuid).where(slots.c.id == self.slot_id)
        self._check_epoch((await c.execute(query.with_for_update(read=True))).one_or_none())

    def _check_epoch(self, row: Any) -> None:
        if row is None or (row.epoch, row.journal_uuid) != (self.epoch, self.journal_uuid):
            self.fenced = True
            log.error("fenced", slot=self.slot_id, epoch=self.epoch, now=None if row is None else row.epoch)
            raise Fenced("another process has taken over this slot; restart this worker")

    def _mine(self) -> Any:
        return and_(leases.c.slot_id == self.slot_id, leases.c.epoch == self.epoch)

    def _knocked_in_vain(self) -> bool:
        return self.down_since_ms is not None and 0 <= self._clock() - self._last_failure_ms < DOWN_FOR_MS

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _forget_failure(task: asyncio.Task[int]) -> None:
    if not task.cancelled():
        task.exception()
