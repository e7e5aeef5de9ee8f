"""Nodes of a Slurm cluster: one job for a pool, waited for, reached by ``srun``, used as hosts of SSH are, and cancelled at the end."""

from __future__ import annotations

import base64
import contextlib
import functools
import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from skymagic.cluster import Node
from skymagic.display.live import asks_secrets
from skymagic.display.panel import StartStep
from skymagic.errors import ProvisionError, RequestError, noted_in
from skymagic.plan import gpus
from skymagic.plan.plans import Plan, topology
from skymagic.plan.requests import PoolRequest, for_others
from skymagic.plan.units import count
from skymagic.providers import slurm_jobs, ssh
from skymagic.providers.channel_key import ChannelKey
from skymagic.providers.cluster import (
    ClusterAccess,
    ClusterNode,
    ClusterSurvey,
    cpus_of,
    holder_folder,
)
from skymagic.providers.provider import ListedPool, Say
from skymagic.providers.slurm_jobs import JobQueue, LoginNode, SlurmJob, SlurmPartition
from skymagic.ssh.host import ChannelConnection
from skymagic.ssh.process import Channel
from skymagic.ssh.programs import HostPrograms, Programs
from skymagic.ssh.sealed import SealedChannel
from skymagic.wire import processes

DELAYS = (0.5, 1.5, 4.0, 12.0, 14.0, 18.0, 30.0)
"""Seconds before each look at a job that waits, the last for all that follow: a job that starts at once is seen at once."""
FIRST_LOOKS = 3
"""Looks at this job alone, before those at all jobs of the user, which several pools share."""
RETRY_SECONDS = 30.0
"""For which a node that has just been given may refuse steps: its prologue runs."""
HERE = LoginNode(Programs("sbatch", slurm_jobs.KEPT))
CARRIED = r"""cd "${XDG_STATE_HOME:-$HOME/.local/state}/skymagic/pools" || exit
[ -z "$1" ] || exec rm -f "$0".*
for name in "$0.json" "$0.key"; do base64 "$name" | tr -d '\n' && [ -s "$name" ] && echo || exit; done
process=$(sed -n 's/.*"process": "\([0-9]*\) .*/\1/p' "$0.json")
grep -qF "\"machine\": \"$(uname -n)\"" "$0.json" && ! kill -0 "${process:-0}" 2>/dev/null && state=gone
printf %s "${state:-alive}" | base64
"""


@dataclass(frozen=True)
class SlurmSurvey(ClusterSurvey):
    """What is asked for; owns the job.

    Attributes:
        login: where Slurm's programs run. directives: of sbatch. prologue: the site's, which holders run first.
    """

    login: LoginNode
    directives: Mapping[str, str]
    prologue: str = ""

    def give_back(self) -> str:
        """Cancel the job."""
        gang = self.gang
        if (
            gang.asked is not None and not gang.number
        ):  # it was interrupted, and the job has come all the same
            gang.number = "" if gang.asked.exception() else gang.asked.result()
        number = (
            "" if self.plan.request.replace else gang.number
        )  # by its name a successor is cancelled as well
        if problem := self.login.cancel(number, gang.job_id):
            words = f"Slurm job {gang.number} could not be cancelled: {problem}"
            raise ProvisionError(f"{words}\n  scancel --name={gang.job_id} cancels it")
        return f"Slurm job {gang.number} is cancelled" if gang.number else ""

    def leave(self) -> None:
        """Close what leads to the login node; twice is safe."""
        self.login.close()

    def submit(self, **more: str) -> str:
        """Hand a job in: Slurm's number of it. Raises ProvisionError with what to try."""
        directives = {**self.directives, **more}
        try:
            return self._submit(directives)
        except ProvisionError as refused:
            raise ProvisionError(
                f"{refused}{slurm_jobs.remedy(str(refused), directives, self.login.run)}"
            ) from None

    def _submit(self, directives: Mapping[str, str]) -> str:
        job_id = self.gang.job_id
        if slurm_jobs.ALLOCATED in directives:
            command = slurm_jobs.allocation(directives, job_id, self.prologue)
            return self.login.submit(command, "", job_id)
        script = slurm_jobs.script(directives, job_id, self.prologue)
        return self.login.submit(["sbatch", "--parsable"], script, job_id)

    def succeed(self) -> None:
        """Queue a job that begins when this one has ended otherwise than by itself, where that is wanted."""
        if self.plan.request.replace:
            self.submit(
                **{"dependency": f"afternotok:{self.gang.number}", "kill-on-invalid-dep": "yes"}
            )

    def given(self, job: SlurmJob, say: Say) -> list[Node]:
        """The nodes of a job that runs, set up."""
        gang, login = self.gang, self.login
        assert gang.key is not None
        places = [
            JobNode(name, gang.job_id, login, gang.number, gang.key)
            for name in login.hostnames(job.nodes)
        ]
        return self.taken(
            places,
            f"Slurm job {gang.number} has",
            say,
            patience=RETRY_SECONDS,
            ends=job.ends,
            notice=lead(self.directives),
        )


