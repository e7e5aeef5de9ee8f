"""Values to separate machines over SSH: what crosses the client's link, and a link, a cable and a machine that fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from skymagic.content.chunks import digest
from skymagic.errors import PoolError
from tests.contracts.stores import MB, Apart, put
from tests.lab.machines import Machines, machines
from tests.lab.raising import raises
from tests.lab.waiting import at

pytestmark = pytest.mark.needs("sshd", "namespaces")

SILENCE = 4.0  # seconds after which a server is given up; a cut lasts longer
CUT = 6.0
DEAD = 3
"""Seconds after which a peer that does not answer is dead, and for which it is dialled."""
LONG_CUT = 12.0
"""A connection's keepalive has failed by then, and another one too."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("far") / "hosts", 3, rate_mbit=100, delay_ms=10) as made:
        yield made


@pytest.fixture
def peers_are_dead_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skymagic.ssh.dial.DEAD_PEER_TIMEOUT", DEAD)


class Pool(Apart):
    """A store on all machines; a machine is connected to again when its connection is dead."""

    dead_after = float(DEAD)


@pytest.fixture
def pool(hosts: Machines) -> Iterator[Pool]:
    made = Pool(hosts, silence_timeout=SILENCE)
    yield made
    made.close()


def test_the_link_is_cut_for_longer_than_a_silence(hosts: Machines, pool: Pool) -> None:
    put(pool, b"all are up")
    data = os.urandom(40 * MB)
    mended = threading.Timer(CUT, hosts.link.mend)

    def cut() -> None:
        hosts.link.cut()
        mended.start()

    try:
        key = put(pool, data, at(10 * MB, cut))
    finally:
        mended.join()
    assert pool.everywhere(key)


@pytest.mark.usefixtures("peers_are_dead_soon")
def test_a_machine_loses_its_cable_while_it_follows(hosts: Machines, pool: Pool) -> None:
    put(pool, b"all are up")
    mended = threading.Timer(LONG_CUT, hosts[1].mend)

    def cut() -> None:
        hosts[1].cut()
        mended.start()

    try:
        key = put(pool, os.urandom(20 * MB), at(5 * MB, cut))
    finally:
        mended.join()
    assert pool.everywhere(key)
    assert any(sentence.startswith("h2 ") for sentence in pool.said)


@pytest.mark.usefixtures("peers_are_dead_soon")
def test_a_machine_dies(hosts: Machines) -> None:
    pool = Pool(hosts, retry_timeout=2.0, silence_timeout=SILENCE)
    try:
        put(pool, b"all are up")
        with raises(PoolError, "node-unreached", r"node 2 \(h3\)"):
            put(pool, os.urandom(20 * MB), at(5 * MB, hosts[2].power_cut))
        pool.store.lose(2)
        pool.store.settle()
        key = put(pool, os.urandom(2 * MB))
        assert all(digest([pool.content(node, key)]) == key for node in range(2))
    finally:
        pool.close()
        hosts[2].reboot()
