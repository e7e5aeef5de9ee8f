"""The displays of widgets on a rank, as text that changes with them: the notebook has no such model, nor would it after a reload.

A bar of ``tqdm.notebook`` is shown as tqdm's own text. A widget that waits for a user is shown as what it is, and says that it cannot
be used.
"""

from __future__ import annotations

import html
import re
import secrets
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from skymagic.runtime.on_import import when_imported
from skymagic.wire.agent import IN_LINE

MIME = "application/vnd.jupyter.widget-view+json"
"""A reference to a model in the kernel: the notebook has no such model, and would show an error in the place of the text."""
TAG = re.compile(r"<[^>]+>")
LONGEST = 110
"""Characters of a widget's repr."""
MOST, DROPPED = (
    200,
    50,
)  # views that are kept up to date; of more, so many of the oldest stay as they are


def install() -> None:
    """Keep widgets' comms on the rank: ipykernel's own way leads to a channel on which no front end listens."""
    import ipykernel.comm.comm as comms

    comms.BaseComm.publish_msg = lambda comm, msg_type, *args, **keys: None
    when_imported("ipywidgets.widgets.widget_output", _let_through)
    when_imported("rich.console", _write_text)


def _write_text(console: types.ModuleType) -> None:
    """Have rich write text: in a notebook its bars clear the output of their cell, which here is that of all ranks."""
    vars(console)["_is_jupyter"] = lambda: False


def _let_through(module: types.ModuleType) -> None:
    """Have ``with output:`` capture nothing: a front end captures by the ids of requests, and knows none of a rank's. Text and errors go
    where the cell's go; ipywidgets' own way would swallow the errors."""
    module.Output.__enter__ = lambda self: None
    module.Output.__exit__ = lambda self, *_: None


def instance(model: str) -> Any:
    """The widget with this model, if ipywidgets still has it."""
    module = sys.modules.get("ipywidgets.widgets.widget")
    return None if module is None else module._instances.get(model)


class View:
    """One display of a widget."""

    def __init__(self, widget: Any, text: str) -> None:
        self.widget = widget
        self.text = text  # as it was last shown
        self.observed: set[int] = set()


class Views:
    """The displays of widgets, by display id; those whose widget has changed are published anew by `refresh`."""

    def __init__(self, publish: Callable[[str, dict[str, Any]], None]) -> None:
        self._publish = publish
        self._views: dict[str, View] = {}
        self._changed: set[str] = set()
        self._lock = threading.Lock()

    def shown(self, content: dict[str, Any]) -> dict[str, Any]:
        """The display of a widget as text; from now on it follows the widget."""
        widget = instance(content["data"][MIME].get("model_id", ""))
        rest = {mime: data for mime, data in content["data"].items() if mime != MIME}
        if widget is None:
            return {**content, "data": rest}
        name = (content.get("transient") or {}).get("display_id") or secrets.token_hex(8)
        view = self._views[name] = View(widget, text_of(widget))
        self._observe(name, view, widget)
        if len(self._views) > MOST:
            for old in list(self._views)[:DROPPED]:
                del self._views[old]
        return as_text(name, view.text)

    def refresh(self) -> None:
        """Publish what has changed, on any thread. On return what others publish has been published too."""
        with self._lock:
            changed, self._changed = self._changed, set()
            for name in changed:
                view = self._views.get(name)
                if view is None:
                    continue
                self._observe(name, view, view.widget)  # a box may have other children by now
                text = text_of(view.widget)
                if text != view.text:
                    view.text = text
                    self._publish("update_display_data", as_text(name, text))
                if view.widget.comm is None:  # closed
                    self._views.pop(name, None)

    def _observe(self, name: str, view: View, widget: Any) -> None:
        if id(widget) not in view.observed:
            view.observed.add(id(widget))
            widget.observe(lambda _: self._changed.add(name))
        for child in getattr(widget, "children", ()):
            self._observe(name, view, child)


def as_text(name: str, text: str) -> dict[str, Any]:
    """A display message of text that stands in a line of the rank's output."""
    return {
        "data": {"text/plain": text},
        "metadata": {IN_LINE: True},
        "transient": {"display_id": name},
    }


def text_of(widget: Any) -> str:
    """A widget as text, as it is now; nothing when it was closed."""
    kind = type(widget)
    if widget.comm is None:
        return ""
    if not kind.__module__.startswith("ipywidgets.") and hasattr(
        widget, "_repr_pretty_"
    ):  # better text than ours
        from IPython.lib.pretty import pretty

        try:
            return str(pretty(widget))  # tqdm's
        except (
            ReferenceError
        ):  # its loop is over, and the bar is gone: what stays of it are its parts
            left, bar, right = map(text_of, widget.children)
            return f"{left}{bar[bar.find('|') : bar.rfind('|') + 1]} {right}".replace("\u2007", " ")
    if hasattr(widget, "children"):
        parts = [text_of(child) for child in widget.children]
        return (" " if kind.__name__ == "HBox" else "\n").join(filter(None, parts))
    if kind.__name__.endswith("Progress"):
        return progress(widget.description, widget.value - widget.min, widget.max - widget.min)
    if kind.__name__ in ("HTML", "HTMLMath", "Label"):
        return html.unescape(TAG.sub("", widget.value)).strip()
    if kind.__name__ == "Output":
        return "".join(map(_output_text, widget.outputs)).strip()
    shown = repr(widget)
    shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…"
    return f"{shown} (a widget of a rank: shown as text, it cannot be used here)"


def _output_text(output: dict[str, Any]) -> str:
    """One of the outputs of an ipywidgets.Output."""
    return str(
        output.get("text")
        or f"{output.get('data', {}).get('text/plain', output.get('evalue', ''))}\n"
    )


def progress(description: str, done: float, total: float) -> str:
    """A progress bar in text."""
    share = min(1.0, max(0.0, done / total)) if total else 1.0
    return f"{description} {share:4.0%}|{'█' * round(10 * share):10}| {done:g}/{total:g}".strip()
