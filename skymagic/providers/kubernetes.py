"""Pods of a Kubernetes cluster: one Indexed Job for a pool, waited for, reached by exec, used as hosts of SSH are, and deleted at the end."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from skymagic.cluster import Node
from skymagic.display.panel import StartStep
from skymagic.errors import ProvisionError, RequestError, noted_in
from skymagic.plan.plans import Plan, topology
from skymagic.plan.requests import PoolRequest, for_others
from skymagic.plan.units import count
from skymagic.providers import kubernetes_api as api
from skymagic.providers import ssh
from skymagic.providers.cluster import (
    ClusterAccess,
    ClusterNode,
    ClusterSurvey,
    counted,
    cpus_of,
    holder_folder,
)
from skymagic.providers.kubernetes_api import ExecChannel, Json, KubernetesCluster
from skymagic.providers.provider import ListedPool, Say
from skymagic.ssh.host import ChannelConnection
from skymagic.wire import processes

LIFETIME = 24 * 3600.0
"""Seconds after which the cluster ends a job without --max-lifetime: nobody pays for one that was forgotten."""
WATCH_SECONDS = 10
RETRY_SECONDS = 20.0
"""For which exec to a pod that has just begun to run may be refused."""


@functools.lru_cache(maxsize=8)
def _known_cluster(context: str, namespace: str, configured: object) -> KubernetesCluster:
    return KubernetesCluster(
        context, namespace
    )  # a new login changes the configuration, and makes another one


def _cluster(context: str, namespace: str) -> KubernetesCluster:
    """A cluster, as this process knows it."""
    return _known_cluster(context, namespace, api.configured_at())


@dataclass(frozen=True)
class PodPlace(ClusterNode):
    """A pod, where its cluster is, and whether it is a pod of ours, which has a holder."""

    context: str
    namespace: str
    container: str
    holder: bool

    @property
    def where(self) -> tuple[str, ...]:
        """Context, namespace, container, and whether it has a holder."""
        return self.context, self.namespace, self.container, "holder" if self.holder else ""

    def connection(self) -> ChannelConnection:
        """Shells in the pod's container."""
        holder = (
            f"export {processes.HOLDER}={holder_folder(self.job_id, 'pod')}\n"
            if self.holder
            else ""
        )
        connect = functools.partial(
            _cluster(self.context, self.namespace).exec, self.name, self.container
        )
        context = f"--context {quote(self.context)} " if self.context else ""
        trial = f"kubectl {context}-n {self.namespace} exec {self.name} -c {self.container} -- true"
        return ChannelConnection(
            self.name, trial, lambda timeout: ExecChannel(connect, api.HOME + holder)
        )

    def fate(self) -> str:
        """Why the pod is gone, as Kubernetes says; "" where it is not, or nobody says."""
        cluster = _cluster(self.context, self.namespace)
        try:
            pod = cluster.pod(self.name)
            job = cluster.job(api.object_name(self.job_id)) if self.holder else {}
            return api.fate_words(self.name, pod, job, [] if pod else cluster.events(self.name))
        except ProvisionError:
            return ""


@dataclass(frozen=True)
class KubernetesSurvey(ClusterSurvey):
    """What is asked for; owns the job.

    Attributes:
        manifest: job id → the Job. labels: of pods that somebody else has made, which are used as they are; "" for a job of its own.
    """

    cluster: KubernetesCluster
    manifest: Callable[[str], Json]
    labels: str = ""

    def give_back(self) -> str:
        """Delete the job; pods that somebody else has made are left."""
        if self.labels:
            return ""
        self.cluster.delete(name := api.object_name(self.gang.job_id))
        return f"Kubernetes job {name} is deleted"


