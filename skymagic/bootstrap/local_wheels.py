"""Build wheels of distributions that the notebook did not install from a package index.

They were installed from a folder, a repository or a file, as ``direct_url.json`` records (PEP 610).
A package index may not have them, or may have another project under the same name.

The wheel of an editable distribution is built by uv from a copy of its current source. Any
other distribution is packed from its installed files, even if its source has changed since. Wheels
are cached by a digest of these files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from skymagic.bootstrap import wheel
from skymagic.errors import SkyError
from skymagic.plan.distributions import canonical
from skymagic.plan.masking import masked, without_colours
from skymagic.wire import atomic

# -- origins and sources ---------------------------------------------------------------------------


_DERIVED = re.compile(
    r"__pycache__|\.(git|hg|svn|venv|tox|nox|eggs|ipynb_checkpoints|.*_cache)|"
    r"venv|build|dist|node_modules|.*\.egg-info"
)
"""Folders that are not part of a source: leftovers of version control, environments and builds."""
_COMPILED = (".pyc", ".pyo")
_CODE = (".py", ".pyi", ".pyx", ".pxd")
"""Suffixes of files that are copied even if git ignores them: ``_version.py`` is generated."""
GIT_TIMEOUT = 20.0


@dataclass(frozen=True)
class Origin:
    """Source that a distribution was installed from.

    Attributes:
        url: URL without passwords.
        folder: a folder of this machine; "" if it is something else.
        editable: whether the notebook imports from that folder itself.
        archive: whether it was a single file.
    """

    url: str
    folder: str = ""
    editable: bool = False
    archive: bool = False

    def __str__(self) -> str:
        return self.folder or self.url


def origin(distribution: metadata.Distribution) -> Origin | None:
    """Return where a distribution was installed from.

    Returns:
        The origin, or None if it came from an index or from a file downloaded by URL.
    """
    try:
        direct_url = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = str(direct_url["url"])
    except (ValueError, KeyError, TypeError):
        return None
    local = urlsplit(url).scheme == "file"
    path = url2pathname(urlsplit(url).path) if local else ""
    if "dir_info" in direct_url:
        subdirectory = str(direct_url.get("subdirectory") or "")
        folder = str(Path(path, subdirectory)) if subdirectory else path
        return Origin(masked(url), folder, bool((direct_url["dir_info"] or {}).get("editable")))
    if "vcs_info" in direct_url:
        commit = (direct_url["vcs_info"] or {}).get("commit_id", "")
        return Origin(f"{masked(url)}@{commit}"[:200])
    return Origin(masked(url), archive=True) if local else None


def source_digest(folder: Path, name: str) -> str:
    """Return a digest of a source folder's content, the Python version and the platform."""
    digest = hashlib.sha256(f"{name} {sysconfig.get_platform()} {sys.version_info[:2]}".encode())
    for path in source_files(folder):
        status = (folder / path).stat()
        header = f"\0{path}\0{status.st_mode & 0o111 != 0}\0"
        digest.update(
            header.encode() + _digest(str(folder / path), status.st_size, status.st_mtime_ns)
        )
    return digest.hexdigest()[:24]


@lru_cache(maxsize=100_000)
def _digest(path: str, nbytes: int, changed: int) -> bytes:
    """Return the digest of one file.

    It is cached until the file's size or modification time changes.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def source_files(folder: Path) -> list[str]:
    """Return the sorted files of a source, relative to its folder.

    These are the files that git knows, or without git, everything but the leftovers of builds.
    """
    names = _files_in_git(folder)
    if names is None:
        names = set(_walk_sources(folder))
    return sorted(
        path for path in names if not path.endswith(_COMPILED) and (folder / path).is_file()
    )


def _walk_sources(folder: Path) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not _DERIVED.fullmatch(name) and not Path(parent, name, "pyvenv.cfg").exists()
        ]
        relative = Path(parent).relative_to(folder)
        yield from (str(relative / name) for name in files)


def _files_in_git(folder: Path) -> set[str] | None:
    """Return the files that git tracks or would add, and code files that it ignores.

    Anything else that git ignores is left out: an ignored data folder may be large.

    Returns:
        Relative paths, or None if git does not know the folder.
    """
    listed = _git(folder, "-co")
    if not listed:
        return None
    return listed | {
        path for path in _git(folder, "-oi", "--directory") or () if path.endswith(_CODE)
    }


def _git(folder: Path, *options: str) -> set[str] | None:
    command = ["git", "-C", str(folder), "ls-files", "-z", *options, "--exclude-standard", "."]
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=GIT_TIMEOUT, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        set(filter(None, os.fsdecode(result.stdout).split("\0")))
        if result.returncode == 0
        else None
    )


# -- wheels ----------------------------------------------------------------------------------------


BUILD_TIMEOUT = 900.0
KEPT_WHEELS = 3
"""Number of wheels per distribution that stay in the cache."""
_LAST_LINES = 15
_NOISE = ("note: This", "hint: See", "[notice]")
_NOT_PACKED = (
    "RECORD",
    "INSTALLER",
    "REQUESTED",
    "direct_url.json",
    "uv_cache.json",
    "uv_build.json",
)
"""Files of a ``.dist-info`` folder that an installer writes."""


class NoWheel(SkyError):
    """Error while making a wheel of a distribution. It names the distribution and the reason."""


@dataclass(frozen=True)
class LocalWheel:
    """Wheel of a distribution that was installed from a folder, a repository or a file.

    Attributes:
        name: canonical name.
        version: the notebook's version.
        path: path of the wheel on this machine.
        digest: digest of its content, which changes with its source.
        source: folder, repository or file that it was installed from.
    """

    name: str
    version: str
    path: str
    digest: str
    source: str

    @property
    def file(self) -> str:
        """The wheel's file name."""
        return Path(self.path).name


