"""GPUs of a machine: what its driver lists, which of them are asked for, and which each node of a pool gets. Pure.

One number is a rank's everywhere: `first_gpu`. Ranks of a node see one list of UUIDs (CUDA_VISIBLE_DEVICES) and take theirs by it, as under
torchrun: UUIDs are right on machines with several kinds of GPUs, where CUDA counts in another order than nvidia-smi.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from skymagic.errors import RequestError
from skymagic.plan.accelerators import Accelerator, GpuChoice, known_as, matches
from skymagic.plan.limits import first_gpu
from skymagic.plan.requests import PoolRequest
from skymagic.plan.units import count, rank_words

FIELDS = "index,uuid,name,memory.total,compute_mode,mig.mode.current"
"""What nvidia-smi is asked for; drivers before MIG (R450) know all but the last."""
APPLICATIONS = "gpu_uuid,pid,process_name,used_memory"
HOLD = "skymagic/gpu/"
"""Begins the names of the abstract sockets by which agents hold GPUs: ``HOLD + UUID``, and ``HOLD + UUID/JOB_ID/POOL`` to be read."""
FRAMEWORKS = {"torch": "torch", "accelerate": "torch", "jax": "jax"}
"""Plugins that use GPUs → what they use them by; keras uses its backend."""


@dataclass(frozen=True)
class GpuDevice:
    """One GPU that CUDA can open, or a part of one (MIG).

    Attributes:
        uuid: ``"GPU-…"`` or ``"MIG-…"``; "" on a machine that is not there yet.
        index: its number in nvidia-smi's list; of a part, its GPU's.
        mode: compute mode: ``"Default"``, ``"Exclusive_Process"``, ``"Prohibited"``.
        part: the profile of a part: ``"1g.18gb"``.
        users: other processes that use it, in words.
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
        """The device as CUDA_VISIBLE_DEVICES takes it."""
        return self.uuid or str(self.index)

    @property
    def kind(self) -> str:
        """``H200``, ``MIG 1g.18gb of H200``."""
        return f"MIG {self.part} of {known_as(self.name)}" if self.part else known_as(self.name)

    @property
    def taken(self) -> str:
        """Why it is not free, in words; "" where it is."""
        if self.held[0]:
            return f"taken by pool {self.held[1]!r}"
        if self.mode == "Prohibited":
            return "closed to all (compute mode Prohibited)"
        return f"in use by {', '.join(self.users)}" if self.users else ""


def named(*names: str) -> tuple[GpuDevice, ...]:
    """GPUs of which only the driver's names are known."""
    return tuple(GpuDevice("", name, index) for index, name in enumerate(names))


def listed(
    rows: Iterable[str],
    tree: Iterable[str] = (),
    applications: Iterable[str] = (),
    held: Iterable[str] = (),
    own: Collection[int] = (),
) -> tuple[GpuDevice, ...]:
    """What nvidia-smi says as devices; a GPU that is parted (MIG) stands for its parts.

    Args:
        rows: its table of `FIELDS`, without units. tree: ``nvidia-smi -L``. applications: its table of `APPLICATIONS`.
        held: names of sockets that begin with `HOLD`.
        own: process ids that do not count as others.
    """
    parts: dict[int, list[tuple[str, str]]] = {}
    here = -1
    for line in tree:
        if found := re.match(r"GPU (\d+):", line):
            here = int(found[1])
        elif found := re.match(r"\s*MIG (\S+)\s.*\(UUID: (MIG-[^)]+)\)", line):
            parts.setdefault(here, []).append((found[1], found[2]))
    users: dict[str, list[str]] = {}
    for line in applications:
        uuid, pid, name, memory = ([one.strip() for one in line.split(",", 3)] + [""] * 4)[:4]
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
        whole = GpuDevice(
            uuid, name, int(index), round(size, 1), mode, "", tuple(users.get(uuid, ()))
        )
        each = [
            replace(whole, uuid=part, part=profile, memory_gb=0.0)
            for profile, part in parts.get(int(index), ())
        ]
        devices += each or ([] if mig == "Enabled" else [whole])
    return tuple(replace(device, held=holders.get(device.uuid, ("", ""))) for device in devices)


def _holder(name: str) -> tuple[str, tuple[str, str]]:
    uuid, job, pool = name.removeprefix(HOLD).split("/", 2)
    return uuid, (job, pool)


def visible(devices: Sequence[GpuDevice], said: str | None) -> tuple[GpuDevice, ...]:
    """The devices that CUDA_VISIBLE_DEVICES shows, in its order; None where it is not set.

    The list ends at the first entry that is no device, as CUDA reads it, and where one is named twice there are none. Numbers count as
    nvidia-smi does.
    """
    if said is None:
        return tuple(devices)
    found: list[GpuDevice] = []
    for word in map(str.strip, said.split(",")):
        fitting = _called(devices, word)
        if not fitting:
            break
        if fitting[0] in found:
            return ()
        found.append(fitting[0])
    return tuple(found)


