"""Data files of a package, for ``importlib.resources`` on machines that do not have its folder."""

from __future__ import annotations

import base64
import io
import zipfile
from pathlib import Path

MAX_BYTES = 4_000_000
"""Data files of a package that together have more bytes do not travel with its source."""
READERS = frozenset({"importlib", "importlib.resources", "importlib_resources", "pkgutil"})
"""Modules that read data files; where the code imports none of them, none of the files is needed."""
_CODE = (".py", ".pyc", ".pyo", ".pyi", ".so", ".pyd", ".ipynb")


def data_files(folder: Path) -> list[Path]:
    """A package's data files: neither code nor hidden."""
    files = (path for path in folder.rglob("*") if not path.name.endswith(_CODE) and path.is_file())
    return sorted(
        path
        for path in files
        if not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    )


def nbytes(files: list[Path]) -> int:
    """Size of data files, in bytes."""
    return sum(path.stat().st_size for path in files)


def packed(folder: Path, files: list[Path]) -> str:
    """Data files as text: a zip archive in base64, the same for the same contents."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path in files:
            archive.writestr(
                zipfile.ZipInfo(path.relative_to(folder).as_posix()), path.read_bytes(), zipfile.ZIP_DEFLATED
            )
    return base64.b64encode(out.getvalue()).decode()


def unpacked(text: str) -> zipfile.Path:
    """The archive as a folder."""
    return zipfile.Path(zipfile.ZipFile(io.BytesIO(base64.b64decode(text))))