def local_wheel(name: str, say: Callable[[str], None] = lambda message: None) -> LocalWheel:
    """Return the wheel of a distribution that was installed from a folder, a repository or a file.

    The wheel is made unless the cache has it.

    Args:
        name: name of the distribution.
        say: called with a message when a wheel is built.

    Raises:
        NoWheel: the source is missing or does not build. The message has the last lines of the
            build.
    """
    distribution = metadata.distribution(name)
    source = origin(distribution)
    assert source is not None
    if source.editable:
        digest, make = _editable_build(distribution, source, say)
    else:
        files, info, file = _collect_installed_files(distribution, source)
        digest = wheel.digest(files)
        make = lambda folder: _write_wheel(folder / file, wheel.pack(files, info))  # noqa: E731
    return LocalWheel(
        canonical(name),
        distribution.version,
        str(_cached_wheel(canonical(name), digest, make)),
        digest,
        str(source),
    )


def _write_wheel(path: Path, data: bytes) -> None:
    path.write_bytes(data)


# -- the cache -------------------------------------------------------------------------------------


def user_cache() -> Path:
    """Return the user's folder of cached programs and wheels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skymagic"


def wheel_cache() -> Path:
    """Return the user's folder of cached wheels."""
    return user_cache() / "wheels"


def _cached_wheel(name: str, digest: str, make: Callable[[Path], object]) -> Path:
    """Return the wheel from the cache. Make it if it is missing or damaged."""
    folder = wheel_cache() / name / digest
    atomic.private_folder(folder.parent)
    if (cached := _intact_wheel(folder)) is not None:
        return cached
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as temporary:
        new_folder = Path(temporary) / "wheel"
        new_folder.mkdir()
        make(new_folder)
        for built in new_folder.iterdir():
            built.chmod(0o600)  # with umask 002 the group could change what hosts install
        if _intact_wheel(new_folder) is None:
            raise NoWheel(f"{name}: its build produced no wheel")
        shutil.rmtree(folder, ignore_errors=True)  # remove a damaged one
        try:
            new_folder.rename(folder)
        except OSError:  # another notebook has built the same wheel first
            if _intact_wheel(folder) is None:
                raise
    _remove_old(folder)
    path = _intact_wheel(folder)
    assert path is not None
    return path


def _intact_wheel(folder: Path) -> Path | None:
    for path in filter(atomic.is_private, folder.glob("*.whl")):
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is None:
                    os.utime(folder)
                    return path
        except (OSError, zipfile.BadZipFile):
            continue
    return None


def _remove_old(latest: Path) -> None:
    old_folders = [
        path for path in latest.parent.iterdir() if path != latest and not path.name.startswith(".")
    ]
    for old in sorted(old_folders, key=lambda path: path.stat().st_mtime, reverse=True)[
        KEPT_WHEELS - 1 :
    ]:
        shutil.rmtree(old, ignore_errors=True)


# -- installed files -------------------------------------------------------------------------------


