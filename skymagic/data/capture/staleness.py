"""Modules whose file was edited after the notebook had imported them: ranks get the new text, the notebook runs the old."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from skymagic.data.capture.modules import ModuleSource

_EARLIER = "an earlier text"


class Imported:
    """Knows the text that each of the notebook's modules was imported with, as far as that can be found out."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, str]] = {}
        """Module → its spec, another one after each reload, and the hash of its text then."""
        self._noted: dict[str, str] = {}

    def stale(self, sources: Iterable[ModuleSource]) -> list[ModuleSource]:
        """Those modules of which the notebook has another text than the file; each text is reported once."""
        found = []
        for source in sources:
            spec = getattr(sys.modules.get(source.name), "__spec__", None)
            if spec is None or not source.source:
                continue
            seen = self._seen.get(source.name)
            if seen is None or seen[0] is not spec:
                seen = self._seen[source.name] = (spec, _EARLIER if _compiled_earlier(source.origin) else source.hash)
            if seen[1] != source.hash and self._noted.get(source.name) != source.hash:
                self._noted[source.name] = source.hash
                found.append(source)
        return found


def _compiled_earlier(path: str) -> bool:
    """Whether the compiled file that an import leaves is of an earlier text; False where there is none, or it cannot be replaced."""
    try:
        compiled = importlib.util.cache_from_source(path)
        with Path(compiled).open("rb") as file:
            header = file.read(16)
        status = Path(path).stat()
    except (OSError, NotImplementedError):
        return False
    # magic number, flags, and for flags 0 the source's time and size (PEP 552)
    if (
        header[:4] != importlib.util.MAGIC_NUMBER
        or int.from_bytes(header[4:8], "little")
        or not os.access(compiled, os.W_OK)
    ):
        return False
    told = int.from_bytes(header[8:12], "little"), int.from_bytes(header[12:16], "little")
    return told != (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
