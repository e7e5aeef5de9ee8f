"""Copying files: real processes stand for nodes; cp, git and the file system itself say what is right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.cluster import Node
from skymagic.content.files.changes import CopyResult, files_error, summary
from skymagic.content.files.copy import Files
from skymagic.content.transfer.listing import FILE, LINK, Entry, Listing, refuse_unsafe
from skymagic.errors import FilesError, RequestError
from skymagic.providers.local import ChildTransport
from skymagic.wire.files import EndOfFiles, FileStart, SendFilesReply, Top, encode
from tests.lab.ending import cmdline
from tests.lab.golden import Golden
from tests.lab.nodes import node_of, start
from tests.lab.notebook import opened
from tests.lab.raising import raises

MODULE = "skymagic.kernels.transfer_server"


def node(number: int, root: Path, *command: str) -> Node:
    """A process that stands for a node; `command` runs it in another way."""
    words = [*(command or (sys.executable, "-m", MODULE)), str(root)]
    return node_of(number, f"host{number}", lambda: ChildTransport(words))


class Nodes:
    """Several of them, each with a folder of its own, and a folder for the notebook's side."""

    def __init__(self, folder: Path, count: int) -> None:
        self.here = folder / "here"
        self.here.mkdir()
        self.roots = [folder / f"node{number}" for number in range(count)]
        for root in self.roots:
            root.mkdir()
        self.files = Files([node(number, root) for number, root in enumerate(self.roots)], start)


@pytest.fixture
def two(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path, 2)


@pytest.fixture
def one(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path, 1)


