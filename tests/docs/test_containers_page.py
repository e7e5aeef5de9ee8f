"""docs/how-to/containers.md shows a session with podman: its cells run in order on a host with a real image."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_readme import examples, follow
from tests.lab.containers import installable, root_file_system, storage
from tests.lab.hosts import loopback
from tests.lab.notebook import ROOT, opened
from tests.lab.places import home_that_knows
from tests.lab.waiting import until

PAGE = ROOT / "docs" / "how-to" / "containers.md"


@pytest.mark.needs("sshd", "podman")
def test_a_session_with_podman(tmp_path: Path) -> None:
    image = root_file_system(tmp_path / "science")
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("/images/science", f"podman:{image}"))
    (tmp_path / "podman").mkdir()
    with storage(tmp_path / "podman") as podman:
        settings = {**podman, **installable(tmp_path / "wheels")}
        with loopback(tmp_path / "hosts", env=settings, names=("gpu1",)) as hosts:
            (hosts[0].home / "data.txt").write_text("a file of the host")
            home = home_that_knows(hosts, tmp_path / "client")
            with opened(tmp_path / "client", env={"HOME": str(home)}) as notebook:
                for example in examples(page):
                    follow(notebook, example)
                # podman removes the container
                until(lambda: not hosts[0].processes())
