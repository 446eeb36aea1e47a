"""The durable journal of a worker slot: what was promised, spent and settled, in order, before SQL hears of it.

`JournalWriter` appends, `JournalReader` reads from any process up to the published durable position. The format is
described in docs/journal-format.md. This package knows bytes and `ledger.records`, and no SQL.
"""

from ledger.journal.closing import Override
from ledger.journal.files import Files
from ledger.journal.format import (
    ANSWER,
    EPOCH_CLOSED,
    INTENT,
    NO_CHAIN,
    PROGRESS,
    SEAL,
    SETTLE,
    VOID,
    Frame,
    Mark,
    Place,
)
from ledger.journal.links import broken_link
from ledger.journal.pruning import prune
from ledger.journal.reader import JournalReader
from ledger.journal.slots import EpochInfo, SlotLock, host_id, list_epochs, list_slots
from ledger.journal.writer import JournalWriter

__all__ = [
    "ANSWER",
    "EPOCH_CLOSED",
    "INTENT",
    "NO_CHAIN",
    "PROGRESS",
    "SEAL",
    "SETTLE",
    "VOID",
    "EpochInfo",
    "Files",
    "Frame",
    "JournalReader",
    "JournalWriter",
    "Mark",
    "Override",
    "Place",
    "SlotLock",
    "broken_link",
    "host_id",
    "list_epochs",
    "list_slots",
    "prune",
]