@dataclass(frozen=True)
class Slurm:
    """The provider of a Slurm cluster, on a login node or from elsewhere through a login node.

    Attributes:
        login: through which pools are listed and ended; None where Slurm's programs are on this machine.
    """

    login: str | None = None

    def plan(self, request: PoolRequest, say: Say) -> SlurmSurvey:
        """Ask what the cluster has; nothing is submitted."""
        with contextlib.ExitStack() as opened:
            survey = self._plan(
                request, opened.enter_context(contextlib.closing(_login(request))), say
            )
            opened.pop_all()
        return survey

    def _plan(self, request: PoolRequest, login: LoginNode, say: Say) -> SlurmSurvey:
        mistakes = _elsewhere(request)
        shape = topology(request)
        with noted_in(mistakes):
            directives, nodes = _asked(login, request)
            prologue = _prologue(login)
        if mistakes:
            raise RequestError(mistakes)
        image, requirements = ssh.needs(request, shape, say)
        names = ",".join(dict.fromkeys(one.name for one in nodes))
        gpu = request.accelerator
        devices = (
            (gpus.named(*[gpu.name] * gpu.count),) * shape.nodes if gpu else ()
        )  # which ones, the nodes will say
        plan = Plan(
            provider="slurm", request=request, topology=shape, image=image,
            hosts=(f"{count(shape.nodes, 'node')} of Slurm (partition {names})",),
            cpus=int(directives.get("cpus-per-task", 1)), memory_gb=min((one.memory_gb for one in nodes), default=0.0),
            devices=devices, remote=True, notes=_preview(login, request, directives, prologue),
        )  # fmt: skip
        return SlurmSurvey(plan, requirements, login, directives, prologue)

    def acquire(self, survey: SlurmSurvey, job_id: str, say: Say) -> Sequence[Node]:
        """Submit the job, wait for it, and set its nodes up side by side."""
        gang, login = survey.gang, survey.login
        gang.job_id, gang.key = job_id, ChannelKey(job_id, login.run)
        gang.key.share()
        gang.number = gang.ask(survey.submit)
        job = wait_for(login.queue, gang.number, say)
        nodes = survey.given(job, say)
        gang.ask(survey.succeed)
        return nodes

    def replace(
        self, survey: SlurmSurvey, lost: Sequence[int], say: Say, stop: threading.Event
    ) -> Mapping[int, Node]:
        """The nodes of the job that follows one which has ended, in the place of all of that one's (`provider.Replaceable`)."""
        gang, login = survey.gang, survey.login
        job = login.queue.now(gang.number)
        if job is None or not (job.over or job.waits or job.state == "COMPLETING"):
            raise ProvisionError(f"Slurm job {gang.number} runs: --renew is for its end")
        # of a pool without its head no other node is missed; else the head is about to be
        if 0 not in lost or job.state == "COMPLETING":
            stop.wait(0.5)
            return {}
        if job.state in ("CANCELLED", "COMPLETED"):
            login.cancel("", gang.job_id)
            raise ProvisionError(slurm_jobs.end_words(gang.number, job))
        queued = [number for number in login.numbers(gang.job_id) if number != gang.number]
        number = queued[0] if queued else survey.submit()
        successor = wait_for(login.queue, number, say, stop=stop)
        if successor.waits:
            return {}
        gang.number = number
        assert gang.key is not None
        gang.key.renew()
        nodes = survey.given(successor, say)
        survey.succeed()
        return dict(enumerate(nodes))

    def attach(
        self, plan: Plan, accesses: Sequence[ClusterAccess]
    ) -> tuple[SlurmSurvey, Sequence[Node]]:
        """The nodes of a pool that another notebook of this user has made from this plan; nothing is connected to yet."""
        login = _login(plan.request)
        directives, prologue = (
            (_asked(login, plan.request)[0], _prologue(login)) if plan.request.replace else ({}, "")
        )
        survey = SlurmSurvey(
            plan, accesses[0].installation.requirements, login, directives, prologue
        )
        (survey.gang.number,) = accesses[0].where
        key = ChannelKey(accesses[0].job_id, login.run, accesses[0].channel_key)
        survey.gang.key = key
        places = [
            JobNode(one.host, one.job_id, survey.login, survey.gang.number, key) for one in accesses
        ]
        return survey, survey.attached(places, accesses)

    def pools(self) -> Sequence[ListedPool]:
        """Jobs of this user's that are pools, whichever login node they were submitted from."""
        with self._programs() as login:
            answer = login.run(*slurm_jobs.SQUEUE)
        if answer.returncode:
            raise ProvisionError(f"Slurm does not answer: {slurm_jobs.said(answer)}")
        # of a pool with a successor the job that runs
        listed = sorted(slurm_jobs.jobs_of(answer.stdout).items(), key=lambda one: not one[1].waits)
        return [
            ListedPool(
                job.pool.rpartition("-")[0], job.pool, f"Slurm job {number}" + (f" on {job.nodes}" if job.nodes else ""),
                f"waits: {slurm_jobs.reason_words(job)}" if job.waits else job.state.lower(), job.ends,
            )
            for number, job in {job.pool: (number, job) for number, job in listed}.values()
            if job.pool
        ]  # fmt: skip

    def end(self, job_id: str) -> None:
        """Cancel the job of a pool, by its name."""
        with self._programs() as login:
            if problem := login.cancel("", job_id):
                raise ProvisionError(
                    f"the Slurm job of pool {job_id} could not be cancelled: {problem}"
                )
            ChannelKey(job_id, login.run).drop()

    def carried(self, job_id: str, drop: bool = False) -> list[bytes]:
        """The files of a pool that a notebook on the login node has made: its record and its key (`pool.keys`), and "alive" or "gone".

        Args:
            drop: remove them: the pool is another notebook's from now on.

        Raises:
            ProvisionError: they are not there.
        """
        with self._programs() as login:
            done = login.run("sh", "-c", CARRIED, job_id, "drop" * drop)
        if done.returncode:
            raise ProvisionError(
                f"{self.login}: the key of pool {job_id} is not there: {slurm_jobs.said(done)}"
            )
        return [base64.b64decode(one) for one in done.stdout.split()]

    def _programs(self) -> contextlib.closing[LoginNode]:
        return contextlib.closing(_login(PoolRequest(login=self.login)))


