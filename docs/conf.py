"""The site: ``make docs`` builds it into build/docs, with warnings as errors."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import skymagic  # noqa: E402  (the path is set above)

project = "skymagic"
author = "The skymagic developers"
copyright = author
version = release = skymagic.__version__

extensions = ["myst_nb"]
root_doc = "index"
exclude_patterns = ["notebooks/index.ipynb"]
# Copied, for Sphinx reads nothing outside of its folder, and MyST follows a link to where it leads
shutil.copytree(
    ROOT / "notebooks",
    ROOT / "docs/notebooks",
    ignore=shutil.ignore_patterns("*.py"),
    dirs_exist_ok=True,
)
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # they make a dash of the two of an option
nb_execution_mode = "off"  # the tests run the pages' cells and the notebooks
suppress_warnings = [
    "myst.header",  # a page that is included begins at its own level
    "misc.highlighting_failure",  # cells hold magics and shell lines
    "myst-nb.lexer",
    "mystnb.unknown_mime_type",
]

html_theme = "pydata_sphinx_theme"
html_title = "skymagic"
html_static_path = ["style"]
html_css_files = ["skymagic.css"]
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
html_copy_source = False


OUTSIDE = {
    "](../../notebooks/": "](../notebooks/",
    "](../../benchmarks/README.md": "](../explanation/benchmarks.md",
    "](../docs/": "](../",
}
"""Links of the pages to files of the repository, as GitHub follows them, and where these files are on the site."""


def setup(app: Any) -> None:
    app.connect("source-read", _on_the_site)


def _on_the_site(app: Any, name: str, source: list[str]) -> None:
    for link, place in OUTSIDE.items():
        source[0] = source[0].replace(link, place)
