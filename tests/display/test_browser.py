"""What a person sees in JupyterLab: a pool's start, a cell that is stopped by its button, a failing rank, and all of it after reopening."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.lab.browser import PATIENCE, Browser, opened

pytestmark = pytest.mark.needs("chromium")

CELLS = (
    "%load_ext skymagic\n%sky_pool --ranks 4",
    "import skymagic as sky\nsky.find('main')",
    "%%sky_broadcast -a --only all\nimport os\nprint('there')\nopen('gate').read()",
    "%sky_stacks",
    "%%sky_broadcast\nif os.environ['RANK'] == '2':\n    raise ValueError('bad batch')",
    "%%sky_broadcast -o results\nint(os.environ['RANK']) ** 2;",
    "results",
    "%%sky_broadcast\nimport numpy as np\nrank = int(os.environ['RANK'])\nbatch = np.full((64, 10), rank)\nlr = 0.01",
    "%sky_vars",
)
POOL, REPR, BESIDE, STACKS, FAILS, KEEPS, RESULTS, DEFINES, VARS = range(len(CELLS))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A notebook whose pool has started."""
    folder = tmp_path_factory.mktemp("browser")
    os.mkfifo(folder / "gate")
    with opened(folder, CELLS) as one:
        one.run(POOL)
        yield one


def gone(browser: Browser) -> None:
    """Nothing of what is shown is only a promise."""
    expect(
        browser.page.get_by_text(re.compile("model not found|Loading widget|Error displaying widget"))
    ).to_have_count(0)


def test_a_start_ends_as_one_line(browser: Browser) -> None:
    shown = browser.outputs(POOL)
    expect(shown).to_contain_text(re.compile(r"main · local · 4 ranks on \S+ · ready in \d+\.\d s"))
    expect(shown).not_to_contain_text("starting")
    browser.run(REPR)
    for rank in range(4):
        expect(browser.outputs(REPR).get_by_title(re.compile(rf"rank {rank} on \S+: ready"))).to_be_visible()
    browser.shot("pool")


def test_a_cell_beside_the_notebook_is_looked_into_and_stopped_by_its_button(browser: Browser) -> None:
    browser.run(BESIDE)
    shown = browser.outputs(BESIDE)
    button = shown.get_by_role("button", name="stop")
    expect(button).to_be_visible()
    expect(shown).to_contain_text("[3] there")
    expect(shown).to_contain_text("running for")
    expect(browser.run(STACKS)).to_contain_text("ranks 0–3 at line 4")
    browser.shot("beside")
    button.click()
    expect(shown).to_contain_text(re.compile(r"cell \d+ on ranks 0–3: stopped after"))
    expect(button).to_have_count(0)
    browser.shot("stopped")


def test_a_failing_rank(browser: Browser) -> None:
    shown = browser.run(FAILS)
    expect(shown).to_contain_text("ValueError: bad batch")
    expect(shown).to_contain_text("rank 2 of 4 on")
    browser.shot("failed")


def test_values_and_variables(browser: Browser) -> None:
    browser.run(KEEPS)
    expect(browser.run(RESULTS)).to_contain_text("[0, 1, 4, 9]")
    browser.run(DEFINES)
    expect(browser.run(VARS)).to_contain_text(re.compile(r"batch +ndarray +\(64, 10\) int64 +all, values differ"))
    browser.shot("variables")


def test_what_was_saved_is_shown_when_it_is_opened_again(browser: Browser) -> None:
    saved = browser.save()
    widgets = saved["metadata"].get("widgets")
    assert widgets is None or "state" in widgets["application/vnd.jupyter.widget-state+json"]
    kinds = {kind for cell in saved["cells"] for output in cell["outputs"] for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" not in kinds
    browser.open()
    expect(browser.outputs(POOL)).to_contain_text("ready in", timeout=PATIENCE * 1000)
    expect(browser.outputs(BESIDE)).to_contain_text("stopped after")
    gone(browser)
    browser.shot("reopened")
