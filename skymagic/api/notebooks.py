"""Notebook jobs: ``skymagic run`` executes a notebook with papermill on a pool's head.

The job does not depend on this machine. The head's side is `kernels.daemon.notebook`. The job's
first cell attaches to the pool, so that its kernel uses the pool like any other notebook.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skymagic.cluster import Node
from skymagic.content.files.changes import summary
from skymagic.content.files.copy import Files
from skymagic.display.screen import Copying
from skymagic.errors import PoolError, RequestError, SkyError, collect_mistakes
from skymagic.plan import parameters
from skymagic.plan.parameters import NotebookDocument, ParameterValue
from skymagic.pool import keys, launch, records
from skymagic.pool.keys import PoolKey
from skymagic.pool.records import PoolRecord
from skymagic.providers import head
from skymagic.wire import notebook as notebook_wire
from skymagic.wire import processes
from skymagic.wire.record import identity

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NotebookRequest:
    """Notebook to execute on the head of a pool.

    Attributes:
        pool: the pool's name or job id.
        parameters: ``name=value`` texts, for the cell tagged ``parameters``.
        take_over: take the pool from a notebook that is alive.
    """

    notebook: Path
    pool: str
    parameters: tuple[str, ...] = ()
    take_over: bool = False

    @property
    def executed(self) -> str:
        """Name of the executed notebook."""
        return f"{self.notebook.stem}.executed.ipynb"


def start(request: NotebookRequest) -> PoolRecord:
    """Start a notebook on the head of a pool, and return the pool's record.

    The job does not need this process.

    Raises:
        RequestError: lists all mistakes in the request; nothing was started.
        PoolError: the head cannot be reached or refuses the notebook; the message gives the reason.
    """
    mistakes: list[str] = []
    values: dict[str, ParameterValue] = {}
    with collect_mistakes(mistakes):
        values = parameters.assigned(request.parameters)
    notebook: NotebookDocument | None = None
    path = request.notebook.expanduser().absolute()
    try:
        with collect_mistakes(mistakes):
            notebook = NotebookDocument.parse(path.read_text(encoding="utf-8"), str(path))
            mistakes += parameters.mistakes(notebook, values)
    except (OSError, UnicodeDecodeError) as problem:
        mistakes.append(f"{path}: {getattr(problem, 'strerror', '') or problem}")
    try:
        record = with_finished_job(records.named(request.pool))
        key = keys.read(record.job_id)
        if not (request.take_over or records.is_left(record)):
            raise PoolError(
                f"{records.owner_message(record)}: add --take-over",
                code="pool-held",
                names=[record.name],
            )
    except SkyError as problem:
        mistakes.append(str(problem))
    if mistakes or notebook is None:
        raise RequestError(mistakes)
    return _start(request, _with_attach_cell(notebook, request), values, record, key)


def _with_attach_cell(notebook: NotebookDocument, request: NotebookRequest) -> dict[str, object]:
    """Return the document with a first cell that attaches to the pool."""
    take_over = ", take_over=True" if request.take_over else ""
    source = f"import skymagic as sky\n\nsky.attach({request.pool!r}{take_over});"
    cell: dict[str, object] = {
        "cell_type": "code",
        "source": source,
        "execution_count": None,
        "outputs": [],
        "metadata": {"tags": ["attach-pool"]},
    }
    if notebook.nbformat_minor >= 5:  # cells have ids since nbformat 4.5
        cell["id"] = "attach-pool"
    cells: Any = notebook.content["cells"]
    return {**notebook.content, "cells": [cell, *cells]}


def _start(
    request: NotebookRequest,
    notebook: dict[str, object],
    values: dict[str, ParameterValue],
    record: PoolRecord,
    key: PoolKey,
) -> PoolRecord:
    secrets = key.plan.request.secrets
    env = {name: os.environ[name] for name in secrets if name in os.environ}
    folder, pool_files = str(request.notebook.expanduser().absolute().parent), {}
    job_record = replace(record, notebook=request.notebook.name)
    with launch.machines(key) as nodes:
        if key.plan.remote:
            folder = "~"
            addresses = [address for address, _ in key.addresses]
            accesses = head.accesses(nodes, key.accesses, addresses)
            pool_files = _pool_files(record, replace(key, accesses=accesses))
        output = f"{folder}/{request.executed}"
        order = notebook_wire.ExecuteNotebook(notebook, values, folder, output, env, pool_files)
        records.write(job_record)  # must be written before the job's kernel takes the pool
        state = _send_request(nodes[0], "start", record.job_id, order=order)
    if state.status == "refused":
        records.write(record)
        raise PoolError(
            f"pool {record.name!r} does not execute it: {state.problem}",
            code="notebook-run",
            names=[record.name],
        )
    if key.plan.remote:  # otherwise the job's kernel writes the record itself
        job_record = replace(
            job_record, process=state.process, machine=state.machine, folder=folder
        )
        records.write(job_record)
    logger.info("pool=%s notebook %s started", record.job_id, job_record.notebook)
    return job_record


def _pool_files(record: PoolRecord, key: PoolKey) -> dict[str, str]:
    """Return the files that let the job's kernel attach to the pool from its head."""
    content = records.encode(replace(record, process="", key=key.saved()))
    return {f"{record.job_id}.json": base64.b64encode(content).decode()}


