"""Notebook jobs: papermill on a pool's head, independent of the client that requested it.

client ── start JOB_ID          reads an `ExecuteNotebook`, and starts ``job JOB_ID`` in a session
          └─ job JOB_ID         runs papermill; its kernel attaches to the pool in the first cell
client ── logs JOB_ID [follow]  sends the job's log and state; with ``follow`` until it ends
client ── stop JOB_ID           interrupts the job
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.rundir import RunDirectory
from skymagic.kernels.fork import holder, run_below_holder
from skymagic.wire import atomic
from skymagic.wire.codec import write_all
from skymagic.wire.notebook import (
    CODEC,
    ExecuteNotebook,
    LogText,
    NotebookMessage,
    NotebookState,
)
from skymagic.wire.processes import NOTEBOOK, NOTEBOOK_CLOSED, NOTEBOOK_JOB, NOTEBOOK_KERNEL
from skymagic.wire.record import answers, identity

# not `__name__`, which is "__main__" here: papermill's own lines go to the root logger
logger = logging.getLogger(NOTEBOOK)

POLL = 0.2
"""Seconds between two polls of the log and of the pool."""
GONE_AFTER = 5.0
"""Seconds without the pool's agent before the job stops; cells that use the pool fail sooner."""
START_TIMEOUT = 30.0
STOPPED = "stopped"
"""File in the job's folder that records a request to stop."""


def main(command: str, job_id: str, *options: str) -> None:
    """Carry out one command; see the module's docstring."""
    folder = atomic.private_folder(atomic.state_folder("notebooks") / job_id)
    if command == "start":
        _send(_start(folder))
    elif command == "job":
        _run_job(folder, _order())
    elif command == "logs":
        for message in _messages(folder, follow="follow" in options):
            _send(message)
    elif command == "stop":
        if (state := _state(folder)).status == "running":
            _stop(folder)
        _send(state)


def _order() -> ExecuteNotebook:
    order, _ = next(CODEC.messages(lambda: os.read(0, 1 << 18)))
    assert isinstance(order, ExecuteNotebook)
    return order


def _send(message: NotebookMessage) -> None:
    write_all(1, b"\n" + CODEC.encode(message))  # the newline ends the output of a login shell


def _state(folder: Path) -> NotebookState:
    """Return the state of the job, also when its process was killed."""
    try:
        state = CODEC.decode((folder / "state").read_bytes())
    except (OSError, ValueError):
        return NotebookState("none")
    assert isinstance(state, NotebookState)
    if state.status == "running" and identity(int(state.process.split()[0])) != state.process:
        return replace(state, status="lost", problem="its process was killed")
    return state


def _write_state(folder: Path, status: str, problem: str = "") -> None:
    state = NotebookState(status, problem, identity(), socket.gethostname())
    atomic.write(folder / "state", CODEC.encode(state))
    logger.info("notebook job is %s: job=%s", status, folder.name)


def _messages(folder: Path, *, follow: bool) -> Iterator[NotebookMessage]:
    """Yield the log and then the state.

    With `follow`, wait until the job has ended or the client is gone.
    """
    offset = 0
    while True:
        state = _state(folder)  # read before the log, which is complete when the job has ended
        running = state.status == "running"
        with contextlib.suppress(OSError), open(folder / "log", "rb") as log:
            log.seek(offset)
            data = log.read()
            if running:  # whole lines only, so that no character is cut
                data = data[: data.rfind(b"\n") + 1]
            offset += len(data)
            if data:
                yield LogText(data.decode(errors="replace"))
        if not (follow and running):
            yield state
            return
        # the end of the input shows that the client is gone
        if select.select([0], [], [], POLL)[0] and not os.read(0, 1):
            return


def _start(folder: Path) -> NotebookState:
    """Start the job, and return its state once it runs, or the reason for a refusal."""
    order = _order()
    if not answers(f"{folder.name}-0"):
        return NotebookState("refused", "the pool has ended")
    # two clients may start a notebook at the same time
    with RunDirectory(str(folder)).locked():
        if _state(folder).status == "running":
            return NotebookState("refused", "a notebook is being executed on it already")
        for name in ("state", "log", STOPPED, NOTEBOOK_KERNEL, NOTEBOOK_CLOSED):
            (folder / name).unlink(missing_ok=True)

        def started() -> NotebookState | None:
            return None if (state := _state(folder)).status == "none" else state

        arguments = ["-P", "-m", NOTEBOOK, "job", folder.name]
        text = CODEC.encode(order)
        if holder_path := holder():  # the job must outlive this step of the scheduler's job
            state = run_below_holder(
                holder_path, f"notebook-{folder.name}", arguments, text.decode(), started
            )
        else:
            state = _spawn(arguments, text, started)
    return state or NotebookState("refused", "it did not start in time")


