"""Requests to Slurm: job scripts, available resources, job states, and explanations.

Text functions are pure; calls to Slurm are few. A job runs one *holder* per node, which starts the
node's daemon and ends with it (`kernels.daemon.attach`). Everything else runs in steps of the job::

    sbatch ──▶ job ──▶ srun, a holder on each node ──▶ daemon ──▶ agent ──▶ ranks
    srun --overlap --jobid JOB -w NODE /bin/sh …              a channel: scripts, processes, daemon

All users of a site share Slurm's controller. `JobQueue` therefore asks it at most six times a
minute for all pools of a process. A missing answer changes nothing: a job has ended only if Slurm
itself reports it as ended.
"""

from __future__ import annotations

import logging
import math
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from skymagic.errors import ProvisionError, RequestError, collect_mistakes
from skymagic.plan.accelerators import Accelerator, GpuChoice, matches
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import duration
from skymagic.providers.cluster import check_gpu_count
from skymagic.providers.holder import holder_folder, holder_script
from skymagic.ssh.programs import Programs
from skymagic.wire import processes

logger = logging.getLogger(__name__)

UNBOUNDED_LIMIT = "8:00:00"
"""Time limit if neither the user nor the site sets one.

Bounds the cost of a forgotten job.
"""
Asking = Callable[..., subprocess.CompletedProcess[str]]
"""Runs one of Slurm's programs, like `Programs.run`."""
KEPT = r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TZ|LD_LIBRARY_PATH|MODULEPATH|SLURM_CONF"
"""Variables of the notebook that jobs inherit.

Contains no secrets, and nothing that would give a job inside a job the outer job's shape.
"""
OWN = ("array", "job-name", "parsable", "test-only", "wait", "wrap")
"""Options of sbatch that users cannot set."""
ALLOCATED = "salloc"
"""Marks among the directives that the job is requested with salloc."""
OF_SCRIPTS = (ALLOCATED, "output", "error", "open-mode", "requeue", "no-requeue", "export")
"""Directives that salloc does not support."""
SALLOC = r"""said=$(mktemp) || exit
setsid salloc "$@" >"$said" 2>&1 </dev/null &
until grep -Eq 'allocation [0-9]|error:' "$said" || ! kill -0 $!; do sleep 0.2; done 2>/dev/null
sed -n 's/.*job allocation \([0-9]*\).*/\1/p' "$said" | head -n 1
grep error: "$said" >&2
rm "$said"
"""
OURS = "skymagic"
"""Comment on a pool's job, used to find it from every login node."""
GONE = "Invalid job id"
UNSURE = re.compile(r"timed out|[Uu]nable to contact|Zero Bytes|[Cc]ommunication|[Cc]onnect")
"""Errors of sbatch after which it is unknown whether Slurm accepted the job."""
UNSURE_DELAYS = (0.0, 2.0, 5.0, 10.0, 15.0)


# ------------------------------------------------------------------------------------ resources


@dataclass(frozen=True)
class SlurmPartition:
    """Nodes of one kind in a partition, as sinfo lists them.

    Attributes:
        memory_gb: memory per node.
        gpus: GPU counts per node by the site's GPU name; the name is "" if the site does not
            distinguish them.
        limit: longest time of a job, as Slurm writes it.
        usual: default time of a job, as Slurm writes it.
    """

    name: str
    default: bool
    nodes: int
    memory_gb: float
    gpus: Mapping[str, int]
    limit: str
    usual: str


SINFO = ("sinfo", "-h", "-o", "%P|%a|%D|%m|%G|%l|%L")


def partitions(text: str) -> tuple[SlurmPartition, ...]:
    """Parse the output of `SINFO`, skipping malformed lines and partitions that are down."""
    rows = ([cell.strip() for cell in line.split("|")] for line in text.splitlines())
    return tuple(
        SlurmPartition(
            name.rstrip("*"),
            name.endswith("*"),
            _number(nodes),
            round(_number(memory) * 1.048576e-3, 1),
            _gpus(gres),
            limit,
            usual,
        )
        for name, up, nodes, memory, gres, limit, usual in (row for row in rows if len(row) == 7)
        if up == "up"
    )


