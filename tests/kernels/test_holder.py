"""What a job's holder starts outlives the step that asked for it, also where another user has taken the holder's folder in /tmp first."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.kernels import fork
from skymagic.providers.holder import holder_folder, holder_script
from skymagic.wire.processes import HOLDER


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where a holder on this machine would have its folder."""
    usual = Path(holder_folder(f"lab-{uuid.uuid4().hex[:8]}", "n1"))
    yield usual
    for left in usual.parent.glob(f"{usual.name}*"):
        left.unlink() if left.is_symlink() or left.is_file() else shutil.rmtree(left)


def occupy(folder: Path, how: str, elsewhere: Path) -> None:
    """Take the holder's name as another user would."""
    if how == "link":
        folder.symlink_to(elsewhere)
    elif how == "dangling link":
        folder.symlink_to(elsewhere / "nowhere")
    elif how == "file":
        folder.touch()
    elif how == "another user's folder":
        if os.getuid() != 0:
            pytest.skip("only root can make another user's folder")
        folder.mkdir()
        (folder / "start").touch()
        os.chown(folder, 12345, 12345)


@pytest.mark.parametrize(
    "how", ["nothing", "link", "dangling link", "file", "another user's folder"]
)
def test_folder_is_private(
    folder: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    occupy(folder, how, tmp_path)
    monkeypatch.setenv(HOLDER, str(folder))
    out = tmp_path / "out"
    script = ["/bin/sh", "-c", holder_script(str(folder))]
    with subprocess.Popen(script, stdout=subprocess.DEVNULL) as holder:
        try:
            place = Path(fork.holder())
            assert (place == folder) == (how == "nothing")
            assert (place.stat().st_uid, place.stat().st_mode & 0o777) == (os.getuid(), 0o700)
            ray = pytest.importorskip("skymagic.providers.ray_driver", exc_type=ImportError)
            assert ray.own_folder(str(folder)) == str(place)
            words = ["-c", f"open({str(out)!r}, 'w').write(input())"]
            said = fork.run_below_holder(
                str(place),
                "job",
                words,
                "hello",
                lambda: (out.exists() and out.read_text()) or None,
            )
            assert said == "hello"
            assert holder.wait(30) == 0
        finally:
            holder.terminate()
    assert not place.exists()
    assert list(tmp_path.iterdir()) == [out]


def test_existing_private_folder_is_reused(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    assert subprocess.run(["/bin/sh", "-c", holder_script(str(folder))]).returncode == 1
    assert list(folder.parent.glob(f"{folder.name}*")) == [folder]
