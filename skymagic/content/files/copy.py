"""Put, get and sync: all nodes are compared first, then only differences are transferred."""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from skymagic.cluster import Node
from skymagic.content.files.changes import (
    INCOMPLETE_COPY,
    ByteCounter,
    CopyResult,
    Progress,
    copy_result,
    files_error,
    files_to_write,
    present_pieces,
)
from skymagic.content.files.clients import NOTHING_COPIED, FileClient, FileClients, NodeFailed
from skymagic.content.files.ignore import unignored
from skymagic.content.files.upload import DataPlane, Upload
from skymagic.content.transfer.folders import LinkInTheWay
from skymagic.content.transfer.listing import (
    FOLDER,
    LINK,
    Listing,
    absolute,
    listing,
    refuse_unsafe,
    renamed,
)
from skymagic.content.transfer.receiving import Receiver
from skymagic.errors import RequestError
from skymagic.wire import files as files_wire
from skymagic.wire.codec import CHUNK, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Destination:
    """Name of the source at its destination; None if it goes into the existing folder."""

    name: str | None = None

    def base(self, path: str) -> str:
        """Return the folder to copy into; `path` is the absolute path of the destination."""
        return path if self.name is None else str(PurePath(path).parent)


def destination(listing: Listing, target: str, kinds: Collection[str]) -> Destination:
    """Determine the destination by the rules of cp and rsync.

    The contents of a folder, and several files, go into `target`; so does any source if `target` is
    a folder or ends in ``/``. Otherwise it takes the name of `target`. A folder put to an existing
    folder of the same name updates it instead of going inside.

    Args:
        target: as the user wrote it.
        kinds: what exists there now, on each machine.
    """
    last = target.replace(os.sep, "/").rpartition("/")[2]
    if listing.contents or len(listing.tops) != 1 or last in ("", ".", "..", "~"):
        return Destination()
    top = listing.tops[0]
    inside = FOLDER in kinds and not (top.kind == FOLDER and top.name == last)
    return Destination(None if inside else last)


def refuse_unrequested(listing: Listing, source: str) -> list[str]:
    """Return refusals of names in a node's listing that `source` does not match.

    A node must not choose which files it writes here.
    """
    last = source.rstrip("/").rpartition("/")[2]
    wrong = (
        {entry.path.split("/")[0] for entry in listing.entries} if not listing.contents else set()
    )
    if last in ("", ".", "..", "~"):
        wrong = set() if len(wrong) <= 1 else wrong
    elif glob.has_magic(last):
        wrong = {name for name in wrong if name != last and not fnmatch.fnmatchcase(name, last)}
    else:
        wrong -= {last}
    links = [
        entry.path
        for entry in listing.entries
        if entry.kind == LINK and "/" not in entry.path and not listing.contents
    ]
    return [
        *(f"{name!r} is refused: {source} was asked for" for name in sorted(wrong)),
        *(
            f"{name!r} is refused: it is a link, and a file or a folder was asked for"
            for name in links
        ),
    ]


# -- downloads from one node -----------------------------------------------------------------------


class NodeDownload:
    """A download from one node, listed and compared by the constructor.

    Raises:
        NodeFailed: the reasons why it cannot be downloaded.
    """

    def __init__(
        self,
        client: FileClient,
        src: str,
        target_of: Callable[[Node, Listing], tuple[str, str | None]],
        follow: bool,
    ) -> None:
        self.node = client.node
        self._found = Listing.of(client.request(files_wire.List(src, follow), files_wire.ListReply))
        if problems := [
            *self._found.problems,
            *refuse_unsafe(self._found.entries),
            *refuse_unrequested(self._found, src),
        ]:
            raise NodeFailed(*problems)
        base, name = target_of(self.node, self._found)
        self._entries = renamed(self._found.entries, name)
        self._receiver = Receiver(base, self._entries)
        difference = self._receiver.comparison.compare(
            self._found.machine, self._found.tops, contents=self._found.contents
        )
        if difference.problems:
            raise NodeFailed(*difference.problems)
        unclear = difference.ask
        hashes = (
            client.request(files_wire.Hash(unclear), files_wire.HashReply).hashes if unclear else []
        )
        self._changes = files_to_write(difference, dict(zip(unclear, hashes, strict=True)))
        want = self._changes.to_write
        self.nbytes = sum(self._entries[number].size for number in want)
        pieces = present_pieces(self._entries, want, difference.present)
        self._pieces = [pieces.get(number, "") for number in want]

    def run(self, client: FileClient, counter: ByteCounter) -> CopyResult:
        """Download the files.

        Raises:
            NodeFailed: the files that could not be written.
        """
        receiver = self._receiver
        path = ""

        def take(message: files_wire.FilePart, payload: bytes | memoryview) -> bool:
            nonlocal path
            receiver.take(message, payload)
            if isinstance(message, files_wire.FileStart):
                path = self._entries[message.number].path
            counter.add(path, CHUNK if isinstance(message, files_wire.FilePiece) else len(payload))
            return not receiver.disk_full

        try:
            receiver.begin(self._changes.to_write)
            client.receive(files_wire.SendFiles(self._changes.to_write, self._pieces), take)
            receiver.end(self._changes.same_content)
        except (EOFError, OSError):
            receiver.abort(keep=not client.interrupted)
            raise
        finally:
            receiver.abort()
        if receiver.problems:
            raise NodeFailed(*receiver.problems)
        return copy_result(
            self.node, self._entries, self._changes.to_write, receiver.nbytes, 0, self._found.notes
        )


