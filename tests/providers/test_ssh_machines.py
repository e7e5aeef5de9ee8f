"""Pools on separate machines: addresses among them, partitions, power cuts, a notebook that moves or sleeps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from skymagic.wire.session.loop import HEARTBEAT_TIMEOUT
from tests.lab.machines import Machine, Machines, machines
from tests.lab.notebook import Failed, Notebook, opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings
from tests.providers.test_ssh_pools import NAMES, POOL, all_came, counting

pytestmark = pytest.mark.needs("sshd", "namespaces")
ABSENCE = 20.0
"""Seconds that a link is down for: longer than any heartbeat's patience, and than TCP's (15 s)."""
SLEEP = 2 * HEARTBEAT_TIMEOUT
"""Seconds that a notebook sleeps for: its TCP answers all the same, and the nodes' daemons hang up."""
WITH_TORCH = f"{NAMES}\nimport torch, torch.distributed as dist"
SUMS = "%%sky_broadcast -o sums\nt = torch.ones(1); dist.all_reduce(t); (float(t), globals().get('kept'))"


@contextmanager
def lab(folder: Path, count: int = 2, **wan: Any) -> Iterator[tuple[Machines, Notebook]]:
    """Machines, and a notebook on the network from which they are reached."""
    scratch = folder / "tmp"  # a machine without power does not tidy up
    scratch.mkdir()
    with machines(
        folder / "machines", count, env={**pip_settings(), "TMPDIR": str(scratch)}, **wan
    ) as hosts:
        home = home_that_knows(hosts, folder / "client")
        (folder / "notebook").mkdir()
        with opened(folder / "notebook", env={"HOME": str(home)}) as notebook:
            yield hosts, notebook


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machines, Notebook]]:
    """Two machines with a pool of four ranks."""
    with lab(tmp_path_factory.mktemp("machines")) as (hosts, notebook):
        notebook.run(f"{POOL} --plugin torch")
        notebook.run(WITH_TORCH)
        yield hosts, notebook


def counts_on(notebook: Notebook, rounds: int, happens: Callable[[], object]) -> str:
    """All ranks print so many numbers, and after some of them something happens: none is lost. What the cell says besides."""
    running = counting(notebook, rounds)
    happens()
    assert all_came(notebook, running, rounds)
    return running.stderr


def test_machines_reach_each_other_at_their_own_addresses(two: tuple[Machines, Notebook]) -> None:
    """Their hostnames resolve to 127.0.1.1, and the notebook uses another address."""
    _, notebook = two
    notebook.run(
        "%%sky_broadcast -o found\n"
        "import skymagic as sky\n"
        "info = sky.instance_info()\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'], info.head_addr, [p.addr for p in info.peers], info.hostname, float(total))"
    )
    peers = ["10.77.0.1", "10.77.0.2"]
    assert notebook.value("found") == [
        ("10.77.0.1", "eth0", "10.77.0.1", peers, host, 4.0) for host in ("h1", "h1", "h2", "h2")
    ]


def test_nothing_listens_everywhere(two: tuple[Machines, Notebook]) -> None:
    """Services listen on the cluster's address or on loopback; a machine may have public addresses as well."""
    hosts, notebook = two
    notebook.run("%%sky_broadcast\ndist.barrier()")
    for host in hosts:
        assert isinstance(host, Machine)
        shown = subprocess.run(
            [*host.space.enter, "ss", "-ltnH"], capture_output=True, text=True, check=True
        )
        places = [line.split()[3] for line in shown.stdout.splitlines()]
        assert places
        assert [
            place for place in places if not place.startswith(("127.", f"{host.address}:", "[::1]"))
        ] == []


def test_values_go_from_node_to_node(two: tuple[Machines, Notebook]) -> None:
    """The notebook sends a value once."""
    hosts, notebook = two
    notebook.run("import numpy\nbig = numpy.random.default_rng(0).random(4_000_000)")
    before, _ = hosts.link.traffic()
    notebook.run("%%sky_broadcast -o sums\nfloat(big.sum())")
    sent = hosts.link.traffic()[0] - before
    assert sent < 1.1 * 32_000_000
    assert notebook.value("set(sums) == {float(big.sum())}")
    before, _ = hosts.link.traffic()
    notebook.run("%%sky_broadcast\nbig[0]")
    assert hosts.link.traffic()[0] - before < 100_000


