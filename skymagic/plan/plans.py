"""Plans and inventories: shape of a pool, resources of a machine, the plan as value and text."""

from __future__ import annotations

from dataclasses import dataclass

from skymagic.plan.accelerators import GpuChoice
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.image import Image
from skymagic.plan.limits import first_gpu
from skymagic.plan.masking import masked
from skymagic.plan.requests import PoolRequest
from skymagic.plan.units import count, duration_text


@dataclass(frozen=True)
class Topology:
    """Number of nodes and ranks per node; the ranks of a node are consecutive."""

    nodes: int
    procs_per_node: int

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return self.nodes * self.procs_per_node

    def node_of(self, rank: int) -> int:
        """Return the node that `rank` runs on."""
        return rank // self.procs_per_node

    def local_rank(self, rank: int) -> int:
        """Return the index of `rank` among the ranks of its node."""
        return rank % self.procs_per_node

    def ranks_on(self, node: int) -> range:
        """Return the ranks of `node`."""
        return range(node * self.procs_per_node, (node + 1) * self.procs_per_node)


def topology(request: PoolRequest) -> Topology:
    """Return the topology that `request` describes, before anything is known of machines.

    By default it has one node, with one rank per requested GPU, or else one rank.
    """
    ranks_per_node = 1
    if request.gpu is not None:
        selectors = request.gpu.selectors if isinstance(request.gpu, GpuChoice) else ()
        ranks_per_node = len(selectors) or request.gpu.count or 1
    return Topology(request.nodes or 1, request.procs_per_node or ranks_per_node)


@dataclass(frozen=True)
class Inventory:
    """Resources of a machine; `gpus` are those that CUDA_VISIBLE_DEVICES shows, in its order.

    Hosts with the same `machine` are one machine; it is empty if unknown.
    """

    hostname: str
    cpus: int
    memory_gb: float
    gpus: tuple[GpuDevice, ...] = ()
    python: str = ""
    machine: str = ""
    descriptors: int | None = None
    """Files that one process may open; None for no limit, or if unknown."""
    unusable: str = ""
    """Reason why its GPUs, if any, cannot be used, or "".

    For example a driver that does not answer, or a torch built without CUDA.
    """


