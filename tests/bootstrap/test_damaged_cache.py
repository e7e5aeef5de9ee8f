"""A cache on a host is damaged: it is said, and nothing is installed from it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from skymagic.bootstrap.provision import setup
from skymagic.bootstrap.requirements import requirements_of
from skymagic.errors import HostError
from skymagic.plan.image import Image
from tests.lab.raising import raises
from tests.lab.shells import ShellHost, cache, home, used_home, uv, with_uv

__all__ = ["cache", "home", "used_home", "uv"]


def test_a_damaged_cache(used_home: Path, uv: str) -> None:
    host = ShellHost(used_home)
    first = requirements_of(Image())
    setup(host, first, print, with_uv(host, first, uv))
    for path in (used_home / ".cache/uv").rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.unlink()  # the environment has links to it
            path.write_bytes(os.urandom(300))
    second = replace(first, packages=(*first.packages, "packaging>1"))
    facts = with_uv(host, second, uv)
    told: list[str] = []
    ready = setup(host, second, told.append, facts)
    assert any("cache" in message for message in told)
    assert host.run(f"{ready.python} -c 'import packaging, zmq'").status == 0
    # what has failed in both ways is said, with what to do, and leaves nothing
    third = replace(
        first,
        packages=("packaging>2",),
        commands=("echo 'Failed to deserialize cache entry'; false",),
    )
    with raises(HostError, "setup", r"uv's cache .*`rm -r"):
        setup(host, third, print, replace(facts, env="third"))
    assert not (used_home / ".skymagic/env/third").exists()
