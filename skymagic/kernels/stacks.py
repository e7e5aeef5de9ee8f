"""The user's own frames of a rank's main thread, read from another thread."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import linecache
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, Any
from weakref import WeakSet

from skymagic.data.capture.numbering import CELL_FILE, numbers_by_file
from skymagic.kernels.proc import processor_seconds, status
from skymagic.wire.queries import Stack, StackFrame

if TYPE_CHECKING:  # the agent imports this module, and does not need asyncio
    import asyncio

INTERNAL = ("ipykernel", "IPython", "ipyparallel", "tornado", "asyncio", "traitlets", "skymagic")
"""Packages whose frames are not about the user's code; frames of other libraries are kept."""

LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""Folders of Python's own modules and of installed packages."""
PACKAGES = (os.path.join(os.sep, "site-packages", ""), os.path.join(os.sep, "dist-packages", ""))
"""Path components of packages that are installed elsewhere."""
IO_ERRORS = (RuntimeError, OSError)  # torch's errors of collectives are RuntimeErrors
CODE_CHARACTERS = 80
"""Maximum number of characters of a cell's line that are reported."""


def main_frame() -> FrameType | None:
    """Return the current frame of the main thread, or None if it has none."""
    main = threading.main_thread().ident
    return sys._current_frames().get(main) if main is not None else None


def of_main_thread(kernel: Any) -> Stack:
    """Return the stack of the main thread; for a cell that awaits, that of the coroutine."""
    frames = plain_frames(kernel, walk(main_frame()))
    awaited = kernel.interrupts.awaited
    # the main thread is in the event loop
    if awaited is not None and not any(frame.cell is not None for frame in frames):
        frames = of_task(kernel, awaited)
    started = descendants(os.getpid())
    return Stack(
        busy=kernel.busy,
        frames=tuple(frames),
        collectives=collectives(),
        cpu=processor_time_of_all(started),
        processes=tuple(sorted(started)),
        io=bytes_moved(started),
    )


def plain_frames(kernel: Any, stack: Sequence[FrameType]) -> list[StackFrame]:
    """Describe frames, outermost first, starting at the cell if there is a cell."""
    cells = numbers_by_file(kernel.shell.compile)
    frames = [plain(frame, cells) for frame in stack if not is_internal(frame.f_code.co_filename)]
    start = next((i for i, frame in enumerate(frames) if frame.cell is not None), 0)
    return frames[start:]


def of_task(kernel: Any, task: asyncio.Task[Any]) -> list[StackFrame]:
    """Return the frames of a cell that awaits, outermost first."""
    coroutine_frames, coroutine = [], task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        coroutine_frames.append(frame)
        coroutine = coroutine.cr_await  # type: ignore[union-attr]  # a coroutine, as it has a frame
    return plain_frames(kernel, coroutine_frames)


def most_telling_frames(frames: Sequence[StackFrame]) -> tuple[StackFrame, ...]:
    """Return the two frames that best describe a stack: the user's innermost, and the innermost."""
    own = next((frame for frame in reversed(frames) if not is_library(frame.file)), None)
    return (own or frames[0], frames[-1]) if frames else ()


def is_library(file: str) -> bool:
    """Return True if a file belongs to an installed package or to Python itself."""
    return file.startswith((*LIBRARIES, "<frozen ")) or any(part in file for part in PACKAGES)


def collectives() -> int | None:
    """Return how many collectives this rank has started, or None if no process group counts."""
    from skymagic.plugins.plugin import active_plugins  # the agent needs none of it

    counts = (plugin.collectives() for plugin in list(active_plugins))
    return next((count for count in counts if count is not None), None)


SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
"""Makes a rank write its stack from a C signal handler, even while native code holds the GIL."""
_threads_before: WeakSet[threading.Thread] = WeakSet()
"""Threads that ran before the current cell.

They are ours, the kernel's and libraries', which exchange messages all the time.
"""
FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)


def dump_stack_on_signal(file: IO[bytes]) -> None:
    """Make this process append its main thread's stack to a file on `SIGNAL`; main thread only.

    Called again before each cell, for two reasons: threads that start later are the cell's own, and
    programs reset the handlers of all signals (Lightning's Trainer does after each fit).
    """
    # a program may have replaced the handler
    faulthandler.unregister(SIGNAL)
    _threads_before.clear()
    _threads_before.update(threading.enumerate())
    _threads_before.discard(threading.main_thread())
    # Python does not know faulthandler's handler: code that restores Python's handlers must not
    # restore SIG_DFL, which kills
    signal.signal(SIGNAL, signal.SIG_IGN)
    faulthandler.register(SIGNAL, file=file, all_threads=False, chain=False)


