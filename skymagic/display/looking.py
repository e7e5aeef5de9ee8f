"""Whether somebody looks at a widget: the front end is asked again and again, and answers where it shows it.

Each time a small child of the widget is replaced by a new one. A front end that shows the widget makes a view of the child, and says
so by its `_view_count`; one that does not (its tab was closed, its output cleared, its machine sleeps) says nothing. The first count
of a widget comes at once; later ones would wait for the kernel, which a cell holds: so each child is asked once.

::

    kernel       a new child, `_view_count` 0 ──▶ front end
    front end    makes a view of it: `_view_count` 1 ──▶ kernel, by `shell_channel`
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from skymagic.display.shell_channel import ShellChannel

ASK_INTERVAL = 5.0
"""Seconds between two questions to a front end that has answered."""


class Presence:
    """The answers of front ends that show a box.

    Args:
        replace: puts a new child in the place of the one before.
    """

    def __init__(self, channel: ShellChannel, replace: Callable[[Any], None]) -> None:
        self._channel, self._replace = channel, replace
        self._child: Any = None
        self._asked_at = 0.0
        self._answered = threading.Event()
        self._closed = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Until a front end shows the box: at once where one has said so a moment ago; else until it says so, or `close`."""
        if self._child is None or (self._answered.is_set() and time.monotonic() - self._asked_at > ASK_INTERVAL):
            self._ask()
        self._answered.wait()

    def _ask(self) -> None:
        import ipywidgets

        with self._lock:
            if self._closed:
                return
            self._forget()
            self._answered.clear()
            self._asked_at = time.monotonic()
            self._child = ipywidgets.Box(_view_count=0)
            self._channel.add(self._child.model_id, self._counted)
            self._replace(self._child)

    def _counted(self, data: Mapping[str, Any]) -> None:
        if data.get("method") == "update" and data.get("state", {}).get("_view_count"):
            self._answered.set()

    def _forget(self) -> None:
        if self._child is not None:
            self._channel.remove(self._child.model_id or "")
            for part in (self._child.layout, self._child):
                with contextlib.suppress(Exception):
                    part.close()

    def close(self) -> None:
        """Ask no more, and let go who waits."""
        with self._lock:
            self._closed = True
            self._answered.set()
            self._forget()


class Looked:
    """Something that is measured and drawn again while somebody looks at it, and only then.

    Args:
        draw: measures and draws it; called on a thread.
        interval: seconds between two drawings.
    """

    def __init__(self, presence: Presence, draw: Callable[[], None], interval: float) -> None:
        self._presence, self._draw, self._interval = presence, draw, interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skymagic-looked", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(Exception):  # the kernel may be at its end
                self._presence.wait()
                if not self._over.is_set():
                    self._draw()
            self._over.wait(self._interval)

    def close(self) -> None:
        """Draw it no more; without waiting for the drawing that may go on."""
        self._over.set()
        self._presence.close()
