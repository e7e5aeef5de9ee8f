"""Base of the node and remote stores: content addressing, reference counts, LRU eviction."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Protocol

from skymagic.content.device import DeviceBytes

Buffer = bytes | bytearray | memoryview
Content = Buffer | DeviceBytes
"""Bytes of a value, in host memory or on a device."""


class FileRecord(Protocol):
    """Record of a stored file."""

    used: float
    """Monotonic time of the last use in seconds."""

    @property
    def name(self) -> str:
        """Name of the file, which ranks use to map it."""

    @property
    def nbytes(self) -> int:
        """Length in bytes."""


class Store(ABC):
    """Content-addressed files on this machine (`NodeStore`) or on other machines (`RemoteStore`).

    Only the process that put a file evicts or drops it. A pinned file is never evicted.
    """

    remote: ClassVar[bool]
    """True if writing a file costs much more than hashing its value first."""

    def __init__(self, notify: Callable[[str], None] | None) -> None:
        self._notify = notify or (lambda sentence: None)
        self._files: Mapping[str, FileRecord] = {}
        """By key."""
        self._pins: dict[str, int] = {}
        # Reentrant: the garbage collector may call `unpin` on a thread that holds the lock.
        self._lock = threading.RLock()

    @abstractmethod
    def put(
        self,
        key: str | None,
        pieces: Iterable[Content],
        nbytes: int,
        progress: Callable[[int], None] | None = None,
    ) -> str:
        """Write one file from consecutive pieces, unless its contents are stored already.

        Args:
            key: the content's hash if it is known. The bytes written decide: if another thread
                changes the value meanwhile, it is stored completely under the hash of the bytes
                that were read.
            nbytes: total length of the pieces in bytes.
            progress: called at intervals with the bytes written so far.

        Returns:
            The key of the file.

        Raises:
            OSError: neither memory nor disk has space left.
            PoolError: a node cannot be reached.
        """

    @abstractmethod
    def drop(self, keys: Iterable[str]) -> None:
        """Unlink these files; existing mappings stay valid. Unknown keys are ignored."""

    @abstractmethod
    def take(self, name: str, node: int = 0) -> memoryview:
        """Return the bytes of a file that a rank of a node gave, and unlink it there.

        Raises:
            FileNotFoundError: the file was taken before.
            PoolError: the node cannot be reached.
        """

    @abstractmethod
    def discard(self, name: str, node: int = 0) -> None:
        """Unlink a file that a rank of a node gave and that is not needed; safe to call twice."""

    @abstractmethod
    def close(self) -> None:
        """Unlink all files that this store has put; safe to call twice.

        The directory itself belongs to its creator.
        """

    def unsent(self, data: Content) -> int:
        """Return the number of bytes to transfer if this is put and not stored yet.

        That is all of it, or the pieces that no stored file contains.
        """
        return len(data)

    def settle(self) -> None:  # noqa: B027 - a node's own store has nothing to wait for
        """Wait until everything that was put has reached the ranks' nodes.

        Raises:
            OSError: a node has no space left.
            PoolError: a node cannot be reached, or values do not get through to it.
        """

    def prefetch(self, files: Iterable[tuple[str, int]]) -> None:  # noqa: B027 - nor to fetch
        """Announce files (name, node) that will be taken or discarded soon."""

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return the keys without a file, in the order given, and mark the others as used."""
        with self._lock:
            now = time.monotonic()
            missing = []
            for key in keys:
                file = self._files.get(key)
                if file is None:
                    missing.append(key)
                else:
                    # A lookup counts as use, and so postpones eviction.
                    file.used = now
            return missing

    def name(self, key: str) -> str:
        """Return the name of a stored file, which ranks use to map it; the same on every node."""
        return self._files[key].name

    def keys(self) -> frozenset[str]:
        """Return the keys of all stored files."""
        return frozenset(self._files)

    def pin(self, keys: Iterable[str]) -> None:
        """Protect these files from eviction until `unpin`; pins are counted."""
        with self._lock:
            for key in keys:
                self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, keys: Iterable[str]) -> None:
        """Remove one pin from each key."""
        with self._lock:
            for key in keys:
                # A key without pins is removed, so that `pinned` is a lookup.
                count = self._pins.pop(key, 0) - 1
                if count > 0:
                    self._pins[key] = count

    def pinned(self, key: str) -> bool:
        """Return True if the file is still needed."""
        return key in self._pins

    def _files_to_evict(self, keys: Iterable[str], room: float, nbytes: int) -> list[str] | None:
        """Choose files to evict so that a value fits, least recently used first.

        Return None if evicting all of them would not be enough.

        Args:
            room: free space in bytes.
            nbytes: required space in bytes.
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
