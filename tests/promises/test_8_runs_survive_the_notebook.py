"""Promise 8: a run goes on when its notebook is gone, and `%sky_attach` continues with it: its output, results and errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.desk import killed
from tests.lab.notebook import Notebook, Shown, seen
from tests.lab.sites import Site
from tests.lab.waiting import until

STEPS = 150
"""Of a cell that goes on while another notebook attaches: three seconds."""
FEW = 10
"""Of a cell that is over before another notebook has started."""


@contextmanager
def own_pool(site: Site) -> Iterator[tuple[Notebook, str]]:
    """Another notebook with a pool of its own that outlives it, and the pool's name."""
    name = f"away{os.urandom(3).hex()}"
    options = site.place.options
    detach = "" if "--provider" in options else "--detach"
    with site.another(site.place.before, f"%sky_pool {name} {options} {detach}") as notebook:
        try:
            yield notebook, name
        finally:
            site.notebook.finish(site.notebook.start(f"%sky_down {name}"))


def left_at_work(notebook: Notebook, cell: str, count: int) -> Shown:
    """A cell that prints `count` steps; it is under way when this returns."""
    body = (
        f"import os, time\nfor step in range({count}):\n"
        "    print('step', step, flush=True); time.sleep(0.02)\n"
        f"{cell}"
    )
    running = notebook.start(f"%%sky_broadcast -o value_8 -g step\n{body}")
    return notebook.watch(running, lambda shown: "step 5\n" in shown.stdout)


def steps(shown: Shown) -> list[int]:
    """Return the numbers of the steps that a front end has shown."""
    lines = [line for line in shown.stdout.splitlines() if line.startswith("step ")]
    return [int(line.removeprefix("step ")) for line in lines]


def test_output_and_results_reach_the_next_notebook(site: Site) -> None:
    with own_pool(site) as (first, name):
        running = left_at_work(first, "int(os.environ['RANK']) + 100", STEPS)
        killed(first)
        first.rest(running)
        with site.another() as second:
            shown = second.run(f"%sky_attach {name}")
            assert second.value("value_8, step") == ([100, 101], [STEPS - 1] * 2)
            again = steps(shown)
            assert {*steps(running), *again} == set(range(STEPS)), "no line is lost"
            assert len(again) == len(set(again)), "no line is replayed twice"
            assert seen(second, "step") == [STEPS - 1] * 2


def test_what_has_ended_meanwhile_waits_for_the_next_notebook(site: Site) -> None:
    with own_pool(site) as (first, name):
        left_at_work(first, "int(os.environ['RANK']) + 200", FEW)
        killed(first)
        with site.another() as second:
            second.run(f"%sky_attach {name}")
            assert second.value("value_8, step") == ([200, 201], [FEW - 1] * 2)
            left_at_work(second, "raise LookupError('while nobody looked')", FEW)
            killed(second)
        with site.another() as third:
            failure = third.fail(f"%sky_attach {name}")
            assert failure.ename == "LookupError"
            assert "while nobody looked" in failure.text


def test_variables_and_logs_stay_over_a_restart_of_the_kernel(site: Site) -> None:
    with own_pool(site) as (notebook, name):
        notebook.run("%%sky_broadcast\nimport os\nkept_8 = os.environ['RANK'] * 3\nprint('logged')")
        notebook.restart()
        notebook.run("%load_ext skymagic")
        notebook.run(f"%sky_attach {name}")
        assert seen(notebook, "kept_8") == ["000", "111"]
        assert name in notebook.run("%sky_status").said
        assert "logged" in notebook.run("%sky_logs -t 1 -n 5").stdout


def test_pool_is_taken_over_from_a_live_notebook_and_ended(site: Site) -> None:
    with own_pool(site) as (first, name):
        first.run("%%sky_broadcast\nkept_8 = 5")
        with site.another() as second:
            assert "--take-over" in second.fail(f"%sky_attach {name}").text
            second.run(f"%sky_attach {name} --take-over")
            assert seen(second, "kept_8") == [5, 5]
            until(lambda: "taken over" in first.run("%sky_status").said)
            failure = first.fail("%%sky_broadcast\nkept_8")
            assert failure.ename in ("PoolError", "PoolStateError")
            second.run(f"%sky_down {name}")
            assert second.fail("%%sky_broadcast\n1").ename
            assert second.fail(f"%sky_attach {name}").ename
