"""The manifest of a run: what one cell needs on the ranks, as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skymagic.data.capture.names import CellNames
from skymagic.data.shipping.links import SentValue


class ManifestItem(NamedTuple):
    """A variable that a cell needs, as ``--dry-run`` shows it."""

    name: str
    why: str
    """``"the cell"``, ``"used by train"`` or ``"--push"``."""
    nbytes: int
    """Length of the pickled value, in bytes."""
    moved: bool
    """Whether some rank has it not yet."""
    type: str
    stays: bool = False
    """Whether it came from the ranks, is not what they have now, and does not go back by itself."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """What one cell needs on the ranks; its files stay in the store as long as it is held."""

    orders: dict[str, Any]
    """For ``Namespace.bind``: plain values that JSON can hold."""
    nbytes: int
    """Bytes that were written or are sent with the orders."""
    items: tuple[ManifestItem, ...]
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Name → fingerprint of the notebook's value, for every name that the cell loads."""
    stored: dict[str, str] = field(default_factory=dict)
    """The same for other names that the cell may bind; those that only the ranks know of are added when the first reports them."""
    names: CellNames = field(default_factory=CellNames)
    unbound: frozenset[str] = frozenset()
    """Names that the ranks let go of: here they mean Python's own again."""
    sent: Sequence[tuple[Sequence[int], Mapping[str, SentValue]]] = ()
    """Ranks, and how values are sent to them."""
