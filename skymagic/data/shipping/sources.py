"""The source of modules that a run needs: found, checked, and sent to the ranks that have not got it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skymagic.data.capture import modules, resources
from skymagic.data.capture.modules import ModuleSource
from skymagic.data.capture.staleness import Imported
from skymagic.data.shipping.bindings import Bindings
from skymagic.data.store.store import digest
from skymagic.errors import CaptureError

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
        self._bindings = bindings
        self._imported = Imported()
        self._too_large: set[str] = set()

    def find(
        self, names: Iterable[str], ranks: Sequence[int], *, dry_run: bool = False, note: Note | None = None
    ) -> dict[str, ModuleSource]:
        """The modules among these names, with what they import.

        Args:
            note: called with a sentence for each module that the notebook has in an earlier text, and for data that stays here.

        Raises:
            CaptureError: a file is not Python, and the notebook or a rank runs an earlier text of it, or the cell itself needs it.
        """
        wanted = sorted(names)
        if not wanted:
            self.required = frozenset()
            return {}
        found = modules.search(wanted, self.folder)
        self.required = found.required
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
        if self.remote and not resources.READERS.isdisjoint(found.imports.union(wanted)):
            return {name: self._with_data(source, note) for name, source in found.sources.items()}
        return found.sources

    def lacking(self, sources: Mapping[str, ModuleSource], ranks: Sequence[int]) -> list[dict[str, Any]]:
        """What a run's orders say of the modules that some rank has not got."""
        found = []
        for name, module in sources.items():
            plain = modules.as_plain(module)
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
        files = resources.data_files(folder)
        if not files:
            return source
        nbytes = resources.nbytes(files)
        if nbytes <= resources.MAX_BYTES:
            return replace(source, data=resources.packed(folder, files))
        if note is not None and source.name not in self._too_large:
            self._too_large.add(source.name)
            note(
                f"{source.name}: its data files ({nbytes / 1e6:,.1f} MB) do not travel to other machines; %sky_put takes them there"
            )
        return source


def _earlier(source: ModuleSource) -> str:
    file = Path(source.origin).name
    return (
        f"{file} was edited after this notebook imported it: the ranks run the new text, the notebook the old one "
        f"(importlib.reload({source.name}) or %autoreload)"
    )
