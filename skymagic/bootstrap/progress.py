"""Parse the output of install.sh: steps, progress of downloads, and outcome."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from skymagic.bootstrap.messages import InstallFailure
from skymagic.bootstrap.shell import MARK
from skymagic.plan.image import project
from skymagic.plan.masking import masked_command, without_colours
from skymagic.wire.untrusted import sanitized

UV_DOWNLOADED = re.compile(r"\s*Downloaded (\S+)$")
"""Matches uv's line at the end of a download, such as " Downloaded numpy".

uv downloads in parallel, and prints nothing about files smaller than 1 MB.
"""
DOWNLOADS_OVER = re.compile(r"\s*Prepared \d")
"""Matches a line that follows all downloads."""


class InstallStep(str):
    """Text of an installation step.

    Args:
        text: text shown to the user.
        share: downloaded fraction of the planned bytes; None if the step downloads nothing.
    """

    share: float | None

    def __new__(cls, text: str, share: float | None = None) -> InstallStep:
        step = super().__new__(cls, text)
        step.share = share
        return step


@dataclass
class Downloads:
    """Progress of the planned downloads.

    Args:
        sizes: bytes of each package by canonical name. Packages of unknown size do not count.
    """

    sizes: Mapping[str, int]
    _complete: set[str] = field(default_factory=set)

    def feed(self, line: str) -> float | None:
        """Process one line of the installer.

        Returns:
            The downloaded fraction, or None if the line is not about downloads or no sizes are
            known.
        """
        if downloaded := UV_DOWNLOADED.match(line):
            self._complete.add(project(downloaded[1]) or "")
        elif DOWNLOADS_OVER.match(line):
            self._complete.update(self.sizes)
        elif not line.lstrip().startswith("Downloading "):
            return None
        total = sum(self.sizes.values())
        return (
            sum(nbytes for name, nbytes in self.sizes.items() if name in self._complete) / total
            if total
            else None
        )


KEPT_LINES = 15
SHOWN_PREFIXES = (
    "Downloading ",
    "Downloaded ",
    "Building ",
    "Installing ",
    "Resolved ",
    "Prepared ",
    "Installed ",
)
"""Prefixes of the installer's lines that the user sees."""


class InstallProgress:
    """Parser of install.sh's output.

    It reports steps, and keeps the last lines and the status for the error.

    Args:
        report: called with the text of each step.
        hidden: values that are never shown.
        say: called with each line that an installer prints.
        sizes: bytes of the planned packages by canonical name. With them, download steps have a
            share.
        on_python_ready: called with the path of the new environment's interpreter as soon as it can
            run modules of skymagic.
        on_kept: called once the host has all wheels, so that they can be passed on.
    """

    def __init__(
        self,
        report: Callable[[str], None],
        hidden: Collection[str] = (),
        say: Callable[[str], None] = lambda line: None,
        sizes: Mapping[str, int] | None = None,
        on_python_ready: Callable[[str], None] = lambda python: None,
        on_kept: Callable[[], None] = lambda: None,
    ) -> None:
        self._downloads = Downloads(sizes or {})
        self._report, self._hidden, self._say = report, hidden, say
        self._on_python_ready, self._on_kept = on_python_ready, on_kept
        self.done = False
        self._step, self._command = "starting", ""
        self._free: int | None = None
        self._status: int | None = None
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def feed(self, line: str) -> None:
        """Process one line of the script's output.

        Lines that begin with `MARK` are events of install.sh itself: ``step`` begins a step,
        ``command`` names its command, ``instead`` precedes a fallback, ``runs`` gives the path of
        the new interpreter, ``kept`` means that wheels can be passed on, and ``failed`` or ``done``
        ends the script.
        """
        if not line.startswith(MARK):
            # Not a line of the script itself: an installer or another program printed it.
            text = self._masked(line).rstrip()
            if text:
                self._last.append(text)
                self._say(text)
            share = self._downloads.feed(text)
            if text.lstrip().startswith(SHOWN_PREFIXES):
                self._report(InstallStep(text.strip(), share))
            return
        name, _, value = line.removeprefix(MARK).partition(" ")
        if name == "step":
            self._step, self._command = self._masked(value.strip()), ""
            self._last.clear()
            self._report(self._step)
        elif name == "runs":
            self._on_python_ready(value.strip())
        elif name == "kept":
            self._on_kept()
        elif name == "waiting":
            self._report("waiting for another pool that creates the same environment")
        elif name == "instead":
            why = self._last[-1].strip() if self._last else "no output"
            self._report(f"{self._step} failed ({why}); trying another way")
        elif name == "command":
            self._command = self._masked(value.strip())
        elif name == "free":
            self._free = int(value) if value.strip().isdigit() else None
        elif name == "failed":
            self._status = int(value)
        elif name == "done":
            self.done = True

    def _masked(self, text: str) -> str:
        return sanitized(masked_command(without_colours(text), self._hidden))

    def failure(self, status: int | None, err: str, minor: str) -> InstallFailure:
        """Return what went wrong, if the script has ended without success."""
        if not self._last:
            self._last.extend(self._masked(err).strip().splitlines())
        code = status if self._status is None else self._status
        return InstallFailure(self._step, self._command, code, tuple(self._last), self._free, minor)
