"""What a rank says of an exception: its message, the traceback without internal frames; and the debugger on its frames.

Nobody can type into a rank: each command of pdb is an order of its own, and what it prints is output.
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
"""Packages whose frames tell a user nothing."""
WRAPPERS = {"_wrapped_call_impl", "_call_impl"}
"""Functions of torch.nn.Module between a call of a module and its forward."""

HEAD, TAIL = 150_000, 50_000
"""Characters of an exception's text that are sent, from its beginning and from its end."""


def too_long(text: str) -> bool:
    """Whether a part of it is left out."""
    return len(text) > 2 * (HEAD + TAIL)


def shortened(text: str) -> str:
    """Beginning and end of a text that is too long to be shown."""
    if not too_long(text):
        return text
    left_out = (
        f"{len(text) - HEAD - TAIL:,} characters are left out here; the rank's log has all of them"
    )
    return f"{text[:HEAD]}\n[… {left_out} …]\n{text[-TAIL:]}"


def shortened_lines(lines: list[str]) -> list[str]:
    """A traceback, of which beginning and end are left where it is too long to be shown."""
    text = "\n".join(lines)
    return [shortened(text)] if too_long(text) else lines


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
        return f"<message unavailable: {type(worse).__name__}>"


def walk(tb: TracebackType | None) -> Iterator[TracebackType]:
    """The links of a traceback, outermost first."""
    while tb is not None:
        yield tb
        tb = tb.tb_next


def telling(tb: TracebackType | None, *others: str) -> TracebackType | None:
    """The traceback without frames of the machinery, of torch's call wrappers, of calls' own lines, and of the files `others`."""
    folders = tuple(
        os.path.join(os.path.dirname(sys.modules[name].__file__ or ""), "")
        for name in MACHINERY
        if name in sys.modules
    )
    kept: TracebackType | None = None
    for link in reversed(list(walk(tb))):
        code = link.tb_frame.f_code
        file = code.co_filename
        wrapper = (
            code.co_name in WRAPPERS
            and link.tb_frame.f_globals.get("__name__") == "torch.nn.modules.module"
        )
        call = code.co_name == "<module>" and FUNCTION_NAME in code.co_names
        if not (file.startswith(folders) or file in others or wrapper or call):
            kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def own(tb: TracebackType | None) -> TracebackType | None:
    """The user's frames among those of `telling`, and the innermost one, which raised; all where none is the user's."""
    links = list(walk(telling(tb) or tb))
    mine = [link for link in links[:-1] if not stacks.is_library(link.tb_frame.f_code.co_filename)]
    if not mine:
        return telling(tb) or tb
    kept = links[-1]
    for link in reversed(mine):
        kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def left_out(frames: int) -> str:
    """The line on frames of libraries that are not shown."""
    return (
        f"[{frames} {'frame' if frames == 1 else 'frames'} of libraries not shown; %debug has all]"
    )


@contextlib.contextmanager
def own_chain(problem: BaseException) -> Iterator[int]:
    """Inside, the tracebacks of an exception and of those that it followed from are `own`; how many frames are left out."""
    before = {id(each): (each, each.__traceback__) for each in chain(problem)}
    left = 0
    for each, tb in before.values():
        shown = own(tb)
        left += len(list(walk(telling(tb) or tb))) - len(list(walk(shown)))
        BaseException.with_traceback(
            each, shown
        )  # not by assignment, which a frozen dataclass refuses
    try:
        yield left
    finally:
        for each, tb in before.values():
            BaseException.with_traceback(each, tb)