def catches_signal(pid: int) -> bool:
    """Return True if a process handles `SIGNAL`, which would kill it otherwise.

    Also returns True if that is unknown.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        # the bit mask of handled signals
        caught = next((int(line.split()[1], 16) for line in file if line.startswith(b"SigCgt:")), 0)
        return bool(caught >> (SIGNAL - 1) & 1)
    return not os.path.exists("/proc/self")


def parse(text: str) -> Stack | None:
    """Convert faulthandler's text to a result of `of_main_thread`, or None if it has no stack."""
    frames = [
        _parsed_frame(match["file"], int(match["line"]), match["name"])
        for match in FRAME.finditer(text)
        if not is_internal(match["file"])
    ][::-1]
    start = next((i for i, frame in enumerate(frames) if frame.cell is not None), 0)
    return Stack(busy=True, frames=tuple(frames[start:]), native=True) if frames else None


def _parsed_frame(file: str, line: int, name: str) -> StackFrame:
    if CELL_FILE.search(file):
        return StackFrame(name, line, cell=file)
    return StackFrame(name, line, file, is_library=is_library(file))


def processor_time(thread: int | None) -> float:
    """Return the processor seconds of a thread, 0.0 if the system does not report them."""
    if thread is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def processor_time_of_all(started: Sequence[int]) -> float:
    """Return the processor seconds of this process and of `started`, if /proc exists."""
    used = time.process_time()
    for pid in started:
        with contextlib.suppress(OSError):
            used += processor_seconds(status(pid))
    return used


def bytes_moved(started: Sequence[int]) -> int:
    """Return how many bytes the user's code has moved by system calls, 0 if they are not counted.

    The number includes files and a rank's output, shown or not, but no threads that ran before the
    cell.
    """
    files = [f"/proc/{pid}/io" for pid in started]
    # the main thread's native_id is the forkserver's: Python 3.11 does not update it after a fork
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
    """Return the bytes read and written according to a counter file, 0 if its owner has ended."""
    with contextlib.suppress(OSError, ValueError):
        counters = dict(line.split(": ", 1) for line in Path(file).read_text().splitlines())
        return int(counters["rchar"]) + int(counters["wchar"])
    return 0


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, directly or indirectly."""
    pids = children(pid)
    for child in pids:  # the list grows during the loop
        pids += children(child)
    return pids


def children(pid: int) -> list[int]:
    """Return the live child processes of a process."""
    pids: list[int] = []
    with contextlib.suppress(OSError):  # it has ended, or the system has no /proc
        for thread in os.listdir(f"/proc/{pid}/task"):
            pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return pids


def walk(frame: FrameType | None) -> list[FrameType]:
    """Return all frames, outermost first."""
    return [] if frame is None else [outer for outer, _ in traceback.walk_stack(frame)][::-1]


def walk_to_error(frame: FrameType | None, problem: BaseException | None) -> list[FrameType]:
    """Return all frames, outermost first, down to where an error was raised.

    The latter only applies while a library handles an error of a collective or a connection.
    """
    stack = walk(frame)
    raised = (
        [stack_frame for stack_frame, _ in traceback.walk_tb(problem.__traceback__)]
        if isinstance(problem, IO_ERRORS)
        else []
    )
    handled_at = stack.index(raised[0]) if raised and raised[0] in stack else len(stack)
    by_library = all(
        is_library(stack_frame.f_code.co_filename) for stack_frame in stack[handled_at:]
    )
    return (
        stack[:handled_at] + raised if raised and handled_at < len(stack) and by_library else stack
    )


def is_internal(filename: str) -> bool:
    """Return True if a file belongs to the machinery below the cell."""
    return filename.startswith((*_internal_folders(), "<frozen"))


@cache
def _internal_folders() -> tuple[str, ...]:
    """Return the folders of `INTERNAL`, each with a slash at its end.

    A package's name within a path is not enough: a clone of this project is called ``skymagic``,
    and so is everything below it, such as an environment with torch in it and the user's modules.
    """
    folders: list[str] = []
    for name in INTERNAL:
        with contextlib.suppress(ImportError, ValueError):  # the agent may lack some of them
            spec = importlib.util.find_spec(name)  # does not import the package
            folders += (spec and spec.submodule_search_locations) or ()
    return tuple(os.path.join(folder, "") for folder in folders)


def plain(frame: FrameType, cells: Mapping[str, int | str]) -> StackFrame:
    """Describe a frame.

    Args:
        cells: numbers of cells by their file names.
    """
    # Some instructions belong to no line, and an interrupt may arrive at one of them: `f_lineno` is
    # None then.
    file, line = frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno
    name = frame.f_code.co_name
    if file not in cells and is_library(file):
        return StackFrame(name, line, file, is_library=True)
    code = linecache.getline(file, line).strip()
    code = f"{code[: CODE_CHARACTERS - 1]}…" if len(code) > CODE_CHARACTERS else code
    if file in cells:
        return StackFrame(name, line, cell=cells[file], code=code)
    return StackFrame(name, line, file, code=code)
