"""IPython in a terminal: what it shows in the end, character by character."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pexpect

from tests.lab.notebook import ANSI, ROOT, own_folders

DEADLINE = 60.0
"""Seconds within which anything must be shown."""
COLUMNS, LINES = 100, 40
PROMPT = r"In \[\d+\]: "


def rows(received: str) -> list[str]:
    """What a terminal shows that has received this text, without colours."""
    shown, column = [""], 0
    for character in ANSI.sub("", received):
        if character == "\n":
            shown.append("")
            column = 0
        elif character == "\r":
            column = 0
        else:
            shown[-1] = shown[-1][:column].ljust(column) + character + shown[-1][column + 1 :]
            column += 1
    return [row.rstrip() for row in shown]


class Terminal:
    """IPython, typed into.

    Args:
        shell: its process.
    """

    def __init__(self, shell: pexpect.spawn) -> None:
        self._shell = shell
        self.received = ""
        """All that the terminal has received."""
        self.read(PROMPT)

    def read(self, text: str) -> None:
        """Wait for a text that matches a regular expression."""
        self._shell.expect(text)
        self.received += f"{self._shell.before}{self._shell.after}"

    def type(self, line: str) -> None:
        """Type a line."""
        self._shell.sendline(line)

    def run(self, line: str, *events: tuple[str, Path | None]) -> list[str]:
        """Run a line; when each of these texts is shown, its file is made. The rows that it shows, without its echo."""
        begin = len(self.received)
        self.type(line)
        for text, path in events:
            self.read(text)
            if path is not None:
                path.touch()
        self.read(PROMPT)
        shown = rows(self.received[begin:].partition("\n")[2])
        return [row for row in shown if row and not re.match(PROMPT.strip(), row)]


@contextmanager
def opened(folder: Path, *lines: str, term: str = "xterm") -> Iterator[Terminal]:
    """IPython in a terminal of this kind, after these lines."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, **own_folders(folder), "PYTHONPATH": path, "TERM": term}
    env |= {"COLUMNS": str(COLUMNS), "PYTHONWARNINGS": "ignore"}
    words: Sequence[str] = ("-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor")
    shell = pexpect.spawn(
        sys.executable, list(words), cwd=str(folder), env=env, encoding="utf-8", timeout=DEADLINE, echo=True,
        dimensions=(LINES, 1000),  # a typed line is not wrapped
    )  # fmt: skip
    try:
        terminal = Terminal(shell)
        for line in lines:
            terminal.run(line)
        yield terminal
        terminal.type("exit()")
        shell.expect(pexpect.EOF)
    finally:
        shell.close(force=True)
