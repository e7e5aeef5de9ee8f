"""What the notebook shows: text of ranks put in order, tables, and where ranks are; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import Any

from skymagic.plan import accelerators
from skymagic.plan.distributions import Environment
from skymagic.plan.gpus import GpuDevice
from skymagic.plan.units import duration_text, ranges, rank_words, size
from skymagic.wire.untrusted import sanitized_line

MAX_STATUS_ROWS = 64
"""Ranks that have a row of their own."""
SHOWN_PLACES = 8
"""Different places of ranks that one line names."""
INTERPRETER_HELD = "native code holds the interpreter"
NO_ANSWER = f"does not answer: {INTERPRETER_HELD}"


def last_state(line: str) -> str:
    """What a terminal would show of a line that was redrawn with carriage returns."""
    return line.rstrip("\r").rpartition("\r")[2] if "\r" in line else line


def unreached(hosts: Sequence[str], away: float | None) -> str:
    """What to say of hosts that could not be told that their pool has ended; "" when there are none."""
    if not hosts:
        return ""
    ends = (
        f"ends as soon as this notebook reaches it again, or by itself, {duration_text(away)} after its last cell"
        if away
        else "ends as soon as this notebook reaches it again, or must be ended by hand"
    )
    return f"; {', '.join(hosts)} could not be reached: what runs there {ends}"


def log_lines(text: str, label: str) -> str:
    """Lines of a log, each behind a label, as a terminal would have left them."""
    lines = text.split("\n")
    return "".join(f"{label}{last_state(line)}\n" for line in (lines if lines[-1] else lines[:-1]))


def held_back(rank: int, nbytes: int) -> str:
    """The line that stands for text that was not shown."""
    return f"[{size(nbytes)} of rank {rank}'s output not shown; all of it: %sky_logs -t {rank}]\n"


def maybe_seen(rank: int, content: Mapping[str, Any]) -> str:
    """The line before output that a kernel had written shortly before it was killed: it may be on the screen."""
    lines = content["text"].count("\n") if content["kind"] == "stream" else 0
    what = (
        f"the next {lines} lines" if lines > 1 else "the next line" if lines else "what comes next"
    )
    return f"[rank {rank}: {what} may have been shown before: the notebook was killed just after it wrote this]\n"


def missed(rank: int, count: int) -> str:
    """The line that stands for displays that were made while the notebook was away, and were too many to be kept."""
    displays = "1 display" if count == 1 else f"{count} displays"
    return (
        f"[{displays} of rank {rank} not shown: this notebook was away, and the newest were kept]\n"
    )


def numbers_dropped(rank: int, count: int) -> str:
    """Return the line on reported numbers that the node could not keep while the notebook was away."""
    rows = "1 row" if count == 1 else f"{count:,} rows"
    return (
        f"[the oldest {rows} that rank {rank} reported while this notebook was away are not kept]\n"
    )


def table(rows: Iterable[Sequence[object]]) -> str:
    """Rows as aligned columns; the first is the heading."""
    cells = [[sanitized_line(str(value)) for value in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def html_table(rows: Iterable[Sequence[str]], style: str = "") -> str:
    """Rows as an HTML table; `style` is the style of each cell, for pages without style sheets."""
    given = f" style='{style}'" if style else ""
    heading, *others = rows
    head = "".join(f"<th{given}>{escape(cell)}</th>" for cell in heading)
    body = "".join(
        f"<tr>{''.join(f'<td{given}>{escape(cell)}</td>' for cell in row)}</tr>" for row in others
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def status(
    rows: Sequence[tuple[object, ...]], use: Mapping[int, str] = MappingProxyType({})
) -> str:
    """The ranks of a pool as a table: rank, node, host, process, state; of many ranks those of a node together.

    Args:
        rows: these five of each rank, in its order.
        use: by rank what it uses, in words, where that is known.
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
    """What would travel, as ``--dry-run`` shows it; `items` are `ship.Item`."""
    stays = [
        f"stays here; --push {i.name} sends it" if i.stays else "is there already" for i in items
    ]
    rows = [
        (i.name, i.type, size(i.nbytes), i.why, "travels" if i.moved else there)
        for i, there in zip(items, stays, strict=True)
    ]
    if not rows:
        return "nothing would travel"
    total = size(sum(i.nbytes for i in items if i.moved))
    return table([("name", "type", "size", "needed by", ""), *rows]) + f"\n{total} would travel"


def cloned(names: Sequence[str], nbytes: int, source: int, ranks: Sequence[int]) -> str:
    """What %sky_clone has copied."""
    return f"{', '.join(names)}: copied from rank {source} to {rank_words(ranks)} ({size(nbytes)})"


def weights(nbytes: Mapping[str, int]) -> str:
    """What weighs what, the heaviest first: "data (400 MB), model + opt (20 MB) and 3 more"."""
    heavy = sorted(nbytes.items(), key=lambda item: -item[1])
    named = [(name, weight) for name, weight in heavy[:3] if weight >= sum(nbytes.values()) / 100]
    words = ", ".join(f"{shortened(name)} ({size(weight)})" for name, weight in named)
    return words + (f" and {len(heavy) - len(named)} more" if len(named) < len(heavy) else "")


