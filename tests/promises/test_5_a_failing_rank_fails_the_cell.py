"""Promise 5: the cell fails with the rank's own exception; the others leave their collective and keep their variables."""

from __future__ import annotations

import time

import pytest

from tests.lab.notebook import Notebook, seen

RAISES = "if rank == 1:\n    raise ValueError('planted', 7)\n"
COLLECTIVES = {
    "all_reduce": "dist.all_reduce(torch.ones(1 << 16))",
    "barrier": "dist.barrier()",
    "an asynchronous one": "dist.all_reduce(torch.ones(9), async_op=True).wait()",
    "a loop": "while True: time.sleep(0.01)",
}


def test_the_error_is_the_ranks_own(pool: Notebook) -> None:
    failure = pool.fail(f"%%sky_broadcast\n{RAISES}")
    assert failure.ename == "ValueError"
    assert "raise ValueError('planted', 7)" in failure.text
    assert "rank 1" in failure.text
    pool.run("import sys, skymagic as sky\nerror_5 = sys.last_value")
    assert pool.value(
        "isinstance(error_5, ValueError), isinstance(error_5, sky.errors.RankError), error_5.args, error_5.rank"
    ) == (True, True, ("planted", 7), 1)


def test_an_exception_class_of_the_notebook_is_caught_as_such(pool: Notebook) -> None:
    pool.run("class Mine(Exception):\n    pass")
    failure = pool.fail("%%sky_broadcast\nraise Mine('own')")
    assert failure.ename == "Mine"
    pool.run("import sys\nis_mine = isinstance(sys.last_value, Mine)")
    assert pool.value("is_mine")


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_the_others_are_freed_and_keep_their_variables(pool: Notebook, collective: str) -> None:
    pool.run("%%sky_broadcast\nkept_5 = (rank, os.getpid())")
    before = seen(pool, "kept_5")
    began = time.monotonic()
    failure = pool.fail(f"%%sky_broadcast\n{RAISES}{COLLECTIVES[collective]}")
    assert failure.ename == "ValueError"
    assert time.monotonic() - began < 30, "the collective's own timeout is half an hour"
    assert seen(pool, "kept_5") == before
    cell = "one = torch.ones(1)\ndist.all_reduce(one)\none.item()"
    assert seen(pool, cell) == [2.0, 2.0]


def test_errors_of_several_ranks_are_summed_up(pool: Notebook) -> None:
    failure = pool.fail("%%sky_broadcast\nraise (KeyError if rank else OSError)('both')")
    assert failure.ename == "OSError"
    assert "KeyError" in failure.text


def test_output_before_the_error_is_shown(pool: Notebook) -> None:
    shown = pool.finish(pool.start("%%sky_broadcast\nprint('before')\n1 / 0"))
    assert shown.stdout == "before\n"
    assert shown.failure.ename == "ZeroDivisionError"


def test_values_before_the_error_stay_on_the_ranks(pool: Notebook) -> None:
    pool.fail("%%sky_broadcast\nreached_5 = rank\n1 / 0")
    assert seen(pool, "reached_5") == [0, 1]


def test_exit_ends_the_cell_and_not_the_rank(pool: Notebook) -> None:
    before = seen(pool, "os.getpid()")
    shown = pool.finish(pool.start("%%sky_broadcast\nif rank == 1:\n    sys.exit(3)"))
    assert shown.error is not None
    assert seen(pool, "os.getpid()") == before


def test_a_rank_that_is_killed_is_named_and_replaced(pool: Notebook) -> None:
    pool.run("from_notebook_5 = 'sent again'")
    pool.run("%%sky_broadcast\nfrom_notebook_5; lost_5 = rank")
    failure = pool.fail(
        "%%sky_broadcast\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    )
    assert failure.ename == "RankDied"
    pool.run("import sys\nerror_5 = sys.last_value")
    assert pool.value("error_5.rank, error_5.status") == (1, -9)
    assert "SIGKILL" in failure.text
    cell = "from_notebook_5, globals().get('lost_5')"
    assert seen(pool, cell) == [("sent again", 0), ("sent again", None)]


def test_a_segmentation_fault_is_named(pool: Notebook) -> None:
    failure = pool.fail("%%sky_broadcast\nif rank == 0:\n    os.kill(os.getpid(), signal.SIGSEGV)")
    assert failure.ename == "RankDied"
    assert "SIGSEGV" in failure.text
    assert seen(pool, "1 + 1") == [2, 2]


def test_what_a_rank_wrote_before_it_died_is_shown_or_said_to_be_left_out(pool: Notebook) -> None:
    pool.run("%config SkyMagic.screen_limit = 1_000")
    # a pipe takes 4096 bytes as a whole: no part of them is small enough to be shown
    body = "os.write(1, b'x' * 4095 + b'\\n')\n    os.kill(os.getpid(), signal.SIGKILL)"
    shown = pool.finish(pool.start(f"%%sky_broadcast\nif rank == 0:\n    {body}\ndist.barrier()"))
    pool.run("%config SkyMagic.screen_limit = 1_000_000")
    assert shown.failure.ename == "RankDied"
    assert "of rank 0's output not shown" in shown.text
    assert seen(pool, "1 + 1") == [2, 2]


def test_exit_status_is_reported(pool: Notebook) -> None:
    failure = pool.fail("%%sky_broadcast\nif rank == 0:\n    os._exit(17)\ntime.sleep(60)")
    assert failure.ename == "RankDied"
    pool.run("import sys\nstatus_5 = sys.last_value.status")
    assert pool.value("status_5") == 17
    assert "17" in failure.text
    # the process group met at rank 0, which is another process now
    cell = "import torch, torch.distributed as dist\none = torch.ones(1)\ndist.all_reduce(one)\none.item()"
    assert seen(pool, cell) == [2.0, 2.0]


def test_users_init_process_group_works_or_is_explained(pool: Notebook) -> None:
    shown = pool.finish(pool.start("%%sky_broadcast\ndist.init_process_group('gloo')"))
    if shown.error is not None:
        assert "already" in shown.error.text
    assert seen(pool, "dist.get_world_size()") == [2, 2]


def test_a_timeout_shows_where_each_rank_is(pool: Notebook) -> None:
    cell = (
        "def waits_5():\n    while True: time.sleep(0.01)\nif rank == 1: waits_5()\ndist.barrier()"
    )
    failure = pool.fail(f"%%sky_broadcast --timeout 1s\n{cell}")
    assert failure.ename == "RunTimeout"
    assert "waits_5" in failure.text
    assert seen(pool, "rank") == [0, 1]


def test_an_error_of_a_nested_run_is_the_cells(pool: Notebook) -> None:
    # the ranks' folder may be shared, or that of whoever started their scheduler
    pool.run(
        "%%sky_broadcast\nscript_5 = f'fails_5_{rank}.py'\nopen(script_5, 'w').write('1 / 0');"
    )
    try:
        assert pool.fail("%%sky_broadcast\n%run {script_5}").ename == "ZeroDivisionError"
    finally:
        pool.run("%%sky_broadcast\nos.remove(script_5)")


def test_run_all_stops_at_a_failing_cell(pool: Notebook) -> None:
    pool.run("caught = ''\nfrom IPython import get_ipython")
    pool.run(
        "try:\n    get_ipython().run_cell_magic('sky_broadcast', '', '1 / 0')\nexcept ZeroDivisionError as e:\n    caught = type(e).__name__"
    )
    assert pool.value("caught") == "ZeroDivisionError"
