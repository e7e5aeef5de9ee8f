"""Put, get, sync: what differs is found on all nodes first, then only that travels."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from skymagic.cluster import Node
from skymagic.errors import RequestError
from skymagic.files.clients import Line, Lines, Trouble
from skymagic.files.destination import landing, unasked
from skymagic.files.ignore import going_along
from skymagic.files.messages import Copied, failed, shown
from skymagic.files.transfer.entries import FILE, FOLDER, Entry, renamed, strange
from skymagic.files.transfer.listing import Listing, absolute, digests, listing
from skymagic.files.transfer.receiving import Difference, Receiver
from skymagic.files.transfer.sending import sent
from skymagic.wire.files import (
    Compare,
    CompareReply,
    FileMessage,
    FileStart,
    Hash,
    HashReply,
    List,
    ListReply,
    Send,
    Stat,
    StatReply,
    Write,
)
from skymagic.wire.transport import Transport

Progress = Callable[[str, int, int], None]
"""Takes the path of a file under way, and how many bytes of how many are on their way or there."""
NOTHING, PART = "nothing was copied", "not all was copied"


class Meter:
    """Counts bytes that several threads move.

    Args:
        progress: who wants to know.
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
        """Tell how far it is."""
        if self.total:
            self._progress(shown(self._name), self._done, self.total)


@dataclass
class _Work:
    """What one node is to get: files by number, those that are equal but for their time, and how many are there."""

    want: list[int]
    equal: list[int]


class Files:
    """Copies between this machine and nodes.

    Args:
        nodes: the machines, the head first.
        start: starts ``skymagic.kernels.files`` on a node.
    """

    def __init__(self, nodes: Sequence[Node], start: Callable[[Node], Transport]) -> None:
        self._nodes = tuple(nodes)
        self._start = start

    def _chosen(self, nodes: Collection[int] | None) -> list[Node]:
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
        found = _checked(listing(os.fspath(src)))
        meter = Meter(progress)
        with Lines(self._chosen(nodes), self._start, meter.show) as lines:
            places = {line.node: line for line in lines.each(lambda line: _Place(line, dst))}
            where = landing(found, dst, [place.kind for place in places.values()])
            entries = renamed(found.entries, where.name)
            return _bring(lines, found, entries, lambda line: where.base(places[line.node].path), meter)

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
        found = _checked(going_along(folder, excludes, includes))
        meter = Meter(progress)
        with Lines(self._chosen(nodes), self._start, meter.show) as lines:
            places = {line.node: line for line in lines.each(lambda line: _Place(line, dst))}
            return _bring(
                lines, found, found.entries, lambda line: places[line.node].path, meter, mirror=True
            )

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
        chosen = self._chosen(nodes)
        goal = _Goal(os.fspath(dst), several=len(chosen) > 1)
        meter = Meter(progress)
        with Lines(chosen, self._start, meter.show) as lines:
            fetches = lines.each(lambda line: _Fetch(line, src, goal))
            meter.total = sum(fetch.nbytes for fetch in fetches)
            by_node = {fetch.node: fetch for fetch in fetches}
            return tuple(lines.each(lambda line: by_node[line.node].carry_out(line, meter), PART))


class _Place:
    """Where a node has what the user calls `path`."""

    def __init__(self, line: Line, path: str) -> None:
        found = line.ask(Stat(path), StatReply)
        if found.problem:
            raise Trouble(found.problem)
        self.node, self.path, self.kind = line.node, found.path, found.kind


def _checked(found: Listing) -> Listing:
    if found.problems:
        raise failed(NOTHING, [("", problem) for problem in found.problems], 1)
    return found


