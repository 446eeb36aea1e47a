"""Slots that no worker takes any more, and whose last one did not end cleanly: their journals still hold leases.

A worker recovers the slot that it takes. When fewer are started than before, or workers were replaced before the host
went down, slots are left: somebody else of this host must do it, under the slot's lock as always.
"""

from __future__ import annotations

from pathlib import Path

import structlog
from sqlalchemy import select

from ledger.database import Database
from ledger.errors import JournalDamaged, LedgerUnavailable
from ledger.gate import Gate
from ledger.journal.slots import host_id
from ledger.schema import slots

log = structlog.get_logger(__name__)


async def recover_left_slots(db: Database, journal_dir: Path, workers: int) -> list[int]:
    """Recovers the slots of this host from number `workers` on that nobody holds; returns which. Raises
    LedgerUnavailable."""
    host = host_id(journal_dir)
    async with db.read() as c:
        rows = await c.execute(select(slots.c.id).where(slots.c.live == 1, slots.c.id.startswith(f"{host}/")))
        numbers = sorted(int(row.id.rpartition("/")[2]) for row in rows)
    recovered = []
    for number in numbers:
        if number < workers:
            continue
        try:
            gate = await Gate.open(db, journal_dir, number)
        except LedgerUnavailable:  # a worker has it
            continue
        except JournalDamaged as error:
            log.error("a left slot cannot be recovered", slot=number, error=str(error))
            continue
        await gate.close()
        log.info("left slot recovered", slot=number)
        recovered.append(number)
    return recovered
