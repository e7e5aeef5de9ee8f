"""Hosts for tests without SSH: real shells with a HOME of their own; and one environment that all tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from skymagic.image import Image
from skymagic.setup import setup


@dataclass(frozen=True)
class Done:
    """How a script ended."""

    status: int
    out: str
    err: str


@dataclass
class ShellHost:
    """This machine as a host: what a connection over SSH does, with ``/bin/sh`` in a session of its own."""

    home: Path
    label: str = "box"
    env: Mapping[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()
    """Command that /bin/sh is run with: unshare, for a machine that is different."""
    runs: int = 0

    def environment(self) -> dict[str, str]:
        """What sshd gives: little, and pip's own configuration, which HOME would hide."""
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "SKYMAGIC_TEST_RUN")}
        return {**kept, **pip_settings(), "HOME": str(self.home), **self.env}

    def start(self, script: str) -> subprocess.Popen[str]:
        """`script` running in a session of its own; who calls reads its output."""
        child = subprocess.Popen(
            [*self.wrapper, "/bin/sh", "-s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=self.environment(), cwd="/", start_new_session=True,
        )  # fmt: skip
        assert child.stdin is not None
        child.stdin.write(script)
        child.stdin.close()
        return child

    def run(
        self, script: str, *, lines: Callable[[str], None] | None = None, timeout: float | None = None
    ) -> Done:
        """Run it to its end."""
        self.runs += 1
        errors: list[str] = []
        with self.start(script) as child:
            stdout, stderr = child.stdout, child.stderr
            assert stdout is not None
            assert stderr is not None
            reader = threading.Thread(target=lambda: errors.append(stderr.read()))
            reader.start()
            out = []
            for line in stdout:
                out.append(line)
                if lines is not None:
                    lines(line.rstrip("\n"))
            reader.join()
        return Done(child.returncode, "".join(out), "".join(errors))

    def upload(self, path: str, pieces: Iterable[memoryview], nbytes: int) -> None:
        """Write the file."""
        with open(path, "wb") as file:
            for piece in pieces:
                file.write(piece)
        assert Path(path).stat().st_size == nbytes


def pip_settings() -> dict[str, str]:
    """pip's configuration of this user, for hosts whose HOME is another folder."""
    settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    config = Path.home() / ".config/pip/pip.conf"
    return {"PIP_CONFIG_FILE": str(config), **settings} if config.is_file() else settings


def make_home(home: Path, shared: Path) -> Path:
    """A HOME that is ready: its environments and skymagic's code are those of `shared`, a HOME that was set up."""
    own = home / ".skymagic"
    own.mkdir(mode=0o700, parents=True)
    for part in ("env", "code"):
        (own / part).symlink_to(shared / ".skymagic" / part)
    return home


@pytest.fixture(scope="session")
def bootstrapped_home(pytestconfig: pytest.Config) -> Path:
    """A HOME where an image without packages is ready; pytest's cache keeps it, so that it is made once."""
    assert pytestconfig.cache is not None
    home = pytestconfig.cache.mkdir("nodes")
    setup(ShellHost(home), Image(), print)
    day = time.time() - 86400
    for old in (home / ".skymagic/code").iterdir():
        if old.stat().st_mtime < day and old.stat().st_ctime < day:
            shutil.rmtree(old)
    return home
