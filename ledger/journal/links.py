"""The proof that a slot's epochs are one history: each begins with the hash that the one before ended with."""

from __future__ import annotations

from pathlib import Path

from ledger.journal.format import NO_CHAIN, first_chain
from ledger.journal.position import read_mark
from ledger.journal.segments import read_header, segment_numbers
from ledger.journal.slots import list_epochs


def broken_link(slot_dir: Path) -> str | None:
    """The first epoch of a slot that does not continue its predecessor or is not what its directory's name says; None:
    all do. Epochs whose beginning was pruned are taken as they are. Frames are not read: `JournalReader` verifies them.

    Raises JournalDamaged.
    """
    epochs = list_epochs(slot_dir)
    previous: bytes | None = NO_CHAIN if epochs and epochs[0].epoch == 1 else None
    for info in epochs:
        numbers = segment_numbers(info.path)
        if numbers:
            header = read_header(info.path, numbers[0])
            if (header.epoch, header.journal_uuid) != (info.epoch, info.journal_uuid):
                return f"{info.path}: its segments belong to epoch {header.epoch} ({header.journal_uuid})"
            if header.segment == 1 and previous is not None:
                expected = first_chain(previous, info.journal_uuid, info.epoch)
                if header.chain != expected:
                    return f"{info.path}: its hash chain does not continue the epoch before it"
        mark = read_mark(info.path)
        previous = mark.place.chain if mark is not None and mark.closed else None
    return None
