"""The manifest of a run, and what the notebook knows about each rank's bindings.

A rank keeps its own binding of a name until the notebook assigns that name or changes its value.
The user's own modules follow another rule: their source travels to all ranks that lack it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from skymagic.content.chunks import digest
from skymagic.data.capture import modules
from skymagic.data.capture.loaded import ImportedTexts
from skymagic.data.capture.names import CellNames
from skymagic.data.shipping.links import SentValue
from skymagic.errors import CaptureError
from skymagic.wire.values import BindOrder, ModuleSource, SentModule

# Unequal to all values of a variable; None stands for one that is not set.
_NEVER = object()


class ManifestItem(NamedTuple):
    """Variable that a cell needs, as shown by `--dry-run`."""

    name: str
    why: str
    """`"the cell"`, `"used by train"` or `"--push"`."""
    nbytes: int
    """Size of the pickled value in bytes."""
    moved: bool
    """True if some rank does not have it yet."""
    type: str
    stays: bool = False
    """True if it came from the ranks, differs from theirs now, and is not sent back by itself."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """Everything one cell needs on the ranks; its files stay in the store while it exists."""

    orders: BindOrder
    """Argument of `RankNamespace.bind`; empty in a dry run."""
    nbytes: int
    """Bytes written to the store or sent with the orders."""
    items: tuple[ManifestItem, ...]
    """In a dry run all variables that the cell needs, otherwise only those that travel."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """By name: fingerprint of the notebook's value, for every name that the cell loads."""
    stored: dict[str, str] = field(default_factory=dict)
    """The same for other names that the cell may bind.

    Names known only to the ranks are added when the first rank reports them.
    """
    names: CellNames = field(default_factory=CellNames)
    unbound: frozenset[str] = frozenset()
    """Names that the ranks delete: here they refer to Python's builtins again."""
    sent: Sequence[tuple[Sequence[int], Mapping[str, SentValue]]] = ()
    """Pairs of ranks and the values sent to them."""


class NameReaders(NamedTuple):
    """Global names read by the functions and classes on some ranks."""

    names: Mapping[str, frozenset[str]]
    """By function or class: the global names that it reads."""
    first: Mapping[str, str]
    """By global name: the first function or class that reads it, in alphabetical order."""


NOBODY = NameReaders({}, {})


@dataclass
class _RankBindings:
    """Bindings of one rank."""

    fingerprints: dict[str, str] = field(default_factory=dict)
    """By name: fingerprint of the notebook's value at the time of the rank's binding."""
    rebound: set[str] = field(default_factory=set)
    """Names that a cell has bound on the rank since they were sent."""
    sources: dict[str, str] = field(default_factory=dict)
    """Local modules and cells that the rank has, with their hashes."""
    environ: dict[str, str | None] = field(default_factory=dict)
    """Environment variables that the rank received from the notebook."""
    reads: str = ""
    """Digest of the names that its functions read."""


