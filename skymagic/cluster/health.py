"""How nodes are: what their own programs have said, read, and judged in words; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from skymagic.display.text import html_table, table
from skymagic.plan.units import agreeing, count, size

HARDWARE_XIDS: Mapping[int, str] = {
    48: "double-bit ECC error",
    62: "internal micro-controller halted",
    63: "memory row remapped: the GPU has to be reset",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "its system processor (GSP) does not answer",
    120: "its system processor (GSP) failed",
    140: "unrecovered ECC error",
}
"""Numbers of NVIDIA's page "XID Errors" that mean the hardware. Others (13, 31, 43, 45) are the programs' own faults."""
LEAST_DISK = 10_000_000_000  # bytes: an environment with torch takes some 6 GB
CLOCK_SECONDS = 1.0  # clocks further apart than this make logs, caches and signed requests wrong
HEADINGS = ("node", "GPUs", "driver", "ECC and Xid", "disk free", "clock", "verdict")


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi lists it; None for what it does not tell.

    Attributes:
        used: bytes of its memory. busy: percent. errors: uncorrected ECC errors since its driver was loaded.
    """

    index: int
    name: str
    driver: str
    used: int | None = None
    busy: int | None = None
    errors: int | None = None


def gpus(listed: str) -> tuple[Gpu, ...]:
    """GPUs as nvidia-smi lists `wire.check.GPU_FIELDS`, as CSV without headings and units; lines that are none are left out."""
    found = []
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 6 and cells[0].isdigit():
            used, busy, errors = map(_number, cells[3:])
            found.append(
                Gpu(int(cells[0]), cells[1], cells[2], used and used * 1_048_576, busy, errors)
            )
    return tuple(found)


def _number(cell: str) -> int | None:
    """``[N/A]``, ``[Not Supported]`` and the like are None."""
    return int(cell) if cell.isdigit() else None


@dataclass(frozen=True)
class Xid:
    """An error that the GPU's driver has written to the kernel's log: where, its number, and its words."""

    device: str
    number: int
    words: str


def xids(lines: Iterable[str]) -> tuple[Xid, ...]:
    """Errors in lines of the kernel's log, each device and number once."""
    found: dict[tuple[str, int], Xid] = {}
    for line in lines:
        if match := re.search(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)(?:, (.*))?", line):
            found.setdefault(
                (match[1], int(match[2])), Xid(match[1], int(match[2]), (match[3] or "").strip())
            )
    return tuple(found.values())


@dataclass(frozen=True)
class Health:
    """How a node is.

    Attributes:
        unreached: why it could not be asked; then nothing else is known.
        complaint: what nvidia-smi has said instead of listing GPUs.
        strangers: processes on its GPUs that are none of the pool's; None where nobody tells.
        xids: None where the kernel's log may not be read.
        efa_unused: whether it has EFA's network cards, and NCCL has no plugin for them.
        ahead: seconds that its clock is ahead of the notebook's. unsure: how wrong that may be.
    """

    name: str
    unreached: str = ""
    gpus: tuple[Gpu, ...] = ()
    complaint: str = ""
    strangers: tuple[int, ...] | None = ()
    xids: tuple[Xid, ...] | None = ()
    efa_unused: bool = False
    disk_free: int = 0
    ahead: float = 0.0
    unsure: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a node.

    Attributes:
        broken: whether the node cannot be worked with; else it is only worth knowing.
    """

    node: int
    words: str
    broken: bool = False


@dataclass(frozen=True)
class Findings:
    """What a check of a pool has found: text in a terminal, a table in a notebook.

    Attributes:
        expected: GPUs that each node should have; 0 where none are asked for.
    """

    nodes: tuple[Health, ...]
    expected: int = 0

    @property
    def verdicts(self) -> list[Verdict]:
        """All that is wrong, by node."""
        drivers = Counter(gpu.driver for node in self.nodes for gpu in node.gpus)
        usual = drivers.most_common(1)[0][0] if drivers else ""
        clocks = median([node.ahead for node in self.nodes if not node.unreached] or [0.0])
        found: list[Verdict] = []
        for index, node in enumerate(self.nodes):
            found += [Verdict(index, words, broken=True) for words in _broken(node, self.expected)]
            if not node.unreached:
                found += [
                    Verdict(index, words) for words in (*_worth(node, usual), *_clock(node, clocks))
                ]
        return sorted(found, key=lambda one: one.node)

    @property
    def broken(self) -> list[int]:
        """Numbers of the nodes that cannot be worked with."""
        return sorted({one.node for one in self.verdicts if one.broken})

    @property
    def may_pass(self) -> bool:
        """Whether what is wrong may be of the moment: a node that was not reached."""
        return any(node.unreached for node in self.nodes)

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each node, as cells."""
        words: dict[int, list[str]] = {}
        for one in self.verdicts:
            words.setdefault(one.node, []).append(one.words)
        return [
            (*self._cells(node), "; ".join(words.get(n, [])) or "good")
            for n, node in enumerate(self.nodes)
        ]

    def _cells(self, node: Health) -> tuple[str, ...]:
        if node.unreached:
            return (node.name, *["-"] * (len(HEADINGS) - 2))
        kinds = Counter(gpu.name for gpu in node.gpus)
        return (
            node.name,
            ", ".join(f"{number} × {name}" for name, number in kinds.items()) or "none",
            ", ".join(sorted({gpu.driver for gpu in node.gpus})) or "-",
            _errors(node),
            size(node.disk_free),
            _clock_text(node),
        )

    def text(self) -> str:
        """The table as text."""
        return table([HEADINGS, *self.rows()])

    def html(self) -> str:
        """The table as HTML."""
        return html_table([HEADINGS, *self.rows()])

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.html()


