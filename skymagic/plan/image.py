"""Packages, environment and files that ranks need besides the notebook.

Pure values that can be merged; conflicts are reported as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from skymagic.errors import RequestError
from skymagic.plan.masking import MASK, masked
from skymagic.plan.suggest import suggesting

if TYPE_CHECKING:
    from packaging.requirements import Requirement

LATEST = ">=0"
"""Constraint that every release satisfies.

After a name, it requests the newest version instead of the notebook's.
"""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PROJECT = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?")
_PYTHON = re.compile(r"3\.\d{1,2}(\.\d{1,2})?|/[^\0\n]+")
_LISTS = ("pip", "pip_indexes", "apt", "includes", "excludes")


@dataclass(frozen=True)
class PipIndex:
    """A package index that serves only certain packages.

    ``sky.PipIndex("https://download.pytorch.org/whl/cu128", packages=["torch"])``, in
    `Image.pip_indexes`. These packages come only from this index, and no other packages do. They
    are installed first; their dependencies are installed with the other packages, from the other
    indexes.

    Args:
        url: URL of the index.
        packages: project names; an index without any is searched for everything, like a plain URL.

    Raises:
        RequestError: `packages` is not a list of names.
    """

    url: str
    packages: Sequence[str] = ()

    def __post_init__(self) -> None:
        mistakes: list[str] = []
        object.__setattr__(self, "packages", _tuple("packages", self.packages, mistakes))
        mistakes += [
            f"packages: {name!r} is not a project's name"
            for name in self.packages
            if not _PROJECT.fullmatch(name)
        ]
        if mistakes:
            raise RequestError(mistakes)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"PipIndex({masked(self.url)!r}, packages={self.packages!r})"

    def must_provide(self, requirement: str) -> bool:
        """Return True if this requirement must come from this index."""
        from packaging.utils import canonicalize_name

        return project(requirement) in [str(canonicalize_name(name)) for name in self.packages]


@suggesting(
    "sky.Image",
    {"packages": "pip", "requirements": "pip", "environment": "env", "indexes": "pip_indexes"},
)
@dataclass(frozen=True)
class Image:
    """The packages, files and variables of a rank's environment.

    Lists keep their order; exact repetitions are dropped.

    Args:
        python: Python version, such as ``"3.12"``, or the absolute path of an interpreter on the
            nodes that has all packages; None for the notebook's version.
        pip: requirements in pip's syntax (``"torch>=2.3"``), including URLs and paths of wheels; no
            options. On other machines a name without a version gets the notebook's version;
            ``"torch>=0"`` gets the newest.
        pip_indexes: URLs of additional package indexes; a `PipIndex` limits one to certain
            packages.
        apt: system packages, installed on rented machines by apt-get after those of pip. Install
            them yourself on your own machines; a note reminds you.
        env: environment variables.
        includes: local files and folders to copy to the nodes.
        excludes: patterns of files that are not copied, as in .gitignore.

    Raises:
        RequestError: lists malformed entries, and requirements that contradict each other
            (torch==2.3 and torch==2.4).
    """

    python: str | None = None
    pip: tuple[str, ...] = ()
    pip_indexes: tuple[str | PipIndex, ...] = ()
    apt: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    includes: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        mistakes: list[str] = []
        for name in _LISTS:
            object.__setattr__(self, name, _tuple(name, getattr(self, name), mistakes))
        if not isinstance(self.env, Mapping):
            mistakes.append(f"env is a dict of strings, not {type(self.env).__name__}")
        object.__setattr__(self, "env", dict(self.env) if isinstance(self.env, Mapping) else {})
        mistakes += _malformed(self)
        requirements = _parse_requirements(self.pip, mistakes)
        mistakes += _conflicts(requirements)
        if mistakes:
            raise RequestError([masked(mistake) for mistake in mistakes])

    def __repr__(self) -> str:
        """Omit passwords in URLs and values of variables, because saved notebooks contain it."""
        shown = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        shown |= {
            name: tuple(i if isinstance(i, PipIndex) else masked(i) for i in shown[name])
            for name in _LISTS
        }
        shown["env"] = dict.fromkeys(self.env, MASK)
        return f"Image({', '.join(f'{name}={value!r}' for name, value in shown.items() if value)})"

    def replace(self, **changes: Any) -> Image:
        """Return a copy with changed fields, checked again.

        Raises RequestError like the constructor.
        """
        return replace(self, **changes)

    def merge(self, *others: Image) -> Image:
        """Return this image with `others` added, in order.

        Raises RequestError for two Python versions, two values of a variable, and contradicting
        requirements.
        """
        mistakes: list[str] = []
        images = (self, *others)
        python = _only_value("python", [image.python for image in images], mistakes)
        env: dict[str, str] = {}
        for name in dict.fromkeys(name for image in images for name in image.env):
            values = [image.env.get(name) for image in images]
            agreed = _only_value(f"environment variable {name}", values, mistakes, secret=True)
            if agreed is not None:
                env[name] = agreed
        try:
            image = Image(
                python=python,
                pip=tuple(item for image in images for item in image.pip),
                pip_indexes=tuple(item for image in images for item in image.pip_indexes),
                apt=tuple(item for image in images for item in image.apt),
                env=env,
                includes=tuple(item for image in images for item in image.includes),
                excludes=tuple(item for image in images for item in image.excludes),
            )
        except RequestError as wrong:
            raise RequestError([*mistakes, *wrong.mistakes]) from None
        if mistakes:
            raise RequestError([masked(mistake) for mistake in mistakes])
        return image

    def repeated(self) -> list[str]:
        """Return a sentence for each package requested in several compatible ways."""
        return [
            masked(f"{_name(same[0])} is asked for {len(same)} times: {', '.join(map(str, same))}")
            for same in _by_name(_parse_requirements(self.pip, [])).values()
            if len(same) > 1
        ]


def projects(pip: Iterable[str]) -> list[str]:
    """Return the projects that requirements name."""
    return [requirement.name for requirement in _parse_requirements(pip, [])]


def explain_unsatisfied(image: Image, installed: Mapping[str, str]) -> list[str]:
    """Return a sentence for each requirement that an environment does not satisfy.

    Each includes the command that installs it.

    Args:
        image: image whose `pip` is checked. A URL or path is never satisfied, because it cannot be
            checked.
        installed: version by project name, in any spelling, or "" if not installed; only those of
            the image's `projects` are read.
    """
    sentences = []
    for requirement, version in unsatisfied_requirements(image.pip, installed):
        if version is None:
            finding = f"{requirement.name} is not installed here"
        else:
            finding = (
                f"{masked(str(requirement))} is needed and {requirement.name} "
                f"{version} is installed here"
            )
        sentences.append(
            f"{finding}: run {_install(requirement, image.pip_indexes)}, then restart the pool"
        )
    sentences += [
        f"{masked(text)}: ranks on this machine have the notebook's own packages, and "
        "skymagic cannot check whether this one comes from "
        f'there: run `%pip install "{masked(text)}"`, and leave it out'
        for text in image.pip
        if is_place(text)
        or (
            any(parsed.url for parsed in _parse_requirements([text], []))
            and not list(unsatisfied_requirements([text], installed))
        )
    ]
    return sentences


def unsatisfied_requirements(
    pip: Iterable[str], installed: Mapping[str, str]
) -> Iterator[tuple[Requirement, str | None]]:
    """Yield the requirements that an environment does not satisfy, with the installed version."""
    from packaging.utils import canonicalize_name

    versions: dict[str, str] = {
        canonicalize_name(name): version for name, version in installed.items()
    }
    for requirement in _parse_requirements(pip, []):
        if requirement.marker and not requirement.marker.evaluate():
            continue
        version = versions.get(_name(requirement)) or None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            yield requirement, version


def _install(requirement: Requirement, indexes: Iterable[str | PipIndex]) -> str:
    text = masked(str(requirement)).removesuffix(LATEST)
    quoted = text if re.fullmatch(r"[\w.=-]+", text) else '"' + text.replace('"', "'") + '"'
    serving = [
        index for index in indexes if isinstance(index, str) or index.must_provide(str(requirement))
    ]
    return (
        " ".join(
            [
                "`%pip install",
                quoted,
                *(f"--extra-index-url {masked(str(index))}" for index in serving),
            ]
        )
        + "`"
    )


def _tuple(name: str, value: object, mistakes: list[str]) -> tuple[Any, ...]:
    """Return `value` as a tuple of strings without repetitions; indexes may be `PipIndex`.

    A single string instead of a list is a common mistake, and is reported.
    """
    if isinstance(value, str | PipIndex) or not isinstance(value, Iterable):
        mistakes.append(f"{name} is a list of strings, not {value!r}")
        return ()
    kinds = (str, PipIndex) if name == "pip_indexes" else (str,)
    items = tuple(value)
    if wrong := [item for item in items if not isinstance(item, kinds)]:
        mistakes.append(f"{name} is a list of strings, and {wrong[0]!r} is not one")
    cleaned = (
        item if isinstance(item, PipIndex) and item.packages else str(item).strip()
        for item in items
    )
    return tuple(dict.fromkeys(cleaned))


def _malformed(image: Image) -> list[str]:
    mistakes = []
    if image.python is not None and not _PYTHON.fullmatch(str(image.python)):
        mistakes.append(
            "python is a version like '3.12' or an interpreter's absolute path, not "
            f"{image.python!r}"
        )
    elif not isinstance(image.python, str | None):
        mistakes.append("python is a string, '3.12', not a number: 3.10 would be 3.1")
    for name in ("pip_indexes", "apt", "includes", "excludes"):
        for item in map(str, getattr(image, name)):
            if not item or item.startswith("-") or not item.isprintable():
                mistakes.append(f"{name}: {item!r} cannot be used")
    for key, value in image.env.items():
        if not isinstance(key, str) or not _ENV_NAME.fullmatch(key):
            mistakes.append(f"env: {key!r} is not a name for an environment variable")
        elif not isinstance(value, str) or "\0" in value:
            mistakes.append(f"env: the value of {key} must be a string without NUL")
    return mistakes


def _parse_requirements(pip: Iterable[str], mistakes: list[str]) -> list[Requirement]:
    """Return the requirements that name a project; append unreadable ones to `mistakes`."""
    if not pip:
        return []
    from packaging.requirements import InvalidRequirement, Requirement

    requirements = []
    for text in pip:
        if not text or text.startswith("-") or not text.isprintable():
            mistakes.append(
                f"pip: {text!r} is not a requirement; options of pip are not taken, "
                "pip_indexes holds URLs"
            )
        elif not is_place(text):
            try:
                requirements.append(Requirement(text))
            except InvalidRequirement as wrong:
                mistakes.append(f"pip: {text!r} is not a requirement: {str(wrong).splitlines()[0]}")
    return requirements


def is_place(text: str) -> bool:
    """Return True for a URL or path instead of a project's name."""
    return bool(re.match(r"([a-z+]+://|[./~]|[A-Za-z]:[\\/])", text)) or text.endswith(
        (".whl", ".tar.gz")
    )


