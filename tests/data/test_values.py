"""Values: what comes back from the ranks into variables, what goes there, and the magics that look, push, pull and restart."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, gate
from tests.lab.pools import KERNEL, Pools, borrowed

SETUP = "%%sky_broadcast\nimport os\nrank = int(os.environ['RANK']);"

notebook = borrowed("--ranks 3", SETUP)


# ------------------------------------------------------------------------------------------ -o and -g


RESULTS = {  # options and cell → what stands in the notebook
    "a list in rank order": (
        "-o r\nimport time\ntime.sleep((2 - rank) * 0.05)\n{'rank': rank}",
        "r, type(r).__name__", ([{"rank": 0}, {"rank": 1}, {"rank": 2}], "list"),
    ),
    "the head's alone": ("-o r -g a --head\na = rank + 10\n(rank, 'value')", "r, a", ((0, "value"), 10)),
    "variables": ("-g a,b -g c\na = rank; b = [rank]; c = 'c'", "a, b, c", ([0, 1, 2], [[0], [1], [2]], ["c"] * 3)),
    "both": (
        "-o result -g loss value\nloss = rank / 2; value = 1\n'done'",
        "result, loss, value", (["done"] * 3, [0.0, 0.5, 1.0], [1] * 3),
    ),
    "none of an earlier cell": ("-o r\npass", "r", [None] * 3),
    "of some ranks": ("-t 1: -o r\nrank", "r", [1, 2]),
    "what a cell does not show": ("--push hidden,other -o r\neval('hidden'), globals()['other']", "r", [({"a": 1}, 2)] * 3),
    "nothing was sent": ("--no-push -o r\n'hidden' in globals()", "r", [False] * 3),
    "all but a name": (
        "--no-push lock -o r\ntry:\n    lock\nexcept NameError:\n    made = 'own'\nmade, other", "r", [("own", 2)] * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", RESULTS)
def test_pulled_and_pushed_values_are_tracked(notebook: Notebook, what: str) -> None:
    options, expression, expected = RESULTS[what]
    notebook.run("import threading\nhidden, other, lock = {'a': 1}, 2, threading.Lock()")
    notebook.run(
        "%%sky_broadcast --no-push\nfor _name in ('hidden', 'other'): globals().pop(_name, None)"
    )
    notebook.run(f"%%sky_broadcast {options}")
    assert notebook.value(expression) == expected


def test_gathered_values_are_not_sent_back(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -g own\nown = rank")
    notebook.run("%%sky_broadcast -o r\nown")
    assert notebook.value("r") == [0, 1, 2]
    notebook.run("%%sky_broadcast -o own\n[rank, own]")
    assert notebook.value("own") == [[0, 0], [1, 1], [2, 2]]


def test_without_options_no_value_returns(notebook: Notebook) -> None:
    notebook.run("names_before = set(globals())")
    notebook.run("%%sky_broadcast\nwhatever = 1\nwhatever")
    assert notebook.value("set(globals()) - names_before - {'names_before'}") <= {
        "_i",
        "_ii",
        "_iii",
    } | {name for name in notebook.value("list(globals())") if name.startswith("_")}


def test_functions_and_classes_return_with_their_imports(notebook: Notebook) -> None:
    notebook.run(
        """%%sky_broadcast -o r
import textwrap as there_only, urllib.parse
from math import sqrt as root
from collections import Counter as Tally
counted = 5
json = "the ranks' own"
class There:
    def f(self):
        return there_only.dedent(' x'), root(9), Tally('aa')['a'], urllib.parse.quote(' ')
    def g(self):
        return counted
    def h(self):
        return json.dumps([])
