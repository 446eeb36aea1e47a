from __future__ import annotations

import struct
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from ledger.journal.format import (
    BEHIND_UNKNOWN,
    DATA_START,
    FRAME_HEAD,
    HEADER_BYTES,
    MARK_BYTES,
    NO_CHAIN,
    TYPE_CODES,
    Header,
    Mark,
    Place,
    decode_header,
    decode_mark,
    encode_frame,
    encode_header,
    encode_mark,
    first_chain,
    parse_frames,
    proven_durable,
)
from ledger.records import Charge, FailedAttempt, Intent, Record, Settle, Usage, decode, encode
from tests.ledger_journal.material import UUID_1

START = Place(1, DATA_START, 0, NO_CHAIN)
payloads = st.binary(min_size=1, max_size=300)
bodies = st.lists(st.tuples(st.integers(1, 255), payloads), min_size=1, max_size=8)
chains = st.binary(min_size=32, max_size=32)
places = st.builds(Place, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), chains)


def frames_of(parts: list[tuple[int, bytes]], first: int = 1) -> bytes:
    return b"".join(encode_frame(first + index, code, payload) for index, (code, payload) in enumerate(parts))


def test_frame_bytes_are_these_for_ever() -> None:
    frame = encode_frame(258, 4, b"a payload", behind=3)
    assert frame.hex() == GOLDEN_FRAME
    length, crc, seq, code, version, behind = struct.unpack_from("<IIQBBH", frame)
    assert (length, crc, seq, code, version, behind) == (len(frame) - 20, GOLDEN_CRC, 258, 4, 1, 3)


def test_header_bytes_are_these_for_ever() -> None:
    header = Header(2, 3, 1_000, 1_796_000_000_000, UUID_1, bytes(range(32)))
    assert encode_header(header).hex() == GOLDEN_HEADER


def test_mark_bytes_are_these_for_ever() -> None:
    mark = Mark(7, Place(3, 8_192, 999, bytes(range(32))), 1_796_000_000_000, closed=True)
    assert encode_mark(mark).hex() == GOLDEN_MARK


def test_chain_starts_and_goes_on_as_documented() -> None:
    first = first_chain(NO_CHAIN, UUID_1, 1)
    assert first == sha256(b"tallygate journal" + bytes(32) + bytes(15) + b"\1" + b"\1\0\0\0").digest()
    frame = encode_frame(1, 6, b"payload")
    (read,), _, _ = parse_frames(frame, Place(1, DATA_START, 0, first), 1)
    assert read.chain_hash == sha256(first + frame).digest()


def test_crc_is_castagnoli_over_all_but_itself() -> None:
    frame = encode_frame(1, 1, b"123456789")
    assert int.from_bytes(frame[4:8], "little") == _crc32c(frame[:4] + frame[8:])
    assert _crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C


def test_each_record_type_has_its_own_lasting_code() -> None:
    codes = {cls.__name__: code for cls, code in TYPE_CODES.items()}
    assert codes == {
        "Intent": 1, "Progress": 2, "Settle": 3, "Void": 4, "EpochClosed": 5, "Seal": 6, "Answer": 7,
    }  # fmt: skip
    assert set(TYPE_CODES) == set(Record.__args__)


def test_record_bytes_are_these_for_ever() -> None:
    """Later fields are added at the end: records without them still read, and nobody ever writes them anew."""
    held = [Charge("a", 7)]
    intent = Intent("r", 1, "2026-11", "t", "k", None, "m", "p", 5, held, None, "d", "plan:x", "CNY")
    usage, paid = Usage(prompt_tokens=1, generated_tokens=2, billed_tokens=3), [Charge("a", 4)]
    names = ("r", 1, 2, "2026-11", "t", "k", None, "m", "d", None, "completed", usage, "p", 4, 5, 6, paid, 0)
    settle = Settle(*names, price_scope="default", failed_attempts=[FailedAttempt("e", 2)])
    assert encode(intent).hex() == GOLDEN_INTENT
    assert encode(settle).hex() == GOLDEN_SETTLE
    assert (decode(bytes.fromhex(GOLDEN_INTENT)), decode(bytes.fromhex(GOLDEN_SETTLE))) == (intent, settle)
    before = Intent("r", 1, "2026-11", "t", "k", None, "m", "p", 5, held, None, "d")
    assert decode(bytes.fromhex(INTENT_WITHOUT_PRICE_SCOPE)) == before
    assert decode(bytes.fromhex(SETTLE_WITHOUT_ATTEMPTS)) == Settle(*names)


@given(bodies, st.integers(1, 2**63))
def test_frames_read_back_as_written(parts: list[tuple[int, bytes]], first: int) -> None:
    data = frames_of(parts, first)
    frames, place, stop = parse_frames(data + bytes(40), Place(1, DATA_START, first - 1, NO_CHAIN), 100)
    assert [(frame.type, frame.payload) for frame in frames] == parts
    assert [frame.seq for frame in frames] == list(range(first, first + len(parts)))
    assert (place.offset, place.seq, stop) == (DATA_START + len(data), first + len(parts) - 1, "end")


