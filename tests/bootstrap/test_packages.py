"""What an environment gets: the notebook's versions, the build that fits the machine, from indexes that answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.provision import Installation, probe, setup
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.versions import pinned, preferred
from tests.lab.shells import SMALL, ShellHost, cache, home, uv, without_pip
from tests.lab.wheels import installed, make_wheel

__all__ = ["cache", "home", "uv"]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the notebook has beside its own packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """All that the host can install."""
    return tmp_path / "links"


@pytest.fixture
def host(home: Path, index: Path) -> ShellHost:
    """A machine whose pip takes packages from `index` alone."""
    return ShellHost(home, env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)})


def wanting(*packages: str) -> Requirements:
    """An environment with these packages, and without those of ranks."""
    return replace(SMALL, packages=pinned(packages), preferences=preferred(packages))


def versions(host: ShellHost, ready: Installation, *names: str) -> dict[str, str]:
    """The versions of distributions in a host's environment."""
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    out = host.run(f'"{ready.python}" -c "{code}" {" ".join(names)}').out
    return dict(zip(names, out.split(), strict=True))


@pytest.mark.parametrize("program", ["uv", "pip"])
def test_versions_are_the_notebooks(program: str, notebook: Path, index: Path, host: ShellHost, uv: str) -> None:
    """Of what is asked for, and of what that needs; a constraint overrides, and `latest` does."""
    asked = ("sky-asked", "sky-latest>=0", "sky-bound>1", "sky-within>=1", "sky-elsewhere")
    for name in ("sky-asked", "sky-latest", "sky-bound", "sky-within", "sky-needed", "sky-elsewhere"):
        needs = ["sky-needed"] if name == "sky-asked" else []
        for version in ("1.0", "2.0"):
            make_wheel(index, name, version, needs)
        if name != "sky-elsewhere":
            installed(notebook, name, "1.0+here", needs)
    wanted, told = wanting(*asked), list[str]()
    facts: Facts = without_pip(host, wanted, uv) if program == "uv" else replace(probe(host, wanted), uv=None)
    ready = setup(host, wanted, told.append, facts)
    assert f"installing packages with {program}" in told
    assert not any("another way" in line for line in told if program == "uv" or "packages" in line)
    assert versions(
        host, ready, "sky-asked", "sky-needed", "sky-latest", "sky-bound", "sky-within", "sky-elsewhere"
    ) == {
        "sky-asked": "1.0",
        "sky-needed": "1.0",
        "sky-latest": "2.0",
        "sky-bound": "2.0",
        "sky-within": "1.0",
        "sky-elsewhere": "2.0",
    }
