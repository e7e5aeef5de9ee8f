"""The site in a browser, as a newcomer uses it: the home page, the search, every page on a phone."""

from __future__ import annotations

import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

from tests.lab.browser import CHROMIUM, DEADLINE, chromium
from tests.lab.notebook import ROOT

for name in ("sphinx", "myst_nb", "pydata_sphinx_theme"):
    pytest.importorskip(name, reason="make docs installs it")
pytestmark = pytest.mark.needs("chromium")

PHONE: ViewportSize = {"width": 390, "height": 844}
BROKEN = """() => [...document.querySelectorAll('article table code .pre')]
    .filter((word) => word.getClientRects().length > 1).map((word) => word.textContent)"""
"""Words of code in tables that are on two lines."""
TOO_WIDE = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The files of a folder, by HTTP; their address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built; a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    words = [
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        "-d",
        str(out / "doctrees"),
        str(ROOT / "docs"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, str(out / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "html"


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def page(url: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM))
        try:
            opened = browser.new_page(viewport={"width": 1280, "height": 900})
            opened.set_default_timeout(DEADLINE * 1000)
            yield opened
        finally:
            browser.close()


def test_home_page_shows_and_installs(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{url}/index.html")
    article = page.locator("article")
    expect(article.locator("img")).to_have_count(1)
    for words in ('pip install "skymagic[torch]"', "%load_ext skymagic", "%%sky_broadcast"):
        expect(article.get_by_text(words).first).to_be_visible()


@pytest.mark.parametrize(
    ("asked", "title"),
    [
        ("capture", r"Variables"),
        ("FSDP2", r"Shard a model with FSDP2"),
        ("offline", r"Without internet"),
        ("Colab", r"Google Colab and Kaggle"),
        ("container", r"[Cc]ontainer"),
        ("Slurm", r"Slurm cluster"),
        ("VS Code", r"VS Code"),
        ("conda", r"conda"),
    ],
)
def test_search_finds(page: Page, url: str, asked: str, title: str) -> None:
    """Among the first five."""
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{url}/search.html?q={asked}")
    expect(page.locator(".search-summary")).to_contain_text(re.compile("found|matching"))
    titles = page.locator("ul.search li > a").all_inner_texts()[:5]
    assert [found for found in titles if re.search(title, found)], titles


def test_every_page_fits_a_phone(page: Page, url: str, folder: Path) -> None:
    page.set_viewport_size(PHONE)
    problems = []
    for path in sorted(folder.rglob("*.html")):
        if "_static" in path.parts:
            continue
        name = path.relative_to(folder).as_posix()
        page.goto(f"{url}/{name}", wait_until="domcontentloaded")
        if broken := page.evaluate(BROKEN):
            problems.append(f"{name}: on two lines: {broken[:5]}")
        if (wide := page.evaluate(TOO_WIDE)) > 0:
            problems.append(f"{name}: {wide} pixels wider than the screen")
    assert problems == []


def test_pages_of_where_people_work_are_in_the_navigation(page: Page, url: str) -> None:
    page.set_viewport_size({"width": 1280, "height": 900})
    page.goto(f"{url}/index.html")
    links = {
        link.split("#")[0] for link in page.locator("a").evaluate_all("all => all.map(a => a.href)")
    }
    for name in (
        "install", "front-ends/index", "how-to/jupyterhub", "how-to/containers", "how-to/offline",
        "how-to/colab", "troubleshooting",
    ):  # fmt: skip
        assert f"{url}/{name}.html" in links, name
