"""Kubernetes provider: one Indexed Job per pool, deleted at the end.

Each pod is reached by exec and then used like an SSH host.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from skymagic.cluster import Node
from skymagic.display.panel import StartStep
from skymagic.errors import ProvisionError, RequestError, collect_mistakes
from skymagic.plan.container import container_mistakes
from skymagic.plan.plans import Plan, topology
from skymagic.plan.requests import PoolRequest, unsupported_options
from skymagic.plan.units import count
from skymagic.providers import kubernetes_api as api
from skymagic.providers import ssh
from skymagic.providers.cluster import (
    ClusterAccess,
    ClusterNode,
    ClusterSurvey,
    check_gpu_count,
    cpus_of,
)
from skymagic.providers.holder import holder_folder
from skymagic.providers.kubernetes_api import ExecChannel, KubernetesCluster
from skymagic.providers.provider import RemotePool, RemotePools, Say
from skymagic.ssh.host import ChannelConnection
from skymagic.wire import processes
from skymagic.wire.typed import JsonObject

logger = logging.getLogger(__name__)

LIFETIME = 24 * 3600.0
"""Seconds after which the cluster ends a job without --max-lifetime, in case it is forgotten."""
WATCH_SECONDS = 10
RETRY_SECONDS = 20.0
"""Seconds during which exec to a pod that has just started may be refused."""


@functools.lru_cache(maxsize=8)
def _known_cluster(context: str, namespace: str, configured: object) -> KubernetesCluster:
    # `configured` is part of the cache's key: after a new login, a new client is created
    return KubernetesCluster(context, namespace)


def _cluster(context: str, namespace: str) -> KubernetesCluster:
    """Return this process's client of a cluster."""
    return _known_cluster(context, namespace, api.configured_at())


@dataclass(frozen=True)
class PodNode(ClusterNode):
    """A pod and its cluster.

    Pods of a job that skymagic created run a holder (`providers.holder.HOLDER`); the user's own
    pods do not.
    """

    context: str
    namespace: str
    container: str
    holder: bool

    @property
    def location(self) -> tuple[str, ...]:
        """Context, namespace, container, and "holder" if the pod has one."""
        return self.context, self.namespace, self.container, "holder" if self.holder else ""

    def connection(self) -> ChannelConnection:
        """Return a connection that starts shells in the pod's container."""
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
        """Return Kubernetes' reason why the pod is gone, or "" if it is present or unknown."""
        cluster = _cluster(self.context, self.namespace)
        try:
            pod = cluster.pod(self.name)
            job = cluster.job(api.object_name(self.job_id)) if self.holder else {}
            return api.fate_words(self.name, pod, job, [] if pod else cluster.events(self.name))
        except ProvisionError:
            return ""


@dataclass(frozen=True)
class KubernetesSurvey(ClusterSurvey):
    """The plan of a pool on Kubernetes, and the owner of its job, which it deletes at the end.

    Attributes:
        manifest: returns the Job for a job ID.
        labels: labels of existing pods, which are used as they are; "" if the pool creates a job.
    """

    cluster: KubernetesCluster
    manifest: Callable[[str], JsonObject]
    labels: str = ""

    def container_shells(self) -> None:
        """Pods are containers: the cluster starts them."""

    def give_back(self) -> str:
        """Delete the job. Pods created by others are left running."""
        if self.labels:
            return ""
        self.cluster.delete(name := api.object_name(self.allocation.job_id))
        logger.info("Kubernetes job is deleted: name=%s", name)
        return f"Kubernetes job {name} is deleted"


