"""Values to several nodes and back: once over the notebook's connection, then from node to node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from skymagic.content.chunks import digest
from skymagic.content.store import NodeStore
from tests.contracts.stores import MB, Cluster, put
from tests.data.far import Far, Notebook, moved
from tests.lab.golden import Golden
from tests.lab.waiting import until


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


def test_large_values_are_reported_once_before_sending(
    golden: Golden, notebook: Notebook, cluster: Cluster
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
    golden(ship("big, small"))
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


def test_unneeded_files_are_unlinked(notebook: Notebook, cluster: Cluster) -> None:
    notebook.here("import numpy as np\na = np.random.default_rng(1).random(500_000)")
    notebook.there("a")
    assert [len(cluster.files(node)) for node in range(3)] == [1, 1, 1]
    notebook.here("del a")
    for _ in range(3):
        notebook.there("1")
    put(cluster, b"last")  # what was said before is done by now
    assert [len(cluster.files(node)) for node in range(3)] == [1, 1, 1]


def test_transfer_of_an_unneeded_file_stops(cluster: Cluster) -> None:
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


def test_many_values_are_not_waited_for_one_by_one(cluster: Cluster) -> None:
    values = [os.urandom(MB + n) for n in range(30)]
    keys = [cluster.store.put(None, [value], len(value)) for value in values]
    cluster.store.settle()
    for node in range(3):
        assert [digest([cluster.content(node, key)]) for key in keys] == keys


def test_no_node_stores_a_value_twice(cluster: Cluster) -> None:
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


def test_single_node_does_not_listen() -> None:
    import psutil

    with closing(Cluster(1)) as alone:
        data = os.urandom(2 * MB)
        assert bytes(alone.content(0, put(alone, data))) == data
        assert psutil.Process(alone.lines[0][0].pid).net_connections() == []
