"""GPUs of a machine: its driver's list, the requested ones, and their assignment to nodes. Pure.

`first_gpu` is the only source of a rank's GPU index. Ranks of a node share one list of UUIDs
(CUDA_VISIBLE_DEVICES) and select theirs from it, as under torchrun: UUIDs work on machines with
several kinds of GPUs, where CUDA's order differs from nvidia-smi's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from skymagic.errors import RequestError
from skymagic.plan.accelerators import Accelerator, GpuChoice, canonical_device, matches
from skymagic.plan.limits import first_gpu
from skymagic.plan.requests import PoolRequest
from skymagic.plan.units import count, rank_words

FIELDS = "index,uuid,name,memory.total,compute_mode,mig.mode.current"
"""Fields queried from nvidia-smi; drivers before MIG (R450) support all but the last."""
APPLICATIONS = "gpu_uuid,pid,process_name,used_memory"
HOLD = "skymagic/gpu/"
"""Name prefix of the abstract sockets that claim GPUs for agents.

The names are ``HOLD + UUID``, and ``HOLD + UUID/JOB_ID/POOL`` for information.
"""
FRAMEWORKS = {"torch": "torch", "accelerate": "torch", "jax": "jax"}
"""Maps plugins that use GPUs to their framework; keras uses its backend."""


@dataclass(frozen=True)
class GpuDevice:
    """A GPU that CUDA can open, or a part of one (MIG).

    Attributes:
        uuid: ``"GPU-…"`` or ``"MIG-…"``; "" on a machine that does not exist yet.
        index: its number in nvidia-smi's list; for a part, the number of its GPU.
        mode: compute mode: ``"Default"``, ``"Exclusive_Process"``, ``"Prohibited"``.
        part: profile of a part: ``"1g.18gb"``.
        users: other processes that use it, as text.
        held: (job id, name) of the pool that holds it; ("", "") for none.
    """

    uuid: str
    name: str
    index: int
    memory_gb: float = 0.0
    mode: str = "Default"
    part: str = ""
    users: tuple[str, ...] = ()
    held: tuple[str, str] = ("", "")

    @property
    def word(self) -> str:
        """The device as an entry of CUDA_VISIBLE_DEVICES."""
        return self.uuid or str(self.index)

    @property
    def kind(self) -> str:
        """Kind of the device: ``H200``, ``MIG 1g.18gb of H200``."""
        return (
            f"MIG {self.part} of {canonical_device(self.name)}"
            if self.part
            else canonical_device(self.name)
        )

    @property
    def taken(self) -> str:
        """Reason why it is not free, or ""."""
        if self.held[0]:
            return f"taken by pool {self.held[1]!r}"
        if self.mode == "Prohibited":
            return "closed to all (compute mode Prohibited)"
        return f"in use by {', '.join(self.users)}" if self.users else ""


def devices_by_name(*names: str) -> tuple[GpuDevice, ...]:
    """Return GPUs with only their driver names known."""
    return tuple(GpuDevice("", name, index) for index, name in enumerate(names))


def parse_nvidia_smi(
    rows: Iterable[str],
    tree: Iterable[str] = (),
    applications: Iterable[str] = (),
    held: Iterable[str] = (),
    own: Collection[int] = (),
) -> tuple[GpuDevice, ...]:
    """Return nvidia-smi's output as devices; a partitioned GPU (MIG) is replaced by its parts.

    Args:
        rows: its table of `FIELDS`, without units.
        tree: output of ``nvidia-smi -L``.
        applications: its table of `APPLICATIONS`.
        held: names of sockets that start with `HOLD`.
        own: process ids that do not count as other users.
    """
    parts: dict[int, list[tuple[str, str]]] = {}
    gpu_index = -1
    for line in tree:
        if match := re.match(r"GPU (\d+):", line):
            gpu_index = int(match[1])
        elif match := re.match(r"\s*MIG (\S+)\s.*\(UUID: (MIG-[^)]+)\)", line):
            parts.setdefault(gpu_index, []).append((match[1], match[2]))
    users: dict[str, list[str]] = {}
    for line in applications:
        uuid, pid, name, memory = ([cell.strip() for cell in line.split(",", 3)] + [""] * 4)[:4]
        if pid.isdigit() and int(pid) not in own:
            amount = f", {int(memory) / 1024:.1f} GB" if memory.isdigit() else ""
            users.setdefault(uuid, []).append(f"process {pid} ({name.rpartition('/')[2]}{amount})")
    holders = dict(_holder(name) for name in held if name.removeprefix(HOLD).count("/") >= 2)
    devices = []
    for row in rows:
        cells = [cell.strip() for cell in row.split(",")]
        if len(cells) < 5 or not cells[0].isdigit():
            continue
        index, uuid, name, memory, mode, mig = (*cells[:5], (cells[5:6] or [""])[0])
        size = int(memory) * 1.048576e-3 if memory.isdigit() else 0.0
        whole_gpu = GpuDevice(
            uuid, name, int(index), round(size, 1), mode, "", tuple(users.get(uuid, ()))
        )
        mig_devices = [
            replace(whole_gpu, uuid=part, part=profile, memory_gb=0.0)
            for profile, part in parts.get(int(index), ())
        ]
        devices += mig_devices or ([] if mig == "Enabled" else [whole_gpu])
    return tuple(replace(device, held=holders.get(device.uuid, ("", ""))) for device in devices)


def _holder(name: str) -> tuple[str, tuple[str, str]]:
    uuid, job, pool = name.removeprefix(HOLD).split("/", 2)
    return uuid, (job, pool)


def visible(devices: Sequence[GpuDevice], setting: str | None) -> tuple[GpuDevice, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES shows, in its order; all if it is not set.

    As in CUDA, the list ends at the first invalid entry, and is empty if a device is repeated.
    Numbers count as in nvidia-smi.
    """
    if setting is None:
        return tuple(devices)
    selected: list[GpuDevice] = []
    for word in map(str.strip, setting.split(",")):
        matching = _called(devices, word)
        if not matching:
            break
        if matching[0] in selected:
            return ()
        selected.append(matching[0])
    return tuple(selected)