There()"""
    )
    notebook.run("import json")
    assert notebook.value("[x.f() for x in r]") == [("x", 3.0, 2, "%20")] * 3
    assert notebook.value("[x.h() for x in r]") == ["[]"] * 3, "names of the notebook are its own"
    assert "'counted' is not defined" in notebook.fail("r[0].g()").evalue, "and so are variables"


def test_a_result_of_256_megabytes(notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -o r -t 0,2\nimport numpy as np\nbig = np.full(32 * 2**20, rank, dtype=np.float64)\nbig;"
    )
    assert notebook.value(
        "[(x.nbytes, x[0].item(), x[-1].item(), x.flags.writeable) for x in r]"
    ) == [
        (256 * 2**20, 0.0, 0.0, True),
        (256 * 2**20, 2.0, 2.0, True),
    ]
    assert "256" not in notebook.run("r[0][5] = 7; print(r[0].sum())").stdout
    notebook.run("%%sky_broadcast -t 0,2\ndel big")
    notebook.run("del r")


# ------------------------------------------------------------------------------------------ what cannot come back


def test_unpicklable_result_names_its_rank_and_keeps_others(notebook: Notebook) -> None:
    error = notebook.fail(
        "%%sky_broadcast -o r\nimport threading\nthreading.Lock() if rank == 1 else rank"
    )
    assert error.ename == "ResultError"
    assert "rank 1" in error.text
    assert "lock" in error.text
    assert "rank 0" not in error.text
    assert "rank 2" not in error.text
    assert notebook.value("r[0], r[2]") == (0, 2)
    assert "rank 1" in notebook.value("repr(r[1])")
    notebook.run("%%sky_broadcast -o after\nrank")
    assert notebook.value("after") == [0, 1, 2]


def test_a_variable_that_is_missing_on_one_rank(golden: Golden, notebook: Notebook) -> None:
    error = notebook.fail(
        "%%sky_broadcast -g somewhere, everywhere\neverywhere = rank\nif rank != 2:\n    somewhere = 'yes'",
        "result",
    )
    golden.line(error.text, "somewhere ")
    assert notebook.value("everywhere, somewhere[:2]") == ([0, 1, 2], ["yes", "yes"])


def test_a_value_whose_reconstruction_raises(notebook: Notebook) -> None:
    body = "class Bad:\n    def __reduce__(self): return (eval, (\"1/0\",))\nBad() if rank == 0 else 'fine'"
    error = notebook.fail(f"%%sky_broadcast -o r\n{body}")
    assert error.ename == "ResultError"
    assert "rank 0" in error.text
    assert "ZeroDivisionError" in error.text
    assert notebook.value("r[1:]") == ["fine", "fine"]


# ------------------------------------------------------------------------------------------ nothing piles up


def shared_memory(notebook: Notebook) -> set[str]:
    """Files of this pool's node store."""
    folder = notebook.value(
        "__import__('sys').modules['skymagic.pool.registry'].pool_named().agents.started[0].store"
    )
    return {path.name for path in Path(folder).iterdir()}


def test_unrequested_values_are_not_stored(notebook: Notebook) -> None:
    make = "import numpy as np\nmuch = np.ones(10**6)"
    before = shared_memory(notebook)
    notebook.run(f"%%sky_broadcast -o r\n{make}\nmuch;")
    assert shared_memory(notebook) == before, "taken"
    notebook.run(f"%%sky_broadcast -o r -g much --head\n{make}\nmuch;")
    assert shared_memory(notebook) == before, "of the head alone"
    notebook.fail(f"%%sky_broadcast -o r -g much\n{make}\nmuch if rank else 1 / 0")
    assert shared_memory(notebook) == before, "of ranks that ended well, where another failed"
    notebook.fail(f"%%sky_broadcast -o r -g much\n{make}\nmuch if rank else (i for i in ())")
    assert shared_memory(notebook) == before, "of those beside a value that cannot come back"


def test_pull_under_another_name_keeps_ownership_of_state(notebook: Notebook) -> None:
    notebook.run("ruled = 1")
    notebook.run("%%sky_broadcast\nruled += 10")
    notebook.run("ruled = 2")
    notebook.run("%sky_pull ruled -o copy")
    notebook.run("%%sky_broadcast -o r\nruled")
    assert notebook.value("copy, r") == ([11] * 3, [2] * 3)


# ------------------------------------------------------------------------------------------ --only, -t