@given(bodies, st.data())
def test_every_prefix_reads_as_its_whole_frames(parts: list[tuple[int, bytes]], data: st.DataObject) -> None:
    whole = frames_of(parts)
    cut = data.draw(st.integers(0, len(whole)))
    frames, place, _ = parse_frames(whole[:cut] + bytes(cut and 64), START, 100)
    again, _, _ = parse_frames(whole, START, len(frames))
    assert frames == again
    assert place.offset - DATA_START <= cut


@given(bodies, st.data())
def test_one_changed_bit_ends_the_frames_before_it(parts: list[tuple[int, bytes]], data: st.DataObject) -> None:
    whole = bytearray(frames_of(parts))
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    whole[bit // 8] ^= 1 << bit % 8
    frames, place, stop = parse_frames(bytes(whole), START, 100)
    assert stop in ("bad", "short")
    assert place.offset - DATA_START <= bit // 8
    assert len(frames) < len(parts)


@given(bodies, bodies)
def test_chain_tells_histories_apart(left: list[tuple[int, bytes]], right: list[tuple[int, bytes]]) -> None:
    _, one, _ = parse_frames(frames_of(left), START, 100)
    _, other, _ = parse_frames(frames_of(right), START, 100)
    assert (one.chain == other.chain) == (left == right)


@given(st.binary(max_size=400))
def test_noise_is_no_frame(noise: bytes) -> None:
    frames, _, _ = parse_frames(noise, START, 10)
    assert frames == []


@given(
    st.builds(
        Header, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1),
        st.integers(0, 2**64 - 1), st.uuids().map(str), chains,
    )
)  # fmt: skip
def test_header_reads_back_as_written(header: Header) -> None:
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data + bytes(100)) == header


@given(st.builds(Mark, st.integers(0, 2**64 - 1), places, st.integers(0, 2**64 - 1), st.booleans(), st.booleans()))
def test_mark_reads_back_as_written(mark: Mark) -> None:
    data = encode_mark(mark)
    assert len(data) == MARK_BYTES
    assert decode_mark(data) == mark


@given(st.integers(0, 8 * MARK_BYTES - 1))
def test_a_mark_with_a_changed_bit_is_none(bit: int) -> None:
    data = bytearray(encode_mark(Mark(7, Place(3, 8_192, 999, NO_CHAIN), 1)))
    data[bit // 8] ^= 1 << bit % 8
    assert decode_mark(bytes(data)) is None


@given(st.integers(0, 2**40), st.integers(1, 300), st.binary(max_size=50), st.integers(0, 400))
def test_a_later_frame_proves_what_was_durable_when_it_was_written(
    after_seq: int, distance: int, noise: bytes, behind: int
) -> None:
    later = encode_frame(after_seq + 1 + distance, 3, b"settled\0\0", behind=behind)
    proven = proven_durable(noise + later + bytes(5_000), after_seq)
    assert proven == max(0, after_seq + distance - behind)


def test_a_frame_that_says_nothing_of_durability_proves_nothing() -> None:
    assert proven_durable(encode_frame(70_000, 3, b"x", behind=BEHIND_UNKNOWN), 1) == 0
    assert proven_durable(encode_frame(5, 3, b"x", behind=0)[:-1], 1) == 0
    assert proven_durable(bytes(10_000), 1) == 0
    assert FRAME_HEAD == 20


def _crc32c(data: bytes) -> int:
    """Bit by bit, from the definition (RFC 3720, appendix B.4: reflected polynomial 0x82F63B78)."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


GOLDEN_FRAME = "090000008aa7e9a902010000000000000401030061207061796c6f6164"
GOLDEN_CRC = 0xA9E9A78A
GOLDEN_HEADER = (
    "54475345474d4e5401000000020000000300000000000000e8030000000000000028f129a20100000000000000000000"
    "0000000000000001000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f0000000000000000"
    "00000000000000000000000000000000000000000000000000000000987c2576"
)
GOLDEN_MARK = (
    "544744555241424c0700000000000000e703000000000000010000000300000000200000010000000028f129a2010000"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f22933513"
)
GOLDEN_INTENT = "9fa6696e74656e74a17201a7323032362d3131a174a16bc0a16da170059192a16107c0a164a6706c616e3a78a3434e59"
GOLDEN_SETTLE = (
    "dc001ba6736574746c65a1720102a7323032362d3131a174a16bc0a16da164c0a9636f6d706c657465649d010000020003c0000000c2c0c0"
    "a1700405069192a16104000100c0c0c0a3555344a764656661756c749192a16502"
)
INTENT_WITHOUT_PRICE_SCOPE = "9da6696e74656e74a17201a7323032362d3131a174a16bc0a16da170059192a16107c0a164"
SETTLE_WITHOUT_ATTEMPTS = (
    "dc0019a6736574746c65a1720102a7323032362d3131a174a16bc0a16da164c0a9636f6d706c657465649d010000020003c0000000c2c0c0"
    "a1700405069192a16104000100c0c0c0a3555344"
)
