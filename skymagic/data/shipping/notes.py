"""What the user is told about the values of a run, each thing once."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from skymagic.data.shipping.bundles import Bundle, Variable
from skymagic.data.shipping.packing import SplitReference
from skymagic.data.shipping.refusal import heavy
from skymagic.data.store.index import ContentIndex
from skymagic.data.values import arrays

Note = Callable[[str], None]
"""Called with a sentence."""


class Notes:
    """Sentences about names and values, and which of them were said."""

    def __init__(self) -> None:
        self._heavy: set[frozenset[str]] = set()
        """Contents of values."""
        self._deleted: set[str] = set()
        self._unstable: set[str] = set()
        self._apart: set[SplitReference] = set()
        self._set: set[str] = set()
        self._secret: set[str] = set()

    def deleted(self, names: Iterable[str], note: Note) -> None:
        """These names are gone from the notebook, and some rank holds them."""
        for name in sorted(set(names) - self._deleted):
            self._deleted.add(name)
            note(f"{name} is deleted here, the ranks still hold it")

    def set_on_modules(self, attributes: Mapping[str, str], used: Iterable[str], note: Note) -> None:
        """The notebook has set these attributes of modules (attribute → module); the cell uses the modules `used`."""
        said = [
            name
            for name, module in attributes.items()
            if name not in self._set and any(f"{module}.".startswith(f"{each}.") for each in used)
        ]
        self._set.update(said)
        if said:
            names = ", ".join(said)
            note(f"{names}: set here, and modules travel without what is set in them; set it in a broadcast cell too")

    def secret(self, names: Iterable[str], note: Note) -> None:
        """These variables of the environment stay here."""
        for name in sorted(set(names) - self._secret):
            self._secret.add(name)
            note(
                f"{name} is set in the notebook's environment and stays here, for it looks like a secret: %sky_pool --secret {name}"
            )

    def unstable(self, names: Iterable[str], note: Note) -> None:
        """The values of these names look different each time."""
        for name in sorted(set(names) - self._unstable):
            self._unstable.add(name)
            note(
                f"{name} looks different each time, so nobody can say whether it has changed: the ranks keep "
                f"their own; --push {name} sends the notebook's"
            )

    def apart(self, found: Iterable[SplitReference], note: Note) -> None:
        """The first name of each refers to a value of the second that the ranks have not got."""
        for each in found:
            if each not in self._apart:
                self._apart.add(each)
                note(
                    f"{each.name} refers to the notebook's {each.other}, and the ranks have their own {each.other}: make "
                    f"{each.name} in a broadcast cell, or send both with --fresh"
                )

    def maps(self, values: Mapping[str, Variable], lacking: Mapping[str, Sequence[int]], note: Note) -> None:
        """Which values that travel are maps of files, and arrive as something else."""
        for name, value in values.items():
            if lacking[name] and (why := arrays.why_as_array(value.value)):
                note(f"{name}: its contents travel as an array, for {why}")

    def heavy(self, bundles: Iterable[Bundle], index: ContentIndex, large: int, warn: Note) -> None:
        """Of which values more than `large` bytes are about to travel to other machines."""
        for bundle in bundles:
            parts = index.to_send(bundle.parts)
            value = frozenset(parts)
            if sum(part.nbytes for part in parts.values()) <= large or value in self._heavy:
                continue
            if (nbytes := sum(index.store.unsent(part.data) for part in parts.values())) > large:
                self._heavy.add(value)
                warn(heavy(", ".join(bundle.names), nbytes))

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget what was said of names that have come, or gone."""
        self._deleted = {name for name in self._deleted if name not in namespace}
        self._unstable = {name for name in self._unstable if name in namespace}
