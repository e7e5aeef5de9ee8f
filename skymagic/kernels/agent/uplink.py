"""Non-blocking writes of the agent, to its notebook and to its ranks.

Two lanes lead to the notebook::

    control   replies, outcomes, ends     unbounded, and always first
    output    text and displays           within the credit that the notebook has granted

Output beyond the credit waits here, and is bounded for each rank. A rank is never held up, and a
control message waits at most for the output in transit (`wire.agent.window`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from skymagic.kernels.fork import EventLoop
from skymagic.wire import agent as wire
from skymagic.wire.output import Output, OutputDisplay, OutputSuppressed

logger = logging.getLogger(__name__)

WRITE_BYTES = 64 << 10
"""Bytes that are written together."""
MAX_UNSENT = 8 << 20
"""Bytes of each rank's output that may wait for credit; beyond that, the oldest is dropped."""


class Writer:
    """Writer to a descriptor that is not ready at all times.

    Args:
        descriptor: made non-blocking; closed by its owner, after `close`.
        next_data: returns the bytes to write next, or b"".
        lost: called once if the other end is gone.
    """

    def __init__(
        self,
        loop: EventLoop,
        descriptor: int,
        next_data: Callable[[], bytes],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop, self._descriptor = loop, descriptor
        self._next_data, self._lost = next_data, lost
        self._partial = memoryview(b"")  # the rest of a line, which must be complete before others
        self._waiting = self._over = False
        os.set_blocking(descriptor, False)

    def flush(self) -> None:
        """Write as much as the descriptor takes now; the event loop writes the rest."""
        try:
            while not self._over:
                if not self._partial:
                    self._partial = memoryview(self._next_data())
                if not self._partial:
                    self._wait(False)
                    return
                self._partial = self._partial[os.write(self._descriptor, self._partial) :]
        except BlockingIOError:
            self._wait(True)
        except OSError:
            self.close()
            self._lost()

    @property
    def is_behind(self) -> bool:
        """True if the descriptor does not take what there is to write."""
        return self._waiting

    def close(self) -> None:
        """Write nothing any more; twice is safe."""
        self._over = True
        self._wait(False)

    def _wait(self, waiting: bool) -> None:
        if waiting != self._waiting:
            self._waiting = waiting
            if waiting:
                self._loop.watch_writable(self._descriptor, self.flush)
            else:
                self._loop.unwatch_writable(self._descriptor)


class RankInput:
    """Messages to a rank, whose main thread may keep it from reading for a long time."""

    def __init__(self, loop: EventLoop, descriptor: int) -> None:
        self._lines: deque[bytes] = deque()
        self._writer = Writer(loop, descriptor, self._next_line)

    def send(self, line: bytes) -> None:
        """Send an encoded message; ignored if the rank is gone."""
        self._lines.append(line)
        if not self._writer.is_behind:
            self._writer.flush()

    def close(self) -> None:
        """Send nothing any more; twice is safe."""
        self._writer.close()

    def _next_line(self) -> bytes:
        # not joined: messages may be large, and many may wait for a busy rank
        return self._lines.popleft() if self._lines else b""


class _Unsent:
    """Output of one rank that waits for credit.

    If it grows too large, displays are dropped before text, the oldest first: a display may have
    megabytes, and a line that it displaces may be the one that explains it.
    """

    def __init__(self) -> None:
        self.pieces: deque[Output] = deque()
        self._nbytes = self._dropped = self._displays = 0
        self._unknown: set[str] = set()
        """IDs of dropped displays. The notebook would ignore updates of them."""

    def add(self, output: Output) -> None:
        self.pieces.append(output)
        self._nbytes += output.cost
        self._displays += isinstance(output, OutputDisplay)
        # the newest piece stays, and with it the end of the output
        while self._nbytes > MAX_UNSENT and len(self.pieces) > 1:
            self._drop()

    def _drop(self) -> None:
        index = 0
        newest_is_display = isinstance(self.pieces[-1], OutputDisplay)
        # counted, because a flood of text has tens of thousands of pieces to search
        if self._displays > newest_is_display:
            index = next(i for i, p in enumerate(self.pieces) if isinstance(p, OutputDisplay))
        dropped = self.pieces[index]
        del self.pieces[index]
        self._nbytes -= dropped.cost
        self._dropped += dropped.cost
        if isinstance(dropped, OutputDisplay):
            self._displays -= 1
            if dropped.kind == "display_data" and dropped.display_id:
                self._unknown.add(dropped.display_id)

    def take(self) -> Output:
        """Remove and return the next piece; a note on dropped pieces comes first."""
        output = self.pieces[0]
        if self._dropped:
            nbytes, self._dropped = self._dropped, 0
            logger.warning("link is slow, output is dropped: rank=%s bytes=%s", output.rank, nbytes)
            # without a number: some of the pieces behind it are older than the dropped ones
            return OutputSuppressed(output.rank, nbytes, request=output.request)
        self.pieces.popleft()
        self._nbytes -= output.cost
        if isinstance(output, OutputDisplay):
            self._displays -= 1
            if output.display_id in self._unknown:
                self._unknown.discard(output.display_id)
                if output.kind == "update_display_data":
                    output = replace(output, kind="display_data")
        return output


class Uplink:
    """The agent's way to its notebook.

    Args:
        descriptor: of the link; made non-blocking.
        window: credit of a notebook that has just connected (`wire.agent.window`).
        lost: called once if the link is gone.
    """

    def __init__(
        self, loop: EventLoop, descriptor: int, window: int, lost: Callable[[], None]
    ) -> None:
        self._descriptor, self._window = descriptor, window
        self._credit = window
        self._control: deque[bytes] = deque()
        self._output: dict[int, _Unsent] = {}
        """Rank → its output that waits; the rank whose turn is next comes first."""
        self._writer = Writer(loop, descriptor, self._next_data, lost)

    def send(self, message: wire.AgentMessage) -> None:
        """Send a message before all output that waits; `flush` writes it."""
        self._control.append(wire.encode(message))

    def show(self, output: Output) -> None:
        """Send output of a rank once there is credit; `flush` writes it."""
        self._output.setdefault(output.rank, _Unsent()).add(output)

    def forget(self, rank: int) -> None:
        """Drop a rank's output that waits: no notebook wants it, or it will be repeated."""
        self._output.pop(rank, None)

    def grant(self, cost: int) -> None:
        """Add credit for output that the notebook has shown."""
        if self._credit <= 0 < self._credit + cost:
            logger.debug("output has credit again: ranks=%s", list(self._output))
        self._credit += cost

    def restart(self) -> None:
        """Reset the credit and drop all output, because another notebook has taken over."""
        self._credit = self._window
        self._output.clear()

    def flush(self) -> None:
        """Write as much as the link takes now; called after each round of events."""
        if not self._writer.is_behind:
            self._writer.flush()

    def drain(self, timeout: float) -> None:
        """Write all control messages, and all output regardless of credit, before the link closes.

        Args:
            timeout: seconds after which a notebook that reads nothing is given up.
        """
        self._credit = 1 << 62  # practically unlimited
        deadline = time.monotonic() + timeout
        self._writer.flush()
        with contextlib.suppress(OSError, ValueError):
            while self._writer.is_behind and (remaining := deadline - time.monotonic()) > 0:
                if select.select([], [self._descriptor], [], remaining)[1]:
                    deadline = time.monotonic() + timeout
                    self._writer.flush()

    def close(self) -> None:
        """Write nothing any more; twice is safe."""
        self._writer.close()

    def _next_data(self) -> bytes:
        """Return the lines to write next: control first, then output of ranks in turn."""
        if self._control:
            data = b"".join(self._control)
            self._control.clear()
            return data
        lines: list[bytes] = []
        nbytes = 0
        while self._output and self._credit > 0 and nbytes < WRITE_BYTES:
            rank, unsent = next(iter(self._output.items()))
            output = unsent.take()
            self._credit -= output.cost
            lines.append(wire.encode(output))
            nbytes += len(lines[-1])
            # a rank that prints without end must not keep the others waiting
            del self._output[rank]
            if unsent.pieces:
                self._output[rank] = unsent
            if self._credit <= 0:
                logger.debug("output waits for credit: ranks=%s", list(self._output))
        return b"".join(lines)
