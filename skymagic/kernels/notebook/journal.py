"""What is told of a notebook that is executed: kept in the user's state folder until it is taken, and sent to whoever follows.

``python -m skymagic.kernels.notebook.journal NAME JOB [remove]`` tells of a notebook that is executed here, or was.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.attach import relay
from skymagic.wire import atomic
from skymagic.wire.codec import write_all
from skymagic.wire.notebook import (
    CODEC,
    CellOutput,
    Executed,
    NotebookEnded,
    NotebookMessage,
    Refused,
)

TOLD_BYTES = 1 << 20  # bytes of each cell's output that are told; the executed notebook has all
KEPT_SECONDS = 30 * 86400.0
"""After which what nobody has taken is removed by the next one."""
PIECE = 1 << 18


def folder(job_id: str) -> Path:
    """Where those of a pool are kept on its head: for the user alone."""
    return atomic.state_folder("notebooks") / job_id


def shown(job_id: str) -> str:
    """How far the runs of a pool were shown by the kernel, which keeps that beside the pools' records. On a head that has no record of
    the pool it is removed."""
    text = ""
    with suppress(OSError):
        path = folder(job_id).parents[1] / "pools" / f"{job_id}.shown"
        text = path.read_bytes().replace(b"\0", b" ").decode()
        if not path.with_suffix(".json").exists():
            path.unlink()
    return text


class Journal:
    """The folder of one notebook, written while the driver lives.

    Args:
        job_id: the pool's; what an earlier notebook has left there is removed.
    """

    def __init__(self, job_id: str) -> None:
        self.folder = folder(job_id)
        remove(job_id)
        _sweep(self.folder.parent)
        atomic.private_folder(self.folder)
        self._file = os.open(self.folder / "events", os.O_CREAT | os.O_WRONLY, 0o600)
        self._changed = threading.Condition()
        self._size = 0
        self._told: dict[int, int] = {}
        self.over = False

    def tell(self, message: NotebookMessage) -> None:
        """Tell everybody, now and later."""
        if isinstance(message, CellOutput):
            told = self._told[message.cell] = self._told.get(message.cell, 0) + len(message.text)
            if told - len(message.text) > TOLD_BYTES:
                return
            if told > TOLD_BYTES:
                message = CellOutput(
                    message.cell,
                    "note",
                    "[what else this cell shows is in the executed notebook]\n",
                )
        line = CODEC.encode(message)
        with self._changed:
            write_all(self._file, line)
            self._size += len(line)
            self.over = isinstance(message, NotebookEnded)
            self._changed.notify_all()

    def save(self, notebook: dict[str, Any]) -> None:
        """Keep the notebook as it is now: the one before, or this one, whole."""
        part = self.folder / "executed.part"
        with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
            json.dump(notebook, file)
        part.replace(self.folder / "executed.ipynb")

    def follow(self, send: Callable[[bytes], object]) -> None:
        """Send all that was told, and what will be, to the end. Raises what `send` raises."""
        with open(self.folder / "events", "rb") as file:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._size > file.tell() or self.over)
                    left, over = self._size - file.tell(), self.over
                while left > 0:
                    piece = file.read(min(left, PIECE))
                    send(piece)
                    left -= len(piece)
                if over:
                    break
        send(_executed(self.folder))


def left(job_id: str) -> Iterator[bytes]:
    """All that is to be told of one whose driver has ended."""
    place = folder(job_id)
    last = b""
    try:
        with open(place / "events", "rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # a driver that was killed may have written half of one
                    last = line
                    yield line
    except OSError:
        yield CODEC.encode(Refused("nothing is kept here of a notebook that was executed"))
        return
    if not last.startswith(b'["NotebookEnded"'):
        yield CODEC.encode(
            NotebookEnded("lost", "the process that executed it was killed, or its machine was")
        )
    yield _executed(place)


def _executed(place: Path) -> bytes:
    with open(place / "executed.ipynb") as file:
        return CODEC.encode(Executed(json.load(file)))


def remove(job_id: str) -> None:
    """Remove what is kept; twice is safe."""
    shutil.rmtree(folder(job_id), ignore_errors=True)


def _sweep(parent: Path) -> None:
    with suppress(OSError):
        for entry in os.scandir(parent):
            with suppress(OSError):
                if entry.stat().st_mtime < time.time() - KEPT_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)


def main(name: str, job_id: str, what: str = "") -> int:
    """Relay between the driver and the standard streams until either ends; where there is none, tell what it has left."""
    if what == "remove":
        remove(job_id)
        return 0
    write_all(1, b"\n")  # ends what a login shell has printed
    with suppress(OSError):
        found = rundir.find(name)
        if found is not None and (sock := found.connect()) is not None:
            relay(sock)
            return 0
        for piece in left(job_id):
            write_all(1, piece)
    return 0


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
