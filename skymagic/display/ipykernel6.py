"""Attribute output of threads to the cell that started them, with ipykernel 6.17 (Google Colab's).

Later ones keep the current cell in a context variable. This one shows all output below the cell
that ran last.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Iterator
from typing import Any, cast

from skymagic.wire.typed import JsonObject

_own_cell: contextvars.ContextVar[JsonObject] = contextvars.ContextVar("skymagic_own_cell")
"""Header of the request of the cell to which this context's output belongs."""


def cell_context() -> contextvars.Context:
    """Copy this thread's context, for a thread whose output belongs to the current cell."""
    context, stream = contextvars.copy_context(), cast(Any, sys.stdout)
    if _own_cell not in context and _shows_below_last_cell(stream):
        context.run(_own_cell.set, stream.parent_header)
    return context


def cell_stream(stream: Any) -> Any:
    """Return the stream, or one that writes below the cell of this context."""
    cell = _own_cell.get(None)
    return CellStream(stream, cell) if cell and _shows_below_last_cell(stream) else stream


class CellStream:
    """Stream of ipykernel's that writes below a cell other than the last one.

    Args:
        stream: ipykernel's own stream.
        cell: header of the cell's request.
    """

    def __init__(self, stream: Any, cell: JsonObject) -> None:
        self._stream, self._cell = stream, cell
        self._text = ""

    def write(self, text: str) -> None:
        """Keep the text until `flush`."""
        self._text += text

    def flush(self) -> None:
        """Send the text, after what the last cell has written."""
        self._stream.flush()
        content, self._text = {"name": self._stream.name, "text": self._text}, ""
        self._stream.session.send(
            self._stream.pub_thread,
            "stream",
            content=content,
            parent=self._cell,
            ident=self._stream.topic,
        )

    def isatty(self) -> bool:
        """Return False: a cell is no terminal."""
        return False


@contextlib.contextmanager
def displays_in_cell(publisher: Any) -> Iterator[None]:
    """Make the publisher show this thread's displays below the cell of this context."""
    cell = _own_cell.get(None)
    if not cell:
        yield
        return

    def move(message: JsonObject) -> JsonObject:
        return {**message, "parent_header": cell}

    publisher.register_hook(move)
    try:
        yield
    finally:
        publisher.unregister_hook(move)


def clear_output(publisher: Any, *, wait: bool) -> None:
    """Clear the output of the cell of this context."""
    cell = _own_cell.get(None)
    if not cell:
        publisher.clear_output(wait=wait)
        return
    publisher.session.send(
        publisher.pub_socket, "clear_output", {"wait": wait}, parent=cell, ident=publisher.topic
    )


def _shows_below_last_cell(stream: Any) -> bool:
    return isinstance(getattr(stream, "parent_header", None), dict) and not hasattr(
        stream, "_parent_header"
    )
