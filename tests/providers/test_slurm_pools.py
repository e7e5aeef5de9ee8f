"""Pools in jobs of a real Slurm cluster: asked for, waited for, used, and given back whatever happens. `tests/contracts/test_provider.py` holds the rest."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from skymagic.wire import processes
from tests.lab.desk import Desk
from tests.lab.ending import cmdline
from tests.lab.notebook import Notebook, Shown, at_work, opened, seen
from tests.lab.slurm import Cluster, cluster

pytestmark = pytest.mark.needs("slurm", "root")
POOL = f"%sky_pool lab --provider slurm --nodes 2 --time 10m --python {sys.executable}"
ONE = POOL.replace("--nodes 2", "--nodes 1")
NODES = "%%sky_broadcast --only all\nimport os\nprint(os.environ['SLURMD_NODENAME'])"
WHERE = (
    "import os\n{k: v for k, v in os.environ.items() if k.startswith(('SLURM_', 'CUDA_V', 'OWN_'))}"
)
CANCELLED = "Slurm job {} was cancelled, and not from this notebook"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture(scope="module")
def kernel(slurm: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with opened(
        tmp_path_factory.mktemp("notebook"), env={**slurm.env, "OWN_TOKEN": "a secret"}
    ) as made:
        yield made


@pytest.fixture
def notebook(slurm: Cluster, kernel: Notebook) -> Iterator[Notebook]:
    """A notebook without a pool; after the test no job is left, nor anything that it has started, and its environment is what it was."""
    kernel.run("import os; environment = dict(os.environ)")
    yield kernel
    kernel.run("%sky_down --all")
    nothing_left(slurm)
    if kernel.value("'environment' in globals()"):  # else it was restarted
        kernel.run("os.environ.clear(); os.environ.update(environment)")


def nothing_left(slurm: Cluster) -> None:
    """No job is left, nor anything that one has started."""
    slurm.wait_empty()
    slurm.wait(lambda: all("ipykernel_launcher" in cmdline(one) for one in slurm.processes()))


def shows(text: str) -> Callable[[Shown], bool]:
    return lambda cell: text in cell.text


def instead_of(slurm: Cluster, notebook: Notebook, program: str, script: str) -> Path:
    """Let a notebook find this script of sh for one of Slurm's programs, until the test's end: a file that the script may make."""
    path = slurm.instead_of(program, script)["PATH"]
    notebook.run(f"os.environ['PATH'] = {path!r}")
    return Path(path.partition(":")[0], f"{program}.asked")


@contextmanager
def busy(slurm: Cluster) -> Iterator[str]:
    """Another job has all nodes meanwhile; its number."""
    number = slurm(
        "sbatch", "--parsable", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "exec sleep 600"
    ).strip()
    try:
        slurm.wait(lambda: ("RUNNING", "wrap") in [one[1:] for one in slurm.jobs()])
        yield number
    finally:
        slurm("scancel", number)
        slurm.wait_empty()


def told_by(failure: str, number: str) -> None:
    assert CANCELLED.format(number) in failure, failure


def test_a_job_from_its_start_to_its_cancellation(slurm: Cluster, notebook: Notebook) -> None:
    """Slurm learns no secrets, values bypass srun, and kernels and the controller restart."""

    def steps() -> list[psutil.Process]:
        return [one for one in of(processes.ATTACH) if one.name() == "srun"]

    def of(module: str) -> list[psutil.Process]:
        return [one for one in slurm.processes() if any(module in word for word in cmdline(one))]

    shown = notebook.run(f"{POOL} --gres gpu:a100:2 --slurm comment='a \"b\" #c'")
    ((number, _, job_id),) = slurm.jobs()
    assert f"Slurm job {number} has n1, n2" in shown.text
    here = {"SLURM_CONF": slurm.env["SLURM_CONF"], "CUDA_VISIBLE_DEVICES": "0,1"}
    assert seen(notebook, WHERE) == [here, here]
    job = slurm("scontrol", "show", "job", "-o", number)
    assert 'Comment=a "b" #c' in job
    assert "a secret" not in job + slurm("scontrol", "write", "batch_script", number, "-")
    status = notebook.run("%sky_status").rich[-1]["text/html"]
    assert re.search(r"slurm · 2 nodes × 1 rank on n1, n2 · [89]m left", status)

    # the way of values is another one than srun, and a lost one is replaced
    notebook.run("%%sky_broadcast\nkept = 7")
    slurm.wait(lambda: not steps())
    relays = of(processes.RELAY)
    assert relays
    for one in relays:
        for child in [*one.children(), one]:
            child.kill()
    assert seen(notebook, "kept") == [7, 7]
    slurm.wait(lambda: not steps() and len(of(processes.RELAY)) == len(relays))

    # another kernel is told of it, and has its ranks with their variables
    notebook.restart()
    told = notebook.run("%load_ext skymagic").text
    assert f"%sky_attach lab continues with it, %sky_down {job_id} ends it" in " ".join(
        told.split()
    )
    assert "n1, n2" in notebook.run("%sky_attach lab").text
    with slurm.without_controller():
        assert seen(notebook, "kept") == [7, 7]
    slurm.wait(lambda: slurm.running() == number)
    notebook.run("%%sky_sh\necho here")

    # Slurm's own signal, which it sends some time before the time limit, here without the wait
    notebook.run(
        "%%sky_broadcast\nimport skymagic as sky\nheard = []\nsky.on_interruption(heard.append)"
    )
    running = at_work(notebook)
    slurm("scancel", "--signal=URG", number)
    notebook.watch(running, lambda cell: cell.text.count("on_interruption hook has run") == 4)
    assert re.search(r"node 1 \(n2\): Slurm .*\b(60|59) s", running.text)
    notebook.interrupt()
    notebook.finish(running)
    assert [sorted(each) for each in seen(notebook, "[one.mine for one in heard]")] == [
        [False, True]
    ] * 2

    running = at_work(notebook)
    slurm("scancel", number)
    told_by(notebook.finish(running).failure.text, number)


def test_a_start_that_is_stopped_or_whose_job_is_cancelled(
    slurm: Cluster, notebook: Notebook
) -> None:
    with busy(slurm) as other:
        running = notebook.start(f"{POOL} --exclusive")
        notebook.watch(running, shows(" waits: "))
        notebook.interrupt()
        shown = notebook.finish(running).text
        (number,) = {
            *re.findall(r"Slurm job (\d+) waits: \D+ \((?:Priority|Resources|None)\)", shown)
        }
        assert f"[Slurm job {number} is cancelled]" in shown
        assert [one[0] for one in slurm.jobs()] == [other]
        running = notebook.start(f"{POOL} --exclusive")
        notebook.watch(running, shows(" waits: "))
        ((number, _, _),) = [one for one in slurm.jobs() if one[0] != other]
        slurm("scancel", number)
        told_by(notebook.finish(running).failure.text, number)
    running = notebook.start(POOL)
    notebook.watch(running, shows(" has n1, n2"))
    number = slurm.running()
    slurm("scancel", number)
    told_by(notebook.finish(running).failure.text, number)


def test_pool_within_salloc_submits_its_own_job(slurm: Cluster, notebook: Notebook) -> None:
    slurm("salloc", "--no-shell", "-N1", "--time=10")
    outer = slurm.running()
    inside = {"SLURM_JOB_ID": outer, "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1"}
    notebook.run(f"os.environ.update({inside})")
    notebook.run(POOL)
    assert seen(notebook, "import os; os.environ['SLURMD_NODENAME']") == ["n1", "n2"]
    assert len(slurm.jobs()) == 2
    notebook.run("%sky_down")
    slurm.wait(lambda: [job[0] for job in slurm.jobs()] == [outer])
    slurm("scancel", outer)


def test_refused_options_list_alternatives(slurm: Cluster, notebook: Notebook) -> None:
    for options, told in (
        ("--partition gpuu", "--partition: Slurm has no partition 'gpuu'; did you mean 'gpu'?"),
        ("--gpu H100:2", "--gpu H100:2: no node there has that (GPUs per node: a100:2)"),
        ("--nodes 3", "--nodes 3 is more than the partition has (2)"),
        (
            "--time 2h",
            "Slurm refused the job: Batch job submission failed: Requested time limit is invalid",
        ),
        (
            "--gres gpu:h200:1",
            "Slurm refused the job: Batch job submission failed: Requested node configuration is not",
        ),
        (
            "--constraint rack9",
            "Slurm refused the job: Batch job submission failed: Invalid feature specification",
        ),
        (
            "--reservation mine",
            "Slurm refused the job: Batch job submission failed: Requested reservation is invalid",
        ),
        ("--hosts a", "--hosts is for machines reached over SSH"),
    ):
        said = notebook.fail(
            f"%sky_pool wrong --provider slurm --python {sys.executable} {options}"
        ).text
        assert told in said, said
    assert slurm.jobs() == []


def test_preview_shows_script_and_slurms_answer(slurm: Cluster, notebook: Notebook) -> None:
    shown = notebook.run(f"{POOL} --gpu A100:2 --account me --dry-run").text
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --gres=gpu:a100:2",
        "#SBATCH --time=10",
        "#SBATCH --account=me",
    ):
        assert f"{line}\n" in shown
    assert re.search(
        r"Slurm says: Job \d+ to start at .* on nodes n\[1-2\] in partition gpu", shown
    )
    assert slurm.jobs() == []


def test_a_job_whose_answer_is_lost_is_found_by_its_name(
    slurm: Cluster, notebook: Notebook
) -> None:
    """The controller accepts the job after sbatch has given up, as a busy controller does."""
    late = '(sleep 1; "$REAL" "$@" <"$0.$$"; rm "$0.$$") >/dev/null 2>&1 </dev/null &'
    script = f'cat >"$0.$$"; {late}\necho "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1'
    instead_of(slurm, notebook, "sbatch", script)
    notebook.run(ONE)
    assert slurm.running()
    notebook.run("%sky_down")
    nothing_left(slurm)


def test_a_stop_while_the_job_is_handed_in_leaves_none(slurm: Cluster, notebook: Notebook) -> None:
    asked = instead_of(slurm, notebook, "sbatch", 'touch "$0.asked"; sleep 2; exec "$REAL" "$@"')
    running = notebook.start(POOL)
    slurm.wait(asked.exists)
    notebook.interrupt()
    assert notebook.finish(running).failure.ename == "KeyboardInterrupt"
    assert "is cancelled]" in running.text
    nothing_left(slurm)


def test_a_second_stop_leaves_no_job_either(slurm: Cluster, notebook: Notebook) -> None:
    asked = instead_of(slurm, notebook, "scancel", 'touch "$0.asked"; sleep 1; exec "$REAL" "$@"')
    with busy(slurm) as other:
        running = notebook.start(f"{POOL} --exclusive")
        notebook.watch(running, shows(" waits: "))
        notebook.interrupt()
        slurm.wait(asked.exists)
        notebook.interrupt()
        assert notebook.finish(running).failure.ename == "KeyboardInterrupt"
        slurm.wait(lambda: [one[0] for one in slurm.jobs()] == [other])


def test_pool_of_a_dead_notebook_is_found_by_job_and_ended(
    slurm: Cluster, notebook: Notebook, tmp_path: Path
) -> None:
    own = slurm(
        "sbatch",
        "--parsable",
        "-N1",
        "-o",
        "/dev/null",
        "--job-name=own-12345678",
        "--wrap",
        "sleep 600",
    )
    with opened(tmp_path, env=slurm.env) as elsewhere:
        notebook.run(ONE)
        ((number, _, job_id),) = [one for one in slurm.jobs() if one[0] != own.strip()]
        shown = elsewhere.run("%sky_status --provider slurm").text
        assert re.search(rf"{job_id}\): Slurm job {number} on n\d; running; ends in [89]m", shown)
        assert "own-12345678" not in shown
        assert "%sky_down lab ends it" in notebook.fail("%sky_down lab --provider slurm").text
        notebook.restart()
        notebook.run("%load_ext skymagic")
        assert "pool 'lab'" in elsewhere.run("%sky_down lab --provider slurm").text
        slurm.wait(lambda: [one[0] for one in slurm.jobs()] == [own.strip()])
        assert job_id not in elsewhere.run("%sky_status --provider slurm").text
        slurm("scancel", own.strip())


def test_pool_continues_in_the_job_queued_after_its_own(slurm: Cluster, notebook: Notebook) -> None:
    """At the time limit and after preemption, with the checkpoint hook called first; not after a cancellation."""
    urgent = (
        "sbatch",
        "-N2",
        "--exclusive",
        "-p",
        "urgent",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 1",
    )
    notebook.run(f"{POOL} --renew")
    for told in ("has reached its time limit", "was preempted"):
        notebook.run(
            "%%sky_broadcast\nimport skymagic as sky\nkept = 7\nsky.on_interruption(lambda notice: None)"
        )
        number = slurm.running()
        assert len(slurm.jobs()) == 2
        running = at_work(notebook)
        if told == "was preempted":
            slurm(*urgent)
        else:
            slurm("scancel", "--signal=URG", number)
            notebook.watch(
                running, lambda cell: cell.text.count("on_interruption hook has run") == 2
            )
            slurm("scontrol", "update", f"jobid={number}", "EndTime=now")
        assert f"Slurm job {number} {told}" in notebook.finish(running).failure.text
        shown = notebook.run(
            "%%sky_broadcast -o left\nimport os\nglobals().get('kept'), os.environ['SLURMD_NODENAME']"
        )
        assert notebook.value("left") == [(None, "n1"), (None, "n2")]
        said = notebook.run("%sky_status").text + shown.text + running.text
        assert re.search(r"\bhave restarted\b.*\bvariables\b", said)
        assert slurm.running() != number
    number = slurm.running()
    slurm("scancel", number)
    slurm.wait_empty()
    told_by(notebook.fail("%%sky_broadcast\n1").text, number)


def test_an_idle_pool_leaves_no_job_that_would_follow(slurm: Cluster, notebook: Notebook) -> None:
    notebook.run(f"{ONE} --renew --idle 2s")
    slurm.wait_empty()


def test_a_job_that_is_put_back_into_the_queue(slurm: Cluster, notebook: Notebook) -> None:
    notebook.run(f"{ONE} --slurm no-requeue=none,requeue")
    running = at_work(notebook, 1)
    number = slurm.running()
    slurm("scontrol", "requeue", number)
    assert re.search(rf"Slurm job {number} .*\bqueue\b", notebook.finish(running).failure.text)


def test_salloc_asks_for_the_job(slurm: Cluster, notebook: Notebook) -> None:
    refusal = 'echo "sbatch: error: Batch job submission failed: this QOS takes no batch jobs: use salloc" >&2; exit 1'
    asked = instead_of(slurm, notebook, "sbatch", f'touch "$0.asked"; {refusal}')
    pool = f"{POOL} --slurm salloc"
    assert "allocate failed" in notebook.fail(f"{pool} --constraint nothere").text
    with busy(slurm) as other:
        running = notebook.start(f"{pool} --exclusive")
        notebook.watch(running, shows(" waits: "))
        notebook.interrupt()
        notebook.finish(running)
        assert [one[0] for one in slurm.jobs()] == [other]
    assert not asked.exists()
    assert "add --slurm salloc" in notebook.fail(POOL).text
    assert asked.exists()
    notebook.run(f"{pool} --gres gpu:a100:1")
    assert [one["CUDA_VISIBLE_DEVICES"] for one in seen(notebook, WHERE)] == ["0", "0"]
    assert "BatchFlag=0" in slurm("scontrol", "show", "job", "-o", slurm.running())
    assert notebook.run("%sky_down").text == "pool 'lab' is down\n"
    nothing_left(slurm)


def test_site_script_is_kept_per_cluster(
    slurm: Cluster, notebook: Notebook, tmp_path: Path
) -> None:
    file = tmp_path / "skymagic" / "slurm" / "lab.sh"
    file.mkdir(parents=True)
    notebook.run(f"os.environ['XDG_CONFIG_HOME'] = {str(tmp_path)!r}")
    assert f"{file}, " in notebook.fail(POOL).text
    file.rmdir()
    file.write_text(
        "echo loud\nexport OWN_SITE='a \"b\" $HOME' OWN_JOB=$SLURM_JOB_ID PATH=/opt/own/bin:$PATH\n"
    )
    assert "OWN_SITE" in notebook.run(f"{ONE} --dry-run").text
    notebook.run(ONE)
    (variables,) = seen(notebook, WHERE)
    assert (variables["OWN_SITE"], variables["OWN_JOB"]) == ('a "b" $HOME', slurm.running())
    assert seen(notebook, "'/opt/own/bin' in os.environ['PATH'].split(':')") == [True]


def test_daemons_of_the_holder_survive_a_step(tmp_path: Path) -> None:
    """proctrack/cgroup kills all processes of a step: ranks, servers and a notebook job. A site's prologue prints text."""
    loud = tmp_path / "loud"
    loud.write_text("#!/bin/sh\necho print welcome to the cluster\necho 'print skymagic-0 7'\n")
    loud.chmod(0o755)
    for folder in ("slurm", "notebook"):
        (tmp_path / folder).mkdir()
    with cluster(tmp_path / "slurm", proctrack="cgroup", more=f"TaskProlog={loud}") as slurm:
        desk = Desk(tmp_path, POOL, slurm.env)
        with opened(tmp_path / "notebook", env=desk.env) as notebook:
            notebook.run(POOL)
            notebook.run("%%sky_broadcast\nkept = 7")
            notebook.restart()
            notebook.run("%load_ext skymagic\n%sky_attach lab")
            notebook.run("import random; big = random.randbytes(1 << 25)")
            assert seen(notebook, "kept, len(big)") == [(7, 1 << 25)] * 2
            servers = [one for one in slurm.processes() if processes.VALUES in cmdline(one)]
            assert len(servers) == 2
            for one in servers:  # values come by the node's own address, and not through srun
                assert processes.RELAY in cmdline(psutil.Process(one.ppid()))
            notebook.restart()
            cells = [new_code_cell(one) for one in ("%load_ext skymagic", NODES)]
            nbformat.write(new_notebook(cells=cells), tmp_path / "job.ipynb")
            code, out, err = desk.ran("run", tmp_path / "job.ipynb", "--pool", "lab")
            assert (code, {"[0] n1", "[1] n2"} <= {*out.splitlines()}) == (0, True), err + out
            notebook.run("%load_ext skymagic\n%sky_down lab")
            nothing_left(slurm)


def test_unshared_home_is_reported_and_replaced(tmp_path: Path) -> None:
    (home := tmp_path / "homes" / "me").mkdir(parents=True)
    hidden = f'mount -t tmpfs -o ro none {home.parent} && exec "$@"'
    (tmp_path / "slurm").mkdir()
    with (
        cluster(
            tmp_path / "slurm", 1, within=("unshare", "--mount", "sh", "-c", hidden, "sh")
        ) as slurm,
        opened(tmp_path, env={**slurm.env, "HOME": str(home)}) as notebook,
    ):
        failure = notebook.fail(ONE).text
        assert f"nothing can be written at {home}/.skymagic" in failure
        assert "--env SKYMAGIC_HOME=/path" in failure
        slurm.wait_empty()
        notebook.run(f"{ONE} --env SKYMAGIC_HOME={tmp_path}/scratch")
        assert seen(notebook, "import os; os.path.exists(os.environ['HOME'])") == [False]
        notebook.run("%sky_down")
        nothing_left(slurm)
