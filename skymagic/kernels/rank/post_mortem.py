"""The post-mortem debugger of a rank: commands of pdb on the frames of the error that its last cell has ended with.

Nobody can type into a rank: each command is an order of its own, and what it prints is output.
"""

from __future__ import annotations

import io
import linecache
import pdb
import reprlib
import sys
from collections.abc import Mapping
from types import FrameType

from skymagic.kernels.rank import tracebacks

COMMANDS = (
    "p", "pp", "print", "u", "up", "d", "down", "w", "where", "bt", "l", "list", "ll", "longlist", "a", "args", "locals",
    "whatis", "source",
)  # fmt: skip
"""What can be asked of frames that have ended; all other commands of pdb would go on with the program."""
REFUSED = "*** {what}: the cell has ended, so that there is nothing to go on with; {commands} look at it, q leaves"


class PostMortem(pdb.Pdb):
    """A debugger on the frames of an exception, the innermost first.

    Args:
        problem: the exception; frames that are not the user's are left out.
        cells: file names of cells with their numbers.
    """

    def __init__(self, problem: BaseException, cells: Mapping[str, int]) -> None:
        super().__init__(stdin=io.StringIO(), stdout=sys.stdout, nosigint=True, readrc=False)
        self.problem = problem
        self._cells = cells
        self.setup(None, tracebacks.telling(problem.__traceback__) or problem.__traceback__)

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

    def _is_variable(self, word: str) -> bool:
        """Whether what pdb would take for a command is a name of the user's, such as ``n`` or ``b``."""
        frame = self._frame
        return word in frame.f_locals or word in frame.f_globals

    @property
    def _frame(self) -> FrameType:
        assert self.curframe is not None  # `setup` has chosen one
        return self.curframe

    def do_print(self, words: str) -> None:
        """As `p`."""
        self.do_p(words)

    def do_locals(self, _: str) -> None:
        """The variables of the frame, shortened."""
        for name, value in list(self._frame.f_locals.items()):
            if not name.startswith("__"):
                self.message(f"{name} = {reprlib.repr(value)}")

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """A frame as tracebacks name it."""
        frame, line = frame_lineno
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        where = f"Cell In[{self._cells[file]}], line {line}" if file in self._cells else f"{file}:{line}"
        inside = "" if name == "<module>" else f" in {name}"
        return f"{where}{inside}{lprefix}{linecache.getline(file, line).strip()}"
