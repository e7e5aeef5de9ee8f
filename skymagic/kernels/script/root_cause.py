"""Why a script failed: from torch's error file, or from what it wrote last; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from skymagic.wire.processes import signal_name

LINE_PREFIX = re.compile(r"^(\[[^\]\s]{1,40}\]:? ?)?")
"""What torch and torchrun put before a line of one process: ``[rank1]: ``, ``[default0]:``."""
TRACEBACK_HEAD = "Traceback (most recent call last):"
EXCEPTION_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
LAUNCHER_ERRORS = ("ChildFailedError", "SignalException")
"""What torchrun raises because a worker has failed, or it was told to stop."""
LAUNCHER_FRAME = re.compile(
    r'^  File "[^"]*(bin/torchrun|torch/distributed/(run\.py|launcher/|elastic/)[^"]*)", line '
)
LOG_LINE = re.compile(r"^[IWEF]\d{4} [\d:.]+ +\d+ torch/distributed/")
RULER = re.compile(r"^=+$")
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):\s*\[\d+\]:.*?rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)"
    r".*?exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)",
    re.DOTALL,
)
WORKER_FAILURE = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)\s*exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
PEER_LOST = re.compile(
    r"connection closed|connection reset|broken pipe|socket closed|closed by (peer|remote)|connection was closed"
    r"|connection to the C10d store|remote worker (crashing|hanging)|NCCL",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cause:
    """The error that ended a script.

    Attributes:
        text: a traceback, or a line.
        summary: its last line.
        worker: which of torchrun's workers, in words; empty if it was none.
        follows: it only says that another process went away.
    """

    text: str
    summary: str
    worker: str = ""
    follows: bool = False


def root_cause(error_file: str, tail: str) -> Cause | None:
    """The cause of a failure, None if nothing tells it.

    Args:
        error_file: the text of torch's error file, "" where there is none.
        tail: the end of what the script wrote.
    """
    worker, died = of_launcher(tail)
    text = without_frames(recorded(error_file))
    if (
        not text and died
    ):  # a worker that was killed has no traceback; those that are there came after
        return Cause(died, died, worker)
    text = text or without_frames(traceback_in(tail))
    if not text:
        return Cause(died, died, worker) if died else None
    summary = text.rstrip().rpartition("\n")[2]
    follows = bool(PEER_LOST.search(summary)) and "EADDRINUSE" not in text
    if follows and (killed := killed_worker(tail)):
        return killed
    return Cause(text.rstrip(), summary, worker, follows)


def recorded(error_file: str) -> str:
    """The traceback that ``torch.distributed.elastic`` recorded."""
    try:
        message = json.loads(error_file)["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    if isinstance(message, Mapping):
        more = message.get("extraInfo")
        stack = more.get("py_callstack") if isinstance(more, Mapping) else None
        message = stack or message.get("message")
    return message if isinstance(message, str) else ""


def killed_worker(tail: str) -> Cause | None:
    """A worker that was killed and that torchrun lists beside its root cause, None if it lists none.

    torchrun sees a killed worker when it looks next, and by then another one may have written down that it lost its peer.
    """
    for found in WORKER_FAILURE.finditer(tail):
        worker, died = named(found)
        if died and found["code"] != "-15":  # SIGTERM is torchrun's own
            return Cause(died, died, worker)
    return None


def of_launcher(tail: str) -> tuple[str, str]:
    """(the worker that torchrun names as the root cause, how it was killed); empty where it names none."""
    every = list(ROOT_CAUSE.finditer(tail))
    return named(every[-1]) if every else ("", "")


def named(found: re.Match[str]) -> tuple[str, str]:
    """(which worker, how it was killed) of one that torchrun lists; empty where no signal has ended it."""
    worker, code = (
        f"torchrun's rank {found['rank']} (local rank {found['local']})",
        int(found["code"]),
    )
    if code >= 0:
        return worker, ""
    return worker, f"{worker}, process {found['pid']}, was ended by {signal_name(-code)}"


def without_frames(text: str) -> str:
    """A traceback, also one with causes, without torchrun's own frames; a heading that none is left of goes too."""
    kept: list[str] = []
    own = False
    for line in text.splitlines():
        if line.startswith("  File "):
            own = LAUNCHER_FRAME.match(line) is not None
        elif not line.startswith("    "):
            own = False
            if kept and kept[-1] == TRACEBACK_HEAD:
                kept.pop()
        if not own:
            kept.append(line)
    return "\n".join(kept).strip("\n")


def without_launcher(tail: str) -> list[str]:
    """The lines of a text without torchrun's own: its log, its traceback, and the box below it."""
    kept: list[str] = []
    block: list[str] = []
    rules = 2
    for line in tail.splitlines():
        if rules < 2:
            rules += bool(RULER.match(line))
        elif line == TRACEBACK_HEAD:
            kept += block
            block = [line]
        elif block and (line.startswith(" ") or not line):
            block.append(line)
        else:
            if block and line.split(":")[0].endswith(LAUNCHER_ERRORS):
                rules = 0 if line.split(":")[0].endswith(LAUNCHER_ERRORS[0]) else 2
                block = []
                continue
            kept += block
            block = []
            kept += [] if LOG_LINE.match(line) or not line.strip() else [line]
    return kept + block


def traceback_in(tail: str) -> str:
    """The last traceback that is a cause: none of the launcher's own, and rather not of a process that lost its peer."""
    found = [
        text
        for text in tracebacks(tail)
        if not text.rpartition("\n")[2].split(":")[0].endswith(LAUNCHER_ERRORS)
    ]
    causes = [text for text in found if not PEER_LOST.search(text.rpartition("\n")[2])]
    return (causes or found or [""])[-1]


def tracebacks(tail: str) -> list[str]:
    """All tracebacks in a text, those of processes whose lines are labelled apart from each other; in the order of their ends."""
    open_ones: dict[str, list[str]] = {}
    found = []
    for line in tail.splitlines():
        match = LINE_PREFIX.match(line)
        label = match[0] if match is not None else ""
        rest = line[len(label) :]
        lines = open_ones.get(label.strip())
        if rest == TRACEBACK_HEAD:
            open_ones[label.strip()] = [rest]
        elif lines is None:
            continue
        elif rest.startswith(" ") or not rest:
            lines.append(rest)
        else:
            if EXCEPTION_LINE.match(rest):
                found.append("\n".join([*lines, rest]))
            del open_ones[label.strip()]
    return found
