"""A provider as Python code names it, ``sky.SSH("gpu1", "gpu2")``; and the providers by name, loaded on use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.planning import too_few_gpus
from skymagic.plan.requests import CloudSettings, PoolRequest, no_provider
from skymagic.plan.suggest import suggesting
from skymagic.providers.provider import Listable, Provider


@dataclass(frozen=True)
class Choice:
    """A provider as Python code names it: ``sky.AWS(region="eu-central-1", spot=True)``.

    Attributes:
        name: as ``--provider`` takes it.
        fields: what it says of the pool, by the names of `PoolRequest`.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@suggesting("sky.Local")
def Local(*, detached: bool = False) -> Choice:
    """Ranks on this machine.

    Args:
        detached: they outlive this process, until the pool is ended, or nobody has attached to it for `SkyMagic.away`.
    """
    return Choice("local", {"detached": True} if detached else {})


@suggesting("sky.SSH", {"hosts": 'the names alone, as in sky.SSH("gpu1", "gpu2")'})
def SSH(*hosts: str | Iterable[str], client: str = "auto") -> Choice:
    """Machines of your own: ``sky.SSH("gpu1", "user@gpu2")``, or a list of them.

    Args:
        client: who speaks SSH: ``"paramiko"``, ``"openssh"`` (the ssh program), or ``"auto"``.
    """
    flat = [host for each in hosts for host in ([each] if isinstance(each, str) else each)]
    return Choice("ssh", {"hosts": tuple(flat), **({"ssh": client} if client != "auto" else {})})


@suggesting("sky.AWS", {"key_name": "nothing: each pool has its own key", "ami": "image_id"})
def AWS(
    region: str | None = None,
    *,
    spot: bool = False,
    replace: bool = False,
    max_price: float | None = None,
    profile: str | None = None,
    subnet: str | None = None,
    use_private_ips: bool = False,
    ssh_port: int = 22,
    ssh_from: str | None = None,
    user: str = "ubuntu",
    image_id: str | None = None,
    disk: int = 100,
    endpoint_url: str | None = None,
    via: str | None = None,
) -> Choice:
    """Machines rented from EC2.

    Args:
        region: ``"eu-central-1"``; None for the one that your AWS configuration names.
        spot: take spot instances.
        replace: replace a lost machine as soon as EC2 has capacity.
        max_price: dollars per hour for the whole pool.
        profile: of your AWS configuration; None for what the environment says.
        subnet: ``"subnet-…"`` that the machines are in; None for the default one of a zone.
        use_private_ips: connect to private addresses (over a VPN, or from within the VPC), and give them no public ones.
        ssh_port: where their sshd listens.
        ssh_from: ``"203.0.113.0/24"``: addresses that may connect; None: only this machine's.
        user: login name: the user that the image comes with.
        image_id: ``"ami-…"``; None for Ubuntu, with NVIDIA's driver where there are GPUs.
        disk: GB of each machine's disk.
        endpoint_url: another address of AWS's services.
        via: how to reach machines without public addresses: ``"ann@bastion"``, a jump host (with `ssh_from`, its address as they see it).
    """
    fields = {"region": region, "spot": spot, "replace": replace, "max_price": max_price}
    cloud = CloudSettings(
        profile,
        subnet,
        use_private_ips,
        ssh_port,
        user,
        ssh_from,
        image_id,
        disk,
        endpoint_url,
        via=via,
    )
    said = {name: value for name, value in fields.items() if value}
    return Choice("aws", {**said, **({"cloud": cloud} if cloud != CloudSettings() else {})})


@suggesting("sky.Kubernetes", {"container_image": "image", "labels": "pods"})
def Kubernetes(
    *,
    image: str | None = None,
    namespace: str | None = None,
    context: str | None = None,
    pod_template: str | None = None,
    pods: str | None = None,
) -> Choice:
    """Pods of a Kubernetes cluster, by a kubeconfig or, in a pod, by its service account.

    Args:
        image: of the pods; None for ``python:3.X-slim`` with the notebook's version.
        namespace, context: of the kubeconfig; None for the current ones.
        pod_template: a YAML file with a Pod: node selectors, tolerations, labels of Kueue, …
        pods: labels of pods that run already, as ``"app=train"``: these are used as they are.
    """
    named = {
        "image": image,
        "namespace": namespace,
        "context": context,
        "pod-template": pod_template,
        "pods": pods,
    }
    said = tuple((name, value) for name, value in named.items() if value is not None)
    return Choice("kubernetes", {"kubernetes": said} if said else {})


@suggesting("sky.Ray")
def Ray(address: str | None = None) -> Choice:
    """Nodes of a Ray cluster.

    Args:
        address: ``"auto"``, ``"HOST:6379"`` or ``"ray://HOST:10001"``; None for ``RAY_ADDRESS``, else the cluster on this machine.
    """
    return Choice("ray", {"address": address} if address else {})


