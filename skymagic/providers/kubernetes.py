"""Pods of a Kubernetes cluster: one Indexed Job for a pool, waited for, reached by exec, used as hosts of SSH are, and deleted at the end."""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote

from skymagic.bootstrap.requirements import Requirements
from skymagic.cluster import Node
from skymagic.display.panel import StartStep
from skymagic.display.screen import print_note
from skymagic.errors import CloudError, HostGone, ProvisionError, RequestError
from skymagic.plan.accelerators import GpuChoice
from skymagic.plan.plans import Plan, topology
from skymagic.plan.requests import PoolRequest
from skymagic.plan.units import count
from skymagic.providers import kubernetes_api as api
from skymagic.providers import ssh
from skymagic.providers.kubernetes_api import ExecChannel, Json, KubernetesCluster
from skymagic.providers.provider import ListedPool, Say, Survey
from skymagic.ssh.host import ChannelConnection
from skymagic.wire import processes
from skymagic.wire.threads import start_all

LIFETIME = 24 * 3600.0
"""Seconds after which the cluster ends a job without --max-lifetime: nobody pays for one that was forgotten."""
WATCH_SECONDS = 10
RETRY_SECONDS = 20.0
"""For which exec to a pod that has just begun to run may be refused."""


@dataclass(frozen=True)
class PodPlace:
    """What leads to a pod; `holder` is whether it is a pod of ours, which has one."""

    context: str
    namespace: str
    pod: str
    container: str
    job_id: str
    holder: bool

    def cluster(self) -> KubernetesCluster:
        """Its cluster, as this process knows it."""
        return _cluster(self.context, self.namespace)


def _cluster(context: str, namespace: str) -> KubernetesCluster:
    return _known_cluster(context, namespace, api.configured_at())


@functools.lru_cache(maxsize=8)
def _known_cluster(context: str, namespace: str, configured: object) -> KubernetesCluster:
    return KubernetesCluster(context, namespace)  # a new login changes the configuration, and makes another one


@dataclass(frozen=True)
class PodAccess(ssh.HostAccess):
    """What leads another notebook of this user to a pod."""

    place: PodPlace


@dataclass
class HeldPods:
    """The job of a pool, as far as there is one."""

    job_id: str = ""
    """The pool's own; "" before it is asked for, and once it is deleted."""
    creation: Future[None] | None = None
    """Of the job, from when it is asked for."""
    machines: list[ssh.HostMachine] = field(default_factory=list)
    plan: Plan | None = None
    ready: bool = False
    closing: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True)
class KubernetesSurvey(Survey):
    """What is asked for; owns the job.

    Attributes:
        manifest: job id → the Job. labels: of pods that somebody else has made, which are used as they are; "" for a job of its own.
    """

    requirements: Requirements
    cluster: KubernetesCluster
    manifest: Callable[[str], Json]
    labels: str = ""
    held: HeldPods = field(default_factory=HeldPods)

    def outcome(self) -> Plan:
        """The plan with what the pods have."""
        return self.held.plan or self.plan

    def ready(self) -> None:
        """All ranks are up."""
        self.held.ready = True

    def close(self) -> None:
        """Delete the job and close all connections; twice is safe.

        An interrupt ends the wait for it, and nothing else: a job is never left because somebody was impatient.
        """
        start_all([self._end], name="skymagic-kubernetes-end", daemon=False)[0].result()

    def _end(self) -> None:
        held = self.held
        with held.closing:
            if held.creation is not None:  # it was interrupted, and the job may come all the same
                wait([held.creation])
            try:
                if held.job_id and not self.labels:
                    self.cluster.delete(name := api.object_name(held.job_id))
                    if not held.ready:
                        print_note(f"[Kubernetes job {name} is deleted]")
                held.job_id = ""
            finally:
                ssh.side_by_side(ssh.HostMachine.close, held.machines)


