"""What a run asks for, and what is found that it needs: values that go from step to step of `Shipper.prepare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from skymagic.data.capture.annotations import is_type
from skymagic.data.capture.modules import ModuleSource
from skymagic.data.capture.names import CellNames
from skymagic.data.shipping.bundles import Progress, Variable
from skymagic.data.shipping.manifest import ManifestItem
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
        """Of the modules."""
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
