"""Slurm provider: one job per pool, reached through ``srun`` and cancelled at the end.

The job's nodes are used like SSH hosts.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from skymagic.cluster import Node
from skymagic.display.live import secret_prompt
from skymagic.display.panel import StartStep
from skymagic.display.text import connecting_words
from skymagic.errors import ProvisionError, RequestError, collect_mistakes
from skymagic.plan import gpus
from skymagic.plan.container import PyxisStep, container_mistakes, parse_container
from skymagic.plan.plans import Plan, topology
from skymagic.plan.requests import PoolRequest, unsupported_options
from skymagic.plan.units import count
from skymagic.providers import slurm_jobs, ssh
from skymagic.providers.channel_key import ChannelKey
from skymagic.providers.cluster import (
    ClusterAccess,
    ClusterNode,
    ClusterSurvey,
    cpus_of,
)
from skymagic.providers.holder import holder_folder
from skymagic.providers.provider import RemotePool, RemotePools, Say
from skymagic.providers.slurm_jobs import JobQueue, LoginNode, SlurmJob, SlurmPartition
from skymagic.ssh.container import ContainerShells
from skymagic.ssh.host import ChannelConnection
from skymagic.ssh.process import Channel
from skymagic.ssh.programs import HostPrograms, Programs
from skymagic.ssh.sealed import SealedChannel
from skymagic.wire import processes

DELAYS = (0.5, 1.5, 4.0, 12.0, 14.0, 18.0, 30.0)
"""Seconds before each poll of a waiting job; the last value repeats.

The first delays are short, so that a job that starts at once is seen at once.
"""
FIRST_LOOKS = 3
"""Polls of this job alone before polling all of the user's jobs, a query that several pools share.
"""
RETRY_SECONDS = 30.0
"""Seconds to tolerate refused steps: a freshly allocated node first runs its prologue."""
UNPACK_SECONDS = 300.0
"""Seconds that pyxis may take to get and unpack an image."""
HERE = LoginNode(Programs("sbatch", slurm_jobs.KEPT))
CARRIED = r"""cd "${XDG_STATE_HOME:-$HOME/.local/state}/skymagic/pools" || exit
[ -z "$1" ] || exec rm -f "$0".*
base64 "$0.json" | tr -d '\n' && [ -s "$0.json" ] && echo || exit
process=$(sed -n 's/.*"process": "\([0-9]*\) .*/\1/p' "$0.json")
grep -qF "\"machine\": \"$(uname -n)\"" "$0.json" &&
    ! kill -0 "${process:-0}" 2>/dev/null && state=gone
