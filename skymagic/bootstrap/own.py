"""The notebook's own distributions as wheels, made here and kept: what is installed from a folder, a repository or a file.

An editable distribution is what its source is: it is built by uv or pip in a copy of the source. Any other one is what is
installed, whatever has become of its source: its files are packed again. The cache is content-addressed by both.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from skymagic.bootstrap import uv, wheel
from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.origins import Origin, origin, source_digest, source_files
from skymagic.errors import SkyError
from skymagic.plan.distributions import canonical
from skymagic.plan.masking import masked, without_colours
from skymagic.wire import atomic

BUILD_TIMEOUT = 900.0
KEPT_WHEELS = 3
"""Wheels of one distribution that stay in the cache."""
_LAST_LINES = 15
_NOISE = ("note: This", "hint: See", "[notice]")
_NOT_PACKED = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json", "uv_build.json")
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
    return OwnWheel(canonical(name), found.version, str(_kept(canonical(name), digest, make)), digest, str(place))


def _written(path: Path, data: bytes) -> None:
    path.write_bytes(data)


# ------------------------------------------------------------------------------------------------- the cache


def cache_folder() -> Path:
    """Where wheels are kept, for this user."""
    return uv.cache_folder() / "wheels"


def _kept(name: str, digest: str, make: Callable[[Path], object]) -> Path:
    """The wheel in the cache; made anew where it is not there, or damaged."""
    folder = cache_folder() / name / digest
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
            raise NoWheel(f"{name}: its build left no wheel")
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
    others = [path for path in latest.parent.iterdir() if path != latest and not path.name.startswith(".")]
    for old in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT_WHEELS - 1 :]:
        shutil.rmtree(old, ignore_errors=True)


# ------------------------------------------------------------------------------------------ installed files


def _installed(found: metadata.Distribution, place: Origin) -> tuple[dict[str, bytes], str, str]:
    """(files, name of the .dist-info folder, file name of the wheel) of what is installed.

    Programs are left out: an installer makes those of entry points anew. So is what lies outside of the packages' folder.
    """
    recorded = {path.as_posix(): Path(str(found.locate_file(path))) for path in found.files or ()}
    info = next((name.partition("/")[0] for name in recorded if name.endswith(".dist-info/METADATA")), "")
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
        not outside and not name.endswith((".pyc", ".pyo")) and name not in {f"{info}/{each}" for each in _NOT_PACKED}
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
            f"{found.name} {found.version} is installed here from {folder}, where there is no project (any more)"
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
    lines = [line for line in said.splitlines() if line.strip(" │╰─>") and not line.strip().startswith(_NOISE)]
    last = "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:])
    raise NoWheel(
        f"no wheel could be built of {found.name} {found.version} in {folder}; `{_words(command, copy, folder)}` said:\n{last}"
    )


def _commands(source: Path, out: Path) -> Iterator[list[str]]:
    """Ways to build a wheel, the best first: without isolation nothing is downloaded, and what is installed here has to do."""
    uv = shutil.which("uv")
    by_uv = [uv or "uv", "build", "--quiet", "--wheel", "--python", sys.executable, "--out-dir", str(out), str(source)]
    by_pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
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


# ------------------------------------------------------------------------------------------------- platforms


def misfit(file: str, facts: Facts, minor: str) -> str:
    """Why a wheel does not run on a host, in words; "" where it does.

    Args:
        file: its name. minor: the host's version of Python, as ``"3.11"``.
    """
    pythons, abis, platforms = (file.removesuffix(".whl").rsplit("-", 3) + ["", "", ""])[1:4]
    tag = f"cp{minor.replace('.', '')}"
    stable = "abi3" in abis.split(".")
    if not stable and not {"py3", tag, f"py{tag[2:]}"} & set(pythons.split(".")):
        return f"it is built for {pythons}, and the host's environment has Python {minor}"
    if any(_runs(platform, facts) for platform in platforms.split(".")):
        return ""
    return f"it is compiled for {platforms}, and the host is {facts.system} {facts.machine}{' (musl)' if facts.libc == 'musl' else ''}"


def _runs(platform: str, facts: Facts) -> bool:
    if platform == "any":
        return True
    if facts.system == "Darwin":
        return platform.startswith("macosx") and platform.endswith((facts.machine, "universal2"))
    if facts.libc == "musl":
        return platform.startswith("musllinux") and platform.endswith(f"_{facts.machine}")
    return platform.startswith(("linux", "manylinux")) and platform.endswith(f"_{facts.machine}")
