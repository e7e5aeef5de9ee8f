"""skymagic's running code as a reproducible wheel: the same bytes for the same sources."""

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
"""The first moment that a zip file can name."""


def version() -> str:
    """skymagic's version, as it is given in this source tree or installation."""
    return str(import_module("skymagic").__version__)


def contents(package: Path = PACKAGE) -> dict[str, bytes]:
    """File name in the wheel → bytes: the package's sources and data, without what Python compiled."""
    paths = sorted(path for path in package.rglob("*") if path.is_file())
    return {
        f"skymagic/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in paths
        if "__pycache__" not in path.parts and path.suffix not in (".pyc", ".pyo")
    }


def digest(files: Mapping[str, bytes]) -> str:
    """Digest of the sources, whatever packed them."""
    whole = hashlib.sha256()
    for name, data in files.items():
        whole.update(f"{name}\0{len(data)}\0".encode() + data)
    return whole.hexdigest()[:16]


def build(files: Mapping[str, bytes], number: str, name: str = "skymagic") -> bytes:
    """A wheel of these files; `number` is its version. It states no dependencies: the environment holds them."""
    info = f"{name}-{number}.dist-info"
    whole = dict(files)
    whole[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n".encode()
    whole[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: skymagic\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    return pack(whole, info)


def pack(files: Mapping[str, bytes], info: str) -> bytes:
    """A wheel of these files, and a record of them in the folder `info`, last."""
    whole = dict(files)
    record = "".join(f"{path},sha256={_sha256(data)},{len(data)}\n" for path, data in whole.items())
    whole[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in whole.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return packed.getvalue()


def _sha256(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@cache
def running() -> tuple[str, str, bytes]:
    """(digest, file name, bytes) of what runs here, as its files were when this was first asked."""
    files = contents()
    return digest(files), f"skymagic-{version()}-py3-none-any.whl", build(files, version())
