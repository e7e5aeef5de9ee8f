"""Large values that have changed in part: their pieces move, and every node has the whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.content.chunks import ChunkIndex, digest
from skymagic.content.remote.remote_store import recipe
from skymagic.wire.codec import CHUNK
from tests.contracts.stores import MB, Cluster, put
from tests.data import test_remote_store as remote
from tests.data.far import Notebook

SIZE = 20 * MB + 300


lent, cluster, notebook = remote.lent, remote.cluster, remote.notebook


def sent(cluster: Cluster, data: bytes) -> int:
    """Bytes that leave here until all nodes have a value."""
    before = sum(cluster.sent())
    assert cluster.everywhere(put(cluster, data))
    return sum(cluster.sent()) - before


def with_another_start(data: bytes) -> bytes:
    """The same bytes but the first, which random data may begin with whatever is put there."""
    return bytes([data[0] ^ 1]) + data[1:]


CHANGES: dict[str, tuple[Callable[[bytes], bytes], int]] = {
    "one element": (lambda data: data[: 7 * MB] + b"changed!" + data[7 * MB + 8 :], 1),
    "the first and the last": (lambda data: b"!" + data[1:-1] + b"!", 2),
    "an appended line": (lambda data: data + b"a line\n", 1),
    "a piece appended": (lambda data: data + os.urandom(2 * MB), 3),
    "the end cut off": (lambda data: data[: -5 * MB], 1),
    "a layer": (lambda data: data[: 8 * MB] + os.urandom(4 * MB) + data[12 * MB :], 4),
    "halves in another order": (lambda data: data[10 * MB : 20 * MB] + data[: 10 * MB], 0),
    "twice": (lambda data: data[: 20 * MB] + data[: 20 * MB], 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_values_are_sent(cluster: Cluster, change: str) -> None:
    data = os.urandom(SIZE)
    put(cluster, data)
    edit, pieces = CHANGES[change]
    assert sent(cluster, edit(data)) < pieces * MB + 15_000
    assert [len(cluster.files(node)) for node in range(3)] == [
        2
    ] * 3  # what was sent of it is no file of its own


def test_pieces_of_several_values(cluster: Cluster) -> None:
    first, second = os.urandom(4 * MB), os.urandom(4 * MB)
    put(cluster, first)
    put(cluster, second)
    assert sent(cluster, second + os.urandom(MB) + first) < MB + 15_000


def test_dropped_values_are_sent_again(cluster: Cluster) -> None:
    data = os.urandom(4 * MB)
    cluster.store.drop([put(cluster, data)])
    assert sent(cluster, data[:-1] + b"!") > len(data)


@pytest.mark.parametrize("victims", [[0], [1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("damage", ["lost", "other bytes"])
def test_node_with_damaged_pieces_gets_them_again(
    cluster: Cluster, victims: list[int], damage: str
) -> None:
    data = os.urandom(SIZE)
    name = cluster.store.name(put(cluster, data))
    for node in victims:
        path = next(path for path in cluster.files(node) if path.name == name)
        if damage == "lost":
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.seek(3 * MB)
                file.write(b"damaged")
    assert sent(cluster, with_another_start(data)) < (2 * MB if len(victims) < 3 else SIZE + 2 * MB)


def test_a_node_that_is_back_with_nothing(cluster: Cluster) -> None:
    data = os.urandom(SIZE)
    put(cluster, data)
    for path in cluster.files(1):
        path.unlink()
    cluster.store.lose(1)
    cluster.store.readmit(cluster.nodes[1])
    assert sent(cluster, with_another_start(data)) < 2 * MB


def test_a_notebooks_array(notebook: Notebook, cluster: Cluster) -> None:
    notebook.here(
        "import numpy as np\na = np.random.default_rng(0).random(2_000_000)\nlog = ['line'] * 9"
    )
    notebook.here("log += [str(n) for n in range(500_000)]")
    notebook.there("a, log")
    before = sum(cluster.sent())
    notebook.here("a[1_234_567] = 5; log.append('one more')")
    notebook.there("x = float(a.sum()), len(log), log[-1]")
    assert sum(cluster.sent()) - before < 3 * MB
    here = notebook.namespace["a"]
    assert notebook.values("x") == [[float(np.sum(here)), 500_010, "one more"]] * 3


def test_reported_values_are_those_sent(cluster: Cluster) -> None:
    data = os.urandom(SIZE)
    assert cluster.store.unsent(data) == SIZE
    put(cluster, data)
    assert cluster.store.unsent(data[: 7 * MB] + b"changed!" + data[7 * MB + 8 :]) in (
        CHUNK,
        2 * CHUNK,
    )
    assert cluster.store.unsent(data) == 0
    assert cluster.store.unsent(b"little") == 6


# -- which pieces ----------------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.tuples(st.sampled_from("ab"), st.integers(0, 9))), st.integers(1, 3))
def test_slices_are_the_file(places: list[tuple[str, int] | None], last: int) -> None:
    lengths = [3] * (len(places) - 1) + [last] if places else []
    files = {"a": bytes(range(60)), "b": bytes(range(100, 160)), "rest": bytes(range(200, 230)) * 9}
    spots = [place and (place[0], place[1] * 3) for place in places]
    expected, used = b"", 0
    for nbytes, spot in zip(lengths, spots, strict=True):
        name, offset = spot or ("rest", used)
        used += 0 if spot else nbytes
        expected += files[name][offset : offset + nbytes]
    slices = recipe(lengths, spots, "rest")
    assert (
        b"".join(files[name][offset : offset + nbytes] for name, offset, nbytes in slices)
        == expected
    )
    assert not any(one[0] == two[0] and one[1] + one[2] == two[1] for one, two in pairwise(slices))


def test_the_index_forgets_a_file_and_keeps_its_twin() -> None:
    index = ChunkIndex()
    one, two, three = (digest([bytes([n])]).encode() for n in range(3))
    index.add("a" * 32, [one, two])
    index.add("b" * 32, [two, three, three])
    index.remove(["a" * 32, "unknown"])
    assert index.find([one, two, three]) == [None, ("b" * 32, 0), ("b" * 32, 2 * CHUNK)]
    index.add("a" * 32, [one, two])
    index.remove(["a" * 32])
    index.remove(["b" * 32])
    assert index.find([one, two, three]) == [None] * 3
