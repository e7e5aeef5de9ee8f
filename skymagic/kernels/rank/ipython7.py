"""Adapt IPython 7 (Google Colab has 7.34) to what ranks and their users expect of IPython 8.

Its tracebacks name cells and end with an error's notes, and ``%time`` raises the errors of the code
that it runs.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from IPython.core import release, ultratb
from IPython.utils.path import compress_user


def adapt(shell: Any, cells: Mapping[str, int]) -> None:
    """Adapt a rank's shell, unless its IPython is a later one.

    Args:
        cells: numbers of cells by file name.
    """
    if release.version_info < (8,):
        head_frames(shell.InteractiveTB, cells)
        show_notes(shell.InteractiveTB)
        name_cells_in_syntax_errors(shell.SyntaxTB, cells)
        raise_errors_of_time(shell)


def head_frames(formatter: Any, cells: Mapping[str, int]) -> None:
    """Make IPython 7 write ``Cell In[5], line 2, in Net.forward(self, x)`` above a frame's lines.

    It would write the name of a file that does not exist, and no line.

    Args:
        formatter: the shell's formatter of tracebacks.
        cells: numbers of cells by file name.
    """
    format_frame = formatter.format_record

    def with_heading(frame: FrameType, file: str, line: int, *further: Any) -> str:
        _, _, lines = format_frame(frame, file, line, *further).partition("\n")
        where = (
            f"Cell In[{cells[file]}], line {line}"
            if file in cells
            else f"File {compress_user(file or '?')}:{line}"
        )
        colours = formatter.Colors
        heading = f"{colours.filenameEm}{where}{colours.Normal}"
        if name := _called(frame, formatter.include_vars):
            heading += f", in {colours.vName}{name}{colours.Normal}"
        return f"{heading}\n{lines}"

    formatter.format_record = with_heading


def show_notes(formatter: Any) -> None:
    """Make IPython 7 write the notes of an error (``add_note``) below its message.

    Args:
        formatter: the shell's formatter of tracebacks.
    """
    format_error = formatter.format_exception

    def with_notes(kind: type[BaseException], error: BaseException, *further: Any) -> list[str]:
        message, *more = format_error(kind, error, *further)
        # IPython shows the first part only
        return ["\n".join([message, *getattr(error, "__notes__", ())]), *more]

    formatter.format_exception = with_notes


def know_last_shown(hook: Any, names: Iterable[str]) -> None:
    """Let a display hook of IPython 7 take hidden values of ``_`` and the like for its own.

    Otherwise it would take them for the user's, and stop to bind these names. IPython 8 does so.
    """
    if release.version_info >= (8,):
        return
    values, hidden = hook.shell.user_ns, hook.shell.user_ns_hidden
    for name in names:
        if name in values and name in hidden and hidden[name] is values[name]:
            setattr(hook, name, values[name])


def raise_errors_of_time(shell: Any) -> None:
    """Make ``%time`` and ``%%time`` raise the errors of the code that they run.

    IPython 7 shows such an error and continues, so that the cell would succeed.
    """
    plain = shell.find_line_magic("time")

    @functools.wraps(plain)
    def time(*args: Any, **kwargs: Any) -> Any:
        show = shell.showtraceback

        def raise_it(exc_tuple: Any = None, *further: Any, **options: Any) -> None:
            if exc_tuple is None and not options:  # as only this magic does
                raise
            show(exc_tuple, *further, **options)

        shell.showtraceback = raise_it
        try:
            return plain(*args, **kwargs)
        finally:
            del shell.showtraceback

    for kind in ("line", "cell"):
        shell.magics_manager.magics[kind]["time"] = time


FILE = re.compile(r'File ((?:\x1b\[[\d;]*m)*)"([^"]+)"')
"""Matches a file in Python's own form of a traceback, and its colour."""
IN_MODULE = re.compile(r", in (?:\x1b\[[\d;]*m)*<module>")
"""Matches what follows a line at the top of a cell or a module, which IPython 8 does not write."""


def name_cells_in_syntax_errors(formatter: Any, cells: Mapping[str, int]) -> None:
    """Make IPython 7 write ``Cell In[5], line 2`` above the line that is no Python.

    Args:
        formatter: the shell's formatter of syntax errors.
        cells: numbers of cells by file name.
    """

    def named(match: re.Match[str]) -> str:
        colour, file = match.groups()
        return f"{colour}Cell In[{cells[file]}]" if file in cells else match[0]

    def naming(write_lines: Callable[..., list[str]]) -> Callable[..., list[str]]:
        return lambda *args: [
            IN_MODULE.sub("", FILE.sub(named, line)) for line in write_lines(*args)
        ]

    formatter._format_list = naming(formatter._format_list)
    formatter._format_exception_only = naming(formatter._format_exception_only)


def _called(frame: FrameType, with_values: bool) -> str:
    """Return a frame's function with its parameters, or "" at the top of a cell or a module."""
    name = frame.f_code.co_qualname
    if name == "<module>":
        return ""
    value = ultratb.eqrepr if with_values else ultratb.nullrepr
    try:
        return name + inspect.formatargvalues(*inspect.getargvalues(frame), formatvalue=value)
    except KeyError:  # a generator expression has parameters that are no variables
        return name
