"""Pools on hosts where something is short: open files, a home that cannot be written."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.hosts import loopback
from tests.lab.notebook import Notebook, opened, seen
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings

pytestmark = [pytest.mark.needs("sshd"), pytest.mark.needs("namespaces")]
POOL = f"%sky_pool --provider ssh --hosts h1 --python {sys.executable}"


@contextmanager
def beside(folder: Path, before: str) -> Iterator[Notebook]:
    """A notebook that can reach a host whose sshd starts after these commands."""
    with loopback(folder / "hosts", 1, env=pip_settings(), before=before) as hosts:
        home = home_that_knows(hosts, folder / "client", fresh=True)
        (folder / "notebook").mkdir()
        with opened(folder / "notebook", env={"HOME": str(home)}) as notebook:
            yield notebook


def test_too_few_open_files_are_reported_before_the_start(tmp_path: Path) -> None:
    with beside(tmp_path, "ulimit -n 140") as notebook:
        refused = notebook.fail(f"{POOL} --procs-per-node 2")
        assert re.search(r"2 ranks .*\bh1 .*\b144\b.*\b140\b.*\(ulimit -Hn\).* 1\b", refused.text)
        notebook.run(POOL)
        assert seen(notebook, "1") == [1]
