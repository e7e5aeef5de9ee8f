"""Ctrl-C in every phase of a pool's start on hosts, and at its end: nothing is left on any of them, and the next start works."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.lab.hosts import Hosts
from tests.lab.notebook import Notebook
from tests.providers.test_ssh_pools import lab

pytestmark = pytest.mark.needs("sshd")
POOL = f"%sky_pool lab --provider ssh --hosts h[1-2] --python {sys.executable}"
ON_ONE = POOL.replace("h[1-2]", "h1")
PHASES = {
    "connecting": ("skymagic.ssh.connecting:connect_all", POOL),
    "looking at the hosts": ("skymagic.providers.ssh:probe", POOL),
    "setting them up": ("skymagic.providers.ssh:setup", POOL),
    "starting agents": ("skymagic.cluster:Agents.start", POOL),
    "finding addresses": ("skymagic.cluster:Agents.find_addresses", POOL),
    "opening value servers": ("skymagic.pool.resources:open_store", ON_ONE),
    "waiting for ranks": ("skymagic.cluster:Agents.wait_ready", POOL),
}
"""What is called in each phase, and the pool that starts; two hosts where several are waited for."""
PRESS = """
import functools, importlib, os, signal, threading
timers = []
def press_in(place, after, press=signal.SIGINT):
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)
    # names of the notebook are gone when its kernel ends
    kill, timer = functools.partial(os.kill, os.getpid(), press), threading.Timer
    def pressed(*args, **kwargs):
        setattr(owner, name, original)
        if after:
            timers.append(timer(after, kill))
            timers[-1].start()
        else:
            kill()
        return original(*args, **kwargs)
    setattr(owner, name, pressed)
"""
WAIT_FOR_PRESS = """
try:
    for timer in timers: timer.join()
except KeyboardInterrupt:
    pass
timers.clear()
"""
"""On a busy machine a press may come after the cell that it was meant for, and would hit the next one."""


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
    place, pool = PHASES[phase]
    notebook.run(f"press_in({place!r}, {after})")
    shown = notebook.finish(notebook.start(pool))
    notebook.run(WAIT_FOR_PRESS)
    if shown.error is None:  # the phase may be over within 50 ms, and with it the start
        assert after
        notebook.run("%sky_down")
    else:
        assert shown.error.ename == "KeyboardInterrupt", shown.text
        assert "no pool" in notebook.run("%sky_status").text.lower()
    assert nothing_runs(hosts)


def test_an_environment_that_is_being_made(two: tuple[Hosts, Notebook]) -> None:
    """Stopped during the installation: the incomplete environment is not used later."""
    hosts, notebook = two
    starting = notebook.start("%sky_pool lab --provider ssh --hosts h1")
    notebook.watch(starting, lambda shown: "installing packages" in shown.said)
    notebook.interrupt()
    assert notebook.finish(starting).failure.ename == "KeyboardInterrupt"
    assert nothing_runs(hosts)
    assert list(hosts[0].home.glob(".skymagic/env/*/.ready")) == []


def test_the_end_is_interrupted_after_all_that(two: tuple[Hosts, Notebook]) -> None:
    hosts, notebook = two
    notebook.run(POOL)
    assert notebook.run("%%sky_broadcast --only all\nprint('here')").text.count("here") == 2
    notebook.run("press_in('skymagic.cluster:Agents.close', 0.05)")
    for _ in range(2):
        # there may be no pool any more; a press that meets ipykernel at a cell's end costs the cell its reply
        notebook.watch(notebook.start("%sky_down"), lambda shown: shown.done)
    notebook.run(WAIT_FOR_PRESS)
    assert nothing_runs(hosts)


def test_closed_notebook_killed_by_jupyter_leaves_nothing(
    two: tuple[Hosts, Notebook],
) -> None:
    """SIGTERM follows 2.5 s after the shutdown request, here before the agents are notified. The last test: it ends the shared notebook."""
    hosts, notebook = two
    notebook.run(POOL)
    notebook.run("press_in('skymagic.cluster:Agents.close', 0, signal.SIGTERM)")
    assert all(host.processes() for host in hosts)
    notebook.close()
    assert nothing_runs(hosts)
