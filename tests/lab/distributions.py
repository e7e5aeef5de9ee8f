"""Small distributions for tests: wheels in a folder that hosts find, and the same installed for a notebook."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from skymagic.bootstrap import wheel
from tests.lab.notebook import ROOT
from tests.lab.shells import pip_settings


@dataclass
class Shelf:
    """Wheels in a folder, and a folder in which a notebook has some of them.

    Attributes:
        folder: an empty folder.
    """

    folder: Path
    made: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.links, self.site = self.folder / "links", self.folder / "site"
        for folder in (self.links, self.site):
            folder.mkdir(parents=True)

    def add(self, name: str, version: str, files: Mapping[str, str], *, here: bool = True) -> None:
        """A wheel of these files; `here`: the notebook has it too."""
        stem = f"{name.replace('-', '_')}-{version}"
        path = self.links / f"{stem}-py3-none-any.whl"
        data = {file: text.encode() for file, text in files.items()}
        path.write_bytes(wheel.build(data, version, name.replace("-", "_")))
        if here:
            with zipfile.ZipFile(path) as archive:
                archive.extractall(self.site)

    @property
    def of_notebook(self) -> dict[str, str]:
        """Environment of a notebook that has them."""
        return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(self.site)])}

    @property
    def of_hosts(self) -> dict[str, str]:
        """Environment of hosts whose installers find them, and nothing else."""
        found = pip_settings().get("PIP_FIND_LINKS", "")
        return {**pip_settings(), "PIP_FIND_LINKS": f"{found} {self.links}".strip(), "PIP_NO_INDEX": "1"}


def own_environments(home: Path, shared: Path) -> None:
    """Give a HOME environments like those of `shared`, of its own: what is installed into them stays there."""
    own = home / ".skymagic"
    own.mkdir(mode=0o700, parents=True)
    for environment in (shared / ".skymagic/env").iterdir():
        if environment.is_dir():
            shutil.copytree(environment, own / "env" / environment.name, symlinks=True, copy_function=os.link)
    (own / "code").symlink_to(shared / ".skymagic/code")
