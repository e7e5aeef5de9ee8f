"""What the notebook fetches for hosts: uv's program for their platform, and wheels for those that reach no package index.

A host then needs no Python, only a package index; or not even that. uv resolves, for it knows what a requirement means on another
platform; pip downloads, with the notebook's own settings.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import gzip
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from skymagic.bootstrap.builds import for_gpus, platforms, uv_platform
from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.own import user_cache
from skymagic.bootstrap.shell import PACKAGES, PIP_SETTINGS, TELL, assignments
from skymagic.errors import SkyError
from skymagic.plan.masking import masked_command, without_colours
from skymagic.plugins._torch.plugin import WHEELS
from skymagic.wire import atomic

# -- uv's program ---------------------------------------------------------------------------------------------------------


UV_TIMEOUT = 300.0


class UvUnavailable(SkyError):
    """uv cannot be got here; the message says why, in lines."""


def uv_for(facts: Facts) -> bytes:
    """uv's program for a host's platform, gzipped; cached in the user's cache folder.

    Hosts run it, so a cached file is used only if the user owns it, nobody else can write to it, and its hash is the one in its name.

    Raises:
        UvUnavailable: there is none for this platform, or no package index that has it.
    """
    stem = f"uv-{facts.system}-{facts.machine}{'-musl' if facts.libc == 'musl' else ''}"
    if (cached := _cached(stem)) is not None:
        return cached
    program = _local_uv(facts) or _download_uv(facts)
    data = gzip.compress(program, 6, mtime=0)  # 38 MB become 15
    with contextlib.suppress(OSError):  # a home that cannot be written caches nothing
        for old in user_cache().glob(f"{stem}*.gz"):
            old.unlink()
        atomic.write(user_cache() / f"{stem}.{_hash(data)}.gz", data)
    return data


def _cached(stem: str) -> bytes | None:
    with contextlib.suppress(OSError):
        folder = atomic.private_folder(user_cache())
        for path in folder.glob(f"{stem}.*.gz"):
            if (
                atomic.is_private(path)
                and path.name == f"{stem}.{_hash(data := path.read_bytes())}.gz"
            ):
                return data
    return None


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _local_uv(facts: Facts) -> bytes | None:
    """The uv of this machine, where it runs on that one too."""
    here = shutil.which("uv")
    same = (facts.system, facts.machine) == (
        platform.system(),
        platform.machine(),
    ) and facts.libc != "musl"
    if here is None or not same:
        return None
    data = Path(here).resolve().read_bytes()
    return data if data[:2] != b"#!" else None  # a version manager's shim


def _download_uv(facts: Facts) -> bytes:
    if facts.system not in ("Linux", "Darwin"):
        raise UvUnavailable("uv is not built for this system")
    # the program for musl is static, and runs on any Linux
    tags = [
        *platforms(facts),
        *([f"musllinux_1_1_{facts.machine}"] if facts.system == "Linux" else []),
    ]
    with tempfile.TemporaryDirectory(prefix="skymagic-uv-") as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        command += ["--disable-pip-version-check", "--no-input", "--dest", folder]
        command += [word for tag in tags for word in ("--platform", tag)]
        try:
            done = subprocess.run(
                [*command, "uv"], capture_output=True, text=True, timeout=UV_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise UvUnavailable(f"`pip download uv` took longer than {UV_TIMEOUT:.0f} s") from None
        found = sorted(Path(folder).glob("uv-*.whl"))
        if done.returncode or not found:
            raise UvUnavailable(
                "`pip download uv` failed here:\n" + without_colours(done.stderr).strip()[-1500:]
            )
        return _uv_in(found[0])


def _uv_in(path: Path) -> bytes:
    """uv's program in a wheel, if it is what the wheel's RECORD says."""
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/scripts/uv"))
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        program = archive.read(name)
        rows = {row[0]: row[1] for row in csv.reader(archive.read(record).decode().splitlines())}
    digest = base64.urlsafe_b64encode(hashlib.sha256(program).digest()).rstrip(b"=").decode()
    if rows.get(name) != f"sha256={digest}":
        raise UvUnavailable(
            f"the wheel {path.name} is damaged: {name} is not the file that its RECORD describes"
        )
    return program


# -- wheels ---------------------------------------------------------------------------------------------------------------


DOWNLOAD_TIMEOUT = 3600.0
_LAST_LINES = 15
_HOUSES = 2  # wheelhouses that are kept: the hosts of a pool ask for the same one at once


class NoWheels(SkyError):
    """The notebook cannot get what a host needs; the message says why, with the last lines of uv or pip."""


@dataclass(frozen=True)
class Wanted:
    """What hosts of one kind need.

    Attributes:
        packages: requirements. preferences: pins that hold where `packages` allow them. constraints: those that always do.
        indexes: URLs of indexes beside the notebook's own; they may hold passwords.
        paths: wheels of this machine that are installed too, and are not downloaded.
        minor: the version of Python there. backend: PyTorch's build for hosts with GPUs; "" for what fits their driver.
    """

    packages: tuple[str, ...]
    minor: str
    preferences: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    indexes: tuple[str, ...] = field(default=(), repr=False)
    paths: tuple[str, ...] = ()
    backend: str = ""


@dataclass(frozen=True)
class Wheelhouse:
    """Wheels in a folder that goes when nobody refers to this any more.

    Attributes:
        pins: ``name==version`` of each. folder: where they are.
    """

    pins: tuple[str, ...]
    folder: tempfile.TemporaryDirectory[str]

    @property
    def files(self) -> dict[str, Path]:
        """File name → path, the largest first."""
        paths = sorted(Path(self.folder.name).glob("*.whl"), key=lambda path: -path.stat().st_size)
        return {path.name: path for path in paths}

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(path.stat().st_size for path in self.files.values())


_lock = threading.Lock()
_houses: dict[tuple[Wanted, object], Wheelhouse] = {}


def kind(facts: Facts) -> tuple[object, ...]:
    """Hosts of one kind need the same wheels."""
    return (
        facts.system,
        facts.machine,
        facts.libc,
        facts.accelerated,
        facts.driver,
        facts.uv is None,
    )


def fetch(wanted: Wanted, facts: Facts, say: Callable[[str], None]) -> Wheelhouse:
    """The wheels for hosts of one kind; who asks for the same at the same time gets the same.

    Args:
        facts: of one of the hosts.

    Raises:
        NoWheels: there is none of a package for that platform, or the notebook's own index cannot be reached.
    """
    key = wanted, kind(facts)
    with _lock:
        if key not in _houses:
            say(f"fetching packages for {facts.system} {facts.machine} here")
            made = _fetch(wanted, facts)
            while len(_houses) >= _HOUSES:
                _houses.pop(next(iter(_houses)))
            _houses[key] = made
        return _houses[key]


def _fetch(wanted: Wanted, facts: Facts) -> Wheelhouse:
    folder = tempfile.TemporaryDirectory(prefix="skymagic-wheels-")
    with (
        contextlib.ExitStack() as undo,
        tempfile.TemporaryDirectory(prefix="skymagic-resolve-") as work,
    ):
        undo.callback(folder.cleanup)
        pins = _resolved(wanted, facts, Path(work))
        for_cuda = any(pin.startswith(("nvidia-", "cuda-")) for pin in pins)
        if for_cuda and not facts.accelerated and "torch" in map(_name, pins):
            raise NoWheels(
                "torch is needed there, the host has no GPU, and the notebook's package indexes have only builds for CUDA"
            )
        here = {text.partition("==")[0] for text in map(_of_file, wanted.paths)}
        pins = [pin for pin in pins if _name(pin) not in here and pin not in wanted.constraints]
        _download(pins, wanted, facts, Path(work), folder.name)
        undo.pop_all()
    return Wheelhouse(tuple(pins), folder)


def _name(pin: str) -> str:
    return pin.partition("==")[0]


def _of_file(path: str) -> str:
    """``name==version`` of a wheel."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        name, version, _, _ = parse_wheel_filename(Path(path).name)
    except InvalidWheelFilename:
        return ""
    return f"{name}=={version}"


