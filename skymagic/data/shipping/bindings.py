"""The manifest of a run, and what each rank's names are bound to, as far as the notebook knows.

The rule of state: a rank keeps its own binding of a name until the notebook assigns that name or changes its value. The user's own
modules follow another: their source travels to the ranks that have not got it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from skymagic.data.capture import modules
from skymagic.data.capture.loaded import ImportedTexts
from skymagic.data.capture.modules import ModuleSource
from skymagic.data.capture.names import CellNames
from skymagic.data.shipping.links import SentValue
from skymagic.data.store.store import digest
from skymagic.errors import CaptureError

_NEVER = object()


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
    """All that the cell needs, of a dry run; else what travels."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Name → fingerprint of the notebook's value, for every name that the cell loads."""
    stored: dict[str, str] = field(default_factory=dict)
    """The same for other names that the cell may bind; those that only the ranks know of are added when the first reports them."""
    names: CellNames = field(default_factory=CellNames)
    unbound: frozenset[str] = frozenset()
    """Names that the ranks let go of: here they mean Python's own again."""
    sent: Sequence[tuple[Sequence[int], Mapping[str, SentValue]]] = ()
    """Ranks, and how values are sent to them."""


class NameReaders(NamedTuple):
    """What the functions and classes of some ranks read."""

    names: Mapping[str, frozenset[str]]
    """Function or class → the global names that it reads."""
    first: Mapping[str, str]
    """Global name → the first function or class that reads it, in the order of their names."""


NOBODY = NameReaders({}, {})


@dataclass
class _RankBindings:
    """The bindings of one rank."""

    fingerprints: dict[str, str] = field(default_factory=dict)
    """Name → fingerprint that the notebook's value had when the rank's binding was made."""
    rebound: set[str] = field(default_factory=set)
    """Names that a cell has bound on the rank since they were shipped."""
    sources: dict[str, str] = field(default_factory=dict)
    """Local modules and cells that it has, with their hashes."""
    environ: dict[str, str | None] = field(default_factory=dict)
    """Variables of the environment that it has from the notebook."""
    reads: str = ""
    """The digest of what its functions read."""


