"""Shell scripts on nodes: the order that a rank gets from the notebook, and the result it returns.

Both travel as values of a run: the order as a variable of its source, the result as the value of
the source's last expression or as the argument of its exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ScriptOrder:
    """Run a script on a node.

    Attributes:
        text: text of the script.
        workdir: its working folder; "" for the rank's own.
        as_rank: True if its environment has the variables with this rank's position.
        env: variables to add.
        without: variables to remove.
        grace: seconds between SIGTERM and SIGKILL.
    """

    text: str
    workdir: str
    as_rank: bool
    env: Mapping[str, str]
    without: tuple[str, ...]
    grace: float


@dataclass(frozen=True)
class ScriptCause:
    """Root cause of a script's failure, found in its output.

    Attributes:
        text: a traceback, or a line.
        summary: its last line.
        worker: description of the torchrun worker that failed; "" if none did.
        follows: True if the error only reports the loss of another process.
    """

    text: str
    summary: str = ""
    worker: str = ""
    follows: bool = False


@dataclass(frozen=True, kw_only=True)
class ScriptResult:
    """Result of a script on one node.

    Attributes:
        status: exit code; negative for the signal that ended it; None if it did not start or the
            status is unknown.
        tail: last lines of its output.
        message: last lines without torchrun's own.
        cause: cause of its failure; None if unknown.
        survivors: command lines of processes that outlived the script and were ended.
        problem: reason why it could not be started.
    """

    status: int | None = None
    tail: str = ""
    message: str = ""
    cause: ScriptCause | None = None
    survivors: tuple[str, ...] = ()
    problem: str = ""