def test_a_link_that_is_down_for_a_while(two: tuple[Machines, Notebook]) -> None:
    hosts, notebook = two

    def cut() -> None:
        hosts.link.cut()
        threading.Timer(ABSENCE, hosts.link.mend).start()

    said = counts_on(notebook, 130, cut)
    assert "connection lost" in said
    assert "connected again" in said


def test_a_notebook_that_gets_another_address(two: tuple[Machines, Notebook]) -> None:
    hosts, notebook = two
    counts_on(notebook, 70, hosts.link.move)


def test_a_notebook_that_sleeps(two: tuple[Machines, Notebook]) -> None:
    _, notebook = two

    def sleep() -> None:
        os.kill(notebook.pid, signal.SIGSTOP)
        threading.Timer(SLEEP, os.kill, (notebook.pid, signal.SIGCONT)).start()

    counts_on(notebook, 40, sleep)


def lost_with(notebook: Notebook, error: Failed) -> str:
    """The host of the rank that died because its machine does not answer."""
    assert error.ename == "RankDied", error.text
    assert "answer" in error.text, "and not by a signal"
    return str(notebook.fields()["host"])


def test_a_machine_that_loses_its_power(two: tuple[Machines, Notebook]) -> None:
    hosts, notebook = two
    notebook.run("%%sky_broadcast\nkept = rank * 10")
    running = notebook.start(
        "%%sky_broadcast\nprint('begun', flush=True)\ndist.barrier() if rank < 2 else time.sleep(1000)"
    )
    notebook.watch(running, lambda shown: "begun" in shown.text)
    hosts[1].power_cut()
    error = notebook.finish(running).failure
    assert lost_with(notebook, error) == "h2"
    gone, keep, again = notebook.fail("%%sky_broadcast\n1", "ranks-lost").evalue.splitlines()
    assert re.match(r"ranks 2, 3 .*\(h2 .*, neither here nor to the other", gone)
    assert re.match(r"ranks 0, 1 .*\(-t 0,1 ", keep)
    assert re.fullmatch("%sky_restart .*, %sky_down .*", again)
    notebook.run("%%sky_broadcast -t 0,1 -o there\nkept")
    assert notebook.value("there") == [0, 10]
    assert "gone" in notebook.run("%sky_status").said
    hosts[1].reboot()
    notebook.run("%sky_restart --rank 2,3")
    notebook.run(WITH_TORCH)
    notebook.run(SUMS)
    assert notebook.value("sums") == [(4.0, 0), (4.0, 10), (4.0, None), (4.0, None)]


def test_the_first_machine_loses_its_power(two: tuple[Machines, Notebook]) -> None:
    """If it does not return, the user gets a message."""
    hosts, notebook = two
    notebook.run("%%sky_broadcast\nkept = 10 * int(__import__('os').environ['RANK'])")
    hosts[0].power_cut()
    failure = notebook.fail("%%sky_broadcast\nimport time\ntime.sleep(60)")
    assert "%sky_restart" in failure.text
    notebook.run("%%sky_broadcast -t 2,3 -o there\nkept")
    assert notebook.value("there") == [20, 30]
    notebook.run(
        "from skymagic.cluster import agents\npatience, agents.REVIVE_TIMEOUT = agents.REVIVE_TIMEOUT, 2.0"
    )
    assert re.search(r"\bh1 .*\b2 s\b", notebook.fail("%sky_restart").text)
    notebook.run("agents.REVIVE_TIMEOUT = patience")
    assert "degraded" in notebook.run("%sky_status").said
    hosts[0].reboot()
    notebook.run("%sky_restart --rank 0,1")
    notebook.run(WITH_TORCH)
    notebook.run(SUMS)
    assert notebook.value("sums") == [(4.0, None), (4.0, None), (4.0, 20), (4.0, 30)]


def test_a_machine_that_dies_after_attaching(two: tuple[Machines, Notebook]) -> None:
    """The attached notebook was absent when the nodes connected, and has not seen the restarted agents."""
    hosts, notebook = two
    notebook.restart()
    notebook.run("%load_ext skymagic\n%sky_attach lab")
    for _ in range(2):
        running = notebook.start(
            "%%sky_broadcast\nimport time\nprint('begun', flush=True)\ntime.sleep(1000)"
        )
        notebook.watch(running, lambda shown: "begun" in shown.text)
        hosts[1].power_cut()
        assert lost_with(notebook, notebook.finish(running).failure) == "h2"
        hosts[1].reboot()
        notebook.run("%sky_restart")
        notebook.run("%%sky_broadcast -o ranks\nint(__import__('os').environ['RANK'])")
        assert notebook.value("ranks") == [0, 1, 2, 3]


