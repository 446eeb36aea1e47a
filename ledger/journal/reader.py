"""Reading an epoch from any process: in order, each frame verified, going on where the last read ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ledger.errors import JournalDamaged
from ledger.journal.format import FRAME_HEAD, MAX_PAYLOAD, Frame, Header, Mark, Place, parse_frames
from ledger.journal.position import NAME as MARK_NAME
from ledger.journal.position import read_mark_at
from ledger.journal.segments import first_kept, read_header, segment_name, segment_numbers

_CHUNK_BYTES = 1 << 20
_REMEMBERED_PLACES = 16
_SKIP_FRAMES = 1_000
_END_OF_TIME = 1 << 62


class JournalReader:
    """Reads one epoch. Not thread-safe; cheap to poll: no new durable frame costs one 1 KiB read.

    With `durable_only` it sees what the published durable position covers and nothing else: of a closed epoch that is
    all there is. Without, it goes on to the last frame that is whole (what a killed process wrote and did not sync).
    """

    def __init__(self, epoch_dir: Path) -> None:
        self.epoch_dir = epoch_dir
        self._mark_fd: int | None = None
        self._segment: tuple[int, int] | None = None  # number, fd
        self._numbers: list[int] = []
        self._headers: dict[int, Header] = {}
        self._places: dict[int, Place] = {}

    def mark(self) -> Mark | None:
        """The published durable position; None: none that reads."""
        if self._mark_fd is None:
            try:
                self._mark_fd = os.open(self.epoch_dir / MARK_NAME, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
        return read_mark_at(self._mark_fd)

    def read(self, after_seq: int, limit: int, *, durable_only: bool = True) -> list[Frame]:
        """The next `limit` frames with seq > after_seq, in order, or all that there are yet.

        Raises JournalDamaged when the next frame should be there and is missing, pruned or does not verify; the good
        ones before it are returned first.
        """
        mark = self.mark()
        if mark is not None and (durable_only or mark.closed):
            return self._read(after_seq, limit, mark.place.segment, mark.seq)
        if durable_only:
            return []
        numbers = self._list()
        return self._read(after_seq, limit, numbers[-1], _END_OF_TIME) if numbers else []

    def frames(self, after_seq: int, *, durable_only: bool = True, batch: int = 1_000) -> Iterator[Frame]:
        """All there is now, batch by batch. Raises as `read` does."""
        while frames := self.read(after_seq, batch, durable_only=durable_only):
            yield from frames
            after_seq = frames[-1].seq

    def start(self) -> Place:
        """Where the oldest segment that is still here begins. Raises JournalDamaged."""
        numbers = self._list()
        if not numbers:
            raise JournalDamaged(f"{self.epoch_dir} holds no segment")
        return self._header(numbers[0]).start

    def place(self, seq: int) -> Place:
        """The place after frame `seq`, which need not be durable. Raises JournalDamaged when it is not there."""
        numbers = self._list()
        if not numbers:
            raise JournalDamaged(f"{self.epoch_dir} holds no segment")
        return self._places.get(seq) or self._seek(seq, numbers[-1])

    def close(self) -> None:
        if self._segment is not None:
            os.close(self._segment[1])
            self._segment = None
        if self._mark_fd is not None:
            os.close(self._mark_fd)
            self._mark_fd = None

    def _read(self, after_seq: int, limit: int, last_segment: int, last_seq: int) -> list[Frame]:
        if after_seq >= last_seq or limit <= 0:
            return []
        place = self._places.get(after_seq) or self._seek(after_seq, last_segment)
        frames, place = self._forward(place, limit, last_segment, last_seq)
        self._places[place.seq] = place
        if len(self._places) > _REMEMBERED_PLACES:
            del self._places[next(iter(self._places))]
        return frames

    def _forward(self, place: Place, limit: int, last_segment: int, last_seq: int) -> tuple[list[Frame], Place]:
        """Up to `limit` frames after `place`. It may end at a frame that is not whole if last_seq is _END_OF_TIME."""
        found: list[Frame] = []
        while len(found) < limit and place.seq < last_seq:
            segment_end = last_seq
            if place.segment < last_segment:
                following = self._header(place.segment + 1)
                if place.seq >= following.first_seq - 1:
                    try:
                        place = self._enter(following, place)
                    except JournalDamaged:
                        if not found:
                            raise
                        break  # the good frames before it come first
                    continue
                segment_end = min(last_seq, following.first_seq - 1)
            wanted = min(limit - len(found), segment_end - place.seq)
            frames, place = self._parse(place, wanted)
            found += frames
            if len(frames) < wanted:
                if segment_end != _END_OF_TIME and not found:
                    raise self._damaged(place, f"and frames up to {segment_end} were durable")
                break
        return found, place

    def _enter(self, header: Header, place: Place) -> Place:
        """From the end of one segment into the next, skipping what that repeats after a failed sync."""
        start = header.start
        repeated = place.seq - start.seq
        if repeated:
            _, start = self._parse(start, repeated)
        if start.seq != place.seq or start.chain != place.chain:
            raise self._damaged(start, f"the hash chain does not continue from segment {place.segment}")
        return start

    def _parse(self, place: Place, wanted: int) -> tuple[list[Frame], Place]:
        """`wanted` frames from one segment, or fewer when no whole frame follows."""
        fd = self._open(place.segment)
        found: list[Frame] = []
        size = _CHUNK_BYTES
        while len(found) < wanted:
            data = os.pread(fd, size, place.offset)
            frames, place, stop = parse_frames(data, place, wanted - len(found))
            found += frames
            if stop in ("bad", "end") or (stop == "short" and len(data) < size):
                break
            if stop == "short" and not frames:
                if size > MAX_PAYLOAD:
                    break
                size = MAX_PAYLOAD + FRAME_HEAD  # one frame larger than a chunk
        return found, place

    def _seek(self, seq: int, last_segment: int) -> Place:
        """The place after frame `seq`, from the start of the last segment that can hold it."""
        numbers = reversed([number for number in self._list() if number <= last_segment])
        starts = (self._header(number).start for number in numbers)
        start = next((start for start in starts if start.seq <= seq), None)
        if start is None:
            raise JournalDamaged(f"{self.epoch_dir}: frame {seq + 1} is not there any more (pruned or lost)")
        place = start
        while place.seq < seq:
            skipped, place = self._parse(place, min(seq - place.seq, _SKIP_FRAMES))
            if not skipped:
                break
        if place.seq != seq:
            raise self._damaged(place, f"and frame {seq} was asked for")
        return place

    def _list(self) -> list[int]:
        try:
            numbers = segment_numbers(self.epoch_dir)
        except FileNotFoundError:
            raise JournalDamaged(f"{self.epoch_dir} is missing: restore it from where it went") from None
        if numbers and numbers[-1] - numbers[0] + 1 != len(numbers):
            missing = min(set(range(numbers[0], numbers[-1])) - set(numbers))
            raise JournalDamaged(f"{self.epoch_dir / segment_name(missing)} is missing: restore it from where it went")
        if numbers and numbers[0] > first_kept(self.epoch_dir):
            missing_path = self.epoch_dir / segment_name(numbers[0] - 1)
            raise JournalDamaged(f"{missing_path} is missing and was not pruned: restore it from where it went")
        return numbers

    def _header(self, number: int) -> Header:
        header = self._headers.get(number)
        if header is None:
            header = self._headers[number] = read_header(self.epoch_dir, number)
        return header

    def _open(self, number: int) -> int:
        if self._segment is not None and self._segment[0] == number:
            return self._segment[1]
        if self._segment is not None:
            os.close(self._segment[1])
            self._segment = None
        path = self.epoch_dir / segment_name(number)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise JournalDamaged(f"{path} is missing: restore it from where it went") from None
        self._segment = (number, fd)
        return fd

    def _damaged(self, place: Place, why: str) -> JournalDamaged:
        path = self.epoch_dir / segment_name(place.segment)
        return JournalDamaged(f"{path}: no valid frame {place.seq + 1} at byte {place.offset}, {why}")
