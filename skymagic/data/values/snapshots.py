"""Snapshots of containers of many small arrays or tensors, to detect changes without pickling.

Pickling asks each tensor for its parts, one Python call after the other. A snapshot asks all of
them for the same attribute at once and compares the bytes as a whole, which takes a fifth of the
time. It keeps neither the containers nor the arrays alive: objects that get their addresses later
are compared in full.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import not_
from typing import Any

import xxhash

from skymagic.data.values import arrays, tensors
from skymagic.data.values.memory import SMALL

LEAST = 200
"""Number of arrays and tensors below which pickling is fast enough."""
_MOST = 200_000
_ATOMS = frozenset((int, float, complex, str, bytes, bool, type(None)))
_NESTED = frozenset((list, dict, tuple))
_LARGEST_ATOMS = 1 << 20
"""Bytes of texts that a snapshot may keep alive."""


class _Unsuitable(Exception):
    """Raised for a value that is not compared by a snapshot."""


class Snapshot:
    """Contents of a list, tuple or dict that holds only such containers, atoms and small arrays."""

    def __init__(
        self, ids: list[int], kinds: list[type], atoms: Sequence[object], leaves: tuple[Any, ...]
    ) -> None:
        self._ids, self._kinds, self._leaves = ids, kinds, leaves
        self._atoms = atoms

    @classmethod
    def take(cls, value: object) -> Snapshot | None:
        """Return a snapshot of a value, or None if it has too few arrays, or anything else."""
        if type(value) not in _NESTED:
            return None
        try:
            objects = _flat(value)
            ids, kinds = list(map(id, objects)), list(map(type, objects))
            # An equal number at the same address may be another one, unless this one lives.
            atoms = [obj for obj, kind in zip(objects, kinds, strict=True) if kind in _ATOMS]
            if (
                sum(map(len, (obj for obj in atoms if isinstance(obj, str | bytes))))
                > _LARGEST_ATOMS
            ):
                return None
            leaves = _leaves(objects, kinds)
            return cls(ids, kinds, atoms, _contents(leaves)) if len(leaves) >= LEAST else None
        except (_Unsuitable, RuntimeError):
            return None

    def __eq__(self, other: object) -> bool:
        """Compare the contents; equal ones are of the same object."""
        return (
            isinstance(other, Snapshot)
            and self._ids == other._ids
            and self._kinds == other._kinds
            and self._leaves == other._leaves
        )

    __hash__ = None  # type: ignore[assignment]


def _flat(value: object) -> list[Any]:
    """Return all objects in a value, itself first, each container opened once."""
    objects = [value]
    opened = {id(value)}
    level = [value]
    while level:
        inner = gc.get_referents(*level)
        objects += inner
        if len(objects) > _MOST:
            raise _Unsuitable
        level = []
        for obj in inner:
            if type(obj) in _NESTED and id(obj) not in opened:
                opened.add(id(obj))
                level.append(obj)
    return objects


def _leaves(objects: Iterable[Any], kinds: Iterable[type]) -> list[Any]:
    """Return the arrays and tensors among the objects; raise _Unsuitable for other ones."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    suitable = set()
    if torch is not None and hasattr(torch, "nn"):
        suitable |= {torch.Tensor, torch.nn.Parameter}
    if numpy is not None and hasattr(numpy, "ndarray"):
        suitable.add(numpy.ndarray)
    if not suitable.union(_ATOMS, _NESTED).issuperset(kinds):
        raise _Unsuitable
    return [obj for obj, kind in zip(objects, kinds, strict=True) if kind in suitable]


def _contents(leaves: list[Any]) -> tuple[Any, ...]:
    """Return addresses, shapes and other facts of arrays and tensors, and a hash of their bytes.

    The addresses are part of it, so that arrays that begin to share memory count as changed.
    """
    torch = sys.modules.get("torch")
    is_tensor = [torch is not None and isinstance(leaf, torch.Tensor) for leaf in leaves]
    state = xxhash.xxh3_128()
    contents: list[Any] = [is_tensor]
    for some, describe in (
        (list(compress(leaves, is_tensor)), tensors.describe),
        (list(compress(leaves, map(not_, is_tensor))), arrays.describe),
    ):
        if some:
            described = describe(some)
            if described is None:
                raise _Unsuitable
            addresses, sizes, facts = described
            if max(sizes) >= SMALL or not min(sizes):
                raise _Unsuitable
            # 0.4 µs for each; one `memoryview` or NumPy call for each would take three times that.
            state.update(b"".join(map(ctypes.string_at, addresses, sizes)))
            contents += [addresses, facts]
    return (*contents, state.digest())