def _called(devices: Iterable[GpuDevice], word: str) -> list[GpuDevice]:
    if word.isdigit():
        return [device for device in devices if device.index == int(word)][:1]
    matching = [
        device
        for device in devices
        if re.match(r"(GPU|MIG)-", word) and device.uuid.startswith(word)
    ]
    return matching if len(matching) == 1 else []


def frameworks(request: PoolRequest) -> frozenset[str]:
    """Return the frameworks through which a pool's plugins use GPUs: torch, jax."""
    names = [
        str((spec.options or {}).get("backend", "jax"))
        if spec.name == "keras"
        else FRAMEWORKS.get(spec.name, "")
        for spec in request.plugins
    ]
    return frozenset(names) & {"torch", "jax"}


def uses_gpus(request: PoolRequest) -> bool:
    """Return True if a pool uses GPUs if there are any: by request, or by a plugin."""
    return requests_gpus(request) or (request.gpu is None and bool(frameworks(request)))


def requests_gpus(request: PoolRequest) -> bool:
    """Return True if the user has requested GPUs of any kind."""
    return request.gpu is not None and not (
        isinstance(request.gpu, GpuChoice) and request.gpu.count == 0
    )


@dataclass(frozen=True)
class Allotment:
    """GPUs of each node, the number of ranks that share them, and lines about them for the user."""

    devices: tuple[tuple[GpuDevice, ...], ...] = ()
    procs_per_node: int = 1
    notes: tuple[str, ...] = ()

    @property
    def shared(self) -> bool:
        """True if ranks share a GPU, including ranks of several nodes."""
        device_words = [device.word for node in self.devices for device in node]
        return any(0 < len(node) < self.procs_per_node for node in self.devices) or len(
            set(device_words)
        ) < len(device_words)