# -- put, get and sync -----------------------------------------------------------------------------


class Files:
    """Copies between this machine and nodes.

    Args:
        nodes: the machines, the head first.
        start: starts ``skymagic.kernels.transfer_server`` on a node.
        plane: carries files that several nodes lack to all of them at once; None if unavailable.
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

    def _select_nodes(self, nodes: Collection[int] | None) -> list[Node]:
        available = {node.index for node in self._nodes}
        if wrong := sorted(set(nodes or ()) - available):
            raise RequestError(
                f"there is no node {wrong[0]}; available: {', '.join(map(str, sorted(available)))}",
                code="no-node",
                node=wrong[0],
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
    ) -> tuple[CopyResult, ...]:
        """Copy a file or a folder to nodes; only differences are transferred.

        Args:
            src: local path; with a trailing ``/``, a folder's contents.
            dst: remote path, relative to the folder in which ranks run.
            nodes: their numbers; None for all.
            follow: also copy targets of links that lead out of `src`; otherwise these links are
                skipped.

        Raises:
            FilesError: everything that cannot be copied, for all nodes at once.
        """
        logger.info("files are sent: nodes=%s", "all" if nodes is None else sorted(nodes))
        return self._upload(listing(os.fspath(src), follow=follow), dst, nodes, progress)

    def sync(
        self,
        folder: Path,
        dst: str,
        excludes: Sequence[str] = (),
        includes: Sequence[str] = (),
        nodes: Collection[int] | None = None,
        progress: Progress = lambda name, done, total: None,
    ) -> tuple[CopyResult, ...]:
        """Sync a folder's contents to nodes, without files ignored by .gitignore.

        Files from an earlier sync that no longer exist here are removed there too, unless they were
        changed there.

        Args:
            dst: a remote folder, created if it does not exist.
            excludes: patterns as in .gitignore.
            includes: additional files and folders.

        Raises:
            FilesError: everything that cannot be copied, for all nodes at once.
        """
        logger.info("folder is synced: nodes=%s", "all" if nodes is None else sorted(nodes))
        return self._upload(
            unignored(folder, excludes, includes), dst, nodes, progress, mirror=True
        )

    def _upload(
        self,
        listing: Listing,
        dst: str,
        nodes: Collection[int] | None,
        progress: Progress,
        *,
        mirror: bool = False,
    ) -> tuple[CopyResult, ...]:
        if listing.problems:
            raise files_error(NOTHING_COPIED, [("", problem) for problem in listing.problems], 1)
        counter = ByteCounter(progress)
        with FileClients(self._select_nodes(nodes), self._start, counter.show) as clients:
            replies = dict(clients.run_on_all(lambda client: (client.node, _stat(client, dst))))
            goal = destination(listing, dst, [reply.kind for reply in replies.values()])
            bases = {node: goal.base(reply.path) for node, reply in replies.items()}
            entries = renamed(listing.entries, goal.name)
            return Upload(clients, listing, entries, counter, self._plane).run(bases, mirror=mirror)

    def get(
        self,
        src: str,
        dst: str | Path,
        nodes: Collection[int] | None = None,
        progress: Progress = lambda name, done, total: None,
        *,
        follow: bool = False,
    ) -> tuple[CopyResult, ...]:
        """Copy a file or a folder from nodes; only differences are transferred.

        Args:
            src: remote path; with a trailing ``/``, a folder's contents.
            dst: local path. From several nodes, each node's files go into a folder ``node0``,
                ``node1``, … inside it.
            nodes: their numbers; None for all.
            follow: also copy targets of links that lead out of `src`; otherwise these links are
                skipped.

        Raises:
            FilesError: everything that cannot be copied, for all nodes at once.
        """
        selected, target = self._select_nodes(nodes), os.fspath(dst)
        try:
            full = Path(absolute(target))
        except LookupError as problem:
            raise files_error(NOTHING_COPIED, [("", str(problem))], 1) from None

        def target_of(node: Node, listing: Listing) -> tuple[str, str | None]:
            """Return the folder for a node's files, and their new name there or None."""
            if len(selected) > 1:
                return str(_own_folder(full, node)), None
            goal = destination(listing, target, [FOLDER] if full.is_dir() else [])
            return goal.base(str(full)), goal.name

        counter = ByteCounter(progress)
        with FileClients(selected, self._start, counter.show) as clients:
            downloads = clients.run_on_all(
                lambda client: NodeDownload(client, src, target_of, follow)
            )
            counter.total = sum(download.nbytes for download in downloads)
            by_node = {download.node: download for download in downloads}
            return tuple(
                clients.run_on_all(
                    lambda client: by_node[client.node].run(client, counter), INCOMPLETE_COPY
                )
            )


def _own_folder(folder: Path, node: Node) -> Path:
    """Return the folder for one of several nodes.

    skymagic chose its name, so a link there was left by earlier copied files, and is refused.
    """
    if (own := folder / f"node{node.index}").is_symlink():
        raise NodeFailed(str(LinkInTheWay(str(own))))
    return own


def _stat(client: FileClient, path: str) -> files_wire.StatReply:
    """Return a node's absolute form of a path, and the kind of file there."""
    reply = client.request(files_wire.Stat(path), files_wire.StatReply)
    if reply.problem:
        raise NodeFailed(reply.problem)
    return reply
