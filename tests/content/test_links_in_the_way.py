"""Links where folders were: a far end that is hostile, or anybody who swaps them meanwhile, chooses no place outside."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from skymagic.content.files.copy import Files
from skymagic.content.transfer.listing import FILE, FOLDER, LINK, Entry
from skymagic.errors import FilesError
from skymagic.wire.files import FileStart, encode
from tests.content.test_files import EVIL, Nodes, grow, hostile, node, one, tree
from tests.lab.golden import Golden
from tests.lab.nodes import start

__all__ = ["one"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder, with what is dear in it and a folder that is copied into."""
    return grow(tmp_path / "home", {".ssh/config": "mine", "work/": ""})


def untouched(home: Path) -> bool:
    return tree(home / ".ssh") == {"config": "mine"}


def test_three_copies_of_one_folder(golden: Golden, home: Path) -> None:
    """Each is harmless alone: the first copy's link is the second one's folder, and leads outside."""
    deep = [Entry(path, FOLDER) for path in ("out", "out/a", "out/a/b")]
    hostile(home, *deep, Entry("out/a/b/c", LINK, target="../..")).get("out", home / "work")
    second = hostile(
        home, *deep, Entry("out/a/b/c", FOLDER), Entry("out/a/b/c/l", LINK, target="../../.ssh")
    )
    third = hostile(
        home, Entry("out", FOLDER), Entry("out/l", FOLDER), Entry("out/l/keys", FILE, len(EVIL))
    )
    with golden.raises(FilesError):
        second.get("out", home / "work")
    third.get("out", home / "work")
    assert untouched(home)
    assert (home / "work/out/l/keys").read_bytes() == EVIL


def test_requested_folder_must_not_be_a_link(golden: Golden, home: Path) -> None:
    """With `~` as the target, ~/out would lead to ~/.ssh in the next copy."""
    with golden.raises(FilesError):
        hostile(home, Entry("out", LINK, target=".ssh")).get("out", home)
    assert not os.path.lexists(home / "out")


def test_a_nodes_own_folder_is_no_link(golden: Golden, home: Path) -> None:
    """Files that one node sent earlier must not redirect another node's files."""
    (home / "work/node1").symlink_to("../.ssh")
    roots = [grow(home / f"root{number}", {"out/x": "x"}) for number in range(2)]
    files = Files([node(number, root) for number, root in enumerate(roots)], start)
    with golden.raises(FilesError):
        files.get("out/", home / "work")
    assert untouched(home)


@pytest.mark.parametrize("where", ["out/sub", "out"])
def test_folder_swapped_during_a_transfer_is_refused(
    golden: Golden, home: Path, where: str
) -> None:
    """Between the comparison and the transfer, by somebody with write access."""
    entries = [
        Entry("out", FOLDER),
        Entry("out/sub", FOLDER),
        Entry("out/sub/keys", FILE, len(EVIL)),
    ]
    grow(home, {"work/out/sub/": "", ".ssh/sub/": ""})
    place = home / "work" / where
    swap = f"os.rename({str(place)!r}, {str(place)!r} + '.old'); os.symlink({str(home / '.ssh')!r}, {str(place)!r})"
    with golden.raises(FilesError):
        hostile(home, *entries, swap=swap).get("out", home / "work")
    assert tree(home / ".ssh") == {"config": "mine", "sub/": ""}


def test_a_folder_that_the_user_names_may_be_a_link(one: Nodes) -> None:
    """The user chooses the target; nothing below it is trusted."""
    grow(one.here, {"d/a": "a"})
    grow(one.roots[0], {"scratch/": ""})
    (one.roots[0] / "data").symlink_to("scratch")
    one.files.put(f"{one.here}/d/", "data")
    one.files.put(one.here / "d", "data/")
    assert tree(one.roots[0] / "scratch") == {"a": "a", "d/": "", "d/a": "a"}
    (one.here / "back").symlink_to("elsewhere")
    grow(one.here, {"elsewhere/": ""})
    one.files.get("data/", one.here / "back")
    assert (one.here / "elsewhere/d/a").read_text() == "a"


def test_put_refuses_a_link_in_the_way(golden: Golden, one: Nodes) -> None:
    """It is named before anything is written. A file that is a link is replaced, not followed."""
    grow(one.here, {"d/sub/x": "new", "d/sub/deep/y": "new", "d/a": "new"})
    grow(one.roots[0], {"d/": "", "dear/x": "mine", "dear/a": "mine"})
    (one.roots[0] / "d/sub").symlink_to("../dear")
    (one.roots[0] / "d/a").symlink_to("../dear/a")
    with golden.raises(FilesError):
        one.files.put(one.here / "d", "d")
    (one.roots[0] / "d/sub").unlink()
    one.files.put(one.here / "d", "d")
    assert tree(one.roots[0]) == {
        "d/": "", "d/a": "new", "d/sub/": "", "d/sub/x": "new", "d/sub/deep/": "", "d/sub/deep/y": "new",
        "dear/": "", "dear/a": "mine", "dear/x": "mine",
    }  # fmt: skip


def test_sync_removes_nothing_behind_a_link(one: Nodes) -> None:
    grow(one.here, {"sub/x": "x", "a": "a"})
    one.files.sync(one.here, "work")
    work = one.roots[0] / "work"
    (work / "sub").rename(one.roots[0] / "dear")
    (work / "sub").symlink_to("../dear")
    shutil.rmtree(one.here / "sub")
    assert [each.removed for each in one.files.sync(one.here, "work")] == [0]
    assert tree(one.roots[0] / "dear") == {"x": "x"}


def test_times_and_modes_are_given_to_no_link(golden: Golden, one: Nodes) -> None:
    """A file that was equal in the comparison becomes a link before its times are set."""
    grow(one.here, {"d/a": "same"})
    grow(one.roots[0], {"d/a": "same", "dear": "mine"})
    (one.roots[0] / "dear").chmod(0o600)
    before = (one.roots[0] / "dear").stat().st_mtime_ns
    place = str(one.roots[0] / "d/a")
    code = (
        "import os, skymagic.kernels.transfer_server as files\n"
        "write = files.TransferServer._write\n"
        "def swapped(self, request):\n"
        f"    os.unlink({place!r}); os.symlink('../dear', {place!r})\n"
        "    return write(self, request)\n"
        "files.TransferServer._write = swapped\n"
        "files.main()"
    )
    os.utime(one.here / "d/a", ns=(1, 1))
    (one.here / "d/a").chmod(0o777)
    files = Files([node(0, one.roots[0], sys.executable, "-c", code)], start)
    with golden.raises(FilesError):
        files.put(one.here / "d", "d")
    state = (one.roots[0] / "dear").stat()
    assert (state.st_mode & 0o777, state.st_mtime_ns) == (0o600, before)


def test_a_file_that_begins_before_another_has_ended(home: Path) -> None:
    """Leaves no partial file and no descriptor."""
    entries = [Entry("out", FOLDER), *(Entry(f"out/{number}", FILE, 9) for number in range(3))]
    swap = f"os.write(1, {b''.join(encode(FileStart(number, 0, 1, False, 1), b'x') for number in (1, 2))!r})"
    hostile(home, *entries, swap=swap).get("out", home / "work")
    assert tree(home / "work") == {
        "out/": "",
        **{f"out/{number}": EVIL.decode() for number in range(3)},
    }
