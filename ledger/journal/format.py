"""The bytes of a journal as pure functions: frames, segment headers, position marks and the hash chain.

All integers are little-endian. `docs/journal-format.md` describes the format for people who read it without this code.
"""

from __future__ import annotations

import re
import struct
from hashlib import sha256
from typing import Final, Literal
from uuid import UUID

import msgspec
from crc32c import crc32c

from ledger.records import Answer, EpochClosed, Intent, Progress, Record, Seal, Settle, Void, decode

FORMAT_VERSION: Final = 1
RECORD_VERSION: Final = 1
DATA_START: Final = 4096
"""Frames begin here: the page of the segment header is never written again."""
MAX_PAYLOAD: Final = 16 << 20
NO_CHAIN: Final = bytes(32)
"""Stands for the chain before the first epoch of a slot."""
BEHIND_UNKNOWN: Final = 0xFFFF

INTENT, PROGRESS, SETTLE, VOID, EPOCH_CLOSED, SEAL, ANSWER = 1, 2, 3, 4, 5, 6, 7
TYPE_CODES: Final[dict[type, int]] = {
    Intent: INTENT,
    Progress: PROGRESS,
    Settle: SETTLE,
    Void: VOID,
    EpochClosed: EPOCH_CLOSED,
    Seal: SEAL,
    Answer: ANSWER,
}

_FRAME: Final = struct.Struct("<IIQBBH")  # length, crc32c, sequence, type, version, behind
_FRAME_CHECKED: Final = struct.Struct("<IQBBH")  # all but the crc itself
FRAME_HEAD: Final = _FRAME.size
_HEADER: Final = struct.Struct("<8sIIIIQQ16s32s36x")  # + crc32c: 128 bytes
_HEADER_MAGIC: Final = b"TGSEGMNT"
HEADER_BYTES: Final = _HEADER.size + 4
_MARK: Final = struct.Struct("<8sQQIIIIQ32s")  # + crc32c: 84 bytes
_MARK_MAGIC: Final = b"TGDURABL"
MARK_BYTES: Final = _MARK.size + 4
_CRC: Final = struct.Struct("<I")
_CLOSED, _DAMAGE_ACCEPTED = 1, 2


class Frame(msgspec.Struct, frozen=True):
    """One record as it stands in the journal. `type`: one of INTENT … ANSWER; `chain_hash` covers it and all before."""

    seq: int
    type: int
    version: int
    behind: int
    """How many frames before this one were not known to be durable when it was written; BEHIND_UNKNOWN: not said."""
    payload: bytes
    chain_hash: bytes

    @property
    def record(self) -> Record:
        """Raises msgspec.DecodeError."""
        return decode(self.payload)


class Place(msgspec.Struct, frozen=True):
    """A gap between two frames: after frame `seq`, at byte `offset` of `segment`; `chain` covers all up to `seq`."""

    segment: int
    offset: int
    seq: int
    chain: bytes


class Header(msgspec.Struct, frozen=True):
    """The first 128 bytes of a segment. `chain` is the hash before frame `first_seq`."""

    epoch: int
    segment: int
    first_seq: int
    created_ms: int
    journal_uuid: str
    chain: bytes

    @property
    def start(self) -> Place:
        return Place(self.segment, DATA_START, self.first_seq - 1, self.chain)


class Mark(msgspec.Struct, frozen=True):
    """The published durable position of an epoch. `closed`: the epoch has ended here and never grows again."""

    generation: int
    place: Place
    at_ms: int
    closed: bool = False
    damage_accepted: bool = False

    @property
    def seq(self) -> int:
        return self.place.seq


def encode_frame(seq: int, type_code: int, payload: bytes, *, behind: int = 0, version: int = RECORD_VERSION) -> bytes:
    """length, crc32c, sequence, type, version, behind, payload. The crc covers every byte but its own four."""
    length = len(payload)
    crc = crc32c(_FRAME_CHECKED.pack(length, seq, type_code, version, behind) + payload)
    return _FRAME.pack(length, crc, seq, type_code, version, behind) + payload


def next_chain(chain: bytes, frame: bytes) -> bytes:
    return sha256(chain + frame).digest()


def first_chain(previous: bytes, journal_uuid: str, epoch: int) -> bytes:
    """Where an epoch's chain begins: tied to the end of the slot's epoch before it (NO_CHAIN: there is none)."""
    return sha256(b"tallygate journal" + previous + UUID(journal_uuid).bytes + epoch.to_bytes(4, "little")).digest()


Stop = Literal["limit", "short", "end", "bad"]
"""limit: as many as asked for · short: the frame goes on past the data · end: never written · bad: no frame of ours."""


