"""Slots of this host that no process has and whose journals still hold leases: recover them, so that these return.

A worker recovers the slot that it takes. Fewer may be started than before, a worker may die while another has taken its
place, or end with requests open: then somebody else of this host must do it, under the slot's lock as always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import structlog
from sqlalchemy import and_, select

from ledger.database import Database
from ledger.errors import JournalDamaged, LedgerUnavailable
from ledger.gate import Gate
from ledger.journal import host_id, list_slots
from ledger.schema import epochs, slots

log = structlog.get_logger(__name__)


class LeftSlots:
    """`recover` at the start, or from time to time. Each try is an epoch: a slot is tried again only after somebody
    else has used it."""

    def __init__(self, db: Database, journal_dir: Path) -> None:
        self._db = db
        self._journal_dir = journal_dir
        self._tried: dict[int, int] = {}
        """The slot's epoch after our try."""

    async def recover(self, in_use: Collection[int] = ()) -> list[int]:
        """Recovers and closes every slot with an open epoch and no process; returns which. Raises LedgerUnavailable.

        in_use: slots whose workers are about to start, and do it themselves.
        """
        here = {int(path.name) for path in await asyncio.to_thread(list_slots, self._journal_dir)} - set(in_use)
        found = await self._with_open_epochs()
        recovered = []
        for slot in sorted(here & found.keys()):
            if self._tried.get(slot) == found[slot]:
                continue
            try:
                gate = await Gate.open(self._db, self._journal_dir, slot)
                await gate.close()
            except LedgerUnavailable:  # a worker has it; or the database or the disk is away
                continue
            except JournalDamaged as error:
                log.error("a left slot cannot be recovered: its leases stay locked", slot=slot, error=str(error))
                self._tried[slot] = (await self._with_open_epochs()).get(slot, 0)
                continue
            self._tried[slot] = gate.journal.epoch
            log.info("left slot recovered", slot=slot)
            recovered.append(slot)
        return recovered

    async def _with_open_epochs(self) -> dict[int, int]:
        """Slot number → its latest epoch."""
        host = await asyncio.to_thread(host_id, self._journal_dir)
        query = (
            select(slots.c.id, slots.c.epoch)
            .join(epochs, and_(epochs.c.slot_id == slots.c.id, epochs.c.state == "open"))
            .where(slots.c.id.startswith(f"{host}/"))
            .distinct()
        )
        async with self._db.read() as c:
            return {int(row.id.rpartition("/")[2]): row.epoch for row in await c.execute(query)}
