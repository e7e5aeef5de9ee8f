"""The notebook's own distributions become wheels: built of a source, packed again from what is installed, kept by content."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from skymagic.bootstrap import local_wheels as wheels
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.local_wheels import NoWheel, local_wheel, source_files
from skymagic.bootstrap.requirements import notebook, requirements_of
from skymagic.errors import RequestError
from skymagic.plan.image import Image
from tests.lab.distributions import Shelf

HOST = HostFacts(
    system="Linux", machine="x86_64", hostname="n", home="/h", folder="/h/s", libc="glibc 2.36"
)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """What the notebook has."""
    shelf = Shelf(tmp_path / "shelf")
    monkeypatch.syspath_prepend(str(shelf.site))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shelf


def read(path: str, name: str) -> str:
    with zipfile.ZipFile(path) as archive:
        return archive.read(name).decode()


def test_a_wheel_is_built_once_for_each_state_of_its_source(shelf: Shelf) -> None:
    """Also for an earlier state; a damaged wheel is rebuilt, and the source stays clean."""
    project = shelf.editable("tiny-own", "1.0", {"tinyown.py": "state = 1\n"})
    before = sorted(project.rglob("*"))
    builds, told = shelf.builds("tiny-own"), list[str]()
    first = local_wheel("tiny_own", told.append)
    (message,) = told
    assert f"tiny-own 1.0 in {project}" in message
    assert (first.name, first.version, first.source) == ("tiny-own", "1.0", str(project))
    assert read(first.path, "tinyown.py") == "state = 1\n"
    assert local_wheel("tiny-own") == first
    (project / "src/tinyown.py").write_text("state = 2\n")
    second = local_wheel("tiny-own")
    assert second.digest != first.digest
    assert read(second.path, "tinyown.py") == "state = 2\n"
    assert builds.read_text().count("built") == 2
    (project / "src/tinyown.py").write_text("state = 1\n")
    assert local_wheel("tiny-own") == first
    assert builds.read_text().count("built") == 2
    Path(first.path).write_bytes(Path(first.path).read_bytes()[:-30])
    assert local_wheel("tiny-own") == first
    assert read(first.path, "tinyown.py") == "state = 1\n"
    assert builds.read_text().count("built") == 3
    assert sorted(project.rglob("*")) == before


def test_ignored_files_are_not_sources(tmp_path: Path) -> None:
    """Except code in a tracked folder, such as a generated version file."""
    for file in (
        "pkg/__init__.py",
        "pkg/_version.py",
        "pkg/big.bin",
        "data/a.py",
        "build/lib/pkg/old.py",
        "new.py",
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    assert source_files(tmp_path) == [
        "data/a.py",
        "new.py",
        "pkg/__init__.py",
        "pkg/_version.py",
        "pkg/big.bin",
    ]
    (tmp_path / ".gitignore").write_text("_version.py\n*.bin\n/data\nbuild\n")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "pkg"], check=True)
    assert source_files(tmp_path) == [".gitignore", "new.py", "pkg/__init__.py", "pkg/_version.py"]


@pytest.mark.parametrize(
    "origin",
    [
        '{"url": "file:///gone", "dir_info": {}}',
        '{"url": "https://me:hush@example.org/x.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
        '{"url": "file:///gone/tiny_other-2.0-py3-none-any.whl", "archive_info": {}}',
    ],
)
def test_installed_files_are_packed_into_a_wheel(shelf: Shelf, origin: str) -> None:
    """No matter what happened to their source: a folder, a repository or a file."""
    shelf.add(
        "tiny-other", "2.0", {"tinyother/__init__.py": "here = True\n", "tinyother/data.txt": "d"}
    )
    (shelf.site / "tiny_other-2.0.dist-info/direct_url.json").write_text(origin)
    made = local_wheel("tiny-other")
    assert Path(made.path).name == "tiny_other-2.0-py3-none-any.whl"
    assert "hush" not in made.source
    with zipfile.ZipFile(made.path) as archive, zipfile.ZipFile(shelf.links / made.file) as theirs:
        assert sorted(archive.namelist()) == sorted(theirs.namelist())
        assert archive.read("tinyother/__init__.py") == b"here = True\n"
    assert local_wheel("tiny-other") == made
    (shelf.site / "tinyother/__init__.py").write_text("here = False\n")
    assert local_wheel("tiny-other").digest != made.digest


def test_failed_build_shows_its_last_lines(shelf: Shelf) -> None:
    project = shelf.editable("tiny-own", "1.0", {"tinyown.py": ""})
    shelf.editable("tiny-gone", "1.0", {"tinygone.py": ""})
    (shelf.folder / "projects/tiny-gone/pyproject.toml").unlink()
    with (project / "backend.py").open("a") as file:
        file.write("raise SystemExit('no compiler, and https://me:hush@example.org')\n")
    with pytest.raises(RequestError) as error:
        requirements_of(Image(pip=("tiny-own", "tiny-gone")))
    gone, failed = error.value.mistakes
    assert gone.startswith(f"tiny-gone 1.0 is installed here from {project.parent}/tiny-gone,")
    assert failed.startswith(f"no wheel could be built of tiny-own 1.0 in {project}; `")
    assert "no compiler, and https://****@example.org" in failed
    assert not list(wheels.wheel_cache().glob("*/.*"))


def test_own_distributions_are_found_as_dependencies(shelf: Shelf) -> None:
    """No index is asked for them, and an environment's name contains their names, not their content."""
    shelf.editable("tiny-own", "1.0", {"tinyown.py": ""}, ["packaging"])
    shelf.editable("tiny-base", "1.0", {"tinybase.py": ""}, ["tiny-own"])
    here = notebook("tiny-base")
    assert here is not None
    assert here.own
    wanted = requirements_of(Image(pip=("tiny-base",)))
    assert [each.name for each in wanted.own] == ["tiny-base", "tiny-own"]
    assert not {"tiny-base", "tiny-own"} & set(wanted.pins)
    (shelf.folder / "projects/tiny-own/src/tinyown.py").write_text("more = 1\n")
    changed = requirements_of(Image(pip=("tiny-base",)))
    assert changed.key == wanted.key
    assert changed.digests != wanted.digests
    assert [each.name for each in requirements_of(Image(pip=("tiny-base==2.0",))).own] == [
        "tiny-own"
    ]


def test_no_wheel_if_installed_files_are_missing(shelf: Shelf) -> None:
    shelf.add("tiny-other", "2.0", {"tinyother.py": ""})
    (shelf.site / "tiny_other-2.0.dist-info/direct_url.json").write_text(
        '{"url": "file:///gone", "dir_info": {}}'
    )
    (shelf.site / "tinyother.py").unlink()
    with pytest.raises(NoWheel, match="tinyother.py"):
        local_wheel("tiny-other")
