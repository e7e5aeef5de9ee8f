"""What a node must have, as one value by which its environment is named; and the versions that it gets: the notebook's.

`pinned` is what installs on a node: ``["torch", "pandas>=2"]`` becomes ``["torch==2.13.0", "pandas>=2"]``. `preferred` goes
beside it: ``["filelock==3.20.0", "pandas==3.0.1", …]``, the versions that a resolver takes where nothing else forbids them.
Neither holds a local version label (``+cpu``, ``+cu126``): which build fits is the node's matter, see `builds`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import file_digest
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from skymagic.bootstrap import wheel
from skymagic.bootstrap.own import NoWheel, OwnWheel, origin, own_wheel
from skymagic.errors import RequestError
from skymagic.plan.distributions import canonical
from skymagic.plan.image import LATEST, Image, PipIndex, is_place, project
from skymagic.plugins._torch.plugin import DEFAULT_CUDA, WHEELS

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet


TORCH = ("torch", "torchvision", "torchaudio")
"""Projects that have a build for each kind of GPU under one name and version."""


@dataclass(frozen=True)
class Requirements:
    """An image in a node's terms.

    Attributes:
        python: the minor version, as ``"3.11"``, or the absolute path of an interpreter on the node that is used as
            it is. minor: the minor version in either case.
        packages: requirements; those that name a file of the notebook's machine are in `files` instead.
        preferences: pins that hold where `packages` allow them.
        indexes: URLs of package indexes beside the node's own; they may hold passwords.
        scoped: indexes for certain packages alone, as (URL, those of `packages` that come from there).
        asked: names of the projects that somebody asked for; not part of what is required.
        backend: PyTorch's build for hosts with GPUs, as ``"cu124"``; "" for what fits the host's driver.
        files: wheels and source archives to upload, as (path here, sha256 of the content).
        own: wheels of the notebook's own distributions; an environment is named by what they are, and not by their content:
            when a source changes its wheel is installed anew, and nothing else.
        commands: shell commands that run once packages are there.
        code: digest of skymagic's own code.
        hidden: values that no message shows; not part of what is required.
        folder: where on the node, absolute; None for ``$SKYMAGIC_HOME`` as it is there, else ``$HOME/.skymagic``.
    """

    python: str
    minor: str
    packages: tuple[str, ...] = ()
    preferences: tuple[str, ...] = ()
    indexes: tuple[str, ...] = field(default=(), repr=False)
    scoped: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), repr=False)
    backend: str = ""
    files: tuple[tuple[str, str], ...] = ()
    own: tuple[OwnWheel, ...] = ()
    commands: tuple[str, ...] = field(default=(), repr=False)
    code: str = ""
    folder: str | None = None
    asked: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    hidden: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    @property
    def prepared(self) -> bool:
        """Whether the node's own environment is used and none is made."""
        return self.python.startswith("/")

    @property
    def every_index(self) -> tuple[str, ...]:
        """URLs of all indexes that are named, those for certain packages too."""
        return (*self.indexes, *(url for url, _ in self.scoped))

    @property
    def digests(self) -> dict[str, str]:
        """Name → digest of the notebook's own distributions."""
        return {each.name: each.digest for each in self.own}

    @property
    def uploads(self) -> tuple[str, ...]:
        """Paths here of all that is uploaded to be installed."""
        return (*(path for path, _ in self.files), *(each.path for each in self.own))

    @property
    def pins(self) -> dict[str, str]:
        """``name==version`` by name, or the name alone, of what a new environment will get from indexes as far as that is known here."""
        pins = {name: name for text in self.packages if (name := project(text))}
        for text in (*self.preferences, *self.packages):
            stated, _, version = text.partition("==")
            if re.fullmatch(r"[\w.!]+", version) and (name := project(stated)):
                pins[name] = f"{name}=={version}"
        mine = {each.name for each in self.own}
        return {name: pin for name, pin in pins.items() if name not in mine}

    @property
    def torch(self) -> tuple[str, ...]:
        """The projects among what a new environment gets that have a build for each kind of GPU; none where none is made."""
        names = set() if self.prepared else set(map(project, (*self.packages, *self.preferences)))
        return tuple(name for name in TORCH if name in names)

    @property
    def key(self) -> str:
        """Names the environment; skymagic's own code is not in it and does not count."""
        digests = [digest for _, digest in self.files]
        parts = [
            self.python,
            self.packages,
            self.preferences,
            self.indexes,
            self.backend,
            digests,
            self.commands,
            *self.scoped,
            *((each.name, each.source) for each in self.own),
        ]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return f"{digest[:16]}-py{self.minor}"


# -- versions -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InstalledDistribution:
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


Lookup = Callable[[str], "InstalledDistribution | None"]
"""What an environment has under a project's name, in any spelling."""


def notebook(name: str) -> InstalledDistribution | None:
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
    return InstalledDistribution(found.name, found.version, tuple(found.requires or ()), own)


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


