"""What is asked of Slurm and what it says, as text: directives, GPUs by the site's names, jobs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from skymagic.errors import RequestError
from skymagic.magics.arguments.cell_magics import parse_pool
from skymagic.plan.accelerators import read_gpus
from skymagic.providers import slurm, slurm_jobs
from skymagic.providers.slurm_jobs import JobQueue, SlurmJob, SlurmPartition
from tests.lab.golden import Golden

SINFO = """\
gpu*|up|4|515000|gpu:a100:8(S:0-1),nvme:1|1-00:00:00|1:00:00
big|up|2|2063000|gpu:nvidia_h100_80gb_hbm3:4|infinite|n/a
old|up|9+|64000+|gpu:2|infinite|n/a
cpu|up|100|128000|(null)|infinite|n/a
shut|down|1|1|gpu:b200:8|infinite|n/a
nonsense
"""
HERE = slurm_jobs.partitions(SINFO)


def in_partition(name: str) -> Sequence[SlurmPartition]:
    return slurm_jobs.nodes_of_partition(HERE, name)


def directives(line: str, partition: str | None = None) -> dict[str, str]:
    request = parse_pool(f"--provider slurm {line}")
    return slurm._directives(request, slurm_jobs.nodes_of_partition(HERE, partition))


def test_each_directive_of_ours_can_be_changed_or_left_out() -> None:
    asked = directives(
        "--slurm output=job.log,no-kill=none,signal=none,mem=0 --exclusive --partition big", "big"
    )
    assert (asked["output"], asked["mem"], asked["exclusive"]) == ("job.log", "0", "")
    assert "no-kill" not in asked
    assert "signal" not in asked
    assert asked["time"] == slurm_jobs.UNBOUNDED_LIMIT, "the site has no limit of its own"
    assert "time" not in directives(""), "the site has one"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("gpu:a100:4", "gpu:a100:4"),
        ("[rack1*2&rack2]", "[rack1*2&rack2]"),
        ("two words", '"two words"'),
        ('a "b" #c', r'"a \"b\" #c"'),
        ("back\\slash", '"back\\\\slash"'),
        ("$(rm -rf ~)", '"$(rm -rf ~)"'),
        ("ünïcode", "ünïcode"),
    ],
)
def test_hostile_values_stay_values(value: str, written: str) -> None:
    assert (
        slurm_jobs.script({"comment": value}, "j").splitlines()[2] == f"#SBATCH --comment={written}"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ((("comment", "a\n#SBATCH --account=boss"),), "has a control character"),
        ((("wrap", "true"),), "--slurm: wrap is not to be changed here"),
        ((("array", "0-9"),), "--slurm: array is not to be changed here"),
        ((("-x; rm", "1"),), "is no option of sbatch"),
        ((("time", "UNLIMITED"),), "--time: 'UNLIMITED' is no time limit"),
        ((("time", "forever"),), "write 4h, 90m, or 1-12:00:00"),
    ],
)
def test_invalid_directives_are_refused(options: tuple[tuple[str, str], ...], told: str) -> None:
    with pytest.raises(RequestError, match="\\S") as refused:
        slurm_jobs.job_directives(options, {})
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("gpu", "partition", "word"),
    [
        ("A100:4", "gpu", "gpu:a100:4"),
        ("H100:2", "big", "gpu:nvidia_h100_80gb_hbm3:2"),
        ("V100:2", "old", "gpu:2"),
        ("3", "gpu", "gpu:3"),
        ("all", "gpu", "gpu:8"),
    ],
)
def test_gpus_have_the_names_of_the_site(gpu: str, partition: str, word: str) -> None:
    assert slurm_jobs.gres_word(read_gpus(gpu), in_partition(partition)) == word


@pytest.mark.parametrize(
    ("gpu", "partition", "told"),
    [
        ("H100:2", "gpu", "--gpu H100:2: no node there has that (GPUs per node: a100:8)"),
        ("A100:16", "gpu", "no node there has that (GPUs per node: a100:8)"),
        ("9", "gpu", "nodes there have fewer GPUs (per node: a100:8)"),
        ("1", "cpu", "nodes there have fewer GPUs (per node: none)"),
        ("0,2", "gpu", "Slurm chooses the GPUs: write how many, as in --gpu 2"),
    ],
)
def test_unavailable_gpus_are_refused_with_a_list(gpu: str, partition: str, told: str) -> None:
    with pytest.raises(RequestError) as refused:
        slurm_jobs.gres_word(read_gpus(gpu), in_partition(partition))
    assert told in str(refused.value)


def test_partitions_that_are_down_are_omitted() -> None:
    assert [(one.name, one.nodes) for one in HERE] == [
        ("gpu", 4),
        ("big", 2),
        ("old", 9),
        ("cpu", 100),
    ]
    with pytest.raises(RequestError, match="no partition 'shut'"):
        in_partition("shut")


def test_waiting_job_gives_its_reason(golden: Golden) -> None:
    rows = slurm_jobs.jobs_of(
        "7|PENDING|Resources|2026-11-24T10:00:00|N/A||lab-1|skymagic\n8|RUNNING|None|x|2026-11-24T11:00:00|n[1-2]|own|a|b\nodd\n"
    )
    golden(slurm_jobs.reason_words(rows["7"]))
    assert rows["7"].waits
    assert rows["8"].nodes == "n[1-2]"
    assert rows["8"].ends
    assert (rows["7"].pool, rows["8"].pool) == ("lab-1", ""), "jobs of the user's own are no pools"
    for reason, words in (
        (
            "(ReqNodeNotAvail, UnavailableNodes:n1)",
            "a node that it needs is down, drained or reserved",
        ),
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved",
            "a node that it needs is down, drained or reserved",
        ),
        (
            "QOSMaxJobsPerUserLimit",
            "you, or your group, use as much as you may (QOSMaxJobsPerUserLimit)",
        ),
        ("AssocGrpGRES", "you, or your group, use as much as you may (AssocGrpGRES)"),
        ("PartitionTimeLimit", "that does not change by itself"),
        ("SomethingNew", "SomethingNew"),
        ("", "nobody says why"),
    ):
        assert words in slurm_jobs.reason_words(SlurmJob("PENDING", reason))


# what Slurm 22.05 with slurmdbd and AccountingStorageEnforce=associations,limits,qos prints
NO_ACCOUNT = (
    "Batch job submission failed: Invalid account or account/partition combination specified"
)
NO_QOS = "Batch job submission failed: Invalid qos specification"
ASSOCIATIONS = "nlp-lab|long,normal|\nphysics|normal|\nvision|normal,gold|urgent\n"


@pytest.mark.parametrize(
    ("problem", "asked", "associations", "told"),
    [
        (NO_ACCOUNT, {"account": "nobody"}, ASSOCIATIONS, "--account nobody: you may use nlp-lab, physics, vision (in partition urgent)"),
        (NO_ACCOUNT, {"account": "nlplab"}, ASSOCIATIONS, "vision (in partition urgent); did you mean 'nlp-lab'?"),
        (NO_ACCOUNT, {}, ASSOCIATIONS, "--account: you may use nlp-lab, physics, vision"),
        (NO_QOS, {"qos": "nothing"}, ASSOCIATIONS, "--qos nothing: you may use gold, long, normal"),
        (NO_QOS, {"qos": "lang", "account": "physics"}, ASSOCIATIONS, "--qos lang: you may use normal"),
        (NO_ACCOUNT, {"account": "nobody"}, "", "sacctmgr lists no account for you: ask the site's staff which --account to use"),
        ("Requested time limit is invalid (missing or exceeds some limit)", {}, "", "`sinfo -o '%P %l'` lists"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            {}, "", "ask for fewer nodes, or a shorter --time",
        ),
        ("this QOS takes no batch jobs", {}, "", "add --slurm salloc"),
        ("only interactive jobs may run on this partition", {}, "", "add --slurm salloc"),
        ("Batch job submission failed: use salloc instead", {}, "", "add --slurm salloc"),
        ("Batch job submission failed: Requested time limit is invalid for interactive", {}, "", "`sinfo -o '%P %l'` lists"),
    ],
)  # fmt: skip
def test_refusal_suggests_alternatives(
    problem: str, asked: dict[str, str], associations: str, told: str
) -> None:
    def asking(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 0, associations, "")

    assert told in slurm_jobs.remedy(problem, asked, asking)
    assert slurm_jobs.remedy("Something new", asked, asking) == ""


# fields and their order are those of Slurm's sources, from the oldest version that has `srun --overlap` to the newest
BEFORE = "JobId=7 JobName=lab-1 UserId=me(1) GroupId=me(1) MCS_label=N/A Priority=42 Nice=0 Account=(null) QOS=normal "
SUBMITTED = "TimeMin=N/A SubmitTime=2026-11-24T10:00:00 EligibleTime=2026-11-24T10:00:00 AccrueTime=2026-11-24T10:00:00 "
VERSIONS = {
    "20.11": BEFORE + "JobState=RUNNING Reason=None Dependency=(null) Requeue=0 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:00:05 TimeLimit=00:10:00 " + SUBMITTED + "StartTime=2026-11-24T10:00:05 EndTime=2026-11-24T10:10:05 Deadline=N/A "
    "SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-24T10:00:05 Partition=gpu AllocNode:Sid=login:9 ReqNodeList=(null) "
    "ExcNodeList=(null) NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2 "
    "Command=(null) WorkDir=/tmp Comment=skymagic StdErr=/dev/null StdIn=/dev/null StdOut=/dev/null Power= NtasksPerTRES:0",
    "26.05": BEFORE.replace("JobName=lab-1 ", "JobName=lab-1 SLUID=sF1ZQ9 ") + "JobState=RUNNING Reason=None FailedNode=n9 Dependency=(null) "
    "Requeue=0 Restarts=1 BatchFlag=0 Reboot=0 ExitCode=0:0 RunTime=00:00:05 TimeLimit=00:10:00 " + SUBMITTED +
    "StartTime=2026-11-24T10:00:05 EndTime=2026-11-24T10:10:05 Deadline=N/A SuspendTime=None SecsPreSuspend=0 "
    "LastSchedEval=2026-11-24T10:00:05 Scheduler=Backfill Partition=gpu AllocNode:Sid=login:9 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=n[1-2] StepMgrEnabled=Yes NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* ReqTRES=cpu=2 AllocTRES=cpu=2,node=2 "
    "Command=sh SubmitLine=salloc --comment=skymagic sh -c a JobState=FAILED NodeList=x WorkDir=/tmp AdminComment=no Comment=skymagic",
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_reads_the_same_in_every_version(version: str) -> None:
    there = Controller()
    there.known = VERSIONS[version]
    job = JobQueue(there).now("7")
    assert job is not None
    assert (job.state, job.nodes, job.pool, job.restarts) == ("RUNNING", "n[1-2]", "lab-1", 1)
    assert job.ends is not None
    assert job.begins is None


def test_states_that_new_versions_have_are_known() -> None:
    assert all(
        SlurmJob(state).waits
        for state in ("EXPEDITING", "REQUEUE_FED", "RESV_DEL_HOLD", "CONFIGURING")
    )
    assert not any(
        SlurmJob(state).over or SlurmJob(state).waits
        for state in ("SUSPENDED", "STAGE_OUT", "RESIZING")
    )
    assert SlurmJob("REVOKED").over


class Controller:
    """Slurm's programs as `JobQueue` sees them, with what they answer, and a clock."""

    def __init__(self) -> None:
        self.now, self.asked, self.status, self.jobs, self.known = 0.0, 0, 0, "", ""

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        if words[0] == "squeue":
            self.asked += 1
            return subprocess.CompletedProcess(words, self.status, self.jobs, "")
        error = "" if self.known else "slurm_load_jobs error: Unable to contact slurm controller"
        return subprocess.CompletedProcess(words, 0 if self.known else 1, self.known, error)


