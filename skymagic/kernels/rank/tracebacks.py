"""What a rank says of an exception: its message and the traceback that IPython leaves to us, without internal frames."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
INTERNAL = tuple(os.path.join(PACKAGE, folder, "") for folder in ("kernels", "plugins"))
"""Folders of this package whose frames tell a user nothing."""


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore interrupts inside: the cell has ended, and IPython would print that it was interrupted while it looks for the lines."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def message(problem: BaseException | None) -> str:
    """The exception's message, also of one whose ``__str__`` raises."""
    if problem is None:
        return ""
    try:
        return str(problem)
    except Exception as worse:
        return f"<its message cannot be had: {type(worse).__name__}>"


def walk(tb: TracebackType | None) -> Iterator[TracebackType]:
    """The links of a traceback, outermost first."""
    while tb is not None:
        yield tb
        tb = tb.tb_next


def without_kernel(tb: TracebackType | None, *others: str) -> TracebackType | None:
    """The traceback without frames of this package, as where ``input()`` is refused, and of the files `others`."""
    files = [(link, link.tb_frame.f_code.co_filename) for link in walk(tb)]
    kept: TracebackType | None = None
    for link in reversed([link for link, file in files if not file.startswith(INTERNAL) and file not in others]):
        kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def is_group(problem: BaseException | None) -> bool:
    """Whether it is an exception group, or was raised while one was handled: IPython prints such a traceback itself."""
    while problem is not None:
        if isinstance(problem, BaseExceptionGroup):
            return True
        problem = problem.__context__
    return False


def of_group(problem: BaseException, cells: Mapping[str, int]) -> list[str]:
    """Python's own traceback from the cell on; `cells` are file names of cells with their numbers."""
    top = next((link for link in walk(problem.__traceback__) if link.tb_frame.f_code.co_filename in cells), None)
    text = "".join(traceback.format_exception(type(problem), problem, top or problem.__traceback__))
    for name, number in cells.items():
        text = text.replace(f'File "{name}", line', f"Cell In[{number}], line")
    return text.rstrip("\n").split("\n")
