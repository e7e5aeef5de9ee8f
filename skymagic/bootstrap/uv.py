"""uv's program for a node, downloaded and cached on the notebook's side: a node needs no Python, only a package index."""

from __future__ import annotations

import base64
import contextlib
import csv
import gzip
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from skymagic.bootstrap.facts import Facts
from skymagic.errors import SkyError
from skymagic.plan.masking import without_colours
from skymagic.wire import atomic

DOWNLOAD_TIMEOUT = 300.0


class UvUnavailable(SkyError):
    """uv cannot be got here; the message says why, in lines."""


def fetch(facts: Facts) -> bytes:
    """uv's program for a host's platform, gzipped; cached in the user's cache folder.

    Hosts run it, so a cached file is used only if the user owns it, nobody else can write to it, and its hash is the one in its name.

    Raises:
        UvUnavailable: there is none for this platform, or no package index that has it.
    """
    stem = f"uv-{facts.system}-{facts.machine}{'-musl' if facts.libc == 'musl' else ''}"
    if (cached := _cached(stem)) is not None:
        return cached
    program = _local_uv(facts) or _download(platforms(facts))
    data = gzip.compress(program, 6, mtime=0)  # 38 MB become 15
    with contextlib.suppress(OSError):  # a home that cannot be written caches nothing
        for old in cache_folder().glob(f"{stem}*.gz"):
            old.unlink()
        atomic.write(cache_folder() / f"{stem}.{_hash(data)}.gz", data)
    return data


def _cached(stem: str) -> bytes | None:
    with contextlib.suppress(OSError):
        folder = atomic.private_folder(cache_folder())
        for path in folder.glob(f"{stem}.*.gz"):
            if atomic.is_private(path) and path.name == f"{stem}.{_hash(data := path.read_bytes())}.gz":
                return data
    return None


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def cache_folder() -> Path:
    """The user's folder of cached programs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skymagic"


def platforms(facts: Facts) -> tuple[str, ...]:
    """The platform tags of wheels that run on a host; () for a system that uv is not built for."""
    machine = facts.machine
    if facts.system == "Linux":
        glibc = () if facts.libc == "musl" else ("manylinux_2_17", "manylinux2014", "manylinux_2_28")
        return tuple(f"{tag}_{machine}" for tag in (*glibc, "musllinux_1_1"))
    if facts.system == "Darwin":
        return ("macosx_11_0_arm64",) if machine == "arm64" else ("macosx_10_12_x86_64",)
    return ()


def _local_uv(facts: Facts) -> bytes | None:
    """The uv of this machine, where it runs on that one too."""
    here = shutil.which("uv")
    same = (facts.system, facts.machine) == (platform.system(), platform.machine()) and facts.libc != "musl"
    if here is None or not same:
        return None
    data = Path(here).resolve().read_bytes()
    return data if data[:2] != b"#!" else None  # a version manager's shim


def _download(tags: tuple[str, ...]) -> bytes:
    if not tags:
        raise UvUnavailable("uv is not built for this system")
    with tempfile.TemporaryDirectory(prefix="skymagic-uv-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--no-input", "--dest", folder]
        command += [word for tag in tags for word in ("--platform", tag)]
        try:
            done = subprocess.run([*command, "uv"], capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise UvUnavailable(f"`pip download uv` took longer than {DOWNLOAD_TIMEOUT:.0f} s") from None
        found = sorted(Path(folder).glob("uv-*.whl"))
        if done.returncode or not found:
            raise UvUnavailable("`pip download uv` failed here:\n" + without_colours(done.stderr).strip()[-1500:])
        return _program(found[0])


def _program(path: Path) -> bytes:
    """uv's program in a wheel, if it is what the wheel's RECORD says."""
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/scripts/uv"))
        record = next(name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
        program = wheel.read(name)
        rows = {row[0]: row[1] for row in csv.reader(wheel.read(record).decode().splitlines())}
    digest = base64.urlsafe_b64encode(hashlib.sha256(program).digest()).rstrip(b"=").decode()
    if rows.get(name) != f"sha256={digest}":
        raise UvUnavailable(f"the wheel {path.name} is damaged: {name} is not the file that its RECORD describes")
    return program
