"""A rank's side of its control socket: a thread that answers while the main thread is busy or blocked."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from skymagic.wire import agent as wire

Answerer = Callable[[], Any]


class Control:
    """Owns the control socket of this rank. The rank ends when the socket does: nothing outlives its agent."""

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.rank = rank
        self.answers: dict[str, Answerer] = {}
        """What a question calls, on the control thread: ``release``, ``stacks``, ``stop``."""
        self._socket = connection
        self._write = threading.Lock()
        self._order = threading.Lock()
        self._done = threading.Semaphore(0)
        self._offers: dict[str, Any] = {}
        self._offered = threading.Condition()
        self._pid = os.getpid()
        threading.Thread(target=self._listen, name="skymagic-control", daemon=True).start()

    def send(self, message: wire.Message) -> None:
        """Say something that is not answered."""
        if os.getpid() != self._pid:  # a forked child of the rank has no business here
            return
        with self._write:
            self._socket.sendall(wire.encode(message))

    def request(self, message: wire.Publish) -> None:
        """Say something and wait until the agent has carried it out."""
        if os.getpid() != self._pid:
            return
        with self._order:
            self.send(message)
            interrupt: KeyboardInterrupt | None = None
            while True:
                try:
                    self._done.acquire()
                    break
                except KeyboardInterrupt as pressed:  # the answer is on its way and must be taken first
                    interrupt = pressed
        if interrupt is not None:
            raise interrupt

    def offer(self, key: str, value: Any) -> None:
        """Tell all ranks a value; None takes back what was told."""
        self._keep(key, value)
        self.send(wire.Offer(key, value))

    def wait_for(self, key: str, timeout: float) -> Any:
        """A value that some rank offers.

        Raises:
            TimeoutError: nobody offered it within `timeout` seconds.
        """
        with self._offered:
            if not self._offered.wait_for(lambda: key in self._offers, timeout):
                raise TimeoutError(
                    f"rank {self.rank} waited {timeout:.0f} s for {key!r}, which another rank was to tell"
                )
            return self._offers[key]

    def _keep(self, key: str, value: Any) -> None:
        with self._offered:
            if value is None:
                self._offers.pop(key, None)
            else:
                self._offers[key] = value
            self._offered.notify_all()

    def _listen(self) -> None:
        decoder = wire.decoder()
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                os.kill(os.getpid(), signal.SIGKILL)
            for message in decoder.feed(data):
                self._heard(message)

    def _heard(self, message: wire.Message) -> None:
        match message:
            case wire.Done():
                self._done.release()
            case wire.Offer():
                self._keep(message.key, message.value)
            case wire.Ask():
                answer = self.answers.get(message.what)
                try:
                    value = answer() if answer is not None else None
                except Exception as problem:
                    value = {"problem": f"{type(problem).__name__}: {problem}"}
                self.send(wire.Answer(self.rank, message.number, value))
