"""Versions that a node's environment gets: the notebook's, as pins of what is asked for and preferences for what that needs.

`pinned` is what installs on a node: ``["torch", "pandas>=2"]`` becomes ``["torch==2.13.0", "pandas>=2"]``. `preferred` goes
beside it: ``["filelock==3.20.0", "pandas==3.0.1", …]``, the versions that a resolver takes where nothing else forbids them.
Neither holds a local version label (``+cpu``, ``+cu126``): which build fits is the node's matter, see `builds`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from skymagic.bootstrap.origins import origin
from skymagic.bootstrap.requirements import TORCH
from skymagic.plan.distributions import canonical
from skymagic.plan.image import LATEST, is_place

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Distribution:
    """A distribution as an environment has it installed.

    Attributes:
        version: with its local label, as ``"2.13.0+cpu"``.
        requires: its requirements, as its metadata writes them.
        own: whether it came from a folder, a repository or a file of this machine: no index need have this version.
    """

    name: str
    version: str
    requires: tuple[str, ...] = ()
    own: bool = False

    @property
    def public(self) -> str:
        """The version without its local label: the same for all builds."""
        return self.version.partition("+")[0]


Lookup = Callable[[str], "Distribution | None"]
"""What an environment has under a project's name, in any spelling."""


def notebook(name: str) -> Distribution | None:
    """What the notebook's interpreter has under this name."""
    try:
        found = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None
    if not found.version:  # half of an installation, as an interrupted pip leaves it
        return None
    place = origin(found)
    # of these a node needs the build that fits it, whatever file the notebook's came from
    own = place is not None and not (place.archive and canonical(found.name) in TORCH)
    return Distribution(found.name, found.version, tuple(found.requires or ()), own)


def pinned(requirements: Iterable[str], lookup: Lookup = notebook) -> tuple[str, ...]:
    """Requirements for a node: names without a version get the notebook's, where it has one; all else is as it was.

    Args:
        requirements: as pip takes them; extras and markers stay, URLs and paths too.
        lookup: what the notebook has.
    """
    return tuple(_pinned(text, lookup) for text in requirements)


def _pinned(text: str, lookup: Lookup) -> str:
    requirement = _requirement(text)
    if requirement is None or requirement.specifier:
        return text
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    here = lookup(canonicalize_name(requirement.name))
    if here is None or here.own:
        return text
    requirement.specifier = SpecifierSet(f"=={here.public}")
    return str(requirement)


def preferred(requirements: Iterable[str], lookup: Lookup = notebook) -> tuple[str, ...]:
    """Pins of all that `requirements` come to in the notebook, sorted: they hold where no requirement forbids them.

    Left out is what is asked for at its `LATEST` or in other versions, and what the notebook lacks or has of its own.
    """
    waiting = list(filter(None, map(_requirement, requirements)))
    asked = {canonical(each.name): each.specifier for each in waiting if each.specifier}
    pins = {
        name: f"{name}=={here.public}"
        for name, here in _needed(waiting, lookup)
        if not here.own and _allowed(here, asked.get(name))
    }
    return tuple(pins[name] for name in sorted(pins))


def own(requirements: Iterable[str], lookup: Lookup = notebook) -> tuple[str, ...]:
    """Canonical names of the notebook's own distributions among all that `requirements` come to, sorted.

    What is asked for in another version than the notebook's, or at its `LATEST`, is an index's.
    """
    waiting = list(filter(None, map(_requirement, requirements)))
    asked = {canonical(each.name): each.specifier for each in waiting if each.specifier}
    names = {name for name, here in _needed(waiting, lookup) if here.own and _allowed(here, asked.get(name))}
    return tuple(sorted(names - {"skymagic"}))


def _needed(waiting: list[Requirement], lookup: Lookup) -> Iterator[tuple[str, Distribution]]:
    """What requirements come to in the notebook, by canonical name; what it lacks is left out."""
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(waiting)
    while waiting:
        requirement = waiting.pop()
        name, extras = canonical(requirement.name), frozenset(requirement.extras)
        here = None if (name, extras) in seen else lookup(name)
        seen.add((name, extras))
        if here is None:
            continue
        yield name, here
        needed = filter(None, map(_requirement, here.requires))
        waiting += [each for each in needed if _applies(each, extras)]


def _allowed(here: Distribution, asked: SpecifierSet | None) -> bool:
    return asked is None or (str(asked) != LATEST and asked.contains(here.public, prereleases=True))


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Whether a distribution that is asked for with `extras` needs this, on a machine like the notebook's."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _requirement(text: str) -> Requirement | None:
    """A requirement by name; None for a URL, a path, and what a distribution's metadata has and nobody can read."""
    from packaging.requirements import InvalidRequirement, Requirement

    if is_place(text):
        return None
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    return None if requirement.url else requirement
