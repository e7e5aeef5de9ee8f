"""Values on their way back from the ranks: files in their nodes' stores, and what is rebuilt of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from skymagic.data.store.base import Store
from skymagic.data.store.bundle import read_parts
from skymagic.data.values import pickling


@dataclass
class _PackedGroup:
    """Values of one pickle, on their way back."""

    waiting: set[int]
    """Of those that were neither unpacked nor discarded."""
    values: tuple[Any, ...] | None = None


class Unpacking:
    """Rebuilds what ranks have packed.

    Args:
        store: the node's store, or that of several nodes.
        namespace: the notebook's global names.
    """

    def __init__(self, store: Store, namespace: dict[str, Any]) -> None:
        self.store = store
        self.namespace = namespace
        self._lock = threading.RLock()
        self._groups: dict[str, _PackedGroup] = {}

    def prefetch(self, refs: Iterable[Mapping[str, Any]]) -> None:
        """These values that ``Namespace.pack`` packed will be unpacked or discarded: let them come from all nodes at once."""
        files = dict.fromkeys((ref["file"], ref.get("node", 0)) for ref in refs if ref.get("file"))
        if len(files) > 1:
            self.store.prefetch(files)

    def unpack(self, ref: Mapping[str, Any]) -> Any:
        """Rebuild a value that ``Namespace.pack`` packed; its file is unlinked. The value outlives the pool.

        Raises:
            FileNotFoundError: it has been unpacked before.
            Exception: whatever the value's own reconstruction raises.
        """
        if "group" not in ref:
            return self._open(ref)
        # Values that share something are one pickle: opened with the first of them, forgotten with the last.
        with self._lock:
            group = self._groups.setdefault(ref["group"], _PackedGroup(set(range(ref["count"]))))
            if group.values is None:
                group.values = self._open(ref)
            value = group.values[ref["index"]]
            self._leave(ref, group)
            return value

    def discard(self, ref: Mapping[str, Any]) -> None:
        """Unlink the file of a value that ``Namespace.pack`` packed and that nobody wants; twice is safe."""
        with self._lock:
            if "group" in ref:
                group = self._groups.setdefault(ref["group"], _PackedGroup(set(range(ref["count"]))))
                self._leave(ref, group)
                if group.waiting or group.values is not None:
                    return
            if ref.get("file"):
                self.store.discard(ref["file"], ref.get("node", 0))

    def _leave(self, ref: Mapping[str, Any], group: _PackedGroup) -> None:
        group.waiting.discard(ref["index"])
        if not group.waiting:
            self._groups.pop(ref["group"], None)

    def _open(self, ref: Mapping[str, Any]) -> Any:
        header, buffers = read_parts(ref, lambda _: self.store.take(ref["file"], ref.get("node", 0)))
        return pickling.loads(header, buffers, self.namespace)
