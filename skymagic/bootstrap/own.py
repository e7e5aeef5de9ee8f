"""The notebook's own distributions as wheels, made here and kept: what is installed from a folder, a repository or a file.

An installer writes down what a distribution was installed from (``direct_url.json``, PEP 610). No index need have such a
distribution, or may have something else of its name. An editable one is what its source is: uv or pip builds it in a copy of the
source. Any other one is what is installed, whatever has become of its source: its files are packed again. The cache is
content-addressed by both.
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

# -- where they come from -------------------------------------------------------------------------------------------------


_DERIVED = re.compile(
    r"__pycache__|\.(git|hg|svn|venv|tox|nox|eggs|ipynb_checkpoints|.*_cache)|venv|build|dist|node_modules|.*\.egg-info"
)
"""Folders that hold nothing of a source: what version control, environments and builds leave."""
_COMPILED = (".pyc", ".pyo")
_CODE = (".py", ".pyi", ".pyx", ".pxd")
"""What counts also where git ignores it: generated code, such as ``_version.py``."""
GIT_TIMEOUT = 20.0


@dataclass(frozen=True)
class Origin:
    """What a distribution was installed from.

    Attributes:
        url: without passwords.
        folder: a folder of this machine; "" where it is something else.
        editable: whether the notebook imports from that folder itself.
        archive: whether it was one file.
    """

    url: str
    folder: str = ""
    editable: bool = False
    archive: bool = False

    def __str__(self) -> str:
        return self.folder or self.url


def origin(distribution: metadata.Distribution) -> Origin | None:
    """What it was installed from; None for an index, and for a file that was downloaded by its URL."""
    try:
        said = json.loads(distribution.read_text("direct_url.json") or "{}")
        url = str(said["url"])
    except (ValueError, KeyError, TypeError):
        return None
    local = urlsplit(url).scheme == "file"
    path = url2pathname(urlsplit(url).path) if local else ""
    if "dir_info" in said:
        within = str(said.get("subdirectory") or "")
        folder = str(Path(path, within)) if within else path
        return Origin(masked(url), folder, bool((said["dir_info"] or {}).get("editable")))
    if "vcs_info" in said:
        commit = (said["vcs_info"] or {}).get("commit_id", "")
        return Origin(f"{masked(url)}@{commit}"[:200])
    return Origin(masked(url), archive=True) if local else None


def source_digest(folder: Path, name: str) -> str:
    """Names the content of a source folder, and what it is built by and for."""
    whole = hashlib.sha256(f"{name} {sysconfig.get_platform()} {sys.version_info[:2]}".encode())
    for path in source_files(folder):
        status = (folder / path).stat()
        told = f"\0{path}\0{status.st_mode & 0o111 != 0}\0"
        whole.update(
            told.encode() + _digest(str(folder / path), status.st_size, status.st_mtime_ns)
        )
    return whole.hexdigest()[:24]


@lru_cache(maxsize=100_000)
def _digest(path: str, nbytes: int, changed: int) -> bytes:
    """Digest of one file, which is read again when it was changed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def source_files(folder: Path) -> list[str]:
    """The files of a source, relative to its folder, sorted: as git knows them, else all but what builds leave."""
    found = _known_to_git(folder)
    if found is None:
        found = set(_walked(folder))
    return sorted(
        path for path in found if not path.endswith(_COMPILED) and (folder / path).is_file()
    )


def _walked(folder: Path) -> Iterator[str]:
    for place, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not _DERIVED.fullmatch(name) and not Path(place, name, "pyvenv.cfg").exists()
        ]
        within = Path(place).relative_to(folder)
        yield from (str(within / name) for name in files)


def _known_to_git(folder: Path) -> set[str] | None:
    """What git has or would take, and code that it ignores beside that: a data folder that it ignores may be large. None without git."""
    listed = _git(folder, "-co")
    if not listed:
        return None
    return listed | {
        path for path in _git(folder, "-oi", "--directory") or () if path.endswith(_CODE)
    }


def _git(folder: Path, *options: str) -> set[str] | None:
    command = ["git", "-C", str(folder), "ls-files", "-z", *options, "--exclude-standard", "."]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=GIT_TIMEOUT, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return set(filter(None, os.fsdecode(done.stdout).split("\0"))) if done.returncode == 0 else None


# -- as wheels ------------------------------------------------------------------------------------------------------------


BUILD_TIMEOUT = 900.0
KEPT_WHEELS = 3
"""Wheels of one distribution that stay in the cache."""
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
    """One of the notebook's own distributions cannot be made a wheel; the message names it, and says why."""


@dataclass(frozen=True)
class OwnWheel:
    """One of the notebook's own distributions, as a wheel.

    Attributes:
        name: canonical. version: the notebook's.
        path: of the wheel, here.
        digest: of its content: another one when its source has changed.
        source: what it was installed from.
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


def own_wheel(name: str, say: Callable[[str], None] = lambda words: None) -> OwnWheel:
    """The wheel of a distribution that the notebook has from a folder, a repository or a file; made where it is not kept.

    Args:
        say: told when it is built.

    Raises:
        NoWheel: its source is gone, or does not build; with the last lines of the build.
    """
    found = metadata.distribution(name)
    place = origin(found)
    assert place is not None
    if place.editable:
        digest, make = _editable(found, place, say)
    else:
        files, info, file = _installed(found, place)
        digest = wheel.digest(files)
        make = lambda folder: _written(folder / file, wheel.pack(files, info))  # noqa: E731
    return OwnWheel(
        canonical(name),
        found.version,
        str(_kept(canonical(name), digest, make)),
        digest,
        str(place),
    )


def _written(path: Path, data: bytes) -> None:
    path.write_bytes(data)


# ------------------------------------------------------------------------------------------------- the cache


def user_cache() -> Path:
    """The user's folder of cached programs and wheels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "skymagic"


