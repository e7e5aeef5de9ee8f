"""Whether a node that the notebook has lost sight of is gone: the other nodes are asked.

A link that is down may be the notebook's own network, and then everything goes on; a node that no other node reaches
either is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

GRACE = 1.0
"""Seconds that a link has to come back before anybody is asked."""
AGAIN = 5.0
"""Seconds between two rounds of questions."""


class Absences:
    """Owns a thread for each node that is out of sight.

    Args:
        told: called with a node, and whether it is out of sight, for whoever looks at the screen; not for a moment's
            absence.
        reached: whether other nodes reach this one; None when there is nobody to ask. Called on a thread of its own.
        gone: called once, on that thread, for a node that no other node reaches.
    """

    def __init__(
        self,
        told: Callable[[int, bool], None],
        reached: Callable[[int], bool | None],
        gone: Callable[[int], None],
    ) -> None:
        self._told, self._reached, self._gone = told, reached, gone
        self._lock = threading.Lock()
        self._back: dict[int, threading.Event] = {}

    def left(self, index: int) -> None:
        """The link to this node is down; twice is safe."""
        with self._lock:
            if index in self._back:
                return
            back = self._back[index] = threading.Event()
        threading.Thread(
            target=self._wonder, args=(index, back), name=f"skymagic-absence-{index}", daemon=True
        ).start()

    def returned(self, index: int) -> None:
        """The link is up again, or nobody waits for it any more; twice is safe."""
        with self._lock:
            back = self._back.pop(index, None)
        if back is not None:
            back.set()

    def close(self) -> None:
        """End all threads; what they are asking is heard by nobody."""
        for index in list(self._back):
            self.returned(index)

    def _wonder(self, index: int, back: threading.Event) -> None:
        if back.wait(GRACE):
            return
        self._told(index, True)
        while True:
            if self._reached(index) is False and not back.is_set():
                self.returned(index)
                self._gone(index)
                return
            if back.wait(AGAIN):
                self._told(index, False)
                return
