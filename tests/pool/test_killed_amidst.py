"""A notebook that is killed at a bad moment: amidst shipping, gathering, attaching, or before the first output; and two that attach at once."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.lab.desk import Desk, killed, local_desk, ssh_desk
from tests.lab.notebook import Notebook
from tests.lab.waiting import until

HERE = pytest.mark.parametrize("desk", ["detached"], indirect=True)
NO_LOCKS = (
    "import fcntl\ndef flock(*_): raise OSError(95, 'Operation not supported')\nfcntl.flock = flock"
)
"""As a file system that has none, such as NFS without lockd."""


@pytest.fixture(
    scope="module", params=["detached", pytest.param("ssh", marks=pytest.mark.needs("sshd"))]
)
def desk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("amidst")
    with local_desk(folder) if request.param == "detached" else ssh_desk(folder) as desk:
        with desk.notebook(desk.made) as notebook:
            notebook.run("%%sky_broadcast\nimport os, time\nrank = int(os.environ['RANK'])")
            killed(notebook)
        yield desk
        with desk.notebook(f"%sky_attach {desk.pool}") as notebook:
            attached(desk, notebook)
            notebook.run(f"%sky_down {desk.pool}")


@pytest.fixture
def first(desk: Desk) -> Iterator[Notebook]:
    """A notebook that goes on with what the one of the last test has left; the next test's, or the end, says how this one has left it."""
    with desk.notebook(f"%sky_attach {desk.pool}") as notebook:
        attached(desk, notebook)
        yield notebook


def attached(desk: Desk, notebook: Notebook) -> None:
    """The notebook has the pool, and its ranks have what they had."""
    notebook.run("%%sky_broadcast -o ranks\nrank")
    assert notebook.value("ranks") == [0, 1]


def test_while_it_ships(first: Notebook) -> None:
    first.run("import os\nlarge = os.urandom(50_000_000)")
    shown = first.start(
        "print('begun', flush=True)\nget_ipython().run_cell_magic('sky_broadcast', '', 'len(large)')"
    )
    first.watch(shown, lambda seen: "begun" in seen.stdout)
    killed(first)


def test_kill_before_output_while_attaching_and_gathering(desk: Desk, first: Notebook) -> None:
    begun, gate = desk.folder / "begun", desk.folder / "gate"
    begun.mkdir()
    cell = f"""%%sky_broadcast -o sizes -g large
open(f'{begun}/{{rank}}', 'w').close()
while not os.path.exists({str(gate)!r}): time.sleep(0.01)
large = bytes(50_000_000)
print('after', flush=True)
len(large)"""
    first.start(cell)
    until(lambda: len(list(begun.iterdir())) == 2)  # they get it one after the other
    killed(first)
    for seconds in (0.0, 0.2):  # amidst, or just after
        with desk.notebook("import time") as one:
            shown = one.start(f"print('begun', flush=True)\n%sky_attach {desk.pool}")
            one.watch(shown, lambda seen: "begun" in seen.stdout)
            time.sleep(seconds)  # the moment of its end is what is tested
            killed(one)
    with desk.notebook() as second:
        shown = second.start(f"%sky_attach {desk.pool}")
        second.watch(shown, lambda seen: "is still running" in seen.text)
        gate.touch()
        second.watch(shown, lambda seen: "after" in seen.stdout)
        killed(second)  # 100 MB are on their way
    with desk.notebook() as third:
        again = third.run(f"%sky_attach {desk.pool}")
        assert again.stdout.count("after") <= 1
        assert third.value("sizes, [len(each) for each in large]") == ([50_000_000] * 2,) * 2
        killed(third)


DIES_BETWEEN_NODES = """
import os, signal, time
from skymagic.cluster.links import AgentLink
from skymagic.wire.agent import Request
send, sent = AgentLink.send, []
def dying(self, message):
    if isinstance(message, Request):
        if sent:
            while not os.path.exists({begun}): time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        sent.append(message)
    return send(self, message)
AgentLink.send = dying"""


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("desk", ["ssh"], indirect=True)
def test_between_the_nodes_that_get_the_cell(desk: Desk, first: Notebook) -> None:
    """Rank 0 has it, and waits for rank 1 on another node, which never gets it."""
    begun = desk.folder / "begun by one"
    cell = f"""%%sky_broadcast -o sums
if rank == 0: open({str(begun)!r}, 'w').close()
while rank == 0: time.sleep(0.01)
rank"""
    first.run(DIES_BETWEEN_NODES.format(begun=repr(str(begun))))
    first.start(cell)
    psutil.wait_procs([psutil.Process(first.pid)])
    with desk.notebook() as second:
        error = second.fail(f"%sky_attach {desk.pool}")
        assert "rank 1" in error.text
        assert (error.ename, second.fields()["rank"]) == ("CellNotSent", 1), error.text
        killed(second)


def both_attach(desk: Desk, *before: str, rounds: int = 1) -> None:
    """Two notebooks at the same moment: one has the pool, the other hears that, and who has it, with one of its first cells."""
    with desk.notebook(*before) as one, desk.notebook(*before) as other:
        both = [(notebook, notebook.start(f"%sky_attach {desk.pool}")) for notebook in (one, other)]
        for (
            notebook,
            shown,
        ) in both:  # a cell of the first might be over before the other takes the pool
            notebook.finish(shown)
        ran = (
            [notebook.finish(notebook.start("%%sky_broadcast\nrank")) for notebook, _ in both]
            for _ in range(rounds)
        )
        cells = next((each for each in ran if any(cell.error for cell in each)), [])
        assert sorted(cell.error is None for cell in cells) == [False, True]
        # one that was through before the other came hears it with its next cell
        (loser,) = (
            (shown, cell)
            for (_, shown), cell in zip(both, cells, strict=True)
            if cell.error is not None
        )
        said = "".join(one.text + (one.error.text if one.error else "") for one in loser)
        assert "--take-over" in said or "attached" in said, said
        killed(one)
        killed(other)


def test_two_attach_at_the_same_moment(desk: Desk) -> None:
    both_attach(desk)


@HERE
def test_two_notebooks_attach_without_file_locks(desk: Desk) -> None:
    both_attach(
        desk, NO_LOCKS, rounds=50
    )  # the agent's news of the other may come after some short cells