def _stop(folder: Path) -> None:
    """Interrupt the job's kernel, or kill it if it was interrupted before.

    papermill then saves the notebook with its outputs so far.
    """
    interrupted = (folder / STOPPED).exists()
    # before the signal: the job looks for it as soon as its kernel has ended
    (folder / STOPPED).touch()
    with contextlib.suppress(OSError, ValueError):  # it has not started, or has ended
        process = (folder / NOTEBOOK_KERNEL).read_text()
        # the number may belong to another process by now
        if identity(pid := int(process.split()[0])) == process:
            os.killpg(pid, signal.SIGKILL) if interrupted else os.kill(pid, signal.SIGINT)


def _spawn(
    command: list[str], text: bytes, started: Callable[[], NotebookState | None]
) -> NotebookState | None:
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": _python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    deadline = time.monotonic() + START_TIMEOUT
    while (state := started()) is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return state


def _python_path() -> str:
    """Return a PYTHONPATH that leads processes in other folders to skymagic's code."""
    code = str(Path(__file__).parents[3])
    return os.pathsep.join(filter(None, [code, os.environ.get("PYTHONPATH", "")]))


# -- the job ---------------------------------------------------------------------------------------


def _run_job(folder: Path, order: ExecuteNotebook) -> None:
    """Execute the notebook to its end."""
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(order.env, PYTHONPATH=_python_path(), **{NOTEBOOK_JOB: str(folder)})
    private = folder / "private"
    if order.pool_files:  # kept apart from the user's records: the head may be the client's machine
        os.environ["XDG_STATE_HOME"] = str(private)
        for name, content in order.pool_files.items():
            atomic.write(atomic.state_folder("pools") / name, base64.b64decode(content))
    pool_ended = threading.Event()
    threading.Thread(target=_watch_pool, args=(folder, pool_ended), daemon=True).start()
    _write_state(folder, "running")
    try:
        status, problem = _execute(folder, order)
    except Exception as failure:
        status, problem = "lost", f"{type(failure).__name__}: {failure}"
    # first, because `_watch_pool` stops the job in the same way as a user
    if pool_ended.is_set():
        status, problem = "lost", "the pool has ended"
    elif (folder / STOPPED).exists() and status != "done":
        status, problem = "stopped", ""
    _write_state(folder, status, problem)
    shutil.rmtree(private, ignore_errors=True)


def _execute(folder: Path, order: ExecuteNotebook) -> tuple[str, str]:
    """Execute the notebook with papermill, installing it if needed; return status and problem."""
    try:
        import papermill
    except ImportError:
        sys.path.append(_install_papermill(folder.parent))
        import papermill
    from traitlets.config import Config

    # TCP ports would let other users of the machine read what the kernel shows
    sockets = rundir.make(f"{folder.name}-notebook")
    config = Config(KernelManager={"transport": "ipc", "ip": f"{sockets.path}/kernel"})
    handler = logging.StreamHandler()
    handler.setFormatter(_LogText("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    notebook = folder / "notebook.ipynb"
    atomic.write(notebook, json.dumps(order.notebook).encode())
    output = os.path.expanduser(order.output)
    os.close(os.open(output, os.O_CREAT | os.O_WRONLY, 0o600))  # papermill keeps its mode
    try:
        papermill.execute_notebook(
            str(notebook),
            output.replace("{", "{{").replace("}", "}}"),  # papermill would substitute parameters
            order.parameters,
            kernel_name="python3",
            cwd=os.path.expanduser(order.folder),
            progress_bar=False,
            log_output=True,
            config=config,
        )
    except papermill.PapermillExecutionError as failure:
        print(failure, file=sys.stderr)
        return "failed", f"{failure.ename}: {failure.evalue}"
    finally:
        sockets.remove()
    return "done", ""


class _LogText(logging.Formatter):
    """Formatter of printed text: a trailing newline adds no empty line."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).removesuffix("\n")


def _install_papermill(parent: Path) -> str:
    """Install papermill into a separate folder, which leaves the ranks' environment unchanged."""
    target = str(parent / f"papermill-{sys.version_info.major}.{sys.version_info.minor}")
    # an interpreter that is used as it is may have no uv beside it
    beside = os.pathsep.join([os.path.dirname(sys.executable), os.path.expanduser("~/.local/bin")])
    uv = shutil.which("uv") or shutil.which("uv", path=beside)
    print(f"installing papermill into {target} …", file=sys.stderr, flush=True)
    command = [uv or "uv", "pip", "install", "--python", sys.executable, "--quiet", "--upgrade"]
    command += ["--target", target, "papermill"]
    if not uv or subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode:
        raise ModuleNotFoundError("the head is missing papermill: %sky_pip install papermill")
    return target


def _watch_pool(folder: Path, ended: threading.Event) -> None:
    """Stop the job when its pool has ended, because no client could reach the job any more.

    It does not apply if the notebook itself ended the pool.
    """
    last_seen = time.monotonic()
    while True:
        time.sleep(POLL)
        if (folder / NOTEBOOK_CLOSED).exists() or answers(f"{folder.name}-0"):
            last_seen = time.monotonic()
        elif time.monotonic() - last_seen > GONE_AFTER:
            ended.set()
            _stop(folder)
            # if the interrupt does not end the job, another `GONE_AFTER` later it is killed
            last_seen = time.monotonic()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
