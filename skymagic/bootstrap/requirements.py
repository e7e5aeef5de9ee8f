"""Requirements of a node as one value; environments are content-addressed by its key."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field

from skymagic.bootstrap.own import OwnWheel
from skymagic.plan.image import project

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
