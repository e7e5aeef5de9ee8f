"""What a run asks for, what is found that it needs, and the manifest by which ranks bind it: values of each step of `Shipper.prepare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skymagic.data.capture.code import is_type
from skymagic.data.capture.modules import ModuleSource
from skymagic.data.capture.names import CellNames
from skymagic.data.shipping.bundles import Progress, Variable
from skymagic.data.shipping.links import SentValue
from skymagic.data.values.kinds import kind_name


@dataclass(frozen=True, eq=False)
class ShippingRequest:
    """What `Shipper.prepare` was asked for."""

    names: CellNames
    ranks: Sequence[int]
    space: Mapping[str, object]
    """The names that the cell sees: the notebook's, and those for this cell alone."""
    temporary: frozenset[str] = frozenset()
    """Names for this cell alone."""
    push: Sequence[str] = ()
    gather: Sequence[str] = ()
    """Names that come back: those that the cell does not use come as the ranks have them."""
    no_push: bool = False
    """Whether only `push` and `temporary` travel."""
    kept: frozenset[str] = frozenset()
    """Names that stay here."""
    fresh: bool = False
    dry_run: bool = False
    progress: Progress | None = None
    warn: Callable[[str], None] | None = None
    note: Callable[[str], None] | None = None

    @property
    def wanted(self) -> set[str]:
        """Names that must travel."""
        return {*(() if self.no_push else self.names.loads), *self.push, *self.temporary} - self.kept

    @property
    def hints(self) -> set[str]:
        """Names that may be left out where they cannot travel."""
        if self.no_push:
            return set()
        types = {name for name in self.names.hints if is_type(self.space.get(name))}
        return types.union(self.names.probes) - self.kept


@dataclass(eq=False)
class Needs:
    """What a run needs, and which of it is where."""

    values: dict[str, Variable]
    why: dict[str, str]
    """Name → ``"the cell"``, ``"used by train"`` or ``"--push"``."""
    lacking: dict[str, list[int]] = field(default_factory=dict)
    """Name → ranks that must get its value."""
    sources: Mapping[str, ModuleSource] = field(default_factory=dict)
    """The notebook's own modules."""
    staying: frozenset[str] = frozenset()
    """Names that ranks do not get because their values came from there."""

    @property
    def moved(self) -> list[Variable]:
        """Values that some rank must get."""
        if not any(self.lacking.values()):  # which is so nearly always, and seen at once
            return []
        return [value for name, value in self.values.items() if self.lacking[name]]

    @property
    def hashes(self) -> dict[str, str]:
        """Hashes of the modules, by name."""
        return {name: module.hash for name, module in self.sources.items()}

    def items(self) -> tuple[ManifestItem, ...]:
        """As ``--dry-run`` shows them."""
        types = {kind: kind_name(kind) for kind in {type(value.value) for value in self.values.values()}}
        return tuple(
            ManifestItem(
                name,
                self.why[name],
                value.pickled.nbytes,
                bool(self.lacking[name]),
                types[type(value.value)],
                name in self.staying,
            )
            for name, value in self.values.items()
        )


# -- the manifest ----------------------------------------------------------------------------------


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
