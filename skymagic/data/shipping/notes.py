"""Messages about the values of a run. Each message is shown once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from skymagic.data.bundle import ContentIndex
from skymagic.data.capture.class_attributes import ClassAttribute
from skymagic.data.capture.settings import Setting
from skymagic.data.shipping.bundles import Bundle, Variable
from skymagic.data.values import arrays

T = TypeVar("T")
ShowNote = Callable[[str], None]
"""Function that shows a message, given as a sentence, to the user."""


class SplitReference(NamedTuple):
    """A variable that refers to the notebook's `other`, while the ranks have their own `other`."""

    name: str
    other: str


class Notes:
    """Messages about names and values, with a record of those already shown."""

    def __init__(self) -> None:
        self._shown: defaultdict[str, set[Any]] = defaultdict(set)
        """Kind of message → subjects that it was already shown for."""

    def _new(self, kind: str, items: Iterable[T]) -> list[T]:
        """Return the subjects that this message was not shown for yet, sorted, and record them."""
        new = sorted(set(items) - self._shown[kind])  # type: ignore[type-var]
        self._shown[kind].update(new)
        return new

    def report_deleted(self, names: Iterable[str], note: ShowNote) -> None:
        """Report names that the notebook has deleted while some rank still has them."""
        for name in self._new("deleted", names):
            note(f"{name} was deleted in the notebook; the ranks still have it")

    def report_module_attributes(
        self,
        attributes: Mapping[str, str],
        used: Iterable[str],
        repeated: Collection[str],
        note: ShowNote,
    ) -> None:
        """Report attributes that the notebook set on modules which the cell uses.

        Args:
            attributes: maps each attribute to its module.
            used: modules that the cell uses.
            repeated: attributes that the cell sets itself.
        """
        # The cell sets these on the ranks itself, so they are never reported.
        self._shown["set"].update(repeated)
        modules = frozenset(used)
        packages = frozenset(module.partition(".")[0] for module in modules)
        prefixes = tuple(f"{module}." for module in modules)
        # An attribute of a top-level package may matter to the code of all its modules.
        reached = (
            name
            for name, module in attributes.items()
            if module in packages or f"{module}.".startswith(prefixes)
        )
        if names := self._new("set", reached):
            listed = ", ".join(names)
            note(
                f"{listed}: set in the notebook only, because the ranks import modules from their "
                "source; set this in a broadcast cell too"
            )

    def report_settings(
        self,
        settings: Iterable[Setting],
        packages: Collection[str],
        repeated: Iterable[Setting],
        note: ShowNote,
    ) -> None:
        """Report settings that the notebook changed in packages which the cell uses.

        Args:
            repeated: settings that the cell changes itself.
        """
        shown_topics = self._shown["settings"]
        shown_topics.update(setting.topic for setting in repeated)
        new = {
            setting
            for setting in settings
            if setting.topic not in shown_topics and setting.matters_to(packages)
        }
        shown_topics.update(setting.topic for setting in new)
        if new:
            listed = ", ".join(sorted({setting.text for setting in new}))
            note(
                f"{listed}: set in the notebook only, because each rank has its own settings; "
                "set this in a broadcast cell too"
            )

    def report_registrations(
        self,
        calls: Mapping[str, str],
        packages: Container[str],
        repeated: Collection[str],
        note: ShowNote,
    ) -> None:
        """Report registrations that the notebook made with packages which the cell uses.

        Args:
            calls: maps each call to its module.
            repeated: calls that the cell makes itself.
        """
        self._shown["registered"].update(repeated)
        used = (call for call, module in calls.items() if module.partition(".")[0] in packages)
        if names := self._new("registered", used):
            note(
                f"{', '.join(names)}: called in the notebook only, "
                "so what it registers is missing on the ranks; call it in a broadcast cell too"
            )

    def report_class_attributes(
        self,
        attributes: Iterable[ClassAttribute],
        packages: Container[str],
        repeated: Collection[ClassAttribute],
        note: ShowNote,
    ) -> None:
        """Report attributes that the notebook set on classes of packages which the cell uses.

        Args:
            repeated: attributes that the cell sets itself.
        """
        self._shown["classes"].update(repeated)
        used = (attribute for attribute in attributes if attribute.package in packages)
        if new := self._new("classes", used):
            note(
                f"{', '.join(map(str, new))}: set in the notebook only, "
                "because the ranks import the class; set this in a broadcast cell too"
            )

    def report_secrets(self, names: Iterable[str], note: ShowNote) -> None:
        """Report environment variables that are not sent."""
        for name in self._new("secret", names):
            note(
                f"{name} is set in the notebook's environment, but not sent, because it looks like "
                f"a secret; to send it, start the pool with --secret {name}"
            )

    def report_unstable(self, names: Iterable[str], note: ShowNote) -> None:
        """Report names whose values pickle differently each time."""
        for name in self._new("unstable", names):
            note(
                f"{name} pickles differently each time, so changes cannot be detected: "
                f"the ranks keep the value they have; --push {name} sends the notebook's value"
            )

    def report_shared_references(
        self, references: Iterable[SplitReference], note: ShowNote
    ) -> None:
        """Report variables that refer to the notebook's value of a name, not the ranks'."""
        for reference in self._new("shared references", references):
            note(
                f"{reference.name} refers to the notebook's {reference.other}, "
                f"and the ranks have their own {reference.other}: "
                f"make {reference.name} in a broadcast cell, or send both with --fresh"
            )

    def report_memory_maps(
        self, values: Mapping[str, Variable], lacking: Mapping[str, Sequence[int]], note: ShowNote
    ) -> None:
        """Report memory-mapped files that are sent as plain arrays.

        Args:
            lacking: name → ranks that do not have the value yet.
        """
        for name, value in values.items():
            if lacking[name] and (why := arrays.why_as_array(value.value)):
                note(f"{name}: its contents are sent as an array, because {why}")

    def warn_large_values(
        self, bundles: Iterable[Bundle], index: ContentIndex, large: int, warn: ShowNote
    ) -> None:
        """Warn about values with more than `large` bytes to send to other machines."""
        for bundle in bundles:
            parts = index.to_send(bundle.parts)
            # Identified by contents, so that a changed value is reported again. The cheap checks
            # come first: `unsent` may look for pieces of a value in the store.
            value = frozenset(parts)
            if (
                sum(part.nbytes for part in parts.values()) <= large
                or value in self._shown["large"]
            ):
                continue
            if (nbytes := sum(index.store.unsent(part.data) for part in parts.values())) > large:
                self._shown["large"].add(value)
                warn(large_value_warning(", ".join(bundle.names), nbytes))

    def forget_names(self, namespace: Container[str]) -> None:
        """Forget messages about names that were created again, or deleted."""
        # A name that was created again may be deleted again, and then deserves a new message.
        self._shown["deleted"] = {name for name in self._shown["deleted"] if name not in namespace}
        self._shown["unstable"] = {name for name in self._shown["unstable"] if name in namespace}


def explain_full_store(problem: OSError, sizes: list[tuple[str, int]]) -> str:
    """Return the message for a full store: the largest variables, and what to do."""
    largest = sorted(sizes, key=lambda entry: -entry[1])[:3]
    listed = ", ".join(f"{name} ({nbytes / 1e6:,.0f} MB)" for name, nbytes in largest)
    return (
        f"the cell's variables do not fit in the node store: {problem.strerror or problem}; "
        f"the largest are {listed}; "
        "free memory or disk, or leave variables out with --no-push NAMES"
    )


def large_value_warning(name: str, nbytes: int) -> str:
    """Return the warning for a large variable that must be sent to other machines."""
    return (
        f"{name}: {nbytes / 1e6:,.0f} MB must be sent over this connection; data that a cell reads "
        f"or creates on the nodes is not sent, and --no-push {name} leaves the variable out"
    )
