"""Errors and stops in what a cell runs inside itself: ``%run``, ``%%capture``, ``run_cell`` and their like end the cell on all ranks."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook, seen
from tests.lab.pools import borrowed

pytest.importorskip("torch")

notebook = borrowed("--ranks 2 --plugin torch", "import torch.distributed as dist")

FAILS = """import torch, torch.distributed as dist
made = 6
if dist.get_rank() == 1:
    raise LookupError("no such batch")
dist.barrier()
"""
NESTED = {
    "run": "%run nested_fails.py",
    "run -i": "%run -i nested_fails.py",
    "run -m": "%run -m nested_fails",
    "run -e": "%run -e nested_fails.py",
    "run -t": "%run -t nested_fails.py",
    "run -p": "%run -p nested_fails.py",
    "run .ipy": "%run nested_fails.ipy",
    "in a function": "def train():\n    get_ipython().run_line_magic('run', 'nested_fails.py')\ntrain()",
    "run_cell": "get_ipython().run_cell(open('nested_fails.py').read())",
    "capture": "%%capture\n" + FAILS,
    "capture of run": "%%capture out\n%run nested_fails.py",
    "time": "%%time\n" + FAILS,
    "time of run": "%time get_ipython().run_line_magic('run', 'nested_fails.py')",
    "timeit": "%%timeit -n 1 -r 1\n" + FAILS,
    "run_cell_magic": "get_ipython().run_cell_magic('capture', '', open('nested_fails.py').read())",
    "run_cell in run_cell": "get_ipython().run_cell('get_ipython().run_cell(open(\"nested_fails.py\").read())')",
}


@pytest.fixture(autouse=True)
def files(notebook: Notebook) -> None:
    for name in ("nested_fails.py", "nested_fails.ipy"):
        (notebook.folder / name).write_text(FAILS)
    notebook.run(
        f"%%sky_broadcast\nimport os, torch.distributed as dist\nos.chdir({str(notebook.folder)!r})"
    )


def one_sum(notebook: Notebook) -> list[int]:
    return list(
        seen(notebook, "x = [None] * 2\ndist.all_gather_object(x, dist.get_rank())\nsum(x)")
    )


@pytest.mark.parametrize("name", NESTED)
def test_error_of_nested_code_fails_cell_on_all_ranks(notebook: Notebook, name: str) -> None:
    error = notebook.fail(
        f"%%sky_broadcast --timeout 60s\n{NESTED[name]}\nafter = 1"
        if not NESTED[name].startswith("%%")
        else f"%%sky_broadcast --timeout 60s\n{NESTED[name]}"
    )
    assert error.ename == "LookupError"
    assert "rank 1" in error.text
    assert "no such batch" in error.text
    assert "skymagic/" not in error.text
    assert "IPython/" not in error.text
    assert one_sum(notebook) == [1, 1]
    if name.startswith("run "):
        assert seen(notebook, "'after' in globals()") == [False, False]


def test_names_made_before_the_error_are_defined(notebook: Notebook) -> None:
    notebook.fail("%%sky_broadcast\n%run nested_fails.py")
    assert seen(notebook, "made, __name__") == [(6, "__main__")] * 2


def test_nested_error_that_is_caught_is_no_error(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\ntry:\n    get_ipython().run_cell('1 / 0')\nexcept ZeroDivisionError:\n    print('caught')"
    )
    assert shown.text.strip() == "caught"


def test_exit_of_a_script(notebook: Notebook) -> None:
    (notebook.folder / "leaves.py").write_text("import sys\nsys.exit(int(sys.argv[1]))\n")
    notebook.run("%%sky_broadcast\n%run leaves.py 0")
    notebook.run("%%sky_broadcast\n%run -e leaves.py 3")
    assert notebook.fail("%%sky_broadcast\n%run leaves.py 3").ename == "SystemExit"


STOPPED = {
    "run": "%run sleeps.py",
    "run -i": "%run -i sleeps.py",
    "capture": "%%capture --no-stdout\n%run sleeps.py",
    "run_cell": "get_ipython().run_cell(open('sleeps.py').read())",
    "system": "!echo at work; sleep 600",
}


@pytest.mark.parametrize("name", STOPPED)
def test_stop_in_nested_code_stops_the_cell(notebook: Notebook, name: str) -> None:
    (notebook.folder / "sleeps.py").write_text(
        "import time\nprint('at work', flush=True)\ntime.sleep(600)\n"
    )
    notebook.run("%%sky_broadcast\nafter = 0")
    more = "" if STOPPED[name].startswith("%%") else "\nafter = 1"
    cell = notebook.start(f"%%sky_broadcast --only all\n{STOPPED[name]}{more}")
    notebook.watch(cell, lambda shown: shown.text.count("at work") == 2)
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.failure.ename == "RunInterrupted"
    assert seen(notebook, "after") == [0, 0]
