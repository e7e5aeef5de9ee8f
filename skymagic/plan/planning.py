"""From a request to a plan, on this machine or on several, or to every reason why not; whether a pool serves a request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from skymagic.errors import RequestError, noted_in
from skymagic.plan import gpus, limits
from skymagic.plan.accelerators import matches
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.image import Image
from skymagic.plan.masking import masked
from skymagic.plan.plans import Inventory, Plan, Topology, topology
from skymagic.plan.requests import TAKEN_BY, PoolRequest, for_others
from skymagic.plan.units import AtLeast, count, duration_text

ON_CPU = ": %sky_pool --ranks 2 runs on its CPU"
ADD = "; add hosts with --provider ssh --hosts …, or set up AWS (aws configure) and rent them with --provider aws"


def plan(request: PoolRequest, inventory: Inventory) -> Plan:
    """How `request` is met on the machine that `inventory` describes; nodes are groups of ranks on it.

    Raises RequestError with every reason why it cannot be, in words, with what to add.
    """
    mistakes: list[str] = []
    nodes = request.nodes or 1
    allotted = _allotted(request, inventory, inventory.gpus, nodes, "this machine", mistakes)
    shape = Topology(nodes, allotted.procs_per_node)
    mistakes += [*_elsewhere(request), *_too_small(request, shape, inventory)]
    mistakes += limits.refusal(shape.world_size, inventory.descriptors, "on this machine")
    image = _image(request, mistakes)
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
        devices=allotted.devices,
        gpu_words=allotted.words,
        question="" if request.yes else limits.question(shape.world_size, inventory.cpus),
    )


def plan_over(request: PoolRequest, inventories: Sequence[Inventory], provider: str) -> Plan:
    """How `request` is met on machines of its own, one for each node; machines that are not needed are left out.

    Raises RequestError with every reason why it cannot be, of all machines.
    """
    nodes = request.nodes or len(inventories)
    mistakes = for_others(request, provider)
    if nodes > len(inventories):
        mistakes.append(f"--nodes {nodes} needs as many hosts, and {len(inventories)} are named")
    allotted = [
        _allotted(request, inventory, here, 1, inventory.hostname, mistakes)
        for inventory, here in _disjoint(request, inventories[:nodes])
    ]
    counts = [len(one.devices[0]) if one.devices else 0 for one in allotted]
    if len(set(counts)) > 1 and not mistakes:
        mistakes.append(gpus.unequal([each.hostname for each in inventories[:nodes]], counts))
    shape = Topology(nodes, max(one.procs_per_node for one in allotted))
    for inventory in inventories[:nodes]:
        mistakes += _too_weak(request, inventory)
    head = inventories[0]
    mistakes += limits.refusal(
        shape.world_size, head.descriptors, f"in a pool whose head is {head.hostname}"
    )
    image = _image(request, mistakes)
    if mistakes:
        raise RequestError(mistakes)
    chosen = inventories[: shape.nodes]
    return Plan(
        provider=provider,
        request=request,
        topology=shape,
        image=image,
        hosts=tuple(inventory.hostname for inventory in chosen),
        cpus=min(inventory.cpus for inventory in chosen),
        memory_gb=min(inventory.memory_gb for inventory in chosen),
        devices=tuple(one.devices[0] for one in allotted if one.devices),
        gpu_words=tuple(dict.fromkeys(words for one in allotted for words in one.words)),
        remote=True,
    )


def _image(request: PoolRequest, mistakes: list[str]) -> Image:
    """The image as far as it adds up; why it does not is added to `mistakes`."""
    with noted_in(mistakes):
        return request.whole_image()
    return request.image


def _too_weak(request: PoolRequest, inventory: Inventory) -> list[str]:
    return [
        f"{option} {asked} is more than {inventory.hostname} has ({has})"
        for option, asked, has in _short(request, inventory)
    ]


def _short(
    request: PoolRequest, inventory: Inventory, nodes: int = 1
) -> Iterator[tuple[str, AtLeast, str]]:
    """(option, amount of each node, what there is) of each amount that a machine of so many nodes has too little of."""
    wanted = (
        ("--cpus", request.cpus, inventory.cpus, "CPUs"),
        ("--memory", request.memory, inventory.memory_gb, "GB"),
    )
    for option, asked, has, unit in wanted:
        # nodes share the machine; more than the amount asked for is never in the way
        if asked is not None and asked.amount * nodes > has:
            yield option, asked, f"{has:.12g} {unit}"


def _allotted(
    request: PoolRequest,
    inventory: Inventory,
    here: Sequence[GpuDevice],
    nodes: int,
    machine: str,
    mistakes: list[str],
) -> gpus.Allotment:
    """GPUs for the nodes of a machine, as far as they can be given; why not is added to `mistakes`."""
    none = gpus.Allotment(procs_per_node=request.procs_per_node or 1)
    if not gpus.wanted(request):
        return (
            none if request.gpu is None else replace(none, devices=((),) * nodes)
        )  # of which they see none
    if inventory.unusable:
        if request.gpu is None:
            return replace(none, words=(f"{inventory.unusable}: ranks on CPUs",))
        mistakes.append(f"--gpu {request.gpu}: {inventory.unusable}")
        return none
    try:
        made = gpus.allot(request, here, nodes, machine)
    except RequestError as refused:
        lacking = ("" if here else ON_CPU) + ADD if machine == "this machine" else ""
        mistakes += [
            mistake + (lacking if " has no" in mistake else "") for mistake in refused.mistakes
        ]
        return none
    if made.shared and "jax" in gpus.frameworks(request):
        mistakes.append(
            f"{made.words[0].partition(':')[0]}, and JAX cannot share them: ask for one rank per GPU, or for --gpu none"
        )
    return made


def _disjoint(
    request: PoolRequest, inventories: Sequence[Inventory]
) -> Iterator[tuple[Inventory, Sequence[GpuDevice]]]:
    """Each machine with GPUs that no earlier node of it takes: two hosts may be one machine."""
    machines = [
        (inventory.machine or inventory.hostname, [one.word for one in inventory.gpus])
        for inventory in inventories
    ]
    for node, inventory in enumerate(inventories):
        place, nodes = machines[:node].count(machines[node]), machines.count(machines[node])
        fitting = [
            one
            for one in inventory.gpus
            if request.accelerator is None or matches(request.accelerator.name, one.name)
        ]
        share = request.accelerator.count if request.accelerator else max(1, len(fitting) // nodes)
        yield (
            inventory,
            fitting[place * share : (place + 1) * share] if nodes > 1 else inventory.gpus,
        )


def too_few_gpus(request: PoolRequest, here: Sequence[GpuDevice]) -> bool:
    """Whether a machine with these GPUs has not the kind that is asked for, or too few."""
    gpu = request.accelerator
    return (
        gpu is not None
        and sum(matches(gpu.name, one.name) for one in here) < (request.nodes or 1) * gpu.count
    )


def _elsewhere(request: PoolRequest) -> list[str]:
    """What has no meaning on the notebook's own machine."""
    mistakes = for_others(request, "local")
    if request.provider not in ("auto", "local"):
        mistakes.append(
            f"this machine is --provider local, and --provider {request.provider} is asked for"
        )
    return mistakes


