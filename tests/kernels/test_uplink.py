"""Writes of an agent: they never block, control goes first, and output is bounded by credit and in memory."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator

import pytest

from skymagic.kernels.agent import uplink as uplinks
from skymagic.kernels.agent.uplink import RankInput, Uplink
from skymagic.kernels.fork import EventLoop
from skymagic.wire import agent as wire
from skymagic.wire.output import (
    Output,
    OutputComplete,
    OutputDisplay,
    OutputSuppressed,
    OutputText,
)

WINDOW = 10_000


def raising(problem: Exception) -> None:
    raise problem


class Notebook:
    """The other end, which reads when it is asked to."""

    def __init__(self) -> None:
        self.lost = 0
        self.reader, self.writer = os.pipe()
        self.loop = EventLoop(raising)
        self.uplink = Uplink(self.loop, self.writer, WINDOW, self._on_lost)
        self._decoder = wire.decoder()

    def _on_lost(self) -> None:
        self.lost += 1

    def read(self) -> list[wire.AgentMessage]:
        """All that the agent can write now."""
        messages: list[wire.AgentMessage] = []
        os.set_blocking(self.reader, False)
        self.uplink.flush()
        while True:
            try:
                messages += self._decoder.feed(os.read(self.reader, 1 << 16))
            except BlockingIOError:
                return messages
            self.loop.run_once(time.monotonic())

    def close(self) -> None:
        self.uplink.close()
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def notebook() -> Iterator[Notebook]:
    made = Notebook()
    yield made
    made.close()


def text(rank: int, seq: int, size: int = 900) -> OutputText:
    return OutputText(rank, "stdout", "x" * size, seq=seq, cost=size + wire.OUTPUT_COST)


def outputs(messages: list[wire.AgentMessage]) -> list[Output]:
    return [message for message in messages if isinstance(message, Output)]


def test_control_messages_overtake_output(notebook: Notebook) -> None:
    notebook.uplink.show(text(0, 1))
    notebook.uplink.send(wire.RankReady(3))
    assert [type(message) for message in notebook.read()] == [wire.RankReady, OutputText]


def test_output_waits_for_credit(notebook: Notebook) -> None:
    for seq in range(1, 31):
        notebook.uplink.show(text(0, seq))
    assert [output.seq for output in outputs(notebook.read())] == [*range(1, 11)]
    notebook.uplink.send(wire.RankReady(3))
    assert [type(message) for message in notebook.read()] == [wire.RankReady]
    notebook.uplink.grant(5 * 1000)
    assert [output.seq for output in outputs(notebook.read())] == [*range(11, 16)]


def test_a_piece_larger_than_the_window_is_sent(notebook: Notebook) -> None:
    notebook.uplink.show(text(0, 1, 50 * WINDOW))
    notebook.uplink.show(text(0, 2))
    assert [output.seq for output in outputs(notebook.read())] == [1]
    notebook.uplink.grant(50 * WINDOW + wire.OUTPUT_COST)
    assert [output.seq for output in outputs(notebook.read())] == [2]


def test_ranks_take_turns(notebook: Notebook) -> None:
    for seq in range(1, 101):
        notebook.uplink.show(text(0, seq))
    notebook.uplink.show(text(1, 1))
    assert [output.rank for output in outputs(notebook.read())][:2] == [0, 1]


def test_waiting_output_is_bounded_and_its_size_reported(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplinks, "MAX_UNSENT", 5000)
    for seq in range(1, 21):
        notebook.uplink.show(text(0, seq))
    notebook.uplink.show(OutputComplete(0, seq=21))
    note, *rest = outputs(notebook.read())
    assert isinstance(note, OutputSuppressed)
    assert note.nbytes == 15 * 1000
    assert [output.seq for output in rest] == [16, 17, 18, 19, 20, 21]


def test_displays_are_dropped_before_text(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplinks, "MAX_UNSENT", 5000)

    def figure(seq: int, kind: str = "display_data") -> OutputDisplay:
        content = {"data": {}, "transient": {"display_id": "figure"}}
        return OutputDisplay(0, kind, content, seq=seq, cost=2000)

    notebook.uplink.show(figure(1))
    notebook.uplink.show(text(0, 2))
    for seq in range(3, 9):
        notebook.uplink.show(figure(seq, "update_display_data"))
    note, line, *figures = outputs(notebook.read())
    assert isinstance(note, OutputSuppressed)
    assert note.nbytes == 5 * 2000
    assert line.seq == 2
    # the notebook has never had the display that these update
    assert [(one.seq, getattr(one, "kind", "")) for one in figures] == [
        (7, "display_data"),
        (8, "update_display_data"),
    ]


def test_another_notebook_starts_with_a_whole_window(notebook: Notebook) -> None:
    for seq in range(1, 31):
        notebook.uplink.show(text(0, seq))
    notebook.read()
    notebook.uplink.restart()
    assert notebook.read() == []
    for seq in range(5, 31):
        notebook.uplink.show(text(0, seq))
    assert [output.seq for output in outputs(notebook.read())] == [*range(5, 15)]


def test_everything_arrives_once_and_in_order(notebook: Notebook) -> None:
    """Any sizes of pieces and grants, and a reader with pauses."""
    moments, shown, seen = random.Random(2), [0, 0, 0], [0, 0, 0]
    for _ in range(2000):
        rank = moments.randrange(3)
        shown[rank] += 1
        notebook.uplink.show(text(rank, shown[rank], moments.randrange(2000)))
        if moments.random() < 0.2:
            for output in outputs(notebook.read()):
                seen[output.rank] += 1
                assert output.seq == seen[output.rank]
                notebook.uplink.grant(output.cost)
    while more := outputs(notebook.read()):
        for output in more:
            seen[output.rank] += 1
            assert output.seq == seen[output.rank]
            notebook.uplink.grant(output.cost)
    assert seen == shown


def test_a_notebook_that_does_not_read_blocks_nothing(notebook: Notebook) -> None:
    for number in range(200_000):
        notebook.uplink.send(wire.RankReady(number))
    notebook.uplink.flush()
    numbers = [message.rank for message in notebook.read() if isinstance(message, wire.RankReady)]
    while more := notebook.read():
        numbers += [message.rank for message in more if isinstance(message, wire.RankReady)]
    assert numbers == [*range(200_000)]


def test_the_end_of_the_link_is_reported_once() -> None:
    notebook = Notebook()
    os.close(notebook.reader)
    for _ in range(3):
        notebook.uplink.send(wire.RankReady(0))
        notebook.uplink.flush()
    assert notebook.lost == 1
    os.close(notebook.writer)


def test_a_rank_that_does_not_read_blocks_nothing() -> None:
    loop = EventLoop(raising)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rank = RankInput(loop, ours.fileno())
        lines = [b"%d" % number + b"x" * 10_000 + b"\n" for number in range(1000)]
        for line in lines:
            rank.send(line)
        received = b""
        while len(received) < sum(map(len, lines)):
            loop.run_once(time.monotonic())
            received += theirs.recv(1 << 16)
        assert received == b"".join(lines)
        rank.close()
