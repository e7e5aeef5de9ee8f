"""Begin to execute a notebook: ``python -m skymagic.kernels.notebook.start NAME`` reads an `ExecuteNotebook`, forks the driver and ends."""

from __future__ import annotations

import os
import socket
import sys
import time

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.attach import daemonize
from skymagic.kernels.daemon.rundir import RunDirectory, RunDirectoryError
from skymagic.kernels.fork import HOLDER_POLL, fork, holder, order_held
from skymagic.wire.codec import write_all
from skymagic.wire.notebook import CODEC, ExecuteNotebook, NotebookMessage, Refused
from skymagic.wire.processes import START_NOTEBOOK
from skymagic.wire.record import answers


def main(name: str, *held: str) -> int:
    """Read the order, and begin; what is told of it comes from `follow`.

    Args:
        name: of the driver. held: its run directory and its kernel's folder, where a job's holder starts the driver itself.
    """
    order, _ = next(CODEC.messages(lambda: os.read(0, 1 << 18)))
    assert isinstance(order, ExecuteNotebook)
    if held:
        directory = RunDirectory(held[0])
        _drive(directory, directory.listen(), order, held[1])
        return 0
    problem = _begun(name, order)
    if problem:
        reply: NotebookMessage = Refused(problem)
        write_all(1, b"\n" + CODEC.encode(reply))
    return 1 if problem else 0


def _begun(name: str, order: ExecuteNotebook) -> str:
    """Why it was not begun; "" when the driver listens."""
    folder = os.path.expanduser(order.folder)
    if not os.path.isdir(folder):
        return f"there is no folder {folder} for its kernel"
    try:
        import jupyter_client  # noqa: F401
        import platformdirs  # noqa: F401
        from IPython.core.interactiveshell import InteractiveShell  # noqa: F401
    except ImportError as missing:
        return f"the head is missing {missing.name}, which a notebook's kernel needs: %sky_pip install {missing.name}"
    if not answers(f"{order.job_id}-0"):
        return "the pool has ended"
    try:
        directory = rundir.make(name)
        with directory.locked():
            if (other := directory.connect()) is not None:
                other.close()
                return "a notebook is executed on it already"
            if place := holder():
                _order(place, directory, order, folder)
            else:
                _fork(directory, directory.listen(), order, folder)
    except (RunDirectoryError, OSError) as problem:
        return str(problem)
    return ""


def _fork(directory: RunDirectory, listener: socket.socket, order: ExecuteNotebook, folder: str) -> None:
    fork(lambda: _drive(directory, listener, order, folder))
    listener.close()


def _drive(directory: RunDirectory, listener: socket.socket, order: ExecuteNotebook, folder: str) -> None:
    daemonize(directory, listener)
    from skymagic.kernels.notebook.driver import Driver

    Driver(directory, listener, order, folder).run()


def _order(place: str, directory: RunDirectory, order: ExecuteNotebook, folder: str) -> None:
    """Have the job's holder in this folder start the driver, for it is to outlive this step. Raises OSError where there is none."""
    name = os.path.basename(directory.path)
    words = ["-P", "-m", START_NOTEBOOK, name, directory.path, folder]
    deadline = order_held(place, name, words, CODEC.encode(order).decode())
    while (sock := directory.connect()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("the job's holder does not start it")
        time.sleep(HOLDER_POLL)
    sock.close()


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
