"""skymagic's running code as a reproducible wheel: the same sources give the same bytes."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can represent."""


def version() -> str:
    """Return skymagic's version as stated in this source tree or installation."""
    return str(import_module("skymagic").__version__)


def contents(package: Path = PACKAGE) -> dict[str, bytes]:
    """Return the content of the wheel by file name: sources and data, without compiled files."""
    paths = sorted(path for path in package.rglob("*") if path.is_file())
    return {
        f"skymagic/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in paths
        if "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pyo")
    }


def digest(files: Mapping[str, bytes]) -> str:
    """Return a digest of the sources that does not depend on what packed them."""
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16]


def build(files: Mapping[str, bytes], number: str, name: str = "skymagic") -> bytes:
    """Build a wheel from these files.

    It declares no dependencies, because the environment has them.

    Args:
        files: content by file name.
        number: version of the wheel.
        name: project name.
    """
    info = f"{name}-{number}.dist-info"
    all_files = dict(files)
    all_files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n".encode()
    )
    all_files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: skymagic\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    return pack(all_files, info)


def pack(files: Mapping[str, bytes], info: str) -> bytes:
    """Pack files into a wheel, followed by their RECORD in the folder `info`."""
    all_files = dict(files)
    record = "".join(
        f"{path},sha256={_sha256(data)},{len(data)}\n" for path, data in all_files.items()
    )
    all_files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in all_files.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return packed.getvalue()


def _sha256(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@cache
def running_wheel() -> tuple[str, str, bytes]:
    """Return the digest, file name and bytes of the running code.

    The files are read once, at the first call.
    """
    files = contents()
    return digest(files), f"skymagic-{version()}-py3-none-any.whl", build(files, version())
