"""A plan for hosts over SSH says what will be installed there, and asks before it is more than the hosts can use."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from skymagic.bootstrap.requirements import RANK_DEPENDENCIES
from tests.lab.hosts import loopback
from tests.lab.notebook import opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings
from tests.lab.wheels import installed, make_wheel

pytestmark = pytest.mark.needs("sshd")
POOL = "%sky_pool lab --provider ssh --hosts h1 --plugin torch --pip sky-more"


def test_installs_are_listed_before_anything_happens(tmp_path: Path) -> None:
    links, site = tmp_path / "links", tmp_path / "site"
    make_wheel(links, "sky-more", "1.0", ["sky-needed"])
    make_wheel(links, "sky-needed", "3.0")
    for name, number in (("sky-more", "1.0"), ("sky-needed", "3.0"), ("torch", "2.13.0+cpu")):
        installed(site, name, number, ["sky-needed"] if name == "sky-more" else ())
    make_wheel(links, "nvidia-libs", "13.0")
    make_wheel(links, "torch", "2.13.0", ["nvidia-libs"])
    for name in (*RANK_DEPENDENCIES, "numpy"):
        make_wheel(links, name, version(name))
    settings = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)}
    with loopback(tmp_path / "hosts", env=settings) as hosts:
        home = home_that_knows(hosts, tmp_path / "client", fresh=True)
        with opened(tmp_path / "client", env={"HOME": str(home), **settings}) as notebook:
            notebook.run(f"import sys; sys.path.insert(0, {str(site)!r})")
            plan = notebook.run(f"{POOL} --dry-run").text
            size = (links / "sky_more-1.0-py3-none-any.whl").stat().st_size
            assert f"sky-more 1.0, {size} bytes, from {links}\n" in plan
            assert "sky-needed 3.0" in plan
            question = (
                "h1 has no GPU, and the package indexes have only a build for CUDA of torch 2.13.0"
            )
            assert (
                f"{question} ({(links / 'torch-2.13.0-py3-none-any.whl').stat().st_size} bytes"
                in plan
            )
            assert "torch 2.13.0, CUDA build, " in plan
            assert question in notebook.fail(POOL).text
            assert list(hosts[0].home.iterdir()) == []
            assert "add -y" not in notebook.run(f"{POOL} --dry-run -y").text
            make_wheel(links, "torch", "2.13.0+cpu")
            plan = notebook.run(f"{POOL} --dry-run").text
            assert "torch 2.13.0+cpu, CPU build, " in plan
            assert "add -y" not in plan


def test_equal_hosts_share_the_lines_of_a_plan(tmp_path: Path) -> None:
    links = tmp_path / "links"
    for number in range(8):
        make_wheel(links, f"sky-needed-{number}", "3.0")
    make_wheel(links, "sky-more", "1.0", [f"sky-needed-{number}" for number in range(8)])
    site = tmp_path / "site"
    installed(site, "sky-more", "1.0", [f"sky-needed-{number}" for number in range(8)])
    for number in range(8):
        installed(site, f"sky-needed-{number}", "3.0")
    settings = {**pip_settings(), "PIP_FIND_LINKS": str(links)}
    with loopback(tmp_path / "hosts", 2, env=settings) as hosts:
        home = home_that_knows(hosts, tmp_path / "client", fresh=True)
        with opened(tmp_path / "client", env={"HOME": str(home), **settings}) as notebook:
            notebook.run(f"import sys; sys.path.insert(0, {str(site)!r})")
            plan = notebook.run(
                "%sky_pool lab --provider ssh --hosts h1,h2 --pip sky-more --dry-run"
            ).text
    assert plan.count("sky-more 1.0, ") == 1, plan
    assert plan.count(" need (") == 1, plan
    assert re.search(r"need \(.*\): (\S+ \S+(, )?){5} and \d+ more$", plan, re.M), plan


def test_a_python_that_hosts_lack_and_cannot_fetch(tmp_path: Path) -> None:
    """The error names all such hosts with their Pythons and the remedy, before anything starts on the others."""
    env = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "UV_PYTHON_INSTALL_MIRROR": "http://127.0.0.1:9/",
    }
    with loopback(tmp_path / "hosts", 3, env=env) as hosts:
        home = home_that_knows(hosts, tmp_path / "client", fresh=True)
        other = hosts[0].home / ".local/bin/python3.99"
        other.parent.mkdir(parents=True)
        other.write_text("#!/bin/sh\necho 3.99 $0\n")
        other.chmod(0o700)
        with opened(tmp_path / "client", env={"HOME": str(home)}) as notebook:
            start = "%sky_pool lab --provider ssh --hosts h1,h2,h3 --python 3.99"
            plan = notebook.run(f"{start} --dry-run").text
            assert re.search(r"Python 3\.99 is made .*\bh1; h2, h3 cannot\b", plan), plan
            assert re.search(r"h2, h3 cannot\b.*: .*Python 3\.99, has /", plan)
            said = " ".join(notebook.fail(start, "setup").text.split())
            assert notebook.fields()["names"] == ("h2", "h3")
            assert f"python{sys.version_info[0]}" in said
            assert re.search(r"\(127\.0\.0\.1\): install Python 3\.99\b", said)
            assert "h1: " not in said
        assert [[path.name for path in host.home.iterdir()] for host in hosts] == [
            [".local"],
            [],
            [],
        ]


SLOW_RELAY = """\
import os, pathlib, socket, sys, threading, time
while not pathlib.Path(sys.argv[3]).exists():
    time.sleep(0.05)
sock = socket.create_connection((sys.argv[1], int(sys.argv[2])))
threading.Thread(target=lambda: [os.write(1, data) for data in iter(lambda: sock.recv(65536), b"")], daemon=True).start()
for data in iter(lambda: os.read(0, 65536), b""):
    sock.sendall(data)
"""


@pytest.mark.parametrize("more", ["", " --dry-run", " --lazy"])
def test_hosts_are_named_before_they_answer(tmp_path: Path, more: str) -> None:
    """The hosts answer only once the line has been read."""
    gate, relay = tmp_path / "gate", tmp_path / "relay"
    relay.write_text(SLOW_RELAY)
    with loopback(tmp_path / "hosts", 7) as hosts:
        home = home_that_knows(hosts, tmp_path / "client")
        config = home / ".ssh" / "config"
        slow = f"Host h*\n  ProxyCommand {sys.executable} {relay} %h %p {gate}\n"
        config.write_text(slow + config.read_text())
        pool = (
            f"%sky_pool lab --provider ssh --hosts h[1-7] --python {sys.executable} --detach{more}"
        )
        with opened(tmp_path / "client", env={"HOME": str(home)}) as notebook:
            start = notebook.start(pool)
            line = "connecting to h1, h2, h3, h4, h5 and 2 other hosts …\n"
            notebook.watch(start, lambda shown: line in shown.text)
            gate.touch()
            notebook.finish(start)
            assert start.error is None, start.error
            if more:
                return
            notebook.restart()
            gate.unlink()
            notebook.run("%load_ext skymagic")
            attach = notebook.start("%sky_attach lab")
            notebook.watch(attach, lambda shown: line in shown.text)
            gate.touch()
            notebook.finish(attach)
            assert attach.error is None, attach.error
            notebook.run("%sky_down lab")
