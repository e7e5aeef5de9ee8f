"""How far an installer's downloads are, from the lines that it prints and the sizes that the plan knows; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from skymagic.plan.image import project

PIP = re.compile(r"\s*Downloading (?:\S*/)?([A-Za-z0-9._]+?)-\d[^\s/]*\.(?:whl|tar\.gz|zip)(?= |$)")
"""pip prints what it begins to download, one after the other: "  Downloading numpy-2.1.0-cp311-….whl (16.3 MB)"."""
UV = re.compile(r"\s*Downloaded (\S+)$")
"""uv downloads side by side, and prints what has come: " Downloaded numpy"; nothing of what is smaller than 1 MB."""
OVER = re.compile(r"\s*(?:Prepared \d|Installing collected packages)")


class InstallStep(str):
    """A step of an installation as text.

    Args:
        text: what is shown.
        share: of the planned bytes, between 0 and 1, those that have come; None where nothing is downloaded.
    """

    share: float | None

    def __new__(cls, text: str, share: float | None = None) -> InstallStep:
        step = super().__new__(cls, text)
        step.share = share
        return step


@dataclass
class Downloads:
    """What has come of what was planned.

    Args:
        sizes: bytes of each package, by its canonical name; those whose size nobody knows are not counted.
    """

    sizes: Mapping[str, int]
    _there: set[str] = field(default_factory=set)
    _current: str = ""

    def feed(self, line: str) -> float | None:
        """One line of the installer: the share that has come, where the line is about downloads and sizes are known."""
        if begun := PIP.match(line):
            self._there.add(self._current)
            self._current = project(begun[1]) or ""
        elif come := UV.match(line):
            self._there.add(project(come[1]) or "")
        elif OVER.match(line):
            self._there.update(self.sizes)
        elif not line.lstrip().startswith("Downloading "):
            return None
        total = sum(self.sizes.values())
        return sum(nbytes for name, nbytes in self.sizes.items() if name in self._there) / total if total else None
