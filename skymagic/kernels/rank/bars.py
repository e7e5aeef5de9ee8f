"""Turn the progress bars of libraries into single lines of text.

The notebook can show those of several ranks at once. A widget of ``tqdm.notebook`` would be lost in
a saved notebook, and stacked bars move a terminal's cursor.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any

from skymagic.runtime.on_import import when_imported


def install() -> None:
    """Patch the libraries that draw bars when they are imported."""
    _choose_text()
    when_imported("tqdm.std", _draw_in_one_line)
    when_imported("tqdm.notebook", _draw_as_text)
    when_imported("rich.console", _draw_at_the_end)


def _choose_text() -> None:
    """Make tqdm.auto use text; by itself it takes a rank for a notebook."""
    plain = types.ModuleType("tqdm.autonotebook", "tqdm's choice on a rank: text")
    plain.__file__ = None  # code that inspects all modules reads it, and would import tqdm
    plain.__getattr__ = lambda name: getattr(  # type: ignore[method-assign]
        importlib.import_module("tqdm.std"), name
    )
    sys.modules.setdefault(plain.__name__, plain)


def _draw_in_one_line(std: types.ModuleType) -> None:
    """Make nested bars share one line, which shows the newest.

    tqdm draws inner bars on lines below, and moves the cursor up again.
    """
    std.tqdm.moveto = lambda bar, lines: None


def _draw_as_text(notebook: types.ModuleType) -> None:
    """Make the bar of ``tqdm.notebook`` draw as tqdm's text bar, which it inherits from.

    The class stays the same object: where a plugin has imported transformers in the forkserver,
    other libraries have derived their bars from it already.
    """
    bar: Any = notebook.tqdm_notebook
    for name, attribute in list(vars(bar).items()):
        if isinstance(attribute, types.FunctionType | staticmethod | property):
            delattr(bar, name)

    def begin(self: Any, *args: Any, display: bool = True, **options: Any) -> None:
        if isinstance(options.get("ncols"), str):  # "100%": a width in a page
            del options["ncols"]
        super(bar, self).__init__(*args, **options)

    bar.__init__ = begin


def _draw_at_the_end(console: types.ModuleType) -> None:
    """Make rich write text, and bars only once, in their final state.

    Live bars redraw several lines repeatedly, and in a notebook rich clears the output of the cell,
    which here belongs to all ranks.
    """
    vars(console)["_is_jupyter"] = lambda: False
    begin = console.Console.__init__

    @functools.wraps(begin)
    def begin_at_rest(self: Any, *args: Any, **options: Any) -> None:
        if options.get("force_interactive") is None:
            options["force_interactive"] = False
        begin(self, *args, **options)

    console.Console.__init__ = begin_at_rest
