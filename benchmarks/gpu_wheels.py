"""Wheels for a machine with a GPU and no internet: ``python benchmarks/gpu_wheels.py DIR [--python 3.12] [PACKAGE …]``, also as ``make gpu-wheels``.

What skymagic depends on, for Linux and that Python. Neither torch nor anything of CUDA: the machine has a torch that fits its driver.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
THEIRS = re.compile(r"(torch|triton|pytorch-triton|nvidia-.*|cuda-.*|jax-cuda.*)")
"""Packages that the machine brings."""
GLIBC = range(35, 16, -1)
"""Second numbers of the versions of glibc for which wheels are taken, the newest first; pip takes only what is named."""


def platforms(machine: str) -> list[str]:
    """pip's options for Linux on this kind of processor."""
    names = [
        *(f"manylinux_2_{minor}_{machine}" for minor in GLIBC),
        f"manylinux2014_{machine}",
        f"manylinux1_{machine}",
    ]
    return [option for name in names for option in ("--platform", name)]


def wanted(report: str) -> list[str]:
    """``name==version`` of what pip would install, by its report, without what the machine brings."""
    found = [each["metadata"] for each in json.loads(report)["install"]]
    named = [(re.sub(r"[-_.]+", "-", each["name"]).lower(), each["version"]) for each in found]
    return sorted(f"{name}=={version}" for name, version in named if not THEIRS.fullmatch(name))


def main() -> None:
    """Resolve for that Python, and download what is not there yet."""
    parser = argparse.ArgumentParser(description="wheels for make gpu")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", metavar="VERSION"
    )
    parser.add_argument("--machine", default="x86_64", help="x86_64 or aarch64")
    parser.add_argument(
        "packages",
        nargs="*",
        help="more than skymagic needs: accelerate, lightning, transformers, …",
    )
    options = parser.parse_intermixed_args()
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    target = [
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        options.python,
        *platforms(options.machine),
    ]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        resolve = [
            *pip,
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--report",
            str(report),
        ]
        subprocess.run(
            [*resolve, "--target", folder, *target, *needed, *options.packages], check=True
        )
        chosen = wanted(report.read_text())
    options.folder.mkdir(parents=True, exist_ok=True)
    for wheel in options.folder.glob(
        "*.whl"
    ):  # of an earlier time: two versions of one package cannot be installed
        wheel.unlink()
    subprocess.run(
        [*pip, "download", "--quiet", "--no-deps", *target, "--dest", str(options.folder), *chosen],
        check=True,
    )
    size = sum(wheel.stat().st_size for wheel in options.folder.glob("*.whl"))
    print(
        f"{len(chosen)} wheels for Python {options.python}, {size / 1e6:.0f} MB, in {options.folder}"
    )


if __name__ == "__main__":
    main()
