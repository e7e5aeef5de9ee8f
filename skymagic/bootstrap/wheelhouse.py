"""Files that the notebook fetches for hosts: uv, and wheels for hosts that reach no package index.

With uv, a host needs a package index but no Python. With wheels, it does not need an index either.
uv resolves, because it can evaluate requirements for another platform. pip downloads, with the
notebook's own settings.
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
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.local_wheels import user_cache
from skymagic.bootstrap.shell import PACKAGES, PIP_SETTINGS, TELL, assignments
from skymagic.errors import SkyError
from skymagic.plan.masking import masked_command, without_colours
from skymagic.plugins._torch.plugin import WHEELS
from skymagic.wire import atomic

# -- uv's program ----------------------------------------------------------------------------------


UV_TIMEOUT = 300.0


class UvUnavailable(SkyError):
    """uv cannot be obtained here. The message has the reason, in several lines."""


def uv_for(facts: HostFacts) -> bytes:
    """Return uv's program for a host's platform, gzipped. It is cached in the user's cache folder.

    Hosts run this program. Therefore a cached file is used only if the user owns it, nobody else
    can write to it, and its hash is the one in its name.

    Raises:
        UvUnavailable: no uv exists for this platform, or no package index has it.
    """
    stem = f"uv-{facts.system}-{facts.machine}{'-musl' if facts.libc == 'musl' else ''}"
    if (cached := _read_cached(stem)) is not None:
        return cached
    program = _local_uv(facts) or _download_uv(facts)
    # 38 MB become 15 MB.
    data = gzip.compress(program, 6, mtime=0)
    # If the home folder is read-only, nothing is cached.
    with contextlib.suppress(OSError):
        for old in user_cache().glob(f"{stem}*.gz"):
            old.unlink()
        atomic.write(user_cache() / f"{stem}.{_hash(data)}.gz", data)
    return data


def _read_cached(stem: str) -> bytes | None:
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


def _local_uv(facts: HostFacts) -> bytes | None:
    """Return this machine's uv if it runs on the host too."""
    path = shutil.which("uv")
    same = (facts.system, facts.machine) == (
        platform.system(),
        platform.machine(),
    ) and facts.libc != "musl"
    if path is None or not same:
        return None
    data = Path(path).resolve().read_bytes()
    # A version manager's shim is a script, not the program.
    return data if data[:2] != b"#!" else None


