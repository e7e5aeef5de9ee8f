"""Protocol of notebook jobs: the notebook that a pool's head executes, and its progress.

client → head   ExecuteNotebook
head → client   LogText…, NotebookState
"""

from __future__ import annotations

from skymagic.wire.codec import Codec, FrozenMessage
from skymagic.wire.typed import JsonObject


class NotebookMessage(FrozenMessage):
    """Base of this protocol's messages."""


class ExecuteNotebook(NotebookMessage):
    """Execute a notebook (nbformat 4) with papermill.

    Attributes:
        folder: working folder of its kernel; may begin with ``~``.
        output: path of the executed notebook; may begin with ``~``.
        env: environment variables for its kernel.
        pool_files: name → content in base64 of the files that describe the pool to the kernel;
            empty if the head has them.
    """

    notebook: JsonObject
    parameters: JsonObject
    folder: str
    output: str
    env: dict[str, str]
    pool_files: dict[str, str]


class LogText(NotebookMessage):
    """A piece of the job's log."""

    text: str


class NotebookState(NotebookMessage):
    """State of the last job on a pool: ``none``, ``refused``, ``running``, ``done``, ``failed``,
    ``stopped`` or ``lost``.

    Attributes:
        problem: reason why it was refused, failed or could not continue.
        process, machine: the job's process (`wire.record.identity`) and its machine.
    """

    status: str
    problem: str = ""
    process: str = ""
    machine: str = ""


CODEC: Codec[NotebookMessage] = Codec(ExecuteNotebook, LogText, NotebookState, max_line=1 << 32)
