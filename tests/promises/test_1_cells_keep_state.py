"""Promise 1: a cell is the unit, and state stays on the ranks between cells, as in any kernel."""

from __future__ import annotations

import sys

import IPython

from tests.lab.notebook import Notebook, seen


def test_variables_stay_on_each_rank(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\ncounter = [rank]")
    pool.run("%%sky_broadcast\ncounter.append(len(counter))")
    assert seen(pool, "counter") == [[0, 1], [1, 1]]


def test_functions_classes_and_imports_stay(pool: Notebook) -> None:
    pool.run(
        "%%sky_broadcast\nimport math\nclass Box:\n    side = 3\ndef volume(box): return math.prod([box.side] * 3)"
    )
    assert seen(pool, "volume(Box())") == [27, 27]


def test_a_value_made_on_a_rank_is_no_name_of_the_notebook(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\nonly_there = 5")
    assert not pool.value("'only_there' in globals()")
    assert pool.fail("only_there").ename == "NameError"


def test_targets_choose_the_ranks(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\nchosen = False")
    pool.run("%%sky_broadcast -t 1\nchosen = True")
    assert seen(pool, "chosen") == [False, True]


def test_ipythons_syntax_works(pool: Notebook) -> None:
    # IPython 7 reads no assignment from `!` with Python 3.12 and later, in plain cells neither
    old = IPython.version_info < (8,) and sys.version_info >= (3, 12)
    listed = "get_ipython().getoutput('echo a b')" if old else "!echo a b"
    cell = f"%%sky_broadcast -o listed\nlisted_here = {listed}\n%time word = listed_here[0].split()\nword"
    pool.run(cell)
    assert pool.value("listed") == [["a", "b"]] * 2


def test_top_level_await_works(pool: Notebook) -> None:
    assert seen(pool, "import asyncio\nawait asyncio.sleep(0, 'slept')") == ["slept", "slept"]


def test_invalid_cell_is_refused_before_anything_runs(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\ntouched = 0")
    assert pool.fail("%%sky_broadcast\ntouched = 1\ndef broken(:\n    pass").ename in (
        "CellSyntaxError",
        "SyntaxError",
    )
    assert seen(pool, "touched") == [0, 0]


def test_a_long_cell_runs_whole_and_its_errors_name_its_lines(pool: Notebook) -> None:
    filler = f"# {'x' * 98}\n" * 2_000
    pool.run(f"%%sky_broadcast -o long\n{filler}rank + 7")
    assert pool.value("long") == [7, 8]
    error = pool.fail(f"%%sky_broadcast\n{filler}raise KeyError('at the end')")
    assert error.ename == "KeyError"
    assert "2001" in error.text
    assert pool.value("'_sky_source' in globals()") is False
    assert seen(pool, "'_sky_source' in globals()") == [False, False]


def test_ranks_know_their_place(pool: Notebook) -> None:
    cell = "info = sky.instance_info()\n(info.rank, info.world_size, info.node, info.total_nodes, os.environ['RANK'], os.environ['WORLD_SIZE'])"
    assert seen(pool, cell) == [(0, 2, 0, 2, "0", "2"), (1, 2, 1, 2, "1", "2")]


def test_plain_cells_run_on_the_ranks_with_auto(pool: Notebook) -> None:
    pool.run("%sky_auto on")
    try:
        pool.run("made_by_auto = rank * 10")
        pool.run("%%local\nkept_here = 1")
    finally:
        pool.run("%sky_auto off")
    assert seen(pool, "made_by_auto") == [0, 10]
    assert pool.value("kept_here") == 1
