"""The event loop of a tunnel's ends: streams between two of them, whatever happens to what carries them."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymagic.wire.session.frames import Frame, ProtocolError, Session
from skymagic.wire.session.loop import MAX_BACKLOG, SessionLoop

# What happens next: a write of so many bytes to a stream (0 ends it) at one end, turns of the loops, or a loss.
WRITES = st.tuples(
    st.just("write"),
    st.integers(0, 1),
    st.integers(0, 1),
    st.sampled_from([0, 1, 1000, 70_000, 500_000, 3_000_000]),
)
TURNS = st.tuples(st.just("turn"), st.integers(0, 1), st.integers(1, 20), st.just(0))
LOSSES = st.tuples(st.just("lose"), st.integers(0, 1), st.just(0), st.just(0))


class Ends:
    """Two loops, and two streams from programs at one to programs at the other."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.heard: list[list[Frame]] = [[], []]
        self.loops = tuple(
            SessionLoop(Session(), self.heard[end].append, self.lost.append) for end in range(2)
        )
        self.programs: list[list[socket.socket]] = [[], []]
        self.written = [[bytearray(), bytearray()], [bytearray(), bytearray()]]
        self.read = [[bytearray(), bytearray()], [bytearray(), bytearray()]]
        self.waiting = [[bytearray(), bytearray()], [bytearray(), bytearray()]]
        self.ended = [[False, False], [False, False]]
        for channel in (1, 2):
            for end in range(2):
                program, ours = socket.socketpair()
                program.setblocking(False)
                self.programs[end].append(program)
                self.loops[end].channels.add(channel, ours)

    def connect(self) -> None:
        """A new connection, if both ends know that there is none."""
        for loop in self.loops:
            loop.detach("cut")
        socks = socket.socketpair()
        counts = [loop.session.received for loop in self.loops]
        for end in range(2):
            self.loops[end].attach(socks[end], counts[1 - end])

    def turn(self, end: int) -> None:
        """One round of a loop, and of the programs."""
        self.loops[end].step(time.monotonic())
        for each in range(2):
            for index in range(2):
                self.move(each, index)

    def move(self, end: int, index: int) -> None:
        """A program writes what it can, and reads what there is."""
        program, waiting = self.programs[end][index], self.waiting[end][index]
        with contextlib.suppress(BlockingIOError):
            while waiting:
                del waiting[: program.send(waiting)]
            if self.ended[end][index]:
                program.shutdown(socket.SHUT_WR)
        with contextlib.suppress(BlockingIOError):
            while data := program.recv(1 << 20):
                self.read[end][index] += data

    def write(self, end: int, index: int, count: int) -> None:
        """A program has something to say, or no more."""
        if self.ended[end][index]:
            return
        if not count:
            self.ended[end][index] = True
            return
        data = random.Random(len(self.written[end][index])).randbytes(count)
        self.written[end][index] += data
        self.waiting[end][index] += data

    def arrived(self) -> bool:
        """Whether each program has all that the one at the other end has written."""
        return all(
            len(self.read[end][index]) >= len(self.written[1 - end][index])
            for end in range(2)
            for index in range(2)
        )

    def close(self) -> None:
        """Close everything."""
        for loop in self.loops:
            loop.close()
        for program in (*self.programs[0], *self.programs[1]):
            program.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    both = Ends()
    yield both
    both.close()


@settings(max_examples=60)
@given(st.lists(st.one_of(WRITES, TURNS, LOSSES), max_size=25))
def test_streams_arrive_whatever_is_lost(steps) -> None:
    with contextlib.closing(Ends()) as ends:
        ends.connect()
        for what, end, index, count in steps:
            if what == "write":
                ends.write(end, index, count)
            elif what == "turn":
                for _ in range(index):
                    ends.turn(end)
            else:
                ends.connect()
        while not ends.arrived():
            ends.turn(0)
            ends.turn(1)
        assert ends.read == [ends.written[1], ends.written[0]]


def test_waiting_bytes_are_bounded(ends: Ends) -> None:
    """Streams are not read while there is no connection."""
    ends.write(0, 0, 50_000_000)
    for _ in range(2000):
        ends.turn(0)
    assert ends.loops[0].session.backlog < 2 * MAX_BACKLOG
    assert len(ends.waiting[0][0]) > 40_000_000


def test_refused_connection_leaves_the_previous_one(ends: Ends) -> None:
    ends.connect()
    ends.write(0, 0, 1000)
    for turn in range(20):
        ends.turn(turn % 2)
    stranger, ours = socket.socketpair()
    with stranger, ours, pytest.raises(ProtocolError):
        ends.loops[0].attach(ours, 10_000)
    assert ends.loops[0].attached
    ends.write(0, 0, 2000)
    while not ends.arrived():
        ends.turn(0)
        ends.turn(1)
    assert ends.lost == []
