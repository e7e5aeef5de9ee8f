"""Where a rank is: the user's own frames of its main thread, read from another thread."""

from __future__ import annotations

import faulthandler
import re
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from skymagic.runtime import context

INTERNAL = ("ipykernel", "IPython", "ipyparallel", "tornado", "asyncio", "traitlets", "skymagic")
"""Packages whose frames say nothing about the user's code; frames of other libraries are kept."""


def of_main_thread(kernel: Any) -> dict[str, Any]:
    """The stack of the main thread, outermost first: ``{"busy": …, "frames": [{"file", "line", "name"}, …]}``, with the
    number of collectives begun (``"collectives"``) and the thread's processor time in seconds (``"cpu"``).

    Frames of cells have ``"cell": n`` in the place of a file name.
    """
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    cells = getattr(kernel.shell.compile, "_filename_map", {})
    frames = [plain(one, cells) for one in walk(frame) if not internal(one.f_code.co_filename)]
    start = next((i for i, one in enumerate(frames) if "cell" in one), 0)
    return {"busy": kernel.busy, "frames": frames[start:], "collectives": collectives(), "cpu": processor_time(main)}


def collectives() -> int | None:
    """How many collectives this rank has begun; None without a process group that counts them."""
    counts = (plugin.collectives() for plugin in list(context.active_plugins))
    return next((count for count in counts if count is not None), None)


SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""Makes a rank write its stack from the signal handler, in C, also while native code holds the interpreter."""
FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)


def on_signal(path: str) -> None:
    """Let this process write the stack of its main thread to a file, at its end, when `SIGNAL` comes."""
    file = open(path, "ab", buffering=0)  # noqa: SIM115  # open as long as the process
    faulthandler.register(SIGNAL, file=file, all_threads=False, chain=False)


def parse(text: str) -> dict[str, Any] | None:
    """What `of_main_thread` tells, from faulthandler's text; None if there is no stack in it."""
    found = [{"line": int(one["line"]), "name": one["name"], "file": one["file"]} for one in FRAME.finditer(text)]
    frames = [frame for frame in reversed(found) if not internal(str(frame["file"]))]
    start = next((i for i, frame in enumerate(frames) if "ipykernel_" in str(frame["file"])), 0)
    for frame in frames:
        if "ipykernel_" in str(frame["file"]):
            frame["cell"] = frame.pop("file")
    if not frames:
        return None
    return {"busy": True, "frames": frames[start:], "collectives": None, "cpu": 0.0, "native": True}


def processor_time(thread: int | None) -> float:
    """Seconds that a thread has spent on the processor; 0.0 where the system does not tell."""
    if thread is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def walk(frame: FrameType | None) -> list[FrameType]:
    """All frames, outermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def internal(filename: str) -> bool:
    """Whether a file belongs to the machinery below the cell."""
    parts = Path(filename).parts
    return any(name in parts for name in INTERNAL) or filename.startswith("<frozen")


def plain(frame: FrameType, cells: dict[str, Any]) -> dict[str, Any]:
    """One frame as plain values."""
    where: dict[str, Any] = {"line": frame.f_lineno, "name": frame.f_code.co_name}
    number = cells.get(frame.f_code.co_filename)
    return {**where, "cell": number} if number is not None else {**where, "file": frame.f_code.co_filename}