# ------------------------------------------------------------------------------------ what is asked for


def _login(request: PoolRequest) -> LoginNode:
    """Where Slurm's programs run for a request. Raises ProvisionError where nobody can log in."""
    if not request.login:
        return HERE
    programs = HostPrograms(request.login, request.ssh, "sbatch", slurm_jobs.KEPT)
    programs.open(asks_secrets())
    return LoginNode(programs)


def _elsewhere(request: PoolRequest) -> list[str]:
    """What has no meaning on a cluster."""
    way = ["--ssh is for the way to a login node: name that with --login, or leave it out"]
    return for_others(request, "slurm") + way * (request.ssh != "auto" and not request.login)


def _asked(
    login: LoginNode, request: PoolRequest
) -> tuple[dict[str, str], Sequence[SlurmPartition]]:
    """Return sbatch's options for a request, and the nodes it may have. Raises RequestError, ProvisionError."""
    found = login.run(*slurm_jobs.SINFO)
    if found.returncode:
        raise ProvisionError(f"Slurm does not answer: {slurm_jobs.said(found).splitlines()[-1]}")
    nodes = slurm_jobs.fitting(
        slurm_jobs.partitions(found.stdout), dict(request.slurm).get("partition")
    )
    return _directives(request, nodes), nodes


def _directives(request: PoolRequest, nodes: Sequence[SlurmPartition]) -> dict[str, str]:
    """sbatch's options for a request, in the order of the script. Raises RequestError."""
    shape, mistakes = topology(request), list[str]()
    usual = {
        "nodes": str(shape.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus_of(request)),
        "comment": slurm_jobs.OURS,
        "no-requeue": "",
        "no-kill": "",
        "output": "/dev/null",
        "chdir": "/tmp",
    }
    if request.memory:
        usual["mem"] = f"{request.memory.amount:.0f}G"
    if gpus.asked(request) and request.gpu is not None:
        with noted_in(mistakes):
            usual["gres"] = slurm_jobs.gres_word(request.gpu, nodes)
    if request.max_lifetime:
        usual["time"] = f"{request.max_lifetime / 60 + 1:.0f}"
    elif all(not any(mark.isdigit() for mark in one.usual + one.limit) for one in nodes):
        usual["time"] = slurm_jobs.UNBOUNDED_LIMIT
    made = usual
    with noted_in(mistakes):
        made = slurm_jobs.asked_directives(request.slurm, usual)
    if (most := sum(one.nodes for one in nodes)) < shape.nodes:
        mistakes.append(f"--nodes {shape.nodes} is more than the partition has ({most})")
    if mistakes:
        raise RequestError(mistakes)
    return made if "signal" in dict(request.slurm) else {**made, "signal": f"URG@{lead(made)}"}


