"""Put, get and sync: all nodes are compared first, then only what differs travels."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from skymagic.cluster import Node
from skymagic.errors import RequestError
from skymagic.files.changes import (
    PARTLY_COPIED,
    ByteCounter,
    Copied,
    Progress,
    changes,
    copied,
    files_error,
    large_pieces,
)
from skymagic.files.clients import NOTHING_COPIED, FileClient, FileClients, NodeFailed
from skymagic.files.ignore import unignored
from skymagic.files.transfer.folders import LinkInTheWay
from skymagic.files.transfer.listing import (
    FOLDER,
    LINK,
    Listing,
    absolute,
    listing,
    renamed,
    unsafe,
)
from skymagic.files.transfer.pieces import PIECE
from skymagic.files.transfer.receiving import Receiver
from skymagic.files.upload import DataPlane, Upload
from skymagic.wire import files as wire
from skymagic.wire.codec import Transport


@dataclass(frozen=True)
class Destination:
    """The name that the source takes at its place; None when it goes into the folder that is there."""

    name: str | None = None

    def base(self, place: str) -> str:
        """The folder that it goes into, for a place in full."""
        return place if self.name is None else str(PurePath(place).parent)


def destination(found: Listing, target: str, kinds: Collection[str]) -> Destination:
    """The destination, by the rules of cp and rsync.

    A folder's contents, and several files, go into `target`; and so does what is put where a folder is, or to a path that ends in
    ``/``. Anything else takes the name. A folder that is put to a folder of its own name is brought up to date, not put inside.

    Args:
        target: as the user wrote it.
        kinds: what is there now, on each machine.
    """
    last = target.replace(os.sep, "/").rpartition("/")[2]
    if found.contents or len(found.tops) != 1 or last in ("", ".", "..", "~"):
        return Destination()
    top = found.tops[0]
    inside = FOLDER in kinds and not (top.kind == FOLDER and top.name == last)
    return Destination(None if inside else last)


def unrequested(found: Listing, source: str) -> list[str]:
    """Names in a node's listing that `source` does not mean: a node must not choose what it writes here."""
    last = source.rstrip("/").rpartition("/")[2]
    wrong = {entry.path.split("/")[0] for entry in found.entries} if not found.contents else set()
    if last in ("", ".", "..", "~"):
        wrong = set() if len(wrong) <= 1 else wrong
    elif glob.has_magic(last):
        wrong = {name for name in wrong if name != last and not fnmatch.fnmatchcase(name, last)}
    else:
        wrong -= {last}
    links = [
        entry.path
        for entry in found.entries
        if entry.kind == LINK and "/" not in entry.path and not found.contents
    ]
    return [
        *(f"{name!r} is refused: {source} was asked for" for name in sorted(wrong)),
        *(
            f"{name!r} is refused: it is a link, and a file or a folder was asked for"
            for name in links
        ),
    ]


# -- what one node sends ---------------------------------------------------------------------------


class NodeDownload:
    """A download from one node: listed and compared when it is made.

    Raises:
        NodeFailed: why it cannot be downloaded.
    """

    def __init__(
        self,
        client: FileClient,
        src: str,
        place: Callable[[Node, Listing], tuple[str, str | None]],
        follow: bool,
    ) -> None:
        self.node = client.node
        self._found = Listing.of(client.request(wire.List(src, follow), wire.ListReply).listing)
        if problems := [
            *self._found.problems,
            *unsafe(self._found.entries),
            *unrequested(self._found, src),
        ]:
            raise NodeFailed(*problems)
        base, name = place(self.node, self._found)
        self._entries = renamed(self._found.entries, name)
        self._receiver = Receiver(base, self._entries)
        difference = self._receiver.comparison.compare(
            self._found.machine, self._found.tops, contents=self._found.contents
        )
        if difference.problems:
            raise NodeFailed(*difference.problems)
        asked = difference.ask
        theirs = client.request(wire.Hash(asked), wire.HashReply).hashes if asked else []
        self._changes = changes(difference, dict(zip(asked, theirs, strict=True)))
        want = self._changes.want
        self.nbytes = sum(self._entries[number].size for number in want)
        there = large_pieces(self._entries, want, difference.there)
        self._pieces = [there.get(number, "") for number in want]

    def run(self, client: FileClient, counter: ByteCounter) -> Copied:
        """Download the files.

        Raises:
            NodeFailed: what could not be written.
        """
        receiver = self._receiver
        path = ""

        def take(message: wire.FilePart, payload: bytes | memoryview) -> bool:
            nonlocal path
            receiver.take(message, payload)
            if isinstance(message, wire.FileStart):
                path = self._entries[message.number].path
            counter.add(path, PIECE if isinstance(message, wire.FilePiece) else len(payload))
            return not receiver.disk_full

        try:
            receiver.begin(self._changes.want)
            client.receive(wire.SendFiles(self._changes.want, self._pieces), take)
            receiver.end(self._changes.equal)
        except (EOFError, OSError):
            receiver.abort(keep=not client.interrupted)
            raise
        finally:
            receiver.abort()
        if receiver.problems:
            raise NodeFailed(*receiver.problems)
        return copied(
            self.node, self._entries, self._changes.want, receiver.nbytes, 0, self._found.notes
        )


