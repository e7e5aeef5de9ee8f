"""What is cached here and executed on hosts: nobody but the user may have changed it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.bootstrap import wheelhouse
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.local_wheels import user_cache
from skymagic.bootstrap.wheelhouse import UvUnavailable, uv_for
from skymagic.wire import atomic

HOST = HostFacts(
    system="Linux",
    machine="x86_64",
    hostname="n",
    home="/h",
    folder="/h/s",
    libc="glibc 2.36",
    boot="b",
)


@pytest.fixture(autouse=True)
def _a_group_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """umask 002, as on machines where each user has a group."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[HostFacts]:
    """The hosts for which a program was looked for outside the cache."""
    asked: list[HostFacts] = []

    def local(facts: HostFacts) -> bytes:
        asked.append(facts)
        return b"\x7fELF the program"

    monkeypatch.setattr(wheelhouse, "_local_uv", local)
    return asked


def cached() -> Path:
    (found,) = user_cache().iterdir()
    return found


def test_a_cached_program_is_used_again(fetched: list[HostFacts]) -> None:
    assert gzip.decompress(uv_for(HOST)) == gzip.decompress(uv_for(HOST)) == b"\x7fELF the program"
    assert fetched == [HOST]


def test_the_cache_is_private_whatever_the_umask(fetched: list[HostFacts]) -> None:
    uv_for(HOST)
    assert stat.S_IMODE(user_cache().stat().st_mode) == 0o700
    assert stat.S_IMODE(cached().stat().st_mode) == 0o600


def test_an_older_cache_that_the_group_can_write_is_taken_back(fetched: list[HostFacts]) -> None:
    user_cache().mkdir(parents=True)
    user_cache().chmod(0o775)
    uv_for(HOST)
    assert stat.S_IMODE(user_cache().stat().st_mode) == 0o700


@pytest.mark.parametrize("change", ["content", "mode"])
def test_a_program_that_somebody_may_have_replaced_is_not_used(
    fetched: list[HostFacts], change: str
) -> None:
    uv_for(HOST)
    path = cached()
    if change == "content":
        path.write_bytes(gzip.compress(b"\x7fELF another program"))
    else:
        path.chmod(0o664)
    assert gzip.decompress(uv_for(HOST)) == b"\x7fELF the program"
    assert fetched == [HOST, HOST]


@pytest.mark.needs("root")
def test_a_program_of_another_user_is_not_used(fetched: list[HostFacts]) -> None:
    uv_for(HOST)
    os.chown(cached(), 65534, 65534)
    uv_for(HOST)
    assert fetched == [HOST, HOST]


def test_a_file_under_the_name_of_earlier_versions_is_not_used(fetched: list[HostFacts]) -> None:
    user_cache().mkdir(parents=True)
    (user_cache() / f"uv-{HOST.system}-{HOST.machine}.gz").write_bytes(
        gzip.compress(b"\x7fELF another program")
    )
    assert gzip.decompress(uv_for(HOST)) == b"\x7fELF the program"


@pytest.mark.needs("root")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "skymagic"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    with pytest.raises(PermissionError, match=str(folder)):
        atomic.private_folder(folder / "pools")


def test_folders_above_are_left_alone(tmp_path: Path) -> None:
    """Also a checkout of skymagic that contains somebody's cache."""
    above = tmp_path / "skymagic" / "cache"
    above.mkdir(parents=True)
    for folder in (above, above.parent):
        folder.chmod(0o775)
    atomic.private_folder(above / "skymagic" / "aws")
    modes = [
        stat.S_IMODE(folder.stat().st_mode) for folder in (above.parent, above, above / "skymagic")
    ]
    assert modes == [0o775, 0o775, 0o700]


@pytest.mark.parametrize("honest", [True, False])
def test_a_downloaded_wheel_is_compared_with_its_record(tmp_path: Path, honest: bool) -> None:
    program = b"\x7fELF the program"
    digest = base64.urlsafe_b64encode(hashlib.sha256(program).digest()).rstrip(b"=").decode()
    path = tmp_path / "uv-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("uv-1.0.data/scripts/uv", program if honest else b"\x7fELF another program")
        wheel.writestr(
            "uv-1.0.dist-info/RECORD", f"uv-1.0.data/scripts/uv,sha256={digest},{len(program)}\n"
        )
    if honest:
        assert wheelhouse._uv_in(path) == program
    else:
        with pytest.raises(UvUnavailable, match="damaged"):
            wheelhouse._uv_in(path)
