"""Promise 11: a node gets the notebook's packages in the same versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.hosts import loopback
from tests.lab.notebook import opened
from tests.lab.places import home_that_knows
from tests.lab.wheels import installed, make_wheel

pytestmark = pytest.mark.needs("sshd")


def test_the_notebooks_version_is_planned_and_not_the_newest(tmp_path: Path) -> None:
    wheels, packages = tmp_path / "wheels", tmp_path / "packages"
    for version in ("1.0", "2.0"):
        make_wheel(wheels, "sky-more", version)
    installed(packages, "sky-more", "1.0")
    index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    with loopback(tmp_path / "hosts", env=index) as hosts:
        home = home_that_knows(hosts, tmp_path / "client", fresh=True)
        with opened(tmp_path / "client", env={"HOME": str(home)}) as notebook:
            notebook.run(f"import sys; sys.path.insert(0, {str(packages)!r})")
            options = "--provider ssh --hosts h1 --pip sky-more"
            assert "sky-more 1.0" in notebook.run(f"%sky_pool planned {options} --dry-run").said
