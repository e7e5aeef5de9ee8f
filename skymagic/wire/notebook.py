"""The protocol of notebook jobs: what a pool's head is to execute, and how far it has come.

client → head   ExecuteNotebook
head → client   LogText…, NotebookState
"""

from __future__ import annotations

from typing import Any

from skymagic.wire.codec import Codec, FrozenMessage


class NotebookMessage(FrozenMessage):
    """Base of this protocol's messages."""


class ExecuteNotebook(NotebookMessage):
    """Execute a notebook (nbformat 4) with papermill.

    Attributes:
        folder, output: where its kernel runs, and the executed notebook; may begin with ``~``.
        env: environment variables for its kernel.
        pool_files: name → content in base 64 of files by which the kernel finds the pool; empty if the head has them.
    """

    notebook: dict[str, Any]
    parameters: dict[str, Any]
    folder: str
    output: str
    env: dict[str, str]
    pool_files: dict[str, str]


class LogText(NotebookMessage):
    """A piece of the job's log."""

    text: str


class NotebookState(NotebookMessage):
    """State of the last job on a pool: ``none``, ``refused``, ``running``, ``done``, ``failed``, ``stopped`` or ``lost``.

    Attributes:
        problem: why it was refused, failed or could not continue.
        process, machine: the job's process (`wire.record.identity`), and where it runs.
        shown: which runs of the pool were delivered to it (`pool.keys.DisplayRecord`).
    """

    status: str
    problem: str = ""
    process: str = ""
    machine: str = ""
    shown: str = ""


CODEC: Codec[NotebookMessage] = Codec(ExecuteNotebook, LogText, NotebookState, max_line=1 << 32)
