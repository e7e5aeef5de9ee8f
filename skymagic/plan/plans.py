"""What will run, and what there is: the shape of a pool, a machine's inventory, the plan as a value and as text."""

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
    """How many ranks, and where: ranks of a node are neighbours."""

    nodes: int
    procs_per_node: int

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.procs_per_node

    def node_of(self, rank: int) -> int:
        """The node that `rank` runs on."""
        return rank // self.procs_per_node

    def local_rank(self, rank: int) -> int:
        """The place of `rank` among the ranks of its node."""
        return rank % self.procs_per_node

    def ranks_on(self, node: int) -> range:
        """The ranks of `node`."""
        return range(node * self.procs_per_node, (node + 1) * self.procs_per_node)


def topology(request: PoolRequest) -> Topology:
    """The ranks that `request` asks for, before anything is known of machines: 1 node unless said, one rank per GPU asked for, else 1."""
    asked = 1
    if request.gpu is not None:
        words = request.gpu.words if isinstance(request.gpu, GpuChoice) else ()
        asked = len(words) or request.gpu.count or 1
    return Topology(request.nodes or 1, request.procs_per_node or asked)


@dataclass(frozen=True)
class Inventory:
    """What a machine has; `gpus` are those that CUDA_VISIBLE_DEVICES shows, in its order.

    Two hosts of one `machine` are one machine; empty where nobody knows.
    """

    hostname: str
    cpus: int
    memory_gb: float
    gpus: tuple[GpuDevice, ...] = ()
    python: str = ""
    machine: str = ""
    descriptors: int | None = None
    """Files that one process may have open; None for no limit, or where nobody tells."""
    unusable: str = ""
    """Why its GPUs, if any, cannot be used, in words: a driver that does not answer, a torch that is built without CUDA."""


@dataclass(frozen=True)
class Plan:
    """What will run: a value that prints, compares and is carried out as it stands.

    Attributes:
        request: what it answers.
        devices: for each node, the GPUs that its ranks see; empty where nothing is said of GPUs, and of a node that is to see none.
        gpu_words: which GPUs ranks have, and what is worth knowing of others.
        cpus: CPU cores that a node may use. memory_gb: its memory.
        price: dollars per hour for the whole pool; None where nobody tells.
        priced: where the price is from: "price list of 2026-11-22"; "" on machines that nobody is paid for.
        region: where its machines are rented; "" for others.
        remote: whether the nodes are other machines than the notebook's, each with files of its own.
        set_up: what has to be done on the machines before they can be used, in words.
        installs: lines on what is installed there: name, version, build, size, source.
        question: what the user has to confirm (-y) before it is made; "" for nothing.
        notes: what else is worth knowing before it is made.
        ends: when its machines are taken back in any case, in seconds since 1970; None where nobody says.
        notice: seconds before that at which ranks hear of it; 0 for none.
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
        """The GPUs of `rank`: an equal share of its node's, or one that it shares with other ranks."""
        shape = self.topology
        node = self.devices[shape.node_of(rank)] if self.devices else ()
        first = first_gpu(shape.local_rank(rank), shape.procs_per_node, len(node))
        return node[first : first + max(1, len(node) // shape.procs_per_node)]

    @property
    def outlives(self) -> bool:
        """Whether its ranks go on when the notebook is gone: on other machines, and on this one where that was asked for."""
        return self.remote or self.request.detached

    @property
    def counted_in_ranks(self) -> bool:
        """Whether its size is told in ranks alone: on this machine, where it is one node, or each node is one rank."""
        return not self.remote and 1 in (self.topology.procs_per_node, self.topology.nodes)

    @property
    def size(self) -> str:
        """How large it is: "2 ranks" on this machine, "2 nodes × 8 ranks" on others."""
        shape = self.topology
        ranks, each = count(shape.world_size, "rank"), count(shape.procs_per_node, "rank")
        nodes = f"{count(shape.nodes, 'node')} × {each}"
        return nodes if self.remote else ranks if self.counted_in_ranks else f"{ranks} ({nodes})"

    @property
    def starting(self) -> str:
        """What starts, where, and what it costs if anything: -y leaves nothing to ask, and this is said all the same."""
        cost = f": {cost_words(self.price, self.priced)}" if self.region else ""
        gpus = "".join(f"; {words}" for words in self.gpu_words)
        return f"starting {count(self.topology.world_size, 'rank')} on {', '.join(self.hosts)}{cost}{gpus}"

    def text(self) -> str:
        """The plan as --dry-run prints it, without values of variables."""
        asked, shape = self.request, self.topology
        by_node = f" ({shape.nodes} × {shape.procs_per_node}: nodes × ranks on each)"
        gone = "some time after the notebook" if self.outlives else "with the notebook"
        limits = [
            f"after {duration_text(asked.idle)} without a cell" if asked.idle else "",
            f"after {duration_text(asked.max_lifetime)}" if asked.max_lifetime else "",
        ]
        rows = {
            "where": f"{self.provider}: {', '.join(self.hosts)}",
            "ranks": str(shape.world_size) + ("" if self.counted_in_ranks else by_node),
            "GPUs": f"\n{'':13}".join(self.gpu_words) or _gpus_asked_for(asked),
            "asks": f"{self.question}: add -y if you mean that" if self.question else "",
            "machine": f"{self.cpus} CPUs"
            + (f" and {self.memory_gb:.12g} GB" if self.memory_gb else ""),
            "plugins": ", ".join(map(str, asked.plugins)),
            "packages": masked(", ".join(self.image.pip)),
            "set-up": self.set_up,
            "installs": "\n".join(self.installs).replace("\n", f"\n{'':13}"),
            "note": f"\n{'':13}".join(
                filter(None, ("; ".join(self.image.repeated()), *self.notes))
            ),
            "variables": ", ".join(
                [*self.image.env, *(f"{name} (secret)" for name in asked.secrets)]
            ),
            "ends": " or ".join(filter(None, limits)) or f"{gone}, or by %sky_down",
            "price": cost_words(self.price, self.priced)
            + (f" (at most ${asked.max_price:.2f})" if asked.max_price is not None else ""),
        }
        title = f"Plan of pool {asked.name!r}" if asked.name else "Plan of a pool"
        return "\n".join([title, *(f"  {key:<10} {value}" for key, value in rows.items() if value)])


def _gpus_asked_for(request: PoolRequest) -> str:
    """GPUs of machines that are not there yet."""
    gpu = request.accelerator
    return f"{gpu.count} × {gpu.name} on each node" if gpu else str(request.gpu or "none asked for")


def cost_words(price: float | None, priced: str) -> str:
    """A price in words: "$87.83 per hour (price list of 2026-11-22)", "price unknown"."""
    return (
        "price unknown"
        if price is None
        else f"${price:.2f} per hour" + (f" ({priced})" if priced else "")
    )
