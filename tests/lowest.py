"""The quick and the near tests with the oldest versions that pyproject.toml allows: ``python -m tests.lowest``, in an environment of its own.

It is build/lowest. These versions of Jupyter's packages are Google Colab's, which `pip install skymagic` must not replace.

Only what the package itself depends on is that old; pytest, torch and the other tools are as usual.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib

from tests.environment import PIP, ROOT, UV, options, variables

FOLDER = ROOT / "build" / "lowest"
PYTHON = FOLDER / "bin" / "python"
PINS = ROOT / "build" / "lowest.txt"
COLAB = [
    "ipython==7.34.0",
    "ipykernel==6.17.1",
    "ipywidgets==7.7.1",
    "jupyter-client==7.4.9",
    "traitlets==5.7.1",
]
"""Jupyter's packages in Google Colab's image of August 2026."""


def uv(*words: str) -> str:
    """What uv prints, with the indexes that pip is configured for."""
    listed = subprocess.run(
        [*PIP, "config", "list"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    env = variables(options(listed), os.environ)
    return subprocess.run(
        [UV, *words], cwd=ROOT, env=env, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def oldest() -> list[str]:
    """``name==version`` of each dependency at its lower bound."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split(r"[<>=!~ ]", text)[0] for text in declared}  # as uv spells them
    solved = uv(
        "pip",
        "compile",
        "-q",
        "--resolution",
        "lowest-direct",
        "--no-annotate",
        "--no-header",
        "pyproject.toml",
    )
    return [line for line in solved.splitlines() if line.partition("==")[0] in names]


def main() -> int:
    """Make the environment and run the tests; the exit status."""
    uv("venv", "-q", "--clear", "--seed", "--python", sys.executable, str(FOLDER))
    PINS.write_text("\n".join(oldest()) + "\n")
    print(PINS.read_text(), flush=True)
    pins = ["-c", "constraints.txt", "-c", str(PINS)]
    uv("pip", "install", "-q", "--python", str(PYTHON), *pins, "-e", ".[dev,torch]", "joblib")
    # IPython 7 puts the folder of its extensions on the path, whose `tests` would hide ours in kernels and ranks
    for hiding in FOLDER.glob("lib/python*/site-packages/IPython/extensions/tests"):
        shutil.rmtree(hiding)
    return subprocess.run(
        [PYTHON, "-m", "pytest", "-m", "quick or near", *sys.argv[1:]], cwd=ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
