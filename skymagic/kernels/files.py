"""The node's end of copying files: looks, lists, compares, takes and sends, as the notebook asks; one process per copying.

It speaks `skymagic.wire.files` over its standard input and output, one question at a time, and ends when its input does.
"""

from __future__ import annotations

import os
import select
import sys
from typing import Any

from skymagic.files.transfer.entries import FOLDER, Entry, Top
from skymagic.files.transfer.listing import Listing, absolute, digests, listing
from skymagic.files.transfer.receiving import Receiver
from skymagic.files.transfer.sending import sent
from skymagic.wire.files import STEP, Ended, Frame, Frames, joined, packed

Answer = dict[str, Any]


class Porter:
    """Answers the notebook.

    Args:
        root: what relative paths are relative to.
        source, sink: descriptors of both streams.
    """

    def __init__(self, root: str, source: int, sink: int) -> None:
        self._root, self._source, self._sink = root, source, sink
        self._frames = Frames(lambda: os.read(source, STEP))
        self._listing = Listing()
        self._receiver: Receiver | None = None

    def serve(self) -> None:
        """Answer until the notebook is gone; then leave no half file."""
        try:
            while True:
                frame = self._frames.next()
                if frame.name != "stop":  # one that came too late
                    self._say(frame.name, self._answer(frame))
        except (Ended, BrokenPipeError):
            pass
        finally:
            if self._receiver is not None:
                self._receiver.abort()

    def _answer(self, frame: Frame) -> Answer:
        values = frame.values
        match frame.name:
            case "look":
                return self._look(values["path"])
            case "list":
                self._listing = listing(values["path"], self._root, self._stopped)
                return {"listing": self._listing.plain()}
            case "hash":
                paths = [self._listing.paths[number] for number in values["numbers"]]
                return {"hashes": list(digests(paths, self._stopped))}
            case "compare":
                return self._compare(values)
            case "write":
                return self._write(values)
            case "send":
                return self._send(values["numbers"])
        raise ValueError(f"nobody asks for {frame.name!r}")

    def _stopped(self) -> bool:
        """Whether the notebook says something, or is gone: it waits for an answer only while it wants one."""
        return bool(select.select([self._source], [], [], 0)[0])

    def _say(self, name: str, values: Answer) -> None:
        self._write_all(packed(name, values))

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._sink, view) :]

    # -- taking ------------------------------------------------------------------------------------------------------

    def _look(self, path: str) -> Answer:
        try:
            full = absolute(path, self._root)
        except LookupError as problem:
            return {"problem": str(problem)}
        kind = FOLDER if os.path.isdir(full) else "file" if os.path.lexists(full) else ""
        return {"path": full, "kind": kind}

    def _compare(self, values: Answer) -> Answer:
        entries = [Entry(*plain) for plain in values["entries"]]
        self._receiver = Receiver(values["base"], entries, mirror=values["mirror"])
        found = self._receiver.compare(
            values["origin"], [Top(**top) for top in values["tops"]], contents=values["contents"]
        )
        hashes = list(digests([self._receiver.path(entries[number]) for number in found.ask], self._stopped))
        return {**vars(found), "hashes": hashes}

    def _write(self, values: Answer) -> Answer:
        receiver = self._receiver
        assert receiver is not None
        receiver.begin(values["want"])
        told = False
        while (frame := self._frames.next()).name != "end":
            receiver.take(frame)
            if receiver.full and not told:
                told = True
                self._say("full", {})
        receiver.end(values["equal"])
        return {"files": receiver.files, "removed": receiver.removed, "problems": receiver.problems}

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send(self, numbers: list[int]) -> Answer:
        chosen = [(number, self._listing.entries[number], self._listing.paths[number]) for number in numbers]
        for data in joined(sent(chosen)):
            if self._stopped():
                break
            self._write_all(data)
        return {}


def main() -> None:
    """Answer on the streams that this process was started with; what else prints goes to standard error."""
    source, sink = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    Porter(sys.argv[1] if len(sys.argv) > 1 else "", source, sink).serve()


if __name__ == "__main__":
    main()
