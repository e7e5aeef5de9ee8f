"""The protocol of a notebook that is a job on a pool's head: what is to be executed, and what is told of it, to whoever asks.

client → start      ExecuteNotebook
start  → client     Begun, or Refused
driver → follower   Begun, (CellBegun, CellOutput…, CellFailed?)…, NotebookEnded, Executed
follower → driver   Stop
"""

from __future__ import annotations

from typing import Any

from skymagic.wire.codec import Codec, FrozenMessage


class NotebookMessage(FrozenMessage):
    """Base of this protocol's messages."""


class ExecuteNotebook(NotebookMessage):
    """Execute a notebook.

    Attributes:
        notebook: as in its file, nbformat 4.
        key: what leads to the pool from its head, pickled, in base 64.
        folder: where its kernel runs; it may begin with ``~``.
        env: what its kernel's environment has besides.
    """

    job_id: str
    notebook: dict[str, Any]
    key: str
    folder: str
    env: dict[str, str]


class Refused(NotebookMessage):
    """The notebook was not begun, or nothing of it is here."""

    problem: str


class Begun(NotebookMessage):
    """The process that executes it (`wire.record.identity`), where, and how many cells there are."""

    process: str
    machine: str
    cells: int


class CellBegun(NotebookMessage):
    """A cell of code begins; `cell` counts all cells of the notebook from 0 on."""

    cell: int
    source: str


class CellOutput(NotebookMessage):
    """A cell has shown this: `name` is ``stdout``, ``stderr``, ``display`` or ``note``."""

    cell: int
    name: str
    text: str


class CellFailed(NotebookMessage):
    """What a cell has raised, as its notebook shows it."""

    cell: int
    ename: str
    evalue: str
    traceback: str


class NotebookEnded(NotebookMessage):
    """How it has ended: ``done``, ``failed``, ``stopped`` or ``lost``, with the reason of the last.

    Attributes:
        shown: the file that says which runs of the pool were shown, and delivered (`pool.keys.DisplayRecord`).
    """

    status: str
    problem: str = ""
    shown: str = ""


class Executed(NotebookMessage):
    """The notebook with its outputs, as far as it was executed."""

    notebook: dict[str, Any]


class Stop(NotebookMessage):
    """Stop it, as by the stop button; a second one kills."""


CODEC: Codec[NotebookMessage] = Codec(
    ExecuteNotebook,
    Refused,
    Begun,
    CellBegun,
    CellOutput,
    CellFailed,
    NotebookEnded,
    Executed,
    Stop,
    max_line=1 << 32,
)