def _download_uv(facts: HostFacts) -> bytes:
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
            result = subprocess.run(
                [*command, "uv"], capture_output=True, text=True, timeout=UV_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise UvUnavailable(f"`pip download uv` took longer than {UV_TIMEOUT:.0f} s") from None
        wheels = sorted(Path(folder).glob("uv-*.whl"))
        if result.returncode or not wheels:
            raise UvUnavailable(
                "`pip download uv` failed here:\n" + without_colours(result.stderr).strip()[-1500:]
            )
        return _uv_in(wheels[0])


def _uv_in(path: Path) -> bytes:
    """Return uv's program from a wheel, after checking it against the wheel's RECORD."""
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


# -- wheels ----------------------------------------------------------------------------------------


DOWNLOAD_TIMEOUT = 3600.0
_LAST_LINES = 15
_HOUSES = 2
"""Number of wheelhouses to keep: the hosts of a pool request the same one at the same time."""


class NoWheels(SkyError):
    """The notebook cannot get a host's wheels. The message has the last lines of uv or pip."""


@dataclass(frozen=True)
class WheelRequest:
    """Packages that hosts of one kind need.

    Attributes:
        packages: requirements.
        preferences: pins that apply if `packages` allow them.
        constraints: pins that always apply.
        indexes: URLs of indexes besides the notebook's own; they may contain passwords.
        paths: wheels of this machine that are installed too and need no download.
        minor: the hosts' Python version.
        backend: PyTorch's build for hosts with GPUs; "" for the one that fits their driver.
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
    """Wheels in a temporary folder, which is deleted together with this object.

    Attributes:
        pins: ``name==version`` of each wheel.
        folder: the folder.
    """

    pins: tuple[str, ...]
    folder: tempfile.TemporaryDirectory[str]

    @property
    def files(self) -> dict[str, Path]:
        """Paths by file name, largest file first."""
        paths = sorted(Path(self.folder.name).glob("*.whl"), key=lambda path: -path.stat().st_size)
        return {path.name: path for path in paths}

    @property
    def nbytes(self) -> int:
        """Total size of all files in bytes."""
        return sum(path.stat().st_size for path in self.files.values())


_lock = threading.Lock()
_houses: dict[tuple[WheelRequest, object], Wheelhouse] = {}


def kind(facts: HostFacts) -> tuple[object, ...]:
    """Return the facts that decide which wheels a host needs: hosts of one kind need the same."""
    return (
        facts.system,
        facts.machine,
        facts.libc,
        facts.accelerated,
        facts.driver,
        facts.uv is None,
    )


def fetch(request: WheelRequest, facts: HostFacts, say: Callable[[str], None]) -> Wheelhouse:
    """Fetch the wheels for hosts of one kind.

    Concurrent calls for the same wheels share the result.

    Args:
        request: packages that the hosts need.
        facts: facts of one of the hosts.
        say: called with a message when the download starts.

    Raises:
        NoWheels: a package has no wheel for that platform, or the notebook's own index cannot be
            reached.
    """
    key = request, kind(facts)
    with _lock:
        if key not in _houses:
            say(f"fetching packages for {facts.system} {facts.machine} here")
            wheelhouse = _fetch(request, facts)
            while len(_houses) >= _HOUSES:
                _houses.pop(next(iter(_houses)))
            _houses[key] = wheelhouse
        return _houses[key]


def _fetch(request: WheelRequest, facts: HostFacts) -> Wheelhouse:
    folder = tempfile.TemporaryDirectory(prefix="skymagic-wheels-")
    with (
        contextlib.ExitStack() as undo,
        tempfile.TemporaryDirectory(prefix="skymagic-resolve-") as work,
    ):
        undo.callback(folder.cleanup)
        pins = _resolve_pins(request, facts, Path(work))
        for_cuda = any(pin.startswith(("nvidia-", "cuda-")) for pin in pins)
        if for_cuda and not facts.accelerated and "torch" in map(_name, pins):
            raise NoWheels(
                "torch is needed there, the host has no GPU, and the notebook's package indexes "
                "have only builds for CUDA"
            )
        local_names = {text.partition("==")[0] for text in map(_of_file, request.paths)}
        pins = [
            pin for pin in pins if _name(pin) not in local_names and pin not in request.constraints
        ]
        _download(pins, request, facts, Path(work), folder.name)
        undo.pop_all()
    return Wheelhouse(tuple(pins), folder)


def _name(pin: str) -> str:
    return pin.partition("==")[0]


def _of_file(path: str) -> str:
    """Return ``name==version`` of a wheel."""
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    try:
        name, version, _, _ = parse_wheel_filename(Path(path).name)
    except InvalidWheelFilename:
        return ""
    return f"{name}=={version}"


# --------------------------------------------------------------------------------------- resolution


def _resolve_pins(request: WheelRequest, facts: HostFacts, work: Path) -> list[str]:
    """Return pins of `request` and all dependencies on the host's platform."""
    indexes = [f"--extra-index-url {url}" for url in request.indexes]
    paths = [Path(path).as_uri() for path in request.paths]
    (work / "requirements.txt").write_text(
        "\n".join([*indexes, *for_gpus(request.packages, facts, request.backend), *paths, ""])
    )
    (work / "always.txt").write_text("\n".join([*request.constraints, ""]))
    (work / "versions.txt").write_text("\n".join([*request.preferences, ""]))
    (work / "builds.txt").write_text("\n".join([*_builds_here(facts), ""]))
    backend = (request.backend or "auto") if facts.accelerated else "cpu"
    error = ""
    for torch_backend, constraints in (
        (backend, ("versions.txt",)),
        # PyTorch's own index may be out of reach.
        ("", ("versions.txt", "builds.txt")),
        # The notebook's versions of the dependencies may contradict the requirements.
        (backend, ()),
    ):
        options = [
            word for file in ("always.txt", *constraints) for word in ("-c", str(work / file))
        ]
        error = _compile(request, facts, torch_backend, options, work)
        if not error:
            lines = (work / "resolved.txt").read_text().splitlines()
            return [line.partition(" ")[0] for line in lines if re.match(r"[\w.-]+==", line)]
    raise NoWheels(error)


def _builds_here(facts: HostFacts) -> list[str]:
    """Return the notebook's own builds of PyTorch's packages that match the host's devices."""
    builds = []
    for name in ("torch", "torchvision", "torchaudio"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if version.endswith("+cpu") is not facts.accelerated and "+" in version:
            builds.append(f"{name}=={version}")
    return builds


def _compile(
    request: WheelRequest, facts: HostFacts, backend: str, options: Sequence[str], work: Path
) -> str:
    """Resolve with uv, using the settings of the notebook's pip.

    Returns:
        What uv printed if it failed, or "".
    """
    if not uv_platform(facts):
        raise NoWheels(f"it is unknown which packages fit {facts.system} {facts.machine}")
    names = {"uv": _program(), "folder": str(work), "backend": backend, "silent": ""}
    script = "\n".join(
        [TELL, *assignments(names), PIP_SETTINGS, PACKAGES, 'as_pip; exec "$uv" pip compile "$@"']
    )
    arguments = [
        "--quiet",
        "--no-header",
        "--no-annotate",
        "--only-binary",
        ":all:",
        "--python",
        sys.executable,
    ]
    arguments += ["--python-version", request.minor, "--python-platform", uv_platform(facts)]
    arguments += [str(work / "requirements.txt"), *options, "-o", str(work / "resolved.txt")]
    env = {"UV_CUDA_DRIVER_VERSION": facts.driver} if facts.driver else {}
    return _run(["/bin/sh", "-c", script, "sh", *arguments], env)


def _program() -> str:
    """Return the path of a uv for this machine."""
    if (path := shutil.which("uv")) is not None:
        return path
    this_machine = HostFacts(
        system=platform.system(), machine=platform.machine(), hostname="", home="", folder=""
    )
    try:
        data = gzip.decompress(uv_for(this_machine))
    except UvUnavailable as problem:
        raise NoWheels(
            "uv is needed to choose packages for other machines, and could not be got here: "
            f"{problem}"
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


# ---------------------------------------------------------------------------------------- downloads


def _download(
    pins: Sequence[str], request: WheelRequest, facts: HostFacts, work: Path, folder: str
) -> None:
    labels = {
        match[1] for pin in pins if (match := re.search(r"\+((?:cpu|cu\d+|rocm[\d.]+|xpu))$", pin))
    }
    plain = [pin for pin in pins if "+" not in pin]
    error = _pip(plain, request.indexes, request.minor, facts, work, folder) if plain else ""
    if not error and (labelled := [pin for pin in pins if "+" in pin]):
        error = _pip(labelled, request.indexes, request.minor, facts, work, folder)
        if error and labels:
            indexes = (*request.indexes, *(WHEELS + label for label in sorted(labels)))
            error = _pip(labelled, indexes, request.minor, facts, work, folder)
    if error:
        raise NoWheels(error)


def _pip(
    pins: Sequence[str],
    indexes: Sequence[str],
    minor: str,
    facts: HostFacts,
    work: Path,
    folder: str,
) -> str:
    """Download these pins for a platform.

    Passwords in URLs are passed in a file.

    Returns:
        What pip printed if it failed, or "".
    """
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
    """Run a command.

    Returns:
        The last output of a command that failed, or "" on success.
    """
    env = {**os.environ, **more}
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            stdin=subprocess.DEVNULL,
            timeout=DOWNLOAD_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {DOWNLOAD_TIMEOUT:.0f} s"
    except OSError as problem:
        return f"{command[0]} does not run here: {problem}"
    if result.returncode == 0:
        return ""
    lines = [
        line
        for line in masked_command(without_colours(result.stderr + result.stdout)).splitlines()
        if line.strip()
    ]
    return (
        "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:])
        or f"exit code {result.returncode}"
    )
