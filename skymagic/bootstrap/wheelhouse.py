"""Programs and wheels that the notebook fetches for hosts.

With uv, a host needs a package index but no Python. With wheels, it does not need an index either.
uv chooses wheels for the host's platform from the notebook's own indexes (`resolve`), and
`downloading` fetches them. A plan shows the same choice.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import gzip
import hashlib
import io
import logging
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from skymagic.bootstrap import downloading
from skymagic.bootstrap.builds import build_constraints, for_gpus, needs_cuda, uv_platform
from skymagic.bootstrap.downloading import LockedWheel
from skymagic.bootstrap.facts import HostFacts, PlannedWheel
from skymagic.bootstrap.local_wheels import local_uv, user_cache
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.shell import TELL, UV_SETTINGS, assignments
from skymagic.errors import SkyError
from skymagic.plan.masking import masked_command, without_colours
from skymagic.wire import atomic

logger = logging.getLogger(__name__)

# -- uv's program ----------------------------------------------------------------------------------


class UvUnavailable(SkyError):
    """uv cannot be obtained here. The message has the reason, in several lines."""


def uv_for(facts: HostFacts) -> bytes:
    """Return uv's program for a host's platform, gzipped. It is cached in the user's cache folder.

    Hosts run this program. Therefore a cached file is used only if the user owns it, other users
    cannot write to it, and its hash is the one in its name.

    Raises:
        UvUnavailable: no uv exists for this platform, or no package index has it.
    """
    stem = f"uv-{facts.system}-{facts.machine}{'' if _has_glibc(facts) else '-musl'}"
    # Of 60 MB, 18 MB remain. A better compression takes longer than it saves.
    return _cached(stem, lambda: gzip.compress(_local_uv(facts) or _download_uv(facts), 1, mtime=0))


_cache_lock = threading.Lock()


def _cached(stem: str, make: Callable[[], bytes]) -> bytes:
    """Return a file of the user's cache. Make it if it is missing."""
    with _cache_lock:  # for all hosts of a pool once
        if (cached := _read_cached(stem)) is not None:
            return cached
        data = make()
        # If the home folder is read-only, nothing is cached.
        with contextlib.suppress(OSError):
            for old in user_cache().glob(f"{stem}.*.gz"):
                old.unlink()
            atomic.write(user_cache() / f"{stem}.{_hash(data)}.gz", data)
    return data


def _has_glibc(facts: HostFacts) -> bool:
    return facts.system != "Linux" or "2." in facts.libc


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
    path = local_uv()
    same = (facts.system, facts.machine) == (platform.system(), platform.machine())
    if not path or not same or not _has_glibc(facts):
        return None
    data = Path(path).resolve().read_bytes()
    # A version manager's shim is a script, not the program.
    return data if data[:2] != b"#!" else None


def _download_uv(facts: HostFacts) -> bytes:
    """Return the program in uv's wheel for a host's platform.

    Raises:
        UvUnavailable: no index has it.
    """
    # the program for musl is static, and runs on any Linux
    static = facts if _has_glibc(facts) else replace(facts, libc="musl")
    request = WheelRequest(("uv",), f"{sys.version_info.major}.{sys.version_info.minor}")
    try:
        (wheel,) = resolve(request, static)
        with tempfile.TemporaryDirectory(prefix="skymagic-uv-") as folder:
            _download([wheel], request, Path(folder))
            return _uv_in(Path(folder, wheel.file))
    except NoWheels as problem:
        raise UvUnavailable(str(problem)) from None


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


# -- Python ----------------------------------------------------------------------------------------


class PythonUnavailable(SkyError):
    """No Python can be obtained here for a host. The message has uv's last lines."""


def python_for(minor: str, facts: HostFacts) -> bytes:
    """Return a standalone Python for a host's platform, as a packed folder.

    It is cached in the user's cache folder, in the same way as `uv_for`.

    Raises:
        PythonUnavailable: uv knows none, or it cannot be downloaded here.
    """
    return _cached(f"python-{_python_name(minor, facts)}", lambda: _download_python(minor, facts))


def _download_python(minor: str, facts: HostFacts) -> bytes:
    with tempfile.TemporaryDirectory(prefix="skymagic-python-") as folder:
        command = [program(), "python", "install", "--quiet", "--no-bin", "--install-dir", folder]
        if error := _run([*command, _python_name(minor, facts)], {}, DOWNLOAD_TIMEOUT):
            raise PythonUnavailable(error)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=6) as archive:
            for path in Path(folder).glob("cpython-*"):
                if not path.is_symlink():  # uv adds links with less precise names
                    archive.add(path, path.name)
        return packed.getvalue()


def _python_name(minor: str, facts: HostFacts) -> str:
    """Return uv's name of a Python for a host's platform."""
    if facts.system == "Darwin":
        machine = "aarch64" if facts.machine == "arm64" else facts.machine
        return f"cpython-{minor}-macos-{machine}-none"
    libc = "musl" if facts.libc == "musl" else "gnu"
    return f"cpython-{minor}-{facts.system.lower()}-{facts.machine}-{libc}"


