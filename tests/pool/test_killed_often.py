"""A training run whose notebook is killed again and again, and each time another continues with it: nothing is lost, and it ends as if undisturbed."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab.desk import ANNOUNCED, Desk, killed, local_desk, steps, without_repeats
from tests.lab.notebook import Notebook, Shown

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)

KILLS = 4
SEED = 20261122
MOST_STEPS = 10
"""So many steps at most are seen by a notebook before it is killed, which is so many seconds later at most."""
LATER = 0.06
TRAINING = """%%sky_broadcast -o losses
import os, time, torch
from torch.nn.parallel import DistributedDataParallel
rank = int(os.environ['RANK'])
torch.manual_seed(rank)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
generator = torch.Generator().manual_seed(rank)
step, last = 0, False
while not last:
    loss = model(torch.randn(16, 8, generator=generator)).square().mean()
    model.zero_grad()
    loss.backward()
    with torch.no_grad():  # as SGD does, of which torch's own imports its compiler
        for p in model.parameters():
            p -= 0.01 * p.grad
    print('step', step)
    step += 1
    ends = torch.tensor(float(LAST))
    torch.distributed.broadcast(ends, 0)
    last = bool(ends)
    time.sleep(PAUSE)
step, loss.item()"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with local_desk(tmp_path) as desk:
        yield replace(desk, made=f"{desk.made} --plugin torch")


def watched_and_killed(notebook: Notebook, shown: Shown, moments: random.Random) -> Shown:
    """What a notebook has shown when it is killed: at any moment once it has shown a few steps."""
    count = moments.randint(1, MOST_STEPS)
    notebook.watch(shown, lambda seen: len(steps(seen.lines)) >= count)
    time.sleep(moments.uniform(0, LATER))  # at any moment: that is what is tested
    killed(notebook)
    return notebook.rest(shown)


def test_a_run_whose_notebooks_are_killed_again_and_again(desk: Desk) -> None:
    enough, moments, shown = desk.folder / "enough", random.Random(SEED), list[Shown]()
    notebooks = desk.ahead(KILLS + 1)
    with closing(notebooks):
        first = next(notebooks)
        first.run(desk.made)
        cell = TRAINING.replace("LAST", f"os.path.exists({str(enough)!r})").replace("PAUSE", "0.05")
        shown.append(watched_and_killed(first, first.start(cell), moments))
        for _ in range(KILLS - 1):
            notebook = next(notebooks)
            shown.append(
                watched_and_killed(notebook, notebook.start(f"%sky_attach {desk.pool}"), moments)
            )
        last = next(notebooks)
        again = last.start(f"%sky_attach {desk.pool}")
        last.watch(again, lambda seen: len(steps(seen.lines)) >= MOST_STEPS)
        enough.touch()
        last.finish(again)
        assert again.error is None, again.error
        found = last.value("losses")
        # exactly once and in order, but for what is announced: what each kernel wrote shortly before it was killed, which is shown first
        late = re.compile(rf"step \d+\nstep \d+\n.*{ANNOUNCED}", re.DOTALL)
        assert [each.text for each in [*shown, again] if late.search(each.text)] == []
        assert steps(without_repeats([*shown, again])) == [*range(found[0][0])]
        undisturbed = TRAINING.replace("LAST", f"step == {found[0][0]}").replace("PAUSE", "0")
        last.run(undisturbed.replace("-o losses", "-o alone"))
        assert last.value("alone") == found
        last.run(f"%sky_down {desk.pool}")
