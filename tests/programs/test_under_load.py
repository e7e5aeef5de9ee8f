"""The races that other people's programs begin, many times over on a machine that is busy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.lab.notebook import Notebook, opened, seen
from tests.programs.test_programs import program

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)
REPETITIONS = int(os.environ.get("SKYMAGIC_REPETITIONS", "1"))
"""`make soak` has more of them."""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """On a pool that is ready, beside two processes for each core that never rest."""
    with opened(tmp_path_factory.mktemp("races"), "%sky_pool --nodes 2 --plugin torch") as one:
        one.run(f"%%sky_broadcast\n{program('races')}")
        busy = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(2 * (os.cpu_count() or 1))
        ]
        try:
            yield one
        finally:
            for process in busy:
                process.kill()
                process.wait()


@pytest.mark.parametrize("name", ["tutorial", "accelerated"])
def test_group_destroyed_while_its_model_is_alive(notebook: Notebook, name: str) -> None:
    if name == "accelerated" and find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    groups = seen(notebook, "id(dist.group.WORLD)")
    for _ in range(REPETITIONS):
        (weights, group), (others, other) = seen(notebook, f"{name}(), id(dist.group.WORLD)")
        assert weights == others
        assert [group, other] == groups, "it stays"


def test_a_rank_that_fails_while_the_others_compute(notebook: Notebook) -> None:
    """They are interrupted in Python, and the group stays, with the models on it."""
    groups = seen(notebook, "id(dist.group.WORLD)")
    expected = seen(notebook, "step()")
    for _ in range(REPETITIONS):
        assert notebook.fail("%%sky_broadcast\nstep(fails=True)").evalue == "planted"
        (weights, group), (others, other) = seen(notebook, "step(), id(dist.group.WORLD)")
        assert weights == others
        assert weights != expected[0], "a step has changed them"
        expected = [weights]
        assert [group, other] == groups


RESTORES_ALL_SIGNALS = """
import ctypes, os, signal
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.getsignal(number) or signal.SIG_DFL)
ctypes.PyDLL(None).poll(None, 0, 2_000)
dist.get_rank(), os.getpid() == first_pid"""
"""As Lightning does after a fit; then native code holds the interpreter, and the rank's stack is looked at from outside."""
GROUPS = [[(rank, rank, 3, 3.0) for rank in range(3)], [(rank, rank, 2, 1.0) for rank in range(2)]]
PROGRAMS = {
    "calls": (program("remote_calls_by_environment"), [1.0, 2.0]),
    "processes": (program("tutorial_processes"), [(GROUPS, 2.0)] * 2),
    "signals": (RESTORES_ALL_SIGNALS, [(0, True), (1, True)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_forks_and_sets_signals_itself(notebook: Notebook, name: str) -> None:
    cell, values = PROGRAMS[name]
    groups = seen(notebook, "import os; first_pid = os.getpid()\nid(dist.group.WORLD)")
    for _ in range(REPETITIONS):
        assert seen(notebook, cell) == values
    assert seen(notebook, "id(dist.group.WORLD)") == groups, "the ranks' own group stays"
