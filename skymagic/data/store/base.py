"""What the node's store and the remote store share: content addressing, reference counts, LRU eviction."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from skymagic.data.store.device import DeviceBytes

Buffer = bytes | bytearray | memoryview
Content = Buffer | DeviceBytes
"""Bytes of a value, wherever they lie."""


class Store(ABC):
    """Files by their content's hash: a `store.NodeStore` on this machine, or a `remote_store.RemoteStore` on others.

    A file is evicted and dropped only by the process that put it, and stays as long as it is pinned.
    """

    remote: ClassVar[bool]
    """Whether to write a file costs much more than to hash a value first."""

    def __init__(self, notify: Callable[[str], None] | None) -> None:
        self._notify = notify or (lambda sentence: None)
        self._files: dict[str, Any] = {}
        """Key → what has a `name`, `nbytes`, and `used`: when it was last needed, in seconds of the monotonic clock."""
        self._pins: dict[str, int] = {}
        # Reentrant: the garbage collector may call `unpin` on a thread that holds it.
        self._lock = threading.RLock()

    @abstractmethod
    def put(
        self,
        key: str | None,
        pieces: Iterable[Content],
        nbytes: int,
        progress: Callable[[int], None] | None = None,
    ) -> str:
        """Write one file from pieces that follow one another; what is here already is not written again.

        Args:
            key: the content's hash where it is known. What counts is what was written: a value that another thread
                changes meanwhile is stored, whole, under the hash of the bytes that were read.
            nbytes: the sum of the pieces' lengths, in bytes.
            progress: called now and then with the bytes written so far.

        Returns:
            The key of the file.

        Raises:
            OSError: there is no room, on disk neither.
            PoolError: a node cannot be reached.
        """

    @abstractmethod
    def drop(self, keys: Iterable[str]) -> None:
        """Unlink these files; what is mapped stays mapped. Unknown keys are ignored."""

    @abstractmethod
    def take(self, name: str, node: int = 0) -> memoryview:
        """The bytes of a file that a rank of a node has given, which is unlinked there.

        Raises:
            FileNotFoundError: it was taken before.
            PoolError: the node cannot be reached.
        """

    @abstractmethod
    def discard(self, name: str, node: int = 0) -> None:
        """Unlink a file that a rank of a node has given and that nobody wants; twice is safe."""

    @abstractmethod
    def close(self) -> None:
        """Unlink all files that this store has put; twice is safe. The directory itself is its maker's."""

    def unsent(self, data: Content) -> int:
        """Bytes that move when this is put and is not here: all of it, or the pieces that no file here has."""
        return len(data)

    def settle(self) -> None:  # noqa: B027 - a node's own store has nothing to wait for
        """Wait until what was put is where the ranks are.

        Raises:
            OSError: a node has no room.
            PoolError: a node cannot be reached, or values do not get through to it.
        """

    def prefetch(self, files: Iterable[tuple[str, int]]) -> None:  # noqa: B027 - nor to fetch
        """Announce files (name, node) that will be taken or discarded soon."""

    def missing(self, keys: Iterable[str]) -> list[str]:
        """The keys of which there is no file, in the order given; the others count as used."""
        with self._lock:
            now = time.monotonic()
            missing = []
            for key in keys:
                file = self._files.get(key)
                if file is None:
                    missing.append(key)
                else:
                    file.used = now
            return missing

    def name(self, key: str) -> str:
        """The name of a file that is here, the same on every node: what a rank needs to map it."""
        return str(self._files[key].name)

    def keys(self) -> frozenset[str]:
        """Keys of all files that are here."""
        return frozenset(self._files)

    def pin(self, keys: Iterable[str]) -> None:
        """Keep these from eviction until ``unpin``; pins are counted."""
        with self._lock:
            for key in keys:
                self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[str]) -> None:
        """Take one pin off each key."""
        with self._lock:
            for key in keys:
                count = self._pins.pop(key, 0) - 1
                if count > 0:
                    self._pins[key] = count

    def pinned(self, key: str) -> bool:
        """Whether somebody still needs this file."""
        return key in self._pins

    def _victims(self, keys: Iterable[str], room: float, nbytes: int) -> list[str] | None:
        """Which of these files to evict, the least recently used first, so that a value fits; None if that does not help.

        Args:
            room: bytes that are free.
            nbytes: bytes that are needed.
        """
        victims = []
        for key in sorted(
            (key for key in keys if not self.pinned(key)), key=lambda key: self._files[key].used
        ):
            if room >= nbytes:
                break
            victims.append(key)
            room += self._files[key].nbytes
        return victims if room >= nbytes else None
