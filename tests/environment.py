"""Install this project with extras into the environment of this Python: ``python -m tests.environment demo``. Standard library only.

uv does it, in a quarter of pip's time. It does not read pip's configuration, which may be the only one that knows where packages are on this
machine, and is therefore told it. uv itself comes by pip, into a folder beside the packages; where it does not, pip does all.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(sys.prefix) / ".uv"
UV = FOLDER / "bin/uv"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# pip's option -> uv's variable, and what separates its values there
OPTIONS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "proxy": ("ALL_PROXY", " "),
}

# jsonschema can do without it, and imports it in every process of Jupyter, Ray and nbclient, where it parses a grammar for 1.2 s
SLOW = ["rfc3987-syntax"]


def options(listed: str) -> dict[str, str]:
    """What ``pip config list`` says: its environment counts more than what is for `install`, and that more than the rest."""
    found: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            place, _, name = key.rpartition(".")
            if place == section and name in OPTIONS:
                found[name] = str(ast.literal_eval(value))
    return found


def variables(configured: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The same for uv, where nobody has told it something else; of several indexes it takes the best version, as pip does."""
    told = {
        OPTIONS[name][0]: OPTIONS[name][1].join(value.split()) for name, value in configured.items()
    }
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **told, **environ}


def by_uv(words: list[str]) -> bool:
    """Whether uv has installed it."""
    if not UV.exists():
        subprocess.run([*PIP, "install", "--quiet", "--target", str(FOLDER), "uv"], cwd=ROOT)
    if not UV.exists():
        return False
    listed = subprocess.run(
        [*PIP, "config", "list"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    command = [str(UV), "pip", "install", "--quiet", "--python", sys.executable, *words]
    return (
        subprocess.run(command, cwd=ROOT, env=variables(options(listed), os.environ)).returncode
        == 0
    )


def main() -> int:
    """Install the extras that are named, or, after ``--target FOLDER``, packages into a folder; the exit status."""
    named = sys.argv[1:]
    words = (
        named
        if named[0] == "--target"
        else ["-c", "constraints.txt", "-e", f".[{','.join(named)}]"]
    )
    status = 0
    if not by_uv(words):
        print("uv could not install it; now pip does, which takes longer", file=sys.stderr)
        status = subprocess.run([*PIP, "install", "--quiet", *words], cwd=ROOT).returncode
    if words is not named and find_spec("rfc3987_syntax"):
        subprocess.run([*PIP, "uninstall", "--quiet", "--yes", *SLOW], cwd=ROOT)
    return status


if __name__ == "__main__":
    sys.exit(main())
