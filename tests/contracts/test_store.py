"""A store of content: what is put is on every node, equal and once, until nobody holds it."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import TypeVar

import pytest

from skymagic.content.base import Buffer
from skymagic.content.chunks import digest
from skymagic.content.store import NodeStore
from tests.contracts.stores import MB, Cluster, Here, Nodes, Remote, put
from tests.lab.waiting import at, until

N = TypeVar("N", bound=Nodes)
REMOTE = [
    pytest.param(partial(Cluster, 1), id="one node"),
    pytest.param(partial(Cluster, 3), id="three nodes"),
]
MAKERS = [pytest.param(Here, id="here"), *REMOTE]
LENGTHS = [0, 1, (1 << 19) - 1, 1 << 19, (1 << 19) + 1, 3 * MB + 7]


@pytest.fixture(scope="module", params=MAKERS)
def maker(request: pytest.FixtureRequest) -> Callable[..., Nodes]:
    made: Callable[..., Nodes] = request.param
    return made


@pytest.fixture(scope="module")
def lent(maker: Callable[..., Nodes]) -> Iterator[Nodes]:
    with closing(maker()) as made:
        put(made, b"all are up")
        yield made


@pytest.fixture
def nodes(lent: Nodes) -> Nodes:
    """Nodes that have nothing."""
    return emptied(lent)


@pytest.fixture(scope="module", params=REMOTE)
def remote_maker(request: pytest.FixtureRequest) -> Callable[..., Remote]:
    made: Callable[..., Remote] = request.param
    return made


@pytest.fixture(scope="module")
def remote_lent(remote_maker: Callable[..., Remote]) -> Iterator[Remote]:
    with closing(remote_maker()) as made:
        put(made, b"all are up")
        yield made


@pytest.fixture
def remote(remote_lent: Remote) -> Remote:
    """Nodes with a server each, that have nothing."""
    return emptied(remote_lent)


def emptied(nodes: N) -> N:
    nodes.store.drop(nodes.store.keys())
    until(lambda: not any(map(nodes.files, range(len(nodes.folders)))))
    return nodes


def counts(nodes: Nodes) -> list[int]:
    """Number of files on each node."""
    return [len(nodes.files(node)) for node in range(len(nodes.folders))]


def test_a_value_arrives_equal_and_is_private(nodes: Nodes) -> None:
    values = [os.urandom(nbytes) for nbytes in LENGTHS]
    keys = [nodes.store.put(None, [value], len(value)) for value in values]
    nodes.store.settle()
    assert keys == [digest([value]) for value in values]
    assert nodes.store.missing([*keys, "unknown"]) == ["unknown"]
    for node in range(len(nodes.folders)):
        assert [bytes(nodes.content(node, key)) for key in keys] == values
        for path in nodes.files(node):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert path.name not in keys


def test_pieces_become_one_value(nodes: Nodes) -> None:
    pieces: list[Buffer] = [b"", os.urandom(MB), bytearray(7), memoryview(bytes(8000)).cast("I")]
    key = nodes.store.put(None, pieces, MB + 7 + 8000)
    nodes.store.settle()
    assert key == digest(pieces)
    assert nodes.everywhere(key)


def test_writes_to_a_mapped_value_are_private(nodes: Nodes) -> None:
    key = put(nodes, bytes(100_000))
    one, other = nodes.content(0, key), nodes.content(0, key)
    one[5] = 1
    assert (other[5], nodes.content(0, key)[5]) == (0, 0)


def test_a_value_moves_once_whatever_the_number_of_nodes(nodes: Nodes) -> None:
    for number, nbytes in enumerate((MB, 20 * MB), 1):
        data = os.urandom(nbytes)
        before = nodes.moved()
        key = put(nodes, data)
        assert nodes.moved() - before < 1.01 * nbytes
        before = nodes.moved()
        assert nodes.store.put(key, [data], nbytes) == key
        nodes.store.settle()
        assert nodes.moved() - before < 1000
        assert counts(nodes) == [number] * len(nodes.folders)


def test_of_a_changed_value_only_the_change_moves(remote: Remote) -> None:
    data = os.urandom(20 * MB)
    put(remote, data)
    changed = data[: 7 * MB] + bytes([data[7 * MB] ^ 1]) + data[7 * MB + 1 :]
    assert remote.store.unsent(changed) == MB
    before = remote.moved()
    assert remote.everywhere(put(remote, changed))
    assert remote.moved() - before < 1.1 * MB


def test_a_wrong_hash_names_nothing(nodes: Nodes) -> None:
    wrong = digest([b"another value"])
    key = nodes.store.put(wrong, [b"a value"], 7)
    nodes.store.settle()
    assert key == digest([b"a value"])
    assert nodes.store.missing([wrong, key]) == [wrong]
    assert nodes.everywhere(key)


def test_value_changed_while_stored_keeps_its_hash(nodes: Nodes) -> None:
    data, stop = bytearray(8 * MB), threading.Event()

    def disturb() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            data[(number * 7919) % len(data)] = number % 256

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    try:
        keys = [nodes.store.put(digest([data]), [data], len(data)) for _ in range(3)]
        nodes.store.settle()
    finally:
        stop.set()
        disturbing.join()
    assert all(map(nodes.everywhere, set(keys)))


def test_threads_that_put_one_value_store_it_once(nodes: Nodes) -> None:
    data, keys = os.urandom(5 * MB), list[str]()
    threads = [
        threading.Thread(target=lambda: keys.append(nodes.store.put(None, [data], len(data))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    nodes.store.settle()
    assert set(keys) == {digest([data])}
    assert counts(nodes) == [1] * len(nodes.folders)


def test_a_dropped_value_is_freed_and_stays_mapped(nodes: Nodes) -> None:
    keys = [put(nodes, b"a value"), put(nodes, b"another one")]
    view = nodes.content(0, keys[0])
    nodes.store.drop([keys[0], "unknown"])
    until(lambda: counts(nodes) == [1] * len(nodes.folders))
    assert nodes.store.missing(keys) == [keys[0]]
    assert bytes(view) == b"a value"
    assert nodes.everywhere(keys[1])


def test_oldest_values_are_evicted(maker: Callable[..., Nodes]) -> None:
    status = os.statvfs("/dev/shm")
    notes: list[str] = []
    options = {"notify": notes.append} if maker is Here else {}
    with closing(maker(share=35_000_000 / (status.f_bavail * status.f_frsize), **options)) as nodes:
        keys = [put(nodes, bytes([number]) * 10_000_000) for number in range(3)]
        nodes.store.missing([keys[0]])
        nodes.store.pin([keys[1]])
        put(nodes, b"\3" * 10_000_000)
        assert nodes.store.missing(keys) == [keys[2]]
        nodes.store.unpin([keys[1]])
        for number in (4, 5, 6):
            put(nodes, bytes([number]) * 10_000_000)
        assert nodes.store.missing(keys) == keys


def test_given_file_is_taken_once(nodes: Nodes) -> None:
    node, data = len(nodes.folders) - 1, os.urandom(5 * MB) + bytes(3 * MB)
    rank = NodeStore(nodes.folders[node])
    name, unwanted = rank.give([data], len(data)), rank.give([data], len(data))
    view = nodes.store.take(name, node)
    assert bytes(view) == data
    view[0] ^= 1
    nodes.store.discard(unwanted, node)
    nodes.store.discard(unwanted, node)
    for gone in (name, unwanted):
        with pytest.raises(FileNotFoundError):
            nodes.store.take(gone, node)
    assert counts(nodes)[node] == 0


def test_values_return_from_all_nodes(nodes: Nodes) -> None:
    count, values = len(nodes.folders), [os.urandom(MB + number) for number in range(9)]
    files = [
        (NodeStore(nodes.folders[number % count]).give([value], len(value)), number % count)
        for number, value in enumerate(values)
    ]
    nodes.store.prefetch(files)
    assert [bytes(nodes.store.take(*file)) for file in files] == values
    until(lambda: counts(nodes) == [0] * count)  # nodes remove a taken file when they are told


def test_a_put_that_is_interrupted_leaves_nothing(nodes: Nodes) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    data = os.urandom(MB) * 70
    with pytest.raises(KeyboardInterrupt):
        nodes.store.put(None, [data], len(data), at(10 * MB, press))
    assert nodes.store.keys() == frozenset()
    assert nodes.everywhere(put(nodes, data[: 2 * MB]))
    assert counts(nodes) == [1] * len(nodes.folders)


def test_a_value_survives_a_cut_on_its_way(remote_maker: Callable[[], Remote]) -> None:
    with closing(remote_maker()) as nodes:
        put(nodes, b"all are up")
        victims = range(len(nodes.folders))[:3]
        for victim in victims:
            data, before = os.urandom(16 * MB), nodes.moved()
            key = nodes.store.put(None, [data], len(data), at(8 * MB, partial(nodes.cut, victim)))
            nodes.store.settle()
            assert nodes.everywhere(key)
            assert nodes.moved() - before < (2.1 if victim == 0 else 1.1) * len(data)
            assert len(nodes.lines[victim]) == 2
        assert counts(nodes) == [1 + len(victims)] * len(nodes.folders)


def test_received_bytes_are_not_sent_again_after_a_cut(
    remote_maker: Callable[[], Remote],
) -> None:
    with closing(remote_maker()) as nodes:
        first = put(nodes, os.urandom(10 * MB))
        name = NodeStore(nodes.folders[0]).give([b"back"], 4)
        before = nodes.moved()
        for node in range(len(nodes.folders)):
            nodes.cut(node)
        second = put(nodes, os.urandom(MB))
        assert nodes.everywhere(first)
        assert nodes.everywhere(second)
        assert nodes.moved() - before < 2 * MB
        assert bytes(nodes.store.take(name, 0)) == b"back"


def test_the_end_leaves_nothing(maker: Callable[..., Nodes]) -> None:
    with closing(maker()) as nodes:
        put(nodes, os.urandom(2 * MB))
        nodes.store.close()
        nodes.store.close()
        assert counts(nodes) == [0] * len(nodes.folders)
