"""Removing what is posted and old. A database restored from a backup needs the journal since that backup."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ledger.journal.files import Files
from ledger.journal.position import read_mark
from ledger.journal.segments import PRUNED_NAME, read_header, segment_name, segment_numbers
from ledger.journal.slots import list_epochs

_REMOVED_PREFIX = "pruned-"


def prune(epoch_dir: Path, *, posted_seq: int, before_ms: int) -> int:
    """Removes the segments of an epoch that ended before `before_ms` and hold nothing after `posted_seq`, oldest first.
    A closed epoch of which all is posted and old goes altogether, unless it is the newest of its slot. Returns how many
    segments went. Raises JournalDamaged.
    """
    for half_removed in epoch_dir.parent.glob(f"{_REMOVED_PREFIX}*"):
        shutil.rmtree(half_removed)
    mark = read_mark(epoch_dir)
    if mark is None:
        return 0
    numbers = segment_numbers(epoch_dir)
    newest = list_epochs(epoch_dir.parent)[-1].path == epoch_dir
    if mark.closed and mark.at_ms < before_ms and mark.seq <= posted_seq and not newest:
        removed = epoch_dir.with_name(_REMOVED_PREFIX + epoch_dir.name)
        epoch_dir.rename(removed)  # it vanishes at once for a process that lists the slot now
        shutil.rmtree(removed)
        return len(numbers)
    old = []
    for number in numbers[:-1]:
        following = read_header(epoch_dir, number + 1)
        if number >= mark.place.segment or following.first_seq - 1 > posted_seq or following.created_ms >= before_ms:
            break
        old.append(number)
    if old:
        _write_down(epoch_dir, old[-1] + 1)
    for number in old:
        (epoch_dir / segment_name(number)).unlink()
    return len(old)


def _write_down(epoch_dir: Path, first: int) -> None:
    """So that a segment that vanishes by itself is not taken for a pruned one."""
    draft = epoch_dir / f"{PRUNED_NAME}.draft"
    with draft.open("w") as file:
        file.write(f"{first}\n")
        file.flush()
        os.fsync(file.fileno())
    draft.rename(epoch_dir / PRUNED_NAME)
    Files().sync_directory(epoch_dir)
