"""State of this rank's process that its kernel, shell and scripts share.

The control socket to the agent has a thread that answers while the main thread is busy or blocked.
The hooks of the pool's plugins are entered once per process in order and left in reverse. The
rank's position in the pool may change.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.plugins import table
from skymagic.plugins.plugin import active_plugins
from skymagic.runtime import rendezvous
from skymagic.runtime.info import InstanceInfo
from skymagic.wire import agent as wire
from skymagic.wire import debug_log

logger = logging.getLogger(__name__)


@dataclass
class Context:
    """State of this process; created by the entry before the kernel.

    Attributes:
        control: the socket to the agent.
        hooks: the plugins' hooks.
        info: this rank's position in its pool; replaced when the pool is resized.
        store: directory of the node's store.
        log: path of this rank's complete output.
        base_env: environment that this process had before it became a rank, with the pool's
            additions.
        outside_groups: True while code runs that does not use the rank's process groups, so that
            there is nothing to release.
        last_script_run: the run in whose script this rank last published a port.
        freed: True if this run was released from a collective, or is being stopped, because of
            another failure: its own error is of no interest.
    """

    control: AgentControl
    hooks: Hooks
    info: InstanceInfo
    store: str
    log: str
    base_env: dict[str, str]
    outside_groups: bool = False
    last_script_run: int = 0
    freed: bool = False


_contexts: list[Context] = []


def enter(context: Context) -> None:
    """Set this process's context, once, before the kernel is created."""
    _contexts[:] = [context]


def current() -> Context:
    """Return this process's context."""
    return _contexts[0]


class _Outgoing:
    """Message on its way to the agent.

    Attributes:
        data: the encoded message.
        awaits_reply: the agent acknowledges it; it is done when the acknowledgment has arrived,
            else when it is written.
    """

    def __init__(self, data: bytes, *, awaits_reply: bool) -> None:
        self.data = data
        self.awaits_reply = awaits_reply
        self._done = False
        # A bare lock: a KeyboardInterrupt inside threading.Event sometimes leaves the event's lock
        # held.
        self._lock = threading.Lock()
        self._lock.acquire()

    def finish(self) -> None:
        """Let the sender continue; called once, by the control threads."""
        self._done = True
        self._lock.release()

    def wait(self) -> None:
        """Wait until the message is done, then raise what a signal handler raised meanwhile."""
        raised: BaseException | None = None
        while not self._done:
            try:
                self._lock.acquire()
            except BaseException as problem:
                raised = raised or problem
        if raised is not None:
            raise raised


