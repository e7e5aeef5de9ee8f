"""A fork server (zygote): one process per node that has the heavy imports done, and forks ranks from there.

A rank forked from here has torch at once, so that starting or replacing one costs milliseconds instead of seconds. This process
starts no thread and touches no GPU: both would be broken in its children.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from skymagic.kernels.fork import end_with_parent, fork
from skymagic.wire import processes
from skymagic.wire.agent import ChildExited, Message, RankForked, RankSpec, decode, encode

PIECE = 1 << 16


def send_spec(channel: socket.socket, spec: RankSpec, fds: Sequence[int]) -> None:
    """Ask the forkserver for a rank; `fds` are its control socket, standard output and standard error."""
    line = encode(spec)
    socket.send_fds(channel, [len(line).to_bytes(8, "big")], list(fds))
    channel.sendall(line)


def _receive_spec(channel: socket.socket) -> tuple[RankSpec, list[int]] | None:
    head, fds, _, _ = socket.recv_fds(channel, 8, 8)
    if not head:
        return None
    while len(head) < 8:
        head += channel.recv(8 - len(head))
    size = int.from_bytes(head, "big")
    line = b""
    while len(line) < size:
        piece = channel.recv(min(PIECE, size - len(line)))
        if not piece:
            return None
        line += piece
    spec = decode(line)
    assert isinstance(spec, RankSpec)
    return spec, fds


def preload(modules: Sequence[str]) -> None:
    """Import what ranks will need; a module that fails is left to the rank, which reports it properly."""
    gc.disable()  # a fifth of the time would go into collections, for a megabyte of garbage
    for name in (processes.RANK, *modules):
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    gc.freeze()  # shared pages stay shared: the collector does not write into them
    gc.enable()


def serve(channel: socket.socket, modules: Sequence[str]) -> None:
    """Fork ranks on request and report each one's end, until the agent closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):  # the agent's handlers are not for what it forks
        signal.signal(number, signal.SIG_DFL)
    preload(modules)
    wake_out, wake_in = socket.socketpair()
    for end in (wake_out, wake_in):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_in.fileno())
    with selectors.DefaultSelector() as ready:
        ready.register(channel, selectors.EVENT_READ)
        ready.register(wake_out, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                if key.fileobj is channel:
                    request = _receive_spec(channel)
                    if request is None:
                        return
                    _fork(channel, *request)
                else:
                    with contextlib.suppress(BlockingIOError):
                        wake_out.recv(4096)
            _reap(channel)


def _fork(channel: socket.socket, spec: RankSpec, fds: list[int]) -> None:
    def rank() -> object:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        channel.close()
        end_with_parent()  # native code may hold the interpreter, and nothing else would end it
        return sys.modules[processes.RANK].main(spec, fds)

    pid = fork(rank)
    for fd in fds:
        os.close(fd)
    _report(channel, RankForked(spec.rank, pid, spec.env["SKYMAGIC_IDENT"]))


def _reap(channel: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _report(channel, ChildExited(pid, os.waitstatus_to_exitcode(status)))


def _report(channel: socket.socket, message: Message) -> None:
    with contextlib.suppress(OSError):
        channel.sendall(encode(message))
