"""A connection to one host: scripts, processes and uploads, each over a separate channel."""

from __future__ import annotations

import contextlib
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skymagic.errors import HostError
from skymagic.ssh.process import GRACE_PERIOD, LOGIN_SHELL, Channel, Process, Shell

CHANNEL_TIMEOUT = 15.0
"""Seconds that a channel may take to open."""
KILL_TIMEOUT = 3.0
"""Seconds that a kill may take; short, because its caller has already waited for the process."""


@dataclass(frozen=True)
class ScriptResult:
    """Result of a script."""

    status: int
    """Exit status; -1 if a signal ended the script."""
    out: str
    err: str


class HostConnection(ABC):
    """A connection to one host: over SSH, or through a scheduler's job on that node.

    Thread-safe. A lost connection stays lost; create another one.

    Args:
        label: the user's name for the host.
        trial: a command line for the user, to try to reach the host.
    """

    def __init__(self, label: str, trial: str) -> None:
        self.label, self._trial = label, trial
        self._closing = threading.Lock()
        self._scripts: set[Process] = set()
        self._closed = False
        self.shell = LOGIN_SHELL
        """Shell of all its processes; `ssh.container.enter` sets another."""
        self.lasting_shell = LOGIN_SHELL
        """Shell of processes that start others which outlive them."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True if channels can probably still be opened; nothing is tried."""

    @abstractmethod
    def open_channel(self, timeout: float) -> Channel:
        """Return an idle channel, opened within `timeout` seconds; called on any thread.

        Raises:
            HostError: the connection is lost, or the host allows no further process.
        """

    @abstractmethod
    def release(self) -> None:
        """Close the underlying connection, and with it all open channels.

        `close` may call it more than once.
        """

    def open(self, command: str, *, lasting: bool = False) -> Process:
        """Start a process; several may run at once.

        Args:
            command: a script for POSIX sh, run in the user's home; data written to the process is
                its standard input.
            lasting: True if it may start processes that outlive it.

        Raises:
            HostError: the connection is lost, or the host allows no further process.
        """
        shell = self.lasting_shell if lasting else self.shell
        return self._process(self.open_channel(CHANNEL_TIMEOUT), command, self._kill, shell)

    def _process(
        self, channel: Channel, text: str, kill: Callable[[int], None], shell: Shell
    ) -> Process:
        return Process(channel, self.label, text, kill, lambda: self.alive, self._trial, shell)

    def run(
        self,
        script: str,
        *,
        lines: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> ScriptResult:
        """Run a script in the user's home with empty standard input, and wait for its end.

        On a timeout or an interrupt it is killed with all its child processes.

        Args:
            script: a script for POSIX sh.
            lines: called with each line of its output as it arrives, without the line's end.
            timeout: in seconds.

        Raises:
            HostError: it took too long, or the connection was lost.
        """
        process = self.open(script)
        self._scripts.add(process)
        timed_out = threading.Event()

        def end() -> None:
            timed_out.set()
            process.kill()

        timer = threading.Timer(timeout or 0.0, end)
        timer.daemon = True
        try:
            if timeout is not None:
                timer.start()
            process.end_input()
            out = _read_output(process, lines)
            status = process.finish(5.0)
        finally:
            timer.cancel()
            process.kill()
            self._scripts.discard(process)
        if timed_out.is_set():
            raise HostError(
                self.label,
                f"a script took longer than {timeout:.0f} s and was killed",
                code="host-timeout",
            )
        if self._closed or (not self.alive and (status is None or status < 0)):
            how = "closed" if self._closed else "lost"
            raise HostError(
                self.label,
                f"the connection was {how} while a script ran",
                "try again",
                code="host-lost",
            )
        return ScriptResult(-1 if status is None else status, out, process.errors())

    def upload(
        self, path: str, chunks: Iterable[memoryview], nbytes: int, mode: int = 0o600
    ) -> None:
        """Write a file, which gets its name only once it is complete.

        Args:
            path: absolute, or relative to the user's home; its folder is created.
            chunks: the content, `nbytes` in all; chunks of about 1 MB are best.
            mode: the file's permissions.

        Raises:
            HostError: it could not be written, or the connection was lost.
        """
        process = self.open(_receive_script(path, nbytes, mode))
        try:
            # If the script has ended, its standard error, which is read below, gives the reason.
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                for chunk in chunks:
                    process.write(chunk)
            process.end_input()
            while process.read():
                pass
            status = process.finish(60.0)
        finally:
            process.close()
        if status != 0:
            complaint = process.complaint() or (
                "it ended early" if self.alive else "the connection was lost"
            )
            raise HostError(
                self.label, f"{path} could not be written: {complaint}", code="host-write"
            )

    def close(self) -> None:
        """Close the connection and everything that uses it; running scripts are killed.

        Safe to call twice.
        """
        self._closed = True
        with self._closing:
            for process in list(self._scripts):
                process.kill()
            self.release()

    def _kill(self, pid: int) -> None:
        """Kill the process group of a session leader: SIGTERM, then SIGKILL."""
        wait = "n=0; while kill -0 -$1 && [ $n -lt 10 ]; do n=$((n+1)); sleep 0.2 || sleep 1; done"
        script = f"exec 2>/dev/null; set -- {pid}; kill -TERM -$1; {wait}; kill -KILL -$1"
        channel = self.open_channel(KILL_TIMEOUT)
        # process numbers in a container are those of its node
        process = self._process(channel, script, lambda _: None, LOGIN_SHELL)
        process.end_input()
        process.finish(KILL_TIMEOUT + GRACE_PERIOD)
        process.kill()


class ChannelConnection(HostConnection):
    """A connection without a shared transport: each channel notices by itself if its host is gone.

    Args:
        label, trial: as in `HostConnection`.
        opening: opens a channel within the given seconds; called on any thread.
    """

    def __init__(self, label: str, trial: str, opening: Callable[[float], Channel]) -> None:
        super().__init__(label, trial)
        self._opening = opening
        self._channels: list[Channel] = []
        self._lock = threading.Lock()
        self._open = True

    @property
    def alive(self) -> bool:
        """True until the connection is closed."""
        return self._open

    def open_channel(self, timeout: float) -> Channel:
        """Open one more channel."""
        channel = self._opening(timeout)
        with self._lock:
            self._channels = [opened for opened in self._channels if not opened.closed]
            if self._open:
                self._channels.append(channel)
                return channel
        channel.close()
        raise HostError(self.label, "the connection is closed", code="host-closed")

    def release(self) -> None:
        """Close all channels. Safe to call twice."""
        with self._lock:
            self._open = False
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()


def _read_output(process: Process, lines: Callable[[str], None] | None) -> str:
    """Return all output, passing each line to `lines` as it arrives."""
    out, reported = bytearray(), 0
    while data := process.read():
        out += data
        while lines is not None and (end := out.find(b"\n", reported)) >= 0:
            lines(out[reported:end].decode(errors="replace"))
            reported = end + 1
    if lines is not None and reported < len(out):
        lines(out[reported:].decode(errors="replace"))
    return out.decode(errors="replace")


def _receive_script(path: str, nbytes: int, mode: int) -> str:
    """Return a script that writes its standard input to a file, with an atomic rename."""
    quoted_path = shlex.quote(path if path.startswith("/") else f"./{path}")
    return (
        f"umask 077; path={quoted_path}; part=$path.$$.part\n"
        'trap \'rm -f "$part"\' EXIT; trap "exit 1" HUP INT TERM PIPE\n'
        'mkdir -p "$(dirname "$path")" && cat > "$part" || exit 1\n'
        'size=$(wc -c < "$part")\n'
        f'[ "$size" -eq {nbytes} ] || '
        f'{{ echo "$((size)) of {nbytes} bytes arrived" >&2; exit 1; }}\n'
        f'chmod {mode:o} "$part" && mv -f "$part" "$path"'
    )
