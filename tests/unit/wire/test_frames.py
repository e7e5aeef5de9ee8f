"""Frames: whatever connections are lost, each byte arrives exactly once, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.wire.session import frames
from skymagic.wire.session.frames import Frame, ProtocolError, Session
from tests.lab.golden import Golden

MESSAGES = st.lists(st.binary(max_size=40), max_size=6)
# Each step: what either end puts, how many bytes the connection carries each way, and whether it breaks then.
STEPS = st.lists(
    st.tuples(
        MESSAGES,
        MESSAGES,
        st.integers(1, 200),
        st.integers(0, 150),
        st.integers(0, 150),
        st.booleans(),
        st.booleans(),
    ),
    max_size=30,
)


class Pair:
    """Two sessions and the bytes under way between them."""

    def __init__(self) -> None:
        self.ends = (Session(), Session())
        self.way = [bytearray(), bytearray()]
        self.heard: tuple[list[bytes], list[bytes]] = ([], [])
        self.connect()

    def connect(self) -> None:
        """A new connection; what was under way is lost."""
        self.way = [bytearray(), bytearray()]
        counts = [end.received for end in self.ends]
        self.ends[0].resume(counts[1])
        self.ends[1].resume(counts[0])

    def carry(self, end: int, count: int, ack: bool) -> None:
        """`count` of the bytes that this end has sent reach the other."""
        piece = bytes(self.way[end][:count])
        del self.way[end][:count]
        other = 1 - end
        self.heard[other].extend(frame.data for frame in self.ends[other].feed(piece))
        if ack:
            self.way[other] += self.ends[other].ack()

    def finish(self) -> None:
        """No more losses."""
        for end in (0, 1, 0, 1):
            while data := self.ends[end].take(1 << 20):
                self.way[end] += data
            self.carry(end, len(self.way[end]), ack=True)


@given(STEPS)
def test_each_byte_once_and_in_order(steps) -> None:
    pair = Pair()
    said: tuple[list[bytes], list[bytes]] = ([], [])
    for mine, yours, limit, there, back, ack, breaks in steps:
        for end, messages in ((0, mine), (1, yours)):
            for message in messages:
                pair.ends[end].put(frames.DATA, 0, message)
                said[end].append(message)
            pair.way[end] += pair.ends[end].take(limit)
        pair.carry(0, there, ack)
        pair.carry(1, back, ack)
        if breaks:
            pair.connect()
    pair.finish()
    assert pair.heard == (said[1], said[0])
    assert [end.all_acknowledged for end in pair.ends] == [True, True]
    assert pair.ends[0].backlog == pair.ends[1].backlog == 0


@given(st.binary(max_size=3 * frames.MAX_DATA), st.integers(1, 1 << 18))
def test_long_data_is_cut(data, limit) -> None:
    session, other = Session(), Session()
    session.put(frames.DATA, 5, data)
    came: list[Frame] = []
    while piece := session.take(limit):
        came += other.feed(piece)
    assert b"".join(frame.data for frame in came) == data
    assert {frame.channel for frame in came} == {5}
    assert max(len(frame.data) for frame in came) <= frames.MAX_DATA


def test_acknowledged_frames_are_dropped() -> None:
    session, other = Session(), Session()
    session.put(frames.DATA, 0, b"x")
    assert not session.all_acknowledged
    other.feed(session.take(100))
    assert other.unacknowledged == 1
    session.feed(other.ack())
    assert session.all_acknowledged
    assert other.unacknowledged == 0
    assert session.take(100) == b""


@pytest.mark.parametrize("received", [-1, 3])
def test_stranger_cannot_resume_a_session(received) -> None:
    session = Session()
    session.put(frames.DATA, 0, b"1")
    session.put(frames.DATA, 0, b"2")
    with pytest.raises(ProtocolError, match="of 2 frames"):
        session.resume(received)


def test_acknowledged_frames_cannot_be_requested_again() -> None:
    session, other = Session(), Session()
    session.put(frames.DATA, 0, b"1")
    other.feed(session.take(100))
    session.feed(other.ack())
    with pytest.raises(ProtocolError):
        session.resume(0)


@given(st.binary(min_size=frames.HEADER.size, max_size=100))
def test_noise_is_refused_or_waits(noise) -> None:
    session = Session()
    try:
        heard = session.feed(noise)
    except ProtocolError:
        return
    assert session.received == len(heard)


def test_a_gap_is_refused(golden: Golden) -> None:
    session, other = Session(), Session()
    session.put(frames.DATA, 0, b"1")
    session.take(100)
    session.put(frames.DATA, 0, b"2")
    with golden.raises(ProtocolError):
        other.feed(session.take(100))


def test_more_acknowledged_than_sent_is_refused() -> None:
    session, other = Session(), Session()
    other.received = 4
    with pytest.raises(ProtocolError, match="acknowledged"):
        session.feed(other.ack())
