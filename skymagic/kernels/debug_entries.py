"""A node's end of ``%sky_logs --debug``: read the debug logs of the node's processes.

Each request has its own process, which does not need the node's agent: the agent may hang, or may
have ended without removing its files.
"""

from __future__ import annotations

import contextlib
import os

from skymagic.kernels.fork import take_streams
from skymagic.wire import debug_entries as debug_wire
from skymagic.wire.codec import write_all

CHUNK = 1 << 20


def main() -> None:
    """Answer requests on the streams that this process was started with."""
    source, sink = take_streams()
    with contextlib.suppress(EOFError, BrokenPipeError):
        for request, _ in debug_wire.messages(lambda: os.read(source, CHUNK)):
            if isinstance(request, debug_wire.ReadEntries):
                write_all(sink, debug_wire.encode(debug_wire.reply(request)))


if __name__ == "__main__":
    main()
