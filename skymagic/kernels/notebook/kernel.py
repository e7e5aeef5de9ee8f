"""The kernel that executes a notebook's cells, and what it says of a cell as the outputs that a notebook keeps (nbformat 4).

The driver starts the kernel, speaks to it over Unix sockets that are this user's alone, and ends it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty
from typing import Any

from skymagic.kernels.fork import end_with_parent

OUTPUTS = ("stream", "display_data", "execute_result", "error")
REDRAWN = re.compile(r"[^\n]*\r(?=[^\n])")
"""The beginning of a line that a carriage return takes back."""


class Outputs:
    """The outputs of one cell, as they stand now."""

    def __init__(self, kept: list[dict[str, Any]]) -> None:
        self._kept = kept
        self._ids: dict[
            str, list[dict[str, Any]]
        ] = {}  # outputs that may be replaced, by their display's id
        self._clear = False

    def take(self, kind: str, content: Mapping[str, Any]) -> None:
        """Take a message of this cell, as a front end does."""
        if kind == "clear_output":
            self._clear = bool(content.get("wait"))
            if not self._clear:
                self._kept.clear()
        elif kind in OUTPUTS:
            if self._clear:
                self._clear = False
                self._kept.clear()
            if kind == "stream":
                self._stream(content["name"], content["text"])
            else:
                self._add(kind, content)

    def _stream(self, name: str, text: str) -> None:
        last = self._kept[-1] if self._kept else {}
        if last.get("output_type") == "stream" and last["name"] == name:
            last["text"] = joined(last["text"], text)
        else:
            self._kept.append({"output_type": "stream", "name": name, "text": text})

    def _add(self, kind: str, content: Mapping[str, Any]) -> None:
        fields: tuple[str, ...]
        if kind == "error":
            fields = ("ename", "evalue", "traceback")
        elif kind == "execute_result":
            fields = ("execution_count", "data", "metadata")
        else:
            fields = ("data", "metadata")
        output = {"output_type": kind, **{field: content.get(field) for field in fields}}
        self._kept.append(output)
        if name := (content.get("transient") or {}).get("display_id"):
            self._ids.setdefault(name, []).append(output)

    def update(self, content: Mapping[str, Any]) -> None:
        """A display is replaced, also one of an earlier cell: to be called of every cell."""
        for output in self._ids.get((content.get("transient") or {}).get("display_id", ""), ()):
            output["data"], output["metadata"] = content["data"], content["metadata"]


def joined(before: str, text: str) -> str:
    """A stream's text with more of it; of a line that was redrawn, its last state."""
    kept, newline, last = before.rpartition("\n")
    return kept + newline + REDRAWN.sub("", last + text)


def plain(kind: str, content: Mapping[str, Any]) -> tuple[str, str]:
    """(stream, text) of a message, for a terminal; ("", "") for what has none."""
    if kind == "stream":
        return content["name"], content["text"]
    text = (content.get("data") or {}).get("text/plain", "")
    return ("display", f"{text}\n") if text else ("", "")


START_TIMEOUT = 120.0
"""Seconds in which it must answer."""
END_TIMEOUT = 10.0
"""Seconds that it has to end in order."""
Hearer = Callable[[str, Mapping[str, Any]], None]
"""Called with the kind and the content of a message."""


class KernelDied(Exception):
    """The kernel's process has ended."""


class Kernel:
    """The kernel's process, and the client that speaks to it.

    Args:
        folder: a folder of this user's alone, for its sockets; its path is short.
        log: where it writes what belongs to no cell.
        cwd: where it runs.
        env: its environment.
    """

    def __init__(self, folder: str, log: str, cwd: str, env: Mapping[str, str]) -> None:
        from jupyter_client.blocking.client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        file, _ = write_connection_file(
            f"{folder}/kernel.json", ip=f"{folder}/kernel", transport="ipc"
        )
        with open(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ipykernel_launcher", "-f", file],
                cwd=cwd, env={**env, "JPY_PARENT_PID": str(os.getpid())}, stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip
        self._hearers: dict[str, Hearer] = {}
        """Who hears of a request, also after its end: what a cell has left at work may show something later."""
        self._client = BlockingKernelClient(connection_file=file)
        self._client.load_connection_file()
        self._client.start_channels(hb=False)
        self._wait()

    def _wait(self) -> None:
        try:
            # the manager's part is ours: whether it lives is asked for here
            self._client.wait_for_ready(timeout=START_TIMEOUT)
        except RuntimeError as problem:
            raise KernelDied(f"its kernel did not start: {problem}") from None

    def execute(self, source: str, hearer: Hearer | None = None) -> dict[str, Any]:
        """Execute a cell until all that it shows has come; the kernel's reply.

        Args:
            hearer: hears what it shows; without one it is none of the notebook's cells.

        Raises:
            KernelDied: it has ended.
        """
        number = self._client.execute(
            source,
            silent=hearer is None,
            store_history=hearer is not None,
            allow_stdin=False,
            stop_on_error=False,
        )
        if hearer is not None:
            self._hearers[number] = hearer
        idle = False
        while not idle:
            try:
                message = self._client.get_iopub_msg(timeout=1.0)
            except Empty:
                self._check()
                continue
            of, kind = message["parent_header"].get("msg_id", ""), message["msg_type"]
            idle = (
                of == number
                and kind == "status"
                and message["content"]["execution_state"] == "idle"
            )
            if of in self._hearers:
                self._hearers[of](kind, message["content"])
        while True:
            try:
                reply = self._client.get_shell_msg(timeout=1.0)
            except Empty:
                self._check()
                continue
            if reply["parent_header"].get("msg_id") == number:
                return dict(reply["content"])

    def _check(self) -> None:
        if (status := self._process.poll()) is not None:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            raise KernelDied(f"its kernel died ({how})")

    def signal(self, number: int) -> None:
        """Send a signal to it and what it has started; to one that has ended nothing is sent."""
        if self._process.poll() is None:
            with suppress(OSError):
                os.killpg(self._process.pid, number)

    def close(self) -> None:
        """End it; twice is safe."""
        if self._process.poll() is None:
            self._client.shutdown()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_TIMEOUT)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._client.stop_channels()
