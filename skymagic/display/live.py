"""The front end: which one there is, text and displays written to it, text that is redrawn in place, and questions.

A notebook cannot move its cursor, but it can replace what a display shows; it saves the last state. A terminal can redraw its last line.
Elsewhere only the final state of such text is shown.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from skymagic.wire.untrusted import sanitized

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
"""The MIME type of a widget's display."""
CELL_ID = "cellId"
"""In the metadata of requests: of which cell it is."""
NONINTERACTIVE = "SKYMAGIC_NONINTERACTIVE"
"""A variable of the environment: lines only, nothing that is drawn again, and no questions."""


def in_ipython() -> bool:
    """Whether displays can be shown here; without importing IPython."""
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def own_kernel() -> Any:
    """The Jupyter kernel that this process is; None outside one."""
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None) if in_ipython() else None


def page() -> str:
    """The page whose request this thread carries out; "" outside a kernel."""
    try:
        return str(own_kernel().get_parent("shell")["header"]["session"])
    except Exception:  # no kernel, or none of ipykernel's
        return ""


def request_id() -> str:
    """Return the id of the request that this thread carries out, one for each run of a cell; "" outside a kernel."""
    try:
        return str(own_kernel().get_parent("shell")["header"]["msg_id"])
    except Exception:  # no kernel, or none of ipykernel's
        return ""


def in_notebook() -> bool:
    """Whether a display that was shown here can be replaced. IPython in a terminal would print it once more; a server that executes
    cells by itself (jupyter-server-nbmodel 0.2) keeps the first state for ever."""
    kernel = own_kernel()
    return kernel is not None and (
        not allows_questions(kernel) or says_its_cell(kernel) or "google.colab" in sys.modules
    )


def watched() -> bool:
    """Whether somebody looks at this notebook while it runs: nbconvert and papermill say that nobody could be asked anything."""
    return in_notebook() and not noninteractive() and allows_questions(own_kernel())


def noninteractive() -> bool:
    """Whether the user says that nobody is there."""
    return os.environ.get(NONINTERACTIVE, "0") not in ("", "0")


def shutting_down() -> bool:
    """Whether this process is a kernel that was asked to end, to be started again or for good."""
    return getattr(own_kernel(), "_shutdown_message", None) is not None


def restarting() -> bool:
    """Whether this process is a kernel that ends to be started again, as a front end's menu has asked for; asked at its end."""
    last = getattr(own_kernel(), "_shutdown_message", None) or {}
    return bool(last.get("content", {}).get("restart"))


def allows_questions(kernel: Any) -> bool:
    """Whether somebody could be asked something."""
    return bool(getattr(kernel, "_allow_stdin", True))


def says_its_cell(kernel: Any) -> bool:
    """Whether the request comes from a front end that says of which cell it is, as JupyterLab, Notebook 7 and VS Code do; also where
    nobody knows, on a thread."""
    try:
        parent = kernel.get_parent("shell")
    except Exception:  # ipykernel's own ways
        return True
    return not parent or CELL_ID in (parent.get("metadata") or {})