def test_targets_run_on_these_ranks_alone(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nran = False")
    shown = notebook.run("%%sky_broadcast -t 1:3 -o r\nran = True\nprint('rank', rank)\nrank")
    assert notebook.value("r") == [1, 2]
    assert shown.lines == ["rank 1"], "the first that takes part"
    notebook.run("%%sky_broadcast -o r\nran")
    assert notebook.value("r") == [False, True, True]


def test_only_ranks_that_take_part_count_for_shard(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -t 0,2 -o r\nimport skymagic as sky\nsky.shard(list(range(5)))")
    assert notebook.value("r") == [[0, 2, 4], [1, 3]]


def test_nonexistent_ranks_are_refused(notebook: Notebook) -> None:
    for line in ("-t 5", "--only 3", "-t 0,7"):
        error = notebook.fail(f"%%sky_broadcast {line}\nprint('ran')")
        assert error.ename == "UsageError"
        assert "0 to 2" in error.evalue or "3 ranks" in error.evalue


# ------------------------------------------------------------------------------------------ push and pull


def test_sky_push(notebook: Notebook) -> None:
    notebook.run("pushed = {'k': 1}; also = 2; to_some = reset = 1")
    notebook.run("%sky_push pushed, also")
    notebook.run("%sky_push to_some -t 0,2")
    notebook.run("%%sky_broadcast --no-push -o r\npushed, also, 'to_some' in globals()")
    assert notebook.value("r") == [({"k": 1}, 2, rank != 1) for rank in range(3)]
    notebook.run("%%sky_broadcast\nreset = reset + rank + 10")
    notebook.run("%sky_push reset")
    notebook.run("%%sky_broadcast --no-push -o r\nreset")
    assert notebook.value("r") == [1, 1, 1], "it overwrites what the ranks made of it"


def test_sky_pull(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nloss = rank / 2; name = 'n'; pulled = rank")
    said = notebook.run("%sky_pull loss, name").lines
    assert said == [
        "loss → list of 3 × float, from ranks 0–2",
        "name → list of 3 × str, from ranks 0–2",
    ]
    assert notebook.value("loss, name") == ([0.0, 0.5, 1.0], ["n"] * 3)
    assert notebook.run("%sky_pull pulled --head -o head_alone").lines == [
        "head_alone → int, from rank 0"
    ]
    notebook.run("%sky_pull pulled -t 1: -o some")
    assert notebook.value("head_alone, some, 'pulled' in globals()") == (0, [1, 2], False)


# ------------------------------------------------------------------------------------------ one rank


def test_a_cell_on_one_rank_shows_its_output_and_value(notebook: Notebook) -> None:
    cell = "%%sky_broadcast -t 2 --head -o value\nprint('from', rank)\nrank * 2"
    assert notebook.run(cell).stdout == "from 2\n"
    assert notebook.value("value") == 4


# ------------------------------------------------------------------------------------------ --noblock


def test_noblock_returns_at_once_and_prints_in_its_cell(notebook: Notebook) -> None:
    fifo = gate(notebook.folder)
    shown = notebook.run(
        f"%%sky_broadcast -a -o later -t 0\nprint('begun')\nopen({str(fifo)!r}).read()\nprint('over')\n'value'"
    )
    notebook.run("'later' in globals()")
    assert notebook.value("'later' in globals()") is False
    plain = notebook.start("print('beside')")
    assert notebook.finish(plain).stdout == "beside\n"
    fifo.write_text("go")
    notebook.watch(shown, lambda cell: "over" in cell.stdout)
    assert shown.lines == ["begun", "over"]
    assert plain.stdout == "beside\n"


def test_noblock_failure_is_shown_in_its_cell(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast -a\nx = 1\nrank / 0")
    notebook.watch(shown, lambda cell: "on ranks 1, 2" in cell.stderr)
    assert "ZeroDivisionError" in shown.stderr
    shown = notebook.run("%%sky_broadcast -a -t 7\n1")
    notebook.watch(shown, lambda cell: "UsageError" in cell.stderr)


def test_cell_waits_for_a_background_cell(notebook: Notebook) -> None:
    fifo = gate(notebook.folder)
    notebook.run(f"%%sky_broadcast -a -t 0\nopen({str(fifo)!r}).read()\nmade_beside = 1")
    second = notebook.start("%%sky_broadcast -t 0 -o r\nmade_beside")
    fifo.write_text("go")
    notebook.finish(second)
    assert notebook.value("r") == [1]


# ------------------------------------------------------------------------------------------ looking, restarting


def test_status_shows_ranks_with_their_processes(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -o pids\nos.getpid()")
    text = notebook.run("%sky_status").said
    assert "'main'" in text
    assert "ready" in text
    rows = [line.split() for line in text.splitlines() if line[:1].isdigit()]
    assert [(row[0], row[3]) for row in rows] == [
        (str(r), str(pid)) for r, pid in enumerate(notebook.value("pids"))
    ]


def test_restart_of_all_ranks_sends_variables_again(notebook: Notebook) -> None:
    notebook.run("shipped = 'again'")
    notebook.run("%%sky_broadcast -o r\nlost = 1; shipped")
    notebook.run("%sky_restart")
    notebook.run("%%sky_broadcast -o r\n'lost' in globals(), shipped")
    assert notebook.value("r") == [(False, "again")] * 3
    notebook.run(SETUP)


def test_down_ends_all_processes_and_keeps_pulled_values(
    golden: Golden,
    shared_pools: Pools,
) -> None:
    with shared_pools.lent(KERNEL, "%sky_pool one --ranks 1", "%sky_pool two --ranks 1") as one:
        one.run("%%sky_broadcast -o r\nimport numpy as np\nnp.arange(10**6);")
        children = psutil.Process(one.pid).children(recursive=True)
        assert "one" in one.run("%sky_down one").stdout
        assert "'two'" in one.run("%sky_status").said
        one.run("%sky_down --all")
        _, alive = psutil.wait_procs(
            [p for p in children if "skymagic" in " ".join(_command(p))], timeout=10
        )
        assert not alive
        assert "no pool" in one.run("%sky_status").said
        golden(one.run("%sky_down").text)
        one.fail("%%sky_broadcast\n1", "no-pool")
        assert one.value("r[0].sum().item()") == 499999500000


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
