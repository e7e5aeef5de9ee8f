"""Judge the state of nodes: GPUs and their drivers, ECC and Xid errors, disks and clocks; pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from skymagic.display.text import html_table, table
from skymagic.plan.units import count, size

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
"""Hardware errors among those on NVIDIA's page "XID Errors".

Others (13, 31, 43, 45) are program faults.
"""
LEAST_DISK = 10_000_000_000  # bytes: an environment with torch takes some 6 GB
CLOCK_SECONDS = 1.0  # clocks further apart than this make logs, caches and signed requests wrong
HEADINGS = ("node", "GPUs", "driver", "ECC and Xid", "disk free", "clock", "verdict")


@dataclass(frozen=True)
class Gpu:
    """A GPU in nvidia-smi's list; `errors` are uncorrected ECC errors, None if not reported."""

    index: int
    name: str
    driver: str
    errors: int | None = None


def gpus(listed: str) -> tuple[Gpu, ...]:
    """Parse nvidia-smi's list of `wire.check.GPU_FIELDS` (CSV without headings or units).

    Other lines are ignored.
    """
    gpus_listed = []
    for line in listed.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[0].isdigit():
            # [N/A], [Not Supported] and the like are not numbers.
            errors = int(cells[3]) if cells[3].isdigit() else None
            gpus_listed.append(Gpu(int(cells[0]), cells[1], cells[2], errors))
    return tuple(gpus_listed)


@dataclass(frozen=True)
class Xid:
    """An error logged by the GPU's driver: the PCI address of the GPU, and the error number."""

    device: str
    number: int


