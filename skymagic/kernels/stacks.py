"""Where a rank is: the user's own frames of its main thread, read from another thread."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any
from weakref import WeakSet

from skymagic.kernels.proc import processor_seconds, status
from skymagic.runtime import rendezvous

if TYPE_CHECKING:  # the agent reads stacks of ranks, and has no other use for it
    import asyncio

INTERNAL = ("ipykernel", "IPython", "ipyparallel", "tornado", "asyncio", "traitlets", "skymagic")
"""Packages whose frames say nothing about the user's code; frames of other libraries are kept."""

LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Folders of Python's own modules and of installed packages."""
PACKAGES = (os.path.join(os.sep, "site-packages", ""), os.path.join(os.sep, "dist-packages", ""))
"""Parts of the paths of packages that are installed elsewhere."""
IO_ERRORS = (RuntimeError, OSError)  # torch's errors of collectives are RuntimeErrors
CODE_CHARACTERS = 80
"""Characters of a cell's line that are told, at most."""


def main_frame() -> FrameType | None:
    """Where the main thread is now; None if it has no frame."""
    main = threading.main_thread().ident
    return sys._current_frames().get(main) if main is not None else None


def of_main_thread(kernel: Any) -> dict[str, Any]:
    """The stack of the main thread, outermost first: ``{"busy": …, "frames": [{"file", "line", "name"}, …]}``, with the
    number of collectives begun (``"collectives"``), the processor time in seconds of this process with those that it has
    started (``"cpu"``), their process IDs (``"processes"``), and the bytes that all of them have read and written (``"io"``).

    Frames of cells have ``"cell": n`` in the place of a file name, and their line as ``"code"``; those of Python's own modules and
    of installed packages have ``"library": True``. Of a cell that awaits, the stack is that of what it awaits.
    """
    frames = plain_frames(kernel, walk(main_frame()))
    awaited = kernel.interrupts.awaited
    if awaited is not None and not any(
        "cell" in one for one in frames
    ):  # the main thread is in the event loop
        frames = of_task(kernel, awaited)
    started = descendants(os.getpid())
    return {
        "busy": kernel.busy,
        "frames": frames,
        "collectives": collectives(),
        "cpu": processor_time_of_all(started),
        "processes": sorted(started),
        "io": bytes_moved(started),
    }


def plain_frames(kernel: Any, stack: Sequence[FrameType]) -> list[dict[str, Any]]:
    """Frames, outermost first, as plain values: from the cell on, if there is one."""
    cells = getattr(kernel.shell.compile, "_filename_map", {})
    frames = [plain(one, cells) for one in stack if not internal(one.f_code.co_filename)]
    start = next((i for i, one in enumerate(frames) if "cell" in one), 0)
    return frames[start:]


def of_task(kernel: Any, task: asyncio.Task[Any]) -> list[dict[str, Any]]:
    """The frames of a cell that awaits, outermost first."""
    found, waiting = [], task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        found.append(frame)
        waiting = waiting.cr_await  # type: ignore[union-attr]  # a coroutine, as it has a frame
    return plain_frames(kernel, found)


def place(frames: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The two frames of a stack that say in a few words where it is: the innermost of the user's own, and the innermost of all."""
    own = next((frame for frame in reversed(frames) if not is_library(frame.get("file", ""))), None)
    return [own or frames[0], frames[-1]] if frames else []


def is_library(file: str) -> bool:
    """Whether a file is of an installed package, or of Python itself, and not the user's own."""
    return file.startswith((*LIBRARIES, "<frozen ")) or any(part in file for part in PACKAGES)


def collectives() -> int | None:
    """How many collectives this rank has begun; None without a process group that counts them."""
    counts = (plugin.collectives() for plugin in list(rendezvous.active_plugins))
    return next((count for count in counts if count is not None), None)


SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""Makes a rank write its stack from the signal handler, in C, also while native code holds the interpreter."""
_threads_before: WeakSet[threading.Thread] = WeakSet()
"""Threads that ran before the present cell: ours, the kernel's and libraries', which exchange messages all the time."""
FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)


def on_signal(file: IO[bytes]) -> None:
    """Let this process write the stack of its main thread to a file, at its end, when `SIGNAL` comes; main thread only.

    Called again before each cell, whose own threads are those that start later: programs set the handlers of all signals (Lightning's Trainer does after each fit).
    """
    faulthandler.unregister(SIGNAL)
    _threads_before.clear()
    _threads_before.update(threading.enumerate())
    _threads_before.discard(threading.main_thread())
    # Python does not know faulthandler's handler: whoever restores what Python knows must not restore SIG_DFL, which kills
    signal.signal(SIGNAL, signal.SIG_IGN)
    faulthandler.register(SIGNAL, file=file, all_threads=False, chain=False)


def catches(pid: int) -> bool:
    """Whether a process has a handler of `SIGNAL`, which would kill it otherwise; True where the system does not tell."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        caught = next((int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:")), 0)
        return bool(caught >> (SIGNAL - 1) & 1)
    return not os.path.exists("/proc/self")


