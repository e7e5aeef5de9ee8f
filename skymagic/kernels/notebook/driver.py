"""The process that executes a notebook on its pool's head: cell by cell, kept after each of them, told to whoever follows.

It ends with the notebook, at the first cell that fails (unless that is tagged ``raises-exception``), when it is stopped, or when the pool
has ended under it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from skymagic.kernels.daemon.rundir import RunDirectory
from skymagic.kernels.notebook import journal
from skymagic.kernels.notebook.journal import Journal
from skymagic.kernels.notebook.kernel import Kernel, KernelDied, Outputs, plain
from skymagic.wire import notebook as wire
from skymagic.wire import processes
from skymagic.wire.authentication import accepted
from skymagic.wire.record import answers, identity

POLL = 1.0
"""Seconds between two looks whether the pool is there still."""
GONE_AFTER = 5.0
"""Seconds without the pool's daemon after which a cell that goes on is stopped: cells that use the pool fail by themselves before."""
LAST_WORDS = 10.0
"""Seconds that followers have to hear of the end."""
NOTEBOOK = f'__import__("importlib").import_module("{processes.NOTEBOOK}")'


class Driver:
    """Executes one notebook.

    Args:
        directory: its run directory, removed at the end.
        listener: where followers connect.
        order: what is to be executed.
        folder: where its kernel runs.
    """

    def __init__(
        self,
        directory: RunDirectory,
        listener: socket.socket,
        order: wire.ExecuteNotebook,
        folder: str,
    ) -> None:
        self._directory, self._listener, self._order, self._folder = (
            directory,
            listener,
            order,
            folder,
        )
        self._journal = Journal(order.job_id)
        self._notebook = order.notebook
        self._outputs: list[Outputs] = []
        self._kernel: Kernel | None = None
        self._stops = 0  # how often it was told to stop
        self._pool_gone = False
        self._followers: list[threading.Thread] = []

    def run(self) -> None:
        """Execute it to its end; then nothing is left but the journal."""
        cells = self._notebook["cells"]
        for cell in cells:
            if cell["cell_type"] == "code":
                cell["outputs"], cell["execution_count"] = [], None
        self._journal.save(self._notebook)
        self._journal.tell(wire.Begun(identity(), socket.gethostname(), len(cells)))
        for target in (self._listen, self._watch_pool):
            threading.Thread(target=target, daemon=True).start()
        try:
            status, problem = self._executed()
        except (
            Exception
        ) as failure:  # a full disk, say: whoever follows hears of it, if anything can be told
            status, problem = "lost", f"{type(failure).__name__}: {failure}"
        finally:
            if self._kernel is not None:
                self._kernel.close()
        self._finish(status, problem)

    def _executed(self) -> tuple[str, str]:
        """The notebook's status, and the problem that no cell has raised."""
        file = self._journal.folder / "key"
        with open(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600), "w") as key:
            key.write(self._order.key)
        path = os.pathsep.join(filter(None, [_code(), os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, **self._order.env, "PYTHONPATH": path}
        try:
            self._kernel = Kernel(
                self._directory.path, str(self._journal.folder / "kernel.log"), self._folder, env
            )
            reply = self._kernel.execute(f"{NOTEBOOK}.enter({str(file)!r})")
            if reply["status"] != "ok":
                return "lost", f"{reply['ename']}: {reply['evalue']}"
            failed = self._cells(self._kernel)
            gone = self._pool_ended()
            if not gone:
                self._kernel.execute(f"{NOTEBOOK}.leave()")
            if self._stops and failed:
                return "stopped", ""
            if failed and gone:
                return "lost", "the pool has ended"
        except KernelDied as problem:
            return ("stopped", "") if self._stops > 1 else ("lost", str(problem))
        return ("failed" if failed else "done"), ""

    def _cells(self, kernel: Kernel) -> bool:
        """Whether a cell has failed, which ends it."""
        for number, cell in enumerate(self._notebook["cells"]):
            source = text(cell)
            if cell["cell_type"] != "code" or not source.strip():
                continue
            self._journal.tell(wire.CellBegun(number, source))
            try:
                reply = self._cell(kernel, number, cell, source)
            finally:
                self._journal.save(self._notebook)
            if reply["status"] != "ok":
                expected = "raises-exception" in (cell.get("metadata") or {}).get("tags", ())
                if not expected:
                    trace = "\n".join(reply.get("traceback") or ())
                    self._journal.tell(
                        wire.CellFailed(
                            number, reply.get("ename", ""), reply.get("evalue", ""), trace
                        )
                    )
                    return True
            if self._stops:
                return True
        return False

    def _cell(
        self, kernel: Kernel, number: int, cell: dict[str, Any], source: str
    ) -> dict[str, Any]:
        outputs = Outputs(cell["outputs"])
        self._outputs.append(outputs)

        def hear(kind: str, content: Mapping[str, Any]) -> None:
            if kind == "update_display_data":
                for one in self._outputs:
                    one.update(content)
                return
            outputs.take(kind, content)
            if kind in ("stream", "display_data", "execute_result"):
                name, words = plain(kind, content)
                if name:
                    self._journal.tell(wire.CellOutput(number, name, words))

        try:
            reply = kernel.execute(source, hear)
        except KernelDied as problem:
            outputs.take(
                "error",
                {"ename": "KernelDied", "evalue": str(problem), "traceback": [str(problem)]},
            )
            raise
        cell["execution_count"] = reply.get("execution_count")
        return reply

    # -- who follows ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._listener.setblocking(True)
        for sock in accepted(self._listener):  # closed at the end
            follower = threading.Thread(target=self._tell, args=(sock,), daemon=True)
            self._followers.append(follower)
            follower.start()
            threading.Thread(target=self._hear, args=(sock,), daemon=True).start()

    def _tell(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            self._journal.follow(sock.sendall)
            sock.shutdown(socket.SHUT_WR)

    def _hear(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, EOFError), sock:
            for message, _ in wire.CODEC.messages(lambda: sock.recv(1 << 16)):
                if isinstance(message, wire.Stop):
                    self._stop()

    def _stop(self) -> None:
        self._stops += 1
        if self._kernel is not None:
            self._kernel.signal(signal.SIGINT if self._stops == 1 else signal.SIGKILL)

    # -- the pool ------------------------------------------------------------------------------------------------------

    def _pool_ended(self) -> bool:
        """Whether the pool has ended, and not by the notebook itself, which leaves a mark then."""
        closed = (self._journal.folder / "closed").exists()
        return not (closed or answers(f"{self._order.job_id}-0"))

    def _watch_pool(self) -> None:
        """End a cell that goes on without its pool: nobody would look for it."""
        since = None
        while not self._journal.over:
            time.sleep(POLL)
            since = (since or time.monotonic()) if self._pool_ended() else None
            if (
                since is not None
                and time.monotonic() - since > GONE_AFTER
                and self._kernel is not None
            ):
                self._kernel.signal(signal.SIGKILL if self._pool_gone else signal.SIGINT)
                self._pool_gone, since = True, time.monotonic()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, status: str, problem: str) -> None:
        with contextlib.suppress(OSError):
            (self._journal.folder / "key").unlink(missing_ok=True)
            self._journal.save(self._notebook)
        self._journal.tell(wire.NotebookEnded(status, problem, journal.shown(self._order.job_id)))
        self._listener.close()
        self._directory.remove()
        deadline = time.monotonic() + LAST_WORDS
        for follower in self._followers:
            follower.join(max(0.0, deadline - time.monotonic()))


def text(cell: Mapping[str, Any]) -> str:
    """A cell's source, which a file may have as lines."""
    source = cell.get("source") or ""
    return source if isinstance(source, str) else "".join(source)


def _code() -> str:
    """Where skymagic's code is: the kernel runs elsewhere."""
    from skymagic import __file__ as face

    return os.path.dirname(os.path.dirname(os.path.abspath(face or sys.argv[0])))
