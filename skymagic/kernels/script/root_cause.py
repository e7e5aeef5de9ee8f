"""Root cause of a script's failure, from torch's error file or from its last output; pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from skymagic.wire.processes import signal_name
from skymagic.wire.script import ScriptCause

LINE_PREFIX = re.compile(r"^(\[[^\]\s]{1,40}\]:? ?)?")
"""Prefix that torch and torchrun put before a process's lines: ``[rank1]: ``, ``[default0]:``."""
TRACEBACK_HEAD = "Traceback (most recent call last):"
EXCEPTION_LINE = re.compile(r"^([A-Za-z_][\w.]*)(?:: (.*))?$")
LAUNCHER_ERRORS = ("ChildFailedError", "SignalException")
"""Errors that torchrun raises because a worker failed, or because of a signal."""
LAUNCHER_FRAME = re.compile(
    r'^  File "[^"]*(bin/torchrun|torch/distributed/(run\.py|launcher/|elastic/)[^"]*)", line '
)
LOG_LINE = re.compile(r"^[IWEF]\d{4} [\d:.]+ +\d+ torch/distributed/")
RULER = re.compile(r"^=+$")
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):\s*\[\d+\]:"
    r".*?rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)"
    r".*?exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)",
    re.DOTALL,
)
WORKER_FAILURE = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)"
    r"\s*exitcode\s*: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
PEER_LOST = re.compile(
    r"connection closed|connection reset|broken pipe|socket closed"
    r"|closed by (peer|remote)|connection was closed"
    r"|connection to the C10d store|remote worker (crashing|hanging)|NCCL",
    re.IGNORECASE,
)


def root_cause(error_file: str, tail: str) -> ScriptCause | None:
    """Return the cause of a failure, or None if it is unknown.

    Args:
        error_file: text of torch's error file, "" if it does not exist.
        tail: end of the script's output.
    """
    worker, died = of_launcher(tail)
    text = without_frames(recorded_traceback(error_file))
    # a killed worker has no traceback; any tracebacks came later
    if not text and died:
        return ScriptCause(died, died, worker)
    text = text or without_frames(traceback_in(tail))
    if not text:
        return ScriptCause(died, died, worker) if died else None
    summary = text.rstrip().rpartition("\n")[2]
    # a port in use is a cause, even if the line is about the connection to a store
    follows = bool(PEER_LOST.search(summary)) and "EADDRINUSE" not in text
    if follows and (killed := killed_worker(tail)):
        return killed
    return ScriptCause(text.rstrip(), summary, worker, follows)


def recorded_traceback(error_file: str) -> str:
    """Return the traceback that ``torch.distributed.elastic`` recorded."""
    try:
        message = json.loads(error_file)["message"]
    except (ValueError, KeyError, TypeError):
        return ""
    if isinstance(message, Mapping):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, Mapping) else None
        message = stack or message.get("message")
    return message if isinstance(message, str) else ""


def killed_worker(tail: str) -> ScriptCause | None:
    """Return a killed worker that torchrun lists in addition to its root cause, or None.

    torchrun sees a killed worker at its next poll, and by then another worker may have reported the
    loss of its peer.
    """
    for match in WORKER_FAILURE.finditer(tail):
        worker, died = named(match)
        if died and match["code"] != "-15":  # torchrun itself sends SIGTERM
            return ScriptCause(died, died, worker)
    return None


def of_launcher(tail: str) -> tuple[str, str]:
    """Return torchrun's root cause as (worker, manner of its death); empty if it names none."""
    matches = list(ROOT_CAUSE.finditer(tail))
    return named(matches[-1]) if matches else ("", "")


def named(match: re.Match[str]) -> tuple[str, str]:
    """Return (description of a worker, manner of its death).

    The latter is empty if no signal ended it.
    """
    worker, code = (
        f"torchrun's rank {match['rank']} (local rank {match['local']})",
        int(match["code"]),
    )
    if code >= 0:
        return worker, ""
    return worker, f"{worker}, process {match['pid']}, was ended by {signal_name(-code)}"


def without_frames(text: str) -> str:
    """Remove torchrun's own frames from a traceback, or from a chain of tracebacks.

    Headings that are left without frames go too.
    """
    remaining: list[str] = []
    in_launcher = False
    for line in text.splitlines():
        if line.startswith("  File "):
            in_launcher = LAUNCHER_FRAME.match(line) is not None
        elif not line.startswith("    "):
            in_launcher = False
            if remaining and remaining[-1] == TRACEBACK_HEAD:
                remaining.pop()
        if not in_launcher:
            remaining.append(line)
    return "\n".join(remaining).strip("\n")


def without_launcher(tail: str) -> list[str]:
    """Return the lines of a text without torchrun's log, its traceback, and the box below it."""
    remaining: list[str] = []
    block: list[str] = []
    # rulers seen of the box below torchrun's traceback; 2 outside of such a box
    rulers = 2
    for line in tail.splitlines():
        if rulers < 2:
            rulers += bool(RULER.match(line))
        elif line == TRACEBACK_HEAD:
            remaining += block
            block = [line]
        elif block and (line.startswith(" ") or not line):
            block.append(line)
        else:
            if block and line.split(":")[0].endswith(LAUNCHER_ERRORS):
                # only a ChildFailedError is followed by a box
                rulers = 0 if line.split(":")[0].endswith(LAUNCHER_ERRORS[0]) else 2
                block = []
                continue
            remaining += block
            block = []
            remaining += [] if LOG_LINE.match(line) or not line.strip() else [line]
    return remaining + block


def traceback_in(tail: str) -> str:
    """Return the last traceback that is a cause, or "".

    It is never the launcher's own, and preferably not of a process that lost its peer.
    """
    candidates = [
        text
        for text in tracebacks(tail)
        if not text.rpartition("\n")[2].split(":")[0].endswith(LAUNCHER_ERRORS)
    ]
    causes = [text for text in candidates if not PEER_LOST.search(text.rpartition("\n")[2])]
    return (causes or candidates or [""])[-1]


def tracebacks(tail: str) -> list[str]:
    """Return all tracebacks in a text, in the order of their ends.

    Lines with different process labels are kept apart.
    """
    open_ones: dict[str, list[str]] = {}
    complete = []
    for line in tail.splitlines():
        match = LINE_PREFIX.match(line)
        label = match[0] if match is not None else ""
        content = line[len(label) :]
        lines = open_ones.get(label.strip())
        if content == TRACEBACK_HEAD:
            open_ones[label.strip()] = [content]
        elif lines is None:
            continue
        elif content.startswith(" ") or not content:
            lines.append(content)
        else:
            if EXCEPTION_LINE.match(content):
                complete.append("\n".join([*lines, content]))
            del open_ones[label.strip()]
    return complete
