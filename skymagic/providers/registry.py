"""Select a provider in Python code, such as ``sky.SSH("gpu1", "gpu2")``, or by its name.

Providers are loaded on use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, cast

from skymagic.errors import RequestError
from skymagic.plan.container import read_bind, read_container
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.planning import too_few_gpus
from skymagic.plan.requests import CloudSettings, PoolRequest, no_provider
from skymagic.plan.suggest import suggesting
from skymagic.providers.provider import (
    Listable,
    PoolLocation,
    Provider,
    RemotePool,
    RemotePools,
)


@dataclass(frozen=True)
class Choice:
    """A provider selected in Python code: ``sky.AWS(region="eu-central-1", spot=True)``.

    Attributes:
        name: name that ``--provider`` accepts.
        fields: settings of the pool, by field of `PoolRequest`.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@suggesting("sky.Local")
def Local(*, detached: bool = False) -> Choice:
    """Ranks on this machine.

    Args:
        detached: keep ranks alive when this process ends. They run until the pool is ended, or
            until it has had no notebook for `SkyMagic.away`.
    """
    return Choice("local", {"detached": True} if detached else {})


@suggesting("sky.SSH", {"hosts": 'the names alone, as in sky.SSH("gpu1", "gpu2")'})
def SSH(
    *hosts: str | Iterable[str],
    client: str = "auto",
    container: str | None = None,
    bind: Iterable[str] = (),
) -> Choice:
    """Your own machines: ``sky.SSH("gpu1", "user@gpu2")``, or a list of them.

    Args:
        client: SSH client: ``"paramiko"``, ``"openssh"`` (the ssh program), or ``"auto"``.
        container: image of the container that ranks run in: ``"pytorch/pytorch:2.13.0"``,
            ``"podman:IMAGE"``, or the path of an image on the machines.
        bind: further folders of the machines to show in the container.
    """
    flat = [
        host
        for argument in hosts
        for host in ([argument] if isinstance(argument, str) else argument)
    ]
    client_field = {"ssh": client} if client != "auto" else {}
    return Choice("ssh", {"hosts": tuple(flat), **client_field, **_container(container, bind)})


def _container(image: str | None, bind: Iterable[str]) -> dict[str, object]:
    """Return the fields of a request for a container. Raises RequestError."""
    folders = tuple(read_bind(folder) for folder in bind)
    fields: dict[str, object] = {"binds": folders} if folders else {}
    return fields | ({"container": read_container(image)} if image else {})


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
        region: ``"eu-central-1"``; None for the region in your AWS configuration.
        spot: use spot instances.
        replace: replace a lost machine as soon as EC2 has capacity.
        max_price: dollars per hour for the whole pool.
        profile: profile of your AWS configuration; None for the environment's.
        subnet: subnet of the machines, ``"subnet-…"``; None for the zone's default subnet.
        use_private_ips: connect to private addresses (over a VPN, or from within the VPC), and
            assign no public ones.
        ssh_port: port of the machines' sshd.
        ssh_from: addresses that may connect, ``"203.0.113.0/24"``; None for this machine's only.
        user: login name: the user that the image comes with.
        image_id: ``"ami-…"``; None for Ubuntu, with NVIDIA's driver on machines with GPUs.
        disk: GB of each machine's disk.
        endpoint_url: alternative address of AWS's services.
        via: jump host for machines without public addresses, ``"ann@bastion"``; then `ssh_from` is
            the address of the jump host as the machines see it.
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
    settings = {name: value for name, value in fields.items() if value}
    return Choice("aws", {**settings, **({"cloud": cloud} if cloud != CloudSettings() else {})})


@suggesting("sky.Kubernetes", {"container_image": "image", "labels": "pods"})
def Kubernetes(
    *,
    image: str | None = None,
    namespace: str | None = None,
    context: str | None = None,
    pod_template: str | None = None,
    pods: str | None = None,
) -> Choice:
    """Pods of a Kubernetes cluster, configured by a kubeconfig or a pod's service account.

    Args:
        image: image of the pods; None for ``python:3.X-slim`` with the notebook's version.
        namespace, context: namespace and context of the kubeconfig; None for the current ones.
        pod_template: YAML file with a Pod: node selectors, tolerations, labels of Kueue, …
        pods: labels of running pods, such as ``"app=train"``, to be used as they are.
    """
    named = {
        "image": image,
        "namespace": namespace,
        "context": context,
        "pod-template": pod_template,
        "pods": pods,
    }
    settings = tuple((name, value) for name, value in named.items() if value is not None)
    return Choice("kubernetes", {"kubernetes": settings} if settings else {})


