"""Put, get and sync: all nodes are compared first, then only what differs travels."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from skymagic.cluster import Node
from skymagic.errors import RequestError
from skymagic.files.clients import NOTHING_COPIED, FileClient, FileClients, NodeFailed
from skymagic.files.destination import destination, unrequested
from skymagic.files.ignore import unignored
from skymagic.files.messages import Copied, files_error, printable
from skymagic.files.transfer.entries import FILE, FOLDER, Entry, renamed, unsafe
from skymagic.files.transfer.folders import LinkInTheWay
from skymagic.files.transfer.listing import Listing, absolute, digests, listing
from skymagic.files.transfer.receiving import Receiver
from skymagic.files.transfer.sending import encoded_files
from skymagic.wire import files as wire
from skymagic.wire.transport import Transport

Progress = Callable[[str, int, int], None]
"""Called with the path of a file under way, the bytes moved so far, and all bytes to move."""
PARTLY_COPIED = "not all was copied"


class ByteCounter:
    """Progress counter that several threads add to.

    Args:
        progress: called with the state, by `show` only.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._name, self._done, self.total = "", 0, 0

    def add(self, name: str, count: int) -> None:
        """So many bytes more, of this file."""
        with self._lock:
            self._name, self._done = name, self._done + count

    def show(self) -> None:
        """Report the progress."""
        if self.total:
            self._progress(printable(self._name), self._done, self.total)


class Files:
    """Copies between this machine and nodes.

    Args:
        nodes: the machines, the head first.
        start: starts ``skymagic.kernels.files`` on a node.
    """

    def __init__(self, nodes: Sequence[Node], start: Callable[[Node], Transport]) -> None:
        self._nodes = tuple(nodes)
        self._start = start

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
    ) -> tuple[Copied, ...]:
        """Copy a file or a folder to nodes; only what differs travels.

        Args:
            src: here; with a ``/`` at its end, a folder's contents.
            dst: there, relative to the folder in which ranks run.
            nodes: their numbers; None for all.

        Raises:
            FilesError: what cannot be copied, for all nodes at once.
        """
        return self._upload(listing(os.fspath(src)), dst, nodes, progress)

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
            return _upload(clients, found, renamed(found.entries, where.name), bases, counter, mirror)

    def get(
        self,
        src: str,
        dst: str | Path,
        nodes: Collection[int] | None = None,
        progress: Progress = lambda name, done, total: None,
    ) -> tuple[Copied, ...]:
        """Copy a file or a folder from nodes; only what differs travels.

        Args:
            src: there; with a ``/`` at its end, a folder's contents.
            dst: here. From several nodes, what each has lands in a folder ``node0``, ``node1``, … there.
            nodes: their numbers; None for all.

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
            downloads = clients.each(lambda client: _Download(client, src, place))
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


def _upload(
    clients: FileClients,
    found: Listing,
    entries: list[Entry],
    bases: Mapping[Node, str],
    counter: ByteCounter,
    mirror: bool,
) -> tuple[Copied, ...]:
    """Upload entries to all nodes, into their `bases`."""
    plain, tops = [entry.plain() for entry in entries], [vars(top) for top in found.tops]

    def compare(client: FileClient) -> tuple[Node, wire.CompareReply]:
        request = wire.Compare(bases[client.node], plain, tops, found.contents, found.machine, mirror)
        reply = client.request(request, wire.CompareReply)
        if reply.problems:
            raise NodeFailed(*reply.problems)
        return client.node, reply

    replies = dict(clients.each(compare))
    asked = sorted({number for reply in replies.values() for number in reply.ask})
    known = dict(zip(asked, digests(found.paths[number] for number in asked), strict=True))
    changes_by_node = {node: _changes(reply.want, reply.ask, reply.hashes, known) for node, reply in replies.items()}
    counter.total = sum(entries[number].size for changes in changes_by_node.values() for number in changes.want)

    def write(client: FileClient) -> Copied:
        changes = changes_by_node[client.node]
        frames = encoded_files(((number, entries[number], found.paths[number]) for number in changes.want), counter.add)
        reply = client.send(changes, frames)
        if reply.problems:
            raise NodeFailed(*reply.problems)
        return _summary(client.node, entries, changes.want, reply.removed, found.notes)

    return tuple(clients.each(write, PARTLY_COPIED))


def _changes(want: Sequence[int], asked: Sequence[int], hashes: Sequence[str], known: Mapping[int, str]) -> wire.Write:
    """What one side is to get: files of the same size travel when their hashes differ."""
    theirs = dict(zip(asked, hashes, strict=True))
    equal = [number for number, said in theirs.items() if said and known[number] == said]
    return wire.Write(sorted({*want, *theirs} - set(equal)), equal)


def _summary(node: Node, entries: Sequence[Entry], want: Sequence[int], removed: int, notes: Sequence[str]) -> Copied:
    files = sum(entry.kind == FILE for entry in entries)
    nbytes = sum(entries[number].size for number in want)
    return Copied(node.index, node.name, len(want), nbytes, files - len(want), removed, tuple(notes))


class _Download:
    """A download from one node: listed and compared when it is made.

    Raises:
        NodeFailed: why it cannot be downloaded.
    """

    def __init__(self, client: FileClient, src: str, place: Callable[[Node, Listing], tuple[str, str | None]]) -> None:
        self.node = client.node
        self._found = Listing.of(client.request(wire.List(src), wire.ListReply).listing)
        if problems := [*self._found.problems, *unsafe(self._found.entries), *unrequested(self._found, src)]:
            raise NodeFailed(*problems)
        base, name = place(self.node, self._found)
        self._entries = renamed(self._found.entries, name)
        self._receiver = Receiver(base, self._entries)
        difference = self._receiver.compare(self._found.machine, self._found.tops, contents=self._found.contents)
        if difference.problems:
            raise NodeFailed(*difference.problems)
        asked = difference.ask
        theirs = client.request(wire.Hash(asked), wire.HashReply).hashes if asked else []
        here = dict(zip(asked, self._receiver.hashes(asked), strict=True))
        self._changes = _changes(difference.want, asked, theirs, here)
        self.nbytes = sum(self._entries[number].size for number in self._changes.want)

    def run(self, client: FileClient, counter: ByteCounter) -> Copied:
        """Download it.

        Raises:
            NodeFailed: what could not be written.
        """
        receiver = self._receiver
        path = ""

        def take(message: wire.FileMessage, payload: bytes | memoryview) -> bool:
            nonlocal path
            receiver.take(message, payload)
            if isinstance(message, wire.FileStart):
                path = self._entries[message.number].path
            counter.add(path, len(payload))
            return not receiver.disk_full

        try:
            receiver.begin(self._changes.want)
            client.receive(wire.Send(self._changes.want), take)
            receiver.end(self._changes.equal)
        finally:
            receiver.abort()
        if receiver.problems:
            raise NodeFailed(*receiver.problems)
        return _summary(self.node, self._entries, self._changes.want, 0, self._found.notes)
