"""Machines that have IPv6 addresses alone: one of them is a pool; several are refused with the reason."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.lab.machines import Machine, Machines, Space, machines
from tests.lab.notebook import opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings

pytestmark = pytest.mark.needs("sshd", "namespaces")
POOL = f"%sky_pool {{}} --provider ssh --hosts {{}} --python {sys.executable}"


def renumber(space: Space, old: str, new: str) -> None:
    """Give a machine an IPv6 address in the place of its IPv4 address."""
    space.ip("-6", "addr", "add", f"{new}/64", "dev", "eth0", "nodad")
    space.ip("addr", "del", f"{old}/24", "dev", "eth0")


def renumber_all(hosts: Machines) -> None:
    for number, host in enumerate(hosts, 1):
        assert isinstance(host, Machine)
        host.stop()
        renumber(host.space, host.address, f"fd77::{number}")
        host.address = f"fd77::{number}"
        host.start()
    renumber(hosts.link.client, hosts.link.address, "fd77::100")
    hosts.write()


def test_ipv6_alone(tmp_path: Path) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6")
    with machines(
        tmp_path / "machines", 2, env={**pip_settings(), "TMPDIR": str(scratch)}
    ) as hosts:
        renumber_all(hosts)
        home = home_that_knows(hosts, tmp_path / "client")
        (tmp_path / "notebook").mkdir()
        with opened(tmp_path / "notebook", env={"HOME": str(home)}) as notebook:
            notebook.run(POOL.format("one", "h1"))
            notebook.run("%%sky_broadcast --pool one -o seen\nimport socket\nsocket.gethostname()")
            assert notebook.value("seen") == ["h1"]
            refused = notebook.fail(POOL.format("several", "h[1-2]"))
            assert re.search(r"\bh1 .*\bIPv4\b", refused.text)