def _broken(node: Health, expected: int) -> list[str]:
    """Why a node cannot be worked with."""
    if node.unreached:
        return [f"not checked: {node.unreached}"]
    found = []
    if node.complaint and (expected or not node.gpus):
        found.append(f"nvidia-smi: {' '.join(node.complaint.split())[:300]}")
    elif len(node.gpus) < expected:
        found.append(f"{count(len(node.gpus), 'GPU')}, and {expected} should be there")
    found += [
        f"GPU {gpu.index} has {count(gpu.errors, 'uncorrected ECC error')}"
        for gpu in node.gpus
        if gpu.errors
    ]
    for one in node.xids or ():
        if one.number in HARDWARE_XIDS:
            found.append(f"GPU at {one.device}: {HARDWARE_XIDS[one.number]} (Xid {one.number})")
    return found


def _worth(node: Health, usual: str) -> list[str]:
    """What is worth knowing of a node."""
    found = []
    if others := sorted({gpu.driver for gpu in node.gpus} - {usual}):
        found.append(f"driver {', '.join(others)}, where most have {usual}")
    if node.strangers:
        pids = ", ".join(map(str, node.strangers))
        found.append(
            f"its GPUs are in use: {agreeing(len(node.strangers), 'process', 'processes')} {pids}"
        )
    elif node.strangers is None and any((gpu.busy or 0) > 10 for gpu in node.gpus):
        found.append("its GPUs are at work")
    failed = [one for one in node.xids or () if one.number not in HARDWARE_XIDS]
    found += [
        f"a program has failed on the GPU at {one.device} (Xid {one.number})" for one in failed
    ]
    if node.efa_unused:
        found.append(
            "it has EFA, and not aws-ofi-nccl: NCCL uses TCP (install the plugin, or take the image for GPUs)"
        )
    if node.disk_free < LEAST_DISK:
        found.append(f"{size(node.disk_free)} of its disk free")
    return found


def _clock(node: Health, usual: float) -> list[str]:
    """Whether its clock differs from the notebook's, or from that of most others."""
    wrong = max(abs(node.ahead), abs(node.ahead - usual)) - node.unsure
    return [f"its clock is {_clock_text(node)}"] if wrong > CLOCK_SECONDS else []


def _clock_text(node: Health) -> str:
    if abs(node.ahead) <= max(node.unsure, 0.001):
        return "same"
    return f"{abs(node.ahead):.3g} s {'ahead' if node.ahead > 0 else 'behind'}"


def _errors(node: Health) -> str:
    if not (node.gpus or node.complaint):
        return "-"
    told = [gpu.errors for gpu in node.gpus if gpu.errors is not None]
    ecc = f"{sum(told)} ECC" if told else "ECC not told"
    if node.xids is None:
        return f"{ecc}, log not readable"
    numbers = sorted({one.number for one in node.xids})
    return f"{ecc}, Xid {', '.join(map(str, numbers))}" if numbers else f"{ecc}, no Xid"
