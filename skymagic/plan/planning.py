"""From a request to a plan, or to every reason why not; and whether a pool that runs serves a request."""

from __future__ import annotations

from skymagic.accelerators import matches
from skymagic.errors import RequestError
from skymagic.plan.plans import Inventory, Plan, Topology, topology
from skymagic.plan.requests import PoolRequest


def plan(request: PoolRequest, inventory: Inventory) -> Plan:
    """How `request` is met on the machine that `inventory` describes; nodes are groups of ranks on it.

    Raises:
        RequestError: every reason why it cannot be, in words, with what to add.
    """
    shape = topology(request)
    devices, mistakes = _devices(request, shape, inventory)
    mistakes += [*_elsewhere(request), *_too_small(request, shape, inventory)]
    image = request.image
    try:
        image = request.whole_image()
    except RequestError as wrong:
        mistakes += wrong.mistakes
    python = image.python or ""
    if inventory.python and python and python.split(".")[:2] != inventory.python.split(".")[:2]:
        mistakes.append(
            f"Python {python} is asked for and this notebook runs {inventory.python}, as its ranks will"
        )
    if mistakes:
        raise RequestError(mistakes)
    return Plan(
        provider="local",
        request=request,
        topology=shape,
        image=image,
        hosts=(inventory.hostname,),
        cpus=inventory.cpus,
        memory_gb=inventory.memory_gb,
        devices=devices,
    )


def _devices(
    request: PoolRequest, shape: Topology, inventory: Inventory
) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """(devices of each node, mistakes)."""
    gpu = request.gpu
    if gpu is None:
        return (), []
    mistakes = []
    if gpu.count % shape.procs_per_node:
        mistakes.append(
            f"{gpu.count} GPUs per node cannot be shared by {shape.procs_per_node} ranks per node equally; "
            "leave --procs-per-node out for one rank per GPU"
        )
    here = [index for index, name in enumerate(inventory.gpus) if matches(gpu.name, name)]
    if len(here) < shape.nodes * gpu.count:
        has = f"no {gpu.name}" if not here else f"{len(here)} {gpu.name} of {shape.nodes * gpu.count}"
        there = ", ".join(inventory.gpus) or "none"
        mistakes.append(f"this machine has {has} (it has: {there}); add hosts with --provider ssh --hosts …")
    nodes = range(0, shape.nodes * gpu.count, gpu.count)
    return tuple(tuple(here[first : first + gpu.count]) for first in nodes), mistakes


def _elsewhere(request: PoolRequest) -> list[str]:
    """What has no meaning on the notebook's own machine."""
    mistakes = []
    if request.provider not in ("auto", "local"):
        mistakes.append(f"this machine is --provider local, and --provider {request.provider} is asked for")
    if request.hosts:
        mistakes.append("--hosts is for other machines: add --provider ssh")
    if request.region:
        mistakes.append("--region is for rented machines: add --provider aws")
    if request.spot:
        mistakes.append("--spot is for rented machines: add --provider aws")
    return mistakes


def _too_small(request: PoolRequest, shape: Topology, inventory: Inventory) -> list[str]:
    nodes = f" on each of {shape.nodes} nodes" if shape.nodes > 1 else ""
    wanted = (
        ("--cpus", request.cpus, inventory.cpus, "CPUs"),
        ("--memory", request.memory, inventory.memory_gb, "GB"),
    )
    return [
        f"{option} {asked}{nodes} needs more than this machine has ({has:.12g} {unit}); ask for less, "
        "or add hosts with --provider ssh --hosts …"
        for option, asked, has, unit in wanted
        # nodes share the machine; more than the amount asked for is never in the way of a local pool
        if asked is not None and asked.amount * shape.nodes > has
    ]


def fits(request: PoolRequest, running: Plan) -> list[str]:
    """Why the pool that `running` describes does not serve `request`; empty when it does.

    Only what the user stated counts: a request without options fits every pool.
    """
    given, made, shape, wanted = request.given(), running.request, running.topology, topology(request)
    reasons = []

    def differs(name: str, here: object, asked: object, words: str) -> None:
        if name in given and here != asked:
            reasons.append(words.format(here=here, asked=asked))

    if request.provider != "auto":
        differs("provider", running.provider, request.provider, "it is a {here} pool, not {asked}")
    differs("nodes", shape.nodes, wanted.nodes, "it has {here} nodes, not {asked}")
    differs(
        "procs_per_node",
        shape.procs_per_node,
        wanted.procs_per_node,
        "it has {here} ranks per node, not {asked}",
    )
    differs("gpu", made.gpu or "no GPU", request.gpu, "it was made with {here}, not {asked}")
    for name, has in (("cpus", running.cpus), ("memory", running.memory_gb)):
        asked = getattr(request, name)
        if name in given and asked is not None and asked.amount > has:
            reasons.append(f"its nodes have {has:.12g} {'CPUs' if name == 'cpus' else 'GB'}, not {asked}")
    reasons += _lacks(request, running)
    for name in ("hosts", "region", "spot", "idle", "max_lifetime"):
        differs(
            name,
            getattr(made, name),
            getattr(request, name),
            f"its {name.replace('_', ' ')} is {{here}}, not {{asked}}",
        )
    if request.max_price is not None and running.price > request.max_price:
        reasons.append(f"it costs ${running.price:.2f} per hour, more than ${request.max_price:.2f}")
    return reasons


def _lacks(request: PoolRequest, running: Plan) -> list[str]:
    """What a request adds that a pool was made without."""
    given, made = request.given(), running.request
    reasons = []
    if "plugins" in given:
        has = {spec.name: spec for spec in made.plugins}
        for spec in request.plugins:
            if spec.name not in has:
                reasons.append(f"it was made without the plugin {spec.name}")
            elif has[spec.name] != spec:
                reasons.append(f"its plugin is {has[spec.name]}, not {spec}")
    if given & {"pip", "env", "image"}:
        asked = request.whole_image()
        reasons += [
            f"it was made without the package {item}" for item in asked.pip if item not in running.image.pip
        ]
        reasons += [
            f"it was made without this value of {name}"
            for name, value in asked.env.items()
            if running.image.env.get(name) != value
        ]
    reasons += [
        f"it was made without the secret {name}" for name in request.secrets if name not in made.secrets
    ]
    return reasons