class Bindings:
    """Bindings and sources by rank."""

    def __init__(self) -> None:
        self._ranks: defaultdict[int, _RankBindings] = defaultdict(_RankBindings)
        self.replaced: set[int] = set()  # ranks that were started again
        self._lost: dict[
            int, frozenset[str]
        ] = {}  # what cells had bound on ranks that are forgotten
        self._reads: dict[str, Mapping[str, Sequence[str]]] = {}
        """By digest: function or class → the global names that it reads."""
        self._readers: tuple[frozenset[str], NameReaders] = frozenset(), NOBODY
        """The readers of these digests, as they were asked for last."""

    def bound(
        self,
        manifest: Manifest,
        rank: int,
        rebound: Mapping[str, str | None],
        deleted: Iterable[str],
    ) -> None:
        """A rank has bound a manifest's names and run its cell.

        Args:
            rebound: names that the cell has bound there → fingerprint of the notebook's value, None where it has none.
            deleted: names that the rank had before the cell, and has no more.
        """
        state = self._ranks[rank]
        for bundle in manifest.orders.get("bundles", ()):
            if bundle["ranks"] is None or rank in bundle["ranks"]:
                state.rebound.difference_update(bundle["names"])
        self._drop(state, manifest.unbound)  # before the cell, which may have bound them itself
        state.fingerprints.update(manifest.fingerprints)
        state.fingerprints.update(
            {name: value for name, value in rebound.items() if value is not None}
        )
        state.rebound.update(rebound)
        self._drop(state, deleted)
        state.sources.update(
            {each["name"]: each["hash"] for each in manifest.orders.get("modules", ())}
        )
        state.sources.update(dict.fromkeys(manifest.orders.get("sources", ()), ""))
        state.environ.update(manifest.orders.get("environ", {}))

    def _drop(self, state: _RankBindings, names: Iterable[str]) -> None:
        for name in names:
            state.fingerprints.pop(name, None)
            state.rebound.discard(name)

    def set_fingerprints(self, rank: int, fingerprints: Mapping[str, str]) -> None:
        """A rank keeps its own bindings as long as the notebook's values have these fingerprints."""
        self._ranks[rank].fingerprints.update(fingerprints)

    def sent_environ(self, ranks: Iterable[int]) -> frozenset[str]:
        """Return the environment variables that some of these ranks have from the notebook."""
        return frozenset().union(*(self._ranks[rank].environ for rank in ranks))

    def lacking_environ(
        self, changed: Mapping[str, str | None], ranks: Iterable[int]
    ) -> dict[str, str | None]:
        """Variables of the notebook's environment that some of these ranks have not got."""
        held = [self._ranks[rank].environ for rank in ranks]
        return {
            name: value
            for name, value in changed.items()
            if any(each.get(name, _NEVER) != value for each in held)
        }

    def set_reads(self, rank: int, digest: str, names: Mapping[str, Sequence[str]] | None) -> None:
        """What a rank's functions and classes read; None where the digest is known."""
        if names is not None:
            self._reads[digest] = names
            self._readers = frozenset(), NOBODY
        self._ranks[rank].reads = digest
        used = {
            state.reads for state in list(self._ranks.values())
        }  # others may ask for a rank meanwhile
        self._reads = {each: names for each, names in self._reads.items() if each in used}

    def known_reads(self) -> list[str]:
        """Digests of which ranks need not say what they stand for."""
        return sorted(self._reads)

    def readers(self, ranks: Iterable[int]) -> NameReaders:
        """Functions and classes on these ranks, and what they read."""
        digests = frozenset(self._ranks[rank].reads for rank in ranks) & self._reads.keys()
        if digests != self._readers[0]:
            found: dict[str, set[str]] = {}
            for digest in digests:
                for function, names in self._reads.get(digest, {}).items():
                    found.setdefault(function, set()).update(names)
            first = {
                name: function
                for function in sorted(found, reverse=True)
                for name in found[function]
            }
            self._readers = (
                digests,
                NameReaders({each: frozenset(names) for each, names in found.items()}, first),
            )
        return self._readers[1]

    def forget(self, ranks: Iterable[int]) -> None:
        """Forget what these ranks held."""
        for rank in ranks:
            state = self._ranks.pop(rank, None)
            if state is not None and state.rebound:
                self._lost[rank] = frozenset(state.rebound)
            self.replaced.add(rank)

    def cloned(self, names: Iterable[str], source: int, ranks: Iterable[int]) -> None:
        """Note that these ranks have got a rank's own values of these names: what holds of them there holds of them here."""
        names, origin = set(names), self._ranks[source]
        for rank in ranks:
            state = self._ranks[rank]
            state.fingerprints = {
                name: each for name, each in state.fingerprints.items() if name not in names
            }
            state.fingerprints |= {
                name: each for name, each in origin.fingerprints.items() if name in names
            }
            state.rebound |= names

    def names(self, rank: int) -> frozenset[str]:
        """Names that the rank has, as far as is known."""
        state = self._ranks[rank]
        return frozenset(state.fingerprints) | state.rebound

    def known(self) -> list[int]:
        """The ranks of which something is known."""
        return sorted(self._ranks)

    def fingerprints(self, rank: int) -> Mapping[str, str]:
        """Fingerprints by name."""
        return self._ranks[rank].fingerprints

    def has_rebound(self, rank: int, name: str) -> bool:
        """Whether a cell has bound the name since it was shipped."""
        return name in self._ranks[rank].rebound

    def bound_by_cells(self, rank: int) -> frozenset[str]:
        """Names that cells have bound on the rank; of a rank that is forgotten, those that it had."""
        state = self._ranks.get(rank)
        names = frozenset(state.rebound) if state is not None else frozenset()
        return names or self._lost.get(rank, frozenset())

    def has_source(self, source: str, ranks: Sequence[int]) -> bool:
        """Whether one of the ranks has got a module or cell of this name, whatever its content."""
        return any(source in self._ranks[rank].sources for rank in ranks)

    def ranks_without_source(self, source: str, hash: str, ranks: Sequence[int]) -> list[int]:
        """The ranks that have not got a module or cell with this content."""
        return [rank for rank in ranks if self._ranks[rank].sources.get(source) != hash]

    def ranks_without_value(
        self, fingerprints: Mapping[str, str | None], ranks: Sequence[int], fresh: Container[str]
    ) -> dict[str, list[int]]:
        """For each name, the ranks that have not got the value with this fingerprint.

        Args:
            fingerprints: None where the value was never seen before.
            fresh: names that all ranks get anyhow.
        """
        lacking = {
            name: [*ranks] if wanted is None or name in fresh else []
            for name, wanted in fingerprints.items()
        }
        for rank in ranks:
            held = self.fingerprints(rank)
            if [*map(held.get, fingerprints)] == [*fingerprints.values()]:
                continue  # which is so nearly always, and seen at once
            for name, wanted in fingerprints.items():
                if held.get(name) != wanted and wanted is not None and name not in fresh:
                    lacking[name].append(rank)
        return lacking


