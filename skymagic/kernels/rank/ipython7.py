"""Adapt IPython 7 (Google Colab has 7.34): its tracebacks name cells as those of IPython 8 do."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from IPython.core import release, ultratb
from IPython.utils.path import compress_user

IS_IPYTHON_7 = release.version_info < (8,)


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


FILE = re.compile(r'File ((?:\x1b\[[\d;]*m)*)"([^"]+)"')
"""Matches a file in Python's own form of a traceback, and its colour."""


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
        return lambda *args: [FILE.sub(named, line) for line in write_lines(*args)]

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
