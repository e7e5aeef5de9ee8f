"""Newer Pythons than the one that runs the tests: cells both ways, and what refers to what the ranks hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.environment import UV
from tests.lab.notebook import ROOT
from tests.lowest import uv

NEEDED = ["pytest", "pytest-timeout", "hypothesis", "psutil", "numpy"]
"""Of the tests below, and no framework: torch for another Python is gigabytes."""
TESTS = ["tests/data/test_class_state.py", "tests/jobs/test_differential.py"]
WITHOUT_FRAMEWORKS = "class_state and not virtual or both_ways and (functions or classes)"


def newest() -> str:
    """The newest other Python that lies in pyenv's folder or on the PATH; empty where there is none."""
    shelf = Path.home() / ".pyenv" / "versions"
    for minor in range(19, sys.version_info.minor, -1):
        for path in (
            *sorted(shelf.glob(f"3.{minor}.*/bin/python")),
            shutil.which(f"python3.{minor}"),
        ):
            if (
                path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0
            ):  # a shim may have none
                return str(path)
    return ""


@pytest.mark.skipif(not UV.exists(), reason="uv is not installed: make test does that")
def test_a_newer_python(tmp_path: Path) -> None:
    if not (python := newest()):
        pytest.skip("there is no newer Python on the PATH or in ~/.pyenv")
    uv("venv", "-q", "--python", python, str(tmp_path / "env"))
    uv("pip", "install", "-q", "--python", str(tmp_path / "env"), "-e", str(ROOT), *NEEDED)
    command = [
        str(tmp_path / "env/bin/python"),
        *"-m pytest -q -p no:cacheprovider -k".split(),
        WITHOUT_FRAMEWORKS,
    ]
    run = subprocess.run([*command, *TESTS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(re.findall(r"(\d+) passed", run.stdout)[-1]) > 40
