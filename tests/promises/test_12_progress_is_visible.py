"""Promise 12: whoever waits sees how far a cell is, its numbers, and where each rank is."""

from __future__ import annotations

from tests.lab.notebook import Notebook, at_work

LINE = "%config SkyMagic.view_after = 0.2"
NO_LINE = "%config SkyMagic.view_after = 600.0"


def test_long_cell_shows_reported_metrics(pool: Notebook) -> None:
    pool.run(LINE)
    try:
        cell = "for step in range(600):\n    sky.report(step=step, total=600, loss=0.125); time.sleep(0.1)"
        running = pool.start(f"%%sky_broadcast\n{cell}", watched=True)
        pool.watch(running, lambda shown: "loss" in shown.said)
        assert "0.125" in running.said
        pool.interrupt()
        pool.finish(running)
    finally:
        pool.run(NO_LINE)


def test_reported_numbers_are_kept(pool: Notebook) -> None:
    pool.run(
        "%%sky_broadcast\nfor step in range(3):\n    sky.report(step=step, loss=1.0 / (step + 1))"
    )
    pool.run("import skymagic as sky\nmetrics_12 = sky.find('lab').metrics")
    assert "loss" in pool.value("str(metrics_12)")


def test_stacks_show_where_each_rank_is(pool: Notebook) -> None:
    pool.run(
        "%%sky_broadcast -a\ndef waits_12():\n    while not globals().get('over_12'): time.sleep(0.01)\nwaits_12()"
    )
    pool.run("handle_12 = _")
    text = ""
    while "waits_12" not in text:
        text = pool.run("%sky_stacks").said
    assert text.count("waits_12") >= 2
    pool.run("stopped_12 = handle_12.cancel()")


def test_status_lists_every_rank(pool: Notebook) -> None:
    text = pool.run("%sky_status").said
    assert "lab" in text
    assert text.count("ready") >= 2


def test_status_is_an_object_too(pool: Notebook) -> None:
    pool.run("%sky_status -o status_12")
    assert pool.value("str(status_12['lab'][1].state)").lower().endswith("ready")


def test_vars_show_differences_between_ranks(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\nsame_12 = 7\ndiffers_12 = rank")
    text = pool.run("%sky_vars").said
    assert "same_12" in text
    assert "differs_12" in text


def test_busy_pool_is_reported(pool: Notebook) -> None:
    pool.run("%%sky_broadcast -a\ntime.sleep(600)")
    pool.run("handle_12 = _")
    failure = pool.fail("%%sky_broadcast --busy refuse\n1")
    pool.run("stopped_12 = handle_12.cancel()")
    assert failure.ename == "PoolStateError"
    assert "is running on ranks 0, 1" in failure.text


def test_a_cell_that_waits_runs_after_the_one_before(pool: Notebook) -> None:
    pool.run("%%sky_broadcast -a\ntime.sleep(0.5); order_12 = ['first']")
    pool.run("%%sky_broadcast\norder_12.append('second')")
    pool.run("%sky_pull order_12")
    assert pool.value("order_12") == [["first", "second"]] * 2


def test_cells_that_wait_run_in_the_order_of_their_start(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\norder_12 = ['first']")
    pool.run("%%sky_broadcast -a\ntime.sleep(600)")
    pool.run("handle_12 = _")
    pool.run("%%sky_broadcast -a\norder_12.append('second')")
    pool.run("waited_12 = [_]")
    pool.run("%%sky_broadcast -a\norder_12.append('third')")
    pool.run("waited_12.append(_)")
    pool.run("stopped_12 = handle_12.cancel()")
    pool.run("for handle in waited_12: handle.result()")
    pool.run("%sky_pull order_12")
    assert pool.value("order_12") == [["first", "second", "third"]] * 2


def test_an_interrupted_wait_leaves_the_running_cell(pool: Notebook) -> None:
    running = at_work(pool)
    pool.interrupt()
    assert pool.finish(running).failure.ename == "RunInterrupted"
    assert pool.run("%%sky_broadcast\nprint('again')").text == "again\n"
