"""An agent that ends says why, though its log is deleted with its folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from skymagic.providers.local import ChildTransport, run
from skymagic.wire import agent as wire
from skymagic.wire import processes


@pytest.fixture
def agent() -> Iterator[ChildTransport]:
    one = run(processes.AGENT)
    yield one
    one.close()


def messages(agent: ChildTransport) -> Iterator[wire.Message]:
    """What it says until its end."""
    decoder = wire.decoder()
    while data := agent.read():
        yield from decoder.feed(data)


def test_an_agent_that_cannot_start(agent: ChildTransport) -> None:
    agent.write(wire.encode(wire.AgentSpec("main", "main-1", 0, True, env={"no=name": "x"})))
    (failed,) = messages(agent)
    assert isinstance(failed, wire.AgentFailed)
    first, *rest = failed.reason.splitlines()
    assert first == "the agent failed: ValueError: illegal environment variable name"
    assert "os.environ.update" in "".join(rest)
    assert "illegal environment variable name" in agent.complaint()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_agent_that_is_ended_from_outside(agent: ChildTransport, number: signal.Signals) -> None:
    agent.write(wire.encode(wire.AgentSpec("main", "main-1", 1, False)))
    said = messages(agent)
    assert isinstance(next(said), wire.AgentStarted)
    os.kill(agent._child.pid, number)
    assert wire.AgentFailed(f"the agent was ended from outside ({number.name})") in list(said)
