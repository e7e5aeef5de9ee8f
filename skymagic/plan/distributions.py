"""Distributions by what is imported from them: which a name stands for, and which a node lacks; pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

OWN = frozenset(
    {"skymagic", "ipyparallel", "ipykernel", "ipython", "cloudpickle", "xxhash", "packaging"}
)
"""Distributions that each node has before a pool starts."""


@dataclass(frozen=True)
class Environment:
    """What can be imported in an environment beside Python's own modules.

    Attributes:
        versions: version by canonical name of distribution.
        modules: import name → the distributions that it is from, in any spelling; for what several distributions share, such as
            the namespace package ``google``, dotted names: ``google.cloud.storage``. Names without a distribution have none.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Distribution:
    """A distribution that is needed, as the notebook has it.

    Attributes:
        name: as it calls itself: ``PyYAML``.
        version: the notebook's.
        module: what is imported from it: ``yaml``.
    """

    name: str
    version: str
    module: str = field(compare=False)

    @property
    def key(self) -> str:
        """The distribution's canonical name."""
        return canonical(self.name)

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it: lower case, with dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(names: Iterable[str], here: Environment) -> tuple[list[Distribution], set[str]]:
    """The distributions that these dotted import names are from, and the names that nobody knows.

    Python's own modules, and what each node has, are neither.
    """
    found: dict[str, Distribution] = {}
    unknown: set[str] = set()
    for name in sorted(names):
        if name.partition(".")[0] in sys.stdlib_module_names or name.partition(".")[0] in (
            "skymagic",
            "__main__",
        ):
            continue
        module = _longest(name, here.modules)
        if not module:
            unknown.add(name)
            continue
        for each in here.modules[module][:1]:
            if canonical(each) in here.versions and canonical(each) not in OWN:
                found.setdefault(
                    canonical(each), Distribution(each, here.versions[canonical(each)], module)
                )
    return sorted(found.values()), unknown


def _longest(name: str, modules: Mapping[str, object]) -> str:
    """The longest beginning of a dotted name that is known."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def lacks(needed: Distribution, node: Environment) -> bool:
    """Whether a node can neither find the distribution, nor import its module from elsewhere (conda has other names)."""
    return needed.key not in node.versions and needed.module not in node.modules


def differs(needed: Distribution, node: Environment) -> str:
    """A node's own version of what is needed, where that is another; builds of one version (``2.13.0+cpu``) are the same."""
    theirs = node.versions.get(needed.key, "")
    return theirs if theirs.partition("+")[0] != needed.version.partition("+")[0] else ""
