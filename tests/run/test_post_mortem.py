"""``%debug`` after a cell that failed on a rank: the rank's frames are there until its next cell."""

from __future__ import annotations

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

pytest.importorskip("torch")

FAILS = """\
%%sky_broadcast
import torch, torch.distributed as dist
def share(total, parts):
    return total / parts
def step(batch):
    n = len(batch)
    return share(n, dist.get_rank() - 1)
if dist.get_rank() != 1:
    dist.barrier()
step(torch.ones(4, 2))
"""

notebook = borrowed("--ranks 2 --plugin torch")


def typed(notebook: Notebook, *lines: str) -> str:
    """What %debug prints when these lines are typed."""
    shown = notebook.start("%debug", answering=True)
    for line in lines:
        assert notebook.answer(line) == "rank 1> "
    assert notebook.finish(shown).error is None, shown.text
    return shown.stdout


def test_frames_of_the_rank_that_failed(notebook: Notebook) -> None:
    assert notebook.fail(FAILS).ename == "ZeroDivisionError"
    shown = typed(
        notebook,
        "p parts",
        "up",
        "n",
        "batch.shape",
        "locals",
        "list",
        "where",
        "print(n * 2)",
        "down",
        "total",
        "q",
    )
    assert "line 4 in share\n-> return total / parts" in shown
    assert "\n0\n" in shown, "p parts"
    assert "line 7 in step\n-> return share(n, dist.get_rank() - 1)" in shown
    assert "\n4\n" in shown, "n is a variable, not pdb's command"
    assert "torch.Size([4, 2])" in shown
    assert "batch = tensor(" in shown
    assert "def step(batch):" in shown
    assert "\n8\n" in shown
    assert "skymagic" not in shown
    assert "IPython" not in shown


def test_it_begins_in_the_users_own_frame(notebook: Notebook) -> None:
    notebook.fail(
        "%%sky_broadcast\nimport torch, torch.distributed as dist\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = torch.nn.Linear(3, 1)\n    def forward(self, batch):\n        return self.layer(batch)\n"
        "net = torch.nn.parallel.DistributedDataParallel(Net())\nif dist.get_rank() != 1:\n    dist.barrier()\nnet(torch.ones(4, 2))"
    )
    shown = typed(notebook, "p batch.shape", "down", "p self.in_features", "q")
    assert "torch.Size([4, 2])" in shown
    assert "linear.py" in shown, "a library's frames are below it"
    assert "\n3\n" in shown


def test_debugger_limits_on_ended_frames(notebook: Notebook) -> None:
    notebook.fail(FAILS)
    shown = typed(notebook, "continue", "nowhere", "1 / 0", "q")
    assert "*** continue: " in shown
    assert "*** NameError: name 'nowhere' is not defined" in shown
    assert "*** ZeroDivisionError" in shown


def test_frames_are_gone_with_the_next_cell_and_the_group_works(
    golden: Golden, notebook: Notebook
) -> None:
    notebook.fail(FAILS)
    typed(notebook, "p parts", "q")
    notebook.run("%%sky_broadcast -o sums\nx = torch.ones(1)\ndist.all_reduce(x)\nint(x)")
    assert notebook.value("sums") == [2, 2]
    shown = notebook.finish(notebook.start("%debug"))
    golden(shown.stderr)


def test_front_end_without_input_is_refused(golden: Golden, notebook: Notebook) -> None:
    notebook.fail(FAILS)
    shown = notebook.finish(notebook.start("%debug"))
    assert "line 4 in share" in shown.stdout
    golden(shown.stderr)


def test_an_error_of_the_notebook_is_ipythons_own(notebook: Notebook) -> None:
    notebook.fail(FAILS)
    notebook.fail("here = 5\n1 / 0")
    shown = notebook.start("%debug", answering=True)
    assert notebook.answer("p here").startswith("ipdb>")
    notebook.answer("q")
    assert "5\n" in notebook.finish(shown).stdout