def allot(
    request: PoolRequest, available: Sequence[GpuDevice], nodes: int, machine: str
) -> Allotment:
    """Assign GPUs to the nodes of one machine, with separate GPUs per node if there are enough.

    Args:
        available: visible GPUs of the machine.
        machine: its name.

    Raises RequestError with the existing GPUs if the requested ones do not exist, or if other pools
    hold all of them.
    """
    gpu = request.gpu
    matching = _matching_devices(gpu, available)
    barred = [device for device in matching if _is_unusable(device, request.resizes)]
    in_use = [device for device in matching if device.users and device not in barred]
    free = [device for device in matching if device not in barred and device not in in_use]
    per_node_gpus = gpu.count if gpu is not None else None
    if isinstance(gpu, GpuChoice) and gpu.selectors:
        if nodes > 1:
            raise RequestError(
                f"--gpu {gpu} names GPUs of one node, and {machine} has {nodes}: write "
                f"--gpu {len(gpu.selectors)}"
            )
        per_node_gpus = len(gpu.selectors)
        selected = [device for device in matching if device not in barred]
    elif per_node_gpus is not None:
        selected = sorted([*free, *in_use][: per_node_gpus * nodes], key=available.index)
    else:
        selected = [
            device
            for device in matching
            if device in free or (device in in_use and (gpu is not None or not free))
        ]
    if (gpu is not None or matching) and len(selected) < (per_node_gpus or 1) * (
        nodes if per_node_gpus else 1
    ):
        raise RequestError(
            _refusal(gpu, available, len(selected), (per_node_gpus or 1) * nodes, machine, barred)
        )
    if not selected:
        return Allotment(procs_per_node=request.procs_per_node or 1)
    devices = _split_among_nodes(selected, nodes)
    per_node = request.procs_per_node or min(map(len, devices))
    if isinstance(gpu, Accelerator) and gpu.count > per_node and gpu.count % per_node:
        raise RequestError(explain_uneven(gpu.count, per_node))
    # one GPU per rank; the others stay free
    if any(len(node) > per_node and len(node) % per_node for node in devices):
        devices = tuple(node[:per_node] for node in devices)
    allotment = Allotment(devices, per_node)
    assigned = [device for node in devices for device in node]
    exclusive = [device for device in assigned if device.mode == "Exclusive_Process"]
    if allotment.shared and exclusive:
        raise RequestError(
            f"{gpu_words(exclusive)} of {machine} serves one process at a time (compute "
            "mode Exclusive_Process): ask for one rank per GPU"
        )
    notes = [f"left out: {taken_words([device for device in matching if device not in assigned])}"]
    notes += [f"shared with others: {taken_words([device for device in assigned if device.users])}"]
    notes = [note for note in notes if not note.endswith(": ")]
    return replace(allotment, notes=(_description(allotment, request), *notes))


def _matching_devices(
    gpu: Accelerator | GpuChoice | None, devices: Sequence[GpuDevice]
) -> list[GpuDevice]:
    if isinstance(gpu, GpuChoice) and gpu.selectors:
        return [device for word in gpu.selectors for device in _called(devices, word)]
    return [
        device
        for device in devices
        if not isinstance(gpu, Accelerator) or matches(gpu.name, device.name)
    ]


def _is_unusable(device: GpuDevice, own: str) -> bool:
    """Return True if it cannot be used.

    Another pool holds it, or its mode admits no further process.
    """
    return (
        device.held[0] not in ("", own)
        or device.mode == "Prohibited"
        or (device.mode == "Exclusive_Process" and bool(device.users))
    )


def _split_among_nodes(
    devices: Sequence[GpuDevice], nodes: int
) -> tuple[tuple[GpuDevice, ...], ...]:
    """Split GPUs equally among the nodes; nodes share GPUs if there are fewer."""
    share = len(devices) // nodes
    if share == 0:
        return tuple((devices[first_gpu(node, nodes, len(devices))],) for node in range(nodes))
    return tuple(tuple(devices[node * share : (node + 1) * share]) for node in range(nodes))


