"""Distributions by import name: which one a name belongs to, and which a node lacks; pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

OWN = frozenset({"skymagic", "ipykernel", "ipython", "cloudpickle", "xxhash", "packaging"})
"""Distributions that each node has before a pool starts."""


@dataclass(frozen=True)
class Environment:
    """Importable modules of an environment, except those of the standard library.

    Attributes:
        versions: version by canonical distribution name.
        modules: import name → its distributions, in any spelling. For a name that distributions
            share, such as the namespace package ``google``, dotted names: ``google.cloud.storage``.
            Names without a distribution have none.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, order=True)
class Distribution:
    """A required distribution, as installed for the notebook.

    Attributes:
        name: its own spelling: ``PyYAML``.
        version: the notebook's version.
        module: the imported module: ``yaml``.
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
    """Return a distribution's name as package indexes compare it: lower case, with dashes."""
    return re.sub(r"[-_.]+", "-", name).lower()


def distributions(
    names: Iterable[str], environment: Environment
) -> tuple[list[Distribution], set[str]]:
    """Return the distributions of these dotted import names, and the unknown names.

    Neither contains the standard library, or distributions that each node has.
    """
    by_name: dict[str, Distribution] = {}
    unknown: set[str] = set()
    for name in sorted(names):
        if name.partition(".")[0] in sys.stdlib_module_names or name.partition(".")[0] in (
            "skymagic",
            "__main__",
        ):
            continue
        module = _longest(name, environment.modules)
        if not module:
            unknown.add(name)
            continue
        for distribution in environment.modules[module][:1]:
            if (
                canonical(distribution) in environment.versions
                and canonical(distribution) not in OWN
            ):
                by_name.setdefault(
                    canonical(distribution),
                    Distribution(
                        distribution, environment.versions[canonical(distribution)], module
                    ),
                )
    return sorted(by_name.values()), unknown


def _longest(name: str, modules: Mapping[str, object]) -> str:
    """Return the longest known prefix of a dotted name."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def lacks(needed: Distribution, node: Environment) -> bool:
    """Return True if a node has neither the distribution nor its module from another source.

    Conda, for example, uses other distribution names.
    """
    return needed.key not in node.versions and needed.module not in node.modules


def differs(needed: Distribution, node: Environment) -> str:
    """Return a node's version of a distribution if it differs from the notebook's, or "".

    Builds of one version (``2.13.0+cpu``) count as equal.
    """
    node_version = node.versions.get(needed.key, "")
    return (
        node_version if node_version.partition("+")[0] != needed.version.partition("+")[0] else ""
    )
