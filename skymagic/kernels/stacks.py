"""Where a rank is: the user's own frames of its main thread, read from another thread."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

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
    groups = sys.modules.get("skymagic.kernels.groups")
    begun = groups.collectives() if groups is not None else None
    return {"busy": kernel.busy, "frames": frames[start:], "collectives": begun, "cpu": processor_time(main)}


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