def wheel_cache() -> Path:
    """Where wheels are kept, for this user."""
    return user_cache() / "wheels"


def _kept(name: str, digest: str, make: Callable[[Path], object]) -> Path:
    """The wheel in the cache; made anew where it is not there, or damaged."""
    folder = wheel_cache() / name / digest
    atomic.private_folder(folder.parent)
    if (there := _intact(folder)) is not None:
        return there
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as text:
        made = Path(text) / "wheel"
        made.mkdir()
        make(made)
        for built in made.iterdir():
            built.chmod(0o600)  # with umask 002 the group could change what hosts install
        if _intact(made) is None:
            raise NoWheel(f"{name}: its build produced no wheel")
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one
        try:
            made.rename(folder)
        except OSError:  # another notebook was faster: theirs is as good
            if _intact(folder) is None:
                raise
    _remove_old(folder)
    found = _intact(folder)
    assert found is not None
    return found


def _intact(folder: Path) -> Path | None:
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
    others = [
        path for path in latest.parent.iterdir() if path != latest and not path.name.startswith(".")
    ]
    for old in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[
        KEPT_WHEELS - 1 :
    ]:
        shutil.rmtree(old, ignore_errors=True)


# ------------------------------------------------------------------------------------------ installed files


def _installed(found: metadata.Distribution, place: Origin) -> tuple[dict[str, bytes], str, str]:
    """(files, name of the .dist-info folder, file name of the wheel) of what is installed.

    Programs are left out: an installer makes those of entry points anew. So is what lies outside of the packages' folder.
    """
    recorded = {path.as_posix(): Path(str(found.locate_file(path))) for path in found.files or ()}
    info = next(
        (name.partition("/")[0] for name in recorded if name.endswith(".dist-info/METADATA")), ""
    )
    tags = re.findall(r"^Tag: *(\S+)-(\S+)-(\S+)$", found.read_text("WHEEL") or "", re.MULTILINE)
    if not info or not tags:
        raise NoWheel(
            f"{found.name} {found.version} is installed here from {place}, without a list of its files: install it again"
        )
    names = [name for name in recorded if _packed(name, info)]
    if lost := [name for name in names if not recorded[name].is_file()]:
        raise NoWheel(
            f"{found.name} {found.version} is installed here from {place}, and {lost[0]} of it is missing: install it again"
        )
    labels = "-".join(".".join(dict.fromkeys(tag[part] for tag in tags)) for part in range(3))
    return (
        {name: recorded[name].read_bytes() for name in sorted(names)},
        info,
        f"{info.removesuffix('.dist-info')}-{labels}.whl",
    )


def _packed(name: str, info: str) -> bool:
    outside = name.startswith(("../", "/"))
    return (
        not outside
        and not name.endswith((".pyc", ".pyo"))
        and name not in {f"{info}/{each}" for each in _NOT_PACKED}
    )


# ---------------------------------------------------------------------------------------------------- builds


def _editable(
    found: metadata.Distribution, place: Origin, say: Callable[[str], None]
) -> tuple[str, Callable[[Path], object]]:
    folder = Path(place.folder)

    def make(out: Path) -> None:
        say(f"building a wheel of {found.name} {found.version} in {folder}")
        _build(found, folder, out)

    if not any((folder / file).is_file() for file in ("pyproject.toml", "setup.py")):
        raise NoWheel(
            f"{found.name} {found.version} is installed here from {folder}, which no longer contains a project"
        )
    return source_digest(folder, found.name), make


def _build(found: metadata.Distribution, folder: Path, out: Path) -> None:
    """Build a copy of the source: a build leaves files behind, and takes what an earlier one has left for sources."""
    with tempfile.TemporaryDirectory(prefix="skymagic-build-") as text:
        copy = Path(text) / folder.name
        for path in source_files(folder):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(folder / path, copy / path)
        said = ""
        for command in _commands(copy, out):
            said = _run(command, found.version)
            if not said:
                return
    lines = [
        line
        for line in said.splitlines()
        if line.strip(" │╰─>") and not line.strip().startswith(_NOISE)
    ]
    last = "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:])
    raise NoWheel(
        f"no wheel could be built of {found.name} {found.version} in {folder}; `{_words(command, copy, folder)}` said:\n{last}"
    )


def _commands(source: Path, out: Path) -> Iterator[list[str]]:
    """Ways to build a wheel, the best first: without isolation nothing is downloaded, and what is installed here has to do."""
    uv = shutil.which("uv")
    by_uv = [
        uv or "uv",
        "build",
        "--quiet",
        "--wheel",
        "--python",
        sys.executable,
        "--out-dir",
        str(out),
        str(source),
    ]
    by_pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(out),
        str(source),
    ]
    if uv is not None:
        yield by_uv
    yield by_pip
    yield [*(by_uv if uv is not None else by_pip), "--no-build-isolation"]


def _words(command: Iterable[str], copy: Path, folder: Path) -> str:
    return " ".join(command).replace(str(copy), str(folder))


def _run(command: list[str], version: str) -> str:
    """What a command has said that failed; "" for one that did not. It ends with all that it started."""
    env = {
        **os.environ,
        "SOURCE_DATE_EPOCH": "315532800",  # the same bytes from the same source
        "SETUPTOOLS_SCM_PRETEND_VERSION": version,  # the copy has no repository
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=BUILD_TIMEOUT)
        except BaseException as problem:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(problem, subprocess.TimeoutExpired):
                return f"it took longer than {BUILD_TIMEOUT:.0f} s"
            raise
    return masked(without_colours(said)).strip() or "nothing" if process.returncode else ""