def _called(devices: Iterable[GpuDevice], word: str) -> list[GpuDevice]:
    if word.isdigit():
        return [one for one in devices if one.index == int(word)][:1]
    fitting = [
        one for one in devices if re.match(r"(GPU|MIG)-", word) and one.uuid.startswith(word)
    ]
    return fitting if len(fitting) == 1 else []


def frameworks(request: PoolRequest) -> frozenset[str]:
    """By what a pool's plugins use GPUs: torch, jax."""
    names = [
        str((spec.options or {}).get("backend", "jax"))
        if spec.name == "keras"
        else FRAMEWORKS.get(spec.name, "")
        for spec in request.plugins
    ]
    return frozenset(names) & {"torch", "jax"}


def wanted(request: PoolRequest) -> bool:
    """Whether a pool takes GPUs where there are any: it asks for them, or a plugin uses them."""
    return asked(request) or (request.gpu is None and bool(frameworks(request)))


def asked(request: PoolRequest) -> bool:
    """Whether the user has asked for GPUs of any kind."""
    return request.gpu is not None and not (
        isinstance(request.gpu, GpuChoice) and request.gpu.count == 0
    )


@dataclass(frozen=True)
class Allotment:
    """GPUs of each node, and the ranks that share them; `words` are what the user hears of it."""

    devices: tuple[tuple[GpuDevice, ...], ...] = ()
    procs_per_node: int = 1
    words: tuple[str, ...] = ()

    @property
    def shared(self) -> bool:
        """Whether ranks share a GPU, also ranks of several nodes."""
        words = [one.word for node in self.devices for one in node]
        return any(0 < len(node) < self.procs_per_node for node in self.devices) or len(
            set(words)
        ) < len(words)


def allot(request: PoolRequest, here: Sequence[GpuDevice], nodes: int, machine: str) -> Allotment:
    """GPUs for so many nodes of one machine, each with its own where there are enough.

    Args:
        here: those that are visible there. machine: its name.

    Raises RequestError with what there is, where what is asked for is not, or other pools have all of it.
    """
    gpu = request.gpu
    fitting = _fitting(gpu, here)
    barred = [one for one in fitting if _barred(one, request.resizes)]
    used = [one for one in fitting if one.users and one not in barred]
    free = [one for one in fitting if one not in barred and one not in used]
    each = gpu.count if gpu is not None else None
    if isinstance(gpu, GpuChoice) and gpu.words:
        if nodes > 1:
            raise RequestError(
                f"--gpu {gpu} names GPUs of one node, and {machine} has {nodes}: write --gpu {len(gpu.words)}"
            )
        each = len(gpu.words)
        chosen = [one for one in fitting if one not in barred]
    elif each is not None:
        chosen = sorted([*free, *used][: each * nodes], key=here.index)
    else:
        chosen = [
            one for one in fitting if one in free or (one in used and (gpu is not None or not free))
        ]
    if (gpu is not None or fitting) and len(chosen) < (each or 1) * (nodes if each else 1):
        raise RequestError(_refusal(gpu, here, len(chosen), (each or 1) * nodes, machine, barred))
    if not chosen:
        return Allotment(procs_per_node=request.procs_per_node or 1)
    devices = _parted(chosen, nodes)
    per_node = request.procs_per_node or min(map(len, devices))
    if isinstance(gpu, Accelerator) and gpu.count > per_node and gpu.count % per_node:
        raise RequestError(uneven(gpu.count, per_node))
    if any(
        len(node) > per_node and len(node) % per_node for node in devices
    ):  # a GPU each, and the others stay free
        devices = tuple(node[:per_node] for node in devices)
    made = Allotment(devices, per_node)
    taken = [one for node in devices for one in node]
    exclusive = [one for one in taken if one.mode == "Exclusive_Process"]
    if made.shared and exclusive:
        raise RequestError(
            f"{gpu_words(exclusive)} of {machine} serves one process at a time (compute mode Exclusive_Process): ask for one rank per GPU"
        )
    notes = [f"left out: {taken_words([one for one in fitting if one not in taken])}"]
    notes += [f"shared with others: {taken_words([one for one in taken if one.users])}"]
    notes = [note for note in notes if not note.endswith(": ")]
    return replace(made, words=(_words(made, request), *notes))


def _fitting(gpu: Accelerator | GpuChoice | None, here: Sequence[GpuDevice]) -> list[GpuDevice]:
    if isinstance(gpu, GpuChoice) and gpu.words:
        return [one for word in gpu.words for one in _called(here, word)]
    return [one for one in here if not isinstance(gpu, Accelerator) or matches(gpu.name, one.name)]


