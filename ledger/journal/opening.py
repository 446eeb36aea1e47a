"""Beginning an epoch: every older one of the slot is closed first, and the new one appears whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from ledger.errors import Invalid, JournalDamaged, LedgerUnavailable
from ledger.journal.closing import Override, close_epoch
from ledger.journal.files import Files
from ledger.journal.format import NO_CHAIN, Header, first_chain
from ledger.journal.position import Position
from ledger.journal.segments import Segment, create_segment
from ledger.journal.slots import SlotLock, epoch_dir_name, list_epochs

_DRAFT_PREFIX = "opening-"


class Opened(NamedTuple):
    path: Path
    lock: SlotLock
    header: Header
    segment: Segment
    position: Position
    overrides: list[Override]


def open_epoch(
    files: Files,
    lock: SlotLock,
    epoch: int,
    journal_uuid: str,
    *,
    segment_bytes: int,
    at_ms: int,
    accept_damage: str | None,
) -> Opened:
    """Raises LedgerUnavailable (not a new epoch), JournalDamaged (an older epoch does not read), Invalid, OSError."""
    slot_dir = lock.slot_dir
    journal_uuid = _canonical(journal_uuid)
    older = list_epochs(slot_dir)
    if older and older[-1].epoch >= epoch:
        raise LedgerUnavailable(
            f"epoch {epoch} of {slot_dir} is not newer than {older[-1].path.name}, which is already there: "
            "the database is older than the journal (was it restored from a backup?)"
        )
    chain, overrides = close_epochs(files, slot_dir, at_ms, accept_damage=accept_damage)
    for left_over in slot_dir.glob(f"{_DRAFT_PREFIX}*"):
        shutil.rmtree(left_over)
    name = epoch_dir_name(epoch, journal_uuid)
    draft, path = slot_dir / (_DRAFT_PREFIX + name), slot_dir / name
    draft.mkdir()
    header = Header(epoch, 1, 1, at_ms, journal_uuid, first_chain(chain, journal_uuid, epoch))
    segment = create_segment(files, draft, header, segment_bytes)
    position = Position.open(files, draft)
    position.publish(header.start, at_ms)
    position.sync()
    files.sync_directory(draft)
    files.rename(draft, path)
    files.sync_directory(slot_dir)
    segment.path = path / segment.path.name
    return Opened(path, lock, header, segment, position, overrides)


def close_epochs(
    files: Files, slot_dir: Path, at_ms: int, *, accept_damage: str | None = None
) -> tuple[bytes, list[Override]]:
    """Closes what older processes of the slot left open; a second call finds it closed. Call it with the slot's lock
    held. Returns the chain that a new epoch goes on from. Raises JournalDamaged, OSError."""
    chain, overrides = NO_CHAIN, list[Override]()
    older = list_epochs(slot_dir)
    for info in older:
        try:
            mark, override = close_epoch(files, info.path, at_ms, accept_damage=accept_damage)
        except JournalDamaged:
            if info is older[-1] or info.path.exists():
                raise
            continue  # pruned in this moment, as only a closed epoch before the newest is
        chain = mark.place.chain
        if override is not None:
            overrides.append(override)
    return chain, overrides


def _canonical(journal_uuid: str) -> str:
    try:
        return str(UUID(journal_uuid))
    except ValueError:
        raise Invalid(f"{journal_uuid!r} is no UUID", "journal_uuid") from None