def widget_view(model: str) -> dict[str, Any]:
    """What shows a model in the notebook, by MIME type."""
    return {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": model}}


Write = Callable[[str, str], None]
"""Takes a stream's name and text."""


class _Collected(threading.local):
    """Text that this thread has written within `together`.

    Attributes:
        parts: (stream's name, text) of what is not sent yet; None outside `together`.
    """

    parts: list[tuple[str, str]] | None = None


_collected = _Collected()


def write(name: str, text: str) -> None:
    """Put text on the notebook's own standard output or error; within `together` in one piece with what follows there."""
    parts = _collected.parts
    if not text:
        return
    if parts is None:
        stream = sys.stderr if name == "stderr" else sys.stdout
        stream.write(text)
        stream.flush()
    elif parts and parts[-1][0] == name:
        parts[-1] = name, parts[-1][1] + text
    else:
        parts.append((name, text))


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Send what this thread writes within in as few messages as there are changes of the stream."""
    if _collected.parts is not None:
        yield
        return
    _collected.parts = []
    try:
        yield
    finally:
        send_collected()
        _collected.parts = None


def send_collected() -> None:
    """Send what was written within `together` so far: something else follows that is not a stream's text."""
    parts, outer = _collected.parts or [], _collected.parts
    _collected.parts = None
    for name, text in parts:
        write(name, text)
    _collected.parts = None if outer is None else []


def show(content: Mapping[str, Any], *, update: bool = False) -> None:
    """Show a bundle of representations: richly in IPython, as text elsewhere."""
    data = dict(content["data"])
    if in_ipython():
        from IPython.core.interactiveshell import InteractiveShell

        send_collected()
        metadata, transient = (
            dict(content.get("metadata") or {}),
            dict(content.get("transient") or {}),
        )
        InteractiveShell.instance().display_pub.publish(
            data=data, metadata=metadata, transient=transient, update=update
        )
    else:
        write("stdout", f"{data.get('text/plain', '')}\n")


class Area:
    """A display of text in a notebook, and of HTML where it is given; each `draw` replaces the one before, in its place."""

    def __init__(self) -> None:
        self._id = f"skymagic-{secrets.token_hex(8)}"
        self._drawn: dict[str, Any] | None = None

    def draw(self, text: str, html: str = "", more: Mapping[str, Any] | None = None) -> None:
        """Show this there, and `more` by MIME type; the same as before is not sent again."""
        data = {"text/plain": text, **({"text/html": html} if html else {}), **(more or {})}
        if data == self._drawn:
            return
        show({"data": data, "transient": {"display_id": self._id}}, update=self._drawn is not None)
        self._drawn = data

    def again(self) -> None:
        """Show it once more, below what is there: the cell was cleared, and its place is gone."""
        if self._drawn is not None:
            show({"data": self._drawn, "transient": {"display_id": self._id}})


class StatusLine:
    """One line that says what is under way, replaced by the line that says how it ended; never on a notebook's standard error."""

    def __init__(self) -> None:
        self._area: Area | None = None
        self._width = 0

    def show(self, text: str) -> None:
        """What is under way now; not where nobody looks."""
        text = sanitized(text)
        if watched():
            self._area = self._area or Area()
            self._area.draw(text)
        elif (stream := own_stream()) is not None and stream.isatty():
            stream.write("\r" + text.ljust(self._width))
            stream.flush()
            self._width = len(text)

    def end(self, text: str) -> Area | None:
        """How it ended: in the place of what was shown, which is returned where it is a display."""
        area, text = self._area, sanitized(text)
        if self._area is not None:
            self._area.draw(text)
        elif (stream := own_stream()) is not None:
            stream.write(("\r" if self._width else "") + text.ljust(self._width) + "\n")
            stream.flush()
        self._area, self._width = None, 0
        return area


def own_stream() -> Any:
    """Where skymagic speaks itself: in a script on standard error, for its output may be data."""
    return sys.stdout if in_ipython() else sys.stderr


YES = ("y", "yes")


def confirmed(question: str) -> bool:
    """Whether the user says yes; no without a terminal or a notebook that can ask, and beside cells on other threads."""
    if threading.current_thread() is not threading.main_thread() or not _can_ask():
        return False
    try:
        answer = input(f"{question}. Go ahead? [y/N] ")
    except (EOFError, KeyboardInterrupt):  # stop is an answer too
        return False
    return answer.strip().casefold() in YES


def asks_secrets() -> Callable[[str], str] | None:
    """What asks for a passphrase; None where nobody is to be asked."""
    return None if noninteractive() else getpass.getpass


def _can_ask() -> bool:
    """Whether somebody is there: a terminal, or a notebook's front end that takes questions (not papermill, not nbconvert)."""
    if noninteractive():
        return False
    if (kernel := own_kernel()) is not None:
        return bool(getattr(kernel, "_allow_stdin", False))
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
