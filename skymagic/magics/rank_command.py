"""``%sky_shell``: one command beside a rank, also while a cell runs there."""

from __future__ import annotations

import codecs
import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Iterator

from skymagic.cluster import Agents
from skymagic.display.live import write
from skymagic.display.screen import print_note
from skymagic.errors import RequestError
from skymagic.magics.arguments.line_magics import CommandRequest
from skymagic.pool import Pool, registry
from skymagic.wire import processes
from skymagic.wire import rank_command as wire
from skymagic.wire.codec import Transport
from skymagic.wire.processes import status_words

POLL = 0.5
"""Seconds after which a signal is seen that has come just before `follow` began to wait: it does not end the wait."""
INTERRUPT_TIMEOUT = 5.0
"""Seconds in which a command ends upon Ctrl-C; then its connection is closed."""


class RankCommand:
    """One command on a rank's node; ends with `close`.

    Raises:
        OSError, HostError: the node cannot be reached.
    """

    def __init__(self, agents: Agents, rank: int, command: str) -> None:
        index, spec = agents.specs[rank]
        self._transport: Transport = agents.nodes[index].run(processes.RANK_COMMAND)
        pid = agents.ranks[rank].pid or 0
        self._transport.write(
            wire.encode(wire.BeginCommand(command, pid, spec.info, agents.environment(rank)))
        )
        self._events: queue.SimpleQueue[bytes | int | None] = queue.SimpleQueue()
        self._interrupts = 0
        threading.Thread(target=self._read, name="skymagic-command", daemon=True).start()

    def _read(self) -> None:
        """On a thread of its own: the stop button must not interrupt the decoding of a message."""
        with contextlib.suppress(EOFError, OSError, ValueError):
            for message, payload in wire.messages(self._transport.read, noise=True):
                self._events.put(
                    message.status if isinstance(message, wire.CommandEnded) else bytes(payload)
                )
        self._events.put(None)

    def interrupt(self) -> None:
        """Send Ctrl-C to the command; the second time have `follow` give it up. A signal's handler may call this on the thread that follows."""
        self._interrupts += 1
        if self._interrupts == 1:
            with contextlib.suppress(OSError):  # not in `follow`, which may have much to show first
                self._transport.write(wire.encode(wire.InterruptCommand()))
        self._events.put(b"")  # wakes `follow`

    def follow(self, show: Callable[[bytes], object]) -> int | None:
        """Show what the command prints until it ends; its exit code, negative for a signal, None where the node is gone."""
        while True:
            interrupted = self._interrupts
            try:
                event = self._events.get(timeout=INTERRUPT_TIMEOUT if interrupted else POLL)
            except queue.Empty:
                if interrupted:
                    return -signal.SIGKILL
                continue
            if self._interrupts > 1:
                return -signal.SIGKILL
            if not isinstance(event, bytes):
                return event
            show(event)

    def close(self) -> None:
        """End the command, and what it runs in the foreground; twice is safe."""
        self._transport.close()


def run(request: CommandRequest) -> None:
    """Run the command and show its output.

    Raises:
        RequestError: there is no command or no such rank, or there are several ranks.
        PoolError: there is no such pool.
    """
    pool = registry.pool_named(request.pool)
    rank = _rank(request, pool)
    host = pool.agents.ranks[rank].hostname
    if not request.command:
        where = f"ssh {host} in a terminal" if pool.plan.remote else "a terminal of this machine"
        raise RequestError(
            [f"which command? %sky_shell -t {rank} nvidia-smi; for a prompt use {where}"]
        )
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with (
        contextlib.closing(RankCommand(pool.agents, rank, request.command)) as command,
        _interrupts(command),
    ):
        status = command.follow(
            lambda data: write("stdout", decoder.decode(data).replace("\r\n", "\n"))
        )
    print_note(f"[rank {rank} on {host}: {'exit code 0' if not status else status_words(status)}]")


def _rank(request: CommandRequest, pool: Pool) -> int:
    ranks = request.ranks.ranks(pool.world_size) if request.ranks is not None else (0,)
    if len(ranks) > 1:
        raise RequestError(
            [f"-t: one rank at a time, not {len(ranks)}; %%sky_sh runs a script on every node"]
        )
    return ranks[0]


@contextlib.contextmanager
def _interrupts(command: RankCommand) -> Iterator[None]:
    """Pass SIGINT to the command: as an exception it could interrupt what is being shown, and would close the connection instead."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: command.interrupt())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
