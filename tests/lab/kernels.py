"""Kernels of the tests' notebooks, forked from a process of their worker that has imported what each of them would.

A kernel that loads skymagic and starts a pool imports 900 modules, in 0.74 s of processor time; forked it takes 0.19 s. It is a real kernel:
``ipykernel_launcher`` runs in it, in a session, a folder and an environment of its own. What the interpreter reads as it starts cannot be
given to one that runs already: where that differs (``PYTHON…``, ``LD_…``, the locale), where the caller is in other namespaces, and where
``fresh`` asks for it, a kernel is started as Jupyter starts it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # it reads the environment as it is imported
    from ipykernel.kernelapp import IPKernelApp

ROOT = Path(__file__).resolve().parents[2]
AT_BIRTH = ("PYTHON", "LD_", "LC_", "LANG", "TZ")
"""How variables begin that an interpreter reads as it starts."""
REQUEST = 1 << 20
IMPORTED = (
    "ipykernel.kernelapp",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.magics.execution",
    "IPython.core.magics.extension",
    "IPython.extensions.storemagic",
    "skymagic.magics.magics",
    "skymagic.data.shipping.shipper",
)
"""What kernels with a pool import, and with it all that these import."""


# ------------------------------------------------------------------------------------ in the tests' process


class Parent:
    """Owns the process that forks kernels: one per worker, started when the first is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._born: dict[str, str] = {}

    def fork(self, command: list[str], cwd: str, env: Mapping[str, str]) -> Kernel | None:
        """A kernel that runs as this command would; None where that needs an interpreter of its own."""
        launcher = command.index("-m")
        if namespaces() != HERE:  # a notebook on another machine of the lab
            return None
        with self._lock:
            if self._channel is None:
                self._start(command[:launcher], env)
            if at_birth(env) != self._born:
                return None
            assert self._channel is not None
            sys.audit("os.fork")  # tests/conftest.py counts what tests start
            request = json.dumps(
                {"argv": command[launcher + 2 :], "cwd": cwd, "env": dict(env)}
            ).encode()
            socket.send_fds(self._channel, [request], [1, 2])
            return Kernel(int(self._channel.recv(64)))

    def _start(self, python: list[str], env: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._channel, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST)
        with theirs:
            # who looks for kernels by their command lines finds the forked ones too
            command = [*python, "-m", __name__, str(theirs.fileno()), "ipykernel_launcher"]
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **at_birth(env)},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._born = at_birth(env)

    def close(self) -> None:
        """End it; kernels that are left end with it. Twice is safe."""
        with self._lock:
            if self._channel is not None and self._process is not None:
                self._channel.close()
                self._process.wait()
            self._channel = self._process = None


PARENT = Parent()


def namespaces() -> list[Path]:
    """Those of the thread that calls; it may have entered others."""
    return [
        Path("/proc/thread-self/ns", name).readlink()
        for name in ("mnt", "net", "uts", "ipc", "user")
    ]


HERE = namespaces()


def at_birth(env: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter reads of this environment as it starts."""
    return {name: value for name, value in env.items() if name.startswith(AT_BIRTH)}


class Kernel:
    """A forked kernel, in the terms of `subprocess.Popen`. Its exit status is the forking process's to know."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self.returncode = 1

    def poll(self) -> int | None:
        """None while it runs."""
        return self._awaited(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        if (status := self._awaited(timeout)) is None:
            raise subprocess.TimeoutExpired("a kernel", timeout or 0.0)
        return status

    def _awaited(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], timeout)[0]:
            os.close(self._pidfd)
            self.returncode = 1
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


# ------------------------------------------------------------------------------- in the process that forks them


def serve(channel: socket.socket) -> None:
    """Fork kernels on request, until the tests' process closes the channel or ends."""
    os.environ["JPY_PARENT_PID"] = str(
        os.getpid()
    )  # ipykernel reads it as it is imported, and ends without this parent
    del sys.path[0]  # this folder's, which ``-m`` has put there, as ipykernel_launcher does
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    for name in ("tests", "tests.lab"):  # of this module
        del sys.modules[name]
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, REQUEST, 2)
        if not request:
            return
        if not (pid := os.fork()):
            channel.close()
            _become_kernel(descriptors, **json.loads(request))
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(str(pid).encode())


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_kernel(streams: list[int], argv: list[str], cwd: str, env: dict[str, str]) -> NoReturn:
    """Run ``ipykernel_launcher`` as a new interpreter would."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    parent = os.environ["JPY_PARENT_PID"]
    os.environ.clear()
    os.environ.update(env, JPY_PARENT_PID=parent)
    os.chdir(cwd)
    tempfile.tempdir = None  # it depends on the environment
    launcher = importlib.util.find_spec("ipykernel_launcher")
    assert launcher is not None
    assert launcher.origin is not None
    if "Path.cwd()" not in Path(launcher.origin).read_text():  # ipykernel 6.17 leaves it there
        sys.path.insert(0, cwd)
    sys.argv = [launcher.origin, *argv]
    sys.orig_argv[:] = [sys.executable, "-m", "ipykernel_launcher", *argv]
    raise _Kernel


class _Kernel(BaseException):
    """Leaves the loop of the process that forks, with all that it holds."""


def main() -> None:
    """Serve on the descriptor that is named on the command line; return in each kernel, and at the end."""
    with socket.socket(fileno=int(sys.argv[1])) as channel, suppress(_Kernel):
        serve(channel)
        sys.exit()
    from ipykernel.kernelapp import IPKernelApp

    app = IPKernelApp.instance()
    app.initialize()
    atexit.register(_end_control, app)
    app.start()


def _end_control(app: IPKernelApp) -> None:
    """End the thread that was asked to shut down. ipykernel 7.4 closes IOPub first, on which that thread may then wait for ever."""
    app.control_thread.stop()
    app.control_thread.join()


if __name__ == "__main__":
    main()
