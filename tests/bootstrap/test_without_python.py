"""A host with nothing but a shell and coreutils: uv, Python and packages come from the notebook."""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.bootstrap import wheelhouse
from skymagic.bootstrap.provision import probe, setup
from skymagic.bootstrap.wheelhouse import with_plans
from skymagic.errors import HostError
from tests.lab.raising import raises
from tests.lab.shells import MINOR, SMALL, apart, cache, home
from tests.lab.wheels import make_wheel

__all__ = ["cache", "home"]
HIDE = (
    "for one in /usr/bin/python3* /usr/local/bin/python3* /usr/bin/curl; do"
    " [ ! -e $one ] || mount --bind /dev/null $one; done"
)
CUT_OFF = {
    "PATH": "/usr/bin:/bin",
    "PIP_CONFIG_FILE": "/dev/null",
    **dict.fromkeys(("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"), ""),
    **dict.fromkeys(("http_proxy", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9"),
}
"""Environment of a host that reaches no server."""


def standalone_python(folder: Path) -> Path:
    """A list of downloads for uv whose only Python is packed from the one that runs this test."""
    packed = folder / "python.tar.gz"
    library = Path(sysconfig.get_path("stdlib"))

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        left_out = ("/site-packages", "/dist-packages", "/test", "/__pycache__", "/idlelib")
        return None if any(part in member.name for part in left_out) else member

    with tarfile.open(packed, "w:gz", compresslevel=1, dereference=True) as archive:
        archive.add(
            Path(sys.base_prefix, "bin", f"python{MINOR}").resolve(), f"python/bin/python{MINOR}"
        )
        archive.add(library, f"python/lib/python{MINOR}", filter=wanted)
        for shared in Path(sys.base_prefix, "lib").glob(f"libpython{MINOR}.so*"):
            archive.add(shared, f"python/lib/{shared.name}")
    download = {
        "name": "cpython", "arch": {"family": "x86_64", "variant": None}, "os": "linux", "libc": "gnu",
        "major": sys.version_info.major, "minor": sys.version_info.minor, "patch": sys.version_info.micro,
        "prerelease": "", "url": packed.as_uri(), "variant": None, "build": "1",
        "sha256": hashlib.sha256(packed.read_bytes()).hexdigest(),
    }  # fmt: skip
    listed = folder / "downloads.json"
    listed.write_text(json.dumps({f"cpython-{MINOR}-linux-x86_64-gnu": download}))
    return listed


@pytest.mark.needs("mounts")
def test_a_host_without_python_and_internet_gets_both(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = tmp_path / "links"
    for name in ("sky-one", "pip"):
        make_wheel(links, name, "1.0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(wheelhouse, "_houses", {})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    wanted = replace(SMALL, packages=("sky-one==1.0",))
    told: list[str] = []
    with apart(home, HIDE) as host:
        host.env = CUT_OFF
        (facts,) = with_plans([probe(host, wanted)], wanted)
        assert (facts.pythons, facts.indexes, facts.uv) == ((), None, None)
        monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(tmp_path / "none.json"))
        with raises(HostError, "setup", "no Python"):
            setup(host, wanted, print, facts)
        monkeypatch.setenv("UV_PYTHON_DOWNLOADS_JSON_URL", str(standalone_python(tmp_path)))
        ready = setup(host, wanted, told.append, facts)
        out = host.run(f"{ready.python} -c 'import sys, sky_one; print(sys.version_info[:2])'").out
        assert out == f"{sys.version_info[:2]}\n"
        assert probe(host, wanted).without_index, "later packages are sent too"
        assert list(home.glob(".skymagic/incoming/*")) == []
    assert any("sent" in line for line in told)
    for house in wheelhouse._houses.values():
        house.folder.cleanup()
