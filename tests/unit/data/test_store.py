"""The node store: private, written once, mapped by all, gone when nobody needs it."""

from __future__ import annotations

import gc
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.content import store as module
from skymagic.content.chunks import digest
from skymagic.content.store import LARGE, OVERFLOW, NodeStore, create, overflow, remove
from skymagic.data.bundle import ContentIndex, Part
from tests.lab.golden import Golden


@pytest.fixture
def directory() -> Iterator[Path]:
    made = create()
    yield Path(made)
    remove(made)


def descriptors() -> int:
    """Open descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings(name: str) -> list[str]:
    """Lines of this process's memory map for a file."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def test_directory_and_files_are_private(directory: Path) -> None:
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    store = NodeStore(directory)
    key = store.put(None, [b"x" * 100], 100)
    (path,) = directory.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.name == store.name(key)
    assert path.name != key


def test_names_differ_from_store_to_store(directory: Path, tmp_path: Path) -> None:
    one, two = NodeStore(directory), NodeStore(tmp_path / "two")
    assert one.put(None, [b"x"], 1) == two.put(None, [b"x"], 1)
    assert one.name(digest([b"x"])) != two.name(digest([b"x"]))


def test_directory_of_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="not private"):
        NodeStore(tmp_path)


@given(st.lists(st.binary(max_size=3000)), st.booleans())
def test_put_and_map(pieces: list[bytes], known: bool) -> None:
    directory = create()
    try:
        store = NodeStore(directory)
        whole = b"".join(pieces)
        key = store.put(digest(pieces) if known else None, pieces, len(whole))
        assert key == digest([whole])
        assert store.map(store.name(key)).tobytes() == whole
        assert store.missing([key, "other"]) == ["other"]
    finally:
        remove(directory)


def test_large_and_oddly_shaped_pieces(directory: Path) -> None:
    store = NodeStore(directory)
    data = memoryview(os.urandom(3_000_000)).cast("I")
    key = store.put(None, [data, b"", bytearray(7)], 3_000_007)
    assert store.map(store.name(key))[:3_000_000] == data.cast("B")


def test_new_values_are_hashed_while_written(directory: Path) -> None:
    index = ContentIndex(NodeStore(directory))
    first = Part(bytes(2 * LARGE), blob=True)
    assert not index.identify([first], lazily=True)
    index.put(first)
    other, changed, same = (
        Part(data, blob=True) for data in (b"x" * 2 * LARGE, bytearray(2 * LARGE), bytes(2 * LARGE))
    )
    changed.data[LARGE + 100] = 1  # type: ignore[index]
    assert not index.identify([other], lazily=True)
    assert other.hash is None
    assert index.identify([changed, same], lazily=True)
    assert changed.hash != first.hash
    assert same.hash == first.hash
    assert index.find(same) is not None


def test_mapping_is_writable_private_and_needs_no_descriptor(directory: Path) -> None:
    store = NodeStore(directory)
    name = store.name(store.put(None, [bytes(100_000)], 100_000))
    before = descriptors()
    one, two = store.map(name), store.map(name)
    one[5] = 1
    assert two[5] == 0
    assert store.map(name)[5] == 0
    assert descriptors() == before
    assert all("rw-p" in line for line in mappings(name))
    part = one[10:]
    del one, two
    gc.collect()
    assert len(mappings(name)) == 1
    part[0] = 1
    del part
    assert mappings(name) == []


def test_names_do_not_leave_the_directory(golden: Golden, directory: Path) -> None:
    store = NodeStore(directory)
    for name in ("../x", "/etc/passwd", ".hidden"):
        with golden.raises(ValueError):
            store.map(name)


def test_failed_write_leaves_nothing(directory: Path) -> None:
    class Broken(bytes):
        pass

    store = NodeStore(directory)
    with pytest.raises(TypeError):
        store.put(None, [b"x", "text"], 5)  # type: ignore[list-item]
    assert list(directory.iterdir()) == []


def limited(directory: Path, nbytes: int, said: list[str]) -> NodeStore:
    """A store that may fill about so many bytes."""
    status = os.statvfs(directory)
    return NodeStore(
        directory, share=nbytes / (status.f_bavail * status.f_frsize), notify=said.append
    )


def test_too_large_goes_to_disk(golden: Golden, directory: Path) -> None:
    said: list[str] = []
    store = limited(directory, 20_000_000, said)
    key = store.put(None, [bytes(30_000_000)], 30_000_000)
    assert [path.name for path in directory.iterdir()] == [OVERFLOW]
    assert store.path(store.name(key)).parent == overflow(directory)
    assert stat.S_IMODE(overflow(directory).stat().st_mode) == 0o700
    golden(said[0], hide=[r"/tmp\S*"])
    assert len(NodeStore(directory).map(store.name(key))) == 30_000_000
    store.drop([key])
    assert not overflow(directory).exists() or list(overflow(directory).iterdir()) == []


def test_disk_location_is_reported_by_the_node(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell may change TMPDIR, and another user could make a folder whose name is known beforehand."""
    (tmp_path / "one").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "one"))
    store = limited(directory, 20_000_000, [])
    key = store.put(None, [bytes(30_000_000)], 30_000_000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert len(NodeStore(directory).map(store.name(key))) == 30_000_000
    assert [path.parent for path in (tmp_path / "one").glob("*/*")] == [overflow(directory)]
    assert overflow(directory).name != f"{directory.name}-overflow"
    remove(directory)
    assert list((tmp_path / "one").iterdir()) == []


def test_pieces_are_streamed(directory: Path) -> None:
    store = NodeStore(directory)
    living: list[weakref.ref[object]] = []

    class Piece(bytearray):
        pass

    def stream() -> Iterator[bytearray]:
        for n in range(50):
            assert sum(each() is not None for each in living) <= 2
            piece = Piece(bytes([n]) * 1_000_000)
            living.append(weakref.ref(piece))
            yield piece

    key = store.put(None, stream(), 50_000_000)
    copy = NodeStore(directory / "copy")
    assert copy.put(key, store.read(store.name(key)), 50_000_000) == key
    assert copy.missing([key]) == []


def test_progress_is_reported(directory: Path) -> None:
    told: list[int] = []
    NodeStore(directory).put(None, [bytes(100 << 20)], 100 << 20, told.append)
    assert told
    assert told == sorted(told)


def test_place_without_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    made = create()
    assert Path(made).parent == tmp_path
    remove(made)
    remove(made)
