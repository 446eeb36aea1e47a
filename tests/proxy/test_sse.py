"""Promises about event streams: no byte is lost, whatever the packets look like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.openai.sse import EventCutter, EventTooLong, data_of, event_name

EVENTS = [
    b'data: {"a":"\xe8\xb4\xa6\xe5\x8d\x95"}\n\n',
    b"data:no space\n\n",
    b": a comment\n\n",
    b"event: ping\r\ndata: one\r\ndata: two\r\n\r\n",
    b"id: 7\ndata\n\n",
    b"data: carriage\r\r",
    b"data: [DONE]\n\n",
]


@given(st.data())
def test_events_come_out_the_same_however_the_bytes_are_packed(data: st.DataObject) -> None:
    events = data.draw(st.lists(st.sampled_from(EVENTS), max_size=8))
    stream = b"".join(events)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)))
    cutter = EventCutter()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += cutter.feed(stream[start:end])
    assert b"".join(found) + cutter.rest() == stream
    assert [data_of(event) for event in found if data_of(event)] == [data_of(e) for e in events if data_of(e)]


@given(st.lists(st.binary(max_size=40)))
def test_any_bytes_come_out_as_they_went_in(packets: list[bytes]) -> None:
    cutter = EventCutter()
    out = b"".join(event for packet in packets for event in cutter.feed(packet))
    assert out + cutter.rest() == b"".join(packets)


def test_payload_of_several_data_lines_is_joined_by_line_feeds() -> None:
    assert data_of(EVENTS[3]) == b"one\ntwo"
    assert event_name(EVENTS[3]) == b"ping"


def test_an_event_with_a_byte_order_mark_is_read() -> None:
    assert data_of(b"\xef\xbb\xbfdata: x\n\n") == b"x"


def test_comments_carry_no_payload() -> None:
    assert data_of(b": keep-alive\n\n") is None


def test_an_endless_event_is_refused() -> None:
    cutter = EventCutter(max_event_bytes=10)
    with pytest.raises(EventTooLong):
        cutter.feed(b"data: 0123456789")
