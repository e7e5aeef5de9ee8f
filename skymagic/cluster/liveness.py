"""Failure detection with indirect probes (as in SWIM): whether a node that the notebook has lost is gone, the other nodes find out.

A link that is down may be the notebook's own network, and then everything goes on; a node that no other node reaches
either is gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

GRACE = 1.0
"""Seconds that a link has to come back before other nodes probe."""
PROBE_INTERVAL = 5.0
"""Seconds between two rounds of probes."""


class Liveness:
    """Owns a thread for each node whose link is down.

    Args:
        on_change: called with a node, and whether its link is down, for the user; not for less than the grace period.
        probe: whether other nodes reach this one; None when there are no others. Called on a thread of its own.
        on_dead: called once, on that thread, for a node that no other node reaches.
    """

    def __init__(
        self,
        on_change: Callable[[int, bool], None],
        probe: Callable[[int], bool | None],
        on_dead: Callable[[int], None],
    ) -> None:
        self._on_change, self._probe, self._on_dead = on_change, probe, on_dead
        self._lock = threading.Lock()
        self._connected: dict[int, threading.Event] = {}

    def link_down(self, index: int) -> None:
        """The link to this node is down; twice is safe."""
        with self._lock:
            if index in self._connected:
                return
            connected = self._connected[index] = threading.Event()
        threading.Thread(
            target=self._watch, args=(index, connected), name=f"skymagic-liveness-{index}", daemon=True
        ).start()

    def link_up(self, index: int) -> None:
        """The link is up again, or nobody waits for it any more; twice is safe."""
        with self._lock:
            connected = self._connected.pop(index, None)
        if connected is not None:
            connected.set()

    def close(self) -> None:
        """End all threads; the results of probes under way are dropped."""
        for index in list(self._connected):
            self.link_up(index)

    def _watch(self, index: int, connected: threading.Event) -> None:
        if connected.wait(GRACE):
            return
        self._on_change(index, True)
        while True:
            # the link may have come back while the others were probing
            if self._probe(index) is False and not connected.is_set():
                self.link_up(index)
                self._on_dead(index)
                return
            if connected.wait(PROBE_INTERVAL):
                self._on_change(index, False)
                return