def _can_send_python(minor: str, facts: HostFacts) -> bool:
    """Return True if uv knows a Python for a host's platform. Downloads nothing."""
    before, _, after = _python_name(minor, facts).partition(f"-{minor}")
    try:
        command = [
            program(),
            "python",
            "list",
            "--only-downloads",
            "--all-platforms",
            "--all-arches",
            minor,
        ]
        listed = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60.0
        ).stdout
    except (OSError, NoWheels, subprocess.TimeoutExpired):
        return False
    names = [line.split()[0] for line in listed.splitlines() if line.strip()]
    return any(name.startswith(f"{before}-{minor}.") and name.endswith(after) for name in names)


# -- which wheels ----------------------------------------------------------------------------------


RESOLVE_SECONDS = 600.0
PLAN_SECONDS = 8.0
"""Seconds for the plan of an environment, which only informs if the host reaches an index."""
DOWNLOAD_TIMEOUT = 3600.0
_LAST_LINES = 15
_HOUSES = 2
"""Number of wheelhouses to keep: the hosts of a pool request the same one at the same time."""


class NoWheels(SkyError):
    """The notebook cannot get a host's wheels. The message has the last lines of uv."""


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
        any_build: whether hosts without GPUs may get PyTorch for CUDA.
    """

    packages: tuple[str, ...]
    minor: str
    preferences: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()
    indexes: tuple[str, ...] = field(default=(), repr=False)
    paths: tuple[str, ...] = ()
    backend: str = ""
    any_build: bool = False


_SETTINGS = r"""
uv_settings
exec "$@" $only
"""


def with_plans(hosts: Sequence[HostFacts], requirements: Requirements) -> list[HostFacts]:
    """Return the facts with the wheels that new environments of the hosts will hold.

    Hosts without a fitting Python that cannot fetch one get it from here, if uv knows one.

    Hosts of one kind share a plan. A plan that is not made within `PLAN_SECONDS` stays empty.
    """
    request = request_for(requirements)
    plans: dict[object, tuple[PlannedWheel, ...]] = {}
    sends_python: dict[object, bool] = {}
    result = []
    for facts in hosts:
        if not _needs_plan(facts, requirements):
            result.append(facts)
            continue
        host_kind = kind(facts)
        if host_kind not in plans:
            try:
                wheels = resolve(request, facts, PLAN_SECONDS)
            except NoWheels as problem:
                logger.info("no plan of the packages: system=%s %s", facts.system, problem)
                wheels = ()
            plans[host_kind] = tuple(map(_planned, wheels))
        gets_python = _lacks_python(facts, requirements)
        if gets_python:
            if host_kind not in sends_python:
                sends_python[host_kind] = _can_send_python(requirements.minor, facts)
            gets_python = sends_python[host_kind]
        result.append(replace(facts, planned=plans[host_kind], gets_python=gets_python))
    return result


def _lacks_python(facts: HostFacts, requirements: Requirements) -> bool:
    return not facts.interpreters(requirements.minor) and (
        bool(facts.unreached) or facts.without_index
    )


def _needs_plan(facts: HostFacts, requirements: Requirements) -> bool:
    # the notebook's uv does not know what an image has
    return facts.planned is None and not (facts.ready or requirements.prepared or requirements.base)


def _planned(wheel: LockedWheel) -> PlannedWheel:
    parts = urlsplit(wheel.url)
    if parts.scheme == "file":
        source = Path(url2pathname(parts.path))
        return PlannedWheel(wheel.name, wheel.version, source.stat().st_size, str(source.parent))
    server = "pypi.org" if parts.hostname == "files.pythonhosted.org" else parts.hostname
    return PlannedWheel(wheel.name, wheel.version, wheel.nbytes, server or "")


def request_for(requirements: Requirements, more: tuple[str, ...] = ()) -> WheelRequest:
    """Return the request for a new environment, with more packages."""
    return WheelRequest(
        (*requirements.packages, *more),
        requirements.minor,
        requirements.preferences,
        indexes=requirements.every_index,
        paths=tuple(path for path in requirements.uploads if path.endswith(".whl")),
        backend=requirements.backend,
        any_build=requirements.any_build,
    )


def resolve(
    request: WheelRequest, facts: HostFacts, timeout: float = RESOLVE_SECONDS
) -> tuple[LockedWheel, ...]:
    """Return the wheels of `request` and all its dependencies for a host's platform.

    Args:
        request: packages that the host needs.
        facts: the host.
        timeout: seconds for all attempts.

    Raises:
        NoWheels: a package has no wheel for that platform, or the notebook's own index cannot be
            reached.
    """
    if not uv_platform(facts):
        raise NoWheels(f"it is unknown which packages fit {facts.system} {facts.machine}")
    packages = for_gpus(request.packages, facts, request.backend)
    lists = {
        "indexes.txt": request.indexes,
        "requirements.txt": (*packages, *(Path(path).as_uri() for path in request.paths)),
        "kept.txt": request.constraints,
        "versions.txt": request.preferences,
        "builds.txt": build_constraints((*packages, *request.preferences), facts),
    }
    backend = (request.backend or "auto") if facts.accelerated else "cpu"
    attempts: list[tuple[str, tuple[str, ...]]] = [(backend, ("versions.txt",))]
    if lists["builds.txt"]:  # PyTorch's own index may be out of reach
        attempts += [("", ("versions.txt", "builds.txt")), ("", ("versions.txt",))]
    # The notebook's versions of the dependencies may contradict the requirements.
    attempts.append((backend, ()))
    deadline, error = time.monotonic() + timeout, ""
    with tempfile.TemporaryDirectory(prefix="skymagic-resolve-") as folder:
        for name, lines in lists.items():
            Path(folder, name).write_text("\n".join([*lines, ""]))
        for torch_backend, constraints in attempts:
            seconds = deadline - time.monotonic()
            if seconds <= 0:
                break
            error = _compile(Path(folder), request, facts, torch_backend, constraints, seconds)
            if not error:
                try:
                    return downloading.read_lock(Path(folder, "pylock.toml").read_text())
                except ValueError as problem:
                    raise NoWheels(str(problem)) from None
    raise NoWheels(error)


def _compile(
    folder: Path,
    request: WheelRequest,
    facts: HostFacts,
    backend: str,
    constraints: Sequence[str],
    timeout: float,
) -> str:
    """Write a lock file with uv, with the settings of the notebook's pip.

    Returns:
        What uv printed if it failed, or "".
    """
    options = ["--quiet", "--no-header", "--only-binary", ":all:", "--format", "pylock.toml"]
    options += ["--python", sys.executable, "--python-version", request.minor]
    options += ["--python-platform", uv_platform(facts), str(folder / "requirements.txt")]
    for name in ("kept.txt", *constraints):
        options += ["-c", str(folder / name)]
    env = {"UV_CUDA_DRIVER_VERSION": facts.driver} if facts.driver else {}
    if timeout <= PLAN_SECONDS:
        env["UV_HTTP_RETRIES"] = "0"
    command = [program(), "pip", "compile", *options, "-o", str(folder / "pylock.toml")]
    return _run(_with_settings(command, folder, backend), env, timeout)


def _with_settings(command: Sequence[str], folder: Path, backend: str = "") -> list[str]:
    """Return a command that runs another one with uv's settings in its environment."""
    names = {"folder": str(user_cache()), "drop": str(folder), "backend": backend}
    lines = [TELL, *assignments({**names, "silent": "", "sent_links": ""})]
    return ["/bin/sh", "-c", "\n".join(lines) + UV_SETTINGS + _SETTINGS, "sh", *command]


