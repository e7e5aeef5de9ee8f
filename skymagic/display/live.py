"""The front end: detection, text and displays, text that is redrawn in place, and questions.

A notebook cannot move its cursor, but it can replace the content of a display, and saves the last
state. A terminal can redraw its last line. Elsewhere only the final state of such text is shown.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from skymagic.display.ipykernel6 import cell_stream, clear_output, displays_in_cell
from skymagic.display.plain_lines import (
    LastLine,
    PrintedLines,
    is_terminal,
    last_line,
    printed_lines,
    redraws_last_line,
)
from skymagic.wire.typed import JsonObject
from skymagic.wire.untrusted import sanitized

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
"""MIME type of a widget's display."""
CELL_ID = "cellId"
"""Key of the cell's id in the metadata of requests."""
NONINTERACTIVE = "SKYMAGIC_NONINTERACTIVE"
"""Environment variable that allows only lines: nothing redrawn, and no questions."""


def in_ipython() -> bool:
    """Return True if displays can be shown here, without importing IPython."""
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def own_kernel() -> Any:
    """Return this process's Jupyter kernel, or None."""
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None) if in_ipython() else None


def page() -> str:
    """Return the page whose request this thread executes, or "" outside a kernel."""
    try:
        return str(own_kernel().get_parent("shell")["header"]["session"])
    except Exception:  # no kernel, or not ipykernel's
        return ""


def request_id() -> str:
    """Return the id of the request that this thread executes, or "" outside a kernel.

    Each execution of a cell has a different id.
    """
    try:
        return str(own_kernel().get_parent("shell")["header"]["msg_id"])
    except Exception:  # no kernel, or not ipykernel's
        return ""


def in_notebook() -> bool:
    """Return True if a display can be replaced later.

    IPython in a terminal would print it again; a server that executes cells by itself
    (jupyter-server-nbmodel 0.2) keeps the first state for ever.
    """
    kernel = own_kernel()
    return kernel is not None and (
        not allows_questions(kernel) or names_parent_cell(kernel) or "google.colab" in sys.modules
    )


def is_watched() -> bool:
    """Return True if a user watches this notebook while it runs.

    nbconvert and papermill declare that they allow no questions.
    """
    return in_notebook() and not is_noninteractive() and allows_questions(own_kernel())


def plain_progress() -> PrintedLines | LastLine | None:
    """Return the display of progress as plain text, or None if displays can be replaced.

    A terminal has a last line that is redrawn. Front ends that cannot replace a display get lines.
    Unattended notebooks and files get none.
    """
    stream = own_stream()
    if stream is None or is_noninteractive() or in_notebook():
        return None
    # before the kernel is considered: IPython in a terminal has none
    if is_terminal(stream):
        return last_line if redraws_last_line(stream) else printed_lines
    return printed_lines if own_kernel() is not None else None


def is_noninteractive() -> bool:
    """Return True if the user has declared the notebook unattended."""
    return os.environ.get(NONINTERACTIVE, "0") not in ("", "0")


def is_shutting_down() -> bool:
    """Return True if this process is a kernel asked to shut down, for a restart or for good."""
    return getattr(own_kernel(), "_shutdown_message", None) is not None


def is_restarting() -> bool:
    """Return True if this process is a kernel that shuts down to be restarted.

    The request comes from a front end's menu. Called when the process ends.
    """
    last = getattr(own_kernel(), "_shutdown_message", None) or {}
    return bool(last.get("content", {}).get("restart"))


def allows_questions(kernel: Any) -> bool:
    """Return True if the front end supports questions to the user."""
    return bool(getattr(kernel, "_allow_stdin", True))


def names_parent_cell(kernel: Any) -> bool:
    """Return True if the request comes from a front end that names its cell.

    JupyterLab, Notebook 7 and VS Code do. Also True if unknown, on a thread.
    """
    try:
        parent = kernel.get_parent("shell")
    except Exception:  # ipykernel internals may differ
        return True
    return not parent or CELL_ID in (parent.get("metadata") or {})


def widget_view(model: str) -> JsonObject:
    """Return the display bundle of a widget model, by MIME type."""
    return {WIDGET_VIEW: {"version_major": 2, "version_minor": 0, "model_id": model}}


Write = Callable[[str, str], None]
"""Function that receives a stream's name and text."""


class _Collected(threading.local):
    """Text that this thread has written within `batched_output`.

    Attributes:
        parts: (stream's name, text) of unsent pieces; None outside `batched_output`.
    """

    parts: list[tuple[str, str]] | None = None


_collected = _Collected()


def write(name: str, text: str) -> None:
    """Write text to the notebook's own standard output or error.

    Within `batched_output` it is sent in one piece with the text that follows.
    """
    parts = _collected.parts
    if not text:
        return
    if parts is None:
        stream = cell_stream(sys.stderr if name == "stderr" else sys.stdout)
        with last_line.above(stream, text):
            stream.write(text)
            stream.flush()
    elif parts and parts[-1][0] == name:
        parts[-1] = name, parts[-1][1] + text
    else:
        parts.append((name, text))


