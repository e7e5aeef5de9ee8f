"""What several nodes lack leaves here once: real transfer servers and value servers stand for the nodes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skymagic.cluster import Node
from skymagic.content.chunks import digest
from skymagic.content.files import upload
from skymagic.content.files.copy import Files
from skymagic.content.files.upload import DataPlane
from skymagic.errors import FilesError
from skymagic.providers.local import ChildTransport
from skymagic.wire.codec import Transport
from tests.contracts.stores import MB, Cluster, Counted, put
from tests.lab.nodes import node_of, start
from tests.lab.raising import raises

COUNT = 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(COUNT)
    put(made, b"all are up")
    yield made
    made.close()


class Cut(Counted):
    """One whose server sees the end of its input when it breaks."""

    def write(self, data: bytes | memoryview) -> None:
        """To the server."""
        if self.sent + self.got > self.breaks:
            self.close()
        super().write(data)


class Nodes:
    """Nodes with a folder each.

    Attributes:
        lines: of what was copied last, by node.
        breaks: bytes after which the next ones break.
    """

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.here = folder / "here"
        self.here.mkdir()
        self.roots = [folder / f"node{number}" for number in range(COUNT)]
        self.cluster = cluster
        self.lines: dict[int, Counted] = {}
        self.breaks: dict[int, float] = {}
        cluster.store.drop(cluster.store.keys())
        plane = DataPlane(cluster.store, lambda node: cluster.folders[node.index])
        nodes = [self._node(number, root) for number, root in enumerate(self.roots)]
        self.files, self.without_plane = Files(nodes, start, plane), Files(nodes, start)

    def _node(self, number: int, root: Path) -> Node:
        root.mkdir()

        def opened() -> Transport:
            words = [sys.executable, "-m", "skymagic.kernels.transfer_server", str(root)]
            self.lines[number] = Cut(ChildTransport(words), self.breaks.get(number, float("inf")))
            return self.lines[number]

        return node_of(number, f"host{number}", opened)

    def put(
        self, name: str, stop: Callable[[str, int, int], None] = lambda name, done, total: None
    ) -> int:
        """Put what is here on all nodes; how many bytes have left."""
        before = sum(self.cluster.sent())
        self.files.put(f"{self.here}/{name}", "there/", progress=stop)
        return sum(self.cluster.sent()) - before + sum(line.sent for line in self.lines.values())

    def everywhere(self, name: str) -> bool:
        """Whether all nodes have what is here."""
        wanted = {path.name: digest([path.read_bytes()]) for path in (self.here / name).iterdir()}
        found = [
            {
                path.name: digest([path.read_bytes()])
                for path in (root / "there" / name).glob("[!.]*")
            }
            for root in self.roots
        ]
        return found == [wanted] * COUNT

    def stored(self) -> int:
        """Files in the nodes' stores."""
        put(self.cluster, b"last")  # what was said before is done by now
        return max(len(self.cluster.files(number)) for number in range(COUNT))


@pytest.fixture
def nodes(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr(upload, "BATCH_BYTES", 3 * MB)
    return Nodes(tmp_path, cluster)


def fill(folder: Path, sizes: list[int]) -> int:
    """Files of these sizes; the bytes of all."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        (folder / str(number)).write_bytes(os.urandom(size))
    return sum(sizes)


def test_files_leave_once_for_all_nodes(nodes: Nodes) -> None:
    nbytes = fill(nodes.here / "d", [20 * MB, 0, *range(1, 300), MB, 7 * MB + 1])
    assert nodes.put("d") < 1.02 * nbytes + 20_000
    assert nodes.everywhere("d")
    assert nodes.stored() == 1
    assert nodes.put("d") < 100_000


def test_many_files_are_compared_once_for_all_nodes(nodes: Nodes) -> None:
    fill(nodes.here / "d", [1] * 1500)
    shared = nodes.here.parent / "shared"
    (shared / "d").mkdir(parents=True)  # one path on all nodes, as in homes of one name
    nodes.files.put(nodes.here / "d", f"{shared}/")
    before = sum(nodes.cluster.sent())
    nodes.files.put(nodes.here / "d", f"{shared}/")
    assert 5_000 < sum(nodes.cluster.sent()) - before < 40_000
    assert sum(line.sent for line in nodes.lines.values()) < 3000
    assert len(list((shared / "d").iterdir())) == 1500
    assert nodes.stored() == 1


def test_equal_batches(nodes: Nodes) -> None:
    fill(nodes.here / "d", [])
    (nodes.here / "d/zeros").write_bytes(bytes(40 * MB))
    nodes.put("d")
    assert nodes.everywhere("d")
    assert nodes.stored() == 1


def test_nodes_that_lack_other_files(nodes: Nodes) -> None:
    """Nodes that lack the same files get them together."""
    fill(nodes.here / "d", [6 * MB, 5 * MB])
    (nodes.roots[1] / "there/d").mkdir(parents=True)
    (nodes.roots[1] / "there/d/0").write_bytes((nodes.here / "d/0").read_bytes())
    assert nodes.put("d") < 1.02 * 16 * MB
    assert nodes.everywhere("d")


def test_small_files_are_sent_directly(nodes: Nodes) -> None:
    fill(nodes.here / "d", [1000] * 20)
    before = sum(nodes.cluster.sent())
    nodes.put("d")
    assert nodes.everywhere("d")
    assert sum(nodes.cluster.sent()) == before


def test_an_interrupt(nodes: Nodes) -> None:
    fill(nodes.here / "d", [30 * MB, 10 * MB])

    def press_stop(name: str, done: int, total: int) -> None:
        if done > 10 * MB:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        nodes.put("d", press_stop)
    assert nodes.stored() == 1
    nodes.put("d")
    assert nodes.everywhere("d")


def test_node_dies_during_a_multicast(nodes: Nodes) -> None:
    fill(nodes.here / "d", [30 * MB, 10 * MB])
    killed: list[int] = []

    def kill(name: str, done: int, total: int) -> None:
        if done > 10 * MB and not killed:
            killed.append(nodes.lines[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    with raises(FilesError, "files", r"node 1 \(host1\): ") as raised:
        nodes.put("d", kill)
    assert "host0" not in str(raised.value)
    assert nodes.stored() == 1
    nodes.put("d")
    assert nodes.everywhere("d")


def test_value_server_dies_during_a_multicast(nodes: Nodes) -> None:
    fill(nodes.here / "d", [40 * MB])
    killed: list[int] = []

    def kill(name: str, done: int, total: int) -> None:
        if done > 10 * MB and not killed:
            killed.append(nodes.cluster.lines[2][-1].pid)
            os.kill(killed[0], signal.SIGKILL)

    nodes.put("d", kill)
    assert killed
    assert nodes.everywhere("d")