def _bring(
    lines: Lines,
    found: Listing,
    entries: list[Entry],
    base: Callable[[Line], str],
    meter: Meter,
    *,
    mirror: bool = False,
) -> tuple[Copied, ...]:
    """Bring entries to all nodes."""
    plain, tops = [entry.plain() for entry in entries], [vars(top) for top in found.tops]

    def compare(line: Line) -> tuple[Node, CompareReply]:
        request = Compare(base(line), plain, tops, found.contents, found.machine, mirror)
        answer = line.ask(request, CompareReply)
        if answer.problems:
            raise Trouble(*answer.problems)
        return line.node, answer

    answers = dict(lines.each(compare))
    known = _hashes(found.paths, {number for answer in answers.values() for number in answer.ask})
    works = {node: _work(answer.want, answer.ask, answer.hashes, known) for node, answer in answers.items()}
    meter.total = sum(entries[number].size for work in works.values() for number in work.want)

    def write(line: Line) -> Copied:
        work = works[line.node]
        frames = sent(((number, entries[number], found.paths[number]) for number in work.want), meter.add)
        answer = line.send(Write(work.want, work.equal), frames)
        if answer.problems:
            raise Trouble(*answer.problems)
        return _copied(line.node, entries, work.want, answer.removed, found.notes)

    return tuple(lines.each(write, PART))


def _hashes(paths: Sequence[str], numbers: Iterable[int]) -> dict[int, str]:
    asked = sorted(numbers)
    return dict(zip(asked, digests(paths[number] for number in asked), strict=True))


def _work(
    want: Sequence[int], asked: Sequence[int], hashes: Sequence[str], known: Mapping[int, str]
) -> _Work:
    """Files of the same size travel when their hashes differ."""
    theirs = dict(zip(asked, hashes, strict=True))
    equal = [number for number, said in theirs.items() if said and known[number] == said]
    return _Work(sorted({*want, *theirs} - set(equal)), equal)


def _copied(
    node: Node, entries: Sequence[Entry], want: Sequence[int], removed: int, notes: Sequence[str]
) -> Copied:
    files = sum(entry.kind == FILE for entry in entries)
    nbytes = sum(entries[number].size for number in want)
    return Copied(node.index, node.name, len(want), nbytes, files - len(want), removed, tuple(notes))


class _Goal:
    """Where it is to land here."""

    def __init__(self, text: str, *, several: bool) -> None:
        self._text, self._several = text, several
        try:
            self._full = absolute(text)
        except LookupError as problem:
            raise failed(NOTHING, [("", str(problem))], 1) from None

    def of(self, node: Node, found: Listing) -> tuple[str, str | None]:
        """(the folder that a node's files go into, the name that they take there or None)."""
        if self._several:
            return str(Path(self._full) / f"node{node.index}"), None
        where = landing(found, self._text, [FOLDER] if Path(self._full).is_dir() else [])
        return where.base(self._full), where.name


class _Fetch:
    """What comes from one node: found and compared when it is made.

    Raises:
        Trouble: why it cannot come.
    """

    def __init__(self, line: Line, src: str, goal: _Goal) -> None:
        self.node = line.node
        self._found = Listing.of(line.ask(List(src), ListReply).listing)
        if problems := [*self._found.problems, *strange(self._found.entries), *unasked(self._found, src)]:
            raise Trouble(*problems)
        base, name = goal.of(self.node, self._found)
        self._entries = renamed(self._found.entries, name)
        self._receiver = Receiver(base, self._entries)
        difference = self._receiver.compare(
            self._found.machine, self._found.tops, contents=self._found.contents
        )
        if difference.problems:
            raise Trouble(*difference.problems)
        self._work = self._compared(line, difference)
        self.nbytes = sum(self._entries[number].size for number in self._work.want)

    def _compared(self, line: Line, difference: Difference) -> _Work:
        here = {number: self._receiver.path(self._entries[number]) for number in difference.ask}
        theirs = line.ask(Hash(difference.ask), HashReply).hashes if difference.ask else []
        known = dict(zip(here, digests(here.values()), strict=True))
        return _work(difference.want, difference.ask, theirs, known)

    def carry_out(self, line: Line, meter: Meter) -> Copied:
        """Have it come.

        Raises:
            Trouble: what could not be written.
        """
        receiver = self._receiver
        path = ""

        def take(message: FileMessage, payload: bytes | memoryview) -> bool:
            nonlocal path
            receiver.take(message, payload)
            if isinstance(message, FileStart):
                path = self._entries[message.number].path
            meter.add(path, len(payload))
            return not receiver.full

        try:
            receiver.begin(self._work.want)
            line.receive(Send(self._work.want), take)
            receiver.end(self._work.equal)
        finally:
            receiver.abort()
        if receiver.problems:
            raise Trouble(*receiver.problems)
        return _copied(self.node, self._entries, self._work.want, 0, self._found.notes)
