"""Put, get and sync: all nodes are compared first, then only what differs travels."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from skymagic.cluster import Node
from skymagic.errors import RequestError
from skymagic.files.changes import PARTLY_COPIED, ByteCounter, Progress
from skymagic.files.clients import NOTHING_COPIED, FileClient, FileClients, NodeFailed
from skymagic.files.destination import destination
from skymagic.files.download import Download
from skymagic.files.ignore import unignored
from skymagic.files.messages import Copied, files_error
from skymagic.files.multicast import DataPlane
from skymagic.files.transfer.entries import FOLDER, renamed
from skymagic.files.transfer.folders import LinkInTheWay
from skymagic.files.transfer.listing import Listing, absolute, listing
from skymagic.files.upload import Upload
from skymagic.wire import files as wire
from skymagic.wire.codec import Transport


class Files:
    """Copies between this machine and nodes.

    Args:
        nodes: the machines, the head first.
        start: starts ``skymagic.kernels.files`` on a node.
        plane: carries to several nodes at once what they lack; None where there is none.
    """

    def __init__(
        self, nodes: Sequence[Node], start: Callable[[Node], Transport], plane: DataPlane | None = None
    ) -> None:
        self._nodes = tuple(nodes)
        self._start = start
        self._plane = plane

    def _selected(self, nodes: Collection[int] | None) -> list[Node]:
        known = {node.index for node in self._nodes}
        if wrong := sorted(set(nodes or ()) - known):
            raise RequestError(f"there is no node {wrong[0]}: there are {', '.join(map(str, sorted(known)))}")
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
        return self._upload(unignored(folder, excludes, includes), dst, nodes, progress, mirror=True)

    def _upload(
        self, found: Listing, dst: str, nodes: Collection[int] | None, progress: Progress, *, mirror: bool = False
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
            downloads = clients.each(lambda client: Download(client, src, place, follow))
            counter.total = sum(download.nbytes for download in downloads)
            by_node = {download.node: download for download in downloads}
            return tuple(clients.each(lambda client: by_node[client.node].run(client, counter), PARTLY_COPIED))


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