def parse_frames(data: bytes, place: Place, limit: int) -> tuple[list[Frame], Place, Stop]:
    """Frames from the start of `data`, whose first byte is at `place`. Returns them, the place after them and why it
    stopped. Lengths, checksums and sequence numbers are checked; the chain is computed."""
    frames: list[Frame] = []
    at, size, seq, chain = 0, len(data), place.seq, place.chain
    stop: Stop = "limit"
    while len(frames) < limit:
        if at + FRAME_HEAD > size:
            stop = "short"
            break
        length, crc, number, type_code, version, behind = _FRAME.unpack_from(data, at)
        if length == 0 and crc == 0 and number == 0:
            stop = "end"
            break
        if number != seq + 1 or not 0 < length <= MAX_PAYLOAD:
            stop = "bad"
            break
        end = at + FRAME_HEAD + length
        if end > size:
            stop = "short"
            break
        if crc32c(data[at + 8 : end], crc32c(data[at : at + 4])) != crc:
            stop = "bad"
            break
        chain = sha256(chain + data[at:end]).digest()
        frames.append(Frame(number, type_code, version, behind, data[at + FRAME_HEAD : end], chain))
        seq, at = number, end
    return frames, Place(place.segment, place.offset + at, seq, chain), stop


def proven_durable(data: bytes, after_seq: int) -> int:
    """What the bytes after a place where frame `after_seq + 1` does not read say about it: the highest sequence number
    that some later whole frame knew to be durable when it was written, 0 when there is no such frame.

    Above `after_seq` it proves damage; otherwise what follows is the torn remains of one unsynced group.
    """
    written = len(data.rstrip(b"\0"))
    proven = 0
    for high in (after_seq >> 24, (after_seq >> 24) + 1):
        candidate = re.compile(b"(?s)(?=.{3}" + re.escape(high.to_bytes(5, "little")) + b"[\\x01-\\x1f]\\x01)")
        for match in candidate.finditer(data, 8, written):
            at = match.start() - 8
            place = Place(0, 0, int.from_bytes(data[at + 8 : at + 16], "little") - 1, NO_CHAIN)
            frames, _, _ = parse_frames(data[at : at + FRAME_HEAD + _length(data, at)], place, 1)
            if frames and frames[0].seq > after_seq and frames[0].behind != BEHIND_UNKNOWN:
                proven = max(proven, frames[0].seq - 1 - frames[0].behind)
    return proven


def _length(data: bytes, at: int) -> int:
    return min(int.from_bytes(data[at : at + 4], "little"), MAX_PAYLOAD)


def encode_header(header: Header) -> bytes:
    body = _HEADER.pack(
        _HEADER_MAGIC,
        FORMAT_VERSION,
        header.epoch,
        header.segment,
        0,
        header.first_seq,
        header.created_ms,
        UUID(header.journal_uuid).bytes,
        header.chain,
    )
    return body + _CRC.pack(crc32c(body))


def decode_header(data: bytes) -> Header | None:
    """None: these bytes are no segment header of a version we know."""
    if len(data) < HEADER_BYTES or crc32c(data[: _HEADER.size]) != _CRC.unpack_from(data, _HEADER.size)[0]:
        return None
    magic, version, epoch, segment, _, first_seq, created_ms, uuid, chain = _HEADER.unpack_from(data)
    if magic != _HEADER_MAGIC or version != FORMAT_VERSION:
        return None
    return Header(epoch, segment, first_seq, created_ms, str(UUID(bytes=uuid)), chain)


def encode_mark(mark: Mark) -> bytes:
    flags = (_CLOSED if mark.closed else 0) | (_DAMAGE_ACCEPTED if mark.damage_accepted else 0)
    place = mark.place
    body = _MARK.pack(
        _MARK_MAGIC,
        mark.generation,
        place.seq,
        FORMAT_VERSION,
        place.segment,
        place.offset,
        flags,
        mark.at_ms,
        place.chain,
    )
    return body + _CRC.pack(crc32c(body))


def decode_mark(data: bytes) -> Mark | None:
    """None: torn, empty, or not ours."""
    if len(data) < MARK_BYTES or crc32c(data[: _MARK.size]) != _CRC.unpack_from(data, _MARK.size)[0]:
        return None
    magic, generation, seq, version, segment, offset, flags, at_ms, chain = _MARK.unpack_from(data)
    if magic != _MARK_MAGIC or version != FORMAT_VERSION:
        return None
    place = Place(segment, offset, seq, chain)
    return Mark(generation, place, at_ms, bool(flags & _CLOSED), bool(flags & _DAMAGE_ACCEPTED))
