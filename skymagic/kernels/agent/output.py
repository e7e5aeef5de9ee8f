"""A rank's output on its way out of the node: pipes → complete log → what the screen may see.

The agent reads the pipes, not the rank: a rank that holds the GIL in C code while it prints cannot block on its own pipe, and
what a rank wrote before it was killed is still there. All of print, ``os.write(1, …)``, C libraries and child processes come
through here.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from skymagic.kernels.agent.away import KeptDisplays, KeptNumbers
from skymagic.kernels.agent.kept import KeptOutput
from skymagic.kernels.agent.logs import Spans
from skymagic.kernels.agent.trimming import trim
from skymagic.wire.agent import BeginOutput, Publish, Reported

PIPE_BYTES = 1 << 20
TAIL_BYTES = 1 << 14
F_SETPIPE_SZ = 1031
BATCH_SECONDS = 0.01
"""Text that follows within this time is sent together, so that a flood of short lines costs a hundred messages a second at most."""
REFILL_SHARE = 0.25
"""Share of the bucket's size that is refilled each second."""

Send = Callable[[dict[str, Any], dict[str, Any]], None]
"""Puts a content dictionary on iopub under a parent header."""
Watcher = Callable[[dict[str, Any]], None]
"""Gets each content, with the number of its ``run``."""


