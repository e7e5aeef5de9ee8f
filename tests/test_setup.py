"""Hosts are made ready once, reused at once, and say in words why they cannot be."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skymagic.errors import ProvisionError
from skymagic.image import Image
from skymagic.setup import setup
from tests.nodes import ShellHost, bootstrapped_home, make_home

__all__ = ["bootstrapped_home"]

PREPARED = Image(python=sys.executable)


def said(host: ShellHost, image: Image = PREPARED) -> str:
    with pytest.raises(ProvisionError) as refused:
        setup(host, image, print)
    return str(refused.value)


def through(shell: str, host: ShellHost, command: str) -> str:
    done = subprocess.run(
        [shell, "-c", command], capture_output=True, text=True, check=True, env=host.environment(), cwd="/"
    )
    return done.stdout


# ------------------------------------------------------------------------------------ a whole environment


def test_a_ready_host_costs_one_round_trip(bootstrapped_home: Path, tmp_path: Path) -> None:
    host = ShellHost(make_home(tmp_path / "home", bootstrapped_home))
    told: list[str] = []
    ready = setup(host, Image(), told.append)
    assert host.runs == 1
    assert told == []
    assert ready.python.startswith(str(tmp_path))
    code = "import sys, ipyparallel, xxhash, skymagic; print(sys.prefix, skymagic.__file__, skymagic.__version__)"
    out = through("/bin/sh", host, ready.command("timeit", "-n1", "-r1", code))
    prefix, file, version = out.split()[:3]
    assert prefix == str(Path(ready.python).parent.parent)
    assert file == f"{ready.code}/skymagic/__init__.py"
    assert version


# ------------------------------------------------------------------------------------ an interpreter as it is


def test_an_interpreter_that_is_there_is_used_as_it_is(tmp_path: Path) -> None:
    home = tmp_path / "my home's"
    home.mkdir()
    host = ShellHost(home)
    first = setup(host, PREPARED, print)
    assert first.python == sys.executable
    assert not (home / ".skymagic/env").exists() or not list((home / ".skymagic/env").iterdir())
    assert list((home / ".skymagic/incoming").iterdir()) == []
    runs = host.runs
    assert setup(host, PREPARED, print).code == first.code
    assert host.runs == runs + 1


@pytest.mark.parametrize("shell", ["sh", "dash", "bash", "zsh", "fish", "csh", "tcsh", "ksh"])
def test_commands_work_in_every_login_shell(shell: str, tmp_path: Path) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not on this machine")
    home = tmp_path / 'it\'s $HOME "of" `mine`! \\ 50%'
    home.mkdir()
    host = ShellHost(home)
    ready = setup(host, PREPARED, print)
    texts = ["it's", "a\nb", "$HOME", "!x", "\\", "\\n", '"', "`id`", "", "ü ~*?[", "%s", "{a,b}", "-x"]
    code = f"import sys, json, skymagic; print(json.dumps([skymagic.__file__, {texts!r}]))"
    out = through(found, host, ready.command("timeit", "-n1", "-r1", code))
    file, back = json.loads(out.splitlines()[0])
    assert file == f"{ready.code}/skymagic/__init__.py"
    assert back == texts
