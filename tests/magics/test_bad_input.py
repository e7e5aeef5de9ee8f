"""Input that nobody means to give: each is refused in words or simply works, and nothing piles up.

Exits, input() and names that are missing are in test_failures_simple, floods in test_output, large results in test_values.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import KERNEL, Pools, borrowed

notebook = borrowed(
    "--ranks 2 --plugin torch",
    "%%sky_broadcast\nimport os, sys, threading\nrank = int(os.environ['RANK']);",
)


# ------------------------------------------------------------------------------------------ the cell's text


@pytest.mark.parametrize("body", ["\n", "\n   \n\t\n", "# only a comment", "pass"])
def test_cell_that_does_nothing(notebook: Notebook, body: str) -> None:
    assert notebook.run(f"%%sky_broadcast -o r\n{body}").outputs == []
    assert notebook.value("r") == [None, None]


def test_a_line_without_a_cell_runs_nothing(notebook: Notebook) -> None:
    notebook.run("%sky_broadcast -o r")
    assert notebook.value("r") == [None, None]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("def f(:\n    pass", 2),
        ("x = 1\nif x:\ny = 2", 4),
        ("return 5", 2),
        ("x = 1\n  y = 2", 3),
        ("'''never\nclosed", 2),
    ],
)
def test_syntax_error_is_shown_once_and_nothing_is_sent(
    notebook: Notebook, body: str, line: int
) -> None:
    notebook.run("import threading\nunsendable = threading.Lock()")
    shown = notebook.finish(notebook.start(f"%%sky_broadcast\n{body}\nunsendable"))
    assert shown.failure.ename == "CellSyntaxError"
    assert shown.failure.text.count("CellSyntaxError") == 1
    assert shown.text == ""
    assert f"(line {line} " in shown.failure.text
    assert "unsendable (" not in shown.failure.text
    assert "skymagic" not in shown.failure.text


def test_syntax_error_starts_no_pool(shared_pools: Pools) -> None:
    with shared_pools.lent(KERNEL) as one:
        assert one.fail("%%sky_broadcast --nodes 2\ndef f(:").ename == "CellSyntaxError"
        assert psutil.Process(one.pid).children() == []


@pytest.mark.parametrize(
    ("body", "word"),
    [("x = 1\0", "null"), (f"{'(' * 500}1{')' * 500}", "parentheses")],
    ids=["null bytes", "deeply nested"],
)
def test_uncompilable_cells_are_refused(notebook: Notebook, body: str, word: str) -> None:
    error = notebook.fail(f"%%sky_broadcast\n{body}")
    assert error.ename == "CellSyntaxError"
    assert word in error.text


def test_cells_of_two_megabytes(notebook: Notebook) -> None:
    lines = "\n".join(f"    {number}, # {'c' * 1000}" for number in range(2000))
    assert len(lines) > 2_000_000
    notebook.run(f"%%sky_broadcast -o r\nlisted = [\n{lines}\n]\nlen(listed)")
    assert notebook.value("r") == [2000] * 2
    error = notebook.fail(f"%%sky_broadcast\ntext = '{'x' * 2_000_000}'\n1 / 0")
    assert error.ename == "ZeroDivisionError"
    assert "----> 3 1 / 0" in error.text


def test_unicode_in_names_strings_and_comments(notebook: Notebook) -> None:
    notebook.run("größe = '漢字🤖'\ndef füge_an(x): return x + '…'")
    notebook.run(
        "%%sky_broadcast -o ergebnis -g μ\n# Kommentar: 🤖\nμ = füge_an(größe)\nμ + '\\N{BULLET}'"
    )
    assert notebook.value("ergebnis, μ") == (["漢字🤖…•"] * 2, ["漢字🤖…"] * 2)


@pytest.mark.parametrize(
    ("body", "value"),
    [("\r\nif True:\r\n\tx = 'a'\r\nx", "a"), ('\n#%sky {"kind": "rejoin"}\n5', 5)],
    ids=["of Windows, with tabs", "like an order"],
)
def test_unusual_lines(notebook: Notebook, body: str, value: object) -> None:
    notebook.run(f"%%sky_broadcast -o r{body}")
    assert notebook.value("r") == [value] * 2


# ------------------------------------------------------------------------------------------ what cannot travel


def test_unpicklable_value_fails_only_when_used(notebook: Notebook) -> None:
    notebook.run("async def f(): pass\nthing = f()")
    notebook.run("%%sky_broadcast -o r\n'thing' in globals()")
    assert notebook.value("r") == [False, False]
    error = notebook.fail("%%sky_broadcast\nprint('it ran')\nthing")
    assert error.ename == "CaptureError"
    for words in ("thing (", "coroutine", "await", "nothing was run"):
        assert words in error.text
    assert "skymagic/" not in error.text
    notebook.run("thing.close()\ndel thing")


def test_a_module_of_the_notebook_that_is_main(notebook: Notebook) -> None:
    notebook.run("import __main__\nfrom __main__ import __name__ as own_name\nseen = 1")
    notebook.run("%%sky_broadcast -o r\nimport __main__\nown_name, __name__")
    assert notebook.value("r") == [("__main__", "__main__")] * 2


def test_ipython_and_its_own_names_stay_here(notebook: Notebook) -> None:
    notebook.run("1 + 1")
    notebook.run("%%sky_broadcast -o r\nIn, Out, get_ipython().__class__.__name__;")
    assert notebook.value("[name for _, _, name in r]") == ["ZMQInteractiveShell"] * 2


# ------------------------------------------------------------------------------------------ the line


def test_mistakes_of_the_line_are_one_line_before_anything_runs(notebook: Notebook) -> None:
    shown = notebook.finish(
        notebook.start("%%sky_broadcast --timeout soon --nodse 3 -o 1x\nprint('it ran')")
    )
    assert shown.failure.ename == "UsageError"
    assert shown.stdout == ""
    assert len(shown.stderr.splitlines()) == 1
    for word in ("--timeout", "soon", "--nodse", "did you mean '--nodes'", "-o"):
        assert word in shown.stderr


# ------------------------------------------------------------------------------------------ unusual ways to call


def test_in_a_loop_by_run_cell_magic(notebook: Notebook) -> None:
    shown = notebook.run(
        "collected = []\nfor step in range(5):\n"
        "    get_ipython().run_cell_magic('sky_broadcast', '-o part', 'print(\"step\", step)\\nrank * step')\n    collected.append(part)"
    )
    assert shown.lines == [f"step {step}" for step in range(5)]
    assert notebook.value("collected") == [[0, step] for step in range(5)]


def test_error_in_a_loop_stops_the_loop(notebook: Notebook) -> None:
    error = notebook.fail(
        "for step in range(5):\n    get_ipython().run_cell_magic('sky_broadcast', '', 'x = 1\\n1 / (step - 2)')"
    )
    assert error.ename == "ZeroDivisionError"
    assert "2 1 / (step - 2)" in error.text, "numbered in the body, for there is no cell around it"
    assert notebook.value("step") == 2


def test_within_a_cell_magic_of_the_notebook(notebook: Notebook) -> None:
    notebook.run(
        "%%capture held\nget_ipython().run_cell_magic('sky_broadcast', '-o r', 'print(\"captured\")\\nrank')"
    )
    assert notebook.value("held.stdout, r") == ("captured\n", [0, 1])


def test_from_a_thread_of_the_notebook(notebook: Notebook) -> None:
    notebook.run(
        "import threading\nthread = threading.Thread(target=get_ipython().run_cell_magic, args=('sky_broadcast', '-o r', 'rank + 5'))\n"
        "thread.start(); thread.join()"
    )
    assert notebook.value("r") == [5, 6]


@pytest.mark.parametrize(
    "line",
    [
        "get_ipython().run_cell_magic('sky_broadcast', '', '1')",
        "import skymagic as sky; sky.Compute(nodes=2).start()",
    ],
)
def test_a_rank_has_no_pool_of_its_own(golden: Golden, notebook: Notebook, line: str) -> None:
    golden(notebook.fail(f"%%sky_broadcast\n{line}").evalue)


def test_user_code_that_breaks_builtins_is_survived(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -o r\nprint = None; json = 'mine'; sys.modules['json'].mine = 1; input = 5; len = 'mine'; list = dict = None\nrank"
    )
    assert notebook.value("r") == [0, 1]
    notebook.run(
        "%%sky_broadcast -o r\ndel print, input, len, list, dict\nprint('again')\nlen([1])"
    )
    assert notebook.value("r") == [1, 1]


def test_user_code_that_replaces_its_streams(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast\nimport io\nkept = sys.stdout, sys.stderr\nsys.stdout = io.StringIO(); sys.stderr = None\nprint('hidden')"
    )
    shown = notebook.run(
        "%%sky_broadcast -o r\nheard = sys.stdout.getvalue()\nsys.stdout, sys.stderr = kept\nprint('shown')\nheard"
    )
    assert shown.stdout == "shown\n"
    assert notebook.value("r") == ["hidden\n"] * 2


@pytest.mark.parametrize(
    "breaks",
    [
        "os.close(1); os.close(2)",
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = None",
        "del sys.stdout",
        "sys.stdout = type('NoStream', (), {'write': lambda self, text: None})()",
        "sys.stdout = type('Raises', (), {'write': len, 'flush': lambda self: 1 / 0})()",
        "os.closerange(0, 3)",
    ],
)
def test_user_code_that_breaks_its_streams(notebook: Notebook, breaks: str) -> None:
    notebook.finish(notebook.start(f"%%sky_broadcast\n{breaks}"))
    shown = notebook.run("%%sky_broadcast -o r\nprint('out'); print('err', file=sys.stderr)\nrank")
    assert (shown.stdout, shown.stderr) == ("out\n", "err\n")
    assert notebook.value("r") == [0, 1]


def test_user_code_that_changes_the_folder_and_environment(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nimport tempfile\nos.chdir('/'); os.environ.clear()")
    notebook.run("%%sky_broadcast -o r\nrank, os.getcwd()")
    assert notebook.value("r") == [(0, "/"), (1, "/")]
    notebook.run("%sky_restart")
    notebook.run("%%sky_broadcast\nimport os, sys, threading\nrank = int(os.environ['RANK']);")


# ------------------------------------------------------------------------------------------ again and again


COUNT = """
import gc, os, psutil, threading, time
gc.collect()
def count():
    # ipykernel closes those of threads that have ended every ten seconds; a rank has none
    pipes = getattr(getattr(get_ipython().kernel, "iopub_thread", None), "_event_pipes", {})
    for thread in [thread for thread in pipes if isinstance(pipes, dict) and not thread.is_alive()]:
        pipes.pop(thread).close()
    me, before = psutil.Process(), None
    while (now := me.num_fds()) != before:  # libzmq closes them on a thread of its own
        before = now
        time.sleep(0.1)
    return {"threads": me.num_threads(), "fds": me.num_fds(), "listening": sum(c.status == "LISTEN" for c in me.net_connections("inet"))}
