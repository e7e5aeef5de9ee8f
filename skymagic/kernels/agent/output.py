"""Output of a rank on its way out of the node: pipes → complete log → text for the screen.

The agent reads the pipes, not the rank: a rank that holds the GIL in C code while it prints cannot
block on its own pipe, and text that a rank wrote before it was killed is not lost. Output of print,
``os.write(1, …)``, C libraries and child processes all takes this path.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

from skymagic.kernels.agent.crash_reports import CrashFilter
from skymagic.kernels.agent.logs import RankLog
from skymagic.kernels.agent.replay_buffer import (
    DisplayBuffer,
    MetricsBuffer,
    RunBuffer,
    cost_of,
    size_of,
)
from skymagic.wire.agent import BeginOutput, MetricsReport, Publish
from skymagic.wire.output import (
    Output,
    OutputComplete,
    OutputDisplay,
    OutputMetrics,
    OutputMissed,
    OutputNote,
    OutputSuppressed,
    OutputText,
)
from skymagic.wire.streams import FrameReader

PIPE_BYTES = 1 << 20
F_SETPIPE_SZ = 1031
BATCH_SECONDS = 0.01
"""Seconds within which text is sent together.

A flood of short lines then costs at most a hundred messages a second.
"""
TEXT_CHARS = 16 << 10
"""Maximum characters of a piece of text: later messages on the link wait for the whole piece."""
REFILL_SHARE = 0.25
"""Share of the bucket that is refilled each second."""

Send = Callable[[Output], None]
"""Sends output to the notebook."""


class TokenBucket:
    """Token bucket that limits how much text of a run goes to the screen.

    Pure: the caller passes the time.
    """

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.tokens = float(limit)
        self.refilled_at = now
        self.held_back = 0

    def admit(self, size: int, now: float) -> bool:
        """Return True if `size` more bytes may be shown at this time (monotonic seconds)."""
        self.tokens = min(
            self.limit, self.tokens + (now - self.refilled_at) * self.limit * REFILL_SHARE
        )
        self.refilled_at = now
        # once text was held back, wait until there are tokens for many lines, not for a single one
        refilling = self.held_back and self.tokens < self.limit * REFILL_SHARE
        if refilling or size > self.tokens:
            self.held_back += size
            return False
        self.tokens -= size
        return True


class Pipe:
    """Read end of one standard stream of a rank."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        # both: the pipe of standard output also carries frames of sys.stderr (`wire.streams`)
        self._decoders = {
            stream: codecs.getincrementaldecoder("utf-8")("replace")
            for stream in ("stdout", "stderr")
        }
        self._frames = FrameReader()
        os.set_blocking(fd, False)

    def read(self) -> bytes | None:
        """Return the available data: b"" if nothing is available, None at the end of the stream."""
        try:
            return os.read(self.fd, PIPE_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None

    def parts(self, data: bytes) -> list[tuple[str, bytes]]:
        """Split data into (stream name, text), in the order of writing."""
        return self._frames.feed(data) if self.name == "stdout" else [(self.name, data)]

    def decoded(self, name: str, data: bytes) -> str:
        """Decode text of a stream, holding back an incomplete character."""
        return self._decoders[name].decode(data)

    def end(self) -> list[tuple[str, str]]:
        """Return the text that is still held back, as (stream name, text)."""
        remaining = [(name, self.decoded(name, data)) for name, data in self._frames.end()]
        return [
            *remaining,
            *((name, decoder.decode(b"", final=True)) for name, decoder in self._decoders.items()),
        ]


class RankScreen:
    """Destination of a rank's output: the notebook that made the request, or one that took over.

    It buffers while the notebook is away.

    Args:
        rank: number of the rank, which all its output carries.
        send: sends output to the notebook.
    """

    def __init__(self, rank: int, send: Send) -> None:
        self.rank, self._send = rank, send
        self.request = ""  # identity of the current or latest request
        self.is_open = False  # whether the request's output has not ended yet
        self._away: DisplayBuffer | None = None  # displays made while the notebook is away
        self._numbers = MetricsBuffer()  # metrics reported meanwhile
        self._reported = MetricsBuffer()
        """Metrics of the current or latest request, for another notebook that takes over."""
        self._kept = RunBuffer(rank)
        """Output of the current or latest request, for another notebook that takes over."""
        # number of the last piece that the present notebook, or an earlier one, may have received
        self._sent = 0
        # True while no notebook wants the request's output: another one has taken over, and has
        # not asked for it (`follow`)
        self._unwanted = False

    def begin(self, message: BeginOutput) -> None:
        """Attribute all further output to another request."""
        self.request, self.is_open, self._unwanted, self._sent = message.request, True, False, 0
        self._kept, self._reported = RunBuffer(self.rank, message.request), MetricsBuffer()

    def end(self) -> None:
        """Mark the end of the request's output."""
        self.show(OutputComplete(self.rank))
        self.is_open = False

    def show(self, output: Output) -> None:
        """Number a piece of output, keep it for `follow`, and send it to the notebook."""
        numbered = self._kept.add(output)
        if self.is_open and not self._unwanted:
            # While the notebook is away nobody can have seen it, so it comes without a warning
            # to another notebook that takes over.
            if self._away is None:
                self._sent = numbered.seq
            self._send(numbered)

    def display(self, display: OutputDisplay) -> None:
        """Show rich output; while the notebook is away, keep the newest displays for it."""
        if self._away is not None:
            self._away.add(display)
        else:
            self.show(display)

    def note(self, text: str) -> None:
        """Show a line of skymagic's own, after the text written before it."""
        self.show(OutputNote(self.rank, f"[rank {self.rank}: {text}]\n"))

    def report(self, message: MetricsReport) -> None:
        """Send metrics of the request, also from ranks whose output is not shown."""
        if not self.is_open:
            return
        self._reported.add(message.batches)
        if self._away is not None:
            self._numbers.add(message.batches)
        else:
            self._send_metrics(OutputMetrics(self.rank, message.batches))

    def _send_metrics(self, metrics: OutputMetrics) -> None:
        if not self._unwanted:
            cost = cost_of(metrics, size_of(metrics))
            self._send(replace(metrics, request=self.request, cost=cost))

    def detach(self) -> None:
        """Keep only the newest displays and a bounded amount of metrics from now on."""
        self._away = self._away or DisplayBuffer()

    def attach(self) -> None:
        """Send the buffered output to the returned notebook, and report how much was dropped."""
        self.send_kept()
        self._away = None
        self._sent = self._kept.count  # it gets all that was sent meanwhile

    def send_kept(self) -> None:
        """Show the output that was kept while the notebook was away."""
        if self._away is None or not self.is_open:
            return
        if self._away.missed:
            self.show(OutputMissed(self.rank, self._away.missed))
            self._away.missed = 0
        for display in self._away.take():
            self.show(display)
        numbers, self._numbers = self._numbers, MetricsBuffer()
        if numbers.batches:
            self._send_metrics(OutputMetrics(self.rank, numbers.batches, numbers.dropped))

    def replaced(self) -> None:
        """Drop the notebook that made the request, because another one has taken over."""
        # first, so that nothing is sent: what was buffered is numbered and kept for `follow`
        self._unwanted = True
        self.send_kept()
        self._away = None

    def acknowledge(self, request: str, shown: int) -> None:
        """Forget the output of this request up to this number: the user has seen it."""
        if request == self.request:
            self._kept.acknowledge(shown)

    def forget(self) -> None:
        """Forget the request's output: the user has its results."""
        self._kept.acknowledge(self._kept.count)

    def follow(self) -> None:
        """Send the request's metrics, the output that was not acknowledged, and all that follows.

        Its end is sent in any case: the notebook that saw it may have been killed before it had the
        values.
        """
        self._unwanted = False
        if batches := self._reported.batches:  # before the end, after which nobody listens
            self._send_metrics(OutputMetrics(self.rank, batches, self._reported.dropped))
        for output in self._kept.unacknowledged(self._sent):
            self._send(output)
        self._sent = self._kept.count
        if self._kept.end is not None and self._kept.end.seq <= self._kept.shown:
            self._send(self._kept.end)


class OutputFilter:
    """Reader of one rank's pipes. All text goes to its log, and to its screen within the limits."""

    def __init__(self, log: RankLog, screen: RankScreen, pipes: dict[str, int]) -> None:
        self.log, self.screen = log, screen
        self.pipes = [Pipe(name, fd) for name, fd in pipes.items()]
        self._bucket: TokenBucket | None = None
        # when batched text must be sent (monotonic seconds)
        self.due: float | None = None
        self._last_sent = 0.0
        self._waiting: list[tuple[str, str]] = []
        """Batched text with the name of its stream, in order of arrival."""
        self._crashes = CrashFilter()
        self._updated: dict[str, str] = {}  # latest state of updated displays, by id

    def begin(self, message: BeginOutput, now: float) -> None:
        """Attribute all further output to a request.

        That includes what waits in the pipes: the cell may already be printing.
        """
        self.flush(now)  # belongs to the previous request
        self.log.begin(message.run, message.cell)
        self.screen.begin(message)
        # without a bucket, the rank's text goes to the log only
        self._bucket = TokenBucket(message.limit, now) if message.visible else None

    def publish(self, message: Publish, now: float) -> None:
        """Show rich output after the text written before it.

        Without a kind, only bring the log and its heading up to date.
        """
        self.drain(now)
        if not message.kind:
            self.log.write_heading()
            return
        plain = message.content.get("data", {}).get("text/plain", "")
        # the log has only the first and last state of an updated display
        if message.kind == "update_display_data":
            self._updated[(message.content.get("transient") or {}).get("display_id", "")] = plain
        elif plain:
            self.log.write(f"{plain}\n".encode(errors="replace"))
        if self._bucket is not None and self.screen.is_open:
            self.screen.display(OutputDisplay(message.rank, message.kind, message.content))

    def end(self, now: float) -> None:
        """Show the rest of the request's text and mark its end."""
        self.drain(now, last=True)
        self.log.write(
            "".join(f"{plain}\n" for plain in self._updated.values() if plain).encode(
                errors="replace"
            )
        )
        self._updated.clear()
        self.log.end()
        if self.screen.is_open:
            self.screen.send_kept()
            self._note_held_back()
            self.screen.end()
            self._bucket = None  # what threads print later goes to the log only

    def read(self, pipe: Pipe, now: float) -> bool:
        """Read the available data of one pipe; return False at its end."""
        data = pipe.read()
        if data is None:
            return False
        if data:
            self._take(pipe, data, now)
            if now - self._last_sent >= BATCH_SECONDS:
                self.flush(now)
            elif self.due is None:
                self.due = self._last_sent + BATCH_SECONDS
        return True

    def drain(self, now: float, *, last: bool = False) -> None:
        """Read and show everything written so far; with `last`, also an incomplete character."""
        for pipe in self.pipes:
            while data := pipe.read():
                self._take(pipe, data, now)
            if last:
                self._waiting += [(name, text) for name, text in pipe.end() if text]
        if last and (rest := self._crashes.end()):
            self._waiting.append(("stderr", rest.decode(errors="replace")))
        self.flush(now)

    def flush(self, now: float) -> None:
        """Send the batched text."""
        self.due = None
        waiting, self._waiting = self._waiting, []
        for name, chunks in groupby(waiting, key=itemgetter(0)):
            self._last_sent = now
            if not self.screen.is_open:
                continue
            text = "".join(text for _, text in chunks)
            for start in range(0, len(text), TEXT_CHARS):
                piece = text[start : start + TEXT_CHARS]
                self.screen.show(OutputText(self.screen.rank, name, piece))

    def close(self) -> None:
        """Close the log and the pipes; twice is safe."""
        for pipe in self.pipes:
            os.close(pipe.fd)
        self.pipes.clear()
        self.log.close()

    def _take(self, pipe: Pipe, data: bytes, now: float) -> None:
        parts = pipe.parts(data)
        self.log.write(b"".join(text for _, text in parts))
        if (bucket := self._bucket) is None:
            return
        if pipe.name == "stderr":
            parts = [(name, self._crashes.feed(text)) for name, text in parts]
        for name, text in parts:
            was_held_back = bucket.held_back
            if bucket.admit(len(text), now):
                if was_held_back:
                    self._note_held_back()
                self._waiting.append((name, pipe.decoded(name, text)))

    def _note_held_back(self) -> None:
        bucket = self._bucket
        if bucket is not None and bucket.held_back and self.screen.is_open:
            nbytes, bucket.held_back = bucket.held_back, 0
            self.screen.show(OutputSuppressed(self.screen.rank, nbytes))


def enlarge(pipe: int) -> None:
    """Enlarge a pipe's buffer if the system permits it."""
    if sys.platform == "linux":
        import fcntl

        # EPERM above the system's limit, or if the user's pipes are too large in total (pipe(7))
        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)