def _number(cell: str) -> int:
    return int(re.sub(r"\D.*", "", cell) or 0)  # 64000+ where nodes differ


def _gpus(text: str) -> dict[str, int]:
    """Return the GPUs among generic resources: ``gpu:a100:4(S:0-1),nvme:1`` → ``{"a100": 4}``."""
    entries = (entry.split(":") for entry in re.sub(r"\([^)]*\)", "", text).split(","))
    gpu_entries = [
        entry
        for entry in entries
        if entry[0] == "gpu" and entry[-1].isdigit() and len(entry) in (2, 3)
    ]
    return {entry[1] if len(entry) == 3 else "": int(entry[-1]) for entry in gpu_entries}


def nodes_of_partition(
    partitions: Sequence[SlurmPartition], name: str | None
) -> list[SlurmPartition]:
    """Return the nodes of the named partition, or of the default one.

    Raises RequestError for an unknown partition and suggests the nearest name.
    """
    names = list(dict.fromkeys(partition.name for partition in partitions))
    requested = (
        name.split(",")
        if name
        else [partition.name for partition in partitions if partition.default] or names[:1]
    )
    if unknown := [name for name in requested if name not in names]:
        nearest = did_you_mean(unknown[0], names) or f"; available: {', '.join(names) or 'none'}"
        raise RequestError(
            f"--partition: Slurm has no partition {unknown[0]!r}{nearest}",
            code="no-partition",
            names=[unknown[0]],
        )
    return [partition for partition in partitions if partition.name in requested]


def gres_word(gpu: Accelerator | GpuChoice, partitions: Sequence[SlurmPartition]) -> str:
    """Translate ``--gpu`` to the site's own GPU names: ``gpu:a100:4``.

    Raises RequestError, listing the available GPUs, if no node satisfies it.
    """
    kinds: dict[str, int] = {}
    for partition in partitions:
        kinds |= {kind: max(number, kinds.get(kind, 0)) for kind, number in partition.gpus.items()}
    listed = ", ".join(f"{kind or 'gpu'}:{count}" for kind, count in kinds.items()) or "none"
    check_gpu_count(gpu, "Slurm")
    if isinstance(gpu, GpuChoice):
        most = max(kinds.values(), default=0)
        if (gpu.count or 1) > most:
            raise RequestError(f"--gpu {gpu}: nodes there have fewer GPUs (per node: {listed})")
        return f"gpu:{gpu.count or most}"
    named = [kind for kind in kinds if kind and matches(gpu.name, re.sub(r"[_\s]+", " ", kind))]
    enough = [kind for kind in named or {""} & {*kinds} if kinds[kind] >= gpu.count]
    if not enough:
        raise RequestError(
            f"--gpu {gpu}: no node there has that (GPUs per node: {listed}); "
            "--partition may name others"
        )
    return ":".join(filter(None, ("gpu", enough[0], str(gpu.count))))


# ------------------------------------------------------------------------------------ the script


def holder(job_id: str, prologue: str = "") -> str:
    """Return the holder script for a node of a pool.

    Args:
        prologue: sh prologue of the site, which each holder runs first.
    """
    own = holder_script(holder_folder(job_id, "$SLURMD_NODENAME"), job_id)
    return f"export {processes.SITE}=1\n{prologue}\n{own}" if prologue else own


def step_command(script: str, pyxis: Sequence[str] = ()) -> list[str]:
    """Return the command of a step that runs an sh script on each node.

    Args:
        pyxis: options that make Slurm run the step in a container.
    """
    return [
        "srun",
        "--ntasks-per-node=1",
        "--overlap",
        "--no-kill",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--mpi=none",
        "--quiet",
        "--cpu-bind=none",
        "--export=ALL",
        "--chdir=/tmp",
        *pyxis,
        "/bin/sh",
        "-c",
        script,
    ]


