"""uv's cache on a host is damaged: it is said, nothing half-made stays, and what is advised helps."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.bootstrap.provision import requirements_of, setup
from skymagic.errors import HostError
from skymagic.plan.image import Image
from tests.lab.shells import ShellHost, cache, home, uv, without_pip

__all__ = ["cache", "home", "uv"]


def test_a_damaged_cache(home: Path, uv: str) -> None:
    host = ShellHost(home)
    first = requirements_of(Image())
    setup(host, first, print, without_pip(host, first, uv))
    for path in (home / ".cache/uv").rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.unlink()  # the environment has links to it
            path.write_bytes(os.urandom(300))
    second = replace(first, packages=(*first.packages, "packaging>1"))
    facts = without_pip(host, second, uv)
    with pytest.raises(HostError, match=r"(?s)uv's cache on .* is damaged. Run `rm -r ~/.cache/uv` there"):
        setup(host, second, print, facts)
    assert [path.name for path in home.glob(".skymagic/env/*") if path.suffix != ".lock"] == [first_env(home)]
    shutil.rmtree(home / ".cache/uv")
    assert host.run(f"{setup(host, second, print, facts).python} -c 'import packaging, zmq'").status == 0


def first_env(home: Path) -> str:
    """The environment that was made before."""
    (made,) = (path.parent.name for path in home.glob(".skymagic/env/*/bin") if path.is_dir())
    return made
