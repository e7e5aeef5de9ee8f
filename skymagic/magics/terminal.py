"""``%sky_shell``: one command beside a rank; in a terminal IPython also a prompt there."""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator

from skymagic.cluster.terminal import Terminal
from skymagic.display.live import own_kernel, write
from skymagic.display.screen import print_note
from skymagic.errors import RequestError
from skymagic.magics.arguments.line_magics import TerminalRequest
from skymagic.pool import Pool, registry
from skymagic.wire.processes import status_words


def run(request: TerminalRequest) -> None:
    """Run the command, or open a prompt.

    Raises:
        RequestError: there is no such rank, or there are several; or a prompt where there is no terminal.
        PoolError: there is no such pool.
    """
    pool = registry.find(request.pool)
    rank = _rank(request, pool)
    host = pool.agents.ranks[rank].hostname
    prompt = not request.command
    if prompt and (own_kernel() is not None or not sys.stdin.isatty()):
        where = f"ssh {host}" if pool.plan.remote else "on this machine"
        raise RequestError(
            [
                f"a prompt needs a terminal, which is not here: {where} in one of yours; here, one command: %sky_shell --rank {rank} nvidia-smi"
            ]
        )
    size = shutil.get_terminal_size((120, 24))
    window = os.get_terminal_size(sys.stdin.fileno()) if prompt else None
    with (
        contextlib.closing(Terminal(pool.agents, rank, request.command, (size.lines, size.columns))) as terminal,
        _interrupts(terminal),
    ):
        if window is not None:
            with _raw(terminal, window):
                status = terminal.follow(lambda data: os.write(sys.stdout.fileno(), data))
        else:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            status = terminal.follow(lambda data: write("stdout", decoder.decode(data).replace("\r\n", "\n")))
    print_note(f"[rank {rank} on {host}: {'exit code 0' if not status else status_words(status)}]")


def _rank(request: TerminalRequest, pool: Pool) -> int:
    ranks = request.ranks.ranks(pool.world_size) if request.ranks is not None else (0,)
    if len(ranks) > 1:
        raise RequestError([f"--rank: one rank at a time, not {len(ranks)}; %%sky_sh runs a script on every node"])
    return ranks[0]


@contextlib.contextmanager
def _interrupts(terminal: Terminal) -> Iterator[None]:
    """SIGINT goes to the program. As an exception it could fall amid what is being shown, and would end the terminal instead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: terminal.interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _raw(terminal: Terminal, window: os.terminal_size) -> Iterator[None]:
    """Every key goes to the other terminal, Ctrl-C and another size of the window too; this one is as it was before afterwards."""
    import select
    import termios
    import tty

    fd, over = sys.stdin.fileno(), threading.Event()
    before = termios.tcgetattr(fd)

    def pump() -> None:
        size = window
        while not over.is_set():
            # asked for, not told by SIGWINCH: its handler would write amid what this thread writes
            if (now := os.get_terminal_size(fd)) != size:
                terminal.resize(now.lines, now.columns)
                size = now
            if select.select([fd], [], [], 0.1)[0] and not over.is_set():
                terminal.type(os.read(fd, 4096))

    keys = threading.Thread(target=pump, name="skymagic-keys", daemon=True)
    try:
        tty.setraw(fd)
        keys.start()
        yield
    finally:
        over.set()
        keys.join()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
