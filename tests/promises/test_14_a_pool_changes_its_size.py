"""Promise 14, and the life of a pool: it shrinks, grows, restarts and ends; who stays keeps variables, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.lab.notebook import Notebook, opened, seen
from tests.lab.sites import Site

PIDS = "os.getpid()"


def test_restart_makes_new_ranks_without_variables(pool: Notebook) -> None:
    pool.run("from_notebook_14 = [4]")
    pool.run("%%sky_broadcast\nlost_14 = 1; from_notebook_14")
    before = seen(pool, PIDS)
    pool.run("%sky_restart")
    assert not set(seen(pool, f"import os\n{PIDS}")) & set(before)
    assert seen(pool, "globals().get('lost_14')") == [None, None]
    assert seen(pool, "from_notebook_14") == [[4], [4]]
    assert seen(pool, "import torch.distributed as dist\ndist.get_world_size()") == [2, 2]


def test_one_rank_is_restarted(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\nkept_14 = rank")
    before = seen(pool, PIDS)
    pool.run("%sky_restart -t 1")
    after = seen(pool, f"import os\n{PIDS}")
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False]
    assert seen(pool, "globals().get('kept_14')") == [0, None]


def test_a_pool_that_fits_is_used_again(pool: Notebook, site: Site) -> None:
    before = seen(pool, PIDS)
    pool.run(f"%sky_pool lab {site.place.options} --plugin torch")
    assert seen(pool, PIDS) == before


def test_second_pool_runs_beside_the_first(pool: Notebook) -> None:
    pool.run("%sky_pool beside --provider local --ranks 1")
    try:
        pool.run("%%sky_broadcast --pool beside -o alone\nimport os\nos.environ['WORLD_SIZE']")
        pool.run("%%sky_broadcast --pool lab -o both\nos.environ['WORLD_SIZE']")
        assert pool.value("alone, both") == (["1"], ["2", "2"])
    finally:
        pool.run("%sky_down beside")
        pool.run("%sky_pool lab")


def test_nodes_are_released_and_added(tmp_path: Path) -> None:
    with opened(tmp_path, "%sky_pool sized --nodes 2") as notebook:
        notebook.run("%%sky_broadcast\nimport os\nkept_14 = os.environ['RANK']")
        notebook.run("%sky_pool sized --nodes 3")
        assert seen(notebook, "globals().get('kept_14')") == ["0", "1", None]
        notebook.run("%sky_pool sized --nodes 1")
        assert seen(notebook, "kept_14, os.environ['WORLD_SIZE']") == [("0", "1")]


def test_a_kernel_that_ends_takes_its_pool_along(site: Site) -> None:
    with site.another("%sky_pool ends --provider local --ranks 2") as notebook:
        ranks = seen(notebook, "import os\nos.getpid()")
    psutil.wait_procs([psutil.Process(pid) for pid in ranks if psutil.pid_exists(pid)], timeout=15)
    assert [pid for pid in ranks if psutil.pid_exists(pid)] == []


def test_an_idle_pool_ends(site: Site) -> None:
    with site.another("%sky_pool idles --provider local --ranks 1 --idle 1s") as notebook:
        (rank,) = [psutil.Process(pid) for pid in seen(notebook, "import os\nos.getpid()")]
        psutil.wait_procs([rank], timeout=20)
        assert not rank.is_running()