def explain_uneven(gpus: int, procs_per_node: int) -> str:
    """Return why ranks cannot share this number of GPUs equally."""
    return (
        f"{gpus} GPUs per node cannot be shared by {procs_per_node} ranks per node equally; "
        "leave --procs-per-node out for one rank per GPU"
    )


def _refusal(
    gpu: Accelerator | GpuChoice | None,
    devices: Sequence[GpuDevice],
    available: int,
    needed: int,
    machine: str,
    barred: Sequence[GpuDevice],
) -> str:
    inventory_text = f" (it has: {table(devices)})" if devices else ""
    if barred:
        return (
            f"{machine} has too few free GPUs: {taken_words(barred)}{inventory_text}; "
            "wait, ask for others, or take CPUs with --gpu none"
        )
    name = gpu.name if isinstance(gpu, Accelerator) else "GPU"
    if isinstance(gpu, GpuChoice) and gpu.selectors:
        missing = [word for word in gpu.selectors if not _called(devices, word)]
        return f"{machine} has no GPU {', '.join(missing)}{inventory_text}"
    count = f"{available} {name} of {needed}" if available else f"no {name}"
    return f"{machine} has {count}{inventory_text}"


def taken_words(devices: Sequence[GpuDevice]) -> str:
    """Return which devices are not free, and why, as in "GPUs 0, 1 taken by pool 'main'"."""
    groups = {
        device.taken: [other for other in devices if other.taken == device.taken]
        for device in devices
        if device.taken
    }
    return "; ".join(f"{gpu_words(group)} {reason}" for reason, group in groups.items())


def table(devices: Sequence[GpuDevice]) -> str:
    """Return the devices as "GPU 0: NVIDIA H200 (GPU-00000000…), GPU 1: …", or "none"."""
    if devices and not any(device.uuid for device in devices):
        return ", ".join(device.name for device in devices)
    return (
        ", ".join(
            f"{device.index}: {device.name}{f' {device.part}' if device.part else ''} "
            f"({device.uuid[:12]}…)"
            for device in devices
        )
        or "none"
    )


def gpu_words(devices: Sequence[GpuDevice]) -> str:
    """Return "GPU 0" or "GPUs 0–3"; parts of GPUs by their UUIDs."""
    if any(device.part for device in devices):
        return ", ".join(device.uuid for device in devices)
    return rank_words(sorted({device.index for device in devices}), "GPU")


def kinds(devices: Sequence[GpuDevice]) -> str:
    """Return "8 × H200", or "H200" for a single one."""
    names = [device.kind for device in devices]
    counted = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(
        name if len(names) == 1 else f"{number} × {name}" for name, number in counted.items()
    )


def _description(allotment: Allotment, request: PoolRequest) -> str:
    """Return a line on the GPUs of the ranks."""
    devices = list({device.word: device for node in allotment.devices for device in node}.values())
    ranks = len(allotment.devices) * allotment.procs_per_node
    if allotment.shared:
        consequence = (
            "collectives by gloo, NCCL refuses that"
            if "torch" in frameworks(request)
            else "each sees it whole"
        )
        return (
            f"{count(ranks, 'rank')} share {count(len(devices), 'GPU')} "
            f"({kinds(devices)}): {consequence}"
        )
    if request.gpu is None and request.procs_per_node is None and ranks > 1:
        return f"{ranks} ranks, one per GPU ({kinds(devices)}); --ranks 1 for one"
    return f"{gpu_words(devices)} ({kinds(devices)})"


def explain_unequal_hosts(hosts: Sequence[str], counts: Sequence[int]) -> str:
    """Return why hosts with different numbers of GPUs cannot form a pool, with a table."""
    width = max(map(len, hosts))
    rows = "\n".join(
        f"    {host:<{width}}  {count(number, 'GPU')}"
        for host, number in zip(hosts, counts, strict=True)
    )
    least = min(counts)
    remedy = f"--gpu {least} takes so many of each" if least else "--gpu none takes none"
    return f"the hosts have unequal numbers of free GPUs:\n{rows}\n  {remedy}; or leave hosts out"
