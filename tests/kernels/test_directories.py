"""The folders of an agent while cleaners of temporary folders are about."""

from __future__ import annotations

import os
import shutil

from skymagic.kernels.agent.directories import Directories


def test_files_are_kept_young_and_folders_made_again() -> None:
    made = Directories("young-1")
    try:
        log = made.work / "ipython" / "rank-0.log"
        log.parent.mkdir()
        log.write_text("kept")
        for path in (log, log.parent, made.work, made.store):
            os.utime(path, (0, 0))
        made.touch()
        assert all(path.stat().st_mtime > 1e9 for path in (log, log.parent, made.work, made.store))
        assert made.restore() == []
        shutil.rmtree(made.work)
        assert made.restore() == [made.work]
        assert made.work.stat().st_mode & 0o777 == 0o700
        assert log.parent.parent.is_dir()
    finally:
        made.remove()
