"""Show widgets that are made on a rank as text: their models live on the rank, and the notebook's front end has no channel to them.

A displayed widget appears as the ``text/plain`` or ``text/html`` of its bundle and does not change afterwards. The bars of
``tqdm.notebook`` are tqdm's text bars.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

from skymagic.runtime.on_import import when_imported

MIME = "application/vnd.jupyter.widget-view+json"
"""Type of a widget's display: a reference to a model that only the rank has."""


def install() -> None:
    """Adapt the libraries that make widgets, as they are imported."""
    import ipykernel.comm.comm as comms

    # ipykernel would send them on a channel on which no front end listens
    comms.BaseComm.publish_msg = lambda comm, msg_type, *args, **keys: None
    when_imported("ipywidgets.widgets.widget_output", _capture_nothing)
    when_imported("rich.console", _write_text)
    when_imported("tqdm.notebook", _draw_bars_as_text)


def without_widget(content: dict[str, Any]) -> dict[str, Any]:
    """Return a display message without its reference to a widget's model; what is left is text or HTML."""
    data = {mime: value for mime, value in content["data"].items() if mime != MIME}
    return {**content, "data": data}


def _capture_nothing(module: types.ModuleType) -> None:
    """Have ``with output:`` capture nothing: a front end captures by the ids of requests, and knows none of a rank's. Text and errors go
    where the cell's go; ipywidgets' own way would swallow the errors."""
    module.Output.__enter__ = lambda self: None
    module.Output.__exit__ = lambda self, *_: None


def _write_text(console: types.ModuleType) -> None:
    """Have rich write text: in a notebook its bars clear the output of their cell, which here is that of all ranks."""
    vars(console)["_is_jupyter"] = lambda: False


def _draw_bars_as_text(notebook: types.ModuleType) -> None:
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