@lru_cache(4096)
def project(text: str) -> str | None:
    """Return the canonical project name of a requirement, or None for a URL or path."""
    return (
        None if is_place(text) else next(iter(map(_name, _parse_requirements((text,), []))), None)
    )


def _name(requirement: Requirement) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(requirement.name)


def _by_name(requirements: Iterable[Requirement]) -> dict[str, list[Requirement]]:
    groups: dict[str, list[Requirement]] = {}
    for requirement in requirements:
        groups.setdefault(_name(requirement), []).append(requirement)
    return groups


def _conflicts(requirements: list[Requirement]) -> list[str]:
    """Return a mistake for each project with a pinned version that another requirement excludes.

    Disjoint ranges (>=3 and <2) are left to pip, whose resolver reports them. Markers make any pair
    possible, so requirements with a marker are ignored.
    """
    mistakes = []
    for name, same in _by_name(requirements).items():
        plain = [requirement for requirement in same if not requirement.marker]
        pins = [
            s.version
            for r in plain
            for s in r.specifier
            if s.operator == "==" and "*" not in s.version
        ]
        refused = [
            r for pin in pins for r in plain if not r.specifier.contains(pin, prereleases=True)
        ]
        if refused:
            mistakes.append(
                f"pip: {name} cannot be all of {', '.join(map(str, plain))}; keep one of them"
            )
    return mistakes


def _only_value(
    what: str, values: Iterable[str | None], mistakes: list[str], *, secret: bool = False
) -> str | None:
    """Return the only value that is set, or None.

    Several values are a mistake, whose message hides values that may be secret.
    """
    distinct = list(dict.fromkeys(value for value in values if value is not None))
    if len(distinct) > 1:
        shown = f"{len(distinct)} values" if secret else " and ".join(map(repr, distinct))
        mistakes.append(f"{what} is set to {shown}; keep one of them")
    return distinct[0] if distinct else None
