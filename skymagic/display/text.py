"""Text in the notebook: output of ranks, tables, and positions of ranks in code; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

from skymagic.data.capture.numbering import CELL_FILE
from skymagic.plan import accelerators
from skymagic.plan.distributions import Environment
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.units import count, duration_text, ranges, rank_words, size
from skymagic.wire.queries import Stack, StackFrame
from skymagic.wire.untrusted import sanitized_line

MAX_STATUS_ROWS = 64
"""Maximum number of ranks that get a row each."""
SHOWN_PLACES = 8
"""Maximum number of different positions in one line."""
INTERPRETER_HELD = "native code holds the interpreter"
NO_ANSWER = f"does not answer: {INTERPRETER_HELD}"


def last_state(line: str) -> str:
    """Return the final state of a line that was redrawn with carriage returns, as in a terminal."""
    return line.rstrip("\r").rpartition("\r")[2] if "\r" in line else line


MAX_HOSTS = 5
"""Number of hosts that a line of progress names."""


def connecting_words(hosts: Sequence[str]) -> str:
    """Return a line of progress about the hosts that a command connects to."""
    more = len(hosts) - MAX_HOSTS
    more_hosts = f" and {count(more, 'other host')}" if more > 0 else ""
    return sanitized_line(f"connecting to {', '.join(hosts[:MAX_HOSTS])}{more_hosts} …")


def unreached(hosts: Sequence[str], away: float | None) -> str:
    """Return a text about hosts that could not be informed of their pool's end, or ""."""
    if not hosts:
        return ""
    ends = (
        "ends as soon as this notebook reaches it again, or by itself, "
        f"{duration_text(away)} after its last cell"
        if away
        else "ends as soon as this notebook reaches it again, or must be ended by hand"
    )
    return f"; {', '.join(hosts)} could not be reached: what runs there {ends}"


def log_lines(text: str, label: str) -> str:
    """Return lines of a log, each with a label, in the final state that a terminal would show."""
    lines = text.split("\n")
    return "".join(f"{label}{last_state(line)}\n" for line in (lines if lines[-1] else lines[:-1]))


def suppressed_lines(rank: int, nbytes: int) -> str:
    """Return the line that replaces text that is not shown."""
    return f"[{size(nbytes)} of rank {rank}'s output not shown; all of it: %sky_logs -t {rank}]\n"


def possibly_repeated(rank: int, lines: int, displays: int) -> str:
    """Return the line before output that may already be on the screen.

    The previous kernel showed that output shortly before it ended, or did not get to it.
    """
    # "line" and "display", but "3 lines" and "2 displays"
    parts = [
        noun if number == 1 else count(number, noun)
        for number, noun in ((lines, "line"), (displays, "display"))
        if number
    ]
    return (
        f"[rank {rank}: the next {' and '.join(parts)} may have been shown before: the previous "
        "kernel ended just after that arrived]\n"
    )


def missed_lines(rank: int, count: int) -> str:
    """Return the line that replaces displays made while the notebook was away.

    There were too many of them to keep.
    """
    displays = "1 display" if count == 1 else f"{count} displays"
    return (
        f"[{displays} of rank {rank} not shown: this notebook was away, and the newest were kept]\n"
    )


def numbers_dropped(rank: int, count: int) -> str:
    """Return the line about reported numbers that are lost.

    The node could not keep them while the notebook was away.
    """
    rows = "1 row" if count == 1 else f"{count:,} rows"
    return (
        f"[the oldest {rows} that rank {rank} reported while this notebook was away are not kept]\n"
    )