def _too_small(request: PoolRequest, shape: Topology, inventory: Inventory) -> list[str]:
    noun = "ranks" if shape.procs_per_node == 1 else "nodes"
    nodes = f" for each of {shape.nodes} {noun}" if shape.nodes > 1 else ""
    return [
        f"{option} {asked}{nodes} needs more than this machine has ({has}); ask for less, "
        "or add hosts with --provider ssh --hosts …"
        for option, asked, has in _short(request, inventory, shape.nodes)
    ]


def fits(request: PoolRequest, running: Plan) -> list[str]:
    """Why the pool that `running` describes does not serve `request`; empty when it does.

    Only what the user stated counts: a request without options fits every pool.
    """
    given, made, shape, wanted = (
        request.given(),
        running.request,
        running.topology,
        topology(request),
    )
    reasons = []

    def differs(name: str, here: object, asked: object, words: str) -> None:
        if name in given and here != asked:
            reasons.append(words.format(here=here, asked=asked))

    if request.provider not in ("auto", running.provider) and "provider" in given:
        # the rest is of another kind of machine: to compare it tells nothing
        return [f"it is a {running.provider} pool, not {request.provider}"]
    in_ranks = (
        running.counted_in_ranks and wanted.nodes == 1 and {"nodes", "procs_per_node"} <= given
    )  # --ranks
    if in_ranks and shape.world_size != wanted.world_size:
        reasons.append(f"it has {count(shape.world_size, 'rank')}, not {wanted.world_size}")
    else:
        size = count(
            shape.nodes,
            "node" if running.remote or shape.procs_per_node > 1 or in_ranks else "rank",
        )
        differs("nodes", shape.nodes, wanted.nodes, f"it has {size}, not {{asked}}")
        here = count(shape.procs_per_node, "rank")
        differs(
            "procs_per_node",
            shape.procs_per_node,
            wanted.procs_per_node,
            f"it has {here} per node, not {{asked}}",
        )
    differs("gpu", made.gpu or "no GPU", request.gpu, "it was made with {here}, not {asked}")
    for name, has in (("cpus", running.cpus), ("memory", running.memory_gb)):
        asked = getattr(request, name)
        if name in given and asked is not None and asked.amount > has:
            reasons.append(
                f"its nodes have {has:.12g} {'CPUs' if name == 'cpus' else 'GB'}, not {asked}"
            )
    reasons += _lacks(request, running)
    if "region" in given and running.region not in request.regions:
        reasons.append(f"its region is {running.region or 'none'}, not {request.region}")
    for name in (each for each in TAKEN_BY if each not in ("ssh", "region", "max_price")):
        here, wants = getattr(made, name), getattr(request, name)
        if name in given and here != wants:
            reasons.append(_other_option(name, here, wants))
    for name in ("idle", "max_lifetime", "max_away"):
        here, wants = (getattr(each, name) for each in (made, request))
        words = f"its --{name.replace('_', '-')} is {{here}}, not {{asked}}"
        differs(name, _limit(here), _limit(wants), words)
    if request.detached and not running.outlives:
        reasons.append("it ends with its notebook: it was started without --detach")
    if (
        "max_price" in given
        and request.max_price is not None
        and (running.price or 0.0) > request.max_price
    ):
        reasons.append(
            f"it costs ${running.price:.2f} per hour, more than ${request.max_price:.2f}"
        )
    return reasons


