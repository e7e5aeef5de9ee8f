"""Hosts that reach no package index get everything from the notebook: resolved and fetched here, over its link once."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.bootstrap.builds import shortage_of, uv_platform
from skymagic.bootstrap.facts import HostFacts, PlannedWheel
from skymagic.bootstrap.messages import explain_unusable
from skymagic.bootstrap.provision import probe
from skymagic.bootstrap.requirements import Requirements, requirements_of
from skymagic.errors import HostError
from skymagic.plan.image import Image
from skymagic.providers.environment_copy import share_private_network
from skymagic.providers.ssh import Machine, set_up
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.hostlist import HostSpec
from tests.lab.distributions import Shelf
from tests.lab.golden import Golden
from tests.lab.hosts import loopback
from tests.lab.notebook import opened, seen
from tests.lab.raising import raises
from tests.lab.shells import SMALL, pip_settings

CUT_OFF = {
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    **dict.fromkeys(("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"), ""),
    **dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9"),
}
"""Environment of hosts on which every index refuses."""


COUNT_UPLOADS = """
from skymagic.ssh.process import Process
sent = {"gpu1": 0, "gpu2": 0}
def counted(self, data, write=Process.write):
    sent[self.host] += len(data)
    return write(self, data)
Process.write = counted
"""


@pytest.mark.needs("sshd")
def test_a_pool_of_hosts_without_an_index(tmp_path: Path) -> None:
    """From empty home folders; a later cell sends its package the same way. No index causes a wait, and a note explains it."""
    shelf = Shelf(tmp_path / "shelf")
    shelf.add("tiny-data", "1.2", {"tinydata.py": "version = '1.2'\n"})
    shelf.add(
        "tiny-late",
        "3.0",
        {"tinylate.py": f"late = True\nnoise = {os.urandom(4_000_000).hex()!r}\n"},
    )
    shelf.editable("tiny-own", "1.0", {"tinyown.py": "import tinydata\n"}, ["tiny-data"])
    settings = pip_settings()
    links = f"{settings.get('PIP_FIND_LINKS', '')} {shelf.links}".strip()
    with loopback(tmp_path / "hosts", 2, env=CUT_OFF, names=("gpu1", "gpu2")) as hosts:
        (tmp_path / "client/.ssh").mkdir(parents=True)
        shutil.copy(hosts.config, tmp_path / "client/.ssh/config")
        (tmp_path / "notebook").mkdir()
        env = {
            "HOME": str(tmp_path / "client"), **shelf.of_notebook, **settings, "PIP_FIND_LINKS": links,
            "PIP_CACHE_DIR": str(Path.home() / ".cache/pip"),
        }  # fmt: skip
        with opened(tmp_path / "notebook", "import tinyown", env=env) as notebook:
            start = "%sky_pool lab --provider ssh --hosts gpu1,gpu2"
            plan = notebook.run(f"{start} --dry-run").text
            assert re.search(r"\bnotebook fetches\b.*\bindex\b", " ".join(plan.split()))
            notebook.run(COUNT_UPLOADS)
            shown = notebook.run(start).said
            assert re.search("gpu1, gpu2: .*index", shown)
            assert re.search("gpu1 .*packages .*gpu2", shown)
            assert "from here" not in shown
            once, never = notebook.value("[sent['gpu1'], sent['gpu2']]")
            assert once > 5_000_000
            assert never < 500_000, "gpu2 has all of it from gpu1"
            cell = "import tinyown, tinydata\ntinydata.version"
            assert seen(notebook, f"{cell}") == ["1.2", "1.2"]
            before = notebook.value("sum(sent.values())")
            assert seen(notebook, "import tinylate\ntinylate.late") == [True, True]
            assert (
                4_000_000 < notebook.value("sum(sent.values())") - before < 6_000_000
            )  # once for both
        for host in hosts:
            assert list(host.home.glob(".skymagic/incoming/*")) == []


@pytest.mark.needs("sshd")
def test_unavailable_package_here_and_there_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CACHE_DIR", str(Path.home() / ".cache/pip"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with loopback(tmp_path / "hosts", 1, env=CUT_OFF) as hosts:
        wanted: Requirements = replace(
            requirements_of(Image()), packages=("no-such-thing-anywhere==9",)
        )
        endpoint = SshConfig(hosts.config).endpoint(HostSpec("h1", "h1"))
        connection = connect(endpoint)
        machine = Machine(endpoint, connection, probe(connection, wanted))
        with raises(HostError, "setup-packages", "no-such-thing-anywhere"):
            set_up([machine], wanted, print)
        connection.close()


HOST = HostFacts(
    system="Linux", machine="x86_64", hostname="n", home="/h", folder="/h/s", libc="glibc 2.36"
)


def test_addresses_by_which_hosts_meet() -> None:
    def facts(*addresses: str, boot: str = "") -> HostFacts:
        return replace(HOST, boot=boot, addresses=tuple(("eth0", each) for each in addresses))

    assert share_private_network([facts(boot="b"), facts(boot="b")])
    assert share_private_network([facts("10.1.0.1", boot="b"), facts("10.1.0.2", boot="b")])
    far = [facts("10.1.0.1", "192.168.7.1"), facts("192.168.7.2", "10.2.0.1")]
    assert share_private_network(far)
    assert not share_private_network([facts("127.0.0.1", "8.8.8.8", "fe80::1"), facts("10.0.0.1")])
    docker = replace(HOST, addresses=(("docker0", "172.17.0.1"),))
    assert not share_private_network([docker, docker])


def test_platform_is_one_that_uv_knows() -> None:
    assert uv_platform(HOST) == "x86_64-manylinux_2_36"
    assert uv_platform(replace(HOST, libc="glibc 2.26")) == "x86_64-manylinux_2_17"
    assert (
        uv_platform(replace(HOST, libc="musl", machine="aarch64")) == "aarch64-unknown-linux-musl"
    )
    assert uv_platform(replace(HOST, system="Darwin", machine="arm64")) == "aarch64-apple-darwin"
    assert uv_platform(replace(HOST, machine="vax")) == ""


def test_a_disk_that_will_not_hold_it(golden: Golden) -> None:
    assert shortage_of(100_000_000, replace(HOST, disk_kb=None)) == ""
    assert shortage_of(100_000_000, replace(HOST, disk_kb=500_000)) == ""
    said = shortage_of(100_000_000, replace(HOST, disk_kb=300_000))
    golden(said)
    wanted = replace(SMALL, packages=("numpy==2.4.6",))
    known = replace(HOST, planned=(PlannedWheel("numpy", "2.4.6", 200_000_000),))
    assert explain_unusable(replace(known, disk_kb=900_000), wanted) == []
    (refused,) = explain_unusable(replace(known, disk_kb=700_000), wanted)
    golden(refused)