def table(rows: Iterable[Sequence[object]]) -> str:
    """Return rows as aligned columns; the first row is the heading."""
    cells = [[sanitized_line(str(value)) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def html_table(rows: Iterable[Sequence[str]], style: str = "") -> str:
    """Return rows as an HTML table.

    `style` is the style of each cell, for pages without style sheets.
    """
    attribute = f" style='{style}'" if style else ""
    heading, *body_rows = rows
    head = "".join(f"<th{attribute}>{escape(cell)}</th>" for cell in heading)
    body = "".join(
        f"<tr>{''.join(f'<td{attribute}>{escape(cell)}</td>' for cell in row)}</tr>"
        for row in body_rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def status(
    rows: Sequence[tuple[object, ...]], use: Mapping[int, str] = MappingProxyType({})
) -> str:
    """Return the ranks of a pool as a table: rank, node, host, process, state.

    Many ranks are grouped by node.

    Args:
        rows: these five values of each rank, in rank order.
        use: resource use by rank as text, if known.
    """
    if len(rows) <= MAX_STATUS_ROWS and use:
        used = [(*row, use.get(int(str(row[0])), "")) for row in rows]
        return table([("rank", "node", "host", "pid", "state", "in use"), *used])
    if len(rows) <= MAX_STATUS_ROWS:
        return table([("rank", "node", "host", "pid", "state"), *rows])
    groups: dict[tuple[object, ...], list[int]] = {}
    for rank, node, host, _, state in rows:
        groups.setdefault((node, host, state), []).append(int(str(rank)))
    return table(
        [
            ("ranks", "node", "host", "state"),
            *((ranges(ranks), *about) for about, ranks in groups.items()),
        ]
    )


def shipment(items: Sequence[Any]) -> str:
    """Return what would be sent, as ``--dry-run`` shows it; `items` are `ship.Item`."""
    reasons = [
        f"stays here; --push {item.name} sends it" if item.stays else "is there already"
        for item in items
    ]
    rows = [
        (item.name, item.type, size(item.nbytes), item.why, "travels" if item.moved else reason)
        for item, reason in zip(items, reasons, strict=True)
    ]
    if not rows:
        return "nothing would travel"
    total = size(sum(item.nbytes for item in items if item.moved))
    return table([("name", "type", "size", "needed by", ""), *rows]) + f"\n{total} would travel"


def clone_message(names: Sequence[str], nbytes: int, source: int, ranks: Sequence[int]) -> str:
    """Return a line about the variables that %sky_clone has copied."""
    return f"{', '.join(names)}: copied from rank {source} to {rank_words(ranks)} ({size(nbytes)})"


def weights(nbytes: Mapping[str, int]) -> str:
    """Return names by size, largest first: "data (400 MB), model + opt (20 MB) and 3 more"."""
    heavy = sorted(nbytes.items(), key=lambda item: -item[1])
    shown_names = [
        (name, weight) for name, weight in heavy[:3] if weight >= sum(nbytes.values()) / 100
    ]
    summary = ", ".join(f"{first_names(name)} ({size(weight)})" for name, weight in shown_names)
    return summary + (
        f" and {len(heavy) - len(shown_names)} more" if len(shown_names) < len(heavy) else ""
    )


def first_names(names: str) -> str:
    """Return the first three of several names that are sent together."""
    listed = names.split(" + ")
    return " + ".join([*listed[:3], *([f"{len(listed) - 3} more"] if len(listed) > 3 else [])])


def gpus(name: str | None, devices_here: Sequence[GpuDevice], complaint: str = "") -> str:
    """Return the GPUs of this machine, and below them the accelerators that can be requested.

    With a canonical name, only that accelerator is listed. A driver that does not answer has a
    `complaint`.
    """
    local_names = [kind.name for kind in devices_here]
    devices = (
        ", ".join(f"{local_names.count(gpu)} × {gpu}" for gpu in dict.fromkeys(local_names))
        or complaint
        or "no GPU"
    )
    rows = [
        (
            kind.name,
            f"{kind.memory:g} GB",
            sum(accelerators.matches(kind.name, gpu) for gpu in local_names),
        )
        for kind in accelerators.KINDS
        if name in (None, kind.name)
    ]
    rows.sort(key=lambda row: -row[2])  # kinds on this machine come first
    accelerator_table = table(
        [("--gpu", "memory", "on this machine"), *((*row[:2], row[2] or "-") for row in rows)]
    )
    return f"on this machine: {devices}\n\n{accelerator_table}"


def packages(nodes: Mapping[str, Environment], notebook: Environment) -> str:
    """Return the packages installed on nodes, with the notebook's version, a row per distribution.

    Args:
        nodes: environments by node name. Nodes with equal environments share a column.
    """
    nodes_by_versions: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, environment in nodes.items():
        nodes_by_versions.setdefault(tuple(sorted(environment.versions.items())), []).append(name)
    columns = [dict(versions) for versions in nodes_by_versions]
    rows = [
        (name, *(column.get(name, "-") for column in columns), notebook.versions.get(name, "-"))
        for name in sorted({name for column in columns for name in column})
    ]
    return table(
        [
            ("package", *(", ".join(names) for names in nodes_by_versions.values()), "notebook"),
            *rows,
        ]
    )


def frame_text(frame: StackFrame) -> str:
    """Return a frame as text: "line 7 of the cell in <module>"."""
    line = f"line {frame.line}" if frame.cell is not None else f"{frame.file}:{frame.line}"
    return line if frame.name == "<module>" else f"{line} in {frame.name}"


def positions(by_rank: Mapping[int, Sequence[StackFrame]]) -> str:
    """Return the positions of ranks in one line, grouped by position.

    Example: "ranks 0–2 in all_reduce, line 3; rank 3 in load, line 6".
    """
    groups: dict[str, list[int]] = {}
    for rank, frames in sorted(by_rank.items()):
        if frames:
            groups.setdefault(position(frames), []).append(rank)
    parts = [f"{rank_words(ranks)} {text}" for text, ranks in groups.items()]
    return "; ".join([*parts[:SHOWN_PLACES], *(["…"] if len(parts) > SHOWN_PLACES else [])])


def position(frames: Sequence[StackFrame]) -> str:
    """Return the innermost function of a stack, and the line in the user's code.

    Examples: "in all_reduce, line 3", "in conv2d, line 19 of forward".
    """
    own = next((frame for frame in reversed(frames) if in_cell(frame)), frames[0])
    line = f"line {own.line}" if in_cell(own) else f"{own.file}:{own.line}"
    name = frames[-1].name
    # its line numbers refer to the cell that defined it, not to the running one
    if own.name not in ("<module>", name):
        line = f"{line} of {own.name}"
    if name.startswith("_") and name != own.name and own.code:
        # a library's internal function (_engine_run_backward) is meaningless to users: show their
        # own line
        return f"in {own.code}, {line}"
    return f"at {line}" if name == "<module>" else f"in {name}, {line}"


def in_cell(frame: StackFrame) -> bool:
    """Return True for a frame of a cell, including cells that ran in the notebook."""
    return frame.cell is not None or CELL_FILE.search(frame.file) is not None


def unfolded(summary: str, details: str) -> str:
    """Return a line with indented details below."""
    return "\n".join([summary, *(f"  {line}" for line in details.splitlines())])


def stacks(by_rank: Mapping[int, Stack | None]) -> str:
    """Return the positions of ranks, grouped by position.

    Example: "ranks 0, 1, 3: line 7, then …/distributed_c10d.py:1 in all_reduce".
    """
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(by_rank.items()):
        frames = () if stack is None else stack.frames
        cell = [frame_text(frame) for frame in frames if frame.cell is not None]
        deeper = [frame for frame in frames if frame.cell is None]
        position = " → ".join(
            [*cell, *([f"{deeper[-1].name} ({frame_text(deeper[-1])})"] if deeper else [])]
        )
        if stack is None:
            position = NO_ANSWER
        elif stack.native:
            position += f" ({INTERPRETER_HELD})"
        groups.setdefault(position or "between lines of the cell", []).append(rank)
    return "\n".join(f"{rank_words(ranks)}: {position}" for position, ranks in groups.items())
