"""Pools that end by themselves: after so long without a cell, after so long; and what the notebook then says."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

import psutil
import pytest

from skymagic.plan.limits import Lifetime
from tests.lab.golden import Golden
from tests.lab.notebook import DEADLINE, ROOT, Notebook, opened

# ------------------------------------------------------------------------------------------------------ the rule


def test_without_limits_nothing_is_ever_due() -> None:
    lifetime = Lifetime(None, None, 0.0)
    assert (lifetime.due, lifetime.reason(1e9)) == (None, "")


def test_idle_time_counts_from_ready_and_from_the_last_cell(
    golden: Golden,
) -> None:
    lifetime = Lifetime(1800.0, None, 100.0)
    assert lifetime.due is None, "the ranks are not there yet"
    lifetime.begin(0)
    lifetime.begin(1)
    lifetime.begin(1)  # twice begun is once at work
    lifetime.end(0, 500.0)
    assert (lifetime.due, lifetime.reason(9000.0)) == (None, ""), "rank 1 is still starting"
    lifetime.end(1, 9000.0)
    for rank in (1, 4):  # what had not begun ends nothing
        lifetime.end(rank, 9500.0)
    assert lifetime.due == 10_800.0
    assert lifetime.reason(10_799.9) == ""
    golden(lifetime.reason(10_800.0))
    lifetime.begin(1)
    assert lifetime.reason(20_000.0) == ""


def test_lifetime_ends_busy_pools_and_first_limit_counts() -> None:
    lifetime = Lifetime(60.0, 90.0, 0.0)
    lifetime.begin(0)
    assert lifetime.due == 90.0
    lifetime.end(0, 20.0)
    assert lifetime.due == 80.0
    assert "(--idle 1m)" in lifetime.reason(80.0)
    lifetime.begin(0)
    assert (lifetime.due, lifetime.reason(90.0)) == (90.0, "after 1m30s (--max-lifetime 1m30s)")
    lifetime.end(0, 50.0)
    assert (lifetime.due, lifetime.reason(90.0)) == (90.0, "after 1m30s (--max-lifetime 1m30s)")


def test_absence_counts_once_the_ranks_are_idle(golden: Golden) -> None:
    lifetime = Lifetime(None, None, 0.0, away=60.0)
    lifetime.begin(0)
    lifetime.begin("run 7")
    lifetime.notebook_left(10.0)
    lifetime.notebook_left(15.0)
    assert lifetime.due is None, "a rank is at work"
    lifetime.end(0, 100.0)
    assert lifetime.due == 160.0, "a run elsewhere, which the notebook told of, keeps nobody"
    lifetime.returned()
    assert lifetime.due is None
    lifetime.notebook_left(200.0)
    assert lifetime.due == 260.0
    assert lifetime.reason(259.9) == ""
    golden(lifetime.reason(260.0))


def test_a_cell_without_its_notebook_has_a_bound_of_its_own() -> None:
    lifetime = Lifetime(None, None, 0.0, 1800.0, 86_400.0)
    lifetime.begin(0)
    assert lifetime.runs_end is None  # the notebook is there
    lifetime.notebook_left(100.0)
    assert lifetime.runs_end == 86_500.0
    assert lifetime.working == [0]
    lifetime.returned()
    assert lifetime.runs_end is None
    lifetime.notebook_left(200.0)
    lifetime.end(0, 300.0)
    assert (lifetime.runs_end, lifetime.due) == (None, 2100.0)
    endless = Lifetime(None, None, 0.0, 1800.0)
    endless.begin(0)
    endless.notebook_left(0.0)
    assert endless.runs_end is None


# ------------------------------------------------------------------------------------------------------ real pools


PROVIDER = """
from dataclasses import replace
from skymagic.cluster import Node
from skymagic.providers import Survey
from skymagic.providers.local import Local, run

class Two(Local):
    # An agent for each node, all on this machine.
    def plan(self, request, say):
        plan = super().plan(replace(request, provider="local"), say).plan
        return Survey(replace(plan, provider="two", request=request))

    def acquire(self, survey, job_id, say):
        agent = lambda state: run("skymagic.kernels.agent.agent")
        return [Node(n, f"box{n}", agent, run, address="127.0.0.1") for n in range(survey.plan.topology.nodes)]
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("lifetime")
    info = folder / "site/two-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "site/two.py").write_text(PROVIDER)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[skymagic.providers]\ntwo = two:Two\n")
    with opened(
        folder, env={"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site")])}
    ) as one:
        yield one


