"""A line of text with a stop button, as widgets of the notebook; where there are none, the line alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skymagic.display.live import in_notebook


class StopLine:
    """A line of text, and behind it a button.

    Args:
        text: the line.
        pressed: called on the kernel's main thread when the button is pressed. While that runs a cell, nothing is heard of it.
    """

    def __init__(self, text: str, pressed: Callable[[], object]) -> None:
        import ipywidgets

        self._label = ipywidgets.Label(text)
        button = ipywidgets.Button(description="stop", icon="stop", layout={"width": "auto"})
        button.on_click(lambda _: pressed())
        self._box = ipywidgets.HBox([self._label, button])

    def bundle(self) -> dict[str, Any]:
        """For a display: a front end without widgets shows the text."""
        view = {"version_major": 2, "version_minor": 0, "model_id": self._box.model_id}
        return {"text/plain": self._label.value, "application/vnd.jupyter.widget-view+json": view}

    def say(self, text: str) -> None:
        """Another text."""
        self._label.value = text

    def close(self) -> None:
        """It is of no use any more; twice is safe."""
        for widget in (*self._box.children, self._box):
            widget.close()


def stop_line(text: str, pressed: Callable[[], object]) -> StopLine | None:
    """A line with a button; None outside a notebook, or without ipywidgets."""
    if not in_notebook():
        return None
    try:
        return StopLine(text, pressed)
    except ImportError:
        return None
