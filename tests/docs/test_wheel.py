"""The wheel, installed outside the checkout: it runs the quickstart, and in Google Colab it replaces nothing of Jupyter's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_notebooks import environment
from tests.environment import UV
from tests.lab.notebook import ROOT
from tests.lowest import COLAB, uv

pytestmark = pytest.mark.skipif(not UV.exists(), reason="uv is not installed: make test does that")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "-q", "--wheel", "--out-dir", str(folder))
    (wheel,) = folder.glob("skymagic-*.whl")
    return wheel


@pytest.mark.parametrize(
    "installed", [pytest.param([], id="empty"), pytest.param(COLAB, id="Colab")]
)
def test_the_quickstart_runs_from_the_wheel(
    tmp_path: Path, wheel: Path, installed: list[str]
) -> None:
    uv("venv", "-q", "--python", sys.executable, str(tmp_path / "env"))
    python = tmp_path / "env" / "bin" / "python"
    into = ["-q", "--python", str(python), "-c", "constraints.txt"]
    if installed:
        uv("pip", "install", *into, *installed)
    uv("pip", "install", *into, f"skymagic[demo] @ {wheel.as_uri()}")
    packages = uv("pip", "freeze", "--python", str(python)).splitlines()
    assert {*installed} <= {*packages}, "none of Colab's packages is replaced"
    for file in ("show.py", "quickstart.ipynb"):
        shutil.copy(ROOT / "notebooks" / file, tmp_path)
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    folders = {"IPYTHONDIR": environment(tmp_path)["IPYTHONDIR"], "HOME": str(tmp_path)}
    run = subprocess.run(
        [python, "show.py", "quickstart.ipynb"],
        cwd=tmp_path,
        env={**own, **folders},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ready in" in run.stdout
    assert "is down" in run.stdout
    where = subprocess.run(
        [python, "-c", "import skymagic; print(skymagic.__file__)"],
        cwd=tmp_path,
        env=own,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(tmp_path / "env"))
