"""Ending an epoch whose process is gone: find its last whole frame, cut the torn tail, refuse damage.

Called by the next holder of the slot's lock before it begins its own epoch. Frames that were written and never synced
are copied into a segment of their own and synced there, because a sync that failed before we came can make the page
cache show bytes that the disk does not have.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from ledger.errors import JournalDamaged
from ledger.journal.files import Files
from ledger.journal.format import (
    DATA_START,
    FRAME_HEAD,
    NO_CHAIN,
    Header,
    Mark,
    Place,
    encode_frame,
    proven_durable,
)
from ledger.journal.position import Position
from ledger.journal.reader import JournalReader
from ledger.journal.segments import create_segment, read_header, remove_spare, segment_name, segment_numbers

PAGE_BYTES = 4096
DAMAGE_NAME = "damage.json"
_ADVICE = (
    "Restore the file from a copy, or start once with damage accepted and a reason: "
    "what was settled from there on is then lost to the bill"
)


class Override(msgspec.Struct, frozen=True):
    """An operator's decision to go on without frames that were durable. The caller puts it into the audit log too."""

    epoch_dir: str
    at_ms: int
    reason: str
    damage: str
    last_good_seq: int


def close_epoch(
    files: Files, epoch_dir: Path, at_ms: int, *, accept_damage: str | None = None
) -> tuple[Mark, Override | None]:
    """The closed mark of the epoch; a second call finds it closed. Everything that it covers is on disk.

    Raises JournalDamaged when frames that were durable do not read and no reason to accept that is given; OSError.
    """
    reader = JournalReader(epoch_dir)
    try:
        mark = reader.mark()
        if mark is not None and mark.closed:
            return mark, None
        remove_spare(files, epoch_dir)
        try:
            end = _find_end(reader, mark)
        except JournalDamaged as damage:
            if accept_damage is None:
                raise JournalDamaged(f"{damage}. {_ADVICE}.") from damage
            end = _last_good(reader)
            override = Override(str(epoch_dir), at_ms, accept_damage, str(damage), end.seq)
            _write_down(files, epoch_dir, override)
            return _publish_closed(files, epoch_dir, end, at_ms, damage_accepted=True), override
        return _settle_tail(files, reader, mark, end, at_ms), None
    finally:
        reader.close()


def _find_end(reader: JournalReader, mark: Mark | None) -> Place:
    """The place after the last whole frame; the whole epoch is read. JournalDamaged when a durable frame is missing."""
    start = reader.start()
    seq = start.seq
    for frame in reader.frames(seq, durable_only=False):
        seq = frame.seq
        if mark is not None and seq == mark.seq and frame.chain_hash != mark.place.chain:
            raise JournalDamaged(f"{reader.epoch_dir}: the hash chain at frame {seq} is not the one recorded")
    end = reader.place(seq)
    last = segment_numbers(reader.epoch_dir)[-1]
    if mark is not None and mark.place.segment > last:
        missing = reader.epoch_dir / segment_name(mark.place.segment)
        raise JournalDamaged(f"{missing} is missing: restore it from where it went")
    durable_seq = mark.seq if mark is not None else 0
    path = reader.epoch_dir / segment_name(last)
    with path.open("rb") as file:
        file.seek(end.offset if end.segment == last else DATA_START)
        durable_seq = max(durable_seq, proven_durable(file.read(), end.seq))
    if durable_seq > end.seq:
        raise JournalDamaged(
            f"{path}: no valid frame {end.seq + 1} at byte {end.offset}, and frames up to {durable_seq} were durable"
        )
    return end


def _last_good(reader: JournalReader) -> Place:
    """The end of what verifies from the start, or of nothing."""
    try:
        start = reader.start()
    except JournalDamaged:
        return Place(0, DATA_START, 0, NO_CHAIN)
    seq = start.seq
    with suppress(JournalDamaged):
        for frame in reader.frames(seq, durable_only=False):
            seq = frame.seq
    return reader.place(seq)


def _settle_tail(files: Files, reader: JournalReader, mark: Mark | None, end: Place, at_ms: int) -> Mark:
    """Makes everything up to `end` durable, says so, and cuts what follows."""
    epoch_dir = reader.epoch_dir
    last = segment_numbers(epoch_dir)[-1]
    durable = mark.place if mark is not None else read_header(epoch_dir, last).start
    place = end
    if end.seq > durable.seq:
        start = _page_start(reader, durable)
        frames = reader.frames(start.seq, durable_only=False)
        data = b"".join(
            encode_frame(frame.seq, frame.type, frame.payload, behind=frame.behind, version=frame.version)
            for frame in frames
        )
        old = read_header(epoch_dir, last)
        header = Header(old.epoch, last + 1, start.seq + 1, at_ms, old.journal_uuid, start.chain)
        segment = create_segment(files, epoch_dir, header, DATA_START, data)
        files.close(segment.fd)
        place = Place(last + 1, segment.offset, end.seq, end.chain)
    closed = _publish_closed(files, epoch_dir, place, at_ms)
    with suppress(OSError):  # only gives space back
        fd = files.open(epoch_dir / segment_name(last), os.O_RDWR)
        try:
            files.truncate(fd, end.offset if end.segment == last else DATA_START)
        finally:
            files.close(fd)
    return closed


def _page_start(reader: JournalReader, durable: Place) -> Place:
    """The last frame boundary at or before the disk page that the durable position is in: when the frames after it were
    written, that page was written again."""
    page = durable.offset - durable.offset % PAGE_BYTES
    first = read_header(reader.epoch_dir, durable.segment).start
    seq = max(first.seq, durable.seq - PAGE_BYTES // FRAME_HEAD)
    offset = durable.offset
    boundary = durable.seq
    recent = reader.read(seq, durable.seq - seq, durable_only=False)
    for frame in reversed(recent):
        if offset <= page:
            break
        offset -= FRAME_HEAD + len(frame.payload)
        boundary -= 1
    return reader.place(boundary)


def _publish_closed(files: Files, epoch_dir: Path, place: Place, at_ms: int, *, damage_accepted: bool = False) -> Mark:
    position = Position.open(files, epoch_dir)
    try:
        mark = position.publish_closed(place, at_ms, damage_accepted=damage_accepted)
    finally:
        position.close()
    files.sync_directory(epoch_dir)
    return mark


def _write_down(files: Files, epoch_dir: Path, override: Override) -> None:
    fd = files.open(epoch_dir / DAMAGE_NAME, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        files.write_all(fd, msgspec.json.encode(override) + b"\n", 0)
        files.sync_data(fd)
    finally:
        files.close(fd)
