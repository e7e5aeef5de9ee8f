"""Begin to execute a notebook: ``python -m skymagic.kernels.notebook.start NAME`` reads an `ExecuteNotebook`, forks the driver and ends."""

from __future__ import annotations

import os
import socket
import sys

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.attach import daemonize
from skymagic.kernels.daemon.rundir import RunDirectory, RunDirectoryError
from skymagic.kernels.fork import fork
from skymagic.wire.codec import write_all
from skymagic.wire.notebook import CODEC, ExecuteNotebook, NotebookMessage, Refused
from skymagic.wire.record import answers


def main(name: str) -> int:
    """Read the order, and begin; what is told of it comes from `follow`."""
    order, _ = next(CODEC.messages(lambda: os.read(0, 1 << 18)))
    assert isinstance(order, ExecuteNotebook)
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
            _fork(directory, directory.listen(), order, folder)
    except (RunDirectoryError, OSError) as problem:
        return str(problem)
    return ""


def _fork(directory: RunDirectory, listener: socket.socket, order: ExecuteNotebook, folder: str) -> None:
    def become() -> None:
        daemonize(directory, listener)
        from skymagic.kernels.notebook.driver import Driver

        Driver(directory, listener, order, folder).run()

    fork(become)
    listener.close()


if __name__ == "__main__":
    os._exit(main(sys.argv[1]))
