"""A distribution that was installed from a folder is pinned by no index."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path


def test_a_distribution_from_a_folder_is_no_indexs(tmp_path: Path) -> None:
    """As recorded by pip, editable or not."""
    (tmp_path / "mine.py").touch()
    (tmp_path / "pyproject.toml").write_text(
        "[project]\nname = 'mine'\nversion = '0.1'\ndependencies = ['xxhash']\n"
    )
    site = tmp_path / "site"
    info = site / "mine-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mine\nVersion: 0.1\nRequires-Dist: xxhash\n"
    )
    (info / "direct_url.json").write_text(
        f'{{"url": "file://{tmp_path}", "dir_info": {{"editable": true}}}}'
    )
    code = "from skymagic.bootstrap.requirements import notebook, pinned; print(notebook('mine').own, *pinned(['mine', 'xxhash']))"
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(root)!r}, {str(site)!r}]\n{code}"],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == f"True mine xxhash=={version('xxhash')}\n"
