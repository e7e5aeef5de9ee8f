"""Which wheels run on a host: the platforms that its facts mean, for `packaging.tags`, pip and uv; pure."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from skymagic.bootstrap.facts import Facts

if TYPE_CHECKING:
    from packaging.tags import Tag

_UV_GLIBC = (17, 28, *range(31, 41))
"""Minor versions of glibc 2 that uv knows as platforms."""
_MACOS = {"arm64": (15, 0), "x86_64": (13, 0)}
"""The newest macOS whose wheels are taken."""


def platforms(facts: Facts) -> tuple[str, ...]:
    """The platform tags of wheels that run on a host, the newest first."""
    from packaging.tags import mac_platforms

    machine = facts.machine
    if facts.system == "Darwin":
        return tuple(mac_platforms(_MACOS.get(machine, (13, 0)), machine))
    if facts.libc == "musl":
        return (*(f"musllinux_1_{minor}_{machine}" for minor in (2, 1)), f"linux_{machine}")
    tags = (f"manylinux_2_{minor}_{machine}" for minor in range(_glibc(facts), 4, -1))
    return (*tags, *(f"manylinux{name}_{machine}" for name in ("2014", "2010", "1")), f"linux_{machine}")


def uv_platform(facts: Facts) -> str:
    """A host's platform as ``uv pip compile --python-platform`` names it; "" for one that uv does not know."""
    if facts.system == "Darwin":
        return "aarch64-apple-darwin" if facts.machine == "arm64" else "x86_64-apple-darwin"
    if facts.system != "Linux":
        return ""
    if facts.libc == "musl":
        return f"{facts.machine}-unknown-linux-musl"
    return f"{facts.machine}-manylinux_2_{max(each for each in _UV_GLIBC if each <= _glibc(facts) or each == 17)}"


def _glibc(facts: Facts) -> int:
    """The minor version of a host's glibc 2; an old one where it does not tell."""
    found = re.search(r"2\.(\d+)", facts.libc)
    return int(found[1]) if found else 17


def misfit(file: str, facts: Facts, minor: str) -> str:
    """Why a wheel does not run on a host, in words; "" where it does.

    Args:
        file: its name. minor: the host's version of Python, as ``"3.11"``.
    """
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        tags = parse_wheel_filename(file)[3]
    except InvalidWheelFilename as problem:
        return str(problem)
    if tags & _tags(platforms(facts), minor):
        return ""
    names = sorted({tag.platform for tag in tags})
    if {"any", *platforms(facts)} & set(names):
        pythons = ".".join(sorted({tag.interpreter for tag in tags}))
        return f"it is built for {pythons}, and the host's environment has Python {minor}"
    libc = f" ({facts.libc})" if facts.libc else ""
    return f"it is compiled for {'.'.join(names)}, and the host is {facts.system} {facts.machine}{libc}"


@lru_cache(maxsize=16)
def _tags(names: tuple[str, ...], minor: str) -> frozenset[Tag]:
    """All tags of wheels that a host's CPython takes."""
    from packaging.tags import compatible_tags, cpython_tags

    version = [int(part) for part in minor.split(".")]
    own = f"cp{minor.replace('.', '')}"
    return frozenset([*cpython_tags(version, [own], names), *compatible_tags(version, own, names)])