def parse(text: str) -> dict[str, Any] | None:
    """What `of_main_thread` tells, from faulthandler's text; None if there is no stack in it."""
    found = [
        {"line": int(one["line"]), "name": one["name"], "file": one["file"]}
        for one in FRAME.finditer(text)
    ]
    frames = [frame for frame in reversed(found) if not internal(str(frame["file"]))]
    start = next((i for i, frame in enumerate(frames) if "ipykernel_" in str(frame["file"])), 0)
    for frame in frames:
        if "ipykernel_" in str(frame["file"]):
            frame["cell"] = frame.pop("file")
        elif is_library(str(frame["file"])):
            frame["library"] = True
    if not frames:
        return None
    return {"busy": True, "frames": frames[start:], "collectives": None, "cpu": 0.0, "native": True}


def processor_time(thread: int | None) -> float:
    """Return the processor time of a thread in seconds; 0.0 where the system does not tell."""
    if thread is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def processor_time_of_all(started: Sequence[int]) -> float:
    """Return the processor time in seconds of this process and of those that it has started, as far as /proc tells."""
    used = time.process_time()
    for pid in started:
        with contextlib.suppress(OSError):
            used += processor_seconds(status(pid))
    return used


def bytes_moved(started: Sequence[int]) -> int:
    """Return how many bytes the user's code has read and written by system calls; 0 where the system does not count them.

    It counts files and what a rank prints, whether or not the notebook shows it, but not threads that ran before the cell.
    """
    files = [f"/proc/{pid}/io" for pid in started]
    # the main thread's native_id is that of the forkserver: Python 3.11 does not renew it after a fork
    threads = [os.getpid()]
    threads += [
        thread.native_id
        for thread in threading.enumerate()
        if thread.native_id is not None
        and thread is not threading.main_thread()
        and thread not in _threads_before
        and not thread.name.startswith("skymagic")
    ]
    files += [f"/proc/self/task/{thread}/io" for thread in threads]
    return sum(map(_bytes_in, files))


def _bytes_in(file: str) -> int:
    """Return the bytes read and written by the process or thread whose file of counters this is; 0 if it has ended."""
    with contextlib.suppress(OSError, ValueError):
        counters = dict(line.split(": ", 1) for line in Path(file).read_text().splitlines())
        return int(counters["rchar"]) + int(counters["wchar"])
    return 0


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have started in turn."""
    found = children(pid)
    for started in found:  # grows meanwhile
        found += children(started)
    return found


def children(pid: int) -> list[int]:
    """The processes that a process has started and that have not ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended, or there is no /proc
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def walk(frame: FrameType | None) -> list[FrameType]:
    """All frames, outermost first."""
    return [] if frame is None else [each for each, _ in traceback.walk_stack(frame)][::-1]


def walk_to_error(frame: FrameType | None, problem: BaseException | None) -> list[FrameType]:
    """All frames, outermost first; while a library handles what a collective or a connection raised, down to where that was raised."""
    stack = walk(frame)
    raised = (
        [each for each, _ in traceback.walk_tb(problem.__traceback__)]
        if isinstance(problem, IO_ERRORS)
        else []
    )
    handled_at = stack.index(raised[0]) if raised and raised[0] in stack else len(stack)
    by_library = all(is_library(each.f_code.co_filename) for each in stack[handled_at:])
    return (
        stack[:handled_at] + raised if raised and handled_at < len(stack) and by_library else stack
    )


def internal(filename: str) -> bool:
    """Whether a file belongs to the machinery below the cell."""
    parts = Path(filename).parts
    return any(name in parts for name in INTERNAL) or filename.startswith("<frozen")


def plain(frame: FrameType, cells: dict[str, Any]) -> dict[str, Any]:
    """One frame as plain values."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    where: dict[str, Any] = {"line": line, "name": frame.f_code.co_name}
    if file not in cells and is_library(file):
        return {**where, "file": file, "library": True}
    code = linecache.getline(file, line).strip()
    cut = len(code) > CODE_CHARACTERS
    where["code"] = f"{code[: CODE_CHARACTERS - 1]}…" if cut else code
    return {**where, "cell": cells[file]} if file in cells else {**where, "file": file}