def _collect_installed_files(
    distribution: metadata.Distribution, origin: Origin
) -> tuple[dict[str, bytes], str, str]:
    """Collect the installed files of a distribution for a wheel.

    Leaves out programs, which installers generate from entry points, and files outside of the
    packages' folder.

    Returns:
        The content by file name, the name of the .dist-info folder, and the wheel's file name.
    """
    recorded = {
        path.as_posix(): Path(str(distribution.locate_file(path)))
        for path in distribution.files or ()
    }
    info = next(
        (name.partition("/")[0] for name in recorded if name.endswith(".dist-info/METADATA")), ""
    )
    tags = re.findall(
        r"^Tag: *(\S+)-(\S+)-(\S+)$", distribution.read_text("WHEEL") or "", re.MULTILINE
    )
    if not info or not tags:
        raise NoWheel(
            f"{distribution.name} {distribution.version} is installed here from {origin}, without "
            "a list of its files: install it again"
        )
    names = [name for name in recorded if _belongs_in_wheel(name, info)]
    if missing := [name for name in names if not recorded[name].is_file()]:
        raise NoWheel(
            f"{distribution.name} {distribution.version} is installed here from {origin}, and "
            f"its file {missing[0]} is missing: install it again"
        )
    labels = "-".join(".".join(dict.fromkeys(tag[part] for tag in tags)) for part in range(3))
    return (
        {name: recorded[name].read_bytes() for name in sorted(names)},
        info,
        f"{info.removesuffix('.dist-info')}-{labels}.whl",
    )


def _belongs_in_wheel(name: str, info: str) -> bool:
    outside = name.startswith(("../", "/"))
    return (
        not outside
        and not name.endswith((".pyc", ".pyo"))
        and name not in {f"{info}/{name}" for name in _NOT_PACKED}
    )


# -- builds ----------------------------------------------------------------------------------------


def _editable_build(
    distribution: metadata.Distribution, origin: Origin, say: Callable[[str], None]
) -> tuple[str, Callable[[Path], object]]:
    folder = Path(origin.folder)

    def make(out: Path) -> None:
        say(f"building a wheel of {distribution.name} {distribution.version} in {folder}")
        _build(distribution, folder, out)

    if not any((folder / file).is_file() for file in ("pyproject.toml", "setup.py")):
        raise NoWheel(
            f"{distribution.name} {distribution.version} is installed here from {folder}, which "
            "no longer contains a project"
        )
    return source_digest(folder, distribution.name), make


def _build(distribution: metadata.Distribution, folder: Path, out: Path) -> None:
    """Build a wheel in a copy of the source.

    Builds leave files behind, and the leftovers of an earlier build would be packed as sources.
    """
    with tempfile.TemporaryDirectory(prefix="skymagic-build-") as temporary:
        copy = Path(temporary) / folder.name
        for path in source_files(folder):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / path, copy / path)
        output = ""
        for command in _commands(copy, out):
            output = _run(command, distribution.version)
            if not output:
                return
    lines = [
        line
        for line in output.splitlines()
        if line.strip(" │╰─>") and not line.strip().startswith(_NOISE)
    ]
    last = "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:])
    raise NoWheel(
        f"no wheel could be built of {distribution.name} {distribution.version} in {folder}; "
        f"`{_command_line(command, copy, folder)}` said:\n{last}"
    )


def local_uv() -> str:
    """Return the path of uv in the notebook's environment, or elsewhere on this machine, or ""."""
    try:
        from uv import find_uv_bin

        return str(find_uv_bin())
    except (ImportError, FileNotFoundError):
        return shutil.which("uv") or ""


def _commands(source: Path, out: Path) -> Iterator[list[str]]:
    """Yield commands that build a wheel, best first.

    The last one builds without isolation: it downloads nothing, and needs build tools that are
    installed here.
    """
    command = [local_uv() or "uv", "build", "--wheel", "--python", sys.executable]
    command += ["--out-dir", str(out), str(source)]
    yield command
    yield [*command, "--no-build-isolation"]


def _command_line(command: Iterable[str], copy: Path, folder: Path) -> str:
    return " ".join(command).replace(str(copy), str(folder))


def _run(command: list[str], version: str) -> str:
    """Run a command, and kill everything that it started if it does not end in time.

    Returns:
        The output of a command that failed, or "" on success.
    """
    env = {
        **os.environ,
        # The same source gives the same bytes.
        "SOURCE_DATE_EPOCH": "315532800",
        # The copy has no repository to take the version from.
        "SETUPTOOLS_SCM_PRETEND_VERSION": version,
    }
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=BUILD_TIMEOUT)
        except BaseException as problem:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(problem, subprocess.TimeoutExpired):
                return f"it took longer than {BUILD_TIMEOUT:.0f} s"
            raise
    return masked(without_colours(output)).strip() or "nothing" if process.returncode else ""