def chain(problem: BaseException) -> Iterator[BaseException]:
    """An exception, its causes and contexts, and the members of groups among them; each once."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [problem]
    while todo:
        each = todo.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            todo += [each.__cause__, each.__context__]
            todo += each.exceptions if isinstance(each, BaseExceptionGroup) else ()


def clear_frames(problem: BaseException | None) -> None:
    """Let go of the local variables of the frames that an exception, and those that it followed from, have gone through."""
    for each in chain(problem) if problem is not None else ():
        traceback.clear_frames(each.__traceback__)
        for frame, _ in traceback.walk_tb(each.__traceback__):
            # before Python 3.13 a frame keeps the dict that `f_locals` was once; reading it again brings it up to date
            frame.f_locals  # noqa: B018


def line_count(frame: FrameType) -> int:
    """How many lines the source of a frame has, also of a cell, which is no file.

    IPython, which looks for a file, takes cells for sources too long to be read, and then shows other lines than those of a
    generator expression, and the last line that a frame has reached for the line that raised.
    """
    return len(linecache.getlines(frame.f_code.co_filename))


def is_group(problem: BaseException) -> bool:
    """Whether it is an exception group, or follows from one: IPython prints such a traceback itself."""
    return any(isinstance(each, BaseExceptionGroup) for each in chain(problem))


def of_group(problem: BaseException, cells: Mapping[str, int]) -> list[str]:
    """Python's own traceback from the cell on; `cells` are file names of cells with their numbers."""
    top = next(
        (link for link in walk(problem.__traceback__) if link.tb_frame.f_code.co_filename in cells),
        None,
    )
    text = "".join(traceback.format_exception(type(problem), problem, top or problem.__traceback__))
    for name, number in cells.items():
        text = text.replace(f'File "{name}", line', f"Cell In[{number}], line")
    return text.rstrip("\n").split("\n")


COMMANDS = (
    "p", "pp", "print", "u", "up", "d", "down", "w", "where", "bt", "l", "list", "ll", "longlist", "a", "args", "locals",
    "whatis", "source",
)  # fmt: skip
"""What can be asked of frames that have ended; all other commands of pdb would go on with the program."""
REFUSED = "*** {what}: the cell has ended, so it cannot continue; {commands} inspect it, q quits"


class PostMortem(pdb.Pdb):
    """A debugger on the frames of an exception, beginning at the innermost one of the user's own.

    Args:
        problem: the exception; frames that are not the user's are left out.
        cells: file names of cells with their numbers.
    """

    def __init__(self, problem: BaseException, cells: Mapping[str, int]) -> None:
        super().__init__(stdin=io.StringIO(), stdout=sys.stdout, nosigint=True, readrc=False)
        self.problem = problem
        self._cells = cells
        self.setup(None, telling(problem.__traceback__) or problem.__traceback__)
        own = [
            at
            for at, (frame, _) in enumerate(self.stack)
            if not stacks.is_library(frame.f_code.co_filename)
        ]
        if own and own[-1] != self.curindex:
            self.stdout = io.StringIO()  # pdb prints the frame that it goes to
            self._select_frame(own[-1])  # pdb's own way for `up` and `down`

    def command(self, line: str) -> None:
        """Carry out one command, or evaluate an expression in the frame; what it has to say is printed."""
        self.stdout = sys.stdout  # a cell may have replaced it since
        name, _, _ = self.parseline(line)
        if name in COMMANDS:
            self.onecmd(line)
        elif name and hasattr(self, f"do_{name}") and not self._is_variable(line.strip()):
            self.message(REFUSED.format(what=name, commands=", ".join(COMMANDS)))
        else:
            self.default(line)

    def set_convenience_variable(self, *_: object) -> None:
        """No ``$name``: pdb since Python 3.12 keeps them among the user's names, where ``$_frame`` would hold all that is in the frames."""

    def _is_variable(self, word: str) -> bool:
        """Whether what pdb would take for a command is a name of the user's, such as ``n`` or ``b``."""
        frame = self._frame
        return word in frame.f_locals or word in frame.f_globals

    @property
    def _frame(self) -> FrameType:
        assert self.curframe is not None  # `setup` has chosen one
        return self.curframe

    do_print = pdb.Pdb.do_p

    def do_locals(self, _: str) -> None:
        """The variables of the frame, shortened."""
        for name, value in list(self._frame.f_locals.items()):
            if not name.startswith("__"):
                self.message(f"{name} = {reprlib.repr(value)}")

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """A frame as tracebacks name it."""
        frame, line = frame_lineno
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        where = (
            f"Cell In[{self._cells[file]}], line {line}"
            if file in self._cells
            else f"{file}:{line}"
        )
        inside = "" if name == "<module>" else f" in {name}"
        return f"{where}{inside}{lprefix}{linecache.getline(file, line).strip()}"