@contextlib.contextmanager
def batched_output() -> Iterator[None]:
    """Send text written within the context in as few messages as there are changes of stream."""
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
    """Send the text collected within `batched_output` so far.

    Used before output that is not stream text.
    """
    parts, outer = _collected.parts or [], _collected.parts
    _collected.parts = None
    for name, text in parts:
        write(name, text)
    _collected.parts = None if outer is None else []


@dataclass(frozen=True)
class DisplayData:
    """Content of a Jupyter display message.

    Attributes:
        data: representations by MIME type.
        metadata: metadata of the representations.
        transient: information that is not saved with the notebook, such as ``display_id``.
    """

    data: JsonObject
    metadata: JsonObject = field(default_factory=dict)
    transient: JsonObject = field(default_factory=dict)

    @classmethod
    def of(cls, content: JsonObject) -> DisplayData:
        """Return the content of a message that a rank has sent; metadata may be missing or null."""
        metadata, transient = content.get("metadata") or {}, content.get("transient") or {}
        return cls(dict(content["data"]), dict(metadata), dict(transient))


def show(content: DisplayData, *, update: bool = False) -> None:
    """Show a bundle of representations: richly in IPython, as text elsewhere."""
    if in_ipython():
        from IPython.core.interactiveshell import InteractiveShell

        send_collected()
        last_line.erase()
        publisher = InteractiveShell.instance().display_pub
        with displays_in_cell(publisher):
            publisher.publish(
                data=content.data,
                metadata=content.metadata,
                transient=content.transient,
                update=update,
            )
    else:
        write("stdout", f"{content.data.get('text/plain', '')}\n")


def clear_cell(*, wait: bool) -> None:
    """Clear the cell's output; with `wait`, only once other output replaces it."""
    send_collected()
    if in_ipython():
        from IPython.core.interactiveshell import InteractiveShell

        clear_output(InteractiveShell.instance().display_pub, wait=wait)
    else:
        from IPython.display import clear_output as clear_terminal

        clear_terminal(wait=wait)


class Area:
    """A display of text, and optionally HTML, in a notebook; each `draw` replaces its content."""

    def __init__(self) -> None:
        self._id = f"skymagic-{secrets.token_hex(8)}"
        self._drawn: JsonObject | None = None

    def draw(self, text: str, html: str = "", more: JsonObject | None = None) -> None:
        """Show this content, and `more` by MIME type; unchanged content is not sent again."""
        data = {"text/plain": text, **({"text/html": html} if html else {}), **(more or {})}
        if data == self._drawn:
            return
        show(self._content(data), update=self._drawn is not None)
        self._drawn = data

    def show_again(self) -> None:
        """Show it again below the current output, after the cell was cleared."""
        if self._drawn is not None:
            show(self._content(self._drawn))

    def _content(self, data: JsonObject) -> DisplayData:
        return DisplayData(data, transient={"display_id": self._id})


class StatusLine:
    """A line with the current activity, replaced at the end by its result.

    It is never written to a notebook's standard error.
    """

    def __init__(self) -> None:
        self._area: Area | None = None

    def show(self, text: str) -> None:
        """Show the current activity, if a user watches."""
        text = sanitized(text)
        if is_watched():
            self._area = self._area or Area()
            self._area.draw(text)
        elif (plain := plain_progress()) is not None and plain.due:
            plain.show(own_stream(), text)

    def end(self, text: str) -> Area | None:
        """Replace the line by the result, and return its display, if it is one."""
        area, text = self._area, sanitized(text)
        if self._area is not None:
            self._area.draw(text)
        elif (stream := own_stream()) is not None:
            last_line.erase()
            stream.write(f"{text}\n")
            stream.flush()
        self._area = None
        return area


def own_stream() -> Any:
    """Return the stream for skymagic's own lines.

    In a script it is standard error, because standard output may be data.
    """
    return cell_stream(sys.stdout) if in_ipython() else sys.stderr


YES = ("y", "yes")


def ask_yes_no(question: str) -> bool:
    """Ask the user, and return True for yes.

    The answer is no without a terminal or a notebook that can ask, and on threads other than the
    main one.
    """
    if threading.current_thread() is not threading.main_thread() or not _can_ask():
        return False
    try:
        answer = input(f"{question}. Go ahead? [y/N] ")
    except (EOFError, KeyboardInterrupt):  # stop means no
        return False
    return answer.strip().casefold() in YES


def secret_prompt() -> Callable[[str], str] | None:
    """Return the function that reads a passphrase, or None if questions are disabled."""
    return None if is_noninteractive() else getpass.getpass


def _can_ask() -> bool:
    """Return True if a user can answer: in a terminal, or a front end that supports questions.

    papermill and nbconvert do not.
    """
    if is_noninteractive():
        return False
    if (kernel := own_kernel()) is not None:
        return bool(getattr(kernel, "_allow_stdin", False))
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