class Kubernetes:
    """The provider of a Kubernetes cluster, by a kubeconfig or in a pod."""

    def plan(self, request: PoolRequest, say: Say) -> KubernetesSurvey:
        """Ask whether it may be made; nothing is."""
        options = dict(request.kubernetes)
        mistakes = ssh.elsewhere(request)
        labels = options.get("pods", "")
        try:
            resources, template = _resources(request), _template(options.get("pod-template", ""))
        except RequestError as wrong:
            mistakes += wrong.mistakes
        if labels:
            mistakes += [
                f"--{name}: --pods uses pods as they are" for name in ("image", "pod-template") if name in options
            ]
        if mistakes:
            raise RequestError(mistakes)
        cluster = _cluster(options.get("context", ""), options.get("namespace", ""))
        if mistakes := cluster.mistakes(bool(labels)):
            raise RequestError(mistakes)
        where = f"namespace {cluster.namespace} of {cluster.label}"
        names = [one["metadata"]["name"] for one in _running(cluster, labels)] if labels else []
        if labels and len(names) < (request.nodes or 1):
            raise RequestError(f"--pods {labels}: {count(len(names), 'pod')} with these labels run in {where}")
        request = replace(request, nodes=request.nodes or len(names) or 1)
        shape = topology(request)
        image, requirements = ssh.needs(request, shape, say)
        own = (
            ""
            if template.get("spec", {}).get("containers", [{}])[0].get("image")
            else f"python:{requirements.minor}-slim"
        )
        seconds = request.max_lifetime + 60 if request.max_lifetime else LIFETIME
        manifest = functools.partial(
            api.job_manifest, nodes=shape.nodes, seconds=int(seconds), resources=resources,
            image=options.get("image", own), template=template,
        )  # fmt: skip
        plan = Plan(
            provider="kubernetes", request=request, topology=shape, image=image,
            hosts=tuple(names[: shape.nodes]) or (f"{count(shape.nodes, 'pod')} in {where}",),
            cpus=int(resources["requests"]["cpu"]), memory_gb=request.memory.amount if request.memory else 0.0,
            remote=True, notes=_preview(request, manifest) if not labels else (),
        )  # fmt: skip
        return KubernetesSurvey(plan, requirements, cluster, manifest, labels)

    def acquire(self, survey: KubernetesSurvey, job_id: str, say: Say) -> Sequence[Node]:
        """Make the job and wait for its pods, or use those that there are; then set them up side by side."""
        held, cluster = survey.held, survey.cluster
        held.job_id = job_id
        if survey.labels:
            pods = [one for one in _running(cluster, survey.labels) if one["metadata"]["name"] in survey.plan.hosts]
        else:
            manifest = survey.manifest(job_id)
            (held.creation,) = start_all([lambda: cluster.create(manifest)], name="skymagic-kubernetes")
            held.creation.result()
            pods = wait_for(cluster, job_id, survey.plan.topology.nodes, say)
        own = not survey.labels
        places = [
            PodPlace(
                cluster.context,
                cluster.namespace,
                one["metadata"]["name"],
                one["spec"]["containers"][0]["name"],
                job_id,
                own,
            )
            for one in pods
        ]
        names = [place.pod for place in places]
        say(StartStep(f"Kubernetes runs {', '.join(names)} …", "connecting", names))
        machines = ssh.side_by_side(lambda place: _reached(place, survey.requirements), places)
        held.machines.extend(machines)
        ends = None if survey.labels else time.time() + (survey.plan.request.max_lifetime or LIFETIME)
        held.plan = replace(ssh.measured(survey.plan, machines, survey.requirements), ends=ends)
        ssh.set_up(machines, survey.requirements, say)
        return [
            _node(one, place, index, f"{job_id}-{index}")
            for index, (one, place) in enumerate(zip(machines, places, strict=True))
        ]

    def attach(self, plan: Plan, accesses: Sequence[PodAccess]) -> tuple[KubernetesSurvey, Sequence[Node]]:
        """The pods of a pool that another notebook of this user has made from this plan; nothing is connected to yet."""
        places = [one.place for one in accesses]
        cluster = places[0].cluster()
        if not any(cluster.pod(place.pod) for place in places):
            raise CloudError("missing", "", fate(places[0]))
        machines = [
            ssh.HostMachine(
                one.host,
                functools.partial(connected, one.place),
                None,
                one.installation.facts,
                one.secret,
                one.installation,
            )
            for one in accesses
        ]
        held = HeldPods(places[0].job_id, machines=machines, plan=plan, ready=True)
        labels = dict(plan.request.kubernetes).get("pods", "")
        survey = KubernetesSurvey(plan, accesses[0].installation.requirements, cluster, lambda job_id: {}, labels, held)
        return survey, [
            _node(one, access.place, index, access.daemon)
            for index, (one, access) in enumerate(zip(machines, accesses, strict=True))
        ]

    def pools(self) -> Sequence[ListedPool]:
        """Jobs of this user's in the namespace of the current context that are pools, whichever machine they were made on."""
        cluster = _cluster("", "")
        found = [one for one in cluster.jobs() if one["metadata"]["labels"].get(api.USER) == api.user()]
        return [
            ListedPool(
                (job_id := one["metadata"]["labels"][api.JOB]).rpartition("-")[0], job_id,
                f"Kubernetes job {one['metadata']['name']} in namespace {cluster.namespace}", *api.job_words(one),
            )
            for one in found
        ]  # fmt: skip

    def end(self, job_id: str) -> None:
        """Delete the job of a pool in the namespace of the current context, with its pods."""
        _cluster("", "").delete(api.object_name(job_id))


# ------------------------------------------------------------------------------------ what is asked for


