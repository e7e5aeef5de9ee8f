"""Ctrl-C in every phase of a pool's start on hosts, and at its end: nothing is left on any of them, and the next start works."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lab.hosts import Hosts
from tests.lab.notebook import Notebook
from tests.providers.test_ssh_pools import lab

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool lab --provider ssh --hosts h[1-2] --python {sys.executable}"
PHASES = {
    "connecting": "skymagic.ssh.connecting:connect_all",
    "looking at the hosts": "skymagic.providers.ssh:probe",
    "setting them up": "skymagic.providers.ssh:setup",
    "starting agents": "skymagic.cluster:Agents.start",
    "finding addresses": "skymagic.cluster:Agents.meet",
    "waiting for the controller": "skymagic.cluster:Agents.wait_controller",
    "connecting to it": "skymagic.run.engine:RankEngine.__init__",
    "opening value servers": "skymagic.pool.resources:open_store",
    "waiting for ranks": "skymagic.cluster:Agents.wait_ready",
    "binding engines": "skymagic.run.engine:RankEngine.bind",
}
PRESS = """
import functools, importlib, os, signal, threading
def press_in(place, after):
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)
    def pressed(*args, **kwargs):
        setattr(owner, name, original)
        press = lambda: os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(after, press).start() if after else press()
        return original(*args, **kwargs)
    setattr(owner, name, pressed)
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Hosts, Notebook]]:
    """Two hosts, and a notebook that has had a pool on them: skymagic's code is there, and all modules are loaded."""
    with lab(tmp_path_factory.mktemp("ssh")) as (hosts, notebook):
        notebook.run(POOL)
        notebook.run("%sky_down")
        notebook.run(PRESS)
        yield hosts, notebook


def nothing_runs(hosts: Hosts) -> bool:
    """Whether all that the hosts ran ends by itself."""
    running = [process for host in hosts for process in host.processes()]
    psutil.wait_procs(running, timeout=20)
    return not [process.cmdline() for host in hosts for process in host.processes()]


@pytest.mark.parametrize("after", [0, 0.05], ids=["at once", "amid it"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_start_is_interrupted(phase: str, after: float, two: tuple[Hosts, Notebook]) -> None:
    hosts, notebook = two
    notebook.run(f"press_in({PHASES[phase]!r}, {after})")
    shown = notebook.finish(notebook.start(POOL))
    if shown.error is None:  # the phase may be over within 50 ms, and with it the start
        assert after
        notebook.run("%sky_down")
    else:
        assert shown.error.ename == "KeyboardInterrupt", shown.text
        assert "no pool" in notebook.run("%sky_status").text.lower()
    assert nothing_runs(hosts)


def test_the_end_is_interrupted_after_all_that(two: tuple[Hosts, Notebook]) -> None:
    hosts, notebook = two
    notebook.run(POOL)
    assert notebook.run("%%sky_broadcast --only all\nprint('here')").text.count("here") == 2
    notebook.run("press_in('skymagic.cluster:Agents.close', 0.05)")
    for _ in range(
        2
    ):  # there may be no pool any more; a press that meets ipykernel at a cell's end costs the cell its reply
        notebook.watch(notebook.start("%sky_down"), lambda shown: shown.done)
    assert nothing_runs(hosts)


def test_an_environment_that_is_being_made(tmp_path: Path) -> None:
    """The press comes while packages are installed; what was half made is not taken for an environment afterwards."""
    pool = "%sky_pool lab --provider ssh --hosts h1"
    with lab(tmp_path, 1) as (hosts, notebook):
        starting = notebook.start(pool)
        notebook.watch(starting, lambda shown: "installing packages" in shown.said)
        notebook.interrupt()
        error = notebook.finish(starting).failure
        assert error.ename == "KeyboardInterrupt"
        assert nothing_runs(hosts)
        assert list(hosts[0].home.glob(".skymagic/env/*/.ready")) == []
        notebook.run(pool)
        assert notebook.run("%%sky_broadcast\nprint('here')").text == "here\n"
