"""Widgets between cells: what front ends have sent is handled by the idle main thread, and what changes then goes by the agent's link.

While a cell runs it waits, as in any notebook: a callback must not run amid the user's code.
"""

from __future__ import annotations

import sys
from typing import Any

from skymagic.kernels.rank.comms import Inbox, relay
from skymagic.kernels.rank.shell import flush_text, refresh_widgets
from skymagic.wire import agent as wire

INTERVAL = 0.05
"""Seconds between two messages on what has changed."""


class BetweenCells:
    """Of one rank.

    Args:
        kernel: says whether it is ``busy``.
        loop: of the main thread (tornado's).
    """

    def __init__(self, kernel: Any, loop: Any) -> None:
        self._kernel, self._loop = kernel, loop
        self._inbox = Inbox()
        self._due = False
        relay.wake = self._wake

    def received(self, message: wire.WidgetInput) -> None:
        """A front end's message, or the agent's own, that the notebook is back; called on the control thread."""
        if message.model:
            self._inbox.put(message.model, message.data, message.buffers)
        else:
            relay.tell_all()
        self._loop.add_callback(self._handle)

    def cell_ended(self) -> None:
        """Handle what has come while a cell ran."""
        if len(self._inbox):
            self._loop.add_callback(self._handle)

    def _handle(self) -> None:
        if self._kernel.busy:  # one that awaits
            return
        shell = self._kernel.shell
        shell._last_traceback = None
        self._inbox.handle()
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
