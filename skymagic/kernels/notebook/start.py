"""Begin to execute a notebook: ``python -m skymagic.kernels.notebook.start NAME`` reads an `ExecuteNotebook`, forks the driver and ends."""

from __future__ import annotations

import os
import socket
import sys

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.attach import daemonize
from skymagic.kernels.daemon.rundir import RunDirectory, RunDirectoryError
from skymagic.kernels.fork import fork, held, holder
from skymagic.wire.codec import write_all
from skymagic.wire.notebook import CODEC, ExecuteNotebook, NotebookMessage, Refused
from skymagic.wire.processes import START_NOTEBOOK
from skymagic.wire.record import answers


def main(name: str, *given: str) -> int:
    """Read the order, and begin; what is told of it comes from `follow`.

    Args:
        name: of the driver. given: its run directory and its kernel's folder, where a job's holder starts the driver itself.
    """
    order, _ = next(CODEC.messages(lambda: os.read(0, 1 << 18)))
    assert isinstance(order, ExecuteNotebook)
    if given:
        directory = RunDirectory(given[0])
        _drive(directory, directory.listen(), order, given[1])
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
            if place := holder():  # the driver is to outlive this step
                words = ["-P", "-m", START_NOTEBOOK, name, directory.path, folder]
                text = CODEC.encode(order).decode()
                sock = held(place, os.path.basename(directory.path), words, text, directory.connect)
                if sock is None:
                    return "the job's holder does not start it"
                sock.close()
            else:
                listener = directory.listen()
                fork(lambda: _drive(directory, listener, order, folder))
                listener.close()
    except (RunDirectoryError, OSError) as problem:
        return str(problem)
    return ""


def _drive(
    directory: RunDirectory, listener: socket.socket, order: ExecuteNotebook, folder: str
) -> None:
    daemonize(directory, listener)
    from skymagic.kernels.notebook.driver import Driver

    Driver(directory, listener, order, folder).run()


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
