"""Make the progress bars of libraries text that stands in one line, which the notebook can show of several ranks at once.

A widget of ``tqdm.notebook`` would be lost in a saved notebook, and bars below each other move a terminal's cursor.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any

from skymagic.runtime.on_import import when_imported


def install() -> None:
    """Adapt the libraries that draw bars, as they are imported."""
    _choose_text()
    when_imported("tqdm.std", _draw_in_one_line)
    when_imported("tqdm.notebook", _draw_as_text)
    when_imported("rich.console", _draw_at_the_end)


def _choose_text() -> None:
    """Have tqdm.auto choose text: it takes a rank for a notebook."""
    plain = types.ModuleType("tqdm.autonotebook", "tqdm's choice on a rank: text")
    plain.__file__ = None  # who looks at all modules asks for it, and would import tqdm
    plain.__getattr__ = lambda name: getattr(importlib.import_module("tqdm.std"), name)  # type: ignore[method-assign]
    sys.modules.setdefault(plain.__name__, plain)


def _draw_in_one_line(std: types.ModuleType) -> None:
    """Have nested bars share a line, in which the newest stands: tqdm draws inner ones in lines below, and moves the cursor up again."""
    std.tqdm.moveto = lambda bar, lines: None


def _draw_as_text(notebook: types.ModuleType) -> None:
    """Replace the bar of ``tqdm.notebook`` by tqdm's text bar, under the names by which it is imported and pickled."""
    text_bar: Any = importlib.import_module("tqdm.std").tqdm

    class tqdm_notebook(text_bar):  # type: ignore[misc]  # noqa: N801 (its name in tqdm)
        """A text bar that accepts what a bar of ``tqdm.notebook`` does."""

        def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:
            if isinstance(options.get("ncols"), str):  # "100%": a width in a page
                del options["ncols"]
            super().__init__(*args, **options)

    tqdm_notebook.__module__ = notebook.__name__
    tqdm_notebook.__qualname__ = "tqdm_notebook"
    vars(notebook).update(tqdm_notebook=tqdm_notebook, tqdm=tqdm_notebook)


def _draw_at_the_end(console: types.ModuleType) -> None:
    """Have rich write text, and its bars once, as they are at their end: while they move it draws several lines again and again, and in a
    notebook it clears the output of the cell, which here is that of all ranks."""
    vars(console)["_is_jupyter"] = lambda: False
    begin = console.Console.__init__

    @functools.wraps(begin)
    def begin_at_rest(self: Any, *args: Any, **options: Any) -> None:
        if options.get("force_interactive") is None:
            options["force_interactive"] = False
        begin(self, *args, **options)

    console.Console.__init__ = begin_at_rest