def shortened(names: str) -> str:
    """Names that travel together: the first three of them."""
    listed = names.split(" + ")
    return " + ".join([*listed[:3], *([f"{len(listed) - 3} more"] if len(listed) > 3 else [])])


def gpus(name: str | None, devices_here: Sequence[GpuDevice], complaint: str = "") -> str:
    """The GPUs of this machine, and below them the accelerators that can be asked for (with a canonical name: this one).

    A driver that does not answer has a `complaint`.
    """
    here = [one.name for one in devices_here]
    devices = (
        ", ".join(f"{here.count(gpu)} × {gpu}" for gpu in dict.fromkeys(here))
        or complaint
        or "no GPU"
    )
    rows = [
        (one.name, f"{one.memory:g} GB", sum(accelerators.matches(one.name, gpu) for gpu in here))
        for one in accelerators.KINDS
        if name in (None, one.name)
    ]
    rows.sort(key=lambda row: -row[2])  # what is here comes first
    known = table(
        [("--gpu", "memory", "on this machine"), *((*row[:2], row[2] or "-") for row in rows)]
    )
    return f"on this machine: {devices}\n\n{known}"


def packages(nodes: Mapping[str, Environment], here: Environment) -> str:
    """What is installed on nodes, a row for each distribution, beside the notebook's version.

    Args:
        nodes: by name. Nodes that have the same share a column.
    """
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, there in nodes.items():
        alike.setdefault(tuple(sorted(there.versions.items())), []).append(name)
    columns = [dict(versions) for versions in alike]
    rows = [
        (name, *(column.get(name, "-") for column in columns), here.versions.get(name, "-"))
        for name in sorted({name for column in columns for name in column})
    ]
    return table([("package", *(", ".join(names) for names in alike.values()), "notebook"), *rows])


def where(frame: Mapping[str, Any]) -> str:
    """One frame in words: "line 7 of the cell in <module>"."""
    place = f"line {frame['line']}" if "cell" in frame else f"{frame['file']}:{frame['line']}"
    return place if frame["name"] == "<module>" else f"{place} in {frame['name']}"


def places(by_rank: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """Where ranks were, in one line, those at the same place together: "ranks 0–2 in all_reduce, line 3; rank 3 in load, line 6"."""
    groups: dict[str, list[int]] = {}
    for rank, frames in sorted(by_rank.items()):
        if frames:
            groups.setdefault(place(frames), []).append(rank)
    words = [f"{rank_words(ranks)} {where}" for where, ranks in groups.items()]
    return "; ".join([*words[:SHOWN_PLACES], *(["…"] if len(words) > SHOWN_PLACES else [])])


def place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost function of a stack, and the line in the user's code: "in all_reduce, line 3", "in conv2d, line 19 of forward"."""
    own = next((frame for frame in reversed(frames) if in_cell(frame)), frames[0])
    line = f"line {own['line']}" if in_cell(own) else f"{own['file']}:{own['line']}"
    name = frames[-1]["name"]
    if own["name"] not in (
        "<module>",
        name,
    ):  # its lines are of the cell that defined it, not of the one that runs
        line = f"{line} of {own['name']}"
    if name.startswith("_") and name != own["name"] and own.get("code"):
        # a library's internal function (_engine_run_backward) tells nothing: the user's own line does
        return f"in {own['code']}, {line}"
    return f"at {line}" if name == "<module>" else f"in {name}, {line}"


def in_cell(frame: Mapping[str, Any]) -> bool:
    """Whether a frame is of a cell, also of one that ran in the notebook."""
    return "cell" in frame or "ipykernel_" in str(frame.get("file"))


def unfolded(summary: str, details: str) -> str:
    """A line, and below it details, indented."""
    return "\n".join([summary, *(f"  {line}" for line in details.splitlines())])


def stacks(by_rank: Mapping[int, Mapping[str, Any] | None]) -> str:
    """Where ranks are, those at the same place together: "ranks 0, 1, 3: line 7, then …/distributed_c10d.py:1 in all_reduce"."""
    groups: dict[str, list[int]] = {}
    for rank, stack in sorted(by_rank.items()):
        frames = (stack or {}).get("frames") or []
        cell = [where(frame) for frame in frames if "cell" in frame]
        deeper = [frame for frame in frames if "cell" not in frame]
        words = " → ".join(
            [*cell, *([f"{deeper[-1]['name']} ({where(deeper[-1])})"] if deeper else [])]
        )
        if stack is None:
            words = NO_ANSWER
        elif stack.get("native"):
            words += f" ({INTERPRETER_HELD})"
        groups.setdefault(words or "between lines of the cell", []).append(rank)
    return "\n".join(f"{rank_words(ranks)}: {words}" for words, ranks in groups.items())
