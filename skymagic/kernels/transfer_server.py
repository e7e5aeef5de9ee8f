"""Transfer server of a node: stat, list, hash, compare, write, send.

Each copy operation starts one such process on each node. It handles one request at a time, speaks
`skymagic.wire.files` over its standard input and output, and ends when its input does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import zlib
from collections.abc import Iterator
from functools import partial

from skymagic.content.store import NodeStore
from skymagic.content.transfer.listing import FOLDER, Listing, absolute, entries_of, listing
from skymagic.content.transfer.pieces import encoded_files, listed_digests
from skymagic.content.transfer.receiving import Receiver
from skymagic.kernels.fork import take_streams
from skymagic.wire import debug_log
from skymagic.wire import files as files_wire
from skymagic.wire.codec import CHUNK, write_all

logger = logging.getLogger(__name__)


class TransferServer:
    """Server for one notebook.

    Args:
        root: base of relative paths.
        source, sink: descriptors of both streams.
    """

    def __init__(self, root: str, source: int, sink: int) -> None:
        self._root, self._source, self._sink = root, source, sink
        self._messages = self._receive()
        self._listing = Listing()
        self._receiver: Receiver | None = None

    def serve(self) -> None:
        """Serve until the input ends. A partly received large file then stays, to be resumed."""
        try:
            for message, _ in self._messages:
                logger.debug("file request: kind=%s", type(message).__name__)
                # race: a Cancel may arrive after the reply to its request
                if not isinstance(message, files_wire.Cancel):
                    self._reply(self._answer(message))
        except (EOFError, BrokenPipeError):
            logger.info("connection ended: a partly received file stays")
            if self._receiver is not None:
                self._receiver.abort(keep=True)
        finally:
            if self._receiver is not None:
                self._receiver.abort()

    def _receive(self) -> Iterator[tuple[files_wire.FileMessage, bytes | memoryview]]:
        """Yield messages with their payloads.

        An `Include` names a file in the node's store that holds encoded messages. Those messages
        are yielded instead.
        """
        for message, payload in files_wire.messages(lambda: os.read(self._source, CHUNK)):
            if not isinstance(message, files_wire.Include):
                yield message, payload
                continue
            pieces = NodeStore(message.store).read(message.name)
            if message.deflated:
                pieces = iter([zlib.decompress(b"".join(pieces))])
            # the end of the file is where its messages end
            with contextlib.suppress(EOFError):
                yield from files_wire.messages(partial(next, pieces, b""))
            self._reply(files_wire.Included())

    def _answer(self, request: files_wire.FileMessage) -> files_wire.FileMessage:
        match request:
            case files_wire.Stat():
                return self._stat(request.path)
            case files_wire.List():
                self._listing = listing(
                    request.path, self._root, self._is_cancelled, follow=request.follow
                )
                return self._listing.reply()
            case files_wire.Hash():
                paths = [self._listing.file_places[number] for number in request.numbers]
                return files_wire.HashReply(listed_digests(paths, self._is_cancelled))
            case files_wire.Compare():
                return self._compare(request)
            case files_wire.Write():
                return self._write(request)
            case files_wire.SendFiles():
                return self._send(request.numbers, request.remote_digests)
        raise ValueError(f"not a request: {request!r}")

    def _is_cancelled(self) -> bool:
        """Return True if any input is available, or the notebook is gone.

        While the notebook waits for a reply, it sends nothing but Cancel.
        """
        return bool(select.select([self._source], [], [], 0)[0])

    def _reply(self, message: files_wire.FileMessage) -> None:
        write_all(self._sink, files_wire.encode(message))

    # -- receiving ---------------------------------------------------------------------------------

    def _stat(self, path: str) -> files_wire.StatReply:
        try:
            full = absolute(path, self._root)
        except LookupError as problem:
            return files_wire.StatReply(problem=str(problem))
        kind = FOLDER if os.path.isdir(full) else "file" if os.path.lexists(full) else ""
        return files_wire.StatReply(full, kind)

    def _compare(self, request: files_wire.Compare) -> files_wire.CompareReply:
        entries = entries_of(request.columns)
        self._receiver = Receiver(request.base, entries, mirror=request.mirror)
        compare = self._receiver.comparison.compare
        return compare(request.origin, request.tops, self._is_cancelled, contents=request.contents)

    def _write(self, request: files_wire.Write) -> files_wire.WriteReply:
        receiver = self._receiver
        assert receiver is not None
        receiver.begin(request.to_write)
        reported = False
        for message, payload in self._messages:
            if not isinstance(message, files_wire.FilePart):
                break
            receiver.take(message, payload)
            if receiver.disk_full and not reported:
                reported = True
                logger.warning("disk is full: the rest of the files is not written")
                self._reply(files_wire.DiskFull())
        if isinstance(message, files_wire.Cancel):
            receiver.abort()
        else:
            receiver.end(request.same_content)
        logger.info(
            "files received: files=%s removed=%s problems=%s bytes=%s",
            receiver.files,
            receiver.removed,
            len(receiver.problems),
            receiver.nbytes,
        )
        return files_wire.WriteReply(
            receiver.files, receiver.removed, receiver.problems, receiver.nbytes
        )

    # -- sending -----------------------------------------------------------------------------------

    def _send(self, numbers: list[int], remote_digests: list[str]) -> files_wire.SendFilesReply:
        selected = [
            (number, self._listing.entries[number], self._listing.file_places[number])
            for number in numbers
        ]
        for data in files_wire.joined(
            encoded_files(selected, remote_digests=dict(zip(numbers, remote_digests, strict=True)))
        ):
            if self._is_cancelled():
                break
            write_all(self._sink, data)
        return files_wire.SendFilesReply()


def main() -> None:
    """Serve on this process's original streams; other output goes to standard error."""
    source, sink = take_streams()
    root, *log = sys.argv[1:] or [""]
    debug_log.start(log)
    TransferServer(root, source, sink).serve()


if __name__ == "__main__":
    main()