def own_names(requirements: Iterable[str], lookup: Lookup = notebook) -> tuple[str, ...]:
    """Canonical names of the notebook's own distributions among all that `requirements` come to, sorted.

    What is asked for in another version than the notebook's, or at its `LATEST`, is an index's.
    """
    waiting = list(filter(None, map(_requirement, requirements)))
    asked = {canonical(each.name): each.specifier for each in waiting if each.specifier}
    names = {
        name
        for name, here in _needed(waiting, lookup)
        if here.own and _allowed(here, asked.get(name))
    }
    return tuple(sorted(names - {"skymagic"}))


def _needed(
    waiting: list[Requirement], lookup: Lookup
) -> Iterator[tuple[str, InstalledDistribution]]:
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


def _allowed(here: InstalledDistribution, asked: SpecifierSet | None) -> bool:
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


# -- from an image -------------------------------------------------------------------------------------------------------


RANK_DEPENDENCIES = {
    "ipyparallel": ">=9,<10",
    "ipykernel": ">=6.29",
    "ipython": ">=8.18",
    "cloudpickle": ">=3.1",
    "xxhash": ">=3",
    "packaging": ">=23.2",
}
"""What ranks need of skymagic's dependencies. A new environment gets the notebook's own versions, for they talk to each
other; an interpreter that is used as it is may have any of these."""

TORCH_BUILD = re.compile(re.escape(WHEELS) + r"(cpu|xpu|cu\d+|rocm[\d.]+)/?")
"""PyTorch's own indexes, each of one build: which of them fits is the node's matter."""


def requirements_of(
    image: Image,
    commands: Sequence[str] = (),
    hidden: Collection[str] = (),
    say: Callable[[str], None] = lambda words: None,
) -> Requirements:
    """What `image` means for a node of this notebook; what the notebook has from a folder or a repository is made a wheel.

    Args:
        commands: shell commands of the plugins, run once in a new environment.
        hidden: values that no message may show.
        say: told of each wheel that is built.

    Raises:
        RequestError: the image cannot be, wherever: files among the packages that are not here, and distributions of the
            notebook's own of which no wheel can be made, all at once.
    """
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = image.python or here
    prepared = python.startswith("/")
    minor = here if prepared else ".".join(python.split(".")[:2])
    mistakes: list[str] = []
    packages: list[str] = []
    files: list[tuple[str, str]] = []
    for text in image.pip:
        if not is_place(text) or "://" in text:
            packages.append(text)
            continue
        path = Path(text).expanduser()
        if path.is_file():
            with path.open("rb") as file:
                files.append((str(path.resolve()), file_digest(file, "sha256").hexdigest()))
        else:
            kind = (
                "is a folder: build a wheel of it, and name that"
                if path.is_dir()
                else "is not a file here"
            )
            mistakes.append(f"pip: {text} {kind}")
    mine = () if prepared else tuple(_own(packages, mistakes, say))
    if mistakes:
        raise RequestError(mistakes)
    given = {project(text) for text in packages}
    if prepared:
        own = [f"{name}{bounds}" for name, bounds in RANK_DEPENDENCIES.items()]
    else:
        own = [name for name in RANK_DEPENDENCIES if name not in given]
    packages = [*own, *packages]
    wanted = tuple(packages) if prepared else pinned(packages)
    return Requirements(
        python=python if prepared else minor,
        minor=minor,
        packages=wanted,
        preferences=() if prepared else preferred(packages),
        indexes=tuple(
            each
            for each in image.pip_indexes
            if isinstance(each, str) and not TORCH_BUILD.fullmatch(each)
        ),
        backend=_backend(each for each in image.pip_indexes if isinstance(each, str)),
        scoped=tuple(_scoped(image.pip_indexes, wanted)),
        files=tuple(files),
        own=mine,
        commands=tuple(commands),
        code=wheel.running()[0],
        folder=image.env.get("SKYMAGIC_HOME"),
        asked=frozenset(filter(None, given)),
        hidden=frozenset(hidden),
    )


def _own(
    packages: Iterable[str], mistakes: list[str], say: Callable[[str], None]
) -> Iterator[OwnWheel]:
    """Wheels of the notebook's own distributions that `packages` come to; of what cannot be built `mistakes` hear."""
    for name in own_names(packages):
        try:
            yield own_wheel(name, say)
        except NoWheel as problem:
            mistakes.append(str(problem))


def _scoped(
    indexes: Iterable[str | PipIndex], packages: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(URL, what comes from there) of each index that is for certain packages."""
    for index in indexes:
        served = () if isinstance(index, str) else tuple(filter(index.serves, packages))
        if served:
            yield str(index), served


def _backend(indexes: Iterable[str]) -> str:
    """PyTorch's build that an image names by one of PyTorch's indexes; "" for what its plugin names where nobody has chosen."""
    named = [found[1] for found in map(TORCH_BUILD.fullmatch, indexes) if found]
    return next((each for each in named if each not in ("cpu", DEFAULT_CUDA)), "")
