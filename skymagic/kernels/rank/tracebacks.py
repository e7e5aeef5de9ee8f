"""An exception's message, its traceback without internal frames, and the debugger on its frames.

A rank has no keyboard: each command of pdb is a separate order, and its response is output.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import pdb
import reprlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType

from skymagic.kernels import stacks
from skymagic.wire.order import FUNCTION_NAME

MACHINERY = ("skymagic", "IPython", "ipykernel", "ipyparallel")
"""Packages whose frames are meaningless to users."""
WRAPPERS = {"_wrapped_call_impl", "_call_impl"}
"""Functions of torch.nn.Module between a call of a module and its forward."""

HEAD, TAIL = 150_000, 50_000
"""Number of characters kept from the beginning and the end of an exception's text."""


def is_too_long(text: str) -> bool:
    """Return True if a text will be shortened."""
    return len(text) > 2 * (HEAD + TAIL)


def shortened(text: str) -> str:
    """Return the beginning and the end of a text that is too long to be shown."""
    if not is_too_long(text):
        return text
    left_out = (
        f"{len(text) - HEAD - TAIL:,} characters are left out here; the rank's log has all of them"
    )
    return f"{text[:HEAD]}\n[… {left_out} …]\n{text[-TAIL:]}"


def shortened_lines(lines: list[str]) -> list[str]:
    """Shorten a traceback that is too long to be shown."""
    text = "\n".join(lines)
    return [shortened(text)] if is_too_long(text) else lines


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Ignore interrupts inside the context.

    The cell has ended, and IPython would print that it was interrupted while it reads source lines.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def message(problem: BaseException | None) -> str:
    """Return an exception's message, even if its ``__str__`` raises."""
    if problem is None:
        return ""
    try:
        return str(problem)
    except Exception as worse:
        return f"<message unavailable: {type(worse).__name__}>"


def walk(tb: TracebackType | None) -> Iterator[TracebackType]:
    """Yield the links of a traceback, outermost first."""
    while tb is not None:
        yield tb
        tb = tb.tb_next