def _resources(request: PoolRequest) -> Json:
    """Requests and limits of a pod's container. Raises RequestError."""
    shape = topology(request)
    wanted = {"cpu": str(max(int(request.cpus.amount) if request.cpus else 1, shape.procs_per_node))}
    if request.memory:
        wanted["memory"] = f"{request.memory.amount:.0f}G"
    gpu = request.gpu
    if isinstance(gpu, GpuChoice) and (gpu.words or gpu.count is None):
        raise RequestError(f"--gpu {gpu}: the cluster chooses the GPUs: write how many, as in --gpu 8")
    return {"requests": wanted, "limits": {"nvidia.com/gpu": str(gpu.count)} if gpu is not None and gpu.count else {}}


def _template(file: str) -> Json:
    """A pod template that the user has written: a Pod, or what a Job has as its template. Raises RequestError."""
    if not file:
        return {}
    api.official()
    import yaml

    try:
        found = yaml.safe_load(Path(file).expanduser().read_text())
    except (OSError, yaml.YAMLError) as problem:
        raise RequestError(f"--pod-template {file}: {problem}") from None
    if not isinstance(found, dict) or not isinstance(found.get("spec", {}), dict):
        raise RequestError(f"--pod-template {file}: write a Pod, or a pod template, with metadata and spec")
    return found


def _preview(request: PoolRequest, manifest: Callable[[str], Json]) -> tuple[str, ...]:
    """The Job, where the user only wants to see the plan."""
    if not request.dry_run:
        return ()
    import yaml

    job = json.loads(
        json.dumps(manifest(f"{request.name or 'main'}-00000000"))
    )  # copies, for YAML names what comes twice
    job["spec"]["template"]["spec"]["containers"][0]["command"][2] = "…"
    text = yaml.safe_dump(job, sort_keys=False, allow_unicode=True)
    return tuple(str(text).splitlines())


def _running(cluster: KubernetesCluster, labels: str) -> list[Json]:
    """The pods with these labels that run."""
    return [one for one in cluster.pods(labels)[0] if api.waiting(one) == ("", "")]


# ------------------------------------------------------------------------------------ the pods


def wait_for(cluster: KubernetesCluster, job_id: str, nodes: int, say: Say) -> list[Json]:
    """The pods of a job once all of them run; an interrupt is heard.

    Raises:
        ProvisionError: they never will.
    """
    name, labels, told = api.object_name(job_id), f"{api.JOB}={job_id}", ""
    while True:
        pods, version = cluster.pods(labels)
        if len(pods) == nodes and not any(api.waiting(one)[0] for one in pods):
            return pods
        if problem := api.hopeless(pods):
            raise ProvisionError(f"Kubernetes job {name} cannot start: {problem}")
        job = cluster.job(name)
        if not job:
            raise ProvisionError(f"Kubernetes job {name} was deleted, and not from this notebook, before its pods ran")
        events = cluster.events(name) if len(pods) < nodes else []
        words = api.waiting_words(pods, nodes, events, bool(job["spec"].get("suspend")))
        if words != told:
            told = words
            say(StartStep(f"Kubernetes job {name} waits: {words}", "requested", step=f"waits: {words}"))
        cluster.changed(labels, version, WATCH_SECONDS)


class ExecConnection(ChannelConnection):
    """Shells in one pod's container."""

    def __init__(self, place: PodPlace) -> None:
        holder = f"export {processes.HOLDER}={api.holder_folder(place.job_id)}\n" if place.holder else ""
        connect = functools.partial(place.cluster().exec, place.pod, place.container)
        context = f"--context {quote(place.context)} " if place.context else ""
        trial = f"kubectl {context}-n {place.namespace} exec {place.pod} -c {place.container} -- true"
        super().__init__(place.pod, trial, lambda timeout: ExecChannel(connect, api.HOME + holder))


def connected(place: PodPlace) -> ExecConnection:
    """One more, unless Kubernetes says that the pod is gone. Raises HostGone."""
    if reason := fate(place):
        raise HostGone(place.pod, reason)
    return ExecConnection(place)


def fate(place: PodPlace) -> str:
    """Why a pod that does not answer is gone, as Kubernetes says; "" where it is not, or nobody says."""
    cluster = place.cluster()
    try:
        pod = cluster.pod(place.pod)
        job = cluster.job(api.object_name(place.job_id)) if place.holder else {}
        return api.fate_words(place.pod, pod, job, [] if pod else cluster.events(place.pod))
    except ProvisionError:
        return ""


def _reached(place: PodPlace, requirements: Requirements) -> ssh.HostMachine:
    connect, ended = functools.partial(connected, place), functools.partial(fate, place)
    return ssh.inspected(place.pod, connect, ExecConnection(place), requirements, ended, RETRY_SECONDS)


def _node(machine: ssh.HostMachine, place: PodPlace, index: int, daemon: str) -> Node:
    node = machine.node(index, daemon)
    return replace(node, access=PodAccess(**vars(node.access), place=place), fate=functools.partial(fate, place))