# ------------------------------------------------------------------------------------------------ resolution


def _resolved(wanted: Wanted, facts: Facts, work: Path) -> list[str]:
    """Pins of all that `wanted` comes to on that platform."""
    indexes = [f"--extra-index-url {url}" for url in wanted.indexes]
    paths = [Path(path).as_uri() for path in wanted.paths]
    (work / "requirements.txt").write_text(
        "\n".join([*indexes, *for_gpus(wanted.packages, facts, wanted.backend), *paths, ""])
    )
    (work / "always.txt").write_text("\n".join([*wanted.constraints, ""]))
    (work / "versions.txt").write_text("\n".join([*wanted.preferences, ""]))
    (work / "builds.txt").write_text("\n".join([*_builds_here(facts), ""]))
    backend = (wanted.backend or "auto") if facts.accelerated else "cpu"
    said = ""
    for chosen, constraints in (
        (backend, ("versions.txt",)),
        ("", ("versions.txt", "builds.txt")),  # PyTorch's own index may be out of reach
        (backend, ()),  # what the notebook has of what they need may contradict them
    ):
        options = [
            word for file in ("always.txt", *constraints) for word in ("-c", str(work / file))
        ]
        said = _compile(wanted, facts, chosen, options, work)
        if not said:
            lines = (work / "resolved.txt").read_text().splitlines()
            return [line.partition(" ")[0] for line in lines if re.match(r"[\w.-]+==", line)]
    raise NoWheels(said)


