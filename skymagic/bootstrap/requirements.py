"""Requirements of a node's environment as one value, whose key names the environment.

Packages get the notebook's versions. `pinned` returns what is installed on a node: ``["torch",
"pandas>=2"]`` becomes ``["torch==2.13.0", "pandas>=2"]``. `preferred` returns constraints to go
with it, such as ``["filelock==3.20.0", "pandas==3.0.1", …]``. A resolver takes these versions
unless something else forbids them.

Neither has local version labels (``+cpu``, ``+cu126``), because each node decides which build fits,
see `builds`.
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
from skymagic.bootstrap.local_wheels import LocalWheel, NoWheel, local_wheel, origin
from skymagic.errors import RequestError
from skymagic.plan.distributions import canonical
from skymagic.plan.image import LATEST, Image, PipIndex, is_place, project
from skymagic.plugins._torch.plugin import DEFAULT_CUDA, WHEELS

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet


TORCH = ("torch", "torchvision", "torchaudio")
"""Projects that publish a build for each kind of GPU under one name and version."""


@dataclass(frozen=True)
class Requirements:
    """An image translated for a node.

    Attributes:
        python: the minor version, such as ``"3.11"``, or the absolute path of an interpreter on the
            node that is used as it is.
        minor: the minor version in either case.
        packages: requirements. Those that name a file of the notebook's machine are in `files`
            instead.
        preferences: pins that apply if `packages` allow them.
        indexes: URLs of package indexes besides the node's own; they may contain passwords.
        scoped: indexes for certain packages only, as (URL, those of `packages` that come from
            there).
        requested: names of the requested projects; not compared.
        backend: PyTorch's build for hosts with GPUs, such as ``"cu124"``; "" for the one that fits
            the host's driver.
        files: wheels and source archives to upload, as (path here, sha256 of the content).
        own: wheels of the notebook's own distributions. The environment's key contains their
            origins but not their content: when a source changes, only its wheel is reinstalled.
        commands: shell commands that run once packages are installed.
        code: digest of skymagic's own code.
        hidden: values that no message may show; not compared.
        any_build: whether a host without GPUs may get PyTorch for CUDA, because the user has agreed
            to all questions; not compared.
        folder: absolute folder on the node; None for the node's ``$SKYMAGIC_HOME``, or else
            ``$HOME/.skymagic``.
        base: image of a container whose packages the environment builds on (`bootstrap.layers`); ""
            for an environment of its own.
    """

    python: str
    minor: str
    packages: tuple[str, ...] = ()
    preferences: tuple[str, ...] = ()
    indexes: tuple[str, ...] = field(default=(), repr=False)
    scoped: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), repr=False)
    backend: str = ""
    files: tuple[tuple[str, str], ...] = ()
    own: tuple[LocalWheel, ...] = ()
    commands: tuple[str, ...] = field(default=(), repr=False)
    code: str = ""
    folder: str | None = None
    base: str = ""
    requested: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    hidden: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    any_build: bool = field(default=False, compare=False)

    @property
    def prepared(self) -> bool:
        """Whether the node's own environment is used, so that none is created."""
        return self.python.startswith("/")

    @property
    def every_index(self) -> tuple[str, ...]:
        """URLs of all named indexes, including those for certain packages only."""
        return (*self.indexes, *(url for url, _ in self.scoped))

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the notebook's own distributions by name."""
        return {own_wheel.name: own_wheel.digest for own_wheel in self.own}

    @property
    def uploads(self) -> tuple[str, ...]:
        """Paths on this machine of all files that are uploaded and installed."""
        return (*(path for path, _ in self.files), *(own_wheel.path for own_wheel in self.own))

    @property
    def pins(self) -> dict[str, str]:
        """Pins of the packages that a new environment gets from indexes.

        Maps a name to ``name==version``, or to the name alone if the version is not known yet.
        """
        pins = {name: name for text in self.packages if (name := project(text))}
        for text in (*self.preferences, *self.packages):
            stated, _, version = text.partition("==")
            if re.fullmatch(r"[\w.!]+", version) and (name := project(stated)):
                pins[name] = f"{name}=={version}"
        own_projects = {own_wheel.name for own_wheel in self.own}
        return {name: pin for name, pin in pins.items() if name not in own_projects}

    @property
    def torch(self) -> tuple[str, ...]:
        """The projects of a new environment that have a build for each kind of GPU.

        Empty if no environment is created.
        """
        own = not (self.prepared or self.base)
        names = set() if not own else set(map(project, (*self.packages, *self.preferences)))
        return tuple(name for name in TORCH if name in names)

    @property
    def key(self) -> str:
        """Name of the environment. skymagic's own code is not part of it and does not count."""
        digests = [digest for _, digest in self.files]
        parts = [
            "uv",  # environments of earlier versions may have no uv
            self.python,
            self.packages,
            self.preferences,
            self.indexes,
            self.backend,
            digests,
            self.commands,
            *self.scoped,
            *((own_wheel.name, own_wheel.source) for own_wheel in self.own),
            *([self.base] if self.base else ()),
        ]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return f"{digest[:16]}-py{self.minor}"


