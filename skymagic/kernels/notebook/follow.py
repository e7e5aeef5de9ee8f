"""Tell of a notebook that is executed here, or was: ``python -m skymagic.kernels.notebook.follow NAME JOB [remove]``."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from skymagic.kernels.daemon import rundir
from skymagic.kernels.daemon.attach import relay
from skymagic.kernels.notebook import journal
from skymagic.wire.codec import write_all


def main(name: str, job_id: str, what: str = "") -> int:
    """Relay between the driver and the standard streams until either ends; where there is none, tell what it has left."""
    if what == "remove":
        journal.remove(job_id)
        return 0
    write_all(1, b"\n")  # ends what a login shell has printed
    with suppress(OSError):
        found = rundir.find(name)
        if found is not None and (sock := found.connect()) is not None:
            relay(sock)
            return 0
        for piece in journal.left(job_id):
            write_all(1, piece)
    return 0


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))