def _builds_here(facts: Facts) -> list[str]:
    """The notebook's own builds of PyTorch's packages, where they are for what the host is."""
    found = []
    for name in ("torch", "torchvision", "torchaudio"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version.endswith("+cpu") is not facts.accelerated and "+" in version:
            found.append(f"{name}=={version}")
    return found


def _compile(wanted: Wanted, facts: Facts, backend: str, options: Sequence[str], work: Path) -> str:
    """Let uv resolve, with the settings of the notebook's pip; what it said when it failed."""
    if not uv_platform(facts):
        raise NoWheels(f"it is unknown which packages fit {facts.system} {facts.machine}")
    names = {"uv": _program(), "folder": str(work), "backend": backend, "silent": ""}
    script = "\n".join(
        [TELL, *assignments(names), PIP_SETTINGS, PACKAGES, 'as_pip; exec "$uv" pip compile "$@"']
    )
    words = [
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--only-binary",
        ":all:",
        "--python",
        sys.executable,
    ]
    words += ["--python-version", wanted.minor, "--python-platform", uv_platform(facts)]
    words += [str(work / "requirements.txt"), *options, "-o", str(work / "resolved.txt")]
    env = {"UV_CUDA_DRIVER_VERSION": facts.driver} if facts.driver else {}
    return _run(["/bin/sh", "-c", script, "sh", *words], env)


def _program() -> str:
    """uv for this machine."""
    if (found := shutil.which("uv")) is not None:
        return found
    here = Facts(
        system=platform.system(), machine=platform.machine(), hostname="", home="", folder=""
    )
    try:
        data = gzip.decompress(uv_for(here))
    except UvUnavailable as problem:
        raise NoWheels(
            f"uv is needed to choose packages for other machines, and could not be got here: {problem}"
        ) from None
    program = user_cache() / "uv-here"
    if not program.is_file() or program.stat().st_size != len(data):
        with tempfile.NamedTemporaryFile(
            dir=program.parent, prefix=program.name, delete=False
        ) as file:
            file.write(data)
        Path(file.name).chmod(0o700)
        Path(file.name).replace(program)
    return str(program)


# ------------------------------------------------------------------------------------------------- downloads


def _download(pins: Sequence[str], wanted: Wanted, facts: Facts, work: Path, folder: str) -> None:
    labels = {
        found[1] for pin in pins if (found := re.search(r"\+((?:cpu|cu\d+|rocm[\d.]+|xpu))$", pin))
    }
    plain = [pin for pin in pins if "+" not in pin]
    said = _pip(plain, wanted.indexes, wanted.minor, facts, work, folder) if plain else ""
    if not said and (labelled := [pin for pin in pins if "+" in pin]):
        said = _pip(labelled, wanted.indexes, wanted.minor, facts, work, folder)
        if said and labels:
            indexes = (*wanted.indexes, *(WHEELS + label for label in sorted(labels)))
            said = _pip(labelled, indexes, wanted.minor, facts, work, folder)
    if said:
        raise NoWheels(said)


def _pip(
    pins: Sequence[str], indexes: Sequence[str], minor: str, facts: Facts, work: Path, folder: str
) -> str:
    """Download these pins for a platform; what pip said when it failed. Passwords in URLs are in a file."""
    lines = [*(f"--extra-index-url {url}" for url in indexes), *pins, ""]
    (work / "pins.txt").write_text("\n".join(lines))
    has_pip = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, stdin=subprocess.DEVNULL
    )
    command = (
        [sys.executable, "-m", "pip"]
        if has_pip.returncode == 0
        else [_program(), "tool", "run", "pip"]
    )
    command += [
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--implementation", "cp", "--python-version", minor]
    for abi in (f"cp{minor.replace('.', '')}", "abi3", "none"):
        command += ["--abi", abi]
    for tag in platforms(facts):
        command += ["--platform", tag]
    return _run([*command, "--dest", folder, "-r", str(work / "pins.txt")], {})


def _run(command: Sequence[str], more: Mapping[str, str]) -> str:
    """What a command has said that failed; "" for one that did not."""
    env = {**os.environ, **more}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=env, stdin=subprocess.DEVNULL,
            timeout=DOWNLOAD_TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it took longer than {DOWNLOAD_TIMEOUT:.0f} s"
    except OSError as problem:
        return f"{command[0]} does not run here: {problem}"
    if done.returncode == 0:
        return ""
    lines = [
        line
        for line in masked_command(without_colours(done.stderr + done.stdout)).splitlines()
        if line.strip()
    ]
    return (
        "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:]) or f"exit code {done.returncode}"
    )