def wait_until_ended(notebook: Notebook, but: Collection[int] = ()) -> None:
    """Until no process of the notebook's is left, but for these."""
    family = psutil.Process(notebook.pid).children(recursive=True)
    assert not psutil.wait_procs([child for child in family if child.pid not in but], DEADLINE)[1]


def test_idle_pool_ends_with_a_note_and_is_restarted(golden: Golden, notebook: Notebook) -> None:
    notebook.run("%sky_pool other --ranks 1")
    others = {child.pid for child in psutil.Process(notebook.pid).children(recursive=True)}
    line = "%sky_pool short --ranks 1 --idle 1s"
    notebook.run(f"import skymagic as sky\npool = {line}")
    wait_until_ended(notebook, but=others)
    texts = set[str]()
    for cell in (
        "%%sky_broadcast\n1",
        "%%sky_broadcast --pool short\n1",
        "%sky_pull x",
        "%sky_restart",
    ):
        texts.add(notebook.fail(cell, "pool-ended").evalue)  # also where another pool could run it
    (text,) = texts
    golden(text)
    notebook.fail("@sky.function\ndef one():\n    return 1\none() >> pool", "pool-ended")
    notebook.run("%%sky_broadcast --pool other\n1")
    notebook.run("%sky_down other")
    assert notebook.run("%sky_status").lines == [text]
    shown = notebook.run(line)
    golden(shown.lines[0])
    wait_until_ended(notebook)
    assert notebook.run("%sky_down").lines == ["pool 'short' is down"]
    notebook.fail("%%sky_broadcast\n1", "no-pool")


@pytest.mark.parametrize("provider", ["local", "two"])
def test_ranks_at_work_are_not_idle_on_any_node(notebook: Notebook, provider: str) -> None:
    # Rank 1 works for longer than the limit, and the next cell follows before it is over again.
    notebook.run(
        f"%sky_pool --provider {provider} --nodes 2 --idle 2s\n"
        "run = get_ipython().run_cell_magic\n"
        "run('sky_broadcast', '-t 1 -o r', 'import time; time.sleep(3); kept = 7; 1')\n"
        "run('sky_broadcast', '-t 1 -o r', 'kept')"
    )
    assert notebook.value("r") == [7]
    if provider == "local":
        notebook.run("%sky_down")
    else:  # one that ends takes the other along
        wait_until_ended(notebook)
        assert "(--idle 2s)" in notebook.fail("%%sky_broadcast\n1", "pool-ended").evalue
        notebook.run("%sky_down --all")


def test_cell_at_the_end_of_the_lifetime_fails_with_reason(
    golden: Golden,
    notebook: Notebook,
) -> None:
    notebook.run("%sky_pool --ranks 1 --max-lifetime 6s")
    body = "%%sky_broadcast\nimport threading\nthreading.Event().wait()"
    golden(notebook.fail(body, "pool-closed").evalue)
    wait_until_ended(notebook)
    golden(notebook.fail("%%sky_broadcast\n1", "pool-ended").evalue)
    notebook.run("%sky_down --all")


def test_pool_lost_after_its_lifetime_ended_as_planned(notebook: Notebook) -> None:
    notebook.run(
        "import time\npool = get_ipython().run_line_magic('sky_pool', '--nodes 1 --idle 2s')"
    )
    agent = psutil.Process(notebook.pid).children()[0]
    agent.suspend()  # as a node that cannot be heard
    notebook.run("time.sleep(2)")
    agent.kill()
    agent.wait(DEADLINE)
    assert "(--idle 2s)" in notebook.fail("%%sky_broadcast\n1").evalue
    wait_until_ended(notebook)
    notebook.run("%sky_down")


def test_lifetime_over_before_ready_is_reported(notebook: Notebook) -> None:
    failed = notebook.fail("%sky_pool --nodes 1 --max-lifetime 0.01s")
    assert failed.ename == "ProvisionError"
    assert "the pool ended after 0.01s (--max-lifetime 0.01s)" in failed.evalue
    assert psutil.Process(notebook.pid).children(recursive=True) == []