def script(
    directives: Mapping[str, str], job_id: str, prologue: str = "", pyxis: Sequence[str] = ()
) -> str:
    """Return the batch script of a pool's job, named after the pool. Pure.

    Args:
        directives: values by sbatch option name, in order; "" for options without a value.
        prologue: see `holder`.
        pyxis: see `step_command`.
    """
    named = {"job-name": job_id, **directives}
    lines = [
        f"#SBATCH --{name}" + (f"={_quote(value)}" if value else "")
        for name, value in named.items()
    ]
    own_site = ["export PYTHONNOUSERSITE=1"] if pyxis else []
    # nobody waits for a job that Slurm restarts, so it exits at once
    once, command = (
        '[ -z "$SLURM_RESTART_COUNT" ] || exit 0',
        shlex.join(step_command(holder(job_id, prologue), pyxis)),
    )
    return "\n".join(["#!/bin/sh", *lines, "", once, *own_site, f"exec {command}", ""])


def allocation(
    directives: Mapping[str, str], job_id: str, prologue: str = "", pyxis: Sequence[str] = ()
) -> list[str]:
    """Return the salloc command for the same job. It runs on the login node until the job ends."""
    named = {
        "job-name": job_id,
        **{name: value for name, value in directives.items() if name not in OF_SCRIPTS},
    }
    options = [f"--{name}" + (f"={value}" if value else "") for name, value in named.items()]
    return ["sh", "-c", SALLOC, "sh", *options, *step_command(holder(job_id, prologue), pyxis)]