def xids(log: Iterable[str]) -> tuple[Xid, ...]:
    """Parse errors from lines of the kernel's log, each device and number once."""
    matches = (re.search(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+)", line) for line in log)
    # a broken GPU logs the same error thousands of times
    return tuple(dict.fromkeys(Xid(match[1], int(match[2])) for match in matches if match))


@dataclass(frozen=True)
class Health:
    """State of a node.

    Attributes:
        unreached: reason why it could not be checked; then nothing else is known.
        complaint: output of nvidia-smi when it did not list GPUs.
        xids: None if the kernel's log is not readable.
        disk_free: in bytes.
        clock_offset: seconds that its clock is ahead of the notebook's.
        clock_error: error bound of `clock_offset`, in seconds.
    """

    name: str
    unreached: str = ""
    gpus: tuple[Gpu, ...] = ()
    complaint: str = ""
    xids: tuple[Xid, ...] | None = ()
    disk_free: int = 0
    clock_offset: float = 0.0
    clock_error: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """A problem of a node; `broken` if the node cannot be used, else only worth knowing."""

    node: int
    problem: str
    broken: bool = False


@dataclass(frozen=True)
class Findings:
    """Result of a check: a table, as text in a terminal and as HTML in a notebook.

    Attributes:
        expected: GPUs that each node should have; 0 if no number is required.
    """

    nodes: tuple[Health, ...]
    expected: int = 0

    @property
    def verdicts(self) -> list[Verdict]:
        """Problems of all nodes, in node order."""
        drivers = Counter(gpu.driver for node in self.nodes for gpu in node.gpus)
        usual = drivers.most_common(1)[0][0] if drivers else ""
        # The median and not the mean: one clock that is hours off must not make the others look
        # wrong.
        clock = median([node.clock_offset for node in self.nodes if not node.unreached] or [0.0])
        verdicts = []
        for index, node in enumerate(self.nodes):
            for text in _problems_of(node, self.expected):
                verdicts.append(Verdict(index, text, broken=True))
            for text in [] if node.unreached else _notes_of(node, usual, clock):
                verdicts.append(Verdict(index, text))
        return verdicts

    @property
    def broken(self) -> list[int]:
        """Numbers of the nodes that cannot be used."""
        return sorted({verdict.node for verdict in self.verdicts if verdict.broken})

    @property
    def may_pass(self) -> bool:
        """True if a repeated check may find fewer problems, because a node was not reached."""
        return any(node.unreached for node in self.nodes)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table cells of each node."""
        texts: dict[int, list[str]] = {}
        for verdict in self.verdicts:
            texts.setdefault(verdict.node, []).append(verdict.problem)
        return [
            (*_cells(node), "; ".join(texts.get(index, [])) or "good")
            for index, node in enumerate(self.nodes)
        ]

    def __repr__(self) -> str:
        return table([HEADINGS, *self.rows()])

    def _repr_html_(self) -> str:
        return html_table([HEADINGS, *self.rows()])


def _problems_of(node: Health, expected: int) -> list[str]:
    """Return the reasons why a node cannot be used."""
    if node.unreached:
        return [f"not checked: {node.unreached}"]
    reasons = []
    # nvidia-smi may list the working GPUs and complain about another one that nobody asked for
    if node.complaint and (expected or not node.gpus):
        reasons.append(f"nvidia-smi: {' '.join(node.complaint.split())[:300]}")
    elif len(node.gpus) < expected:
        reasons.append(f"{count(len(node.gpus), 'GPU')}, and {expected} should be there")
    reasons += [
        f"GPU {gpu.index} has {count(gpu.errors, 'uncorrected ECC error')}"
        for gpu in node.gpus
        if gpu.errors
    ]
    return reasons + [
        f"GPU at {xid.device}: {HARDWARE_XIDS[xid.number]} (Xid {xid.number})"
        for xid in node.xids or ()
        if xid.number in HARDWARE_XIDS
    ]


def _notes_of(node: Health, usual_driver: str, usual_clock: float) -> list[str]:
    notes = []
    if other_drivers := sorted({gpu.driver for gpu in node.gpus} - {usual_driver}):
        notes.append(f"driver {', '.join(other_drivers)}, where most have {usual_driver}")
    notes += [
        f"a program has failed on the GPU at {xid.device} (Xid {xid.number})"
        for xid in node.xids or ()
        if xid.number not in HARDWARE_XIDS
    ]
    if node.disk_free < LEAST_DISK:
        notes.append(f"{size(node.disk_free)} of its disk free")
    # Its clock may differ from the notebook's, or from those of the other nodes. The error bound is
    # subtracted, because over a slow connection the measurement is uncertain by half a round trip.
    if (
        max(abs(node.clock_offset), abs(node.clock_offset - usual_clock)) - node.clock_error
        > CLOCK_SECONDS
    ):
        notes.append(f"its clock is {_clock(node)}")
    return notes


def _cells(node: Health) -> tuple[str, ...]:
    if node.unreached:
        return (node.name, *["-"] * (len(HEADINGS) - 2))
    kinds = Counter(gpu.name for gpu in node.gpus)
    return (
        node.name,
        ", ".join(f"{number} × {name}" for name, number in kinds.items()) or "none",
        ", ".join(sorted({gpu.driver for gpu in node.gpus})) or "-",
        _errors(node),
        size(node.disk_free),
        _clock(node),
    )


def _clock(node: Health) -> str:
    if abs(node.clock_offset) <= max(node.clock_error, 0.001):
        return "same"
    return f"{abs(node.clock_offset):.3g} s {'ahead' if node.clock_offset > 0 else 'behind'}"


def _errors(node: Health) -> str:
    if not (node.gpus or node.complaint):
        return "-"
    # consumer GPUs report no ECC errors at all, and the sum of nothing must not read as 0 errors
    errors = [gpu.errors for gpu in node.gpus if gpu.errors is not None]
    ecc = f"{sum(errors)} ECC" if errors else "ECC not told"
    if node.xids is None:
        return f"{ecc}, log not readable"
    numbers = sorted({xid.number for xid in node.xids})
    return f"{ecc}, Xid {', '.join(map(str, numbers))}" if numbers else f"{ecc}, no Xid"
