"""The pools that scripts are tested on: two nodes with two ranks each, here, on hosts, and on separate machines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.hosts import Hosts, loopback, share_code
from tests.lab.machines import machines
from tests.lab.notebook import Notebook, opened
from tests.lab.shells import pip_settings

SHAPE = "--procs-per-node 2 --env FROM_POOL=1"
ON_HOSTS = f"%sky_pool --provider ssh --hosts h[1-2] {SHAPE} --python {sys.executable}"
LOCAL = f"%sky_pool --nodes 2 {SHAPE}"
PLACES = ["local", pytest.param("ssh", marks=pytest.mark.needs("sshd"))]
"""For a fixture's `params`; hosts share this machine's processes and addresses."""


@contextmanager
def pooled(place: str, folder: Path, env: Mapping[str, str] | None = None) -> Iterator[Notebook]:
    """A notebook with such a pool.

    Args:
        place: "local", "ssh" or "machines".
        folder: an empty folder, for all of it.
        env: what the notebook's environment has besides.
    """
    (folder / "notebook").mkdir(parents=True)
    if place == "local":
        with opened(folder / "notebook", LOCAL, env=dict(env or {})) as notebook:
            yield notebook
        return
    with (loopback if place == "ssh" else machines)(
        folder / "hosts", 2, env=pip_settings()
    ) as hosts:
        settings = {"HOME": str(home_that_knows(hosts, folder / "client")), **(env or {})}
        with opened(folder / "notebook", ON_HOSTS, env=settings) as notebook:
            yield notebook
            # Jupyter kills a kernel that takes long to end, and the hosts' daemons would wait for another
            notebook.run("%sky_down --all")


def home_that_knows(hosts: Hosts, home: Path, *, fresh: bool = False) -> Path:
    """A HOME whose ssh configuration knows the hosts.

    Args:
        fresh: whether nothing may lie on the hosts; else they have skymagic's code, once the first one of this process has.
    """
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text(hosts.config.read_text())
    for host in () if fresh else hosts:
        share_code(host.home)
    return home