@suggesting("sky.Slurm", {"walltime": "time", "queue": "partition"})
def Slurm(
    *,
    account: str | None = None,
    partition: str | None = None,
    qos: str | None = None,
    time: str | None = None,
    constraint: str | None = None,
    gres: str | None = None,
    exclusive: bool = False,
    reservation: str | None = None,
    options: Mapping[str, str] | None = None,
    login: str | None = None,
    client: str = "auto",
    renew: bool = False,
) -> Choice:
    """Nodes of a Slurm cluster, on whose login node this runs, or in one of whose jobs.

    Args:
        login: ``"me@cluster"``: the login node, where this runs elsewhere. client: who speaks SSH to it, as of `SSH`.
        account, partition, qos, constraint, gres, reservation: as sbatch takes them.
        time: limit of the job: ``"4h"``, ``"1-12:00:00"``.
        exclusive: whole nodes, shared with no other job.
        renew: continue in another job when this one ends at its limit or by preemption; ranks start without variables.
        options: others of sbatch by their long names: ``{"mem": "0"}``; ``"none"`` leaves out one that is there unasked.
    """
    named = {
        "account": account, "partition": partition, "qos": qos, "time": time, "constraint": constraint, "gres": gres,
        "exclusive": "" if exclusive else None, "reservation": reservation,
    }  # fmt: skip
    said = {
        **{name: value for name, value in named.items() if value is not None},
        **(options or {}),
    }
    fields = {
        "slurm": tuple(said.items()),
        "login": login,
        "ssh": client if client != "auto" else None,
        "replace": renew,
    }
    return Choice("slurm", {name: value for name, value in fields.items() if value})


# -- The providers by name, loaded on use ------------------------------------------------------------------------------

TABLE: dict[str, str] = {
    "local": "skymagic.providers.local:Local",
    "ssh": "skymagic.providers.ssh:SSH",
    "slurm": "skymagic.providers.slurm:Slurm",
    "kubernetes": "skymagic.providers.kubernetes:Kubernetes",
    "ray": "skymagic.providers.ray:Ray",
    "aws": "skymagic.providers.aws.provider:AWS",
}
"""Name → ``module:class``; the entry-point group ``skymagic.providers`` adds third parties' own."""
RENTING: dict[str, str] = {"aws": "skymagic.providers.aws.clients:set_up"}
"""Providers that ``auto`` may turn to, in this order → whether they are set up here."""
LISTING = ("slurm", "kubernetes", "ray")
"""Providers that know the user's pools by themselves (`provider.Listable`), other than those that rent."""
GROUP = "skymagic.providers"


def names() -> list[str]:
    """All providers that can be asked for."""
    return sorted({*TABLE, *(entry.name for entry in entry_points(group=GROUP))})


def placed(request: PoolRequest) -> PoolRequest:
    """The request with the provider that serves it, where it names none and asks for what this machine has not: GPUs, or anything rented.

    This machine comes first, then those of `RENTING` that are set up here; without one the request is as it was, and its plan
    says what to add. A preview needs none that is set up.
    """
    if request.provider != "auto" or request.hosts:
        return request
    rented = request.region is not None or request.spot
    if not rented and (
        request.accelerator is None or not too_few_gpus(request, _local_gpus(request))
    ):
        return request
    ready = (name for name, attribute in RENTING.items() if _load(attribute)(request.cloud))
    return replace(
        request, provider=next(ready, next(iter(RENTING)) if request.dry_run else "auto")
    )


def _local_gpus(request: PoolRequest) -> tuple[GpuDevice, ...]:
    from skymagic.providers.local import inventory

    return inventory(request).gpus


def _load(attribute: str) -> Any:
    module, _, name = attribute.partition(":")
    return getattr(importlib.import_module(module), name)


def serving(request: PoolRequest) -> Provider:
    """A provider for a request: the one that it names; where it names none, this machine, or its hosts.

    Raises:
        RequestError: there is no such provider, with the nearest name.
    """
    name = request.provider if request.provider != "auto" else "ssh" if request.hosts else "local"
    if name in TABLE:
        make: Callable[[], Provider] = _load(TABLE[name])
        return make()
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            make = entry.load()
            return make()
    raise RequestError(no_provider(name, ["auto", *names()]))


def listing(name: str, login: str | None = None) -> Listable:
    """The provider of this name, one of `LISTING`; Slurm's may be reached through a login node."""
    provider = _load(TABLE[name])(login) if login else serving(PoolRequest(provider=name))
    assert isinstance(provider, Listable)
    return provider
