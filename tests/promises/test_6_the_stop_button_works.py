"""Promise 6: the stop button ends a cell on all ranks, also in a hung collective; a second press kills."""

from __future__ import annotations

import time

import pytest

from tests.lab.notebook import Notebook, Shown, at_work, seen

WAITING = {
    "sleeping": "time.sleep(600)",
    "in a collective": "if rank == 0: dist.barrier()\nelse: time.sleep(600)",
    "computing": "while True: sum(range(10_000))",
    "printing": "while True: print('line'); time.sleep(0.001)",
}


def begun(pool: Notebook, cell: str) -> Shown:
    """A cell once rank 0 is at work in it."""
    running = pool.start(f"%%sky_broadcast\nprint('at work', flush=True)\n{cell}")
    return pool.watch(running, lambda shown: "at work" in shown.text)


@pytest.mark.parametrize("cell", WAITING)
def test_a_press_ends_the_cell_and_variables_stay(pool: Notebook, cell: str) -> None:
    pool.run("%%sky_broadcast\nkept_6 = [rank]")
    before = seen(pool, "os.getpid()")
    running = begun(pool, WAITING[cell])
    pool.interrupt()
    assert pool.finish(running).failure.ename == "RunInterrupted"
    assert seen(pool, "(kept_6, os.getpid())") == [([0], before[0]), ([1], before[1])]
    assert seen(pool, "one = torch.ones(1)\ndist.all_reduce(one)\none.item()") == [2.0, 2.0]


def test_a_stop_is_a_keyboard_interrupt_in_the_users_code(pool: Notebook) -> None:
    running = pool.start(
        "%%sky_broadcast --only all\nsaved_6 = False\ntry:\n    print('at work', flush=True)\n"
        "    time.sleep(600)\nexcept KeyboardInterrupt:\n    saved_6 = True\n    raise"
    )
    pool.watch(running, lambda shown: shown.text.count("at work") == 2)
    pool.interrupt()
    assert pool.finish(running).failure.ename == "RunInterrupted"
    assert seen(pool, "saved_6") == [True, True]


def test_second_stop_kills_ranks_that_refuse(pool: Notebook) -> None:
    pool.run("%config SkyMagic.grace = 60.0")
    stubborn = "while True:\n    try: time.sleep(600)\n    except KeyboardInterrupt: print('refused', flush=True)"
    running = begun(pool, stubborn)
    pool.interrupt()
    pool.watch(running, lambda shown: "refused" in shown.text)
    pressed = time.monotonic()
    pool.interrupt()
    assert pool.finish(running).failure.ename in ("RunInterrupted", "RankDied")
    assert time.monotonic() - pressed < 30, "the grace period is a minute"
    pool.run("%config SkyMagic.grace = 2.0")
    assert seen(pool, "1") == [1, 1]


def test_stopped_cell_does_not_affect_later_cells(pool: Notebook) -> None:
    running = at_work(pool)
    pool.interrupt()
    pool.finish(running)
    assert pool.run("%%sky_broadcast\nprint('clean')").text == "clean\n"


def test_a_cell_in_the_background_is_cancelled(pool: Notebook) -> None:
    pool.run("%%sky_broadcast -a\ntime.sleep(600)")
    pool.run("handle_6 = _")
    pool.run("cancelled_6 = handle_6.cancel()")
    failure = pool.fail("handle_6.result()")
    assert failure.ename in ("RunInterrupted", "CancelledError")
    assert seen(pool, "rank") == [0, 1]