def user_frames(tb: TracebackType | None, *hidden_files: str) -> TracebackType | None:
    """Return a traceback without internal frames.

    Left out are frames of the machinery, of torch's call wrappers, of the call of a cell's
    function, and of the files `hidden_files`.
    """
    folders = tuple(
        os.path.join(os.path.dirname(sys.modules[name].__file__ or ""), "")
        for name in MACHINERY
        if name in sys.modules
    )
    # IPython 7 calls magics through it; version 4, which Google Colab has, names its code otherwise
    decorator = getattr(sys.modules.get("decorator"), "__file__", None)
    filtered: TracebackType | None = None
    for link in reversed(list(walk(tb))):
        code = link.tb_frame.f_code
        file = code.co_filename
        wrapper = (
            code.co_name in WRAPPERS
            and link.tb_frame.f_globals.get("__name__") == "torch.nn.modules.module"
        )
        call = code.co_name == "<module>" and FUNCTION_NAME in code.co_names
        decorated = file == decorator or file.startswith("<decorator-gen-")
        if not (file.startswith(folders) or file in hidden_files or wrapper or call or decorated):
            filtered = TracebackType(filtered, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return filtered


def user_frames_and_origin(tb: TracebackType | None) -> TracebackType | None:
    """Return the user's frames of `user_frames`, and the innermost one, which raised.

    All frames are kept if the user has none.
    """
    links = list(walk(user_frames(tb) or tb))
    user_links = [
        link for link in links[:-1] if not stacks.is_library(link.tb_frame.f_code.co_filename)
    ]
    if not user_links:
        return user_frames(tb) or tb
    filtered = links[-1]
    for link in reversed(user_links):
        filtered = TracebackType(filtered, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return filtered


def hidden_frames_line(frames: int) -> str:
    """Return the line that reports hidden frames of libraries."""
    return (
        f"[{frames} {'frame' if frames == 1 else 'frames'} of libraries not shown; %debug has all]"
    )


@contextlib.contextmanager
def own_chain(problem: BaseException) -> Iterator[int]:
    """Apply `user_frames_and_origin` to the tracebacks of an exception chain inside the context.

    Yields the number of hidden frames.
    """
    before = {id(raised): (raised, raised.__traceback__) for raised in chain(problem)}
    hidden = 0
    for raised, tb in before.values():
        shown = user_frames_and_origin(tb)
        hidden += len(list(walk(user_frames(tb) or tb))) - len(list(walk(shown)))
        # not by assignment, which a frozen dataclass refuses
        BaseException.with_traceback(raised, shown)
    try:
        yield hidden
    finally:
        for raised, tb in before.values():
            BaseException.with_traceback(raised, tb)


def chain(problem: BaseException) -> Iterator[BaseException]:
    """Yield an exception, its causes and contexts, and members of groups among them, each once."""
    visited: set[int] = set()
    todo: list[BaseException | None] = [problem]
    while todo:
        raised = todo.pop()
        if raised is not None and id(raised) not in visited:
            visited.add(id(raised))
            yield raised
            todo += [raised.__cause__, raised.__context__]
            todo += raised.exceptions if isinstance(raised, BaseExceptionGroup) else ()


def clear_frames(problem: BaseException | None) -> None:
    """Release the local variables of all frames of an exception chain."""
    for raised in chain(problem) if problem is not None else ():
        traceback.clear_frames(raised.__traceback__)
        for frame, _ in traceback.walk_tb(raised.__traceback__):
            # before Python 3.13 a frame keeps the dict that `f_locals` once returned; reading it
            # again updates it
            frame.f_locals  # noqa: B018


def line_count(frame: FrameType) -> int:
    """Return the number of source lines of a frame, including frames of cells, which are not files.

    Without it IPython, which looks for a file, takes cells for sources too long to be read, and
    shows the wrong lines: those of a generator expression, and the last line that a frame has
    reached instead of the line that raised.
    """
    return len(linecache.getlines(frame.f_code.co_filename))


def is_group(problem: BaseException) -> bool:
    """Return True for an exception group or its consequence.

    IPython itself prints such a traceback.
    """
    return any(isinstance(raised, BaseExceptionGroup) for raised in chain(problem))


def group_traceback(problem: BaseException, cells: Mapping[str, int]) -> list[str]:
    """Return Python's own traceback from the cell on.

    Args:
        cells: file names of cells with their numbers.
    """
    top = next(
        (link for link in walk(problem.__traceback__) if link.tb_frame.f_code.co_filename in cells),
        None,
    )
    text = "".join(traceback.format_exception(type(problem), problem, top or problem.__traceback__))
    for name, number in cells.items():
        text = text.replace(f'File "{name}", line', f"Cell In[{number}], line")
    return text.rstrip("\n").split("\n")


COMMANDS = (
    "p",
    "pp",
    "print",
    "u",
    "up",
    "d",
    "down",
    "w",
    "where",
    "bt",
    "l",
    "list",
    "ll",
    "longlist",
    "a",
    "args",
    "locals",
    "whatis",
    "source",
)
"""Commands of pdb that work on frames that have ended; all others would continue the program."""
REFUSED = "*** {what}: the cell has ended, so it cannot continue; {commands} inspect it, q quits"


class PostMortem(pdb.Pdb):
    """Debugger on the frames of an exception, starting at the user's innermost frame.

    Args:
        problem: the exception; frames that are not the user's are left out.
        cells: file names of cells with their numbers.
    """

    def __init__(self, problem: BaseException, cells: Mapping[str, int]) -> None:
        # pdb's own SIGINT handler would replace the rank's, and ~/.pdbrc may have any commands
        super().__init__(stdin=io.StringIO(), stdout=sys.stdout, nosigint=True, readrc=False)
        self.problem = problem
        self._cells = cells
        self.setup(None, user_frames(problem.__traceback__) or problem.__traceback__)
        own = [
            at
            for at, (frame, _) in enumerate(self.stack)
            if not stacks.is_library(frame.f_code.co_filename)
        ]
        if own and own[-1] != self.curindex:
            self.stdout = io.StringIO()  # suppresses pdb's print of the selected frame
            self._select_frame(own[-1])  # as `up` and `down` do in pdb

    def command(self, line: str) -> None:
        """Run one command, or evaluate an expression in the frame, and print the result."""
        self.stdout = sys.stdout  # a cell may have replaced it
        name, _, _ = self.parseline(line)
        if name in COMMANDS:
            self.onecmd(line)
        elif name and hasattr(self, f"do_{name}") and not self._is_variable(line.strip()):
            self.message(REFUSED.format(what=name, commands=", ".join(COMMANDS)))
        else:
            self.default(line)

    def set_convenience_variable(self, *_: object) -> None:
        """Disable ``$name`` variables.

        Since Python 3.12 pdb stores them among the user's names, where ``$_frame`` would keep
        everything in the frames alive.
        """

    def _is_variable(self, word: str) -> bool:
        """Return True if a command of pdb is also a user's variable, such as ``n`` or ``b``."""
        frame = self._frame
        return word in frame.f_locals or word in frame.f_globals

    @property
    def _frame(self) -> FrameType:
        assert self.curframe is not None  # `setup` selected one
        return self.curframe

    do_print = pdb.Pdb.do_p

    def do_locals(self, _: str) -> None:
        """Print the variables of the frame, shortened."""
        for name, value in list(self._frame.f_locals.items()):
            if not name.startswith("__"):
                self.message(f"{name} = {reprlib.repr(value)}")

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """Format a frame as tracebacks do."""
        frame, line = frame_lineno
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        location = (
            f"Cell In[{self._cells[file]}], line {line}"
            if file in self._cells
            else f"{file}:{line}"
        )
        inside = "" if name == "<module>" else f" in {name}"
        return f"{location}{inside}{lprefix}{linecache.getline(file, line).strip()}"
