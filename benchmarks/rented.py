"""Pools on rented machines: what skymagic itself adds to a start, and how soon another kernel goes on with one that runs.

An imitation of EC2 (moto) answers at once, and its machines are sshd's on loopback addresses that are up when they are rented; the
interpreter is there, so that no package is installed. The time in the imitation is taken off. What is left is skymagic's own: choosing,
launching, connecting, copying its code, checking the machines, agents, ranks; on one machine's cores, where it has four.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.figures import Figure, say, timed
from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, REGION, Answer, Call, CarryOut, Rule, any_call, ec2
from tests.lab.ec2_prices import EC2Market
from tests.lab.instances import Machines, booting
from tests.lab.notebook import Notebook, opened

NODES = 4
ROUNDS = 3
POOL = f"%sky_pool lab --provider aws --region {REGION} --nodes {NODES} --python {sys.executable}"


def figures() -> Iterator[Figure]:
    """The same pool, started, left by a kernel that is killed, and found again by another one."""
    starts: list[float] = []
    again: list[float] = []
    with (
        tempfile.TemporaryDirectory() as text,
        ec2() as cloud,
        booting(cloud, Path(text) / "machines") as machines,
    ):
        EC2Market(cloud, {"m6a.large": 0.0864})
        for number in range(ROUNDS):
            say(f"{NODES} rented machines, {number + 1} of {ROUNDS}")
            with kernel(machines, Path(text) / f"first-{number}") as notebook:
                notebook.run(f"{POOL} --dry-run")  # what EC2 offers is known for a day
                with answering(cloud) as spent:
                    whole = timed(lambda: notebook.run(f"{POOL} -y"))
                starts.append(whole - sum(spent))
                notebook.run("%%sky_broadcast\nkept = 1")
                os.kill(notebook.pid, signal.SIGKILL)
            with kernel(machines, Path(text) / f"second-{number}") as notebook:
                again.append(
                    timed(
                        lambda: (notebook.run(POOL), notebook.run("%%sky_broadcast -o found\nkept"))
                    )
                )
                assert notebook.value("found") == [1] * NODES
                notebook.run("%sky_down")
            assert lab.left() == {}
    yield Figure(
        f"rented, {NODES} nodes: start without EC2 and packages",
        statistics.median(starts),
        "s",
        limit=5.0,
    )
    yield Figure(
        "rented: found again by another kernel, first cell",
        statistics.median(again),
        "s",
        limit=3.0,
    )


@contextmanager
def answering(cloud: EC2) -> Iterator[list[float]]:
    """How long each call took that was answered in the block."""
    spent: list[float] = []

    def effect(call: Call, carry_out: CarryOut) -> Answer:
        rule.when = lambda other: False  # the rules behind this one are to be looked at, too
        begun = time.perf_counter()
        try:
            return cloud._effect(call)(call, carry_out)
        finally:
            spent.append(time.perf_counter() - begun)
            rule.when = any_call

    rule = Rule("*", effect, 1 << 30, any_call)
    cloud._rules.insert(0, rule)
    try:
        yield spent
    finally:
        cloud._rules.remove(rule)


@contextmanager
def kernel(machines: Machines, folder: Path) -> Iterator[Notebook]:
    """A notebook of one user, whose home stays."""
    folder.mkdir()
    home = {"HOME": str(machines.folder), "XDG_STATE_HOME": str(machines.folder / "state")}
    settings = {
        "subnet": machines.subnet, "use_private_ips": True, "ssh_port": machines.port, "user": machines.user,
        "endpoint_url": machines.cloud.url,
    }  # fmt: skip
    with opened(folder, env={**lab.environment(), **home}) as notebook:
        notebook.run(f"%config SkyMagic.aws = {settings!r}")
        yield notebook