printf %s "${state:-alive}" | base64
"""


@dataclass(frozen=True)
class SlurmSurvey(ClusterSurvey):
    """A resource request; owns the job.

    Attributes:
        login: where Slurm's programs run.
        directives: options of sbatch.
        prologue: the site's sh prologue, which holders run first.
        by_pyxis: whether Slurm itself runs the pool's steps in containers.
    """

    login: LoginNode
    directives: Mapping[str, str]
    prologue: str = ""
    by_pyxis: bool = False

    def give_back(self) -> str:
        """Cancel the job."""
        allocation = self.allocation
        # an interrupt ended the wait for the answer, but Slurm may have accepted the job
        if allocation.requested is not None and not allocation.number:
            allocation.number = (
                "" if allocation.requested.exception() else allocation.requested.result()
            )
        # cancelling by name also cancels a successor
        number = "" if self.plan.request.replace else allocation.number
        if problem := self.login.cancel(number, allocation.job_id):
            failure = f"Slurm job {allocation.number} could not be cancelled: {problem}"
            raise ProvisionError(
                f"{failure}\n  scancel --name={allocation.job_id} cancels it", code="not-released"
            )
        return f"Slurm job {allocation.number} is cancelled" if allocation.number else ""

    def leave(self) -> None:
        """Close the connection to the login node. Twice is safe."""
        self.login.close()

    def submit(self, **more: str) -> str:
        """Submit a job and return its Slurm job number.

        Raises ProvisionError, with a remedy if one is known.
        """
        directives = {**self.directives, **more}
        try:
            return self._submit(directives)
        except ProvisionError as refused:
            raise ProvisionError(
                f"{refused}{slurm_jobs.remedy(str(refused), directives, self.login.run)}",
                code="slurm-refused",
            ) from None

    def _submit(self, directives: Mapping[str, str]) -> str:
        job_id = self.allocation.job_id
        pyxis = self.pyxis_options(job_id)
        if slurm_jobs.ALLOCATED in directives:
            command = slurm_jobs.allocation(directives, job_id, self.prologue, pyxis)
            return self.login.submit(command, "", job_id)
        script = slurm_jobs.script(directives, job_id, self.prologue, pyxis)
        return self.login.submit(["sbatch", "--parsable"], script, job_id)

    def pyxis_options(self, job_id: str) -> tuple[str, ...]:
        """Return the options of srun for steps in containers; () if Slurm starts none."""
        request = self.plan.request
        if not (self.by_pyxis and request.container):
            return ()
        container = parse_container(request.container, request.binds)
        return PyxisStep(container, f"skymagic-{job_id}").options()

    def container_shells(self) -> ContainerShells | None:
        """See `ClusterSurvey.container_shells`."""
        return None if self.by_pyxis else super().container_shells()

    def succeed(self) -> None:
        """Queue a successor job if the request wants replacement.

        The successor starts once this job has ended in any way but by itself.
        """
        if self.plan.request.replace:
            self.submit(
                **{
                    "dependency": f"afternotok:{self.allocation.number}",
                    "kill-on-invalid-dep": "yes",
                }
            )

    def set_up_nodes(self, job: SlurmJob, say: Say) -> list[Node]:
        """Set up the nodes of a running job and return them."""
        allocation, login = self.allocation, self.login
        assert allocation.key is not None
        pyxis = self.pyxis_options(allocation.job_id)
        nodes = [
            JobNode(name, allocation.job_id, login, allocation.number, allocation.key, pyxis)
            for name in login.hostnames(job.nodes)
        ]
        return self.prepare_nodes(
            nodes,
            f"Slurm job {allocation.number} has",
            say,
            # the first step of a node unpacks the image, and others fail until it has done so
            patience=UNPACK_SECONDS if self.by_pyxis else RETRY_SECONDS,
            ends=job.ends,
            notice=lead(self.directives),
        )


@dataclass(frozen=True)
class Slurm:
    """Provider for a Slurm cluster, used on a login node or through one.

    Attributes:
        login: login node used to list and end pools, or None if Slurm's programs are on this
            machine.
    """

    login: str | None = None

    def plan(self, request: PoolRequest, say: Say) -> SlurmSurvey:
        """Query what the cluster offers. Submits nothing."""
        if request.login:
            say(connecting_words([request.login]))
        with contextlib.ExitStack() as opened:
            survey = self._plan(
                request, opened.enter_context(contextlib.closing(_login(request))), say
            )
            opened.pop_all()
        return survey

    def _plan(self, request: PoolRequest, login: LoginNode, say: Say) -> SlurmSurvey:
        mistakes = _meaningless_options(request) + container_mistakes(request, "slurm")
        shape = topology(request)
        by_pyxis = _has_pyxis(login, request)
        if not by_pyxis and request.container and request.container.startswith("pyxis:"):
            mistakes.append(
                f"--container {request.container}: srun there has no --container-image, so pyxis "
                "is not installed; leave pyxis: out to use an engine of the nodes"
            )
        with collect_mistakes(mistakes):
            directives, nodes = _job_options(login, request)
            prologue = _prologue(login)
        if mistakes:
            raise RequestError(mistakes)
        image, requirements = ssh.needs(request, shape, say)
        names = ",".join(dict.fromkeys(partition.name for partition in nodes))
        gpu = request.accelerator
        # which GPUs exactly is known once the nodes are inspected
        devices = (gpus.devices_by_name(*[gpu.name] * gpu.count),) * shape.nodes if gpu else ()
        plan = Plan(
            provider="slurm",
            request=request,
            topology=shape,
            image=image,
            hosts=(f"{count(shape.nodes, 'node')} of Slurm (partition {names})",),
            cpus=int(directives.get("cpus-per-task", 1)),
            memory_gb=min((partition.memory_gb for partition in nodes), default=0.0),
            devices=devices,
            remote=True,
        )
        survey = SlurmSurvey(plan, requirements, login, directives, prologue, by_pyxis)
        pyxis = survey.pyxis_options(request.name or "main")
        notes = _preview(login, request, directives, prologue, pyxis)
        return replace(survey, plan=replace(plan, notes=notes))

    def acquire(self, survey: SlurmSurvey, job_id: str, say: Say) -> Sequence[Node]:
        """Submit the job, wait for it, and set its nodes up in parallel."""
        allocation, login = survey.allocation, survey.login
        allocation.job_id, allocation.key = job_id, ChannelKey(job_id, login.run)
        allocation.key.share()
        allocation.number = allocation.run_request(survey.submit)
        job = wait_for(login.queue, allocation.number, say)
        nodes = survey.set_up_nodes(job, say)
        allocation.run_request(survey.succeed)
        return nodes

    def replace(
        self, survey: SlurmSurvey, lost: Sequence[int], say: Say, stop: threading.Event
    ) -> Mapping[int, Node]:
        """Return the nodes of the job's successor.

        They replace all nodes of a job that has ended. See `provider.Replaceable`.
        """
        allocation, login = survey.allocation, survey.login
        job = login.queue.now(allocation.number)
        if job is None or not (job.over or job.waits or job.state == "COMPLETING"):
            raise ProvisionError(
                f"Slurm job {allocation.number} runs: --renew is for its end", code="slurm-runs"
            )
        # a pool without its head reports no other loss; if only others are lost, the head is next
        if 0 not in lost or job.state == "COMPLETING":
            stop.wait(0.5)
            return {}
        if job.state in ("CANCELLED", "COMPLETED"):
            login.cancel("", allocation.job_id)
            raise ProvisionError(slurm_jobs.end_words(allocation.number, job), code="slurm-ended")
        queued = [
            number for number in login.numbers(allocation.job_id) if number != allocation.number
        ]
        number = queued[0] if queued else survey.submit()
        successor = wait_for(login.queue, number, say, stop=stop)
        if successor.waits:
            return {}
        allocation.number = number
        assert allocation.key is not None
        allocation.key.renew()
        nodes = survey.set_up_nodes(successor, say)
        survey.succeed()
        return dict(enumerate(nodes))

    def attach(
        self, plan: Plan, accesses: Sequence[ClusterAccess]
    ) -> tuple[SlurmSurvey, Sequence[Node]]:
        """Return the nodes of a pool that another notebook of this user created from this plan.

        Connects to nothing yet.
        """
        login = _login(plan.request)
        directives, prologue = (
            (_job_options(login, plan.request)[0], _prologue(login))
            if plan.request.replace
            else ({}, "")
        )
        survey = SlurmSurvey(
            plan, accesses[0].installation.requirements, login, directives, prologue
        )
        survey.allocation.number, *pyxis = accesses[0].location
        key = ChannelKey(accesses[0].job_id, login.run, accesses[0].channel_key)
        survey.allocation.key = key
        nodes = [
            JobNode(
                access.host,
                access.job_id,
                survey.login,
                survey.allocation.number,
                key,
                tuple(pyxis),
            )
            for access in accesses
        ]
        return survey, survey.adopt_nodes(nodes, accesses)

    def pools(self) -> RemotePools:
        """Return this user's pools, whichever login node their jobs were submitted from."""
        with self._programs() as login:
            answer = login.run(*slurm_jobs.SQUEUE)
        if answer.returncode:
            raise ProvisionError(
                f"Slurm does not answer: {slurm_jobs.error_message(answer)}", code="slurm-unreached"
            )
        # for a pool with a successor, list the job that runs
        jobs = sorted(
            slurm_jobs.jobs_of(answer.stdout).items(), key=lambda entry: not entry[1].waits
        )
        return RemotePools(
            tuple(
                RemotePool(
                    job.pool.rpartition("-")[0],
                    job.pool,
                    f"Slurm job {number}" + (f" on {job.nodes}" if job.nodes else ""),
                    f"waits: {slurm_jobs.reason_words(job)}" if job.waits else job.state.lower(),
                    ends=job.ends,
                )
                for number, job in {job.pool: (number, job) for number, job in jobs}.values()
                if job.pool
            )
        )

    def end(self, pool: RemotePool) -> str:
        """Cancel the job of a pool, by its name."""
        with self._programs() as login:
            if problem := login.cancel("", pool.job_id):
                raise ProvisionError(
                    f"the Slurm job of pool {pool.job_id} could not be cancelled: {problem}",
                    code="not-released",
                    names=[pool.job_id],
                )
            ChannelKey(pool.job_id, login.run).drop()
        return ""

    def fetch_record(self, job_id: str, drop: bool = False) -> list[bytes]:
        """Return the record of a pool that a notebook on the login node created.

        Args:
            drop: remove the pool's files there, because another notebook now owns the pool.

        Returns:
            The pool's record (`pool.records`), and "alive" or "gone".

        Raises:
            ProvisionError: the record does not exist.
        """
        with self._programs() as login:
            done = login.run("sh", "-c", CARRIED, job_id, "drop" * drop)
        if done.returncode:
            raise ProvisionError(
                f"{self.login}: the record of pool {job_id} is not there: "
                f"{slurm_jobs.error_message(done)}",
                code="key-missing",
                names=[job_id],
            )
        return [base64.b64decode(encoded) for encoded in done.stdout.split()]

    def _programs(self) -> contextlib.closing[LoginNode]:
        return contextlib.closing(_login(PoolRequest(login=self.login)))