class Bindings:
    """Bindings, sources and environment variables by rank."""

    def __init__(self) -> None:
        self._ranks: defaultdict[int, _RankBindings] = defaultdict(_RankBindings)
        self.replaced: set[int] = set()  # ranks that were restarted
        self._lost: dict[int, frozenset[str]] = {}
        """By forgotten rank: names that cells had bound there."""
        self._reads: dict[str, Mapping[str, Sequence[str]]] = {}
        """By digest: the global names that each function or class reads."""
        self._readers: tuple[frozenset[str], NameReaders] = frozenset(), NOBODY
        """Cached readers, with the digests they were computed for."""

    def bound(
        self,
        manifest: Manifest,
        rank: int,
        rebound: Mapping[str, str | None],
        deleted: Iterable[str],
    ) -> None:
        """Record that a rank bound a manifest's names and ran its cell.

        Args:
            rebound: maps names that the cell bound on the rank to the fingerprint of the notebook's
                value, or None if it has none.
            deleted: names that the rank had before the cell, but not after it.
        """
        state = self._ranks[rank]
        for bundle in manifest.orders.bundles:
            if bundle.ranks is None or rank in bundle.ranks:
                # These names now have the notebook's values.
                state.rebound.difference_update(bundle.names)
        self._drop(state, manifest.unbound)  # before the cell's names: it may have bound them again
        state.fingerprints.update(manifest.fingerprints)
        state.fingerprints.update(
            {name: value for name, value in rebound.items() if value is not None}
        )
        state.rebound.update(rebound)
        # After the update: the cell may have deleted names that were sent to it.
        self._drop(state, deleted)
        state.sources.update(
            {sent.module.name: sent.module.hash for sent in manifest.orders.modules}
        )
        state.sources.update(dict.fromkeys(manifest.orders.sources, ""))
        state.environ.update(manifest.orders.environ)

    def _drop(self, state: _RankBindings, names: Iterable[str]) -> None:
        for name in names:
            state.fingerprints.pop(name, None)
            state.rebound.discard(name)

    def set_fingerprints(self, rank: int, fingerprints: Mapping[str, str]) -> None:
        """Set fingerprints for names that a rank binds itself.

        The rank keeps its bindings as long as the notebook's values have these fingerprints.
        """
        self._ranks[rank].fingerprints.update(fingerprints)

    def sent_environ(self, ranks: Iterable[int]) -> frozenset[str]:
        """Return the environment variables that any of these ranks received from the notebook."""
        return frozenset().union(*(self._ranks[rank].environ for rank in ranks))

    def missing_environ(
        self, changed: Mapping[str, str | None], ranks: Iterable[int]
    ) -> dict[str, str | None]:
        """Return the changed environment variables that some of these ranks do not have."""
        held = [self._ranks[rank].environ for rank in ranks]
        return {
            name: value
            for name, value in changed.items()
            if any(environ.get(name, _NEVER) != value for environ in held)
        }

    def set_reads(self, rank: int, digest: str, names: Mapping[str, Sequence[str]] | None) -> None:
        """Record the names that a rank's functions read; None if the digest is known already."""
        if names is not None:
            self._reads[digest] = names
            self._readers = frozenset(), NOBODY
        self._ranks[rank].reads = digest
        # A copy, because other threads may add ranks at the same time.
        used = {state.reads for state in list(self._ranks.values())}
        self._reads = {key: names for key, names in self._reads.items() if key in used}

    def digests_with_known_names(self) -> list[str]:
        """Return the digests whose names are known, so that ranks need not send them again."""
        return sorted(self._reads)

    def readers(self, ranks: Iterable[int]) -> NameReaders:
        """Return the functions and classes on these ranks, with the names they read."""
        digests = frozenset(self._ranks[rank].reads for rank in ranks) & self._reads.keys()
        if digests != self._readers[0]:
            names_by_function: dict[str, set[str]] = {}
            for digest in digests:
                for function, names in self._reads.get(digest, {}).items():
                    names_by_function.setdefault(function, set()).update(names)
            # Reversed, because the last entry of a name remains.
            first = {
                name: function
                for function in sorted(names_by_function, reverse=True)
                for name in names_by_function[function]
            }
            self._readers = (
                digests,
                NameReaders(
                    {key: frozenset(names) for key, names in names_by_function.items()}, first
                ),
            )
        return self._readers[1]

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget everything about these ranks."""
        for rank in ranks:
            state = self._ranks.pop(rank, None)
            # Kept for the message about what was lost with the rank.
            if state is not None and state.rebound:
                self._lost[rank] = frozenset(state.rebound)
            self.replaced.add(rank)

    def record_clone(self, names: Iterable[str], source: int, ranks: Iterable[int]) -> None:
        """Record that these ranks received another rank's values of these names.

        Their bindings of the names are now those of that rank.
        """
        names, origin = set(names), self._ranks[source]
        for rank in ranks:
            state = self._ranks[rank]
            # Names without a fingerprint on the source lose theirs, so that the notebook's values
            # count as new.
            state.fingerprints = {
                name: fingerprint
                for name, fingerprint in state.fingerprints.items()
                if name not in names
            }
            state.fingerprints |= {
                name: fingerprint
                for name, fingerprint in origin.fingerprints.items()
                if name in names
            }
            state.rebound |= names

    def names(self, rank: int) -> frozenset[str]:
        """Return the names that the rank is known to hold."""
        state = self._ranks[rank]
        return frozenset(state.fingerprints) | state.rebound

    def recorded_ranks(self) -> list[int]:
        """Return the ranks with recorded bindings."""
        return sorted(self._ranks)

    def fingerprints(self, rank: int) -> Mapping[str, str]:
        """Return the rank's fingerprints by name."""
        return self._ranks[rank].fingerprints

    def has_rebound(self, rank: int, name: str) -> bool:
        """Return True if a cell has bound the name on the rank since it was sent."""
        return name in self._ranks[rank].rebound

    def bound_by_cells(self, rank: int) -> frozenset[str]:
        """Return the names that cells have bound on the rank.

        For a forgotten rank, return those that it had.
        """
        state = self._ranks.get(rank)
        names = frozenset(state.rebound) if state is not None else frozenset()
        return names or self._lost.get(rank, frozenset())

    def has_source(self, source: str, ranks: Sequence[int]) -> bool:
        """Return True if any rank has a module or cell with this name, in any version."""
        return any(source in self._ranks[rank].sources for rank in ranks)

    def ranks_without_source(self, source: str, hash: str, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that lack a module or cell with this content."""
        return [rank for rank in ranks if self._ranks[rank].sources.get(source) != hash]

    def ranks_without_value(
        self, fingerprints: Mapping[str, str | None], ranks: Sequence[int], fresh: Container[str]
    ) -> dict[str, list[int]]:
        """Return, for each name, the ranks that lack the value with this fingerprint.

        Args:
            fingerprints: None for a value that was never seen before.
            fresh: names that all ranks receive in any case.
        """
        lacking = {
            name: [*ranks] if fingerprint is None or name in fresh else []
            for name, fingerprint in fingerprints.items()
        }
        for rank in ranks:
            held = self.fingerprints(rank)
            if [*map(held.get, fingerprints)] == [*fingerprints.values()]:
                continue  # the common case, and quick to check
            for name, fingerprint in fingerprints.items():
                if held.get(name) != fingerprint and fingerprint is not None and name not in fresh:
                    lacking[name].append(rank)
        return lacking


# -- source of modules -----------------------------------------------------------------------------


Note = Callable[[str], None]


class Sources:
    """The user's own modules, as sent to the ranks of one pool.

    Args:
        folder: the notebook's folder.
        bindings: records what the ranks have.
        remote: True if ranks are on other machines, without the modules' folders.
    """

    def __init__(self, folder: str, bindings: Bindings, *, remote: bool) -> None:
        self.folder = folder
        self.remote = remote
        self.required: frozenset[str] = frozenset()
        """Dotted names that the modules found last need in order to be imported."""
        self.imported: frozenset[str] = frozenset()
        """Dotted names that the modules found last may import."""
        self._bindings = bindings
        self._imported = ImportedTexts()
        self._too_large: set[str] = set()

    def find(
        self,
        names: Iterable[str],
        ranks: Sequence[int],
        *,
        dry_run: bool = False,
        note: Note | None = None,
    ) -> dict[str, ModuleSource]:
        """Find local modules among these names, with the local modules that they import.

        Args:
            note: called with a sentence for each module that the notebook has loaded in an earlier
                version, and for data files that are not sent.

        Raises:
            CaptureError: a file is not valid Python, and either the notebook or a rank runs an
                earlier version of it, or the cell itself needs it.
        """
        requested = sorted(names)
        if not requested:
            self.required = self.imported = frozenset()
            return {}
        result = modules.search(requested, self.folder)
        self.required, self.imported = result.required, result.imports
        problems = [
            problem
            for name, problem in result.problems.items()
            # Any other import of an invalid file is conditional, or fails by itself.
            if name in requested or name in sys.modules or self._bindings.has_source(name, ranks)
        ]
        if problems:
            listed = "\n".join(f"  {problem}" for problem in sorted(problems))
            count = "1 module is" if len(problems) == 1 else f"{len(problems)} modules are"
            raise CaptureError(f"{count} not valid Python; nothing was run:\n{listed}")
        if note is not None and not dry_run:
            for stale in self._imported.stale(result.sources.values()):
                note(_earlier(stale))
        if self.remote and not modules.DATA_READERS.isdisjoint(result.imports.union(requested)):
            return {name: self._with_data(source, note) for name, source in result.sources.items()}
        return result.sources

    def missing_modules(
        self, sources: Mapping[str, ModuleSource], ranks: Sequence[int]
    ) -> tuple[SentModule, ...]:
        """Return the entries in a run's orders for modules that some rank lacks."""
        entries = []
        for name, module in sources.items():
            if module.data:
                # Ranks need the package again if only its data files changed.
                data_hash = digest([module.data.encode()])
                module = replace(module, hash=module.hash + data_hash)
            needing = self._bindings.ranks_without_source(name, module.hash, ranks)
            if needing:
                is_all = len(needing) == len(ranks)
                entries.append(SentModule(module, None if is_all else tuple(needing)))
        return tuple(entries)

    def _with_data(self, source: ModuleSource, note: Note | None) -> ModuleSource:
        """Return a package with its data files, unless they are too large."""
        if not source.package or not source.source:
            return source
        folder = Path(source.origin).parent
        files = modules.data_files(folder)
        if not files:
            return source
        nbytes = sum(path.stat().st_size for path in files)
        if nbytes <= modules.MAX_DATA_BYTES:
            return replace(source, data=modules.packed_data(folder, files))
        if note is not None and source.name not in self._too_large:
            self._too_large.add(source.name)
            note(
                f"{source.name}: its data files ({nbytes / 1e6:,.1f} MB) "
                "are not sent to other machines; %sky_put copies them"
            )
        return source


def _earlier(source: ModuleSource) -> str:
    file = Path(source.origin).name
    return (
        f"{file} was edited after this notebook imported it: the ranks run the new "
        f"version, the notebook the old one: import importlib; importlib.reload({source.name})"
    )
