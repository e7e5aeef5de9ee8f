"""The buttons of a run's line, pressed in JupyterLab while the cell holds the kernel's main thread."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.lab.browser import PATIENCE, Browser, opened

pytestmark = pytest.mark.needs("chromium")

COUNTS = """\
import time
from itertools import pairwise
def counts():
    while True:
        yield pool.meter.count
        time.sleep(2.5)
next(before for before, after in pairwise(counts()) if (before == after) is {rest})
print("{words}")"""
CELLS = (
    "%load_ext skymagic\n%config SkyMagic.view_after = 0.2\n%sky_pool --ranks 2",
    "%%sky_broadcast\nimport time\ndef load_batch():\n    time.sleep(600)\nprint('begun')\nload_batch()",
    "%%sky_broadcast -o kept\n'alive';",
    "kept",
    "pool = %sky_pool\nfrom skymagic.display import looking\nlooking.ASK_INTERVAL = 0.5",
    "%%sky_broadcast -a\nimport os\nwhile os.environ['RANK'] == '1':\n    pass\nopen('gate').read()",
    COUNTS.format(rest=False, words="measured"),
    COUNTS.format(rest=True, words="at rest"),
    "%sky_down",
)
POOL, BLOCKS, NEXT, KEPT, ASKS, BESIDE, MEASURED, AT_REST, DOWN = range(len(CELLS))
CLEAR = "() => window.jupyterapp.commands.execute('notebook:clear-cell-output')"
SELECT = "(index) => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = index; }"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A notebook whose pool has started."""
    folder = tmp_path_factory.mktemp("stop")
    os.mkfifo(folder / "gate")
    with opened(folder, CELLS) as one:
        one.run(POOL)
        yield one


def test_a_blocking_cell_is_looked_into_and_stopped_by_its_buttons(browser: Browser) -> None:
    browser.start(BLOCKS)
    shown = browser.outputs(BLOCKS)
    stop = shown.get_by_role("button", name="stop")
    expect(stop).to_be_visible(timeout=PATIENCE * 1000)
    expect(shown).to_contain_text(re.compile(r"2 ranks · 0:\d\d"))
    expect(shown).to_contain_text("begun")
    shown.get_by_role("button", name="where is it?").click()
    expect(shown).to_contain_text("ranks 0, 1 in load_batch, line 4")
    browser.shot("run-view")
    shown.get_by_role("button", name="ranks").click()
    cell = shown.get_by_title(re.compile(r"rank 1 on \S+: running; CPU \d+%, memory \d+\.\d MB of "))
    expect(cell).to_be_visible()
    browser.shot("run-view-ranks")
    shown.get_by_role("button", name="ranks").click()
    expect(cell).to_have_count(0)
    stop.click()
    expect(shown).to_contain_text(re.compile(r"2 ranks · \d+\.\d s · interrupted"))
    expect(shown).to_contain_text("RunInterrupted")
    expect(shown.get_by_role("button")).to_have_count(0)
    browser.shot("run-view-stopped")
    browser.run(NEXT)
    expect(browser.run(KEPT)).to_contain_text("'alive'")


def test_the_line_that_stays_is_saved(browser: Browser) -> None:
    saved = browser.save()["cells"][BLOCKS]["outputs"]
    (line,) = (output["data"] for output in saved if output["output_type"] == "display_data")
    assert line.keys() == {"text/plain", "text/html"}
    assert re.fullmatch(r"2 ranks · \d+\.\d s · interrupted", "".join(line["text/plain"]))
    browser.open()
    expect(browser.outputs(BLOCKS)).to_contain_text("interrupted", timeout=PATIENCE * 1000)
    expect(
        browser.page.get_by_text(re.compile("model not found|Loading widget|Error displaying widget"))
    ).to_have_count(0)


def test_what_ranks_use_is_measured_while_somebody_looks_at_it(browser: Browser) -> None:
    browser.run(ASKS)
    browser.run(BESIDE)
    shown = browser.outputs(BESIDE)
    shown.get_by_role("button", name="ranks").click()
    busy = shown.get_by_title(re.compile(r"rank 1 on \S+: running; CPU [1-9]\d*%, memory \d+\.\d MB of "))
    expect(busy).to_be_visible()
    browser.shot("ranks")
    expect(browser.run(MEASURED)).to_contain_text("measured")
    browser.page.evaluate(SELECT, BESIDE)
    browser.page.evaluate(CLEAR)
    expect(busy).to_have_count(0)
    expect(browser.run(AT_REST)).to_contain_text("at rest")
    browser.run(DOWN)
    kinds = {kind for cell in browser.save()["cells"] for output in cell["outputs"] for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" not in kinds
