"""Notebooks as jobs on a pool's head: begun, followed, stopped, taken. ``skymagic run``, ``skymagic attach`` and ``%sky_attach``.

The head executes the notebook by a process of its own (`kernels.notebook`), whose kernel has the pool in this one's place; what it shows,
and the executed notebook, come over a connection of whoever asks.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from skymagic.api.reading import opened_reader
from skymagic.cluster import Node
from skymagic.data.capture.imports import imported_names
from skymagic.data.capture.modules import search
from skymagic.errors import CloudError, PoolError, ProvisionError, RequestError, SkyError, noted_in
from skymagic.files.copy import Files
from skymagic.jobs.notebook import packed
from skymagic.jobs.script import folder_here, remote_folder
from skymagic.plan import parameters
from skymagic.pool import keys, making, records
from skymagic.pool.keys import NotebookRun
from skymagic.providers import head
from skymagic.wire import notebook as wire
from skymagic.wire import processes, tls
from skymagic.wire.codec import Transport
from skymagic.wire.threads import failures, run_all

RECONNECT_SECONDS = 60.0
"""For which a lost connection is tried again; the notebook goes on meanwhile."""
REMOTE_FOLDER = "~"
"""Where a notebook's kernel runs on another machine, as ranks do."""


@dataclass(frozen=True)
class NotebookRequest:
    """What is to be executed, and where.

    Attributes:
        parameters: name → value, which its cell tagged ``parameters`` has defaults for.
        output: the file that the executed notebook becomes; ``NAME.executed.ipynb`` beside it unless said.
        workdir: a folder here that its kernel runs in; on other machines a copy that is brought up to date first.
        take_over: whether a notebook that is alive may lose the pool.
    """

    notebook: Path
    pool: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    output: Path | None = None
    workdir: str | None = None
    take_over: bool = False


def begin(request: NotebookRequest, content: dict[str, Any] | None = None) -> NotebookRun:
    """Begin to execute a notebook on the head of a pool; it goes on by itself when this returns.

    Args:
        content: the notebook, where it is not as in its file; its parameters are set already then.

    Raises:
        RequestError: all that is wrong with the request; nothing was begun.
        PoolError: the head has refused it; says why.
    """
    mistakes: list[str] = []
    path = request.notebook.expanduser().absolute()
    found = content or _read(path, mistakes)
    values = request.parameters
    if found is not None and content is None:
        mistakes += parameters.mistakes(found, values)
    output = (request.output or path.with_suffix(".executed.ipynb")).expanduser().absolute()
    if not output.parent.is_dir():
        mistakes.append(f"there is no folder {output.parent} for the executed notebook")
    folder: Path | None = None
    with noted_in(mistakes):
        folder = folder_here(request.workdir) if request.workdir is not None else None
    key = _key(request, mistakes)
    if key is not None and found is not None and key.plan.remote and folder is None:
        mistakes += _beside(found, path.parent)
    if mistakes or key is None or found is None:
        raise RequestError(mistakes)
    run = NotebookRun(key, path, output)
    _start(run, parameters.injected(found, values), folder)
    return run


