"""The forkserver: many ranks at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from skymagic.kernels.agent import forkserver
from skymagic.wire import agent as wire

SERVE = "import socket, sys; from skymagic.kernels.agent import forkserver; forkserver.serve(socket.socket(fileno=int(sys.argv[1])), ())"
RANKS = 40


def test_reports_do_not_stand_against_requests(tmp_path: Path) -> None:
    """An agent asks for all its ranks before it reads what became of them: with 280, the buffers of both directions were full."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the system's least: a few messages
    ours.settimeout(30)
    null = os.open(os.devnull, os.O_WRONLY)
    process = subprocess.Popen([sys.executable, "-c", SERVE, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    try:
        for rank in range(RANKS):
            spec = wire.RankSpec(rank, {}, env={"SKYMAGIC_IDENT": f"r{rank}"}, log=str(tmp_path / "log"))
            forkserver.send_spec(ours, spec, [null, null, null])  # TimeoutError where both wait for each other
        decoder, forked, ended = wire.decoder(), set[int](), 0
        while ended < RANKS:
            for message in decoder.feed(ours.recv(1 << 16)):
                match message:
                    case wire.RankForked():
                        forked.add(message.rank)
                    case wire.ChildExited():
                        ended += 1  # these have no controller to talk to
        assert forked == set(range(RANKS))
    finally:
        ours.close()
        os.close(null)
        process.wait()
