"""Pools in jobs of a real Slurm cluster: asked for, waited for, used, and given back whatever happens."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.notebook import Notebook, opened
from tests.lab.slurm import Cluster, cluster

pytestmark = pytest.mark.needs("slurm", "root")
POOL = f"%sky_pool lab --provider slurm --nodes 2 --time 10m --python {sys.executable}"
WORKING = "%%sky_broadcast --only all\nimport time\nprint('at work', flush=True)\ntime.sleep(600)"
WHERE = "%%sky_broadcast -o seen\nimport os\n{k: v for k, v in os.environ.items() if k.startswith(('SLURM_', 'CUDA_V', 'OWN_'))}"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def kernel(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("notebook"), env={**slurm.env, "OWN_TOKEN": "a secret"}) as made:
        yield made


@pytest.fixture
def notebook(slurm: Cluster, kernel: Notebook) -> Iterator[Notebook]:
    """A notebook without a pool; after the test no job is left, nor anything that it has started."""
    yield kernel
    kernel.run("%sky_down --all")
    slurm.wait_empty()
    slurm.wait(lambda: [one for one in slurm.processes() if one.pid != kernel.pid] == [])


def test_a_pool_is_one_job_that_knows_nothing_of_the_notebooks_secrets(slurm: Cluster, notebook: Notebook) -> None:
    shown = notebook.run(f"{POOL} --gres gpu:a100:2 --slurm comment='a \"b\" #c'")
    number = slurm.running()
    assert f"Slurm job {number} has n1, n2" in shown.text
    notebook.run(WHERE)
    here = {"SLURM_CONF": slurm.env["SLURM_CONF"], "CUDA_VISIBLE_DEVICES": "0,1"}
    assert notebook.value("seen") == [here, here]
    job = slurm("scontrol", "show", "job", "-o", number)
    assert 'Comment=a "b" #c' in job
    assert "a secret" not in job + slurm("scontrol", "write", "batch_script", number, "-")
    status = notebook.run("%sky_status").rich[-1]["text/html"]
    assert re.search(r"slurm · 2 nodes × 1 rank on n1, n2 · [89]m left", status)
    assert notebook.run("%sky_down").text == "pool 'lab' is stopped\n"


def test_a_job_that_is_cancelled_is_told_as_such(slurm: Cluster, notebook: Notebook) -> None:
    notebook.run(POOL)
    running = notebook.start(WORKING)
    notebook.watch(running, lambda cell: cell.text.count("at work") == 2)
    number = slurm.running()
    slurm("scancel", number)
    assert f"Slurm job {number} was cancelled, and not from this notebook" in notebook.finish(running).failure.text


def test_a_node_that_is_lost_takes_its_ranks_alone(slurm: Cluster, notebook: Notebook) -> None:
    notebook.run(POOL)
    notebook.run("%%sky_broadcast\nkept = 7")
    running = notebook.start(WORKING)
    notebook.watch(running, lambda cell: cell.text.count("at work") == 2)
    number = slurm.running()
    slurm.lose("n2")
    failure = notebook.finish(running).failure.text
    assert f"n2: Slurm has taken it from job {number}" in failure
    notebook.run("%%sky_broadcast -t 0 -o left\nkept")
    assert notebook.value("left") == [7]


def test_the_time_limit_is_told_beforehand(slurm: Cluster, notebook: Notebook) -> None:
    """Slurm's own signal, which it sends some time before the limit, here without the wait."""
    notebook.run(POOL)
    notebook.run("%%sky_broadcast\nimport skymagic as sky\nheard = []\nsky.on_interruption(heard.append)")
    running = notebook.start(WORKING)
    notebook.watch(running, lambda cell: cell.text.count("at work") == 2)
    slurm("scancel", "--signal=URG", slurm.running())
    notebook.watch(running, lambda cell: cell.text.count("on_interruption hook has run") == 4)
    assert re.search(r"node 1 \(n2\): Slurm ends the job at its time limit in (60|59) s", running.text)
    notebook.interrupt()
    notebook.finish(running)
    notebook.run("%%sky_broadcast -o told\n[one.mine for one in heard]")
    assert [sorted(each) for each in notebook.value("told")] == [[False, True]] * 2


