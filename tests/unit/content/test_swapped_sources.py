"""A source in a folder of another user's, who puts links to private files in its way while it is listed and before it is sent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from skymagic.content.transfer.listing import Listing, listing
from skymagic.content.transfer.pieces import encoded_files
from skymagic.wire.files import EndOfFiles, FileFailed, messages
from tests.content.test_files import grow
from tests.lab.golden import Golden

PRIVATE = "a private key"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A private folder beside one that is copied; names below are the same, as an attacker would choose them."""
    return grow(
        tmp_path,
        {
            "private/id": PRIVATE,
            "private/sub/id": PRIVATE,
            "out/id": "harmless",
            "out/sub/id": "harmless",
        },
    )


def link(path: Path, target: Path) -> None:
    """Put a link in the place of a file or folder."""
    path.rename(path.with_name(f"{path.name}.before"))
    path.symlink_to(target)


def pipe(path: Path, _: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def sent(found: Listing) -> tuple[bytes, list[str]]:
    """All bytes that are sent of what is listed, and what was not."""
    files = [
        (n, entry, found.file_places[n])
        for n, entry in enumerate(found.entries)
        if entry.kind == "file"
    ]
    frames: Iterator[bytes] = iter(list(encoded_files(files)))
    data, failed = b"", []
    for message, payload in messages(lambda: next(frames, b"")):
        data += bytes(payload)
        if isinstance(message, FileFailed):
            failed.append(str(message.reason))
        if isinstance(message, EndOfFiles):
            break
    return data, failed


@pytest.mark.parametrize(
    ("swap", "swapped", "target"),
    [
        (link, "out/id", "private/id"),
        (link, "out/sub", "private/sub"),
        (link, "out", "private"),
        (pipe, "out/id", ""),
    ],
)
def test_a_link_after_the_listing(
    golden: Golden, home: Path, swap: Callable[[Path, Path], None], swapped: str, target: str
) -> None:
    found = listing(str(home / "out"))
    swap(home / swapped, home / target)
    data, failed = sent(found)
    assert PRIVATE.encode() not in data
    expected = [name for name in ("out/id", "out/sub/id") if name.startswith(swapped)]
    assert len(failed) == len(expected)
    golden(failed, hide=[home])


def test_a_file_that_an_editor_saves_after_the_listing(home: Path) -> None:
    found = listing(str(home / "out"))
    grow(home, {"out/id.new": "saved"})
    (home / "out/id.new").rename(home / "out/id")
    assert sent(found) == (b"savedharmless", [])


def test_a_link_during_the_listing(home: Path) -> None:
    """A folder becomes a link after it was checked and before it is opened."""

    looks = 0

    def swap() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            link(home / "out/sub", home / "private/sub")
        return False

    found = listing(str(home / "out"), stopped=swap)
    assert (home / "out/sub").is_symlink()
    assert [entry.path for entry in found.entries] == ["out", "out/id", "out/sub"]
    assert len(found.problems) == 1


def test_a_link_above_during_the_listing(home: Path) -> None:
    """Each folder is opened relative to its parent's descriptor, not by its path."""
    grow(home, {"private/deep/sub/other": PRIVATE, "out/deep/sub/id": "harmless"})
    looks = 0

    def swap() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            shutil.rmtree(home / "out/sub")
            link(home / "out/deep", home / "private/deep")
        return False

    found = listing(str(home / "out"), stopped=swap)
    assert (home / "out/deep").is_symlink()
    assert "out/deep/sub/id" in [entry.path for entry in found.entries]
    assert "out/deep/sub/other" not in [entry.path for entry in found.entries]
    data, failed = sent(found)
    assert PRIVATE.encode() not in data
    assert any("out/deep/sub/id: replaced" in words for words in failed)


def test_no_descriptor_stays_open(home: Path) -> None:
    before = psutil.Process().num_fds()
    found = listing(str(home / "out"))
    sent(found)
    half: Iterator[bytes] = encoded_files([(1, found.entries[1], found.file_places[1])])
    next(half)
    del half  # an interrupted copy
    assert psutil.Process().num_fds() == before
