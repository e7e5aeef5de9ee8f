"""Values that an earlier pool of the user has left on a node are found there, and nothing else is."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skymagic.data.store.store import digest
from skymagic.kernels.store.incoming import ValueCache
from tests.data.far import Far, Notebook
from tests.data.test_remote_store import MB, Cluster, put
from tests.lab.waiting import until


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Callable[[], Cluster]]:
    """Makes pools of three nodes, each node with the same home every time; the one before has ended."""
    made: list[Cluster] = []

    def pool() -> Cluster:
        if made:
            made[-1].close()
        made.append(Cluster(3, keep=20 * MB, keep_after=0.0))
        for node in range(3):
            home(tmp_path, node).mkdir(exist_ok=True)
            made[-1].before[node] = ["env", f"HOME={home(tmp_path, node)}"]
        return made[-1]

    yield pool
    if made:
        made[-1].close()


def home(folder: Path, node: int) -> Path:
    """A node's home."""
    return folder / f"home {node}"


def kept(folder: Path, node: int) -> list[Path]:
    """What a node keeps."""
    values = home(folder, node) / ".skymagic" / "values"
    return sorted(values.iterdir()) if values.exists() else []


def sent_again(cluster: Cluster, data: bytes) -> int:
    """Put a value as a notebook does, and say how many bytes were sent."""
    before = sum(cluster.sent())
    cluster.store.expect([(digest([data]), len(data))])
    assert cluster.everywhere(put(cluster, data))
    return sum(cluster.sent()) - before


def test_a_value_of_an_earlier_pool_is_not_sent(pools: Callable[[], Cluster], tmp_path: Path) -> None:
    data, small = os.urandom(5 * MB), os.urandom(MB - 1)
    first = pools()
    put(first, small)
    key = put(first, data)
    until(lambda: all([path.name for path in kept(tmp_path, node)] == [key] for node in range(3)))
    folder = kept(tmp_path, 0)[0].parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(kept(tmp_path, 0)[0].stat().st_mode) == 0o600
    assert sent_again(pools(), data) < 10_000


@pytest.mark.parametrize("holder", range(3))
def test_one_node_has_it(pools: Callable[[], Cluster], tmp_path: Path, holder: int) -> None:
    data = os.urandom(5 * MB)
    key = put(pools(), data)
    until(lambda: all([path.name for path in kept(tmp_path, node)] == [key] for node in range(3)))
    for node in {0, 1, 2} - {holder}:
        kept(tmp_path, node)[0].unlink()
    assert sent_again(pools(), data) < 10_000


def test_a_kept_value_that_was_damaged_is_not_used(pools: Callable[[], Cluster], tmp_path: Path) -> None:
    data = os.urandom(5 * MB)
    key = put(pools(), data)
    until(lambda: all([path.name for path in kept(tmp_path, node)] == [key] for node in range(3)))
    for node in range(3):
        with kept(tmp_path, node)[0].open("r+b") as file:
            file.seek(3 * MB)
            file.write(b"wrong")
    second = pools()
    assert len(data) < sent_again(second, data) < 1.01 * len(data)
    until(lambda: all(digest([path.read_bytes()]) == key for n in range(3) for path in kept(tmp_path, n)))


def test_a_folder_that_others_can_write_is_left_alone(pools: Callable[[], Cluster], tmp_path: Path) -> None:
    data = os.urandom(2 * MB)
    for node in range(3):
        folder = home(tmp_path, node) / ".skymagic" / "values"
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        (folder / digest([data])).write_bytes(data)
    assert sent_again(pools(), data) > len(data)


def test_a_home_that_cannot_be_written(pools: Callable[[], Cluster], tmp_path: Path) -> None:
    first = pools()
    for node in range(3):
        (home(tmp_path, node) / ".skymagic").write_text("a file where a folder should be")
    assert first.everywhere(put(first, os.urandom(2 * MB)))
    assert first.said == []


def test_a_notebook_with_another_pool(pools: Callable[[], Cluster], tmp_path: Path) -> None:
    def ship() -> int:
        pool = pools()
        notebook = Notebook.__new__(Notebook)
        notebook.folder = tmp_path
        notebook.begin(pool.store, [Far(folder, node, node=node) for node, folder in enumerate(pool.folders)])
        notebook.here("import numpy as np\na = np.random.default_rng(3).random(500_000)\nb = {'a': a[7:]}")
        notebook.there("x = float(a.sum()), b['a'] is a, 'once'")
        assert len({tuple(each) for each in notebook.values("x")}) == 1
        for far in notebook.ranks:
            far.close()
        return sum(pool.sent())

    assert ship() > 4_000_000
    until(lambda: all(kept(tmp_path, node) for node in range(3)))
    assert ship() < 20_000


def test_the_oldest_go_first(tmp_path: Path) -> None:
    folder = tmp_path / "values"
    cache = ValueCache(folder, 5 * MB, 0.0)
    source = tmp_path / "source"
    source.write_bytes(bytes(2 * MB))
    keys = [f"{number:032x}" for number in range(4)]

    def keep(key: str) -> None:
        cache.add(key, 2 * MB, lambda: source)
        until((folder / key).exists)

    for age, key in ((300, keys[0]), (200, keys[1])):
        keep(key)
        os.utime(folder / key, (time.time() - age,) * 2)
    assert cache.find(keys[0], 2 * MB) == folder / keys[0]
    assert cache.find(keys[0], 3 * MB) is None
    keep(keys[2])
    assert {path.name for path in folder.iterdir()} == {keys[0], keys[2]}
    os.utime(folder / keys[2], (time.time() - 40 * 86400,) * 2)
    os.utime(folder / keys[0], (time.time() - 40 * 86400,) * 2)
    keep(keys[3])
    assert {path.name for path in folder.iterdir()} == {keys[3]}


def test_what_is_too_old_goes_when_the_next_pool_starts(tmp_path: Path) -> None:
    """Also when that one ships nothing large."""
    folder = tmp_path / "values"
    folder.mkdir(mode=0o700)
    old, new = folder / f"{1:032x}", folder / f"{2:032x}"
    for path, age in ((old, 31), (new, 29)):
        path.write_bytes(bytes(MB))
        os.utime(path, (time.time() - age * 86400,) * 2)
    ValueCache(folder, 5 * MB, 0.0)
    until(lambda: not old.exists())
    assert new.exists()