class Kubernetes:
    """Provider for a Kubernetes cluster, configured by a kubeconfig or by the pod it runs in."""

    def plan(self, request: PoolRequest, say: Say) -> KubernetesSurvey:
        """Check that the pool may be created. Creates nothing."""
        options = dict(request.kubernetes)
        mistakes = unsupported_options(request, "kubernetes")
        mistakes += container_mistakes(request, "kubernetes")
        # --image is older and leaves the image's packages unused, so the two are not the same
        if request.container and "image" in options:
            mistakes.append("--container and --image both name the image: keep one of them")
        if request.container and options.get("pods"):
            mistakes.append(
                "--container has no effect with --pods, which uses existing pods as they are"
            )
        labels = options.get("pods", "")
        with collect_mistakes(mistakes):
            template = _template(options.get("pod-template", ""))
            resources = _resources(request, template)
        if labels:
            mistakes += [
                f"--{name} has no effect with --pods, which uses existing pods as they are"
                for name in ("image", "pod-template")
                if name in options
            ]
        if mistakes:
            raise RequestError(mistakes)
        cluster = _cluster(options.get("context", ""), options.get("namespace", ""))
        if mistakes := cluster.mistakes(bool(labels)):
            raise RequestError(mistakes)
        location = f"namespace {cluster.namespace} of {cluster.label}"
        names = (
            [pod["metadata"]["name"] for pod in _running_pods(cluster, labels)] if labels else []
        )
        if labels and len(names) < (request.nodes or 1):
            raise RequestError(
                f"--pods {labels}: {count(len(names), 'running pod')} with these labels in "
                f"{location}, and the pool needs {request.nodes or 1}"
            )
        request = replace(request, nodes=request.nodes or len(names) or 1)
        shape = topology(request)
        image, requirements = ssh.needs(request, shape, say)
        default_image = (
            "" if _container(template).get("image") else f"python:{requirements.minor}-slim"
        )
        seconds = request.max_lifetime + 60 if request.max_lifetime else LIFETIME
        manifest = functools.partial(
            api.job_manifest,
            nodes=shape.nodes,
            seconds=int(seconds),
            resources=resources,
            image=request.container or options.get("image", default_image),
            template=template,
        )
        plan = Plan(
            provider="kubernetes",
            request=request,
            topology=shape,
            image=image,
            hosts=tuple(names[: shape.nodes]) or (f"{count(shape.nodes, 'pod')} in {location}",),
            cpus=cpus_of(request),
            memory_gb=request.memory.amount if request.memory else 0.0,
            remote=True,
            notes=_preview(request, manifest) if not labels else (),
        )
        return KubernetesSurvey(plan, requirements, cluster, manifest, labels)

    def acquire(self, survey: KubernetesSurvey, job_id: str, say: Say) -> Sequence[Node]:
        """Create the job and wait for its pods, or use existing pods.

        Then set them up in parallel.
        """
        cluster, creates_job = survey.cluster, not survey.labels
        survey.allocation.job_id = job_id
        if creates_job:
            survey.allocation.run_request(lambda: cluster.create(survey.manifest(job_id)))
            logger.info("Kubernetes job is created: job=%s", job_id)
            pods = wait_for(cluster, job_id, survey.plan.topology.nodes, say)
        else:
            pods = [
                pod
                for pod in _running_pods(cluster, survey.labels)
                if pod["metadata"]["name"] in survey.plan.hosts
            ]
        ends = time.time() + (survey.plan.request.max_lifetime or LIFETIME) if creates_job else None
        nodes = [
            PodNode(
                pod["metadata"]["name"],
                job_id,
                cluster.context,
                cluster.namespace,
                pod["spec"]["containers"][0]["name"],
                creates_job,
            )
            for pod in pods
        ]
        return survey.prepare_nodes(
            nodes, "Kubernetes runs", say, patience=RETRY_SECONDS, ends=ends
        )

    def attach(
        self, plan: Plan, accesses: Sequence[ClusterAccess]
    ) -> tuple[KubernetesSurvey, Sequence[Node]]:
        """Return the pods of a pool that another notebook of this user created from this plan.

        Connects to nothing yet.
        """
        pods = [
            PodNode(access.host, access.job_id, context, namespace, container, bool(holder))
            for access in accesses
            for context, namespace, container, holder in [access.location]
        ]
        labels = dict(plan.request.kubernetes).get("pods", "")
        cluster = _cluster(pods[0].context, pods[0].namespace)
        survey = KubernetesSurvey(
            plan, accesses[0].installation.requirements, cluster, lambda job_id: {}, labels
        )
        return survey, survey.adopt_nodes(pods, accesses)

    def pools(self) -> RemotePools:
        """Return this user's pools in the current context's namespace.

        Includes pools created on other machines.
        """
        cluster = _cluster("", "")
        jobs = [
            job for job in cluster.jobs() if job["metadata"]["labels"].get(api.USER) == api.user()
        ]
        return RemotePools(tuple(_remote_pool(job, cluster.namespace) for job in jobs))

    def end(self, pool: RemotePool) -> str:
        """Delete the job of a pool in the current context's namespace, with its pods."""
        _cluster("", "").delete(api.object_name(pool.job_id))
        return ""


def _remote_pool(job: JsonObject, namespace: str) -> RemotePool:
    job_id = job["metadata"]["labels"][api.JOB]
    location = f"Kubernetes job {job['metadata']['name']} in namespace {namespace}"
    state, ends = api.job_words(job)
    return RemotePool(job_id.rpartition("-")[0], job_id, location, state, ends=ends)


# ------------------------------------------------------------------------------------ the request