"""
TRAIN = """%%sky_broadcast -o r
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")  # as in a script; there is a group already
model = DDP(torch.nn.Linear(10, 1))
model(data[:4]).sum().backward()
total = torch.ones(1)
dist.all_reduce(total)
print("step")
(total.item(), len(dist.distributed_c10d._world.pg_map), os.environ["MASTER_PORT"], data[:2])
"""


def counts(notebook: Notebook) -> dict[str, int]:
    """Threads, descriptors, ports, processes and shared memory of everything that belongs to the notebook."""
    notebook.run(f"{COUNT}\nhere = count()")
    notebook.run(f"%%sky_broadcast -o there\n{COUNT}\ncount()")
    found = {f"notebook's {what}": number for what, number in notebook.value("here").items()}
    for rank, figures in enumerate(notebook.value("there")):
        found |= {f"rank {rank}'s {what}": number for what, number in figures.items()}
    family = psutil.Process(notebook.pid).children(recursive=True)
    folder = notebook.value(
        "__import__('sys').modules['skymagic.pool.registry'].pool_named().agents.started[0].store"
    )
    return found | {
        "processes": len(family),
        "all threads": sum(process.num_threads() for process in family),
        "all descriptors": sum(process.num_fds() for process in family),
        "shared memory": len(list(Path(folder).iterdir())),
    }


def grown(notebook: Notebook, before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What is more than it was, and stays so: a thread of the last run may be at its end."""
    deadline = time.monotonic() + 10
    while True:
        after = counts(notebook)
        found = {
            what: (before[what], number) for what, number in after.items() if number > before[what]
        }
        if not found or time.monotonic() > deadline:
            return found


