"""Pools in jobs of a real Slurm cluster: asked for, waited for, used, and given back whatever happens."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from skymagic.wire import processes
from tests.lab.desk import Desk
from tests.lab.ending import cmdline
from tests.lab.notebook import Notebook, Shown, opened
from tests.lab.slurm import Cluster, cluster

pytestmark = pytest.mark.needs("slurm", "root")
POOL = f"%sky_pool lab --provider slurm --nodes 2 --time 10m --python {sys.executable}"
WORKING = "%%sky_broadcast --only all\nimport time\nprint('at work', flush=True)\ntime.sleep(600)"
NODES = "%%sky_broadcast --only all\nimport os\nprint(os.environ['SLURMD_NODENAME'])"
WHERE = "%%sky_broadcast -o seen\nimport os\n{k: v for k, v in os.environ.items() if k.startswith(('SLURM_', 'CUDA_V', 'OWN_'))}"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def kernel(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(tmp_path_factory.mktemp("notebook"), env={**slurm.env, "OWN_TOKEN": "a secret"}) as made:
        yield made


def shows(text: str) -> Callable[[Shown], bool]:
    return lambda cell: text in cell.text


def nothing_left(slurm: Cluster) -> None:
    """No job is left, nor anything that one has started."""
    slurm.wait_empty()
    slurm.wait(lambda: all("ipykernel_launcher" in cmdline(one) for one in slurm.processes()))


@pytest.fixture
def notebook(slurm: Cluster, kernel: Notebook) -> Iterator[Notebook]:
    """A notebook without a pool; after the test no job is left, nor anything that it has started."""
    yield kernel
    kernel.run("%sky_down --all")
    nothing_left(slurm)


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
    assert notebook.run("%sky_down").text == "pool 'lab' is down\n"


def test_cells_go_past_srun_which_is_slow(slurm: Cluster, notebook: Notebook) -> None:
    def steps() -> list[psutil.Process]:
        return [one for one in of(processes.ATTACH) if one.name() == "srun"]

    def of(module: str) -> list[psutil.Process]:
        return [one for one in slurm.processes() if any(module in word for word in cmdline(one))]

    notebook.run(POOL)
    notebook.run("%%sky_broadcast\nkept = 7")
    slurm.wait(lambda: not steps())
    relays = of(processes.RELAY)
    assert len(relays) == 2
    for one in relays:
        for child in [*one.children(), one]:
            child.kill()
    notebook.run("%%sky_broadcast -o seen\nkept")
    assert notebook.value("seen") == [7, 7]
    slurm.wait(lambda: not steps() and len(of(processes.RELAY)) == 2)


def test_a_job_that_is_cancelled_is_told_as_such(slurm: Cluster, notebook: Notebook) -> None:
    notebook.run(POOL)
    running = notebook.start(WORKING)
    notebook.watch(running, lambda cell: cell.text.count("at work") == 2)
    number = slurm.running()
    slurm("scancel", number)
    assert f"Slurm job {number} was cancelled, and not from this notebook" in notebook.finish(running).failure.text


def test_a_job_that_is_cancelled_while_it_starts_is_told_as_such(slurm: Cluster, notebook: Notebook) -> None:
    other = slurm("sbatch", "--parsable", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "exec sleep 600").strip()
    try:
        for when in (" waits: ", " has n1, n2"):
            running = notebook.start(f"{POOL} --exclusive")
            notebook.watch(running, shows(when))
            ((number, _, _),) = [one for one in slurm.jobs() if one[0] != other]
            slurm("scancel", number)
            assert (
                f"Slurm job {number} was cancelled, and not from this notebook" in notebook.finish(running).failure.text
            )
            slurm("scancel", other, check=False)
            slurm.wait_empty()
    finally:
        slurm("scancel", other, check=False)


def test_a_node_that_is_lost_takes_its_ranks_alone(slurm: Cluster, notebook: Notebook) -> None:
    notebook.run(POOL)
    notebook.run("%%sky_broadcast\nkept = 7")
    running = notebook.start(WORKING)
    notebook.watch(running, lambda cell: cell.text.count("at work") == 2)
    number = slurm.running()
    slurm.lose("n2")
    failure = notebook.finish(running).failure.text
    assert f"Slurm has taken it from job {number}" in failure
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
        assert f"%sky_attach lab continues with it, %sky_down {job_id} ends it" in " ".join(told.split())
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
        (
            "--gres gpu:h200:1",
            "Slurm refused the job: Batch job submission failed: Requested node configuration is not",
        ),
        ("--constraint rack9", "Slurm refused the job: Batch job submission failed: Invalid feature specification"),
        ("--reservation mine", "Slurm refused the job: Batch job submission failed: Requested reservation is invalid"),
        ("--hosts a", "--hosts is for machines reached over SSH"),
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


def test_a_job_whose_answer_is_lost_is_found_by_its_name(slurm: Cluster, tmp_path: Path) -> None:
    """The controller takes the job a while after sbatch has given up, as a busy one does."""
    late = '(sleep 1; "$REAL" "$@" <"$0.$$"; rm "$0.$$") >/dev/null 2>&1 </dev/null &'
    script = f'cat >"$0.$$"; {late}\necho "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1'
    with opened(tmp_path, env=slurm.instead_of("sbatch", script)) as notebook:
        notebook.run(POOL)
        assert slurm.running()
        notebook.run("%sky_down")
        nothing_left(slurm)


def test_a_stop_while_the_job_is_handed_in_leaves_none(slurm: Cluster, tmp_path: Path) -> None:
    env = slurm.instead_of("sbatch", 'touch "$0.asked"; sleep 2; exec "$REAL" "$@"')
    asked = Path(env["PATH"].partition(":")[0], "sbatch.asked")
    with opened(tmp_path, env=env) as notebook:
        running = notebook.start(POOL)
        slurm.wait(asked.exists)
        notebook.interrupt()
        assert notebook.finish(running).failure.ename == "KeyboardInterrupt"
        assert "is cancelled]" in running.text
        nothing_left(slurm)


def test_a_second_stop_leaves_no_job_either(slurm: Cluster, tmp_path: Path) -> None:
    env = slurm.instead_of("scancel", 'touch "$0.asked"; sleep 1; exec "$REAL" "$@"')
    asked = Path(env["PATH"].partition(":")[0], "scancel.asked")
    other = slurm("sbatch", "--parsable", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "exec sleep 600").strip()
    try:
        with opened(tmp_path, env=env) as notebook:
            running = notebook.start(f"{POOL} --exclusive")
            notebook.watch(running, lambda cell: " waits: " in cell.text)
            notebook.interrupt()
            slurm.wait(asked.exists)
            notebook.interrupt()
            assert notebook.finish(running).failure.ename == "KeyboardInterrupt"
            slurm.wait(lambda: [one[0] for one in slurm.jobs()] == [other])
    finally:
        slurm("scancel", other)
    nothing_left(slurm)


def test_a_pool_of_a_notebook_that_is_gone_is_found_by_its_job_and_ended(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    own = slurm(
        "sbatch", "--parsable", "-N1", "-o", "/dev/null", "--job-name=own-12345678", "--wrap", "sleep 600"
    ).strip()
    with opened(tmp_path / "one", env=slurm.env) as notebook, opened(tmp_path / "two", env=slurm.env) as elsewhere:
        for there, line in ((elsewhere, "%sky_down lab --provider slurm"), (notebook, "%sky_down lab")):
            notebook.run(POOL)
            ((number, _, job_id),) = [one for one in slurm.jobs() if one[0] != own]
            shown = elsewhere.run("%sky_status --provider slurm").text
            assert re.search(rf"lab +{job_id} +Slurm job {number} on n\[1-2\] +running +[89]m", shown)
            assert "own-12345678" not in shown
            assert "%sky_down lab ends it" in notebook.fail("%sky_down lab --provider slurm").text
            notebook.restart()
            notebook.run("%load_ext skymagic")
            assert "pool 'lab'" in there.run(line).text
            slurm.wait(lambda: [one[0] for one in slurm.jobs()] == [own])
        assert "none of your pools runs there" in elsewhere.run("%sky_status --provider slurm").text
        slurm("scancel", own)
        nothing_left(slurm)


def test_a_pool_goes_on_in_the_job_that_was_queued_after_its_own(slurm: Cluster, notebook: Notebook) -> None:
    """At the time limit, and after a job of higher priority; the hook for a checkpoint has run before."""
    urgent = ("sbatch", "-N2", "--exclusive", "-p", "urgent", "-o", "/dev/null", "--wrap", "sleep 1")
    notebook.run(f"{POOL} --renew")
    for turn in ("limit", "preempted"):
        notebook.run("%%sky_broadcast\nimport skymagic as sky\nkept = 7\nsky.on_interruption(lambda notice: None)")
        number = slurm.running()
        assert len(slurm.jobs()) == 2
        running = notebook.start(WORKING)
        notebook.watch(running, lambda cell: cell.text.count("at work") == 2)
        if turn == "limit":
            slurm("scancel", "--signal=URG", number)
            notebook.watch(running, lambda cell: cell.text.count("on_interruption hook has run") == 2)
            slurm("scontrol", "update", f"jobid={number}", "EndTime=now")
        else:
            slurm(*urgent)
        failure = notebook.finish(running).failure.text
        assert f"Slurm job {number} " in failure
        shown = notebook.run("%%sky_broadcast -o left\nimport os\nglobals().get('kept'), os.environ['SLURMD_NODENAME']")
        assert notebook.value("left") == [(None, "n1"), (None, "n2")]
        assert "have restarted without variables" in notebook.run("%sky_status").text + shown.text + running.text
        assert slurm.running() != number
    notebook.run("%sky_down")
    slurm.wait_empty()


def test_a_job_that_was_cancelled_is_not_renewed(slurm: Cluster, notebook: Notebook) -> None:
    notebook.run(f"{POOL} --renew")
    number = slurm.running()
    slurm("scancel", number)
    slurm.wait_empty()
    assert "was cancelled, and not from this notebook" in notebook.fail("%%sky_broadcast\n1").text


def test_an_idle_pool_leaves_no_job_that_would_follow(slurm: Cluster, notebook: Notebook) -> None:
    notebook.run(f"{POOL} --renew --idle 2s")
    slurm.wait_empty()


@pytest.mark.parametrize("option", ["", " --slurm salloc"])
def test_where_scripts_are_refused_salloc_asks(option: str, slurm: Cluster, tmp_path: Path) -> None:
    refusal = 'echo "sbatch: error: Batch job submission failed: this QOS takes no batch jobs: use salloc" >&2; exit 1'
    with opened(tmp_path, env=slurm.instead_of("sbatch", refusal)) as notebook:
        assert "allocate failed" in notebook.fail(f"{POOL}{option} --constraint nothere").text
        notebook.run(f"{POOL}{option} --gres gpu:a100:1")
        notebook.run(WHERE)
        assert [one["CUDA_VISIBLE_DEVICES"] for one in notebook.value("seen")] == ["0", "0"]
        number = slurm.running()
        assert "BatchFlag=0" in slurm("scontrol", "show", "job", "-o", number)
        notebook.run("%sky_down")
        nothing_left(slurm)
        other = slurm("sbatch", "--parsable", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600").strip()
        running = notebook.start(f"{POOL}{option} --exclusive")
        notebook.watch(running, shows(" waits: "))
        notebook.interrupt()
        notebook.finish(running)
        assert [one[0] for one in slurm.jobs()] == [other]
        slurm("scancel", other)
        nothing_left(slurm)


def test_what_a_site_needs_first_is_kept_for_its_cluster(slurm: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "config" / "skymagic" / "slurm" / "lab.sh"
    file.mkdir(parents=True)
    with opened(tmp_path, env={**slurm.env, "XDG_CONFIG_HOME": str(tmp_path / "config")}) as notebook:
        assert f"{file}, which jobs of this cluster begin with, cannot be read" in notebook.fail(POOL).text
        file.rmdir()
        file.write_text("echo loud\nexport OWN_SITE='a \"b\" $HOME' OWN_JOB=$SLURM_JOB_ID PATH=/opt/own/bin:$PATH\n")
        assert "OWN_SITE" in notebook.run(f"{POOL} --dry-run").text
        notebook.run(POOL)
        notebook.run(WHERE)
        assert notebook.value("seen")[1]["OWN_SITE"] == 'a "b" $HOME'
        assert notebook.value("seen")[1]["OWN_JOB"] == slurm.running()
        notebook.run("%%sky_broadcast -o path\nimport os; '/opt/own/bin' in os.environ['PATH'].split(':')")
        assert notebook.value("path") == [True, True]
        notebook.run("%sky_down")
        nothing_left(slurm)


def test_preemption_and_requeue_are_no_failures(slurm: Cluster, notebook: Notebook) -> None:
    for options, take, told in (
        ("", ("sbatch", "-N2", "--exclusive", "-p", "urgent", "-o", "/dev/null", "--wrap", "sleep 1"), "was preempted"),
        ("--slurm no-requeue=none,requeue", ("scontrol", "requeue"), "was put back into the queue"),
    ):
        notebook.run(f"{POOL} {options}")
        running = notebook.start(WORKING)
        notebook.watch(running, lambda cell: cell.text.count("at work") == 2)
        number = slurm.running()
        slurm(*take, *((number,) if take[0] == "scontrol" else ()))
        assert f"Slurm job {number} {told}" in notebook.finish(running).failure.text
        notebook.run("%sky_down")
        slurm.wait_empty()


def test_a_controller_that_is_restarted_changes_nothing(slurm: Cluster, notebook: Notebook) -> None:
    notebook.run(POOL)
    number = slurm.running()
    with slurm.without_controller():
        notebook.run("%%sky_broadcast -o seen\n1")
        assert notebook.value("seen") == [1, 1]
    slurm.wait(lambda: slurm.running() == number)
    notebook.run("%%sky_broadcast -o seen\n2")
    notebook.run("%%sky_sh\necho here")
    assert notebook.value("seen") == [2, 2]


@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
def test_a_prologue_that_prints_and_a_step_that_ends_are_no_matter(proctrack: str, tmp_path: Path) -> None:
    """Under proctrack/cgroup whatever a step has started ends with it, so that only what the holder starts lives."""
    loud = tmp_path / "loud"
    loud.write_text("#!/bin/sh\necho print welcome to the cluster\necho 'print skymagic-0 7'\n")
    loud.chmod(0o755)
    (tmp_path / "slurm").mkdir()
    with cluster(tmp_path / "slurm", proctrack=proctrack, more=f"TaskProlog={loud}") as slurm:
        (tmp_path / "notebook").mkdir()
        with opened(tmp_path / "notebook", env=slurm.env) as notebook:
            notebook.run(POOL)
            notebook.run("%%sky_broadcast\nkept = 7")
            notebook.restart()
            notebook.run("%load_ext skymagic\n%sky_attach lab")
            notebook.run("import random; big = random.randbytes(1 << 25)")
            notebook.run("%%sky_broadcast -o left\nkept, len(big)")
            assert notebook.value("left") == [(7, 1 << 25)] * 2
            servers = [one for one in slurm.processes() if processes.VALUES in cmdline(one)]
            assert len(servers) == 2
            for one in servers:  # values come by the node's own address, and not through srun
                assert processes.RELAY in cmdline(psutil.Process(one.ppid()))
            notebook.run("%sky_down")
            nothing_left(slurm)


def test_a_home_that_nodes_do_not_see_is_told_and_another_folder_serves(tmp_path: Path) -> None:
    (home := tmp_path / "homes" / "me").mkdir(parents=True)
    hidden = f'mount -t tmpfs -o ro none {home.parent} && exec "$@"'
    (tmp_path / "slurm").mkdir()
    within = ("unshare", "--mount", "sh", "-c", hidden, "sh")
    environ = {"HOME": str(home)}
    with (
        cluster(tmp_path / "slurm", within=within) as slurm,
        opened(tmp_path, env={**slurm.env, **environ}) as notebook,
    ):
        failure = notebook.fail(POOL).text
        assert f"nothing can be written at {home}/.skymagic" in failure
        assert "--env SKYMAGIC_HOME=/path" in failure
        slurm.wait_empty()
        notebook.run(f"{POOL} --env SKYMAGIC_HOME={tmp_path}/scratch")
        notebook.run("%%sky_broadcast -o seen\nimport os; os.path.exists(os.environ['HOME'])")
        assert notebook.value("seen") == [False, False]
        notebook.run("%sky_down")
        nothing_left(slurm)


def test_a_notebook_is_executed_on_the_head_and_outlives_the_step_that_began_it(tmp_path: Path) -> None:
    for folder in ("slurm", "notebook"):
        (tmp_path / folder).mkdir()
    with cluster(tmp_path / "slurm", proctrack="cgroup") as slurm:
        desk = Desk(tmp_path, POOL, slurm.env)
        cells = [new_code_cell(one) for one in ("%load_ext skymagic", NODES)]
        nbformat.write(new_notebook(cells=cells), tmp_path / "job.ipynb")
        with opened(tmp_path / "notebook", env=desk.env) as notebook:
            notebook.run(POOL)
            notebook.restart()
            code, out, err = desk.ran("run", tmp_path / "job.ipynb", "--pool", "lab")
            assert (code, {"[0] n1", "[1] n2"} <= {*out.splitlines()}) == (0, True), err + out
            notebook.run("%load_ext skymagic\n%sky_down lab")
            nothing_left(slurm)