def _read(path: Path, mistakes: list[str]) -> dict[str, Any] | None:
    """The notebook in a file; None where there is none, with what is wrong."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        cells = found["cells"]
        fine = all(isinstance(one["cell_type"], str) for one in cells) and found["nbformat"] == 4
    except OSError as problem:
        mistakes.append(f"{path}: {problem.strerror}")
        return None
    except (ValueError, TypeError, KeyError):
        fine = False
    if not fine:
        mistakes.append(f"{path} is not a notebook in nbformat 4")
        return None
    language = (found.get("metadata") or {}).get("kernelspec", {}).get("language", "python")
    if language.lower() != "python":
        mistakes.append(f"{path.name} is a notebook in {language}: the cells of a pool are Python")
    return dict(found)


def _key(request: NotebookRequest, mistakes: list[str]) -> keys.PoolKey | None:
    """What leads to the pool, which nobody uses; None where there is none, or none to be used, with what is wrong."""
    try:
        record = _record(request.pool)
        known = keys.read(record.job_id)
        if (other := keys.notebook_run(record.job_id)) is not None:
            raise PoolError(
                f"{other.notebook.name} runs on pool {record.name!r}, or its result there has not been collected: skymagic attach {record.name}"
            )
        if not (request.take_over or records.left(record)):
            raise PoolError(
                f"pool {record.name!r} is in use: {records.holder(record)} has it; end that one, or take the pool away from it: --take-over"
            )
        with contextlib.closing(
            opened_reader(record.job_id)
        ) as reader:  # which finds out whether it is there
            if busy := [one for one in reader.runs() if not one.over]:
                raise PoolError(
                    f"a cell of its last notebook is still running there (run {busy[-1].run}): skymagic attach {record.name} shows it"
                )
    except SkyError as problem:
        mistakes.append(str(problem))
        return None
    return known


def _record(name: str | None) -> records.PoolRecord:
    if name is not None:
        return records.named(name)
    found = records.every()
    if len(found) == 1:
        return found[0]
    there = (
        f"available: {', '.join(one.name for one in found)}"
        if found
        else "no pool of this machine outlives its notebook"
    )
    raise PoolError(f"choose a pool: --pool NAME; {there}")


def _beside(notebook: Mapping[str, Any], folder: Path) -> list[str]:
    """What is wrong where it imports modules that lie beside it, and its folder stays here."""
    names: set[str] = set()
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines = parameters.source(cell).splitlines()
            with contextlib.suppress(SyntaxError):
                names |= imported_names(
                    ast.parse("\n".join("" if one.startswith(("%", "!")) else one for one in lines))
                )
    own = sorted(one.partition(".")[0] for one in search(names, str(folder)).sources)
    return (
        [
            f"it imports {', '.join(dict.fromkeys(own))} from its own folder: --workdir {folder} copies that too"
        ]
        if own
        else []
    )


def _start(run: NotebookRun, notebook: dict[str, Any], folder: Path | None) -> None:
    """Have the head begin it, and keep that it did."""
    key = run.key
    env = {name: os.environ[name] for name in key.plan.request.secrets if name in os.environ}
    with _nodes(run) as nodes:
        node = nodes[0]
        where = str(folder or run.notebook.parent)
        if key.plan.remote:
            where = REMOTE_FOLDER if folder is None else remote_folder(folder)
            if folder is not None:
                files = Files([node], lambda one: one.run(processes.FILES, REMOTE_FOLDER))
                files.sync(folder, where, key.plan.image.excludes, ())
        order = wire.ExecuteNotebook(
            run.job_id, notebook, packed(key, _accesses(key, nodes)), where, env
        )
        with contextlib.closing(node.run(processes.START_NOTEBOOK, run.driver)) as transport:
            transport.write(wire.CODEC.encode(order))
            for message in _messages(transport):
                if isinstance(message, wire.Refused):
                    raise PoolError(f"pool {run.name!r} does not execute it: {message.problem}")
            if said := transport.complaint():
                raise PoolError(f"pool {run.name!r} does not execute it: {said}")
    keys.keep_notebook(run)


def _accesses(key: keys.PoolKey, nodes: Sequence[Node]) -> tuple[head.NodeAccess, ...]:
    """What leads from the head to all nodes: to the others by relays, which end with the pool, or when nobody comes. Raises PoolError."""
    known = [
        head.NodeAccess(one.daemon, one.secret, node.name)
        for one, node in zip(key.accesses, nodes, strict=True)
    ]
    first, *others = known
    pem = tls.certificate() if others else ""
    opened = run_all(
        [
            partial(head.relay, node.run, replace(one, address=key.addresses[index][0], pem=pem))
            for index, (node, one) in enumerate(zip(nodes[1:], others, strict=True), 1)
        ]
    )
    for problem in failures(opened):
        raise problem
    return (first, *(one for one in opened if isinstance(one, head.NodeAccess)))


@contextmanager
def _head(run: NotebookRun) -> Iterator[Node]:
    """The head of its pool, also when the pool has ended."""
    with _nodes(run) as nodes:
        yield nodes[0]


@contextmanager
def _nodes(run: NotebookRun) -> Iterator[Sequence[Node]]:
    """The machines of its pool; each is connected to when something is run there."""
    _, nodes = making.attaching_provider(run.key).attach(run.key.plan, run.key.accesses)
    try:
        yield nodes
    finally:
        for node in nodes:
            if node.leave is not None:
                node.leave()


def _messages(transport: Transport) -> Iterator[wire.NotebookMessage]:
    with contextlib.suppress(EOFError, OSError):
        for message, _ in wire.CODEC.messages(transport.read, noise=True):
            yield message


def follow(
    run: NotebookRun,
    heard: Callable[[wire.NotebookMessage], None],
    take: Callable[[Mapping[str, Any]], object] | None = None,
) -> wire.NotebookEnded:
    """Hear all that is told of it, from its beginning to its end, and save the executed notebook. KeyboardInterrupt leaves it as it is.

    Args:
        take: saves the executed notebook in another way.

    Raises:
        PoolError: its head cannot be reached, or keeps nothing of it.
    """
    told, begun, why = 0, time.monotonic(), ""
    while time.monotonic() - begun < RECONNECT_SECONDS:
        try:
            ended: wire.NotebookEnded | None = None
            for number, message in enumerate(_told(run)):
                if isinstance(message, wire.Refused):
                    keys.drop_notebook(run.job_id)
                    raise PoolError(f"pool {run.name!r}: {message.problem}")
                if isinstance(message, wire.Executed) and ended is not None:
                    (take or partial(_save, run))(message.notebook)
                    _taken(run, ended)
                    return ended
                ended = message if isinstance(message, wire.NotebookEnded) else ended
                if number >= told:
                    told, begun = number + 1, time.monotonic()
                    _hear(run, message, heard)
        except (ProvisionError, OSError) as problem:
            if isinstance(problem, CloudError) and problem.kind == "missing":
                keys.drop_notebook(run.job_id)
                raise PoolError(
                    f"pool {run.name!r}: {problem}, and their copy of {run.notebook.name} is lost"
                ) from None
            why = f": {problem}"
        time.sleep(1.0)
    raise PoolError(
        f"lost contact with the notebook on pool {run.name!r}{why}; skymagic attach {run.name} tries again"
    )


def _told(run: NotebookRun) -> Iterator[wire.NotebookMessage]:
    with (
        _head(run) as node,
        contextlib.closing(
            node.run(processes.FOLLOW_NOTEBOOK, run.driver, run.job_id)
        ) as transport,
    ):
        yield from _messages(transport)


def _hear(
    run: NotebookRun, message: wire.NotebookMessage, heard: Callable[[wire.NotebookMessage], None]
) -> None:
    if isinstance(message, wire.Begun) and run.key.plan.remote:
        _held(run.job_id, message.process, message.machine)
    heard(message)


def _held(job_id: str, process: str, machine: str) -> None:
    """The pool's record here says who has it: on its own machine the notebook's kernel writes that itself."""
    for one in records.every():
        if one.job_id == job_id:
            records.write(
                replace(
                    one, process=process, machine=machine, folder=str(Path.cwd()), held=time.time()
                )
            )


def _save(run: NotebookRun, notebook: Mapping[str, Any]) -> None:
    part = run.output.with_name(f".{run.output.name}.part")
    part.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(run.output)


def _taken(run: NotebookRun, ended: wire.NotebookEnded) -> None:
    """The executed notebook is here: the head forgets it, and the pool is anybody's, who need not hear of its runs again."""
    if run.key.plan.remote:
        keys.DisplayRecord(run.job_id).become(ended.shown)
        for one in records.every():
            if one.job_id == run.job_id:
                records.write(replace(records.taken(one), process="0 ended", folder=one.folder))
    with contextlib.suppress(SkyError, OSError), _head(run) as node:
        transport = node.run(processes.FOLLOW_NOTEBOOK, run.driver, run.job_id, "remove")
        with contextlib.closing(transport):
            while transport.read():
                pass
    keys.drop_notebook(run.job_id)


def stop(name: str) -> None:
    """Stop a notebook as by its stop button; a second time kills its kernel. Raises PoolError: there is none."""
    run = keys.notebook_run(name)
    if run is None:
        raise PoolError(
            f"no notebook is executed on a pool {name!r}: {listed(keys.notebook_runs())}"
        )
    with (
        _head(run) as node,
        contextlib.closing(
            node.run(processes.FOLLOW_NOTEBOOK, run.driver, run.job_id)
        ) as transport,
    ):
        for message in _messages(transport):
            if isinstance(message, wire.NotebookEnded):
                return
            if isinstance(message, wire.Begun):
                transport.write(wire.CODEC.encode(wire.Stop()))
                return


def listed(runs: Sequence[NotebookRun]) -> str:
    """Notebook runs, a line each."""
    return "\n".join(one.words for one in runs) or "there are none"
