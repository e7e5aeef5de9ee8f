"""A fork server (zygote): one process per node that has the heavy imports done, and forks ranks from there.

A rank forked from here has torch at once, so that starting or replacing one costs milliseconds instead of seconds. This process
starts no thread and touches no GPU: both would be broken in its children. It outlives them, and ends what they have left.
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

from skymagic.kernels.agent import orphans
from skymagic.kernels.agent.ending import ENDING, PASSED_ON
from skymagic.kernels.agent.orphans import Orphans, Owner
from skymagic.kernels.fork import end_with_parent, fork, signal_pipe
from skymagic.wire import processes
from skymagic.wire.agent import AgentMessage, ChildExited, RankForked, RankSpec, decode, encode

PIECE = 1 << 16
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


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
    # torch asks NVML then, not the driver, which no process that is forked from here could use any more
    check = os.environ.setdefault(NVML_CHECK, "1")
    gc.disable()  # a fifth of the time would go into collections, for a megabyte of garbage
    for name in (processes.RANK, *modules):
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    if check == "1":
        os.environ.pop(NVML_CHECK)  # in a rank the driver itself answers
    gc.freeze()  # shared pages stay shared: the collector does not write into them
    gc.enable()


def serve(channel: socket.socket, modules: Sequence[str]) -> None:
    """Fork ranks on request and report each one's end, until the agent closes the channel, or ends; then end all that is left of them."""
    os.setpgid(0, 0)  # who ends the agent's group leaves this process the time to tidy up
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ENDING:  # the agent's handlers are not for what it forks
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)  # the import below may be long
    preload(modules)
    orphans.adopt()
    for number in (*ENDING, *PASSED_ON):  # the end of the channel counts
        signal.signal(number, lambda *_: None)
    try:
        Forks(channel).serve()
    finally:
        orphans.end_all()


class Forks:
    """The ranks that were forked.

    Args:
        channel: leads to the agent.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._orphans = Orphans()
        self._unsent = bytearray()
        """Reports that the channel did not take yet: the agent may be asking for ranks, and reads nothing until all its requests are sent."""

    def serve(self) -> None:
        """Fork ranks and report their ends until the channel is closed."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        woken = signal_pipe()
        with selectors.DefaultSelector() as ready:
            ready.register(self._channel, selectors.EVENT_READ)
            ready.register(woken, selectors.EVENT_READ)
            while True:
                for key, events in ready.select(self._orphans.look_again):
                    if key.fd == woken:
                        os.read(woken, 4096)
                    elif events & selectors.EVENT_READ:
                        request = _receive_spec(self._channel)
                        if request is None:
                            return
                        self._fork(*request)
                self._reap()
                self._send()
                ready.modify(self._channel, selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0))

    def _fork(self, spec: RankSpec, fds: list[int]) -> None:
        def rank() -> object:
            for number in (signal.SIGCHLD, *ENDING, *PASSED_ON):
                signal.signal(number, signal.SIG_DFL)
            self._channel.close()
            end_with_parent()  # native code may hold the interpreter, and nothing else would end it
            return sys.modules[processes.RANK].main(spec, fds)

        pid = fork(rank)
        ident = spec.env["SKYMAGIC_IDENT"]
        owner = Owner(pid, ident, fds)
        self._orphans.forked(owner)
        for fd in fds:
            os.close(fd)
        self._report(RankForked(spec.rank, pid, ident, owner.started))

    def _reap(self) -> None:
        """Report ranks that have ended, and end what they have left."""
        ended = []
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended.append(found)
        ranks = [(pid, status) for pid, status in ended if self._orphans.exited(pid)]
        if ended or self._orphans.look_again is not None:
            self._orphans.end()
        for pid, status in ranks:
            self._report(ChildExited(pid, os.waitstatus_to_exitcode(status)))

    def _report(self, message: AgentMessage) -> None:
        self._unsent += encode(message)

    def _send(self) -> None:
        """Send what the channel takes now, without waiting."""
        try:
            del self._unsent[: self._channel.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            pass
        except OSError:  # the agent has ended, which reading tells
            self._unsent.clear()
