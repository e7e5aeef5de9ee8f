"""An agent that ends says why, though its log is deleted with its folder."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.providers.local import ChildTransport, run
from skymagic.wire import agent as wire
from skymagic.wire import processes


@pytest.fixture
def agent() -> Iterator[ChildTransport]:
    one = run(processes.AGENT)
    yield one
    one.close()


def messages(agent: ChildTransport) -> Iterator[wire.AgentMessage]:
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
    assert wire.AgentFailed(f"the agent was killed from outside ({number.name})") in list(said)


SLEEPS_THROUGH = """
import signal, threading
def unblocked():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    threading.Event().wait()
threading.Thread(target=unblocked, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("begun", flush=True)
from skymagic.kernels.agent import agent
agent.main()
"""
"""An agent whose signals come to another thread: like one just before a wait, they do not interrupt what the main thread waits for."""


def waits(pid: int) -> bool:
    """Whether the main thread of a process has a handler of SIGTERM, and sleeps for a while."""
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    states = set()
    for _ in range(10):
        states.add(Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0])
        time.sleep(0.01)  # the system tells nobody that a thread has begun to wait
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1) and states == {"S"}


@pytest.mark.parametrize("started", [True, False])
def test_a_signal_that_comes_just_before_a_wait(started: bool) -> None:
    command = [sys.executable, "-c", SLEEPS_THROUGH]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.readline() == b"begun\n"
        if started:
            agent.stdin.write(wire.encode(wire.AgentSpec("main", "main-1", 1, False)))
            agent.stdin.flush()
            assert isinstance(wire.decode(agent.stdout.readline()), wire.AgentStarted)
        while not waits(agent.pid):
            pass
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(20) == 128 + signal.SIGTERM


CONTROLLER = """
import sys
from skymagic.kernels.agent import controller
{change}
made = controller._controller()
print(made.name, "IPython.core.interactiveshell" in sys.modules, sys.modules.get("numpy", 0) is None)
"""


@pytest.mark.parametrize(
    ("change", "loaded"), [("", "False"), ("controller._CLIENT['ipyparallel.cluster'] = ()", "True")]
)
def test_a_controller_loads_no_client_and_starts_all_the_same_where_it_must(change: str, loaded: str) -> None:
    """The second is another version of ipyparallel, which takes other names."""
    done = subprocess.run(
        [sys.executable, "-c", CONTROLLER.format(change=change)], capture_output=True, text=True, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["ipcontroller", loaded, "False"], "")