def _barred(device: GpuDevice, own: str) -> bool:
    """Whether nobody may take it: another pool has it, or its mode lets no process more in."""
    return (
        device.held[0] not in ("", own)
        or device.mode == "Prohibited"
        or (device.mode == "Exclusive_Process" and bool(device.users))
    )


def _parted(chosen: Sequence[GpuDevice], nodes: int) -> tuple[tuple[GpuDevice, ...], ...]:
    """Equal parts for the nodes; with fewer GPUs than nodes, nodes share them."""
    share = len(chosen) // nodes
    if share == 0:
        return tuple((chosen[first_gpu(node, nodes, len(chosen))],) for node in range(nodes))
    return tuple(tuple(chosen[node * share : (node + 1) * share]) for node in range(nodes))


def uneven(gpus: int, procs_per_node: int) -> str:
    """Why so many GPUs are not shared by so many ranks."""
    return (
        f"{gpus} GPUs per node cannot be shared by {procs_per_node} ranks per node equally; "
        "leave --procs-per-node out for one rank per GPU"
    )


def _refusal(
    gpu: Accelerator | GpuChoice | None,
    here: Sequence[GpuDevice],
    there: int,
    needed: int,
    machine: str,
    barred: Sequence[GpuDevice],
) -> str:
    has = f" (it has: {table(here)})" if here else ""
    if barred:
        return f"{machine} has too few free GPUs: {taken_words(barred)}{has}; wait, ask for others, or take CPUs with --gpu none"
    name = gpu.name if isinstance(gpu, Accelerator) else "GPU"
    if isinstance(gpu, GpuChoice) and gpu.words:
        lacks = [word for word in gpu.words if not _called(here, word)]
        return f"{machine} has no GPU {', '.join(lacks)}{has}"
    return f"{machine} has {f'{there} {name} of {needed}' if there else f'no {name}'}{has}"


def taken_words(devices: Sequence[GpuDevice]) -> str:
    """Which of these are not free, and why, as in "GPUs 0, 1 taken by pool 'main'"."""
    why = {
        one.taken: [other for other in devices if other.taken == one.taken]
        for one in devices
        if one.taken
    }
    return "; ".join(f"{gpu_words(group)} {words}" for words, group in why.items())


def table(here: Sequence[GpuDevice]) -> str:
    """What there is, as in "GPU 0: NVIDIA H200 (GPU-00000000…), GPU 1: …"; "none" for nothing."""
    if here and not any(one.uuid for one in here):
        return ", ".join(one.name for one in here)
    return (
        ", ".join(
            f"{one.index}: {one.name}{f' {one.part}' if one.part else ''} ({one.uuid[:12]}…)"
            for one in here
        )
        or "none"
    )


def gpu_words(devices: Sequence[GpuDevice]) -> str:
    """ "GPU 0", "GPUs 0–3"; parts of GPUs by their UUIDs."""
    if any(one.part for one in devices):
        return ", ".join(one.uuid for one in devices)
    return rank_words(sorted({one.index for one in devices}), "GPU")


def kinds(devices: Sequence[GpuDevice]) -> str:
    """ "8 × H200", "H200" of one."""
    names = [one.kind for one in devices]
    counted = {name: names.count(name) for name in dict.fromkeys(names)}
    return ", ".join(
        name if len(names) == 1 else f"{number} × {name}" for name, number in counted.items()
    )


def _words(made: Allotment, request: PoolRequest) -> str:
    """Which rank has what, in a line."""
    taken = list({one.word: one for node in made.devices for one in node}.values())
    ranks = len(made.devices) * made.procs_per_node
    if made.shared:
        how = (
            "collectives by gloo, NCCL refuses that"
            if "torch" in frameworks(request)
            else "each sees it whole"
        )
        return f"{count(ranks, 'rank')} share {count(len(taken), 'GPU')} ({kinds(taken)}): {how}"
    if request.gpu is None and request.procs_per_node is None and ranks > 1:
        return f"{ranks} ranks, one per GPU ({kinds(taken)}); --ranks 1 for one"
    return f"{gpu_words(taken)} ({kinds(taken)})"


def unequal(hosts: Sequence[str], counts: Sequence[int]) -> str:
    """Why hosts with these numbers of GPUs make no pool, as a table."""
    width = max(map(len, hosts))
    rows = "\n".join(
        f"    {host:<{width}}  {count(number, 'GPU')}"
        for host, number in zip(hosts, counts, strict=True)
    )
    least = min(counts)
    remedy = f"--gpu {least} takes so many of each" if least else "--gpu none takes none"
    return f"the hosts have unequal numbers of free GPUs:\n{rows}\n  {remedy}; or leave hosts out"