def _quote(value: str) -> str:
    """Quote a value for sbatch directives.

    Blanks and ``#`` end an unquoted value, and a backslash escapes inside quotes too.
    """
    if re.fullmatch(r"[\w@%+=:,./\[\]&|*()-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def job_directives(options: Iterable[tuple[str, str]], usual: Mapping[str, str]) -> dict[str, str]:
    """Return the directives of a job: the `usual` ones, overridden by the user's options.

    Args:
        options: (name, value) pairs in their order; the value ``none`` removes a directive.

    Raises:
        RequestError: lists all invalid options.
    """
    directives, mistakes = dict(usual), []
    for name, value in options:
        if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
            mistakes.append(
                f"--slurm: {name!r} is no option of sbatch: write its long name, as in mem=0"
            )
        elif name in OWN:
            mistakes.append(f"--slurm: {name} is not to be changed here")
        elif re.search(r"[\x00-\x1f\x7f]", value):
            mistakes.append(f"--{name}: {value!r} has a control character")
        elif value == "none":
            directives.pop(name, None)
        else:
            with collect_mistakes(mistakes):
                directives[name] = _time(value) if name == "time" else value
    if mistakes:
        raise RequestError(mistakes)
    return directives


def _time(value: str) -> str:
    """Return a time limit in Slurm's format.

    Accepts Slurm's own formats and the durations used everywhere here. Raises RequestError.
    """
    if re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", value):
        return value
    try:
        return str(max(1, round(duration(value) / 60)))
    except RequestError:
        raise RequestError(
            f"--time: {value!r} is no time limit: write 4h, 90m, or 1-12:00:00; "
            "a job without an end is not asked for"
        ) from None


# ------------------------------------------------------------------------------------ refusals

REMEDIES = {
    r"\bsalloc\b|\binteractive (job|use|session)|\bbatch jobs?\b(?! submission)": (
        "if the site refuses sbatch, add --slurm salloc: the job is then asked for by salloc"
    ),
    r"policy|policies": (
        "you, or your group, may not have so much at once: ask for fewer nodes, or a shorter --time"
    ),
    r"time limit": "--time is above the partition's limit, which `sinfo -o '%P %l'` lists",
    r"node configuration": (
        "no node of the partition has such CPUs, memory, or GPUs: "
        "`sinfo -o '%P %c %m %G'` lists what they have"
    ),
    r"feature": "`sinfo -o '%P %f'` lists what --constraint can name",
    r"reservation": "`scontrol show reservation` lists what --reservation can name",
}
"""Advice by pattern in Slurm's refusal of a job."""
ASSOCIATIONS = (
    "sh",
    "-c",
    'exec sacctmgr -nP show assoc where user="$(id -un)" format=account,qos,partition',
)


def remedy(problem: str, directives: Mapping[str, str], asking: Asking) -> str:
    """Return advice for a refused job as another line, or "" if the refusal is unknown."""
    folded = problem.lower()
    if not (wrong := re.search(r"invalid (account|qos)\b", folded)):
        return next(
            (f"\n  {advice}" for pattern, advice in REMEDIES.items() if re.search(pattern, folded)),
            "",
        )
    rows = [
        row
        for row in (line.split("|") for line in asking(*ASSOCIATIONS).stdout.splitlines())
        if len(row) == 3
    ]
    option, current = wrong[1], directives.get(wrong[1], "")
    if option == "qos":
        rows = [row for row in rows if row[0] == directives.get("account", row[0])]
        allowed = {name: name for row in rows for name in row[1].split(",") if name}
    else:
        allowed = {row[0]: row[0] + (f" (in partition {row[2]})" if row[2] else "") for row in rows}
    if not allowed:
        return (
            f"\n  sacctmgr lists no {option} for you: ask the site's staff which --{option} to use"
        )
    yours = (
        f"you may use {', '.join(sorted(allowed.values()))}"
        f"{did_you_mean(current, allowed) if current else ''}"
    )
    return f"\n  --{option}{f' {current}' if current else ''}: {yours}"


# ------------------------------------------------------------------------------------ calls


def error_message(done: subprocess.CompletedProcess[str]) -> str:
    """Return a program's error message without its name at the start of each line."""
    return re.sub(r"(?m)^\w+: (error|fatal): ", "", (done.stderr or done.stdout).strip())


@dataclass(frozen=True)
class SlurmJob:
    """State of a job as Slurm reports it.

    Attributes:
        state: ``PENDING``, ``RUNNING``, …
        reason: Slurm's word for why the job waits.
        begins: estimated start in seconds since 1970, or None if unknown.
        ends: end in seconds since 1970, or None if unknown.
        nodes: node list as Slurm writes it: ``n[1-2]``.
        pool: job ID of the pool, or "" if the job is not a pool.
        restarts: how many times Slurm has restarted it.
    """

    state: str
    reason: str = ""
    begins: float | None = None
    ends: float | None = None
    nodes: str = ""
    pool: str = ""
    restarts: int = 0

    @property
    def over(self) -> bool:
        """True if the job has certainly ended."""
        return self.state in ENDS

    @property
    def waits(self) -> bool:
        """True if the job has no nodes yet."""
        return bool(WAITS.fullmatch(self.state))


WAITS = re.compile(
    "PENDING|CONFIGURING|REQUEUED|REQUEUE_FED|REQUEUE_HOLD|RESV_DEL_HOLD|SPECIAL_EXIT|EXPEDITING"
)
ENDS = {
    "CANCELLED": (
        "was cancelled, and not from this notebook: by you elsewhere, by an administrator, "
        "or as a node's prologue failed (sinfo -R)"
    ),
    "COMPLETED": "has ended: nothing was left to hold its nodes for",
    "FAILED": "has failed",
    "TIMEOUT": "has reached its time limit (--time)",
    "NODE_FAIL": "has ended because a node failed",
    "PREEMPTED": "was preempted by a job of higher priority",
    "OUT_OF_MEMORY": "has used more memory than it had asked for (--memory)",
    "BOOT_FAIL": "has ended because its nodes did not boot",
    "DEADLINE": "was ended at its deadline",
    "REVOKED": "was started on another cluster of the federation",
    "REQUEUED": (
        "was put back into the queue by a job of higher priority, or by an administrator: "
        "what ran in it is gone"
    ),
}
REASONS = {
    "Priority": "jobs of higher priority come first",
    "Resources": "its nodes are busy",
    "None": "the scheduler has not looked at it yet",
    "Dependency": "another job must end first",
    "BeginTime": "its time to begin has not come",
    "JobHeldUser": "you hold it (scontrol release)",
    "JobHeldAdmin": "an administrator holds it",
    "PartitionDown": "its partition is down",
    "Licenses": "licenses that it needs are in use",
    "ReqNodeNotAvail|Nodes.required.*": (
        "a node that it needs is down, drained or reserved: a maintenance may come"
    ),
    "PartitionNodeLimit": "the partition gives no job so many nodes",
    "PartitionTimeLimit": "its time limit is above the partition's",
    "Reservation": "its reservation has not begun",
    "BadConstraints": "no node satisfies it",
    r"Assoc\w*|QOSMax\w*|Q[oO]S\w*(Limit|Per)\w*": "you, or your group, use as much as you may",
}

HOPELESS = re.compile(
    r"Partition(Node|Time)Limit|PartitionConfig|BadConstraints|InvalidAccount|InvalidQOS"
)


def reason_words(job: SlurmJob) -> str:
    """Return why a job waits, in plain words followed by Slurm's own."""
    reason = job.reason.strip("()").partition(",")[0]
    explanation = next(
        (explanation for pattern, explanation in REASONS.items() if re.fullmatch(pattern, reason)),
        "",
    )
    if HOPELESS.fullmatch(reason):
        explanation = (
            f"{explanation or 'it cannot start as it is asked for'}, and that does not change by "
            "itself: stop it, and ask for other nodes"
        )
    message = f"{explanation} ({reason})" if explanation else reason or "nobody says why"
    if job.begins:
        message += (
            "; Slurm estimates a start at "
            f"{time.strftime('%H:%M on %Y-%m-%d', time.localtime(job.begins))}"
        )
    return message


def end_words(number: str, job: SlurmJob) -> str:
    """Return a sentence on how a job ended."""
    # a restarted job's script exits at once
    again = job.waits or (job.restarts and job.state == "COMPLETED")
    return f"Slurm job {number} {ENDS.get('REQUEUED' if again else job.state, f'is {job.state}')}"


def _moment(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A, Unknown, NONE
        return None


SQUEUE = ("squeue", "-h", "--me", "-o", "%i|%T|%r|%S|%e|%N|%j|%k")


def jobs_of(text: str) -> dict[str, SlurmJob]:
    """Parse the output of `SQUEUE` into jobs by number."""
    rows = (line.strip().split("|", 7) for line in text.splitlines())
    return {
        number: SlurmJob(
            state,
            reason,
            _moment(start) if state == "PENDING" else None,
            _moment(end),
            nodes,
            name if comment == OURS else "",
        )
        for number, state, reason, start, end, nodes, name, comment in (
            row for row in rows if len(row) == 8
        )
    }


class JobQueue:
    """States of all the user's jobs, fetched together.

    Asks Slurm at most six times a minute, however many callers there are.
    """

    SECONDS = 10.0

    def __init__(self, asking: Asking, clock: Callable[[], float] = time.monotonic) -> None:
        self._call, self._clock = asking, clock
        self._lock = threading.Lock()
        self._asked = -math.inf
        self._jobs: dict[str, SlurmJob] = {}

    def last_seen(self, number: str) -> SlurmJob | None:
        """Return a job's state at the last query, or None if unknown.

        None does not mean it has ended.
        """
        with self._lock:
            if (now := self._clock()) - self._asked >= self.SECONDS:
                self._asked = now
                done = self._call(*SQUEUE)
                self._jobs = jobs_of(done.stdout) if done.returncode == 0 else {}
                if number not in self._jobs:
                    return self.now(number)
            return self._jobs.get(number)

    def end(self, number: str) -> SlurmJob | None:
        """Return the final state of a job that had nodes, or the state of one that waits again.

        Returns None if the job still runs or Slurm does not answer. Takes a few seconds at most.
        """
        for _ in range(8):
            job = self.now(number)
            if job is None or job.state != "COMPLETING":
                return job if job is not None and (job.over or job.waits) else None
            time.sleep(0.5)
        return None

    def now(self, number: str) -> SlurmJob | None:
        """Return the current state of one job, or None if Slurm does not answer.

        Also knows jobs for some minutes after their end. For callers that cannot wait for the
        shared query.
        """
        done = self._call("scontrol", "show", "job", "-o", number)
        if GONE in done.stderr:
            return SlurmJob("COMPLETED")
        # the first: new versions repeat salloc's line
        properties = dict(reversed(re.findall(r"(?<!\S)(\w+)=(\S*)", done.stdout)))
        fields = ("JobState", "Reason", "StartTime", "EndTime", "NodeList", "JobName", "Comment")
        cells = [properties.get(name, "") for name in fields]
        job = jobs_of("|".join([number, *cells])).get(number) if cells[0] else None
        return replace(job, restarts=int(properties.get("Restarts", 0))) if job else None


class LoginNode:
    """Slurm's programs, wherever they run. `run`, `channel` and `close` are those of `Programs`."""

    def __init__(self, programs: Programs) -> None:
        self.run, self.channel, self.close = programs.run, programs.channel, programs.close
        self.queue = JobQueue(self.run)

    def submit(self, command: Sequence[str], text: str, job_id: str) -> str:
        """Submit a job and return its Slurm job number.

        If Slurm's answer is lost, the job is looked up under the pool's job ID.

        Args:
            command: command that submits the job.
            text: standard input of the command.
            job_id: job ID of the pool.

        Raises:
            ProvisionError: Slurm refused the job; the message gives the reason.
        """
        done = self.run(*command, text=text)
        if match := re.search(r"(?m)^(\d+)(;.*)?$", done.stdout):
            logger.info("Slurm job is submitted: job=%s number=%s", job_id, match[1])
            return match[1]
        # a busy controller may accept a job although its answer is lost, sometimes seconds later
        for seconds in UNSURE_DELAYS if UNSURE.search(done.stderr) or not done.stderr else ():
            logger.warning("answer of Slurm is lost, the job is looked up: job=%s", job_id)
            time.sleep(seconds)
            if numbers := self.numbers(job_id):
                return numbers[-1]
        raise ProvisionError(
            f"Slurm refused the job: {error_message(done) or 'it names no job'}",
            code="slurm-refused",
        )

    def numbers(self, job_id: str) -> list[str]:
        """Return the numbers of a pool's unfinished jobs, the oldest first."""
        return sorted(
            self.run("squeue", "-h", f"--name={job_id}", "-o", "%A").stdout.split(), key=int
        )

    def name(self) -> str:
        """Return the cluster's name, or "" if unknown."""
        match = re.search(
            r"(?m)^ClusterName\s*=\s*(\S+)", self.run("scontrol", "show", "config").stdout
        )
        return match[1] if match else ""

    def cancel(self, job: str, job_id: str) -> str:
        """Cancel a job by its number, or by its name if the number is unknown.

        Returns "" on success, else the reason for the failure.
        """
        who = job or f"--name={job_id}"  # a name is one pool's alone
        done = self.run("scancel", who)
        logger.info("Slurm job is cancelled: %s code=%s", who, done.returncode)
        return "" if not done.returncode or GONE in done.stderr else error_message(done)

    def hostnames(self, nodes: str) -> list[str]:
        """Expand a node list with Slurm itself: ``n[1-2]`` → n1, n2. Raises ProvisionError."""
        done = self.run("scontrol", "show", "hostnames", nodes)
        if done.returncode or not done.stdout.split():
            raise ProvisionError(
                f"Slurm does not name the nodes of {nodes!r}: {error_message(done)}",
                code="slurm-refused",
            )
        return done.stdout.split()

    def address(self, node: str) -> str:
        """Return a node's address as seen from here. Raises OSError if it has none."""
        match = re.search(
            r"\bNodeAddr=(\S+)", self.run("scontrol", "show", "node", "-o", node).stdout
        )
        return socket.gethostbyname(match[1] if match else node)

    def fate(self, job: str, node: str) -> str:
        """Return Slurm's reason why a silent node is gone, or "" if it is present or unknown."""
        if ended := self.queue.end(job):
            return end_words(job, ended)
        running = self.queue.now(job)
        if (
            running is None
            or not running.nodes.strip("()")
            or node in self.hostnames(running.nodes)
        ):
            return ""
        return f"Slurm has taken it from job {job}: it failed, or an administrator set it down"