# ------------------------------------------------------------------------------------ the request


def _login(request: PoolRequest) -> LoginNode:
    """Return where Slurm's programs run for a request. Raises ProvisionError if the login fails."""
    if not request.login:
        return HERE
    programs = HostPrograms(request.login, request.ssh, "sbatch", slurm_jobs.KEPT)
    programs.open(secret_prompt())
    return LoginNode(programs)


def _meaningless_options(request: PoolRequest) -> list[str]:
    """Return mistakes: options that have no meaning on a cluster."""
    misplaced = ["--ssh is for the way to a login node: name that with --login, or leave it out"]
    return unsupported_options(request, "slurm") + misplaced * (
        request.ssh != "auto" and not request.login
    )


def _job_options(
    login: LoginNode, request: PoolRequest
) -> tuple[dict[str, str], Sequence[SlurmPartition]]:
    """Return sbatch's options for a request, and the node kinds it may get.

    Raises RequestError or ProvisionError.
    """
    answer = login.run(*slurm_jobs.SINFO)
    if answer.returncode:
        raise ProvisionError(
            f"Slurm does not answer: {slurm_jobs.error_message(answer).splitlines()[-1]}",
            code="slurm-unreached",
        )
    nodes = slurm_jobs.nodes_of_partition(
        slurm_jobs.partitions(answer.stdout), dict(request.slurm).get("partition")
    )
    return _directives(request, nodes), nodes