def tree(folder: Path) -> dict[str, str]:
    """Path → contents; a folder ends in "/", a link shows where it leads."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_dir():
            found[f"{name}/"] = ""
        else:
            found[name] = path.read_text(errors="surrogateescape")
    return found


def grow(folder: Path, files: dict[str, str]) -> Path:
    """Files with contents; a name that ends in "/" is a folder."""
    for name, text in files.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text, errors="surrogateescape")
    return folder


def sparse(path: Path, nbytes: int) -> None:
    """A file of zeros."""
    path.touch()
    os.truncate(path, nbytes)


def children() -> list[psutil.Process]:
    # tests of other files in this process may have left zombies, which have no command line
    return [one for one in psutil.Process().children() if MODULE in " ".join(cmdline(one))]


# -- where it lands --------------------------------------------------------------------------------------------------

SOURCE = {"data/a.txt": "a", "data/sub/b.txt": "b", "data/empty/": "", "file.txt": "file"}
AS_CP = [
    ("file.txt", "new.txt", {}),
    ("file.txt", "old.txt", {"old.txt": "longer than before"}),
    ("file.txt", "there", {"there/": ""}),
    ("file.txt", "there/", {"there/": ""}),
    ("file.txt", "there/other.txt", {"there/": ""}),
    ("file.txt", ".", {}),
    ("data", "copy", {}),
    ("data", "there", {"there/x": "x"}),
    ("data", "there/copy", {"there/": ""}),
    ("data", ".", {}),
    ("data/sub", "there", {"there/sub/b.txt": "old", "there/sub/c.txt": "c"}),
]


@pytest.mark.parametrize(("source", "target", "before"), AS_CP)
def test_it_lands_where_cp_puts_it(
    two: Nodes, source: str, target: str, before: dict[str, str]
) -> None:
    here = grow(two.here, SOURCE)
    for root in two.roots:
        grow(root, before)
    expected = grow(two.here.parent / "expected", {**before, "./": ""})
    subprocess.run(["cp", "-r", str(here / source), target], cwd=expected, check=True)
    two.files.put(here / source, target)
    assert tree(expected)
    for root in two.roots:
        assert tree(root) == tree(expected)


@pytest.mark.parametrize(
    ("source", "target", "before", "after"),
    [
        ("data/", "copy", {}, {"copy/": "", "copy/a.txt": "a", "copy/empty/": "", "copy/sub/": "", "copy/sub/b.txt": "b"}),
        ("data/sub/", "x/y/z", {}, {"x/": "", "x/y/": "", "x/y/z/": "", "x/y/z/b.txt": "b"}),
        ("data/sub/", "there/", {"there/k": "k"}, {"there/": "", "there/k": "k", "there/b.txt": "b"}),
        ("file.txt", "new/", {}, {"new/": "", "new/file.txt": "file"}),
        ("data/sub", "sub", {"sub/k": "k"}, {"sub/": "", "sub/k": "k", "sub/b.txt": "b"}),
        ("data/[as]*", "some", {}, {"some/": "", "some/a.txt": "a", "some/sub/": "", "some/sub/b.txt": "b"}),
        ("*.txt", "named.txt", {}, {"named.txt": "file"}),
    ],
)  # fmt: skip
def test_cases_beyond_cp(
    one: Nodes, source: str, target: str, before: dict[str, str], after: dict[str, str]
) -> None:
    grow(one.roots[0], before)
    one.files.put(f"{grow(one.here, SOURCE)}/{source}", target)
    assert tree(one.roots[0]) == after


def test_a_folder_on_one_node_is_one_for_all(two: Nodes) -> None:
    (two.roots[1] / "there").mkdir()
    two.files.put(grow(two.here, SOURCE) / "file.txt", "there")
    assert [tree(root) for root in two.roots] == [{"there/": "", "there/file.txt": "file"}] * 2


def test_home_and_chosen_nodes(golden: Golden, two: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    home = two.here.parent / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    two.files.put(grow(two.here, SOURCE) / "file.txt", "~/x/", nodes=[1])
    two.files.put(two.here / "file.txt", "only", nodes=[1])
    assert tree(home) == {"x/": "", "x/file.txt": "file"}
    assert [tree(root) for root in two.roots] == [{}, {"only": "file"}]
    assert [one.node for one in two.files.get("~/x", "~/back", nodes=[0])] == [0]
    assert (home / "back/file.txt").read_text() == "file"
    with pytest.raises(RequestError, match="no node 2; available: 0, 1"):
        two.files.put(two.here, "x", nodes=[2])
    with golden.raises(FilesError):
        two.files.put(two.here, "~nobody-of-that-name/x")


def test_from_several_nodes_into_folders_of_their_own(two: Nodes) -> None:
    for number, root in enumerate(two.roots):
        grow(root, {"out/log.txt": f"of {number}", "out/same": "same"})
    copied = two.files.get("out", two.here / "results")
    assert [(each.node, each.files) for each in copied] == [(0, 2), (1, 2)]
    two.files.get("out/", two.here / "results")
    for number in range(2):
        folder = two.here / f"results/node{number}"
        assert (
            (folder / "out/log.txt").read_text()
            == (folder / "log.txt").read_text()
            == f"of {number}"
        )
    two.files.get("out/log.txt", two.here / "alone", nodes=[1])
    assert (two.here / "alone").read_text() == "of 1"


def test_some_of_a_nodes_files_by_pattern(one: Nodes) -> None:
    grow(one.roots[0], {"out/a.log": "a", "out/b.log": "b", "out/c.txt": "c", "out/[x]": "x"})
    one.files.get("out/*.log", one.here / "logs")
    one.files.get("out/[x]", one.here)
    assert tree(one.here) == {"logs/": "", "logs/a.log": "a", "logs/b.log": "b", "[x]": "x"}


# -- what travels ----------------------------------------------------------------------------------------------------


def changed(copied: Sequence[CopyResult]) -> list[tuple[int, int, int]]:
    return [(each.files, each.nbytes, each.unchanged) for each in copied]


@pytest.mark.parametrize("back", [False, True], ids=["put", "get"])
def test_only_differences_are_sent(one: Nodes, back: bool) -> None:
    source, target = (one.roots[0], one.here) if back else (one.here, one.roots[0])
    grow(source, {"d/a": "1234", "d/b": "5678", "d/c": "90"})
    go: Callable[[], tuple[CopyResult, ...]]
    go = (
        (lambda: one.files.get("d/", one.here / "d"))
        if back
        else (lambda: one.files.put(one.here / "d", "d"))
    )
    assert changed(go()) == [(3, 10, 0)]
    assert changed(go()) == [(0, 0, 3)]
    os.utime(source / "d/a")  # another time, the same contents
    assert changed(go()) == [(0, 0, 3)]
    assert (target / "d/a").stat().st_mtime_ns == (source / "d/a").stat().st_mtime_ns
    (source / "d/b").write_text("8765")
    (source / "d/c").write_text("longer")
    assert changed(go()) == [(2, 10, 1)]
    assert tree(target) == tree(source)


def test_modes_times_links_and_names(one: Nodes) -> None:
    odd = ["-rf", "new\nline", "blank and 'quote\"", "ü", os.fsdecode(b"\xff\xfe"), "*", ".hidden"]
    source = grow(
        one.here / "d", {name: name for name in odd} | {"run.sh": "#!", "locked/x": "x", "sub/": ""}
    )
    (source / "run.sh").chmod(0o750)
    (source / "locked").chmod(0o555)
    (source / "link").symlink_to("locked/x")
    (source / "sub/up").symlink_to("../run.sh")
    os.utime(source / "-rf", ns=(1, 10**18 + 1))
    one.files.put(source, "d")
    copy = one.roots[0] / "d"
    assert tree(copy) == tree(source)
    for name in [*odd, "run.sh", "locked", "locked/x"]:
        assert (copy / name).stat().st_mode == (source / name).stat().st_mode
    assert (copy / "-rf").stat().st_mtime_ns == 10**18 + 1
    assert changed(one.files.put(source, "d")) == [(0, 0, 9)]
    (source / "link").unlink()
    (source / "link").symlink_to("run.sh")
    one.files.put(source, "d")
    assert (copy / "link").readlink() == Path("run.sh")


@pytest.mark.parametrize("direction", ["put", "get", "sync"])
def test_links_that_lead_out_stay_behind(one: Nodes, direction: str) -> None:
    """Another user's folder contains a link to a private file under an innocent name."""
    here, there = (one.here, one.roots[0]) if direction != "get" else (one.roots[0], one.here)
    grow(here, {"private/key": "secret", "d/a": "a", "d/inner/b": "b"})
    source = here / "d"
    (source / "notes.txt").symlink_to("../private/key")
    (source / "inner/full").symlink_to(here / "private")
    (source / "stays").symlink_to("inner/b")
    if direction == "sync":
        copied = one.files.sync(source, "d")
    else:
        copied = one.files.put(source, "d") if direction == "put" else one.files.get("d", there)
    came = {
        name: text for name, text in tree(there / "d").items() if not name.startswith(".skymagic-")
    }
    assert came == {"a": "a", "inner/": "", "inner/b": "b", "stays": "-> inner/b"}
    remedy = "--follow copies what it leads to"
    if direction == "sync":
        remedy = "sky.Image(includes=[…]) with its path copies it"
        one.files.sync(source, "d", includes=["notes.txt"])
        assert (there / "d/notes.txt").read_text() == "secret"
    assert list(copied[0].notes) == [
        f"{source}/inner/full is a link that points outside, to {here}/private: {remedy}",
        f"{source}/notes.txt is a link that points outside, to {here}/private/key: {remedy}",
    ]


