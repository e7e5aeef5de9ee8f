"""The buttons of a run's line, pressed in JupyterLab while the cell holds the kernel's main thread."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.lab.browser import PATIENCE, Browser, opened

pytestmark = pytest.mark.needs("chromium")

CELLS = (
    "%load_ext skymagic\n%config SkyMagic.view_after = 0.2\n%sky_pool --ranks 2",
    "%%sky_broadcast\nimport time\ndef load_batch():\n    time.sleep(600)\nprint('begun')\nload_batch()",
    "%%sky_broadcast -o kept\n'alive';",
    "kept",
)
POOL, BLOCKS, NEXT, KEPT = range(len(CELLS))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A notebook whose pool has started."""
    with opened(tmp_path_factory.mktemp("stop"), CELLS) as one:
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
