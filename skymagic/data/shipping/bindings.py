"""What the ranks hold, as far as the notebook knows: the memory behind the rule of state.

A rank keeps its own binding of a name until the notebook's value of that name changes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from skymagic.data.shipping.manifest import Cargo


@dataclass
class _Rank:
    """What one rank has."""

    prints: dict[str, str] = field(default_factory=dict)
    """Name → fingerprint that the notebook's value had when the rank's binding was made."""
    own: set[str] = field(default_factory=set)
    """Names that a cell has bound on the rank since they were shipped."""
    sources: dict[str, str] = field(default_factory=dict)
    """Local modules and cells that it has, with their hashes."""


class Holdings:
    """Bindings and sources by rank."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}

    def landed(self, cargo: Cargo, rank: int) -> None:
        """A rank has bound a cargo, and is running or has run its cell."""
        state = self._ranks.setdefault(rank, _Rank())
        for parcel in cargo.orders.get("parcels", ()):
            if parcel["ranks"] is None or rank in parcel["ranks"]:
                state.own.difference_update(parcel["names"])
        state.prints.update(cargo.prints)
        state.own |= cargo.names.stores
        for name in cargo.names.deletes:
            state.prints.pop(name, None)
        state.sources.update({each["name"]: each["hash"] for each in cargo.orders.get("modules", ())})
        state.sources.update(dict.fromkeys(cargo.orders.get("sources", ()), ""))

    def note(self, rank: int, prints: Mapping[str, str]) -> None:
        """A rank's own bindings stand against these values of the notebook."""
        self._ranks.setdefault(rank, _Rank()).prints.update(prints)

    def absent(self, rank: int, names: Iterable[str]) -> None:
        """A rank has no such names after all."""
        for name in names:
            if rank in self._ranks:
                self._ranks[rank].prints.pop(name, None)

    def forget(self, ranks: Iterable[int]) -> None:
        """These ranks hold nothing any more."""
        for rank in ranks:
            self._ranks.pop(rank, None)

    def prints(self, rank: int) -> Mapping[str, str]:
        """Fingerprints by name."""
        return self._ranks[rank].prints if rank in self._ranks else {}

    def has_rebound(self, rank: int, name: str) -> bool:
        """Whether a cell has bound the name since it was shipped."""
        return rank in self._ranks and name in self._ranks[rank].own

    def without(self, source: str, hash: str, ranks: Sequence[int]) -> list[int]:
        """The ranks that have not got a module or cell with this content."""
        return [
            rank for rank in ranks if rank not in self._ranks or self._ranks[rank].sources.get(source) != hash
        ]

    def lacking(
        self, prints: Mapping[str, str | None], ranks: Sequence[int], fresh: Container[str]
    ) -> dict[str, list[int]]:
        """For each name, the ranks that have not got the value with this fingerprint.

        Args:
            prints: None where the value was never seen before.
            fresh: names that all ranks get anyhow.
        """
        held = [(rank, self.prints(rank)) for rank in ranks]
        return {
            name: list(ranks)
            if wanted is None or name in fresh
            else [rank for rank, known in held if known.get(name) != wanted]
            for name, wanted in prints.items()
        }