def test_links_out_of_the_source_are_followed_on_request(golden: Golden, one: Nodes) -> None:
    grow(one.here, {"elsewhere/big/x": "x", "d/a": "a"})
    source = one.here / "d"
    (source / "out").symlink_to("../elsewhere/big")
    (source / "full").symlink_to(one.here / "elsewhere/big/x")
    (source / "dead").symlink_to("nowhere")
    (source / "loop").symlink_to(source)
    os.mkfifo(source / "fifo")
    copied = one.files.put(source, "d", follow=True)
    assert tree(one.roots[0] / "d") == {"a": "a", "full": "x", "out/": "", "out/x": "x"}
    golden(copied[0].notes)


def test_many_files_and_a_large_one(one: Nodes) -> None:
    source = grow(one.here / "d", {f"{number % 7}/{number}": str(number) for number in range(500)})
    (source / "large").write_bytes(os.urandom(5_000_001))
    seen: list[tuple[str, int, int]] = []
    copied = one.files.put(source, "d", progress=lambda *now: seen.append(now))
    assert changed(copied) == [(501, 5_000_001 + sum(len(str(n)) for n in range(500)), 0)]
    assert tree(one.roots[0] / "d") == tree(source)
    assert all(done <= total == copied[0].nbytes for _, done, total in seen)


# -- what is refused -------------------------------------------------------------------------------------------------


def test_onto_itself(golden: Golden, one: Nodes) -> None:
    grow(one.roots[0], {"d/a": "a", "f": "f"})
    link = one.here / "link"
    link.symlink_to(one.roots[0] / "d")
    for call in (
        lambda: one.files.put(one.roots[0] / "d", "d"),
        lambda: one.files.put(f"{one.roots[0]}/d/", "d"),
        lambda: one.files.put(f"{link}/", "d"),
        lambda: one.files.put(one.roots[0] / "f", "."),
        lambda: one.files.get("d", one.roots[0]),
        lambda: one.files.get("f", one.roots[0] / "f"),
    ):
        with golden.raises(FilesError):
            call()
    with golden.raises(FilesError):
        one.files.put(one.roots[0] / "d", "d/deeper")
    assert tree(one.roots[0]) == {"d/": "", "d/a": "a", "f": "f"}


