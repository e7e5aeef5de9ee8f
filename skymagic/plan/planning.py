"""Plan a request on one or several machines, or raise with every reason why it is impossible.

Also checks whether a running pool fits a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from skymagic.errors import RequestError, collect_mistakes
from skymagic.plan import gpus, limits
from skymagic.plan.accelerators import matches
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.image import Image
from skymagic.plan.masking import masked
from skymagic.plan.plans import Inventory, Plan, Topology, topology
from skymagic.plan.requests import TAKEN_BY, PoolRequest, unsupported_options
from skymagic.plan.units import AtLeast, count, duration_text

ON_CPU = ": %sky_pool --ranks 2 runs on its CPU"
ADD = (
    "; add hosts with --provider ssh --hosts …, or set up AWS (aws configure) and rent "
    "them with --provider aws"
)


def plan(request: PoolRequest, inventory: Inventory) -> Plan:
    """Plan `request` on the machine that `inventory` describes; nodes are groups of its ranks.

    Raises RequestError with every reason why it is impossible, and what to add.
    """
    mistakes: list[str] = []
    nodes = request.nodes or 1
    allotment = _allot_gpus(request, inventory, inventory.gpus, nodes, "this machine", mistakes)
    shape = Topology(nodes, allotment.procs_per_node)
    mistakes += [*_meaningless_options(request), *_too_small(request, shape, inventory)]
    mistakes += limits.refusal(shape.world_size, inventory.descriptors, "on this machine")
    image = _image(request, mistakes)
    python = image.python or ""
    if inventory.python and python and python.split(".")[:2] != inventory.python.split(".")[:2]:
        mistakes.append(
            f"Python {python} is asked for and this notebook runs {inventory.python}, as "
            "its ranks will"
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
        devices=allotment.devices,
        gpu_words=allotment.notes,
        question="" if request.yes else limits.question(shape.world_size, inventory.cpus),
    )


def plan_over(request: PoolRequest, inventories: Sequence[Inventory], provider: str) -> Plan:
    """Plan `request` on separate machines, one per node; surplus machines are left out.

    Raises RequestError with every reason why it is impossible, for all machines.
    """
    nodes = request.nodes or len(inventories)
    mistakes = unsupported_options(request, provider)
    if nodes > len(inventories):
        mistakes.append(f"--nodes {nodes} needs as many hosts, and {len(inventories)} are named")
    allotments = [
        _allot_gpus(request, inventory, devices, 1, inventory.hostname, mistakes)
        for inventory, devices in _disjoint(request, inventories[:nodes])
    ]
    counts = [len(allotment.devices[0]) if allotment.devices else 0 for allotment in allotments]
    if len(set(counts)) > 1 and not mistakes:
        mistakes.append(
            gpus.explain_unequal_hosts([host.hostname for host in inventories[:nodes]], counts)
        )
    shape = Topology(nodes, max(allotment.procs_per_node for allotment in allotments))
    for inventory in inventories[:nodes]:
        mistakes += _resource_mistakes(request, inventory)
    head = inventories[0]
    mistakes += limits.refusal(
        shape.world_size, head.descriptors, f"in a pool whose head is {head.hostname}"
    )
    image = _image(request, mistakes)
    if mistakes:
        raise RequestError(mistakes)
    used_inventories = inventories[: shape.nodes]
    return Plan(
        provider=provider,
        request=request,
        topology=shape,
        image=image,
        hosts=tuple(inventory.hostname for inventory in used_inventories),
        cpus=min(inventory.cpus for inventory in used_inventories),
        memory_gb=min(inventory.memory_gb for inventory in used_inventories),
        devices=tuple(allotment.devices[0] for allotment in allotments if allotment.devices),
        gpu_words=tuple(
            dict.fromkeys(note for allotment in allotments for note in allotment.notes)
        ),
        remote=True,
    )


def _image(request: PoolRequest, mistakes: list[str]) -> Image:
    """Return the merged image; append contradictions to `mistakes`."""
    with collect_mistakes(mistakes):
        return request.whole_image()
    return request.image


def _resource_mistakes(request: PoolRequest, inventory: Inventory) -> list[str]:
    return [
        f"{option} {amount} is more than {inventory.hostname} has ({available})"
        for option, amount, available in _short(request, inventory)
    ]


def _short(
    request: PoolRequest, inventory: Inventory, nodes: int = 1
) -> Iterator[tuple[str, AtLeast, str]]:
    """Yield (option, amount per node, available amount) of each amount that is not available.

    The machine has the given number of nodes.
    """
    amounts = (
        ("--cpus", request.cpus, inventory.cpus, "CPUs"),
        ("--memory", request.memory, inventory.memory_gb, "GB"),
    )
    for option, amount, available, unit in amounts:
        # nodes share the machine; more than the requested amount is never a problem
        if amount is not None and amount.amount * nodes > available:
            yield option, amount, f"{available:.12g} {unit}"


def _allot_gpus(
    request: PoolRequest,
    inventory: Inventory,
    devices: Sequence[GpuDevice],
    nodes: int,
    machine: str,
    mistakes: list[str],
) -> gpus.Allotment:
    """Return GPUs for the nodes of a machine, as far as possible; append problems to `mistakes`."""
    no_gpus = gpus.Allotment(procs_per_node=request.procs_per_node or 1)
    if not gpus.uses_gpus(request):
        # --gpu none: the nodes see no GPUs
        return no_gpus if request.gpu is None else replace(no_gpus, devices=((),) * nodes)
    if inventory.unusable:
        if request.gpu is None:
            return replace(no_gpus, notes=(f"ranks run on CPUs: {inventory.unusable}",))
        mistakes.append(f"--gpu {request.gpu}: {inventory.unusable}")
        return no_gpus
    try:
        allotment = gpus.allot(request, devices, nodes, machine)
    except RequestError as refused:
        advice = ("" if devices else ON_CPU) + ADD if machine == "this machine" else ""
        mistakes += [
            mistake + (advice if " has no" in mistake else "") for mistake in refused.mistakes
        ]
        return no_gpus
    if allotment.shared and "jax" in gpus.frameworks(request):
        mistakes.append(
            f"{allotment.notes[0].partition(':')[0]}, and JAX cannot share them: ask for "
            "one rank per GPU, or for --gpu none"
        )
    return allotment


def _disjoint(
    request: PoolRequest, inventories: Sequence[Inventory]
) -> Iterator[tuple[Inventory, Sequence[GpuDevice]]]:
    """Yield each host with GPUs that no earlier node on the same machine takes.

    Two hosts may be one machine.
    """
    machines = [
        (inventory.machine or inventory.hostname, [device.word for device in inventory.gpus])
        for inventory in inventories
    ]
    for node, inventory in enumerate(inventories):
        position, nodes = machines[:node].count(machines[node]), machines.count(machines[node])
        matching = [
            device
            for device in inventory.gpus
            if request.accelerator is None or matches(request.accelerator.name, device.name)
        ]
        share = request.accelerator.count if request.accelerator else max(1, len(matching) // nodes)
        yield (
            inventory,
            matching[position * share : (position + 1) * share] if nodes > 1 else inventory.gpus,
        )


def too_few_gpus(request: PoolRequest, devices: Sequence[GpuDevice]) -> bool:
    """Return True if a machine with these GPUs lacks the requested kind, or has too few."""
    gpu = request.accelerator
    return (
        gpu is not None
        and sum(matches(gpu.name, device.name) for device in devices)
        < (request.nodes or 1) * gpu.count
    )


def _meaningless_options(request: PoolRequest) -> list[str]:
    """Return a mistake for each option that has no meaning on the notebook's own machine."""
    mistakes = unsupported_options(request, "local")
    if request.provider not in ("auto", "local"):
        mistakes.append(
            f"this machine is --provider local, and --provider {request.provider} is asked for"
        )
    return mistakes


