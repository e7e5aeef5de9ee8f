"""Where ranks are and what they hold, while a cell runs beside the notebook, and when none does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from skymagic.display import inspection
from skymagic.kernels.stacks import CODE_CHARACTERS
from skymagic.wire.queries import Stack, StackFrame
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, Shown
from tests.lab.pools import borrowed

pytest.importorskip("torch")

LOADING = """\
import time
from torch import distributed as dist
def load_batch():
    print("there")
    open({gate!r}).read()
if dist.get_rank() == 2:
    load_batch()
dist.barrier()
"""

notebook = borrowed("--ranks 3 --plugin torch")


def gate(notebook: Notebook, name: str) -> Path:
    """A file that cannot be read before it was written."""
    path = notebook.folder / name
    os.mkfifo(path)
    return path


def beside(notebook: Notebook, body: str, gate: Path, options: str = "") -> Shown:
    """A cell beside the notebook that has come to its gate."""
    cell = notebook.run(f"%%sky_broadcast -a --only all {options}\n{body.format(gate=str(gate))}")
    notebook.watch(cell, lambda shown: "there" in shown.stdout)
    return cell


# ------------------------------------------------------------------------------------------ stacks


def test_stacks_of_a_background_cell(notebook: Notebook) -> None:
    file = gate(notebook, "loading")
    cell = beside(notebook, LOADING, file)
    shown = ""
    while "ranks 0, 1 in barrier" not in shown or "in load_batch" not in shown:
        shown = notebook.run("%sky_stacks").stdout
    file.write_text("go")
    notebook.watch(cell, lambda shown: "done" in shown.said)
    first, line, library, second, outer, inner, *rest = shown.splitlines()
    assert first == "ranks 0, 1 in barrier, line 9"
    assert re.fullmatch(r"    cell \d+, line 9 +dist\.barrier\(\)", line)
    assert re.fullmatch(r"    …/torch/distributed/distributed_c10d\.py:\d+ in barrier", library)
    assert second == "rank 2 in load_batch, line 6"
    assert re.fullmatch(r"    cell \d+, line 8 +load_batch\(\)", outer)
    assert re.fullmatch(r"    cell \d+, line 6 in load_batch +open\(.*\)\.read\(\)", inner)
    assert rest == []


def test_a_long_line_of_code_is_cut_visibly(notebook: Notebook) -> None:
    file = gate(notebook, "long")
    cell = beside(notebook, f"print('there')\n_ = {'0 or ' * 40}open({{gate!r}}).read()", file)
    while "0 or " not in (shown := notebook.run("%sky_stacks").stdout):
        pass
    file.write_text("go")
    notebook.watch(cell, lambda shown: "done" in shown.said)
    line = next(line for line in shown.splitlines() if "0 or " in line)
    code = re.split(r"  +", line.strip())[-1]
    assert code.endswith("…")
    assert len(code) == CODE_CHARACTERS


def test_stacks_of_some_ranks_and_of_a_cell_that_awaits(golden: Golden, notebook: Notebook) -> None:
    file = gate(notebook, "awaiting")
    body = (
        "import asyncio\nasync def patience():\n    print('there')\n"
        "    await asyncio.to_thread(lambda: open({gate!r}).read())\nawait patience()"
    )
    cell = beside(notebook, body, file, "-t 1")
    # what was printed came before the rank awaits
    while "rank 1 in patience" not in (text := notebook.run("%sky_stacks").stdout):
        pass
    golden(notebook.run("%sky_stacks --rank 0").stdout)
    file.write_text("go")
    notebook.watch(cell, lambda shown: "done" in shown.said)
    shown = text.splitlines()
    assert shown[0] == "ranks 0, 2: idle"
    assert shown[1] == "rank 1 in patience, line 5"


def test_stacks_of_idle_ranks(golden: Golden, notebook: Notebook) -> None:
    golden(notebook.run("%sky_stacks").stdout)


def test_ranks_that_cannot_be_asked(golden: Golden) -> None:
    waiting = Stack(True, (StackFrame("<module>", 2, cell=3, code="x()"),))
    text = inspection.stacks(
        {0: waiting, 1: None, 2: Stack(True, ())}, {3: "starting", 4: "starting"}
    )
    golden(text.splitlines())


# ------------------------------------------------------------------------------------------ variables


def rows(shown: Shown) -> dict[str, list[str]]:
    """By name its columns: type, content, ranks."""
    cells = [re.split(r"  +", line) for line in shown.lines[1:]]
    return {name: columns for name, *columns in cells}


def test_variables_and_which_differ(notebook: Notebook) -> None:
    notebook.run("lr = 0.01")
    notebook.run(
        "%%sky_broadcast\nimport numpy as np, torch\nfrom torch import distributed as dist, nn\nrank = dist.get_rank()\n"
        "used = lr\nsame = np.arange(1000.0).reshape(10, 100)\nown = np.full(3, rank)\n"
        "shard = torch.zeros(10 - (rank == 2), 4)\nnet = nn.Linear(3, 4)\nlisted = [object()]\nbig = 10 ** 5000\n"
        "if rank == 1:\n    alone = 'only here'\n"
        "class Loud:\n    def __len__(self): 1 / 0\n    __repr__ = __str__ = __len__\nloud = Loud()"
    )
    shown = notebook.run("%sky_vars")
    assert shown.lines[0].split() == ["name", "type", "size,", "shape", "or", "value", "ranks"]
    found = rows(shown)
    assert found["lr"] == ["float", "0.01", "all"]
    assert found["rank"] == ["int", "0, 1, 2", "all, values differ"]
    assert found["same"] == ["ndarray", "(10, 100) float64", "all"]
    assert found["own"] == ["ndarray", "(3,) int64", "all, values differ"]
    assert found["shard"] == ["Tensor", "(10, 4) float32", "ranks 0, 1"]
    assert found[""] == ["Tensor", "(9, 4) float32", "rank 2"]
    assert found["net"] == ["Linear", "16 parameters", "all"]
    assert found["listed"] == ["list", "1 item", "all"]
    assert found["big"] == ["int", "16610 bits", "all"]
    assert found["alone"] == ["str", "'only here'", "rank 1"]
    assert found["loud"][0] == "Loud"
    assert "np" not in found
    assert "ranks" not in notebook.run("%sky_vars --rank 2").lines[0]
    assert "alone" not in notebook.run("%sky_vars --rank 2").stdout


def test_variables_while_a_cell_runs(notebook: Notebook) -> None:
    file = gate(notebook, "changing")
    cell = beside(
        notebook,
        "from torch import distributed as dist\nstep = 7\n"
        "if dist.get_rank() == 0:\n    print('there')\n    open({gate!r}).read()\n",
        file,
    )
    shown = rows(notebook.run("%sky_vars --rank 0"))
    file.write_text("go")
    notebook.watch(cell, lambda shown: "done" in shown.said)
    assert shown["step"] == ["int", "7"]


# ------------------------------------------------------------------------------------------ misuse


@pytest.mark.parametrize("magic", ["sky_stacks", "sky_vars"])
def test_nonexistent_rank_is_refused_in_one_line(
    golden: Golden, notebook: Notebook, magic: str
) -> None:
    shown = notebook.finish(notebook.start(f"%{magic} --rank 9"))
    assert shown.failure.ename == "UsageError"
    golden(shown.stderr)