def test_however_many_ask_slurm_is_asked_six_times_a_minute() -> None:
    there = Controller()
    there.jobs = "7|PENDING|Priority|N/A|N/A||a|\n8|RUNNING|None|N/A|N/A|n1|b|\n"
    queue = JobQueue(there, lambda: there.now)
    for _ in range(600):
        there.now += 0.5
        for number in ("7", "8"):
            assert queue.last_seen(number) is not None
        assert there.asked <= 6 * (1 + there.now // 60)
    assert there.asked >= 25, "and it is asked again"


def test_no_answer_is_no_end(golden: Golden) -> None:
    there = Controller()
    queue = JobQueue(there, lambda: there.now)
    there.jobs = "7|RUNNING|None|N/A|N/A|n1|a|\n"
    assert queue.last_seen("7") == SlurmJob("RUNNING", "None", nodes="n1")
    for there.status, there.jobs in ((1, ""), (0, "")):
        there.now += 30.0
        last = queue.last_seen("7")
        assert last is None or not last.over
        assert queue.end("7") is None
    there.status, there.known = 1, "JobId=7 JobName=x JobState=RUNNING NodeList=n1 Comment=skymagic"
    there.now += 30.0
    job = queue.last_seen("7")
    assert job is not None, "where squeue hangs or fails, scontrol is asked"
    assert job.nodes == "n1"
    there.known = "JobId=7 JobName=x JobState=TIMEOUT Reason=None NodeList=n1 ReqNodeList=(null)"
    ended = queue.end("7")
    assert ended is not None
    assert ended.over
    there.known = "JobId=7 JobState=RUNNING Reason=None StartTime=x EndTime=2026-11-24T11:00:00 ReqNodeList=(null) NodeList=n1"
    assert queue.now("7") == slurm_jobs.jobs_of("7|RUNNING|None|x|2026-11-24T11:00:00|n1||")["7"]
    golden(slurm_jobs.end_words("7", ended))