def lead(directives: Mapping[str, str]) -> int:
    """Seconds before the limit at which ranks hear of it; of jobs of some minutes, fewer."""
    limit = directives.get("time", "")
    return 60 if limit.isdigit() and int(limit) <= 10 else 120


def _prologue(login: LoginNode) -> str:
    """What the user keeps for this cluster: sh that loads modules, or sets variables. Raises RequestError for a file that cannot be read."""
    from platformdirs import user_config_path

    folder = user_config_path("skymagic") / "slurm"
    if not folder.is_dir() or not (name := login.name()):
        return ""
    file = folder / f"{name}.sh"
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as problem:
        raise RequestError(
            f"{file}, which jobs of this cluster begin with, cannot be read: {problem}"
        ) from None


def _preview(
    login: LoginNode, request: PoolRequest, directives: Mapping[str, str], prologue: str
) -> tuple[str, ...]:
    """The script, and what Slurm says of it, where the user only wants to see the plan."""
    if not request.dry_run:
        return ()
    text = slurm_jobs.script(directives, request.name or "main", prologue)
    answer = login.run("sbatch", "--test-only", text=text)
    words = slurm_jobs.said(answer).removeprefix("sbatch: ")
    return (
        *f"Slurm says: {words}{slurm_jobs.remedy(words, directives, login.run)}".splitlines(),
        *text.splitlines(),
    )


# ------------------------------------------------------------------------------------ the job


def wait_for(
    queue: JobQueue,
    number: str,
    say: Say,
    delays: Sequence[float] = DELAYS,
    stop: threading.Event | None = None,
) -> SlurmJob:
    """A job once it runs; an interrupt is heard.

    Args:
        stop: ends the wait where it is set; what is returned then waits still.

    Raises:
        ProvisionError: it has ended instead.
    """
    told, looks, stop = "", 0, stop or threading.Event()
    while True:
        if stop.wait(delays[min(looks, len(delays) - 1)]):
            return SlurmJob("PENDING")
        job = queue.now(number) if looks < FIRST_LOOKS else queue.look(number)
        looks += 1
        if (job is None or job.state == "COMPLETING") and (job := queue.end(number)) is None:
            continue
        if job.over:
            raise ProvisionError(f"{slurm_jobs.end_words(number, job)} before its nodes were ready")
        if not job.waits and job.nodes:
            return job
        if (words := slurm_jobs.reason_words(job)) != told:
            told = words
            say(
                StartStep(f"Slurm job {number} waits: {words}", "requested", step=f"waits: {words}")
            )


@dataclass(frozen=True)
class JobNode(ClusterNode):
    """A node of a job, and Slurm's number of that."""

    login: LoginNode
    number: str
    key: ChannelKey = field(repr=False)

    @property
    def channel_key(self) -> str:
        """As of `ClusterAccess`."""
        return self.key.secret

    @property
    def where(self) -> tuple[str, ...]:
        """The job's number."""
        return (self.number,)

    def connection(self) -> ChannelConnection:
        """Steps of the job on this node, each with an encrypted session: srun's streams are in clear."""
        command = ["srun", "--overlap", "--jobid", self.number, "-w", self.name, "-N1", "-n1", "--unbuffered", "--quiet",
                   "--mpi=none", "--cpu-bind=none", "--chdir=/tmp", "--kill-on-bad-exit=0"]  # fmt: skip
        variables = {processes.HOLDER: holder_folder(self.job_id, self.name)}
        step = functools.partial(self.login.channel, [*command, "/bin/sh", "-c"], variables)

        def opening(timeout: float) -> Channel:
            return SealedChannel(step(timeout), self.name, self.job_id, self.key)

        return ChannelConnection(self.name, shlex.join([*command[:8], "true"]), opening)

    def fate(self) -> str:
        """Why the node is gone, as Slurm says; "" where it is not, or nobody says."""
        return self.login.fate(self.number, self.name)

    def address(self) -> str:
        """As Slurm knows it."""
        return self.login.address(self.name)
