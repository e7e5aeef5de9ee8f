"""A rank's end of its control socket: a thread that answers while the main thread is busy or blocked."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from skymagic.wire import agent as wire


class Control:
    """Owns the control socket of this rank. The rank ends when the socket does: nothing outlives its agent."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self.procedures: dict[str, Callable[[], Any]] = {}
        """Remote procedures by name (``release``, ``stacks``, ``stop``, …): called on the control thread, their result is sent back."""
        self.on_interruption: Callable[[wire.InterruptionNotice], None] = lambda message: None
        """Called on the control thread when a machine of the pool will be taken away."""
        self.on_widget_input: Callable[[wire.WidgetInput], None] = lambda message: None
        """Called on the control thread with what a front end has sent to a widget."""
        self._socket = connection
        self._write_lock = threading.Lock()
        self._request_lock = threading.Lock()
        self._acknowledged = threading.Semaphore(0)
        self._values: dict[str, Any] = {}
        self._cancelled = False
        """Whether nobody shall wait for a value any more."""
        self._changed = threading.Condition()
        self._pid = os.getpid()
        threading.Thread(target=self._receive, name="skymagic-control", daemon=True).start()

    def send(self, message: wire.AgentMessage) -> None:
        """Send a message that is not acknowledged."""
        if os.getpid() != self._pid:  # a forked child of the rank has no business here
            return
        with self._write_lock:
            try:
                self._socket.sendall(wire.encode(message))
            except (BrokenPipeError, ConnectionResetError):
                end_without_agent()

    def request(self, message: wire.Publish) -> None:
        """Send a message and wait until the agent has acknowledged it."""
        if os.getpid() != self._pid:
            return
        with self._request_lock:
            self.send(message)
            interrupt: KeyboardInterrupt | None = None
            while True:
                try:
                    self._acknowledged.acquire()
                    break
                # the acknowledgement is on its way: left there, the next request would take it for its own
                except KeyboardInterrupt as pressed:
                    interrupt = pressed
        if interrupt is not None:
            raise interrupt

    def put(self, key: str, value: Any) -> None:
        """Set a value on all ranks; None deletes it."""
        self._set(key, value)
        self.send(wire.RendezvousKey(key, value))

    def get(self, key: str, timeout: float) -> Any:
        """A value, once some rank has put it.

        Raises:
            TimeoutError: nobody did within `timeout` seconds.
            ConnectionAbortedError: the wait was cancelled.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values or self._cancelled, timeout):
                raise TimeoutError(
                    f"rank {self.rank} waited {timeout:.0f} s for {key!r}, which another rank was to tell"
                )
            if key not in self._values:
                raise ConnectionAbortedError(f"rank {self.rank} no longer waits for {key!r}: another rank has failed")
            return self._values[key]

    def cancel(self, cancelled: bool = True) -> None:
        """Cancel waits for values, those that begin later too; False ends that. Safe on any thread."""
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
                self._obey(message)

    def _obey(self, message: wire.AgentMessage) -> None:
        match message:
            case wire.Published():
                self._acknowledged.release()
            case wire.RendezvousKey():
                self._set(message.key, message.value)
            case wire.InterruptionNotice():
                self.on_interruption(message)
            case wire.WidgetInput():
                self.on_widget_input(message)
            case wire.RankRequest():
                procedure = self.procedures.get(message.method)
                try:
                    value = procedure() if procedure is not None else None
                except Exception:  # a cell has broken what it needs: as good as no answer
                    value = None
                self.send(wire.RankReply(self.rank, message.number, value))


def end_without_agent() -> None:
    """End this rank, whose agent is gone: by SIGKILL, for the main thread may be blocked in C."""
    os.kill(os.getpid(), signal.SIGKILL)
