"""Values to several nodes and back: once over the notebook's connection, then from node to node."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from skymagic.data.remote.remote_store import RemoteStore
from skymagic.data.store.store import OVERFLOW, NodeStore, create, digest, overflow, remove
from skymagic.kernels.store.server import LOCK
from skymagic.providers.local import ChildTransport
from skymagic.wire.codec import Transport
from tests.data.far import Far, Notebook, moved
from tests.lab.nodes import node_of, start
from tests.lab.waiting import until

MB = 1 << 20


class Counted:
    """A transport that counts what passes through it."""

    def __init__(self, inner: ChildTransport, breaks: float) -> None:
        self.inner = inner
        self.sent = 0
        self.got = 0
        self.breaks = breaks
        """Bytes after which nothing passes any more, in either direction."""
        self.pause = 0.0
        """Seconds that each reading takes."""

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.inner._child.pid

    def read(self) -> bytes:
        """From the server."""
        time.sleep(self.pause)  # a slow line
        data = self.inner.read() if self.sent + self.got < self.breaks else b""
        self.got += len(data)
        return data

    def write(self, data: bytes | memoryview) -> None:
        """To the server."""
        if self.sent + self.got > self.breaks:
            raise BrokenPipeError
        self.inner.write(data)
        self.sent += len(data)

    def complaint(self) -> str:
        """Its standard error."""
        return self.inner.complaint()

    def close(self) -> None:
        """End it."""
        self.inner.close()


class Cluster:
    """Several nodes on this machine: a folder and a server each.

    Args:
        count: of nodes.
        options: of the store.

    Attributes:
        breaks: for each node, after how many bytes its next lines break.
        before: words before each node's command.
    """

    def __init__(self, count: int, **options: object) -> None:
        self.breaks: list[list[float]] = [[] for _ in range(count)]
        self.before: list[list[str]] = [[] for _ in range(count)]
        self.folders = [create() for _ in range(count)]
        self.lines: list[list[Counted]] = [[] for _ in range(count)]
        self.said: list[str] = []
        nodes = self.nodes = [
            node_of(n, f"node{n}", self._open(n), "127.0.0.1") for n in range(count)
        ]
        self.store = RemoteStore(nodes, start, self.said.append, **options)  # type: ignore[arg-type]

    def _open(self, node: int) -> Callable[[], Transport]:
        def opened() -> Transport:
            command = [
                *self.before[node],
                sys.executable,
                "-m",
                "skymagic.kernels.store.server",
                self.folders[node],
            ]
            breaks = self.breaks[node].pop(0) if self.breaks[node] else float("inf")
            self.lines[node].append(Counted(ChildTransport(command), breaks))
            return self.lines[node][-1]

        return opened

    def files(self, node: int) -> list[Path]:
        """What lies on a node, complete or not."""
        places = (Path(self.folders[node]), overflow(self.folders[node]))
        found = (path for place in places if place.exists() for path in place.iterdir())
        return sorted(path for path in found if path.name not in (LOCK, OVERFLOW))

    def sent(self) -> list[int]:
        """Bytes that went to each node."""
        return [sum(line.sent for line in lines) for lines in self.lines]

    def content(self, node: int, key: str) -> memoryview:
        """A value as a rank of the node maps it."""
        return NodeStore(self.folders[node]).map(self.store.name(key))

    def everywhere(self, key: str) -> bool:
        """Whether every node has the value."""
        return all(digest([self.content(node, key)]) == key for node in range(len(self.folders)))

    def close(self) -> None:
        """End the servers and remove the folders."""
        self.store.close()
        for folder in self.folders:
            remove(folder)


@pytest.fixture(scope="module")
def lent() -> Iterator[Cluster]:
    with closing(Cluster(3)) as made:
        put(made, b"all are up")
        yield made


@pytest.fixture
def cluster(lent: Cluster) -> Cluster:
    """Three nodes, empty, of which nothing is counted yet."""
    lent.store.drop(lent.store.keys())
    until(lambda: not any(lent.files(node) for node in range(3)))
    for line in chain.from_iterable(lent.lines):
        line.sent, line.got, line.pause = 0, 0, 0.0
    return lent


@pytest.fixture
def notebook(cluster: Cluster, tmp_path: Path) -> Iterator[Notebook]:
    made = Notebook.__new__(Notebook)
    made.folder, made.directory = tmp_path, cluster.folders[0]
    made.begin(
        cluster.store, [Far(folder, node, node=node) for node, folder in enumerate(cluster.folders)]
    )
    yield made
    for far in made.ranks:
        far.close()


def put(cluster: Cluster, data: bytes) -> str:
    """Put a value and wait until it is everywhere."""
    key = cluster.store.put(None, [data], len(data))
    cluster.store.settle()
    return key


def test_a_value_reaches_all_nodes_and_leaves_here_once(cluster: Cluster) -> None:
    data = os.urandom(20 * MB)
    key = put(cluster, data)
    assert key == digest([data])
    assert [bytes(cluster.content(node, key)) == data for node in range(3)] == [True] * 3
    assert sum(cluster.sent()) < 1.01 * len(data)
    before = sum(cluster.sent())
    assert cluster.store.put(key, [data], len(data)) == key
    cluster.store.settle()
    assert sum(cluster.sent()) == before


def test_values_of_a_notebook_on_three_nodes(notebook: Notebook, cluster: Cluster) -> None:
    notebook.here(
        "import numpy as np\nrng = np.random.default_rng(0)\n"
        "a = rng.random(400_000)\nt = np.arange(500_000)\nd = {'x': a[10:], 'k': [1, 'two']}\n"
        "small = [rng.random(300) for _ in range(600)]\ndef f(x): return float(x.sum()) + len(small)"
    )
    notebook.there("y = [f(a), float(t.sum()), f(d['x']), d['k']]; r = a * 2")
    here = [eval("[f(a), float(t.sum()), f(d['x']), d['k']]", notebook.namespace)]
    assert notebook.values("y") == here * 3
    assert moved(notebook.there("f(a), t, d")) == []
    for rank in range(3):
        assert np.array_equal(notebook.fetch("r", rank), notebook.namespace["a"] * 2)
    notebook.here("a[5] = 7")
    notebook.there("z = float(a[5])")
    assert notebook.values("z") == [7.0] * 3


def test_large_values_are_told_once_before_they_travel(
    notebook: Notebook, cluster: Cluster
) -> None:
    said: list[tuple[str, int]] = []

    def ship(source: str) -> list[str]:
        said.clear()
        notebook.there(source, warn=lambda sentence: said.append((sentence, sum(cluster.sent()))))
        return [sentence for sentence, _ in said]

    notebook.begin(cluster.store, notebook.ranks, large=3_000_000)
    notebook.here(
        "import numpy as np\nrng = np.random.default_rng(2)\nbig, small = rng.random(500_000), rng.random(300_000)"
    )
    before = sum(cluster.sent())
    assert ship("big, small") == [
        "big: 4 MB must travel over this connection; what a cell reads or makes on the nodes need not, "
        "and --no-push big leaves it out"
    ]
    assert said[0][1] - before < 1000
    assert ship("big, small") == []
    notebook.shipper.forget([0, 1, 2])
    assert ship("big, small") == []  # the nodes have it
    notebook.here("other = big.copy(); twin = {'a': big}")
    assert ship("other, twin") == []
    notebook.here("big[0] = 1")
    assert ship("big") == []  # a piece of it moves
    notebook.here("big += 1")
    assert len(ship("big")) == 1


def test_files_go_when_nobody_needs_them(notebook: Notebook, cluster: Cluster) -> None:
    notebook.here("import numpy as np\na = np.random.default_rng(1).random(500_000)")
    notebook.there("a")
    assert [len(cluster.files(node)) for node in range(3)] == [1, 1, 1]
    notebook.here("del a")
    for _ in range(3):
        notebook.there("1")
    put(cluster, b"last")  # what was said before is done by now
    assert [len(cluster.files(node)) for node in range(3)] == [1, 1, 1]


def test_files_are_private_and_complete_ones_alone_have_names(cluster: Cluster) -> None:
    key = put(cluster, os.urandom(3 * MB))
    for node in range(3):
        (path,) = cluster.files(node)
        assert path.name == cluster.store.name(key) != key
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_a_rank_gives_is_taken_once(cluster: Cluster) -> None:
    data = os.urandom(5 * MB) + bytes(3 * MB)
    name = NodeStore(cluster.folders[1]).give([data], len(data))
    view = cluster.store.take(name, 1)
    assert bytes(view) == data
    view[0] = 1  # a value that comes back can be written to
    with pytest.raises(FileNotFoundError):
        cluster.store.take(name, 1)
    assert cluster.files(1) == []
    other = NodeStore(cluster.folders[2]).give([data], len(data))
    cluster.store.discard(other, 2)
    with pytest.raises(FileNotFoundError):
        cluster.store.take(other, 2)


def test_files_come_back_from_all_nodes_at_once(cluster: Cluster) -> None:
    data = [os.urandom(3 * MB + number) for number in range(12)]
    files = [
        (NodeStore(cluster.folders[number % 3]).give([each], len(each)), number % 3)
        for number, each in enumerate(data)
    ]
    cluster.store.prefetch(files)
    for file, each in zip(files, data, strict=True):
        if len(each) % 5:
            assert cluster.store.take(*file) == each
        else:
            cluster.store.discard(*file)
    with pytest.raises(FileNotFoundError):
        cluster.store.take(*files[3])
    put(cluster, b"last")  # what was said before is done by now
    assert [len(cluster.files(node)) for node in range(3)] == [1, 1, 1]


def test_a_file_that_nobody_wants_stops_coming(cluster: Cluster) -> None:
    name = NodeStore(cluster.folders[1]).give([os.urandom(100 * MB)], 100 * MB)
    put(cluster, b"all are up")
    cluster.lines[1][0].pause = 0.01  # for 64 KB
    before = cluster.lines[1][0].got
    cluster.store.prefetch([(name, 1), ("0" * 16 + "-" + "0" * 32, 1)])
    while cluster.lines[1][0].got - before < 5 * MB:
        pass
    cluster.store.discard(name, 1)
    other = NodeStore(cluster.folders[1]).give([b"after it"], 8)
    assert bytes(cluster.store.take(other, 1)) == b"after it"
    assert cluster.lines[1][0].got - before < 50 * MB
    put(cluster, b"last")  # what was said before is done by now
    assert name not in {path.name for path in cluster.files(1)}


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 19) - 1, 1 << 19, (1 << 19) + 1])
def test_lengths(cluster: Cluster, nbytes: int) -> None:
    data = os.urandom(nbytes)
    key = put(cluster, data)
    assert [bytes(cluster.content(node, key)) for node in range(3)] == [data] * 3
    assert bytes(cluster.store.take(NodeStore(cluster.folders[0]).give([data], nbytes), 0)) == data


def test_many_values_are_not_waited_for_one_by_one(cluster: Cluster) -> None:
    values = [os.urandom(MB + n) for n in range(30)]
    keys = [cluster.store.put(None, [value], len(value)) for value in values]
    cluster.store.settle()
    for node in range(3):
        assert [digest([cluster.content(node, key)]) for key in keys] == keys


def test_a_value_that_changes_while_it_is_sent_lands_as_it_was_read(cluster: Cluster) -> None:
    data = bytearray(8 * MB)
    stop = threading.Event()

    def disturb() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            data[(n * 7919) % len(data)] = n % 256

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        keys = [cluster.store.put(None, [data], len(data)) for _ in range(3)]
        cluster.store.settle()
    finally:
        stop.set()
        thread.join()
    for key in set(keys):
        assert [digest([cluster.content(node, key)]) for node in range(3)] == [key] * 3


def test_nobody_holds_a_value_twice(cluster: Cluster) -> None:
    import psutil

    nbytes = 200 * MB
    put(cluster, b"all are up")
    process = psutil.Process()
    data = memoryview(os.urandom(nbytes))
    highest = before = process.memory_info().rss

    def watch(_: int) -> None:
        nonlocal highest
        highest = max(highest, process.memory_info().rss)

    key = cluster.store.put(None, [data], nbytes, watch)
    cluster.store.settle()
    assert highest - before < 0.2 * nbytes
    name = NodeStore(cluster.folders[1]).give([cluster.content(1, key)], nbytes)
    before = process.memory_info().rss
    back = cluster.store.take(name, 1)
    assert process.memory_info().rss - before < 1.2 * nbytes
    assert digest([back]) == key
    for lines in cluster.lines:
        status = Path(f"/proc/{lines[0].pid}/status").read_text()
        peak = next(
            int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")
        )
        assert peak * 1024 < 0.6 * nbytes


def test_one_node_alone_listens_nowhere() -> None:
    import psutil

    with closing(Cluster(1)) as alone:
        data = os.urandom(2 * MB)
        assert bytes(alone.content(0, put(alone, data))) == data
        assert psutil.Process(alone.lines[0][0].pid).net_connections() == []


def test_the_end_leaves_nothing() -> None:
    made = Cluster(2)
    put(made, os.urandom(2 * MB))
    pids = [lines[0].pid for lines in made.lines]
    made.store.close()
    made.store.close()
    assert [made.files(node) for node in range(2)] == [[], []]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    made.close()
