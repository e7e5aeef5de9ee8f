"""Large files that have changed in part, or of which a half has come: their pieces travel."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.content.chunks import split_hashes
from skymagic.content.transfer.folders import FilePlace
from skymagic.content.transfer.listing import FILE, Entry
from skymagic.content.transfer.pieces import LARGE, common, encoded_files, part_name
from skymagic.content.transfer.receiving import Receiver
from skymagic.errors import FilesError
from skymagic.wire.codec import CHUNK
from skymagic.wire.files import FilePart, FilePiece, messages
from tests.content.test_multicast import COUNT, Nodes, cluster
from tests.contracts.stores import MB, Cluster
from tests.lab.golden import Golden
from tests.lab.raising import raises

__all__ = ["cluster"]


@pytest.fixture
def nodes(tmp_path: Path, cluster: Cluster) -> Nodes:
    return Nodes(tmp_path, cluster)


def halves(nodes: Nodes) -> list[Path]:
    return [path for root in nodes.roots for path in root.rglob(".skymagic-*")]


CHANGES: dict[str, tuple[Callable[[bytes], bytes], int]] = {
    "a megabyte": (lambda data: data[: 7 * MB] + os.urandom(MB) + data[8 * MB :], 2 * CHUNK),
    "an appended log": (lambda data: data + b"a line\n" * 1000, CHUNK),
    "the end cut off": (lambda data: data[: -5 * MB], CHUNK),
    "a layer, of the same size": (
        lambda data: data[: 8 * MB] + os.urandom(4 * MB) + data[12 * MB :],
        5 * CHUNK,
    ),
    "other names for the same": (lambda data: data, 0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_pieces_are_sent(nodes: Nodes, change: str) -> None:
    folder = nodes.here / "d"
    folder.mkdir()
    (folder / "a").write_bytes(data := os.urandom(30 * MB + 300))
    nodes.put("d")
    edit, nbytes = CHANGES[change]
    (folder / "a").write_bytes(edit(data))
    copied = nodes.files.put(folder, "there/")
    assert [one.nbytes for one in copied] == [pytest.approx(nbytes, abs=CHUNK)] * COUNT
    assert nodes.everywhere("d")
    (folder / "a").write_bytes(edit(edit(data)))
    assert nodes.put("d") <= nbytes + CHUNK + 100_000  # once for all nodes
    assert nodes.everywhere("d")
    assert halves(nodes) == []


def test_back_from_a_node(nodes: Nodes) -> None:
    (nodes.roots[1] / "log").write_bytes(data := os.urandom(20 * MB))
    nodes.files.get("log", nodes.here / "log", nodes=[1])
    (nodes.roots[1] / "log").write_bytes(data + b"more")
    (copied,) = nodes.files.get("log", nodes.here / "log", nodes=[1])
    assert (copied.files, copied.nbytes) == (1, 4)
    assert (nodes.here / "log").read_bytes() == data + b"more"


def test_a_cut_connection(nodes: Nodes) -> None:
    """Each node keeps the part that it received; the next copy continues after the shortest part, once for all."""
    folder = nodes.here / "d"
    folder.mkdir()
    (folder / "a").write_bytes(os.urandom(60 * MB))
    nodes.breaks = {0: 40 * MB, 1: 20 * MB, 2: 30 * MB}
    with raises(FilesError, "files", "node"):
        nodes.without_plane.put(folder, "there/")
    nodes.breaks = {}
    left = sorted(path.stat().st_size for path in halves(nodes))
    assert left == [pytest.approx(nbytes, abs=CHUNK) for nbytes in (20 * MB, 30 * MB, 40 * MB)]
    assert nodes.put("d") < 60 * MB - min(left) + 2 * CHUNK
    assert nodes.everywhere("d")
    assert halves(nodes) == []


# -- one receiver ----------------------------------------------------------------------------------------------------


def present(receiver: Receiver) -> dict[int, str]:
    return dict(receiver.comparison.compare("elsewhere", [], contents=True).present)


def received(
    receiver: Receiver, path: Path, entry: Entry, stop_at: int = 1 << 62, *, cut: bool = True
) -> int:
    """Let a receiver take a file, or the beginning of it; the bytes that it was sent."""
    receiver.begin([0])
    there = present(receiver)
    frames = iter(list(encoded_files([(0, entry, FilePlace.of(str(path)))], remote_digests=there)))
    for message, payload in messages(lambda: next(frames, b"")):
        if not isinstance(message, FilePart):
            receiver.end([])
            return receiver.nbytes
        receiver.take(message, payload)
        if receiver.nbytes >= stop_at:
            break
    if cut:
        receiver.abort(keep=True)
    return receiver.nbytes


def entry_of(path: Path) -> Entry:
    return Entry("a", FILE, path.stat().st_size)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(LARGE + 5 * CHUNK))
    return path


def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir(exist_ok=True)
    return tmp_path / "target"


def test_a_half_is_written_on_and_not_copied(source: Path, tmp_path: Path) -> None:
    folder, entry = target(tmp_path), entry_of(source)
    received(Receiver(str(folder), [entry]), source, entry, LARGE)
    (half,) = folder.iterdir()
    number = half.stat().st_ino
    assert received(Receiver(str(folder), [entry]), source, entry) == 5 * CHUNK
    assert (folder / "a").stat().st_ino == number
    assert (folder / "a").read_bytes() == source.read_bytes()
    assert len(list(folder.iterdir())) == 1


def test_part_file_of_another_process_is_not_touched(source: Path, tmp_path: Path) -> None:
    """Two nodes may share a folder."""
    folder, entry = target(tmp_path), entry_of(source)
    first, second = Receiver(str(folder), [entry]), Receiver(str(folder), [entry])
    received(first, source, entry, LARGE, cut=False)
    assert received(second, source, entry) == source.stat().st_size
    assert len(list(folder.iterdir())) == 2
    first.abort()
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_part_of_a_file_that_became_shorter(source: Path, tmp_path: Path) -> None:
    folder = target(tmp_path)
    received(Receiver(str(folder), [entry_of(source)]), source, entry_of(source), LARGE + 3 * CHUNK)
    source.write_bytes(os.urandom(CHUNK) + source.read_bytes()[CHUNK:LARGE] + b"end")
    assert (
        received(Receiver(str(folder), [entry_of(source)]), source, entry_of(source)) == CHUNK + 3
    )
    assert (folder / "a").read_bytes() == source.read_bytes()
    assert len(list(folder.iterdir())) == 1


def test_short_parts_and_small_files_are_not_kept(source: Path, tmp_path: Path) -> None:
    folder, entry = target(tmp_path), entry_of(source)
    received(Receiver(str(folder), [entry]), source, entry, CHUNK)
    assert list(folder.iterdir()) == []


def test_part_of_a_file_that_became_small(source: Path, tmp_path: Path) -> None:
    folder = target(tmp_path)
    received(Receiver(str(folder), [entry_of(source)]), source, entry_of(source), LARGE + CHUNK)
    source.write_bytes(b"small now")
    received(Receiver(str(folder), [entry_of(source)]), source, entry_of(source))
    assert (folder / "a").read_bytes() == b"small now"
    assert len(list(folder.iterdir())) == 1


def test_change_at_the_target_during_a_copy_is_reported(
    golden: Golden, source: Path, tmp_path: Path
) -> None:
    folder = target(tmp_path)
    (folder / "a").write_bytes(source.read_bytes())
    source.write_bytes(source.read_bytes() + b"more")
    receiver = Receiver(str(folder), [entry_of(source)])
    receiver.begin([0])
    there = present(receiver)
    (folder / "a").write_bytes(os.urandom(LARGE))
    for frame in encoded_files(
        [(0, entry_of(source), FilePlace.of(str(source)))], remote_digests=there
    ):
        for message, payload in messages(iter([frame, b""]).__next__):
            if not isinstance(message, FilePart):
                break
            receiver.take(message, payload)
            break
    receiver.end([])
    golden(receiver.problems)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("make", [os.link, os.symlink])
def test_a_half_that_is_somebody_elses_file_is_not_written_over(
    source: Path, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    folder, entry = target(tmp_path), entry_of(source)
    (tmp_path / "precious").write_bytes(b"precious")
    make(tmp_path / "precious", folder / part_name("a"))
    received(Receiver(str(folder), [entry]), source, entry)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert (folder / "a").read_bytes() == source.read_bytes()


def test_missing_piece_is_sent(golden: Golden, source: Path, tmp_path: Path) -> None:
    folder, entry = target(tmp_path), entry_of(source)
    receiver = Receiver(str(folder), [entry])
    receiver.begin([0])
    frames = encoded_files([(0, entry, FilePlace.of(str(source)))], remote_digests={0: "00" * 16})
    first, payload = next(messages(frames.__next__))
    assert isinstance(first, FilePart)
    receiver.take(first, payload)
    with golden.raises(ValueError):
        receiver.take(FilePiece(7, "00" * 16, False), b"")
    receiver.abort()
    assert list(folder.iterdir()) == []


@given(
    st.lists(
        st.lists(st.binary(min_size=16, max_size=16).filter(any), max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_pieces_on_several_nodes_are_used(lists: list[list[bytes]]) -> None:
    texts = [b"".join(each).hex() for each in lists]
    found = split_hashes(bytes.fromhex(common(texts)))
    for number, digest in enumerate(found):
        if any(digest):
            assert all(each[number] == digest for each in lists)
    assert common(texts[:1]) == texts[0]
