"""`.ci/release TAG` builds the packages of a release: their version is the tag's."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.lab.notebook import ROOT

LEFT_OUT = {
    ".git",
    ".venv",
    "build",
    "dist",
    "__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository, without what was made in it."""
    packed = tmp_path / "repository.tar"

    def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if LEFT_OUT & set(Path(entry.name).parts) else entry

    with tarfile.open(packed, "w") as archive:
        archive.add(ROOT, "copy", filter=wanted)
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="fully_trusted")
    return tmp_path / "copy"


def released(copy: Path, tag: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([".ci/release", tag], cwd=copy, env=env, capture_output=True, text=True)


def test_the_version_comes_from_the_tag(copy: Path) -> None:
    pytest.importorskip("build")
    pytest.importorskip("twine")
    changes = copy / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("## [Unreleased]", "## [9.8.7] - 2030-01-01"))
    done = released(copy, "v9.8.7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (copy / "dist").iterdir()} == {
        "skymagic-9.8.7.tar.gz",
        "skymagic-9.8.7-py3-none-any.whl",
    }
    with zipfile.ZipFile(copy / "dist/skymagic-9.8.7-py3-none-any.whl") as wheel:
        metadata = wheel.read("skymagic-9.8.7.dist-info/METADATA").decode()
    assert "\nVersion: 9.8.7\n" in metadata
    assert "Provides-Extra: torch\n" in metadata
    assert "version: 9.8.7" in (copy / "CITATION.cff").read_text()


@pytest.mark.parametrize("tag", ["9.8.7", "v9.8", "v9.8.7; true", "v9.8.7-dev"])
def test_what_is_no_tag_of_a_release_is_refused(copy: Path, tag: str) -> None:
    done = released(copy, tag)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{tag} is not")
    assert not (copy / "dist").exists()


def test_a_release_without_a_changelog_is_refused(copy: Path) -> None:
    done = released(copy, "v9.8.7")
    assert done.returncode == 2
    assert "'## [9.8.7]'" in done.stderr
    assert 'version = "9.8.7"' not in (copy / "pyproject.toml").read_text()


def test_the_workflow_publishes_by_trust_and_from_tags_only() -> None:
    flow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert flow[True] == {"push": {"tags": ["v*"]}}  # YAML reads `on` as true
    assert flow["permissions"] == {"contents": "read"}
    assert flow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()
    (built,) = (
        step["run"]
        for step in flow["jobs"]["build"]["steps"]
        if ".ci/release" in step.get("run", "")
    )
    assert built == '.ci/release "$GITHUB_REF_NAME"'
