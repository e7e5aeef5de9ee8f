"""Hosts for tests without SSH: real shells with a HOME of their own; and one environment that all tests share."""

from __future__ import annotations

import atexit
import contextlib
import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from skymagic.bootstrap import wheel
from skymagic.bootstrap.facts import HostFacts, Python
from skymagic.bootstrap.provision import probe, setup
from skymagic.bootstrap.remote import RemoteShell
from skymagic.bootstrap.requirements import Requirements, requirements_of
from skymagic.bootstrap.wheelhouse import uv_for
from skymagic.plan.image import Image
from skymagic.ssh.host import ScriptResult
from tests.conftest import MARK
from tests.lab.hosts import share_code

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"
PATH = os.pathsep.join(
    [str(Path(getattr(sys, "_base_executable", sys.executable)).parent), os.defpath]
)
"""The interpreter that made this one's environment, and the system's programs; a version manager's shims, which are scripts, cost a probe 0.3 s."""
SMALL = Requirements(python=MINOR, minor=MINOR, code=wheel.running_wheel()[0])
"""An environment without packages."""


@dataclass
class ShellHost:
    """This machine as a host: what a connection over SSH does, with ``/bin/sh`` in a session of its own."""

    home: Path
    label: str = "box"
    env: Mapping[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    """Command that /bin/sh is run with: unshare, for a machine that is different."""
    runs: int = 0
    child: subprocess.Popen[str] | None = None
    """The shell that ran last; it leads its session."""

    def environment(self) -> dict[str, str]:
        """What sshd gives: little, and pip's own configuration, which HOME would hide."""
        marked = {MARK: os.environ[MARK]} if MARK in os.environ else {}
        return {"PATH": PATH, **marked, **pip_settings(), "HOME": str(self.home), **self.env}

    def run(
        self,
        script: str,
        *,
        lines: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> ScriptResult:
        """Run it to its end. When `lines` raises, nobody reads what it prints any more, as when a connection is lost."""
        self.runs += 1
        with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
            [*self.wrapper, "/bin/sh", "-s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, env=self.environment(), cwd="/", start_new_session=True,
        ) as child:  # fmt: skip
            self.child = child
            assert child.stdin is not None
            assert child.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(script)
                child.stdin.close()
            out = []
            for line in child.stdout:
                out.append(line)
                if lines is not None:
                    lines(line.rstrip("\n"))
            status = child.wait()
            errors.seek(0)
            return ScriptResult(status, "".join(out), errors.read())

    def upload(self, path: str, chunks: Iterable[memoryview], nbytes: int) -> None:
        """Write the file."""
        command = [
            *self.wrapper,
            "/bin/sh",
            "-c",
            'umask 077; mkdir -p "$(dirname "$1")" && cat >"$1"',
            "sh",
            path,
        ]
        data = b"".join(chunks)
        assert len(data) == nbytes
        subprocess.run(command, input=data, env=self.environment(), check=True, capture_output=True)


def pip_settings() -> dict[str, str]:
    """pip's configuration of this user, for hosts whose HOME is another folder.

    Where tests run, several indexes may have a part of the packages each, and none of them is anybody else's.
    """
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    config = Path.home() / ".config/pip/pip.conf"
    return {"PIP_CONFIG_FILE": str(config), **settings} if config.is_file() else settings


def make_home(home: Path, shared: Path) -> Path:
    """A HOME that is ready: its environments and skymagic's code are those of `shared`, a HOME that was set up."""
    own = home / ".skymagic"
    own.mkdir(mode=0o700, parents=True)
    for part in ("env", "code"):
        (own / part).symlink_to(shared / ".skymagic" / part)
    return home


def kept_folder(config: pytest.Config, name: str) -> Path:
    """A folder that pytest's cache keeps for the next run; without the cache one of this process."""
    cache: pytest.Cache | None = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if cache is not None:
        return cache.mkdir(name)
    if name not in _folders:
        _folders[name] = Path(tempfile.mkdtemp(prefix="tests-"))
        atexit.register(shutil.rmtree, _folders[name], ignore_errors=True)
    return _folders[name]


_folders: dict[str, Path] = {}


@pytest.fixture(scope="session")
def bootstrapped_home(pytestconfig: pytest.Config) -> Path:
    """A HOME where an image without packages is ready; pytest's cache keeps it, so that it is made once."""
    home = kept_folder(pytestconfig, "nodes")
    setup(ShellHost(home), requirements_of(Image()), print)
    day = time.time() - 86400
    for old in (home / ".skymagic/code").iterdir():
        if old.stat().st_mtime < day and old.stat().st_ctime < day:
            shutil.rmtree(old)
    return home


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


@pytest.fixture
def used_home(home: Path) -> Path:
    """One that has skymagic's code, once any has."""
    share_code(home)
    return home


@pytest.fixture
def cache(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> Path:
    """uv is downloaded once, and not into the user's own cache."""
    folder = kept_folder(pytestconfig, "uv")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def uv(cache: Path, home: Path) -> str:
    """A uv that is there already."""
    program = cache / "uv"
    if not program.exists():
        fresh = cache / f"uv.{os.getpid()}"
        fresh.write_bytes(gzip.decompress(uv_for(probe(ShellHost(home), SMALL))))
        fresh.chmod(0o755)
        fresh.rename(program)
    return str(program)


def with_uv(host: RemoteShell, requirements: Requirements, uv: str | None) -> HostFacts:
    """The host as if it had this Python alone, and this uv."""
    return replace(probe(host, requirements), pythons=(Python(MINOR, sys.executable),), uv=uv)


@contextmanager
def apart(home: Path, *commands: str) -> Iterator[ShellHost]:
    """A host whose mounts are its own, after these commands; mark the test ``needs("mounts")``."""
    keeper = subprocess.Popen(
        ["unshare", "-Urm", "/bin/sh", "-ec", "\n".join([*commands, "echo up", "exec sleep 1000"])],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    try:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "up\n"
        enter = ("nsenter", "-t", str(keeper.pid), "-U", "-m", "--preserve-credentials")
        yield ShellHost(home, wrapper=enter)
    finally:
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()  # type: ignore[union-attr]