def test_all_nodes_mistakes_at_once_and_nothing_copied(golden: Golden, two: Nodes) -> None:
    source = grow(two.here / "d", {"a": "a", "sub/b": "b"})
    grow(two.roots[0], {"x/d/a/": ""})
    grow(two.roots[1], {"x/d/sub": "a file"})
    with golden.raises(FilesError):
        two.files.put(source, "x/d")
    assert tree(two.roots[0]) == {"x/": "", "x/d/": "", "x/d/a/": ""}


def test_missing_files_and_folders_are_refused(golden: Golden, two: Nodes) -> None:
    with golden.raises(FilesError):
        two.files.put(two.here / "no", "x")
    with golden.raises(FilesError):
        two.files.put(two.here / "*.no", "x")
    grow(two.roots[0], {"only/here": "x"})
    with golden.raises(FilesError):
        two.files.get("only", two.here)
    assert tree(two.here) == {}
    grow(two.here, {"file": "x"})
    with golden.raises(FilesError):
        two.files.put(f"{two.here}/file/", "x")
    two.files.put(two.here / "file", "x")
    with golden.raises(FilesError):
        two.files.put(f"{two.here}/", "x")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that other users can reach too."""
    folder = Path(tempfile.mkdtemp(prefix="test-files-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_no_permission(golden: Golden, public: Path, tmp_path: Path) -> None:
    """As a user who is not root."""
    nobody = "os.setuid(65534); " if os.geteuid() == 0 else ""
    code = f"import os, skymagic.kernels.transfer_server as files; {nobody}files.main()"
    files = Files([node(0, public, sys.executable, "-c", code)], start)
    grow(public, {"mine/a": "old", "secret": "x"})
    (public / "mine").chmod(0o555)
    (public / "secret").chmod(0o000)
    source = grow(tmp_path, {"a": "new", "b": "b"})
    with golden.raises(FilesError, hide=[public]):
        files.put(f"{source}/", "mine")
    with golden.raises(FilesError, hide=[public]):
        files.get("secret", tmp_path / "back")
    (public / "mine").chmod(0o755)
    assert tree(public / "mine") == {"a": "old"}


def test_disk_full(tmp_path: Path) -> None:
    """Detected before the transfer, or during it; then complete files stay."""
    root = tmp_path / "root"
    root.mkdir()
    mount = 'mount -t tmpfs -o size=1m,nr_inodes=6 none "$1" && exec "$0" -m skymagic.kernels.transfer_server "$1"'
    command = ["unshare", "-rm", "sh", "-c", mount, sys.executable]
    if subprocess.run(
        [*command[:3], "-c", "mount -t tmpfs none /mnt"], capture_output=True
    ).returncode:
        pytest.skip("this machine makes no file systems for its users")
    files = Files([node(0, root, *command), node(1, tmp_path / "roomy")], start)
    grow(tmp_path, {"large": "x" * 2_000_000, **{f"many/{number}": "x" for number in range(9)}})
    with raises(FilesError, "files", r"node 0 \(host0\): .*/root: .*2.0 MB .*1.0 MB "):
        files.put(tmp_path / "large", ".")
    assert not (tmp_path / "roomy").exists()
    with raises(FilesError, "files", r"node 0 \(host0\): .*/many/\d: .*\bdisk\b"):
        files.put(tmp_path / "many", ".")
    assert len(tree(tmp_path / "roomy/many")) == 9


def test_every_sentence_once(golden: Golden) -> None:
    problems = [("node 0 (a)", "full"), ("node 1 (b)", "full"), ("node 1 (b)", "no permission")]
    golden(str(files_error("nothing was copied", problems, 2)))
    many = files_error("nothing was copied", [("a", str(number)) for number in range(30)], 2)
    golden(str(files_error("nothing was copied", [("", "\udcff\n")], 1)))
    assert str(many).splitlines()[-2:] == ["  a: 19", "  … and 10 more"]


def test_summary_of_a_copy() -> None:
    copied = [CopyResult(0, "gpu1", 2, 3_000_000, 4), CopyResult(1, "gpu2", 2, 3_000_000, 4)]
    assert (
        summary(copied, 0.1) == "2 files (3.0 MB) to 2 nodes each in 0.1 s; 4 files there already"
    )
    assert (
        summary(copied[:1], 3, to_nodes=False)
        == "2 files (3.0 MB) from gpu1 in 3.0 s, 1.0 MB/s; 4 files there already"
    )
    uneven = [
        CopyResult(0, "gpu1", 0, 0, 1),
        CopyResult(1, "gpu2", 1, 9, 0, 2, ("x stays behind",)),
    ]
    assert (
        summary(uneven, 0.1)
        == "1 file (9 bytes) to 2 nodes in 0.1 s; 1 file there already; 2 files removed\n  x stays behind"
    )


# -- nothing half, nothing foreign -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hangs", "back"),
    [("", False), ("", True), ("for a moment", False), ("for a moment", True), ("for good", False)],
    ids=["put", "get", "put, hangs for a moment", "get, hangs for a moment", "put, hangs for good"],
)
def test_an_interrupt_leaves_no_half_file_and_no_process(
    two: Nodes, hangs: str, back: bool
) -> None:
    """A node that hangs for a moment learns of the interrupt when it resumes, and keeps no part file."""
    for folder in two.roots if back else [two.here]:
        sparse(folder / "large", 3 << 30)
    hanging: list[psutil.Process] = []

    def press_stop(name: str, done: int, total: int) -> None:
        if (
            hanging and hangs == "for a moment"
        ):  # the pipe to it has filled, or the one from it is empty
            threading.Timer(1.0, hanging[0].resume).start()
        if hanging or (done and not hangs):
            raise KeyboardInterrupt
        # what has come of a file is worth keeping by then when a connection is lost
        if done > (200 << 20 if hangs == "for a moment" else 0):
            hanging.append(children()[0])
            hanging[0].suspend()

    copy = two.files.get if back else two.files.put
    source, target = ("large", two.here) if back else (two.here / "large", "copy")
    with pytest.raises(KeyboardInterrupt):
        copy(source, target, progress=press_stop)  # type: ignore[arg-type]
    assert bool(hanging) == bool(hangs)
    assert not children()
    if hangs != "for good":  # such a one is killed, and cannot tidy up
        folders = [two.here] if back else two.roots
        assert [path for folder in folders for path in folder.rglob("*") if path.is_file()] == []


def test_a_node_that_is_lost(golden: Golden, two: Nodes) -> None:
    grow(two.here, {"d/a": "a"})
    sparse(two.here / "d/large", 1 << 27)
    killed: list[int] = []

    def kill_one(name: str, done: int, total: int) -> None:
        if done and not killed:
            lost = next(one for one in children() if one.cmdline()[-1] == str(two.roots[1]))
            killed.append(lost.pid)
            lost.kill()

    with golden.raises(FilesError):
        two.files.put(two.here / "d", "d", progress=kill_one)
    assert (two.roots[0] / "d/large").stat().st_size == 1 << 27
    assert not (two.roots[1] / "d/large").exists()
    assert (two.roots[1] / "d/a").read_text() == "a"
    two.files.put(two.here / "d", "d")
    assert sorted(path.name for path in (two.roots[1] / "d").iterdir()) == ["a", "large"]


def test_a_node_that_cannot_answer(golden: Golden, tmp_path: Path) -> None:
    bad = node(0, tmp_path, sys.executable, "-c", "import no_such_module_here")
    with golden.raises(FilesError):
        Files([bad], start).get("x", tmp_path)
    chatty = node(0, tmp_path, sys.executable, "-c", "print('Welcome to this host')\ninput()")
    with golden.raises(FilesError):
        Files([chatty], start).get("x", tmp_path)


EVIL = b"evil"


def hostile(
    root: Path,
    *entries: Entry,
    swap: str = "",
    contents: bool = False,
    sent: Sequence[FileStart] | None = None,
) -> Files:
    """A node whose `out` holds these entries. Asked for files, it runs `swap`, and sends EVIL for each of `sent`: all files, unless given."""
    top = Top("out", "folder", "/out", 1, 1)
    listing = Listing(entries=[*entries], tops=[top], contents=contents, machine="elsewhere")
    if sent is None:
        numbers = [number for number, entry in enumerate(entries) if entry.kind == FILE]
        sent = [FileStart(number, 0, len(EVIL), True, len(EVIL)) for number in numbers]
    files = [encode(each, EVIL) for each in sent]
    lists, sends = (
        encode(listing.reply()),
        b"".join([*files, encode(EndOfFiles()), encode(SendFilesReply())]),
    )
    code = f"import os, sys\ninput(); os.write(1, {lists!r})\ninput()\n{swap}\nos.write(1, {sends!r})\nsys.stdin.read()"
    return Files([node(0, root, sys.executable, "-c", code)], start)


@pytest.mark.parametrize(
    ("entries", "contents"),
    [
        ([Entry("../evil", "file", 4)], True),
        ([Entry("out/../../evil", "file", 4)], False),
        ([Entry("/tmp/evil", "file", 4)], True),
        ([Entry("..\\evil", "file", 4)], True),
        ([Entry("c:evil", "file", 4)], True),
        ([Entry("x\0y", "file", 4)], True),
        ([Entry("", "file", 4)], True),
        ([Entry("out/.", "file", 4)], False),
        ([Entry("out/l", "link", target="/etc"), Entry("out/l/passwd", "file", 4)], False),
        ([Entry("out/l", "link", target="../..")], False),
        ([Entry("out/l", "link", target="a/../../..")], False),
        ([Entry("out/l", "link", target="")], False),
        ([Entry("out/l", "device")], False),
        ([Entry(".bashrc", "file", 4)], False),
        ([Entry("out", "folder"), Entry(".bashrc", "file", 4)], False),
    ],
)
def test_a_node_cannot_write_where_it_likes(
    tmp_path: Path, entries: list[Entry], contents: bool
) -> None:
    here = tmp_path / "a/b"
    here.mkdir(parents=True)
    with pytest.raises(FilesError, match="is refused"):
        hostile(tmp_path, *entries, contents=contents).get("out/" if contents else "out", here)
    assert tree(tmp_path) == {"a/": "", "a/b/": ""}


@pytest.mark.parametrize(
    ("size", "words"),
    [(3, "more bytes of a file than were announced"), (1 << 30, "out/new: it grew from 4 to")],
)
def test_a_node_cannot_send_more_than_it_announced(tmp_path: Path, size: int, words: str) -> None:
    entries = [Entry("out", "folder"), Entry("out/new", "file", 4)]
    evil = hostile(tmp_path, *entries, sent=[FileStart(1, 0, size, True, len(EVIL))])
    with pytest.raises(FilesError, match=words):
        evil.get("out", tmp_path)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("umask", [0o077, 0o027])
def test_a_copy_has_no_mode_that_the_umask_forbids(one: Nodes, umask: int) -> None:
    source = grow(one.roots[0] / "d", {"open": "1", "run.sh": "#!", "sub/x": "2"})
    for path, mode in (("open", 0o666), ("run.sh", 0o775), ("sub", 0o777)):
        (source / path).chmod(mode)
    before = os.umask(umask)
    try:
        one.files.get("d", one.here)
    finally:
        os.umask(before)
    modes = {
        path: (one.here / "d" / path).stat().st_mode & 0o777 for path in ("open", "run.sh", "sub")
    }
    assert modes == {"open": 0o666 & ~umask, "run.sh": 0o775 & ~umask, "sub": 0o777 & ~umask}


@pytest.mark.parametrize("sent", [1, 7, -1])
def test_node_cannot_send_unrequested_files(golden: Golden, tmp_path: Path, sent: int) -> None:
    entries = [Entry("out", "folder"), Entry("out/here", "file", 2, 5), Entry("out/new", "file", 4)]
    grow(tmp_path, {"out/here": "ok"})
    os.utime(tmp_path / "out/here", ns=(5, 5))
    evil = hostile(tmp_path, *entries, sent=[FileStart(sent, 0, len(EVIL), True, len(EVIL))])
    with golden.raises(FilesError):
        evil.get("out", tmp_path)
    assert tree(tmp_path) == {"out/": "", "out/here": "ok"}


NAMES = st.sampled_from(["a", "b", "a/b", "a/c", "b/c", "a/b/d"])
TARGETS = st.lists(st.sampled_from(["..", ".", "a", "b", "c", "d", ""]), max_size=5).map("/".join)


@given(st.lists(st.tuples(NAMES, TARGETS), max_size=5))
def test_allowed_links_cannot_leave_the_folder(links: list[tuple[str, str]]) -> None:
    entries = [Entry(path, LINK, target=target) for path, target in dict(links).items()]
    if refuse_unsafe(entries):
        return
    with tempfile.TemporaryDirectory(prefix="test-files-") as folder:
        base = Path(folder, "x/y/base").resolve()
        base.mkdir(parents=True)
        for entry in entries:
            (base / entry.path).parent.mkdir(parents=True, exist_ok=True)
            (base / entry.path).symlink_to(entry.target)
        for entry in entries:
            assert Path(os.path.realpath(base / entry.path)).is_relative_to(base)


# -- folders kept in step --------------------------------------------------------------------------------------------


def test_sync_copies_changes_and_removes_its_old_files(two: Nodes) -> None:
    grow(
        two.here,
        {
            "train.py": "1",
            "lib/a.py": "a",
            "lib/b.py": "b",
            "old/x.py": "x",
            ".gitignore": "*.log\n",
            "y.log": "y",
        },
    )
    first = two.files.sync(two.here, "work/project")
    assert [(each.files, each.removed) for each in first] == [(5, 0)] * 2
    works = [root / "work/project" for root in two.roots]
    for work in works:
        grow(work, {"checkpoint.pt": "mine", "lib/b.py": "changed there"})
    (two.here / "train.py").write_text("2")
    shutil.rmtree(two.here / "old")
    (two.here / "lib/b.py").unlink()
    again = two.files.sync(two.here, "work/project")
    assert [(each.files, each.nbytes, each.unchanged, each.removed) for each in again] == [
        (1, 1, 2, 1)
    ] * 2
    for work in works:
        found = tree(work)
        found.pop(".skymagic-sync")
        assert found == {
            ".gitignore": "*.log\n", "checkpoint.pt": "mine", "lib/": "", "lib/a.py": "a",
            "lib/b.py": "changed there", "train.py": "2",
        }  # fmt: skip
    assert [each.files for each in two.files.sync(two.here, "work/project")] == [0, 0]


def test_sync_ignores_a_false_record(one: Nodes) -> None:
    grow(one.here, {"a": "a"})
    grow(one.roots[0], {"work/": "", "precious": "x"})
    state = (one.roots[0] / "precious").stat()
    lie = Entry("../precious", "file", state.st_size, state.st_mtime_ns)
    (one.roots[0] / "work/.skymagic-sync").write_text(json.dumps([lie.plain()]))
    one.files.sync(one.here, "work")
    assert (one.roots[0] / "precious").read_text() == "x"


def test_excludes_and_includes(one: Nodes) -> None:
    here = grow(
        one.here / "project",
        {"a.py": "a", "data/small.bin": "s", "data/big.bin": "b", "out/x": "x", "notes.md": "n", ".git/config": "g",
         "__pycache__/a.pyc": "p", ".gitignore": "data/\nout/\n"},
    )  # fmt: skip
    grow(one.here, {"common/util.py": "u", "common/secret.key": "k"})
    one.files.sync(
        here,
        "work",
        excludes=["*.md", "*.key", "!/out/"],
        includes=["data/small.bin", "../common", "a.py"],
    )
    found = tree(one.roots[0] / "work")
    found.pop(".skymagic-sync")
    assert found == {
        ".gitignore": "data/\nout/\n", "a.py": "a", "data/": "", "data/small.bin": "s", "out/": "", "out/x": "x",
        "common/": "", "common/util.py": "u",
    }  # fmt: skip


# -- from a notebook -------------------------------------------------------------------------------------------------


def test_the_magics(golden: Golden, tmp_path: Path) -> None:
    grow(tmp_path, {"data/a.txt": "a", "data/b.txt": "bb"})
    with opened(tmp_path, "%sky_pool --nodes 2") as notebook:
        shown = notebook.run("%sky_put data copy")
        assert shown.said.startswith("2 files (3 bytes) to ")
        assert (tmp_path / "copy/b.txt").read_text() == "bb"
        assert "0 files (0 bytes) to" in notebook.run("%sky_put data/ copy").said
        assert notebook.run("%sky_get copy/a.txt back.txt --node all").said.startswith(
            "1 file (1 byte"
        )
        assert (tmp_path / "back.txt").read_text() == "a"
        error = notebook.fail("%sky_put data/ data/", "files")
        assert "Traceback" not in error.text
        assert "no node 5" in notebook.fail("%sky_get copy . --node 5").text
        golden(notebook.fail("%sky_put data").text)
        assert notebook.run("%sky_put data/a.txt c.txt").said.startswith("1 file")