class AgentControl:
    """Control socket of this rank.

    The rank ends when the socket closes: nothing outlives its agent.

    One thread writes to the socket, and another one reads: Python runs signal handlers on the main
    thread alone, so that exceptions raised there (KeyboardInterrupt, the TimeoutError of a hook)
    cannot cut a message in two.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self.procedures: dict[str, Callable[[], Any]] = {}
        """Remote procedures by name (``release``, ``stacks``, ``stop``, …).

        They run on the control thread, and their result is sent back.
        """
        self.on_request: Callable[[wire.Request], None] = lambda message: None
        """Called on the control thread with each request; must not raise."""
        self.on_interruption: Callable[[wire.InterruptionNotice], None] = lambda message: None
        """Called on the control thread when a machine of the pool will be taken away."""
        self._socket = connection
        # reentrant: a signal handler may send while the main thread does
        self._outgoing: queue.SimpleQueue[_Outgoing] = queue.SimpleQueue()
        self._unacknowledged: deque[_Outgoing] = deque()  # in the order of the acknowledgments
        self._values: dict[str, Any] = {}
        self._cancelled = False  # whether waits for values are canceled
        self._changed = threading.Condition()
        self._pid = os.getpid()
        for run, name in (
            (self._write, "skymagic-control-write"),
            (self._receive, "skymagic-control"),
        ):
            threading.Thread(target=run, name=name, daemon=True).start()

    def send(self, message: wire.AgentMessage) -> None:
        """Send a message without acknowledgment; return when it is written.

        Safe in signal handlers.
        """
        self._deliver(message, awaits_reply=False)

    def request(self, message: wire.Publish) -> None:
        """Send a message and wait for the agent's acknowledgment. Safe in signal handlers."""
        self._deliver(message, awaits_reply=True)

    def _deliver(self, message: wire.AgentMessage, *, awaits_reply: bool) -> None:
        if os.getpid() != self._pid:  # a forked child of the rank must not use the socket
            return
        outgoing = _Outgoing(wire.encode(message), awaits_reply=awaits_reply)
        self._outgoing.put(outgoing)
        outgoing.wait()

    def _write(self) -> None:
        """Write whole messages one after another, on a separate thread."""
        while True:
            outgoing = self._outgoing.get()
            if outgoing.awaits_reply:
                # before it is sent: the other thread may receive the acknowledgment at once
                self._unacknowledged.append(outgoing)
            try:
                self._socket.sendall(outgoing.data)
            except OSError:
                end_without_agent()
            if not outgoing.awaits_reply:
                outgoing.finish()

    def put(self, key: str, value: Any) -> None:
        """Set a rendezvous value on all ranks; None deletes the key."""
        self._set(key, value)
        self.send(wire.RendezvousKey(key, value))

    def get(self, key: str, timeout: float) -> Any:
        """Wait for a value that some rank puts, and return it.

        Raises:
            TimeoutError: no rank put it within `timeout` seconds.
            ConnectionAbortedError: the wait was canceled.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values or self._cancelled, timeout):
                raise TimeoutError(
                    f"rank {self.rank} waited {timeout:.0f} s for {key!r}, "
                    "which another rank should have sent"
                )
            if key not in self._values:
                raise ConnectionAbortedError(
                    f"rank {self.rank} no longer waits for {key!r}: another rank has failed"
                )
            return self._values[key]

    def cancel(self, cancelled: bool = True) -> None:
        """Cancel current and later waits for values, or allow them again. Safe on any thread."""
        with self._changed:
            self._cancelled = cancelled
            self._changed.notify_all()

    def _set(self, key: str, value: Any) -> None:
        with self._changed:
            if value is None:
                self._values.pop(key, None)
            else:
                self._values[key] = value
            self._changed.notify_all()

    def _receive(self) -> None:
        decoder = wire.decoder()
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                end_without_agent()
            for message in decoder.feed(data):
                self._on_message(message)

    def _on_message(self, message: wire.AgentMessage) -> None:
        match message:
            case wire.Request():
                logger.debug("request arrives: request=%s run=%s", message.request, message.run)
                self.on_request(message)
            case wire.Published():
                self._unacknowledged.popleft().finish()
            case wire.RendezvousKey():
                self._set(message.key, message.value)
            case wire.InterruptionNotice():
                logger.warning("a machine will be taken away: ranks=%s", message.ranks)
                self.on_interruption(message)
            case wire.LogLevel():
                debug_log.set_level(message.level)
                logger.info("log level changes: level=%s", message.level)
            case wire.RankRequest():
                procedure = self.procedures.get(message.method)
                try:
                    value = procedure() if procedure is not None else None
                except Exception as problem:  # a cell has broken it, which counts as no answer
                    logger.warning(
                        "request not answered: method=%s error=%s",
                        message.method,
                        type(problem).__name__,
                    )
                    value = None
                logger.debug("request answered: method=%s", message.method)
                self.send(wire.RankReply(self.rank, message.number, value))


def end_without_agent() -> None:
    """End this rank by SIGKILL, as its agent is gone: the main thread may be blocked in C."""
    logger.info("rank ends, because its agent is gone")
    os.kill(os.getpid(), signal.SIGKILL)


class Hooks:
    """Contexts of the plugins in this process."""

    def __init__(self, specs: Sequence[dict[str, Any]], info: InstanceInfo) -> None:
        self.info = info
        self.plugins = active_plugins
        self.plugins[:] = [table.unpacked_plugin(spec) for spec in specs]
        self._stack = contextlib.ExitStack()

    def enter(self) -> None:
        """Open each plugin's ``around_app``; if one raises, close those before it."""
        with contextlib.ExitStack() as opening:
            for plugin in self.plugins:
                try:
                    opening.enter_context(plugin.around_app(self.info))
                except Exception as problem:
                    problem.add_note(f"raised by the plugin {plugin.name!r} in around_app")
                    raise
            self._stack = opening.pop_all()

    @contextlib.contextmanager
    def around_run(self) -> Iterator[None]:
        """Enter each plugin's ``around_run``, for one cell."""
        with contextlib.ExitStack() as stack:
            for plugin in self.plugins:
                stack.enter_context(plugin.around_run())
            yield

    def release(self) -> int:
        """Free the main thread from a blocked collective; called on the control thread.

        Returns the number of groups and connections that were shut down.
        """
        count = 0
        for plugin in self.plugins:
            # the other plugins' connections must be freed all the same
            with contextlib.suppress(Exception):
                count += plugin.release()
        return count

    def rejoin(self, generation: int) -> list[str]:
        """Form new process groups with all ranks, and return notes on state that was lost."""
        rendezvous.set_generation(generation)
        logger.info("process groups are formed again: generation=%s", generation)
        return [
            note
            for plugin in self.plugins
            if plugin.rejoin is not None
            for note in plugin.rejoin(self.info)
        ]

    def settle(self) -> list[str]:
        """Clean up after a failed cell, with all ranks, and return notes for the user."""
        return [
            note for plugin in self.plugins if plugin.settle is not None for note in plugin.settle()
        ]

    def sequence(self) -> dict[str, int]:
        """Return how many collectives this rank has started, by group."""
        counts: dict[str, int] = {}
        for plugin in self.plugins:
            try:
                counts |= {
                    f"{plugin.name} {name}": count for name, count in plugin.sequence().items()
                }
            except Exception:  # a cell has broken the plugin
                # differs from the other ranks' count, so that groups are formed again
                counts[f"{plugin.name} groups"] = -1
        return counts

    def are_intact(self) -> bool:
        """Return True if each plugin's setup is intact; the user may have destroyed a group."""
        try:
            return all(plugin.joined() for plugin in self.plugins)
        except Exception:  # a plugin that fails here is set up again
            return False

    def close(self) -> None:
        """Close the plugins' contexts; twice is safe."""
        self._stack.close()