def _directives(request: PoolRequest, nodes: Sequence[SlurmPartition]) -> dict[str, str]:
    """Return sbatch's options for a request, in the order of the script. Raises RequestError."""
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
    if gpus.requests_gpus(request) and request.gpu is not None:
        with collect_mistakes(mistakes):
            usual["gres"] = slurm_jobs.gres_word(request.gpu, nodes)
    if request.max_lifetime:
        usual["time"] = f"{request.max_lifetime / 60 + 1:.0f}"
    elif all(
        not any(mark.isdigit() for mark in partition.usual + partition.limit) for partition in nodes
    ):
        usual["time"] = slurm_jobs.UNBOUNDED_LIMIT
    directives = usual
    with collect_mistakes(mistakes):
        directives = slurm_jobs.job_directives(request.slurm, usual)
    if (most := sum(partition.nodes for partition in nodes)) < shape.nodes:
        mistakes.append(f"--nodes {shape.nodes} is more than the partition has ({most})")
    if mistakes:
        raise RequestError(mistakes)
    return (
        directives
        if "signal" in dict(request.slurm)
        else {**directives, "signal": f"URG@{lead(directives)}"}
    )


def lead(directives: Mapping[str, str]) -> int:
    """Return how many seconds before the time limit ranks are warned.

    Jobs of a few minutes are warned later.
    """
    limit = directives.get("time", "")
    return 60 if limit.isdigit() and int(limit) <= 10 else 120


