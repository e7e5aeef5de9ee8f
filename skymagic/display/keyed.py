"""What the notebook's objects with keys have in common (status, logs, offers): each is a mapping, and Tab completes its keys; pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Keyed(Mapping[K, V]):
    """A read-only mapping over one that it holds; a subclass whose values are made when they are asked for has a `__getitem__`."""

    @property
    @abstractmethod
    def _held(self) -> Mapping[K, Any]: ...

    def __getitem__(self, key: K) -> V:
        value: V = self._held[key]
        return value

    def __iter__(self) -> Iterator[K]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def _ipython_key_completions_(self) -> list[K]:
        return list(self._held)