def test_machine_returns_after_a_network_cut(two: tuple[Machines, Notebook]) -> None:
    """It had been given up; its old processes make room for new ranks."""
    hosts, notebook = two
    notebook.run("%%sky_broadcast\nkept = 1")
    hosts[1].cut()
    error = notebook.fail("%%sky_broadcast\nimport time\ntime.sleep(60)")
    assert lost_with(notebook, error) == "h2"
    hosts[1].mend()
    notebook.run("%sky_restart --rank 2,3")
    notebook.run("%%sky_broadcast -o kept\nglobals().get('kept')")
    assert notebook.value("kept") == [1, 1, None, None]


def test_a_restart_amid_a_cut_fails_in_words_and_one_after_it_mends(
    two: tuple[Machines, Notebook],
) -> None:
    hosts, notebook = two
    notebook.run("%%sky_broadcast\nheld = 1")
    hosts[1].cut()
    error = notebook.fail("%%sky_broadcast\nimport time\ntime.sleep(60)")
    assert lost_with(notebook, error) == "h2"
    notebook.run(
        "from skymagic.cluster import agents\npatience, agents.REVIVE_TIMEOUT = agents.REVIVE_TIMEOUT, 2.0"
    )
    for line in ("%sky_restart", "%sky_restart --rank 2,3", "%sky_restart"):
        refused = notebook.fail(line)
        assert re.search(r"\bh2 .*\b2 s\b", refused.text)
        assert "another notebook" not in refused.text
        assert "Traceback" not in refused.text
        notebook.run("%%sky_broadcast -t 0,1 -o there\nheld")
        assert notebook.value("there") == [1, 1]
    notebook.run("agents.REVIVE_TIMEOUT = patience")
    hosts[1].mend()
    notebook.run("%sky_restart --rank 2,3")
    notebook.run("%%sky_broadcast -o seen\nglobals().get('held')")
    assert notebook.value("seen") == [1, 1, None, None]
    assert re.search(r"pool 'lab' is down", notebook.run("%sky_down").text)
    gone, alive = psutil.wait_procs(hosts[1].processes(), timeout=20)
    assert alive == []
    notebook.run(f"{POOL} --plugin torch")


def test_a_pool_that_ends_while_a_machine_is_cut_off(two: tuple[Machines, Notebook]) -> None:
    """It is notified when it returns, even after a restart that did not reach it."""
    hosts, notebook = two
    hosts[1].cut()
    error = notebook.fail("%%sky_broadcast\nimport time\ntime.sleep(60)")
    assert lost_with(notebook, error) == "h2"
    notebook.run(
        "from skymagic.cluster import agents\npatience, agents.REVIVE_TIMEOUT = agents.REVIVE_TIMEOUT, 2.0"
    )
    assert re.search(r"\bh2 .*\b2 s\b", notebook.fail("%sky_restart").text)
    notebook.run("agents.REVIVE_TIMEOUT = patience")
    assert re.search(r"\bh2 could not\b", notebook.run("%sky_down").text)
    assert hosts[1].processes()
    hosts[1].mend()
    gone, alive = psutil.wait_procs(hosts[1].processes(), timeout=40)
    assert alive == []
    notebook.run(f"{POOL} --plugin torch")


def test_a_machine_that_is_cut_off(two: tuple[Machines, Notebook]) -> None:
    """Neither the notebook nor the other machine reaches it; its processes end by themselves."""
    hosts, notebook = two
    notebook.run("%sky_down")
    notebook.run(f"{POOL} --idle 15s")  # a busy machine may take seconds from its start to the cell
    notebook.run(NAMES)
    running = notebook.start(
        "%%sky_broadcast\nprint('begun', flush=True)\ntime.sleep(1000 if rank < 2 else 8)"
    )
    notebook.watch(running, lambda shown: "begun" in shown.text)
    hosts[1].cut()
    error = notebook.finish(running).failure
    assert lost_with(notebook, error) == "h2"
    assert re.search(r"\bh2 could not\b", notebook.run("%sky_down").text)
    hosts[1].mend()
    psutil.wait_procs(hosts[1].processes(), timeout=60)