class Kubernetes:
    """The provider of a Kubernetes cluster, by a kubeconfig or in a pod."""

    def plan(self, request: PoolRequest, say: Say) -> KubernetesSurvey:
        """Ask whether it may be made; nothing is."""
        options = dict(request.kubernetes)
        mistakes = for_others(request, "kubernetes")
        labels = options.get("pods", "")
        with noted_in(mistakes):
            template = _template(options.get("pod-template", ""))
            resources = _resources(request, template)
        if labels:
            mistakes += [
                f"--{name}: --pods uses pods as they are"
                for name in ("image", "pod-template")
                if name in options
            ]
        if mistakes:
            raise RequestError(mistakes)
        cluster = _cluster(options.get("context", ""), options.get("namespace", ""))
        if mistakes := cluster.mistakes(bool(labels)):
            raise RequestError(mistakes)
        where = f"namespace {cluster.namespace} of {cluster.label}"
        names = [one["metadata"]["name"] for one in _running(cluster, labels)] if labels else []
        if labels and len(names) < (request.nodes or 1):
            raise RequestError(
                f"--pods {labels}: {count(len(names), 'pod')} with these labels run in {where}"
            )
        request = replace(request, nodes=request.nodes or len(names) or 1)
        shape = topology(request)
        image, requirements = ssh.needs(request, shape, say)
        own = "" if _first(template).get("image") else f"python:{requirements.minor}-slim"
        seconds = request.max_lifetime + 60 if request.max_lifetime else LIFETIME
        manifest = functools.partial(
            api.job_manifest, nodes=shape.nodes, seconds=int(seconds), resources=resources,
            image=options.get("image", own), template=template,
        )  # fmt: skip
        plan = Plan(
            provider="kubernetes", request=request, topology=shape, image=image,
            hosts=tuple(names[: shape.nodes]) or (f"{count(shape.nodes, 'pod')} in {where}",),
            cpus=cpus_of(request), memory_gb=request.memory.amount if request.memory else 0.0,
            remote=True, notes=_preview(request, manifest) if not labels else (),
        )  # fmt: skip
        return KubernetesSurvey(plan, requirements, cluster, manifest, labels)

    def acquire(self, survey: KubernetesSurvey, job_id: str, say: Say) -> Sequence[Node]:
        """Make the job and wait for its pods, or use those that there are; then set them up side by side."""
        cluster, own = survey.cluster, not survey.labels
        survey.gang.job_id = job_id
        if own:
            survey.gang.ask(lambda: cluster.create(survey.manifest(job_id)))
            pods = wait_for(cluster, job_id, survey.plan.topology.nodes, say)
        else:
            pods = [
                one
                for one in _running(cluster, survey.labels)
                if one["metadata"]["name"] in survey.plan.hosts
            ]
        ends = time.time() + (survey.plan.request.max_lifetime or LIFETIME) if own else None
        places = [
            PodPlace(pod["metadata"]["name"], job_id, cluster.context, cluster.namespace, pod["spec"]["containers"][0]["name"], own)
            for pod in pods
        ]  # fmt: skip
        return survey.taken(places, "Kubernetes runs", say, patience=RETRY_SECONDS, ends=ends)

    def attach(
        self, plan: Plan, accesses: Sequence[ClusterAccess]
    ) -> tuple[KubernetesSurvey, Sequence[Node]]:
        """The pods of a pool that another notebook of this user has made from this plan; nothing is connected to yet."""
        places = [
            PodPlace(one.host, one.job_id, context, namespace, container, bool(holder))
            for one in accesses
            for context, namespace, container, holder in [one.where]
        ]
        labels = dict(plan.request.kubernetes).get("pods", "")
        cluster = _cluster(places[0].context, places[0].namespace)
        survey = KubernetesSurvey(
            plan, accesses[0].installation.requirements, cluster, lambda job_id: {}, labels
        )
        return survey, survey.attached(places, accesses)

    def pools(self) -> Sequence[ListedPool]:
        """Jobs of this user's in the namespace of the current context that are pools, whichever machine they were made on."""
        cluster = _cluster("", "")
        found = [
            one for one in cluster.jobs() if one["metadata"]["labels"].get(api.USER) == api.user()
        ]
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


def _resources(request: PoolRequest, template: Json) -> Json:
    """Requests and limits of a pod's container, besides what its template has. Raises RequestError."""
    kept = _first(template).get("resources") or {}
    wanted = {}
    if request.cpus or not any("cpu" in (kept.get(kind) or {}) for kind in ("requests", "limits")):
        wanted["cpu"] = str(cpus_of(request))
    if request.memory:
        wanted["memory"] = f"{request.memory.amount:g}G"
    if (gpu := request.gpu) is not None:
        counted(gpu, "the cluster", whole=False)
    gpus = {"nvidia.com/gpu": str(gpu.count)} if gpu is not None and gpu.count else {}
    return {"requests": wanted | gpus, "limits": gpus}  # Kubernetes wants both to be the same


def _first(template: Json) -> Json:
    """The container of a template that a pool's ranks run in."""
    return dict(next(iter(template.get("spec", {}).get("containers") or [{}])))


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
    parts = (
        [found, *(found.get(part, {}) for part in ("metadata", "spec"))]
        if isinstance(found, dict)
        else [found]
    )
    containers = (
        (parts[-1].get("containers") or [])
        if all(isinstance(part, dict) for part in parts)
        else None
    )
    if not isinstance(containers, list) or not all(isinstance(one, dict) for one in containers):
        raise RequestError(
            f"--pod-template {file}: write a Pod, or a pod template, with metadata, and a spec with containers"
        )
    return dict(found)


def _preview(request: PoolRequest, manifest: Callable[[str], Json]) -> tuple[str, ...]:
    """The Job, where the user only wants to see the plan."""
    if not request.dry_run:
        return ()
    import yaml

    made = manifest(f"{request.name or 'main'}-00000000")
    job = json.loads(json.dumps(made))  # copies, for YAML names what comes twice
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
        events = cluster.events(name) if len(pods) < nodes else []
        if problem := api.hopeless(pods, events):
            raise ProvisionError(f"Kubernetes job {name} cannot start: {problem}")
        job = cluster.job(name)
        if not job:
            raise ProvisionError(
                f"Kubernetes job {name} was deleted, and not from this notebook, before its pods ran"
            )
        first = next(
            (one["metadata"]["name"] for one in pods if api.waiting(one)[0] == api.CREATING), None
        )
        creating, suspended = (
            cluster.events(first) if first else [],
            bool(job["spec"].get("suspend")),
        )
        if (words := api.waiting_words(pods, nodes, events, suspended, creating)) != told:
            told = words
            say(
                StartStep(
                    f"Kubernetes job {name} waits: {words}", "requested", step=f"waits: {words}"
                )
            )
        cluster.changed(labels, version, WATCH_SECONDS)
