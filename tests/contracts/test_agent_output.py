"""Output on the link: whatever connections are lost and whichever notebooks die, each line arrives, in order, and none comes again
unless the notebook that got it had not acknowledged it; that is announced.

``LINK_EVENTS=1000`` makes so many cuts and deaths; fewer by default.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.runtime.info import InstanceInfo, Peer
from skymagic.wire import agent as wire
from skymagic.wire.order import RunCell, packed_order
from skymagic.wire.output import Output, OutputComplete, OutputRepeated, OutputText
from skymagic.wire.queries import STACK
from tests.contracts import links
from tests.contracts.links import Daemon

EVENTS = int(os.environ.get("LINK_EVENTS", "40"))
DEATHS = 0.3
"""Share of the events in which the notebook dies and another one takes over."""
CELL = """
import os, time
number = 0
while not os.path.exists({gate!r}):
    print(number, "x" * (number % 300), flush=True)
    number += 1
    time.sleep(0.005)
print("end", number)
"""
REQUEST = "run-1"


class Reader:
    """A notebook's end of the link, which shows what it reads, and forgets it when it dies."""

    def __init__(self, link: Daemon) -> None:
        self.link = link
        self._decoder = wire.decoder()
        self._messages: list[wire.AgentMessage] = []
        self.finished = 0
        self.is_warned = False
        """Whether it was told that what comes next may have been shown."""

    def send(self, *messages: wire.AgentMessage) -> None:
        self.link.write(b"".join(map(wire.encode, messages)))

    def next(self) -> wire.AgentMessage:
        while not self._messages:
            data = self.link.read()
            assert data, self.link.complaint()
            self._messages += self._decoder.feed(data)
        message = self._messages.pop(0)
        self.finished += isinstance(message, wire.OrderFinished)
        self.is_warned |= isinstance(message, OutputRepeated)
        return message

    def until(self, kind: type[wire.AgentMessage]) -> wire.AgentMessage:
        while not isinstance(message := self.next(), kind):
            assert not isinstance(message, wire.AgentFailed | wire.AgentProblem), message
        return message

    def output(self) -> Output:
        """The next piece of the cell's output; what was read counts as shown."""
        while not (isinstance(message := self.next(), Output) and message.seq):
            pass
        assert message.request == REQUEST
        if message.cost:
            self.send(wire.Credit(message.cost))
        return message


def pool_of_one(pool: str) -> tuple[wire.AgentSpec, wire.RankSpec]:
    """What an agent and its only rank are started with."""
    info = InstanceInfo(0, 1, "127.0.0.1", 0, 0, (Peer(0, "127.0.0.1", "here"),), 0, 1, 0, 1, "here", pool)  # fmt: skip
    spec = wire.AgentSpec(pool, pool, 0, True, detached_timeout=60.0)
    return spec, wire.RankSpec(0, info.plain())


def started(link: Daemon, source: str) -> Reader:
    """The reader of a new pool whose rank has been sent this cell."""
    spec, rank = pool_of_one(f"test-{secrets.token_hex(4)}")
    reader = Reader(link)
    reader.send(spec, wire.Spawn((rank,)))
    reader.until(wire.RankReady)
    order = RunCell(ranks=(0,), run=1, visible_ranks=(0,), screen_limit=1 << 30, execution_count=1)
    reader.send(wire.Request((0,), REQUEST, 1, packed_order(order), source))
    return reader


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Daemon]:
    with links.to_agent(tmp_path) as make, contextlib.closing(make()) as made:
        yield made


def test_no_line_is_lost_or_repeated_unannounced_whatever_dies(
    link: Daemon, tmp_path: Path
) -> None:
    """Readers leave or connections break at random moments (seeded) while the rank prints."""
    gate, moments = tmp_path / "gate", random.Random(1)
    reader = started(link, CELL.format(gate=str(gate)))
    pieces: list[str] = []
    repeats: list[int] = []
    """For each new notebook, how many pieces came again."""

    expected = 1

    def show(output: Output) -> None:
        nonlocal expected
        assert output.seq == expected, "lost or repeated"
        expected += 1
        assert isinstance(output, OutputText | OutputComplete), output
        text = output.text if isinstance(output, OutputText) else ""
        if output.seq <= len(pieces):
            assert text == pieces[output.seq - 1]
            assert reader.is_warned
        else:
            pieces.append(text)

    with contextlib.ExitStack() as opened:
        for _ in range(EVENTS):
            for _ in range(moments.randrange(30)):
                show(reader.output())
                if moments.random() < 0.3:
                    reader.send(wire.Shown(REQUEST, {0: len(pieces)}))
            if moments.random() < DEATHS:
                is_acknowledged = moments.random() < 0.5
                if is_acknowledged:
                    # the reply shows that the acknowledgement has arrived; the output that comes
                    # before it is received and not shown
                    reader.send(wire.Shown(REQUEST, {0: len(pieces)}), wire.ReadLog(0, 1, lines=1))
                    reader.until(wire.LogReply)
                reader.link.leave()
                reader = Reader(opened.enter_context(contextlib.closing(link.another(link.secret))))
                reader.until(wire.RankReady)
                reader.send(wire.Follow(REQUEST, (0,)))
                output = reader.output()
                expected = output.seq
                # else the last acknowledgement may have died with its notebook
                assert expected == len(pieces) + 1 or (
                    expected <= len(pieces) and not is_acknowledged
                )
                repeats.append(len(pieces) + 1 - expected)
                show(output)
            else:
                reader.link.cut()
        gate.touch()
        while not isinstance(output := reader.output(), OutputComplete):
            show(output)
        show(output)
        if not reader.finished:
            reader.until(wire.OrderFinished)
        assert reader.finished == 1
        lines = "".join(pieces).splitlines()
        count = int(lines[-1].removeprefix("end "))
        assert [int(line.split()[0]) for line in lines[:-1]] == [*range(count)]
        # most notebooks had acknowledged something: what comes again is not all there was
        assert sum(repeats) < len(pieces)
        reader.send(wire.Shutdown())


ENDLESS = """
import os
while not os.path.exists({gate!r}):
    os.write(1, b"x" * 999 + b"\\n")
"""


def test_output_that_is_not_shown_holds_no_answer_up(link: Daemon, tmp_path: Path) -> None:
    """A rank prints without end, and nobody reads it: a question is answered nevertheless."""
    gate = tmp_path / "gate"
    reader = started(link, ENDLESS.format(gate=str(gate)))
    credit = wire.window(1)
    while credit > 0:
        message = reader.next()
        credit -= message.cost if isinstance(message, Output) else 0
    for number in range(1, 4):
        reader.send(wire.RankRequest((0,), STACK.method, number))
        reply = reader.until(wire.RankReply)
        assert isinstance(reply, wire.RankReply)
        assert (reply.number, STACK.read(reply.value).busy) == (number, True)  # type: ignore[union-attr]
    gate.touch()
    reader.send(wire.Credit(1 << 40))
    reader.until(wire.OrderFinished)
    reader.send(wire.Shutdown())
