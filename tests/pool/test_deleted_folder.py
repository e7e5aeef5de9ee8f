"""A notebook whose working folder was deleted: no pool starts there, and the message says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.notebook import opened


def deleting(folder: Path) -> str:
    """A cell that enters a folder and deletes it."""
    return f"import os\nos.mkdir({str(folder)!r})\nos.chdir({str(folder)!r})\nos.rmdir({str(folder)!r})"


@pytest.mark.parametrize("line", ["%sky_pool lab --ranks 1", "%sky_pool lab --ranks 1 --dry-run"])
def test_a_deleted_folder_is_named(tmp_path: Path, line: str) -> None:
    gone = tmp_path / "gone"
    with opened(tmp_path) as notebook:
        notebook.run(deleting(gone))
        told = notebook.fail(line, "folder-deleted")
        assert "%cd FOLDER" in told.text
        notebook.run(f"os.chdir({str(tmp_path)!r})")
        notebook.run("%sky_pool lab --ranks 1")