def program() -> str:
    """Return the path of this machine's uv.

    Raises:
        NoWheels: it has none.
    """
    if path := local_uv():
        return path
    raise NoWheels("uv is missing in the notebook's environment: run `%pip install uv`")


# -- downloads -------------------------------------------------------------------------------------


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
    return (facts.system, facts.machine, facts.libc, facts.accelerated, facts.driver)


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
    locked = resolve(request, facts)
    if needs_cuda(locked) and not (facts.accelerated or request.any_build):
        raise NoWheels(
            "torch is needed there, the host has no GPU, and the notebook's package indexes "
            "have only builds for CUDA"
        )
    # Constraints are what the host has already.
    wheels = [
        wheel for wheel in locked if f"{wheel.name}=={wheel.version}" not in request.constraints
    ]
    folder = tempfile.TemporaryDirectory(prefix="skymagic-wheels-")
    with contextlib.ExitStack() as undo:
        undo.callback(folder.cleanup)
        _download(wheels, request, Path(folder.name))
        undo.pop_all()
    return Wheelhouse(tuple(f"{wheel.name}=={wheel.version}" for wheel in wheels), folder)


def _download(wheels: Sequence[LockedWheel], request: WheelRequest, folder: Path) -> None:
    """Download wheels into a folder, in a process that has uv's settings.

    Raises:
        NoWheels: a wheel could not be downloaded.
    """
    with tempfile.TemporaryDirectory(prefix="skymagic-resolve-") as work:
        Path(work, "indexes.txt").write_text("\n".join([*request.indexes, ""]))
        lock = Path(work, "wheels.toml")
        lock.write_text(downloading.write_lock(wheels))
        command = [sys.executable, "-I", downloading.__file__, str(lock), str(folder)]
        if error := _run(_with_settings(command, Path(work)), {}, DOWNLOAD_TIMEOUT):
            raise NoWheels(error)


def _run(command: Sequence[str], more: Mapping[str, str], timeout: float) -> str:
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
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout:.0f} s"
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
