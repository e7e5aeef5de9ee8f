"""Widgets between cells: what front ends have sent is handled by the idle main thread, and what changes then goes by the agent's link.

While a cell runs it waits, as in any notebook: a callback must not run in the middle of the user's code.
"""

from __future__ import annotations

import base64
import sys
import threading
from typing import Any

from skymagic.kernels.rank.comms import relay
from skymagic.kernels.rank.shell import flush_text, refresh_widgets
from skymagic.wire import agent as wire

INTERVAL = 0.05
"""Seconds between two messages on what has changed."""
MAX_WAITING = 1000
"""Messages from front ends that wait at once; of more, the oldest are dropped."""


class BetweenCells:
    """Handles what front ends send to the widgets of one rank.

    Args:
        kernel: says whether it is ``busy``.
        loop: of the main thread (tornado's).
    """

    def __init__(self, kernel: Any, loop: Any) -> None:
        self._kernel, self._loop = kernel, loop
        self._waiting: list[wire.WidgetInput] = []
        self._lock = threading.Lock()
        self._due = False
        relay.wake = self._wake

    def received(self, message: wire.WidgetInput) -> None:
        """A front end's message, or the agent's own, that the notebook is back; called on the control thread."""
        if message.model:
            with self._lock:
                last = self._waiting[-1] if self._waiting else None
                if last is not None and _values(last) and _values(message) and last.model == message.model:
                    last.data["state"] |= message.data["state"]  # of one slider the newest value
                else:
                    self._waiting = [*self._waiting[1 - MAX_WAITING :], message]
        else:
            relay.tell_all()
        self._loop.add_callback(self._handle)

    def cell_ended(self) -> None:
        """Handle what has come while a cell ran."""
        if self._waiting:
            self._loop.add_callback(self._handle)

    def _handle(self) -> None:
        """Hand what waits to its widgets, whose callbacks run."""
        if self._kernel.busy:  # a cell that awaits
            return
        from comm import get_comm_manager

        with self._lock:
            waiting, self._waiting = self._waiting, []
        shell, comms = self._kernel.shell, get_comm_manager().comms
        shell._last_traceback = None
        for one in waiting:
            if one.model in comms:
                buffers = [base64.b64decode(each) for each in one.buffers]
                content = {"comm_id": one.model, "data": one.data}
                comms[one.model].handle_msg({"header": {}, "content": content, "buffers": buffers})
        if shell._last_traceback:  # of a callback; nobody looks but at the log
            print("\n".join(shell._last_traceback), file=sys.stderr)
        flush_text()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._loop.add_callback(self._loop.call_later, INTERVAL, self._flush)

    def _flush(self) -> None:
        self._due = False
        if not self._kernel.busy:  # else the cell's flusher sends it
            refresh_widgets()


def _values(message: wire.WidgetInput) -> bool:
    """Whether a message has new values, and no bytes."""
    return message.data.get("method") == "update" and not message.buffers
