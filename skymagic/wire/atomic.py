"""Files that the user alone can read, replaced atomically: whoever reads one meanwhile sees the old content or the new."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write(path: Path, content: bytes) -> None:
    """Replace a file's content; its folder is made where there is none, for the user alone.

    Raises:
        OSError: it cannot be written; what was there stays.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # other processes and threads may write the same file now
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