# -- the source of modules -------------------------------------------------------------------------


Note = Callable[[str], None]


class Sources:
    """The user's own modules, as the ranks of one pool get them.

    Args:
        folder: the notebook's folder.
        bindings: what the ranks have got.
        remote: whether ranks are on other machines, where the modules' folders are not.
    """

    def __init__(self, folder: str, bindings: Bindings, *, remote: bool) -> None:
        self.folder = folder
        self.remote = remote
        self.required: frozenset[str] = frozenset()
        """Dotted names without which the modules that were found last cannot be imported."""
        self.imported: frozenset[str] = frozenset()
        """Dotted names that the modules that were found last may import."""
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
        """The modules among these names, with what they import.

        Args:
            note: called with a sentence for each module that the notebook has in an earlier text, and for data that stays here.

        Raises:
            CaptureError: a file is not Python, and the notebook or a rank runs an earlier text of it, or the cell itself needs it.
        """
        wanted = sorted(names)
        if not wanted:
            self.required = self.imported = frozenset()
            return {}
        found = modules.search(wanted, self.folder)
        self.required, self.imported = found.required, found.imports
        problems = [
            problem
            for name, problem in found.problems.items()
            # what else imports a file that is not Python does so under a condition, or fails by itself
            if name in wanted or name in sys.modules or self._bindings.has_source(name, ranks)
        ]
        if problems:
            listed = "\n".join(f"  {problem}" for problem in sorted(problems))
            count = "1 module is" if len(problems) == 1 else f"{len(problems)} modules are"
            raise CaptureError(f"{count} not valid Python; nothing was run:\n{listed}")
        if note is not None and not dry_run:
            for stale in self._imported.stale(found.sources.values()):
                note(_earlier(stale))
        if self.remote and not modules.DATA_READERS.isdisjoint(found.imports.union(wanted)):
            return {name: self._with_data(source, note) for name, source in found.sources.items()}
        return found.sources

    def lacking(
        self, sources: Mapping[str, ModuleSource], ranks: Sequence[int]
    ) -> list[dict[str, Any]]:
        """What a run's orders say of the modules that some rank has not got."""
        found = []
        for name, module in sources.items():
            plain = asdict(module)
            if module.data:
                plain["hash"] += digest([module.data.encode()])
            need = self._bindings.ranks_without_source(name, plain["hash"], ranks)
            if need:
                found.append({**plain, "ranks": None if len(need) == len(ranks) else need})
        return found

    def _with_data(self, source: ModuleSource, note: Note | None) -> ModuleSource:
        """A package with its data files, unless they are too large."""
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
                f"{source.name}: its data files ({nbytes / 1e6:,.1f} MB) are not sent to other machines; %sky_put copies them"
            )
        return source


def _earlier(source: ModuleSource) -> str:
    file = Path(source.origin).name
    return (
        f"{file} was edited after this notebook imported it: the ranks run the new text, the notebook the old one "
        f"(importlib.reload({source.name}) or %autoreload)"
    )
