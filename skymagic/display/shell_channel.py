"""What a front end sends to widgets while a cell holds the kernel's main thread.

Messages come on the shell channel, behind the cell, for whose end they would have to wait::

    ipykernel 7   a thread of the kernel reads the channel, and hands what it reads to the main thread or to a subshell
    ipykernel 6   the main thread reads it between cells; ours reads it in between by `pump`

In both, messages to a comm that was added here are taken out first, and all others go their way in their order. This rests on how
ipykernel reads (a ZMQStream with a callback), which nothing promises: a button appears only after a first message has come.
"""

from __future__ import annotations

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
        self._receive = self._stream._recv_callback  # private: pyzmq tells it in no other way
        """What ipykernel does with a message."""
        self._takers: dict[str, Take] = {}
        self._pages: dict[str, float] = {}
        """When each page (by the session in its messages' headers) was heard last."""
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

    def heard_from_others(self, page: str, since: float) -> bool:
        """Whether a page other than this one has sent something since: JupyterLab has a session of its own for each time it is opened, and
        asks for the kernel's state at once. Heard only while something is taken."""
        return any(when >= since for other, when in [*self._pages.items()] if other != page)

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
            self._pages[message["header"]["session"]] = time.monotonic()
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


opened: ShellChannel | None = None
"""This process's, once a run has had buttons."""


def page() -> str:
    """The page whose request this thread carries out; "" outside a kernel."""
    try:
        return str(own_kernel().get_parent("shell")["header"]["session"])
    except Exception:  # no kernel, or none of ipykernel's
        return ""


def shell_channel() -> ShellChannel | None:
    """The shell channel of this process's kernel; None where it cannot be read."""
    global opened
    kernel = own_kernel()
    if opened is None and getattr(getattr(kernel, "shell_stream", None), "_recv_callback", None) is not None:
        opened = ShellChannel(kernel)
    return opened
