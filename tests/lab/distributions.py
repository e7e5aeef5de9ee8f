"""Small distributions for tests: wheels in a folder that hosts find, and the same installed for a notebook."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from skymagic.bootstrap import wheel
from tests.lab.notebook import ROOT
from tests.lab.shells import pip_settings
from tests.lab.wheels import dist_info

BACKEND = """
import pathlib, zipfile
stem, files, builds = "{0}", {1}, {2}

def build_wheel(folder, config_settings=None, metadata_directory=None):
    with open(builds, "a") as file:
        file.write("built\\n")
    source, name = pathlib.Path("src"), stem + "-py3-none-any.whl"
    whole = dict(files)
    whole[stem + ".dist-info/WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    for path in sorted(source.rglob("*.py")):
        whole[path.relative_to(source).as_posix()] = path.read_text()
    whole[stem + ".dist-info/RECORD"] = "".join(each + ",,\\n" for each in whole) + stem + ".dist-info/RECORD,,\\n"
    with zipfile.ZipFile(pathlib.Path(folder, name), "w") as archive:
        for each, text in whole.items():
            archive.writestr(each, text)
    return name
"""
"""A build backend in a project itself, which needs nothing from an index."""


@dataclass
class Shelf:
    """Wheels in a folder, and a folder in which a notebook has some of them.

    Attributes:
        folder: an empty folder.
    """

    folder: Path
    sources: list[Path] = field(default_factory=list)

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

    def editable(
        self, name: str, version: str, files: Mapping[str, str], requires: Sequence[str] = ()
    ) -> Path:
        """A project that the notebook has installed as editable, with `files` below ``src``; its folder. No index has it."""
        module, project = name.replace("-", "_"), self.folder / "projects" / name
        for file, text in files.items():
            (project / "src" / file).parent.mkdir(parents=True, exist_ok=True)
            (project / "src" / file).write_text(text)
        metadata = dist_info(name, version, requires)
        stated = [f"{module}-{version}", repr(dict(metadata)), repr(str(self.builds(name)))]
        (project / "backend.py").write_text(BACKEND.format(*stated))
        (project / "pyproject.toml").write_text(
            "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
        )
        written = {
            **metadata,
            f"{module}-{version}.dist-info/direct_url.json": json.dumps(
                {"url": project.as_uri(), "dir_info": {"editable": True}}
            ),
            f"_editable_impl_{module}.pth": f"{project}/src\n",
        }
        written[f"{module}-{version}.dist-info/RECORD"] = "".join(f"{file},,\n" for file in written)
        for file, text in written.items():
            (self.site / file).parent.mkdir(exist_ok=True)
            (self.site / file).write_text(text)
        self.sources.append(project / "src")
        return project

    def builds(self, name: str) -> Path:
        """A file with a line for each time that a wheel of an editable project was built."""
        return self.folder / f"{name}.builds"

    @property
    def of_notebook(self) -> dict[str, str]:
        """Environment of a notebook that has them."""
        paths = [ROOT, self.site, *self.sources]
        return {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
        }

    @property
    def of_hosts(self) -> dict[str, str]:
        """Environment of hosts whose installers find them."""
        found = pip_settings().get("PIP_FIND_LINKS", "")
        return {
            **pip_settings(),
            "PIP_FIND_LINKS": f"{found} {self.links}".strip(),
        }


def own_environments(home: Path, shared: Path) -> None:
    """Give a HOME environments like those of `shared`, of its own: what is installed into them stays there."""
    own = home / ".skymagic"
    own.mkdir(mode=0o700, parents=True)
    for environment in (shared / ".skymagic/env").iterdir():
        if environment.is_dir():
            shutil.copytree(
                environment, own / "env" / environment.name, symlinks=True, copy_function=os.link
            )
    (own / "code").symlink_to(shared / ".skymagic/code")