def _resources(request: PoolRequest, template: JsonObject) -> JsonObject:
    """Return requests and limits to add to those of the template's container.

    Raises RequestError.
    """
    existing = _container(template).get("resources") or {}
    requests = {}
    if request.cpus or not any(
        "cpu" in (existing.get(kind) or {}) for kind in ("requests", "limits")
    ):
        requests["cpu"] = str(cpus_of(request))
    if request.memory:
        requests["memory"] = f"{request.memory.amount:g}G"
    if (gpu := request.gpu) is not None:
        check_gpu_count(gpu, "the cluster", allows_all=False)
    gpus = {"nvidia.com/gpu": str(gpu.count)} if gpu is not None and gpu.count else {}
    # Kubernetes requires that requests and limits of GPUs are equal.
    return {"requests": requests | gpus, "limits": gpus}


def _container(template: JsonObject) -> JsonObject:
    """Return the template's first container, where the pool's ranks run."""
    return dict(next(iter(template.get("spec", {}).get("containers") or [{}])))


def _template(file: str) -> JsonObject:
    """Read the user's pod template: a Pod, or the template of a Job. Raises RequestError."""
    if not file:
        return {}
    api.official_client()
    import yaml

    try:
        template = yaml.safe_load(Path(file).expanduser().read_text())
    except (OSError, yaml.YAMLError) as problem:
        raise RequestError(
            f"--pod-template {file}: {problem}", code="pod-template", names=[str(file)]
        ) from None
    parts = (
        [template, *(template.get(part, {}) for part in ("metadata", "spec"))]
        if isinstance(template, dict)
        else [template]
    )
    containers = (
        (parts[-1].get("containers") or [])
        if all(isinstance(part, dict) for part in parts)
        else None
    )
    if not isinstance(containers, list) or not all(
        isinstance(container, dict) for container in containers
    ):
        raise RequestError(
            f"--pod-template {file}: write a Pod, or a pod template, with metadata, "
            "and a spec with containers",
            code="pod-template",
            names=[str(file)],
        )
    return dict(template)


def _preview(request: PoolRequest, manifest: Callable[[str], JsonObject]) -> tuple[str, ...]:
    """Return the Job as YAML if the user only wants to see the plan."""
    if not request.dry_run:
        return ()
    import yaml

    manifest_json = manifest(f"{request.name or 'main'}-00000000")
    # a deep copy, because YAML turns repeated objects into anchors
    job = json.loads(json.dumps(manifest_json))
    # the script of the command is long, and not the user's concern
    job["spec"]["template"]["spec"]["containers"][0]["command"][2] = "…"
    text = yaml.safe_dump(job, sort_keys=False, allow_unicode=True)
    return tuple(str(text).splitlines())


def _running_pods(cluster: KubernetesCluster, labels: str) -> list[JsonObject]:
    """Return the running pods with these labels."""
    return [pod for pod in cluster.pods(labels)[0] if api.waiting_reason(pod) == ("", "")]


# ------------------------------------------------------------------------------------ the pods


def wait_for(cluster: KubernetesCluster, job_id: str, nodes: int, say: Say) -> list[JsonObject]:
    """Wait until all pods of a job run, and return them. Can be interrupted.

    Raises:
        ProvisionError: the pods will never run.
    """
    name, labels, last_reason = api.object_name(job_id), f"{api.JOB}={job_id}", ""
    while True:
        pods, version = cluster.pods(labels)
        if len(pods) == nodes and not any(api.waiting_reason(pod)[0] for pod in pods):
            return pods
        events = cluster.events(name) if len(pods) < nodes else []
        if problem := api.explain_hopeless(pods, events):
            raise ProvisionError(
                f"Kubernetes job {name} cannot start: {problem}",
                code="kubernetes-job",
                names=[name],
            )
        job = cluster.job(name)
        if not job:
            raise ProvisionError(
                f"Kubernetes job {name} was deleted from outside this notebook before its pods ran",
                code="kubernetes-deleted",
                names=[name],
            )
        first_creating = next(
            (pod["metadata"]["name"] for pod in pods if api.waiting_reason(pod)[0] == api.CREATING),
            None,
        )
        creating, suspended = (
            cluster.events(first_creating) if first_creating else [],
            bool(job["spec"].get("suspend")),
        )
        if (reason := api.waiting_words(pods, nodes, events, suspended, creating)) != last_reason:
            last_reason = reason
            say(
                StartStep(
                    f"Kubernetes job {name} waits: {reason}", "requested", step=f"waits: {reason}"
                )
            )
        cluster.wait_for_change(labels, version, WATCH_SECONDS)