def test_the_same_cell_again_and_again(notebook: Notebook) -> None:
    notebook.run("import torch\ndata = torch.ones(40_000, 10)")
    for _ in range(3):
        shown = notebook.run(TRAIN)
    assert "init_process_group changes nothing" in shown.stderr
    first = notebook.value("[x[:3] for x in r]")
    assert [(total, groups) for total, groups, _ in first] == [(2.0, 1)] * 2
    before = counts(notebook)
    for _ in range(10):
        notebook.run(TRAIN)
    assert notebook.value("[x[:3] for x in r]") == first
    assert grown(notebook, before) == {}


def test_failing_cells_leave_nothing(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nimport torch, torch.distributed as dist;")
    cell = "%%sky_broadcast -o r\nbig = bytes(10**6)\nif rank == 1:\n    raise ValueError('again')\ndist.all_reduce(torch.ones(1)); big;"
    for _ in range(3):  # the first group that is replaced stays with DDP
        notebook.fail(cell)
    before = counts(notebook)
    for _ in range(5):
        notebook.fail(cell)
    assert grown(notebook, before) == {}


def test_restarts_leave_nothing(notebook: Notebook) -> None:
    notebook.run("%sky_restart")
    before = counts(notebook)
    for _ in range(2):
        notebook.run("%sky_restart")
    assert grown(notebook, before) == {}


def test_started_and_ended_pools_leave_nothing(shared_pools: Pools) -> None:
    with shared_pools.lent(KERNEL) as one:
        figures = []
        for _ in range(2):
            one.run("%sky_pool passing --nodes 1")
            one.run("%%sky_broadcast -o r\n1")
            one.run("%sky_down passing")
            one.run(f"{COUNT}\nhere = count()")
            figures.append(
                (one.value("here"), len(psutil.Process(one.pid).children(recursive=True)))
            )
        assert figures[1:] == figures[:1]


def test_missing_torchrun_suggests_a_pool_with_torch(golden: Golden, notebook: Notebook) -> None:
    failed = notebook.fail("%%sky_sh\nPATH=/usr/bin:/bin\ntorchrun train.py")
    golden.line(failed.text, "torchrun ", " PATH ")
    assert "--plugin torch" not in failed.text