# -- put, get and sync -----------------------------------------------------------------------------


class Files:
    """Copies between this machine and nodes.

    Args:
        nodes: the machines, the head first.
        start: starts ``skymagic.kernels.files`` on a node.
        plane: carries to several nodes at once what they lack; None where there is none.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        start: Callable[[Node], Transport],
        plane: DataPlane | None = None,
    ) -> None:
        self._nodes = tuple(nodes)
        self._start = start
        self._plane = plane

    def _selected(self, nodes: Collection[int] | None) -> list[Node]:
        known = {node.index for node in self._nodes}
        if wrong := sorted(set(nodes or ()) - known):
            raise RequestError(
                f"there is no node {wrong[0]}; available: {', '.join(map(str, sorted(known)))}"
            )
        return [node for node in self._nodes if nodes is None or node.index in nodes]

    def put(
        self,
        src: str | Path,
        dst: str,
        nodes: Collection[int] | None = None,
        progress: Progress = lambda name, done, total: None,
        *,
        follow: bool = False,
    ) -> tuple[Copied, ...]:
        """Copy a file or a folder to nodes; only what differs travels.

        Args:
            src: here; with a ``/`` at its end, a folder's contents.
            dst: there, relative to the folder in which ranks run.
            nodes: their numbers; None for all.
            follow: copy what links lead to outside of `src`; they stay behind otherwise.

        Raises:
            FilesError: what cannot be copied, for all nodes at once.
        """
        return self._upload(listing(os.fspath(src), follow=follow), dst, nodes, progress)

    def sync(
        self,
        folder: Path,
        dst: str,
        excludes: Sequence[str] = (),
        includes: Sequence[str] = (),
        nodes: Collection[int] | None = None,
        progress: Progress = lambda name, done, total: None,
    ) -> tuple[Copied, ...]:
        """Bring a folder's contents to nodes, without what .gitignore leaves out.

        What an earlier sync brought and is no longer here goes there too, unless it was changed there.

        Args:
            dst: a folder there; made when it is not there.
            excludes: patterns as in .gitignore.
            includes: files and folders that travel besides.

        Raises:
            FilesError: what cannot be copied, for all nodes at once.
        """
        return self._upload(
            unignored(folder, excludes, includes), dst, nodes, progress, mirror=True
        )

    def _upload(
        self,
        found: Listing,
        dst: str,
        nodes: Collection[int] | None,
        progress: Progress,
        *,
        mirror: bool = False,
    ) -> tuple[Copied, ...]:
        if found.problems:
            raise files_error(NOTHING_COPIED, [("", problem) for problem in found.problems], 1)
        counter = ByteCounter(progress)
        with FileClients(self._selected(nodes), self._start, counter.show) as clients:
            there = dict(clients.each(lambda client: (client.node, _stat(client, dst))))
            where = destination(found, dst, [reply.kind for reply in there.values()])
            bases = {node: where.base(reply.path) for node, reply in there.items()}
            entries = renamed(found.entries, where.name)
            return Upload(clients, found, entries, counter, self._plane).run(bases, mirror=mirror)

    def get(
        self,
        src: str,
        dst: str | Path,
        nodes: Collection[int] | None = None,
        progress: Progress = lambda name, done, total: None,
        *,
        follow: bool = False,
    ) -> tuple[Copied, ...]:
        """Copy a file or a folder from nodes; only what differs travels.

        Args:
            src: there; with a ``/`` at its end, a folder's contents.
            dst: here. From several nodes, what each has lands in a folder ``node0``, ``node1``, … there.
            nodes: their numbers; None for all.
            follow: copy what links lead to outside of `src`; they stay behind otherwise.

        Raises:
            FilesError: what cannot be copied, for all nodes at once.
        """
        chosen, target = self._selected(nodes), os.fspath(dst)
        try:
            full = Path(absolute(target))
        except LookupError as problem:
            raise files_error(NOTHING_COPIED, [("", str(problem))], 1) from None

        def place(node: Node, found: Listing) -> tuple[str, str | None]:
            """(the folder that a node's files go into, the name that they take there or None)."""
            if len(chosen) > 1:
                return str(_own_folder(full, node)), None
            where = destination(found, target, [FOLDER] if full.is_dir() else [])
            return where.base(str(full)), where.name

        counter = ByteCounter(progress)
        with FileClients(chosen, self._start, counter.show) as clients:
            downloads = clients.each(lambda client: NodeDownload(client, src, place, follow))
            counter.total = sum(download.nbytes for download in downloads)
            by_node = {download.node: download for download in downloads}
            return tuple(
                clients.each(
                    lambda client: by_node[client.node].run(client, counter), PARTLY_COPIED
                )
            )


def _own_folder(folder: Path, node: Node) -> Path:
    """Where a node's files go when there are several. The name is ours, so a link was left there by what was copied before."""
    if (own := folder / f"node{node.index}").is_symlink():
        raise NodeFailed(str(LinkInTheWay(str(own))))
    return own


def _stat(client: FileClient, path: str) -> wire.StatReply:
    """A path on a node in full, and what is there."""
    found = client.request(wire.Stat(path), wire.StatReply)
    if found.problem:
        raise NodeFailed(found.problem)
    return found