# -- versions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InstalledDistribution:
    """A distribution as installed in an environment.

    Attributes:
        name: project name.
        version: version with its local label, such as ``"2.13.0+cpu"``.
        requires: requirements as written in its metadata.
        own: whether it was installed from a folder, a repository or a file of this machine, so that
            an index need not have this version.
    """

    name: str
    version: str
    requires: tuple[str, ...] = ()
    own: bool = False

    @property
    def public(self) -> str:
        """The version without its local label, which is the same for all builds."""
        return self.version.partition("+")[0]


Lookup = Callable[[str], "InstalledDistribution | None"]
"""Function that looks up a project, in any spelling of its name, in an environment."""


def notebook(name: str) -> InstalledDistribution | None:
    """Look up a distribution in the notebook's interpreter."""
    try:
        distribution = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError):
        return None
    # An interrupted pip leaves half an installation behind.
    if not distribution.version:
        return None
    source = origin(distribution)
    # A node needs its own build of PyTorch's packages, even if the notebook's came from a local
    # file.
    own = source is not None and not (source.archive and canonical(distribution.name) in TORCH)
    return InstalledDistribution(
        distribution.name, distribution.version, tuple(distribution.requires or ()), own
    )


def pinned(requirements: Iterable[str], lookup: Lookup = notebook) -> tuple[str, ...]:
    """Pin requirements without a version to the notebook's version, if it has one.

    All other requirements stay unchanged.

    Args:
        requirements: requirements as pip accepts them, including extras, markers, URLs and paths.
        lookup: finds what the notebook has.
    """
    return tuple(_pinned(text, lookup) for text in requirements)


def _pinned(text: str, lookup: Lookup) -> str:
    requirement = _requirement(text)
    if requirement is None or requirement.specifier:
        return text
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    installed = lookup(canonicalize_name(requirement.name))
    if installed is None or installed.own:
        return text
    requirement.specifier = SpecifierSet(f"=={installed.public}")
    return str(requirement)


def preferred(requirements: Iterable[str], lookup: Lookup = notebook) -> tuple[str, ...]:
    """Return sorted pins of `requirements` and all their dependencies at the notebook's versions.

    The pins apply unless a requirement forbids them. Distributions requested at their `LATEST` or
    in another version are left out, as are missing ones and the notebook's own.
    """
    waiting = list(filter(None, map(_requirement, requirements)))
    specifiers = {
        canonical(requirement.name): requirement.specifier
        for requirement in waiting
        if requirement.specifier
    }
    pins = {
        name: f"{name}=={installed.public}"
        for name, installed in _with_dependencies(waiting, lookup)
        if not installed.own and _allowed(installed, specifiers.get(name))
    }
    return tuple(pins[name] for name in sorted(pins))


def own_names(requirements: Iterable[str], lookup: Lookup = notebook) -> tuple[str, ...]:
    """Return the names of the notebook's own distributions that `requirements` lead to.

    The names are canonical and sorted. A distribution requested at its `LATEST`, or in another
    version than the notebook's, comes from an index and is left out.
    """
    waiting = list(filter(None, map(_requirement, requirements)))
    specifiers = {
        canonical(requirement.name): requirement.specifier
        for requirement in waiting
        if requirement.specifier
    }
    names = {
        name
        for name, installed in _with_dependencies(waiting, lookup)
        if installed.own and _allowed(installed, specifiers.get(name))
    }
    return tuple(sorted(names - {"skymagic"}))


def _with_dependencies(
    waiting: list[Requirement], lookup: Lookup
) -> Iterator[tuple[str, InstalledDistribution]]:
    """Yield installed distributions that requirements lead to, directly or as dependencies.

    They come with their canonical names. What the notebook lacks is left out.
    """
    visited: set[tuple[str, frozenset[str]]] = set()
    waiting = list(waiting)
    while waiting:
        requirement = waiting.pop()
        name, extras = canonical(requirement.name), frozenset(requirement.extras)
        installed = None if (name, extras) in visited else lookup(name)
        visited.add((name, extras))
        if installed is None:
            continue
        yield name, installed
        needed = filter(None, map(_requirement, installed.requires))
        waiting += [dependency for dependency in needed if _applies(dependency, extras)]