@dataclass(frozen=True)
class Plan:
    """The plan of a pool: a value that can be printed, compared and executed.

    Attributes:
        request: the request that it satisfies.
        devices: GPUs that the ranks of each node see; empty if GPUs are left as they are, and for a
            node whose ranks see none.
        gpu_words: lines on the GPUs of ranks, and on others if relevant.
        cpus: CPU cores that a node may use.
        memory_gb: memory of a node.
        price: dollars per hour for the whole pool; None if unknown.
        priced: source of the price: "price list of 2026-11-22"; "" on machines that cost nothing.
        region: region of rented machines; "" for others.
        remote: True if the nodes are on other machines than the notebook's, with separate files.
        set_up: steps needed on the machines before they can be used, as text.
        installs: lines on the installed packages: name, version, build, size, source.
        question: question that the user must confirm (-y) before the start; "" for none.
        notes: further notes before the start.
        ends: deadline by which its machines are taken back, in seconds since 1970; None if unknown.
        notice: seconds between the notification of the ranks and `ends`; 0 for no notification.
    """

    provider: str
    request: PoolRequest
    topology: Topology
    image: Image
    hosts: tuple[str, ...]
    cpus: int
    memory_gb: float
    devices: tuple[tuple[GpuDevice, ...], ...] = ()
    price: float | None = 0.0
    remote: bool = False
    set_up: str = ""
    installs: tuple[str, ...] = ()
    question: str = ""
    priced: str = ""
    region: str = ""
    notes: tuple[str, ...] = ()
    gpu_words: tuple[str, ...] = ()
    ends: float | None = None
    notice: int = 0

    def devices_of(self, rank: int) -> tuple[GpuDevice, ...]:
        """Return the GPUs of `rank`: an equal share of its node's, or one shared with others."""
        shape = self.topology
        node = self.devices[shape.node_of(rank)] if self.devices else ()
        first = first_gpu(shape.local_rank(rank), shape.procs_per_node, len(node))
        return node[first : first + max(1, len(node) // shape.procs_per_node)]

    @property
    def outlives(self) -> bool:
        """True if its ranks continue when the notebook is gone.

        They do so on other machines, and on this one if requested.
        """
        return self.remote or self.request.detached

    @property
    def counted_in_ranks(self) -> bool:
        """True if its size is given in ranks only.

        This holds on this machine with one node, or with one rank per node.
        """
        return not self.remote and 1 in (self.topology.procs_per_node, self.topology.nodes)

    @property
    def size(self) -> str:
        """Size as text: "2 ranks" on this machine, "2 nodes × 8 ranks" on others."""
        shape = self.topology
        ranks, ranks_per_node = count(shape.world_size, "rank"), count(shape.procs_per_node, "rank")
        nodes = f"{count(shape.nodes, 'node')} × {ranks_per_node}"
        return nodes if self.remote else ranks if self.counted_in_ranks else f"{ranks} ({nodes})"

    @property
    def starting(self) -> str:
        """Line on the start of the pool: number of ranks, hosts, cost.

        It is shown even if -y suppresses all questions.
        """
        cost = f": {cost_words(self.price, self.priced)}" if self.region else ""
        gpus = "".join(f"; {line}" for line in self.gpu_words)
        return (
            f"starting {count(self.topology.world_size, 'rank')} on "
            f"{', '.join(self.hosts)}{cost}{gpus}"
        )

    def text(self) -> str:
        """Return the plan as --dry-run prints it, without values of variables."""
        request, shape = self.request, self.topology
        by_node = f" ({shape.nodes} × {shape.procs_per_node}: nodes × ranks on each)"
        default_end = "some time after the notebook" if self.outlives else "with the notebook"
        limits = [
            f"after {duration_text(request.idle)} without a cell" if request.idle else "",
            f"after {duration_text(request.max_lifetime)}" if request.max_lifetime else "",
        ]
        rows = {
            "where": f"{self.provider}: {', '.join(self.hosts)}",
            "ranks": str(shape.world_size) + ("" if self.counted_in_ranks else by_node),
            "GPUs": f"\n{'':13}".join(self.gpu_words) or _gpus_asked_for(request),
            "asks": f"{self.question}: add -y if you mean that" if self.question else "",
            "machine": f"{self.cpus} CPUs"
            + (f" and {self.memory_gb:.12g} GB" if self.memory_gb else ""),
            "container": request.container or "",
            "shows": ", ".join(request.binds),
            "plugins": ", ".join(map(str, request.plugins)),
            "packages": masked(", ".join(self.image.pip)),
            "set-up": self.set_up,
            "installs": "\n".join(self.installs).replace("\n", f"\n{'':13}"),
            "note": f"\n{'':13}".join(
                filter(None, ("; ".join(self.image.repeated()), *self.notes))
            ),
            "variables": ", ".join(
                [*self.image.env, *(f"{name} (secret)" for name in request.secrets)]
            ),
            "ends": " or ".join(filter(None, limits)) or f"{default_end}, or by %sky_down",
            "price": cost_words(self.price, self.priced)
            + (f" (at most ${request.max_price:.2f})" if request.max_price is not None else ""),
        }
        title = f"Plan of pool {request.name!r}" if request.name else "Plan of a pool"
        return "\n".join([title, *(f"  {key:<10} {value}" for key, value in rows.items() if value)])


def _gpus_asked_for(request: PoolRequest) -> str:
    """Return the requested GPUs of machines that do not exist yet."""
    gpu = request.accelerator
    return f"{gpu.count} × {gpu.name} on each node" if gpu else str(request.gpu or "none asked for")


def cost_words(price: float | None, priced: str) -> str:
    """Return a price: "$87.83 per hour (price list of 2026-11-22)", "price unknown"."""
    return (
        "price unknown"
        if price is None
        else f"${price:.2f} per hour" + (f" ({priced})" if priced else "")
    )
