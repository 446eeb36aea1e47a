"""Slots of this host that no worker uses any more (there were more workers before): end them; their leases return."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path

import structlog
from sqlalchemy import select

from ledger.database import Database
from ledger.errors import JournalDamaged, LedgerUnavailable
from ledger.gate import Gate
from ledger.journal import host_id, list_slots
from ledger.schema import epochs

log = structlog.get_logger(__name__)


async def end_unused_slots(db: Database, journal_dir: Path, in_use: Collection[int]) -> list[int]:
    """Recovers and closes every other slot of this journal directory that has an open epoch and no process.

    Call it before the workers start. Returns the slots that were ended. A slot that is locked or damaged is left alone.
    """
    host = await asyncio.to_thread(host_id, journal_dir)
    async with db.read() as c:
        open_slots = set((await c.execute(select(epochs.c.slot_id).where(epochs.c.state == "open"))).scalars())
    ended = []
    for slot_dir in await asyncio.to_thread(list_slots, journal_dir):
        slot = int(slot_dir.name)
        if slot in in_use or f"{host}/{slot}" not in open_slots:
            continue
        try:
            gate = await Gate.open(db, journal_dir, slot)
            await gate.close()
        except (LedgerUnavailable, JournalDamaged) as error:
            log.warning("an unused slot stays as it is", slot=slot, reason=str(error))
            continue
        ended.append(slot)
    return ended