def _has_pyxis(login: LoginNode, request: PoolRequest) -> bool:
    """Return True if Slurm's plugin pyxis is to run the request's container."""
    if not request.container:
        return False
    container = parse_container(request.container)
    if container.engine not in ("", "pyxis") or container.image.endswith(".sif"):
        return False
    # plugins add their options to srun's help
    return "--container-image" in login.run("srun", "--help").stdout


def _prologue(login: LoginNode) -> str:
    """Return the user's prologue for this cluster: sh that loads modules or sets variables.

    Raises RequestError if the file cannot be read.
    """
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
    login: LoginNode,
    request: PoolRequest,
    directives: Mapping[str, str],
    prologue: str,
    pyxis: Sequence[str],
) -> tuple[str, ...]:
    """Return the script and Slurm's comment on it if the user only wants to see the plan."""
    if not request.dry_run:
        return ()
    text = slurm_jobs.script(directives, request.name or "main", prologue, pyxis)
    answer = login.run("sbatch", "--test-only", text=text)
    verdict = slurm_jobs.error_message(answer).removeprefix("sbatch: ")
    return (
        *f"Slurm says: {verdict}{slurm_jobs.remedy(verdict, directives, login.run)}".splitlines(),
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
    """Wait until a job runs. Can be interrupted.

    Args:
        queue: source of job states.
        number: Slurm's number of the job.
        say: receives the reason each time it changes.
        delays: seconds before each poll, see `DELAYS`.
        stop: ends the wait when set; the returned job is then still pending.

    Raises:
        ProvisionError: the job ended instead of starting.
    """
    last_reason, looks, stop = "", 0, stop or threading.Event()
    while True:
        if stop.wait(delays[min(looks, len(delays) - 1)]):
            return SlurmJob("PENDING")
        job = queue.now(number) if looks < FIRST_LOOKS else queue.last_seen(number)
        looks += 1
        if (job is None or job.state == "COMPLETING") and (job := queue.end(number)) is None:
            continue
        if job.over:
            raise ProvisionError(
                f"{slurm_jobs.end_words(number, job)} before its nodes were ready",
                code="slurm-ended",
            )
        if not job.waits and job.nodes:
            return job
        if (reason := slurm_jobs.reason_words(job)) != last_reason:
            last_reason = reason
            say(
                StartStep(
                    f"Slurm job {number} waits: {reason}", "requested", step=f"waits: {reason}"
                )
            )


@dataclass(frozen=True)
class JobNode(ClusterNode):
    """A node of a Slurm job, with the job's number.

    Attributes:
        pyxis: options of srun that run each step in a container.
    """

    login: LoginNode
    number: str
    key: ChannelKey = field(repr=False)
    pyxis: tuple[str, ...] = ()

    @property
    def channel_key(self) -> str:
        """Key of the node's channel, see `ClusterAccess`."""
        return self.key.secret

    @property
    def location(self) -> tuple[str, ...]:
        """Number of the job, and the options for containers."""
        return (self.number, *self.pyxis)

    def connection(self) -> ChannelConnection:
        """Return a connection that runs steps of the job on this node.

        Each step has an encrypted session, because srun's streams are unencrypted.
        """
        command = [
            "srun",
            "--overlap",
            "--jobid",
            self.number,
            "-w",
            self.name,
            "-N1",
            "-n1",
            "--unbuffered",
            "--quiet",
            "--mpi=none",
            "--cpu-bind=none",
            "--chdir=/tmp",
            "--kill-on-bad-exit=0",
            *self.pyxis,
        ]
        variables = {processes.HOLDER: holder_folder(self.job_id, self.name)}
        # packages of the user's home folder are built for another Python than the image's
        if self.pyxis:
            variables |= {"PYTHONNOUSERSITE": "1"}
        step = functools.partial(self.login.channel, [*command, "/bin/sh", "-c"], variables)

        def opening(timeout: float) -> Channel:
            return SealedChannel(step(timeout), self.name, self.job_id, self.key)

        return ChannelConnection(self.name, shlex.join([*command[:8], "true"]), opening)

    def fate(self) -> str:
        """Return Slurm's reason why the node is gone, or "" if it is present or unknown."""
        return self.login.fate(self.number, self.name)

    def address(self) -> str:
        """Return the address that Slurm knows."""
        return self.login.address(self.name)