def _too_small(request: PoolRequest, shape: Topology, inventory: Inventory) -> list[str]:
    noun = "ranks" if shape.procs_per_node == 1 else "nodes"
    nodes = f" for each of {shape.nodes} {noun}" if shape.nodes > 1 else ""
    return [
        f"{option} {amount}{nodes} needs more than this machine has ({available}); ask for less, "
        "or add hosts with --provider ssh --hosts …"
        for option, amount, available in _short(request, inventory, shape.nodes)
    ]


def fits(request: PoolRequest, running: Plan) -> list[str]:
    """Return why the pool that `running` describes does not fit `request`; [] if it does.

    Only options that the user stated count: a request without options fits every pool.
    """
    stated, pool_request, shape, wanted_shape = (
        request.stated_fields(),
        running.request,
        running.topology,
        topology(request),
    )
    reasons = []

    def differs(name: str, here: object, asked: object, words: str) -> None:
        if name in stated and here != asked:
            reasons.append(words.format(here=here, asked=asked))

    if request.provider not in ("auto", running.provider) and "provider" in stated:
        # other fields describe another kind of machine: comparing them is pointless
        return [f"it is a {running.provider} pool, not {request.provider}"]
    # the user wrote --ranks
    in_ranks = (
        running.counted_in_ranks
        and wanted_shape.nodes == 1
        and {"nodes", "procs_per_node"} <= stated
    )
    if in_ranks and shape.world_size != wanted_shape.world_size:
        reasons.append(f"it has {count(shape.world_size, 'rank')}, not {wanted_shape.world_size}")
    else:
        size = count(
            shape.nodes,
            "node" if running.remote or shape.procs_per_node > 1 or in_ranks else "rank",
        )
        differs("nodes", shape.nodes, wanted_shape.nodes, f"it has {size}, not {{asked}}")
        current = count(shape.procs_per_node, "rank")
        differs(
            "procs_per_node",
            shape.procs_per_node,
            wanted_shape.procs_per_node,
            f"it has {current} per node, not {{asked}}",
        )
    differs(
        "gpu", pool_request.gpu or "no GPU", request.gpu, "it was made with {here}, not {asked}"
    )
    for name, has in (("cpus", running.cpus), ("memory", running.memory_gb)):
        amount = getattr(request, name)
        if name in stated and amount is not None and amount.amount > has:
            reasons.append(
                f"its nodes have {has:.12g} {'CPUs' if name == 'cpus' else 'GB'}, not {amount}"
            )
    reasons += _missing_properties(request, running)
    if "region" in stated and running.region not in request.regions:
        reasons.append(f"its region is {running.region or 'none'}, not {request.region}")
    for name in (field for field in TAKEN_BY if field not in ("ssh", "region", "max_price")):
        current, requested = getattr(pool_request, name), getattr(request, name)
        if name in stated and current != requested:
            reasons.append(_other_option(name, current, requested))
    for name in ("idle", "max_lifetime", "max_away"):
        current, requested = (getattr(source, name) for source in (pool_request, request))
        message = f"its --{name.replace('_', '-')} is {{here}}, not {{asked}}"
        differs(name, _limit(current), _limit(requested), message)
    if request.detached and not running.outlives:
        reasons.append("it ends with its notebook: it was started without --detach")
    if (
        "max_price" in stated
        and request.max_price is not None
        and (running.price or 0.0) > request.max_price
    ):
        reasons.append(
            f"it costs ${running.price:.2f} per hour, more than ${request.max_price:.2f}"
        )
    return reasons


