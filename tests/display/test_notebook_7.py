"""What a person sees in Notebook 7, which has JupyterLab's cells in a page of its own: a start, a training, buttons, and all of it
after reopening."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.lab.browser import DEADLINE, Browser, opened

pytest.importorskip("notebook")
pytestmark = [pytest.mark.needs("chromium"), pytest.mark.in_order]

CELLS = {
    "pool": "%load_ext skymagic\n%config SkyMagic.view_after = 0.2\npool = %sky_pool --ranks 2\npool",
    "training": "%%sky_broadcast -o results\nimport time\nimport skymagic as sky\nfrom tqdm import tqdm\n"
    "for step in tqdm(range(60)):\n    time.sleep(0.04)\n    sky.report(step=step, total=60, loss=1 / (step + 1))\nstep;",
    "curve": "pool.metrics.loss.unstack().plot(figsize=(5, 2.2), ylabel='loss');",
    "blocks": "%%sky_broadcast\ndef load_batch():\n    time.sleep(600)\nprint('begun')\nload_batch()",
    "failed": "%%sky_broadcast\n{}['batch']",
}
INDEX = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("notebook-7"), list(CELLS.values()), "notebook") as one:
        yield one


def test_a_start_and_a_training(browser: Browser) -> None:
    assert "/notebooks/" in browser.page.url
    start = browser.run(INDEX["pool"])
    expect(start).to_contain_text(re.compile(r"main · local · 2 ranks on \S+ · ready in \d+\.\d s"))
    expect(start.get_by_title(re.compile(r"rank 1 on \S+: ready"))).to_be_visible()
    browser.start(INDEX["training"])
    shown = browser.outputs(INDEX["training"])
    expect(shown.locator("progress")).to_be_visible()
    expect(shown).to_contain_text(re.compile(r"2 ranks · 0:0\d · \d\d% .* steps/s · loss 0\.\d+"))
    browser.shot("notebook-7-training")
    expect(shown).to_contain_text(
        re.compile(r"2 ranks · \d+\.\d s · loss 0\.0167 .* · results → `results`")
    )
    expect(shown.locator("progress")).to_have_count(0)
    expect(browser.run(INDEX["curve"]).get_by_role("img")).to_be_visible()


def test_a_cell_that_holds_the_kernel_is_stopped_by_its_buttons(browser: Browser) -> None:
    shown = browser.look_into(INDEX["blocks"], "ranks 0, 1 in load_batch, line 3")
    browser.shot("notebook-7-buttons")
    shown.get_by_role("button", name="stop").click()
    expect(shown).to_contain_text(re.compile(r"2 ranks · \d+\.\d s · interrupted"))
    expect(shown.get_by_role("button")).to_have_count(0)
    expect(browser.run(INDEX["failed"])).to_contain_text("KeyError: 'batch'")


def test_saved_output_is_shown_after_restart_and_reopening(
    browser: Browser,
) -> None:
    browser.restart()
    expect(browser.run(INDEX["pool"])).to_contain_text("ready in")
    kinds = {
        kind
        for cell in browser.save()["cells"]
        for output in cell["outputs"]
        for kind in output.get("data", {})
    }
    assert "application/vnd.jupyter.widget-view+json" not in kinds
    browser.open()
    expect(browser.outputs(INDEX["training"])).to_contain_text(
        "results → `results`", timeout=DEADLINE * 1000
    )
    expect(browser.outputs(INDEX["blocks"])).to_contain_text("interrupted")
    expect(browser.outputs(INDEX["curve"]).get_by_role("img")).to_be_visible()
    wrong = browser.page.get_by_text(
        re.compile("model not found|Loading widget|Error displaying widget")
    )
    expect(wrong).to_have_count(0)
    browser.shot("notebook-7-reopened")
