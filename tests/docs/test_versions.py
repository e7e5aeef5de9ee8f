"""tests/README.md says with which version of each framework the tests were seen to pass last."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
SEEN = dict(
    re.findall(
        r"^\| ([\w-]+) \| (\d[\d.]*) \|$", (ROOT / "tests/README.md").read_text(), re.MULTILINE
    )
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_framework_of_the_tests_has_a_version() -> None:
    (of_all,) = EXTRAS["frameworks"]
    frameworks = {
        Requirement(text).name for extra in Requirement(of_all).extras for text in EXTRAS[extra]
    }
    assert set(SEEN) == frameworks


def test_torch_is_the_one_that_is_pinned() -> None:
    assert f"torch=={SEEN['torch']}" in (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("name", SEEN)
def test_the_version_that_is_installed_was_seen(name: str) -> None:
    try:
        here = Version(version(name)).base_version
    except PackageNotFoundError:
        pytest.skip(f"{name} is not installed")
    if here != SEEN[name]:
        pytest.skip(
            f"{name} {here} is installed, and {SEEN[name]} was seen last: run all tests, and write it into tests/README.md"
        )