def _allowed(installed: InstalledDistribution, specifiers: SpecifierSet | None) -> bool:
    return specifiers is None or (
        str(specifiers) != LATEST and specifiers.contains(installed.public, prereleases=True)
    )


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    """Return True if a distribution requested with `extras` needs this requirement.

    Markers are evaluated for a machine like the notebook's.
    """
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _requirement(text: str) -> Requirement | None:
    """Parse a requirement by name.

    Returns:
        None for a URL, a path, or text in a distribution's metadata that is not a valid
            requirement.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    if is_place(text):
        return None
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        return None
    return None if requirement.url else requirement


# -- from an image ---------------------------------------------------------------------------------


RANK_DEPENDENCIES = {
    "ipykernel": ">=6.17.1",
    "ipython": ">=7.34",
    "cloudpickle": ">=3.1",
    "xxhash": ">=3",
    "packaging": ">=23.2",
}
"""skymagic's dependencies that ranks need.

A new environment gets the notebook's own versions, because notebook and ranks talk to each other.
An interpreter that is used unchanged may have any version in these bounds.
"""

TORCH_BUILD = re.compile(re.escape(WHEELS) + r"(cpu|xpu|cu\d+|rocm[\d.]+)/?")
"""Matches the URLs of PyTorch's own indexes, one per kind of build.

Each node decides which of them fits.
"""


def requirements_of(
    image: Image,
    commands: Sequence[str] = (),
    hidden: Collection[str] = (),
    say: Callable[[str], None] = lambda message: None,
    base: str = "",
) -> Requirements:
    """Translate `image` into the requirements of a node of this notebook.

    Distributions that the notebook has from a folder or a repository are built as wheels.

    Args:
        image: the image.
        commands: shell commands of the plugins, which run once in a new environment.
        hidden: values that no message may show.
        say: called with a message for each wheel that is built.
        base: see `Requirements`.

    Raises:
        RequestError: the image cannot work on any node. Lists all package files that do not exist
            here, and all of the notebook's own distributions that cannot be made into wheels.
    """
    notebook_minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = image.python or notebook_minor
    prepared = python.startswith("/")
    minor = notebook_minor if prepared else ".".join(python.split(".")[:2])
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
    own_wheels = () if prepared else tuple(_own(packages, mistakes, say))
    if mistakes:
        raise RequestError(mistakes)
    requested = {project(text) for text in packages}
    if prepared or base:
        # an image keeps the versions that it has, if ranks can run with them
        own = [f"{name}{bounds}" for name, bounds in RANK_DEPENDENCIES.items()]
    else:
        own = [name for name in RANK_DEPENDENCIES if name not in requested]
    packages = [*own, *packages]
    pinned_packages = tuple(packages) if prepared or base else pinned(packages)
    return Requirements(
        python=python if prepared else minor,
        minor=minor,
        packages=pinned_packages,
        preferences=() if prepared else preferred(packages),
        indexes=tuple(
            index
            for index in image.pip_indexes
            if isinstance(index, str) and not TORCH_BUILD.fullmatch(index)
        ),
        backend=_backend(index for index in image.pip_indexes if isinstance(index, str)),
        scoped=tuple(_packages_by_index(image.pip_indexes, pinned_packages)),
        files=tuple(files),
        own=own_wheels,
        commands=tuple(commands),
        code=wheel.running_wheel()[0],
        folder=image.env.get("SKYMAGIC_HOME"),
        base=base,
        requested=frozenset(filter(None, requested)),
        hidden=frozenset(hidden),
    )


def _own(
    packages: Iterable[str], mistakes: list[str], say: Callable[[str], None]
) -> Iterator[LocalWheel]:
    """Yield wheels of the notebook's own distributions that `packages` need.

    Failed builds are appended to `mistakes`.
    """
    for name in own_names(packages):
        try:
            yield local_wheel(name, say)
        except NoWheel as problem:
            mistakes.append(str(problem))


def _packages_by_index(
    indexes: Iterable[str | PipIndex], packages: Sequence[str]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each index that is for certain packages, with the packages that come from there."""
    for index in indexes:
        served = () if isinstance(index, str) else tuple(filter(index.must_provide, packages))
        if served:
            yield str(index), served


def _backend(indexes: Iterable[str]) -> str:
    """Return the PyTorch build that an image names through one of PyTorch's indexes.

    Returns:
        The build, or "" if there is only the default that the torch plugin names.
    """
    named = [match[1] for match in map(TORCH_BUILD.fullmatch, indexes) if match]
    return next((build for build in named if build not in ("cpu", DEFAULT_CUDA)), "")