def _other_option(name: str, running: object, requested: object) -> str:
    """Return a sentence that a pool was made with another value of a provider's option.

    Args:
        name: a field of `PoolRequest`.
    """
    if isinstance(requested, bool):
        return f"it was made {'without' if requested else 'with'} --{name}"
    if name == "hosts":
        return f"its hosts are {_value_text(running)}, not {_value_text(requested)}"
    return f"it was made with {name} {_value_text(running)}, not {_value_text(requested)}"


def _value_text(value: object) -> str:
    """Return an option's value as users write it: names with commas, pairs as ``time=2h``."""
    if not isinstance(value, tuple):
        return str(value or "none")
    parts = ["=".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in value]
    return ", ".join(parts) or "none"


def _limit(seconds: float | None) -> str:
    return "none" if seconds is None else duration_text(seconds)


def _missing_properties(request: PoolRequest, running: Plan) -> list[str]:
    """Return a sentence for each stated property that a pool lacks."""
    stated, pool_request = request.stated_fields(), running.request
    reasons = []
    if "plugins" in stated:
        pool_plugins = {spec.name: spec for spec in pool_request.plugins}
        for spec in request.plugins:
            if spec.name not in pool_plugins:
                reasons.append(f"it was made without the plugin {spec.name}")
            elif pool_plugins[spec.name] != spec:
                reasons.append(f"its plugin is {pool_plugins[spec.name]}, not {spec}")
    if stated & {"python", "pip", "env", "image"}:
        image = request.whole_image()
        if image.python not in (None, running.image.python):
            pool_python = running.image.python or "the notebook's"
            reasons.append(f"its Python is {pool_python}, not {image.python}")
        reasons += [
            f"it was made without the package {masked(item)}"
            for item in image.pip
            if item not in running.image.pip
        ]
        reasons += [
            f"it was made without the system package {package}"
            for package in image.apt
            if package not in running.image.apt
        ]
        reasons += [
            f"it was made without this value of {name}"
            for name, value in image.env.items()
            if running.image.env.get(name) != value
        ]
    reasons += [
        f"it was made without the secret {name}"
        for name in request.secrets
        if name not in pool_request.secrets
    ]
    return reasons
