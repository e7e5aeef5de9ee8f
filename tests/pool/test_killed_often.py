"""A training run whose notebook is killed again and again, and each time another goes on with it: nothing is lost, and it ends as if undisturbed."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.lab.hosts import loopback, still_there
from tests.lab.notebook import Notebook, Shown, opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: pip install torch")

KILLS = {"detached": 10, "ssh": 5}
SEED = 20261122
MOST_STEPS = 40
"""So many steps at most are seen by a notebook before it is killed."""
TRAINING = """%%sky_broadcast -o losses
import os, time, torch
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ['RANK'])
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
step, last = 0, False
while not last:
    loss = model(torch.randn(16, 8, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print('step', step)
    step += 1
    ends = torch.tensor(float(LAST))
    torch.distributed.broadcast(ends, 0)
    last = bool(ends)
    time.sleep(PAUSE)
step, loss.item()"""
Open = Callable[[], AbstractContextManager[Notebook]]


@pytest.fixture(params=["detached", pytest.param("ssh", marks=pytest.mark.needs("sshd"))])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, str, Open]]:
    """How often its notebooks are killed, what makes the pool, and what opens a notebook of its user."""
    kills = KILLS[request.param]
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}

    def opens(env: dict[str, str]) -> Open:
        @contextmanager
        def notebook() -> Iterator[Notebook]:
            folder = tmp_path / f"notebook-{os.urandom(4).hex()}"
            folder.mkdir()
            with opened(folder, env=env) as one:
                yield one

        return notebook

    if request.param == "detached":
        yield kills, f"%sky_pool often{os.urandom(4).hex()} --ranks 2 --plugin torch --detached", opens(state)
        return
    with loopback(tmp_path / "hosts", 2, env=pip_settings()) as hosts:
        env = {"HOME": str(home_that_knows(hosts, tmp_path / "client")), **state}
        yield (
            kills,
            f"%sky_pool often --provider ssh --hosts h[1-2] --python {sys.executable} --plugin torch",
            opens(env),
        )


def steps(shown: Shown) -> list[int]:
    return [int(line.removeprefix("step ")) for line in shown.lines if line.startswith("step ")]


def watched_and_killed(notebook: Notebook, shown: Shown, count: int) -> list[int]:
    """The steps that a notebook has shown when it is killed, which is once it has shown so many."""
    notebook.watch(shown, lambda seen: len(steps(seen)) >= count)
    process = psutil.Process(notebook.pid)
    process.kill()
    assert still_there([process]) == []
    return steps(notebook.rest(shown))


def test_a_run_whose_notebooks_are_killed_again_and_again(place: tuple[int, str, Open], tmp_path: Path) -> None:
    kills, made, opens = place
    name, enough = made.split()[1], tmp_path / "enough"
    moments = random.Random(SEED)
    shown: list[list[int]] = []
    with opens() as first:
        first.run(made)
        cell = TRAINING.replace("LAST", f"os.path.exists({str(enough)!r})").replace("PAUSE", "0.01")
        shown.append(watched_and_killed(first, first.start(cell), moments.randint(1, MOST_STEPS)))
    for _ in range(kills - 1):
        with opens() as notebook:
            again = notebook.start(f"%sky_attach {name}")
            shown.append(watched_and_killed(notebook, again, moments.randint(1, MOST_STEPS)))
    with opens() as last:
        again = last.start(f"%sky_attach {name}")
        last.watch(again, lambda seen: len(steps(seen)) >= MOST_STEPS)
        enough.touch()
        last.finish(again)
        assert again.error is None, again.error
        shown.append(steps(again))
        found = last.value("losses")
        count = found[0][0]
        # each notebook shows all from some step on; what another has sent in the moment before its kill comes again, and nothing is lost
        assert shown[-1][-1] == count - 1
        for before, after in pairwise([[-1], *shown]):
            assert after == [*range(after[0], after[-1] + 1)]
            assert after[0] <= before[-1] + 1
        undisturbed = TRAINING.replace("LAST", f"step == {count}").replace("PAUSE", "0")
        last.run(undisturbed.replace("-o losses", "-o alone"))
        assert last.value("alone") == found
        last.run(f"%sky_down {name}")
