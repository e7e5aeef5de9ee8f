"""Packages that cannot be installed, and what is said of them: nothing half-made stays, and what is advised helps."""

from __future__ import annotations

import os
import tracemalloc
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.bootstrap.messages import InstallFailure
from skymagic.bootstrap.provision import setup
from skymagic.bootstrap.remote import chunks
from skymagic.bootstrap.requirements import Requirements, requirements_of
from skymagic.errors import HostError
from skymagic.plan.image import Image
from tests.bootstrap.test_bootstrap import FACTS
from tests.bootstrap.test_packages import versions, wanting
from tests.lab.raising import raises
from tests.lab.shells import SMALL, ShellHost, apart, cache, home, used_home, uv, with_uv
from tests.lab.wheels import installed, make_wheel, served

__all__ = ["cache", "home", "used_home", "uv"]


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """What the host's index has."""
    folder = tmp_path / "index"
    folder.mkdir()
    return folder


@pytest.fixture
def host(used_home: Path, index: Path) -> Iterator[ShellHost]:
    """A machine with a package index of its own."""
    with served(index) as url:
        env = {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": url,
            "PIP_FIND_LINKS": "",
            "PIP_EXTRA_INDEX_URL": "",
        }
        yield ShellHost(used_home, env=env)


def refused(host: ShellHost, wanted: Requirements, uv: str) -> str:
    """What is said of an environment that cannot be made, of which nothing stays."""
    with pytest.raises(HostError) as raised:
        setup(host, wanted, print, with_uv(host, wanted, uv))
    assert [path for path in host.home.glob(".skymagic/env/*") if path.suffix != ".lock"] == []
    assert [*host.home.glob(".skymagic/incoming/*")] == []
    return str(raised.value)


def test_a_plugin_and_the_notebook_contradict_each_other(
    host: ShellHost, index: Path, uv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names both, with the versions that they require."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    installed(tmp_path / "site", "sky-base", "2.0")
    for version in ("1.0", "2.0"):
        make_wheel(index, "sky-base", version)
    make_wheel(index, "sky-plugin", "1.0", ["sky-base<2"])
    wanted = wanting("sky-plugin==1.0", "sky-base")
    said = " ".join(refused(host, wanted, uv).replace("|", "").split())
    assert "sky-plugin" in said
    assert "sky-base==2.0" in said or "sky-base 2.0" in said
    assert "sky-base<2" in said


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "Because tiny was not found in the package registry and you require tiny, they are unsatisfiable",
            "pip_index",
        ),
        (
            "Because there is no version of tiny==9 and you require tiny==9, they are unsatisfiable",
            "pip_index",
        ),
        (
            "Because only tiny<=2 is available and you require tiny>2, they are unsatisfiable",
            "pip_index",
        ),
        (
            "conflicting dependencies. Additionally, some of them have no matching distribution",
            "contradict",
        ),
        (
            "Because a==1 depends on b<2 and you require a==1 and b==2, they are unsatisfiable",
            "contradict",
        ),
    ],
)
def test_missing_settings_are_no_conflict(line: str, words: str) -> None:
    failure = InstallFailure(
        "choosing", "uv pip compile", 1, ("No solution found when resolving dependencies:", line)
    )
    assert words in failure.remedy(FACTS)


def test_yanked_version_of_the_notebook_is_installed(host: ShellHost, index: Path, uv: str) -> None:
    """A yanked version that the notebook has may be used (PEP 592); an unpinned request gets another one."""
    for name in ("sky-yanked", "sky-other"):
        for version in ("1.0", "2.0"):
            make_wheel(index, name, version)
        (index / f"{name.replace('-', '_')}-2.0-py3-none-any.whl.yanked").touch()
    wanted = replace(SMALL, packages=("sky-yanked==2.0", "sky-other"))
    ready = setup(host, wanted, print, with_uv(host, wanted, uv))
    assert versions(host, ready, "sky-yanked", "sky-other") == {
        "sky-yanked": "2.0",
        "sky-other": "1.0",
    }


def test_a_damaged_wheel(host: ShellHost, index: Path, uv: str) -> None:
    """The error names it, and the next start with an intact wheel works."""
    path = make_wheel(index, "sky-damaged", "1.0")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("sky_damaged.bin", data := os.urandom(100_000))
    whole = path.read_bytes()
    place = whole.index(data[500:600])
    path.write_bytes(whole[:place] + bytes(100) + whole[place + 100 :])
    wanted = replace(SMALL, packages=("sky-damaged==1.0",))
    assert "sky_damaged" in refused(host, wanted, uv).replace("-", "_")
    path.write_bytes(whole)
    ready = setup(host, wanted, print, with_uv(host, wanted, uv))
    assert versions(host, ready, "sky-damaged") == {"sky-damaged": "1.0"}


def test_a_wheel_of_another_platform_is_refused_by_name(
    host: ShellHost, index: Path, uv: str, tmp_path: Path
) -> None:
    path = make_wheel(tmp_path, "sky-compiled", "1.0")
    other = path.rename(tmp_path / "sky_compiled-1.0-cp39-cp39-linux_riscv64.whl")
    wanted = replace(SMALL, files=((str(other), "digest"),))
    with raises(HostError, "setup-wheel", r"(?s)sky-compiled==1.0 .*--pip"):
        setup(host, wanted, print, with_uv(host, wanted, uv))


@pytest.mark.needs("mounts")
def test_disk_full_during_a_download(home: Path, index: Path, uv: str) -> None:
    path = make_wheel(index, "sky-large", "1.0")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("sky_large.bin", bytes(150_000_000))
    wanted = replace(SMALL, packages=("sky-large==1.0",))
    with apart(home, 'mount -t tmpfs -o size=80m none "$HOME"') as host:
        host.env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)}
        facts = replace(with_uv(host, wanted, uv), disk_kb=None)
        with raises(HostError, "setup", r"\bdisk\b"):
            setup(host, wanted, print, facts)
        assert host.run("cd; ls .skymagic/incoming; ls .skymagic/env | grep -v lock").out == ""
        host.run("rm -rf ~/.cache")
        assert int(host.run("df -k ~ | awk 'END { print $3 }'").out) < 20_000


def test_a_wheel_of_a_gigabyte_is_not_read_into_memory(tmp_path: Path) -> None:
    with (tmp_path / "sky_large-1.0-py3-none-any.whl").open("wb") as file:
        file.truncate(1 << 28)  # a quarter, for the sake of time
    tracemalloc.start()
    try:
        requirements_of(Image(pip=(file.name,)))
        assert sum(map(len, chunks(Path(file.name)))) == 1 << 28
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