def test_a_stop_while_it_waits_cancels_the_job(slurm: Cluster, notebook: Notebook) -> None:
    other = slurm("sbatch", "--parsable", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "exec sleep 600").strip()
    try:
        running = notebook.start(f"{POOL} --exclusive")
        notebook.watch(running, lambda cell: " waits: " in cell.text)
        notebook.interrupt()
        number = re.findall(
            r"Slurm job (\d+) waits: \D+ \((?:Priority|Resources|None)\)", notebook.finish(running).text
        )[0]
        assert f"[Slurm job {number} is cancelled]" in running.text
        assert [one[0] for one in slurm.jobs()] == [other]
    finally:
        slurm("scancel", other)


def test_an_attaching_notebook_has_the_ranks_with_their_variables(slurm: Cluster, tmp_path: Path) -> None:
    with opened(tmp_path, env=slurm.env) as notebook:
        notebook.run(POOL)
        notebook.run("%%sky_broadcast\nkept = 7")
        number = slurm.running()
        notebook.restart()
        ((_, _, job_id),) = slurm.jobs()
        told = notebook.run("%load_ext skymagic").text
        assert f"%sky_attach lab goes on with it, scancel --name {job_id} ends it" in " ".join(told.split())
        assert "attached to pool 'lab' on n1, n2" in notebook.run("%sky_attach lab").text
        notebook.run("%%sky_broadcast -o left\nkept")
        assert notebook.value("left") == [7, 7]
        assert slurm.running() == number
        notebook.run("%sky_down")
    slurm.wait_empty()


def test_a_job_that_there_is_already_is_used_and_stays(slurm: Cluster, tmp_path: Path) -> None:
    slurm("salloc", "--no-shell", "-N2", "--time=10")
    number = slurm.running()
    inside = {**slurm.env, "SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "1"}
    with opened(tmp_path, env=inside) as notebook:
        notebook.run(f"%sky_pool lab --provider slurm --python {sys.executable}")
        notebook.run("%%sky_broadcast -o hosts\nimport os; os.environ['SLURMD_NODENAME']")
        assert notebook.value("hosts") == ["n1", "n2"]
        notebook.run("%sky_down")
        assert slurm.running() == number
    slurm("scancel", number)
    slurm.wait_empty()


def test_what_slurm_refuses_is_refused_with_what_there_is(slurm: Cluster, notebook: Notebook) -> None:
    for options, told in (
        ("--partition gpuu", "--partition: Slurm has no partition 'gpuu'; did you mean 'gpu'?"),
        ("--gpu H100:2", "--gpu H100:2: no node there has that (GPUs per node: a100:2)"),
        ("--gpu A100:4", "--gpu A100:4: no node there has that (GPUs per node: a100:2)"),
        ("--nodes 3", "--nodes 3 is more than the partition has (2)"),
        ("--time forever", "--time: 'forever' is no time limit"),
        ("--time 2h", "Slurm refused the job: Batch job submission failed: Requested time limit is invalid"),
        ("--hosts a", "--hosts is not for --provider slurm"),
    ):
        said = notebook.fail(f"%sky_pool wrong --provider slurm --python {sys.executable} {options}").text
        assert told in said, said
    assert slurm.jobs() == []


def test_a_preview_shows_the_script_and_what_slurm_says(slurm: Cluster, notebook: Notebook) -> None:
    shown = notebook.run(f"{POOL} --gpu A100:2 --account me --dry-run").text
    for line in ("#SBATCH --nodes=2", "#SBATCH --gres=gpu:a100:2", "#SBATCH --time=10", "#SBATCH --account=me"):
        assert f"{line}\n" in shown
    assert re.search(r"Slurm says: Job \d+ to start at .* on nodes n\[1-2\] in partition gpu", shown)
    assert slurm.jobs() == []