def follow(
    record: PoolRecord, write: Callable[[str], object], *, until_end: bool
) -> notebook_wire.NotebookState:
    """Write the log of the job on a pool, and return the job's state.

    With `until_end`, follow the log until the job has ended.

    Raises:
        PoolError, ProvisionError: the head cannot be reached.
    """
    options = ("follow",) if until_end else ()
    with launch.machines(keys.read(record.job_id)) as nodes:
        for message in _messages(nodes[0], "logs", record.job_id, *options):
            if isinstance(message, notebook_wire.LogText):
                write(message.text)
            elif isinstance(message, notebook_wire.NotebookState):
                _settle(record, message)
                return message
    raise PoolError(
        f"lost contact with pool {record.name!r}: skymagic logs {record.name} -f",
        code="lost-contact",
        names=[record.name],
    )


def stop(name: str) -> notebook_wire.NotebookState:
    """Interrupt the job on a pool, and return its previous state. Raises as `follow` does."""
    record = records.named(name)
    with launch.machines(keys.read(record.job_id)) as nodes:
        return _send_request(nodes[0], "stop", record.job_id)


def get(name: str, source: str, target: str) -> str:
    """Copy a file or a folder from the head of a pool, even if another notebook has the pool.

    Return a summary of the copy. Raises FilesError.
    """
    with _files(name) as (files, _), Copying() as progress:
        copied = files.get(source, target, [0], progress)
    return summary(copied, progress.seconds, to_nodes=False)


def put(name: str, source: str, target: str) -> str:
    """Copy a file or a folder to all nodes of a pool, even if another notebook has the pool.

    Return a summary of the copy. Raises FilesError.
    """
    with _files(name) as (files, nodes), Copying() as progress:
        copied = files.put(source, target, range(len(nodes)), progress)
    return summary(copied, progress.seconds, to_nodes=True)


@contextlib.contextmanager
def _files(name: str) -> Iterator[tuple[Files, Sequence[Node]]]:
    """Open a connection to a pool: what copies its files, and its nodes."""
    key = keys.read(records.named(name).job_id)
    folder = "~" if key.plan.remote else str(Path.cwd())
    with launch.machines(key) as nodes:
        yield Files(nodes, lambda node: node.run(processes.TRANSFER_SERVER, folder)), nodes


def with_finished_job(record: PoolRecord) -> PoolRecord:
    """Return the record of a pool, marked as released if the job on it has ended.

    The state of the job is read from the head.
    """
    if record.notebook and not (records.is_left(record) or record.process == identity()):
        with (
            contextlib.suppress(SkyError, OSError),
            launch.machines(keys.read(record.job_id)) as nodes,
        ):
            return _settle(record, _send_request(nodes[0], "logs", record.job_id))
    return record


def _settle(record: PoolRecord, state: notebook_wire.NotebookState) -> PoolRecord:
    """Record that the job has ended."""
    if state.status == "running" or state.process != record.process:
        return record  # still running, or its kernel on this machine has written the record
    logger.info("pool=%s notebook %s %s", record.job_id, record.notebook, state.status)
    return records.release(record)


# -- the head --------------------------------------------------------------------------------------


def _messages(
    head_node: Node, *text: str, order: notebook_wire.ExecuteNotebook | None = None
) -> Iterator[notebook_wire.NotebookMessage]:
    with contextlib.closing(head_node.run(processes.NOTEBOOK, *text)) as transport:
        if order is not None:
            transport.write(notebook_wire.CODEC.encode(order))
        with contextlib.suppress(EOFError, OSError):
            for message, _ in notebook_wire.CODEC.messages(transport.read, noise=True):
                yield message
        if complaint := transport.complaint():
            raise PoolError(
                f"{head_node.name}: {complaint}", code="unreached", names=[head_node.name]
            )


def _send_request(
    head_node: Node, *question: str, order: notebook_wire.ExecuteNotebook | None = None
) -> notebook_wire.NotebookState:
    """Send a request and return the job's state, which ends the reply."""
    for message in _messages(head_node, *question, order=order):
        if isinstance(message, notebook_wire.NotebookState):
            return message
    raise PoolError(f"{head_node.name} does not answer", code="unreached", names=[head_node.name])
