"""What a front end sends to widgets while a cell holds the kernel's main thread, and whether it shows a widget.

Messages come on the shell channel, behind the cell, for whose end they would have to wait::

    ipykernel 7   a thread of the kernel reads the channel, and hands what it reads to the main thread or to a subshell
    ipykernel 6   the main thread reads it between cells; ours reads it in between by `pump`

In both, messages to a comm that was added here are taken out first, and all others go their way in their order. This rests on how
ipykernel reads (a ZMQStream with a callback), which nothing promises: a button appears only after a first message has come.

To learn whether a front end shows a widget, a small child of the widget is replaced by a new one. A front end that shows the widget makes
a view of the child, and says so by its `_view_count`; one that does not (closed tab, cleared output, sleeping machine) says nothing. The
first count of a widget comes at once; later ones would wait for the kernel, which a cell holds: so each child is asked once::

    kernel       a new child, `_view_count` 0 ──▶ front end
    front end    makes a view of it: `_view_count` 1 ──▶ kernel, by `ShellChannel`
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from skymagic.display.live import own_kernel

Take = Callable[[Mapping[str, Any]], object]
"""Takes the data of a message, as the widgets' protocol has it: ``method`` and ``state`` or ``content``."""


class ShellChannel:
    """The receiving side of a kernel's shell channel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream = kernel.shell_stream
        self._receive = self._stream._recv_callback
        """What ipykernel does with a message."""
        self._takers: dict[str, Take] = {}
        thread = getattr(kernel, "shell_channel_thread", None)
        self.threaded = thread is not None
        """Whether messages are taken at any time; else only in `pump`, and between cells."""
        loop = thread.io_loop if thread is not None else kernel.io_loop
        if self.threaded or threading.current_thread() is not threading.main_thread():
            loop.add_callback(self._stream.on_recv, self._received, copy=False)
        else:
            self._stream.on_recv(self._received, copy=False)

    def add(self, comm: str, take: Take) -> None:
        """Have the messages to a comm taken; on a thread of the kernel's, which must not be held up, or in `pump`."""
        self._takers[comm] = take

    def remove(self, comm: str) -> None:
        """Leave them to the kernel; twice is safe."""
        self._takers.pop(comm, None)

    def pump(self) -> None:
        """Take what has come, on the main thread, where nobody else does."""
        if self._takers and not self.threaded and threading.current_thread() is threading.main_thread():
            from zmq import POLLIN

            self._stream.flush(POLLIN)

    def _received(self, frames: list[Any]) -> Any:
        taken = self._takers and self._taken(frames)
        return None if taken else self._receive(frames)  # which may be a coroutine: the stream awaits it

    def _taken(self, frames: list[Any]) -> bool:
        session = self._kernel.session
        try:
            parts = session.feed_identities(frames, copy=False)[1]
            message = session.deserialize(parts, content=False, copy=False)  # which checks the signature
            if message["header"]["msg_type"] != "comm_msg":
                return False
            content = session.unpack(message["content"])
            take = self._takers.get(content["comm_id"])
        except Exception:  # the kernel says what is wrong with it
            return False
        if take is None:
            return False
        take(content["data"])
        return True


_channel: ShellChannel | None = None


def shell_channel() -> ShellChannel | None:
    """The shell channel of this process's kernel; None where it cannot be read."""
    global _channel
    kernel = own_kernel()
    if _channel is None and getattr(getattr(kernel, "shell_stream", None), "_recv_callback", None) is not None:
        _channel = ShellChannel(kernel)
    return _channel


def pump() -> None:
    """Take what has come for widgets of a cell that holds the main thread; cheap, and called often."""
    if _channel is not None:
        _channel.pump()


ASK_INTERVAL = 5.0
"""Seconds between two questions to a front end that has answered."""


class Presence:
    """The answers of front ends that show a box.

    Args:
        replace: puts a new child in the place of the one before.
    """

    def __init__(self, channel: ShellChannel, replace: Callable[[Any], None]) -> None:
        self._channel, self._replace = channel, replace
        self._child: Any = None
        self._asked_at = 0.0
        self._answered = threading.Event()
        self._closed = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Until a front end shows the box: at once where one has said so a moment ago; else until it says so, or `close`."""
        if self._child is None or (self._answered.is_set() and time.monotonic() - self._asked_at > ASK_INTERVAL):
            self._ask()
        self._answered.wait()

    def _ask(self) -> None:
        import ipywidgets

        with self._lock:
            if self._closed:
                return
            self._forget()
            self._answered.clear()
            self._asked_at = time.monotonic()
            self._child = ipywidgets.Box(_view_count=0)
            self._channel.add(self._child.model_id, self._counted)
            self._replace(self._child)

    def _counted(self, data: Mapping[str, Any]) -> None:
        if data.get("method") == "update" and data.get("state", {}).get("_view_count"):
            self._answered.set()

    def _forget(self) -> None:
        if self._child is not None:
            self._channel.remove(self._child.model_id or "")
            for part in (self._child.layout, self._child):
                with contextlib.suppress(Exception):
                    part.close()

    def close(self) -> None:
        """Ask no more, and let go who waits."""
        with self._lock:
            self._closed = True
            self._answered.set()
            self._forget()


class WatchedDrawing:
    """Something that is measured and drawn again while somebody looks at it, and only then.

    Args:
        draw: measures and draws it; called on a thread.
        interval: seconds between two drawings.
    """

    def __init__(self, presence: Presence, draw: Callable[[], None], interval: float) -> None:
        self._presence, self._draw, self._interval = presence, draw, interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="skymagic-looked", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(Exception):  # the kernel may be at its end
                self._presence.wait()
                if not self._over.is_set():
                    self._draw()
            self._over.wait(self._interval)

    def close(self) -> None:
        """Draw it no more; without waiting for the drawing that may go on."""
        self._over.set()
        self._presence.close()