def _other_option(name: str, here: object, asked: object) -> str:
    """Return in words that a pool was made with another value of a provider's option.

    Args:
        name: a field of `PoolRequest`.
    """
    if isinstance(asked, bool):
        return f"it was made {'without' if asked else 'with'} --{name}"
    if name == "hosts":
        return f"its hosts are {_value_text(here)}, not {_value_text(asked)}"
    return f"it was made with {name} {_value_text(here)}, not {_value_text(asked)}"


def _value_text(value: object) -> str:
    """Return an option's value as users write it: names with commas, pairs as ``time=2h``."""
    if not isinstance(value, tuple):
        return str(value or "none")
    parts = ["=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value]
    return ", ".join(parts) or "none"


def _limit(seconds: float | None) -> str:
    return "none" if seconds is None else duration_text(seconds)


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
    if given & {"python", "pip", "env", "image"}:
        asked = request.whole_image()
        if asked.python not in (None, running.image.python):
            here = running.image.python or "the notebook's"
            reasons.append(f"its Python is {here}, not {asked.python}")
        reasons += [
            f"it was made without the package {masked(item)}"
            for item in asked.pip
            if item not in running.image.pip
        ]
        reasons += [
            f"it was made without the system package {one}"
            for one in asked.apt
            if one not in running.image.apt
        ]
        reasons += [
            f"it was made without this value of {name}"
            for name, value in asked.env.items()
            if running.image.env.get(name) != value
        ]
    reasons += [
        f"it was made without the secret {name}"
        for name in request.secrets
        if name not in made.secrets
    ]
    return reasons
