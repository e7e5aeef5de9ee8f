"""Environments over an image, installed by uv: the image's packages are used, and stay as they are."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from skymagic.bootstrap import wheelhouse
from skymagic.bootstrap.layers import missing_in_image
from skymagic.bootstrap.provision import Addition, Supply, add, probe, setup
from skymagic.bootstrap.remote import Installation
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import fetch, request_for
from skymagic.errors import HostError
from tests.lab.raising import raises
from tests.lab.shells import PATH, SMALL, ShellHost, cache, home
from tests.lab.wheels import make_wheel

__all__ = ["cache", "home"]


@dataclass
class Image:
    """An environment in place of an image, and an index that has newer versions."""

    host: ShellHost
    folder: Path

    def has(self, python: str, *names: str) -> dict[str, str]:
        """Versions of distributions that an interpreter imports."""
        code = (
            "import json, sys, importlib\n"
            "print(json.dumps({n: importlib.import_module(n).__version__ for n in sys.argv[1:]}))"
        )
        return json.loads(subprocess.check_output([python, "-I", "-c", code, *names]))

    def digest(self) -> str:
        """Digest of all files."""
        files = (path for path in sorted(self.folder.rglob("*")) if path.suffix != ".pyc")
        texts = (f"{path} {path.read_bytes()!r}" for path in files if path.is_file())
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()


@pytest.fixture
def image(home: Path, tmp_path: Path) -> Image:
    links, old = tmp_path / "links", tmp_path / "old"
    make_wheel(old, "kept", "1.0")
    make_wheel(old, "raised", "1.0")
    make_wheel(old, "torch", "2.0+image")
    for name in ("kept", "raised", "torch"):
        make_wheel(links, name, "3.0")
    make_wheel(links, "fresh", "1.0", ["kept", "raised>=2", "torch"])
    make_wheel(links, "later", "1.0", ["kept>=1", "torch"])
    make_wheel(links, "demanding", "1.0", ["torch>=3"])
    folder = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "uv", "venv", "-q", folder], check=True)
    install = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--python",
        str(folder),
    ]
    subprocess.run([*install, *old.iterdir()], check=True)
    env = {
        "PATH": f"{folder}/bin:{PATH}",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(links),
    }
    return Image(ShellHost(home, env=env), folder)


def wanted(packages: Iterable[str]) -> Requirements:
    return replace(SMALL, packages=tuple(packages), base="lab/image")


def prepared(image: Image, *packages: str) -> Installation:
    requirements = wanted(packages)
    return setup(image.host, requirements, print, probe(image.host, requirements))


def test_only_what_the_image_lacks_is_installed(image: Image) -> None:
    before = image.digest()
    ready = prepared(image, "kept", "fresh")
    assert image.has(ready.python, "kept", "raised", "torch", "fresh") == {
        "kept": "1.0",
        "raised": "3.0",
        "torch": "2.0+image",
        "fresh": "1.0",
    }
    packages = Path(ready.python).parents[1].glob("lib/python*/site-packages/*.dist-info")
    assert {path.name.split("-")[0] for path in packages} == {"raised", "fresh"}
    assert image.digest() == before


def test_later_packages_use_those_of_the_image(image: Image) -> None:
    ready = prepared(image)
    before = image.digest()
    add(image.host, ready, Addition(("later",)), print)
    names = ("kept", "torch", "later")
    assert list(image.has(ready.python, *names).values()) == ["1.0", "2.0+image", "1.0"]
    again = replace(ready, facts=probe(image.host, ready.requirements))
    assert again.facts.packages["torch"] == "2.0+image"
    with raises(HostError, "setup-packages", "torch"):
        add(image.host, again, Addition(("demanding",)), print)
    packages = Path(ready.python).parents[1].glob("lib/python*/site-packages/*.dist-info")
    assert {path.name.split("-")[0] for path in packages} == {"later"}
    add(image.host, again, Addition(("torch>=3",)), print)
    assert image.has(ready.python, "torch") == {"torch": "3.0"}
    assert image.digest() == before


def test_own_version_of_torch_replaces_the_images(image: Image) -> None:
    ready = prepared(image, "torch==3.0")
    assert image.has(ready.python, "torch") == {"torch": "3.0"}


def test_sent_wheels_replace_nothing_that_fits(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheelhouse, "_houses", {})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    image.host.env = {**image.host.env, "PIP_FIND_LINKS": ""}
    requirements = replace(wanted(["fresh"]), preferences=("kept==3.0",))
    facts = replace(probe(image.host, requirements), indexes=0)
    house = fetch(request_for(missing_in_image(requirements, facts)), facts, print)
    ready = setup(image.host, requirements, print, facts, Supply(house))
    versions = image.has(ready.python, "kept", "raised", "torch", "fresh")
    assert list(versions.values()) == ["1.0", "3.0", "2.0+image", "1.0"]
    house.folder.cleanup()