@suggesting("sky.Ray")
def Ray(address: str | None = None) -> Choice:
    """Nodes of a Ray cluster.

    Args:
        address: ``"auto"``, ``"HOST:6379"`` or ``"ray://HOST:10001"``; None for ``RAY_ADDRESS``, or
            else the cluster on this machine.
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
    container: str | None = None,
    bind: Iterable[str] = (),
) -> Choice:
    """Nodes of a Slurm cluster. Runs on its login node, in one of its jobs, or elsewhere.

    Args:
        login: login node, ``"me@cluster"``, if this runs elsewhere.
        client: SSH client for the login node, as in `SSH`.
        account, partition, qos, constraint, gres, reservation: as sbatch accepts them.
        time: time limit of the job: ``"4h"``, ``"1-12:00:00"``.
        exclusive: use whole nodes, shared with no other job.
        renew: continue in another job when this one reaches its limit or is preempted; ranks start
            without variables.
        container, bind: as in `SSH`; pyxis starts the container where it is installed.
        options: other options of sbatch by their long names: ``{"mem": "0"}``; ``"none"`` removes a
            default option.
    """
    named = {
        "account": account,
        "partition": partition,
        "qos": qos,
        "time": time,
        "constraint": constraint,
        "gres": gres,
        "exclusive": "" if exclusive else None,
        "reservation": reservation,
    }
    sbatch_options = {
        **{name: value for name, value in named.items() if value is not None},
        **(options or {}),
    }
    fields = {
        "slurm": tuple(sbatch_options.items()),
        "login": login,
        "ssh": client if client != "auto" else None,
        "replace": renew,
        **_container(container, bind),
    }
    return Choice("slurm", {name: value for name, value in fields.items() if value})


# -- Providers by name ----------------------------------------------------------

TABLE: dict[str, str] = {
    "local": "skymagic.providers.local:Local",
    "ssh": "skymagic.providers.ssh:SSH",
    "slurm": "skymagic.providers.slurm:Slurm",
    "kubernetes": "skymagic.providers.kubernetes:Kubernetes",
    "ray": "skymagic.providers.ray:Ray",
    "aws": "skymagic.providers.aws.provider:AWS",
}
"""Provider classes by name, as ``module:class``.

The entry-point group ``skymagic.providers`` adds third-party providers.
"""
RENTING: dict[str, str] = {"aws": "skymagic.providers.aws.clients:is_set_up"}
"""Providers that ``auto`` may choose, in this order.

The values are functions that return True if the provider is set up here.
"""
LISTING = ("slurm", "kubernetes", "ray")
"""Providers, other than those that rent, that can list the user's pools (`provider.Listable`)."""
GROUP = "skymagic.providers"


def names() -> list[str]:
    """Return the names of all available providers."""
    return sorted({*TABLE, *(entry.name for entry in entry_points(group=GROUP))})


def with_provider(request: PoolRequest) -> PoolRequest:
    """Return the request with a provider filled in.

    Changes a request only if it names no provider and needs something this machine lacks: GPUs, or
    rented machines. This machine comes first, then the providers in `RENTING` that are set up here.
    If none is, the request stays unchanged and its plan explains what to add. A preview also works
    with a provider that is not set up.
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


def provider_for(request: PoolRequest) -> Provider:
    """Return the provider for a request: the named one, else this machine or the request's hosts.

    Raises:
        RequestError: the provider does not exist; suggests the nearest name.
    """
    name = request.provider if request.provider != "auto" else "ssh" if request.hosts else "local"
    if name in TABLE:
        make: Callable[[], Provider] = _load(TABLE[name])
        return make()
    for entry in entry_points(group=GROUP):
        if entry.name == name:
            make = entry.load()
            return make()
    raise RequestError(no_provider(name, ["auto", *names()]), code="no-provider", names=[name])


def find_pools(location: PoolLocation) -> RemotePools:
    """Find the user's pools in a location, including those of other notebooks.

    Raises:
        RequestError: a host name is invalid, or the provider cannot list pools.
        SkyError: no host or provider answers; the message gives the reasons.
    """
    return _listable(location).pools()


def stop(pool: RemotePool, location: PoolLocation) -> str:
    """End a pool, even if a notebook uses it. Twice is safe.

    Returns:
        A sentence for the user.

    Raises:
        SkyError: not everything could be ended; the message gives the reason.
    """
    details = _listable(location).end(pool)
    return f"pool {pool.name!r} ({pool.job_id}) is down{details}"


def _listable(location: PoolLocation) -> Listable:
    name = location.provider
    if name is None:
        return cast(Listable, _load("skymagic.providers.host_pools:HostPools")(location.hosts))
    if name == "aws":
        rented = _load("skymagic.providers.aws.sweep:RentedPools")
        return cast(Listable, rented(location.cloud, location.regions))
    if location.login:
        return cast(Listable, _load(TABLE[name])(location.login))
    provider = provider_for(PoolRequest(provider=name))
    if not isinstance(provider, Listable):
        raise RequestError(f"pools of --provider {name} cannot be listed")
    return provider