class TokenBucket:
    """A token bucket: how much text of one run may still go to the screen. Pure; the caller brings the time."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self.tokens = float(limit)
        self.refilled_at = now
        self.held_back = 0

    def admit(self, size: int, now: float) -> bool:
        """Whether `size` more bytes may be shown at this time (seconds, monotonic)."""
        self.tokens = min(self.limit, self.tokens + (now - self.refilled_at) * self.limit * REFILL_SHARE)
        self.refilled_at = now
        refilling = self.held_back and self.tokens < self.limit * REFILL_SHARE  # not one line here, one line there
        if refilling or size > self.tokens:
            self.held_back += size
            return False
        self.tokens -= size
        return True


class Pipe:
    """The read end of one standard stream of a rank."""

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.waiting: list[str] = []
        os.set_blocking(fd, False)

    def read(self) -> bytes | None:
        """What is there now; b"" when nothing is, None at the end of the stream."""
        try:
            return os.read(self.fd, PIPE_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None


class RankOutput:
    """Owns the log and the read ends of one rank's pipes.

    Args:
        rank: whose output it is; part of every message.
        log: path of the log, made anew readable for the owner only.
        pipes: read ends by stream name.
        send: puts a content on iopub.
        tell: called with a sentence for the user: the log cannot be written.
        spans: is told where each run stands in the log.
        watchers: get all that is shown, beside the notebook; they may change.
        limit: bytes that the log may have; None for no limit.
    """

    def __init__(
        self,
        rank: int,
        log: Path,
        pipes: dict[str, int],
        send: Send,
        tell: Callable[[str], None],
        spans: Spans | None = None,
        watchers: Mapping[int, Watcher] = MappingProxyType({}),
        limit: int | None = None,
    ) -> None:
        self.rank = rank
        self._spans, self._watchers = spans or Spans(), watchers
        self._run = 0
        """The present request's, or the one's before."""
        self.pipes = [Pipe(name, fd) for name, fd in pipes.items()]
        self.log_path = log
        fd = os.open(log, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600)
        self._log: BinaryIO = open(fd, "r+b", buffering=0)  # noqa: SIM115  # close() closes it
        self._send, self._tell = send, tell
        self._log_fails = False
        self._limit, self._unlooked = limit, 0
        self._parent: dict[str, Any] | None = None
        self._bucket: TokenBucket | None = None
        self.due: float | None = None
        """When text that waits for company must leave (monotonic seconds)."""
        self._last_sent = 0.0
        self._updated: dict[str, str] = {}
        """Displays that were updated, by id, as they are now."""
        self._away: KeptDisplays | None = None
        """What is displayed while the notebook is away."""
        self._numbers = KeptNumbers()
        """What is reported meanwhile."""
        self._reported = KeptNumbers()
        """What the present request has reported, or the one before, for another notebook that takes over."""
        self._kept = KeptOutput(rank)
        """What the present request has shown, or the one before, for another notebook that takes over."""
        self._follower: Callable[[dict[str, Any]], None] | None = None
        """Who gets it in the place of the notebook that made the request."""
        self._since = self._logged()
        """Where the present request begins in the log, in bytes."""
        self._heading: str | None = None
        """What stands above its first line there, once it has one."""
        self._open_line = False
        """Whether the log's last line has no end yet."""

    def begin(self, message: BeginOutput, now: float) -> None:
        """Attribute to a request all that comes from now on, and what waits in the pipes: the cell may have begun to print."""
        self.flush(now)
        self._since = self._logged()
        clock = time.strftime("%H:%M:%S")
        run = f" run {message.run}," if message.run else ""
        self._heading = f"── cell {message.cell},{run} {clock} ──" if message.cell else None
        self._spans.begin(message.run, self._since, message.cell)
        self._parent, self._run = message.parent, message.run
        self._kept, self._reported, self._follower = KeptOutput(self.rank), KeptNumbers(), None
        self._bucket = TokenBucket(message.limit, now) if message.visible else None

    def publish(self, message: Publish, now: float) -> None:
        """Rich output, after the text written before it; without a kind there is none: the log has all until now, its heading too."""
        self.drain(now)
        if not message.kind:
            self._write_heading()
            return
        plain = message.content.get("data", {}).get("text/plain", "")
        if message.kind == "update_display_data":  # of what moves, the log has the first state and the last
            self._updated[(message.content.get("transient") or {}).get("display_id", "")] = plain
        elif plain:
            self._write_log(f"{plain}\n".encode(errors="replace"))
        if self._bucket is not None and self._parent is not None:
            content = {"rank": self.rank, "kind": message.kind, **message.content}
            if self._away is not None:
                self._away.add(content)
            else:
                self._show(content)

    def report(self, message: Reported) -> None:
        """Numbers of the request, from ranks that are not shown too."""
        if self._parent is None:
            return
        self._reported.add(message.batches)
        if self._away is not None:
            self._numbers.add(message.batches)
        else:
            self._send_numbers(message.batches)

    def _send_numbers(self, batches: Sequence[Mapping[str, Any]], every: int = 1) -> None:
        content = self._numbers_content(batches, every)
        if self._follower is not None:
            self._follower(content)
        else:
            self._send(self._parent or {}, content)

    def _numbers_content(self, batches: Sequence[Mapping[str, Any]], every: int) -> dict[str, Any]:
        return {"rank": self.rank, "kind": "numbers", "batches": list(batches), "every": every}

    def detach(self) -> None:
        """The notebook is away: from now on, only the newest displays are kept for it, and its numbers in bounded memory."""
        self._away = self._away or KeptDisplays()

    def attach(self) -> None:
        """The notebook is back: it gets what was kept, and hears what was not."""
        self._send_kept()
        self._away = None

    def _send_kept(self) -> None:
        if self._away is None or self._parent is None:
            return
        if self._away.missed:
            self._show({"rank": self.rank, "kind": "missed", "count": self._away.missed})
            self._away.missed = 0
        for content in self._away.take():
            self._show(content)
        every, batches = self._numbers.take()
        if batches:
            self._send_numbers(batches, every)

    def replaced(self) -> None:
        """Another notebook has taken over; nobody hears the one that made the request any more."""
        self._follower = lambda content: None
        self.attach()

    def follow(self, shown: int, tell: Callable[[dict[str, Any]], None]) -> None:
        """Tell all that the request has reported, what it has shown after the first `shown` contents, and both from now on. Its end is told in
        any case: the notebook that has seen it may have been killed before it had the values."""
        every, batches = self._reported.kept
        if batches:  # before its end, after which nobody listens
            tell(self._numbers_content(batches, every))
        for content in self._kept.after(shown):
            tell(content)
        if self._kept.end is not None and self._kept.end["seq"] <= shown:
            tell(self._kept.end)
        self._follower = tell

    def tell_kept(self, shown: int, tell: Watcher) -> None:
        """Tell what the present request, or the one before, has shown after the first `shown` contents."""
        for content in self._kept.after(shown):
            tell({**content, "run": self._run})

    def note(self, text: str) -> None:
        """A line of skymagic's own, after what was written before it."""
        self._show({"rank": self.rank, "kind": "note", "text": f"[rank {self.rank}: {text}]\n"})

    def _show(self, content: dict[str, Any]) -> None:
        """Put a content on its way to the notebook, with its number."""
        content = self._kept.add(content)
        for tell in list(self._watchers.values()):
            tell({**content, "run": self._run})
        if self._follower is not None:
            self._follower(content)
        elif self._parent is not None:
            self._send(self._parent, content)

    def end(self, now: float) -> None:
        """All text of the request has been written: show it, and say that it was all."""
        self.drain(now, last=True)
        self._write_log("".join(f"{plain}\n" for plain in self._updated.values() if plain).encode(errors="replace"))
        self._updated.clear()
        self._spans.end(self._logged())
        self.trim()
        if self._parent is not None:
            self._send_kept()
            self._note_held_back()
            self._show({"rank": self.rank, "kind": "end"})
            self._parent = self._bucket = None  # what threads still print goes to the log

    def read(self, pipe: Pipe, now: float) -> bool:
        """Take what one pipe has; False at its end."""
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
        """Take and show everything written so far; with `last` also a character that was not finished."""
        for pipe in self.pipes:
            while data := pipe.read():
                self._take(pipe, data, now)
            if last and (cut := pipe.decoder.decode(b"", final=True)):
                pipe.waiting.append(cut)
        self.flush(now)

    def flush(self, now: float) -> None:
        """Send the text that waits."""
        self.due = None
        for pipe in self.pipes:
            if pipe.waiting:
                text = "".join(pipe.waiting)
                pipe.waiting.clear()
                self._last_sent = now
                if self._parent is not None:
                    self._show({"rank": self.rank, "kind": "stream", "name": pipe.name, "text": text})

    def close(self) -> None:
        """Close the log and the pipes; twice is safe."""
        for pipe in self.pipes:
            os.close(pipe.fd)
        self.pipes.clear()
        self._log.close()

    def tail(self, lines: int = 60) -> str:
        """The last lines, of at most `TAIL_BYTES`, that the present request, or the one before, wrote into the log."""
        # by its descriptor: somebody may have deleted the file
        data = os.pread(self._log.fileno(), TAIL_BYTES, max(self._since, self._logged() - TAIL_BYTES))
        return "\n".join(data.decode(errors="replace").splitlines()[-lines:])

    def _take(self, pipe: Pipe, data: bytes, now: float) -> None:
        self._write_log(data)
        if self._bucket is None:
            return
        was_held_back = self._bucket.held_back
        if self._bucket.admit(len(data), now):
            if was_held_back:
                self._note_held_back()
            pipe.waiting.append(pipe.decoder.decode(data))

    def _note_held_back(self) -> None:
        bucket = self._bucket
        if bucket is not None and bucket.held_back and self._parent is not None:
            note = {"rank": self.rank, "kind": "held_back", "nbytes": bucket.held_back}
            bucket.held_back = 0
            self._show(note)

    def _logged(self) -> int:
        return os.fstat(self._log.fileno()).st_size

    def _write_log(self, data: bytes) -> None:
        if data:
            self._write_heading()
            self._append(data)
            self._open_line = not data.endswith(b"\n")

    def _write_heading(self) -> None:
        if self._heading is not None:
            heading, self._heading = "\n" * self._open_line + self._heading + "\n", None
            self._append(heading.encode())
            self._since, self._open_line = self._logged(), False
            self._spans.skip(self._since)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        self._unlooked += len(data)
        try:
            while view:
                view = view[self._log.write(view) :]
            self._log_fails = False
            if self._limit is not None and self._unlooked > self._limit // 16:
                self.trim()
        except OSError as problem:  # a full disk must not stop the run
            if not self._log_fails:
                self._log_fails = True
                why = f"{self.log_path} cannot be written: {problem.strerror}"
                self._tell(f"what rank {self.rank} prints is not kept, and only the screen has what it shows: {why}")

    def trim(self) -> None:
        """Keep the log within its limit, also of what the rank itself has written there."""
        self._unlooked = 0
        if self._limit is None or os.fstat(self._log.fileno()).st_size <= self._limit:
            return
        if not trim(self._log.fileno(), self._limit):
            self._tell(
                f"the log of rank {self.rank} grows beyond its limit: the file system of {self.log_path} cannot drop its beginning"
            )
            self._limit = None


def enlarge(pipe: int) -> None:
    """Give a pipe more room, where the system lets us."""
    if sys.platform == "linux":
        import fcntl

        with contextlib.suppress(OSError):
            fcntl.fcntl(pipe, F_SETPIPE_SZ, PIPE_BYTES)
