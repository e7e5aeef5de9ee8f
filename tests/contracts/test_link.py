"""A link between a notebook and a node's agent: whatever connections are lost, everything arrives once and in order."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.contracts import links
from tests.contracts.links import Daemon, Link

DAEMONS = [
    pytest.param(links.to_child, id="child"),
    pytest.param(links.over_channel, marks=pytest.mark.needs("sshd"), id="channel"),
]
LINKS = [pytest.param(links.in_process, id="in-process"), *DAEMONS]
MOST_BUFFERED = 64 << 20
"""Most bytes of a stream that the link may take while nobody reads at the other end."""


@pytest.fixture(scope="module", params=LINKS)
def maker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], Link]]:
    made: Callable[[Path], AbstractContextManager[Callable[[], Link]]] = request.param
    with made(tmp_path_factory.mktemp("link")) as make:
        yield make


@pytest.fixture
def link(maker: Callable[[], Link]) -> Iterator[Link]:
    with contextlib.closing(maker()) as made:
        yield made


def test_lines_arrive_once_in_order_over_cuts(link: Link) -> None:
    """Connections break with lines in transit in both directions."""
    sent, received = 0, b""
    moments = random.Random(0)
    for _ in range(link.cuts):
        for _ in range(1000):
            link.write(b"%d\n" % sent)
            sent += 1
        some = moments.randint(received.count(b"\n"), sent)
        while received.count(b"\n") < some:
            received += link.read()
        link.cut()
    while received.count(b"\n") < sent:
        received += link.read()
    assert received == b"".join(b"%d\n" % number for number in range(sent))


def test_a_stream_arrives_unchanged_over_cuts(link: Link) -> None:
    sent, received, cuts = os.urandom(20 << 20), bytearray(), 0
    with link.stream() as (here, there):

        def fill() -> None:
            here.sendall(sent)
            here.shutdown(socket.SHUT_WR)

        filling = threading.Thread(target=fill)
        filling.start()
        while data := there.recv(1 << 16):
            received += data
            if len(received) > (cuts + 1) * (3 << 20):
                cuts += 1
                link.cut()
        filling.join()
        assert received == sent
        there.sendall(b"the other way is still open")
        assert here.recv(100) == b"the other way is still open"
    assert cuts >= 5


def test_an_unread_stream_holds_nothing_else_up(link: Link) -> None:
    with link.stream() as (here, there):
        here.settimeout(0.5)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 2 * MOST_BUFFERED:
                sent += here.send(bytes(1 << 20))
        assert sent < MOST_BUFFERED
        link.write(b"before\n")
        assert link.lines(1) == [b"before"]
        link.cut()
        link.write(b"after\n")
        assert link.lines(1) == [b"after"]
        here.shutdown(socket.SHUT_WR)
        assert sum(map(len, iter(lambda: there.recv(1 << 20), b""))) == sent


def test_unread_lines_hold_no_stream_up(link: Link) -> None:
    line = bytes(1 << 16).replace(b"\0", b"x") + b"\n"
    for _ in range(200):
        link.write(line)
    with link.stream() as (here, there):
        here.sendall(b"passes")
        assert there.recv(100) == b"passes"
    assert link.lines(200) == [line[:-1]] * 200


def test_ended_link_reports_its_end(link: Link) -> None:
    link.write(b"line\n")
    assert link.lines(1) == [b"line"]
    link.close()
    link.close()
    assert link.read() == b""
    with pytest.raises(BrokenPipeError):
        link.write(b"line\n")


# -- two notebooks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("maker", DAEMONS, indirect=True)
def test_a_second_notebook_takes_over(link: Daemon) -> None:
    """The first one is notified, and its incomplete messages reach nobody."""
    link.write(b"first\n")
    assert link.lines(1) == [b"first"]
    link.write(b"half a li")
    with contextlib.closing(link.another(link.secret)) as second:
        second.write(b"second\n")
        assert second.lines(1) == [b"second"]
        assert link.read() == b""
        assert link.complaint() == "another notebook has attached instead of this one"
        with pytest.raises(BrokenPipeError):
            link.write(b"first\n")
        second.write(b"still\n")
        assert second.lines(1) == [b"still"]


@pytest.mark.parametrize("maker", DAEMONS, indirect=True)
def test_a_stranger_takes_nothing_over(link: Daemon) -> None:
    link.write(b"first\n")
    assert link.lines(1) == [b"first"]
    with contextlib.closing(link.another("guessed")) as stranger:
        assert stranger.read() == b""
        assert stranger.complaint() == "a daemon of this name serves another notebook"
    link.write(b"second\n")
    assert link.lines(1) == [b"second"]
