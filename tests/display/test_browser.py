"""What a person sees in JupyterLab: a start, trainings that move, a straggler, stops, a failing rank, plots, a kernel that is
restarted, and all of it after reopening."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import expect

from tests.lab.browser import DEADLINE, IDLE, Browser, opened

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.in_order]

TRAINING = """\
%%sky_broadcast -o results
import math, os, time
import skymagic as sky
from tqdm import tqdm
rank = int(os.environ["RANK"])
for step in tqdm(range(100)):
    time.sleep(0.04)
    loss = math.exp(-step / 30) + 0.05 * rank
    sky.report(step=step, total=100, loss=loss)
{"rank": rank, "loss": round(loss, 3)};"""
STRAGGLER = """\
%%sky_broadcast
for step in range(100_000):
    time.sleep(0.4 if rank == 2 else 0.004)
    sky.report(step=step, total=100_000)"""
BLOCKS = """\
%%sky_broadcast
def load_batch():
    time.sleep(600)
print('begun')
load_batch()"""
COUNTS = """\
import time
from itertools import pairwise
def counts():
    while True:
        yield pool.meter.count
        time.sleep(2.5)
next(before for before, after in pairwise(counts()) if (before == after) is {rest})
print("{words}")"""
CELLS = {
    "pool": "%load_ext skymagic\n%config SkyMagic.view_after = 0.3\npool = %sky_pool --ranks 4",
    "repr": "pool",
    "training": TRAINING,
    "results": "results",
    "curve": "pool.metrics.loss.unstack().plot(figsize=(5, 2.2), ylabel='loss');",
    "figure": "%%sky_broadcast -t 0\nimport matplotlib.pyplot as plt\nplt.plot([4, 2, 1]);",
    "straggler": STRAGGLER,
    "blocks": BLOCKS,
    "beside": "%%sky_broadcast -a --only all\nprint('there')\nopen('gate').read()",
    "stacks": "%sky_stacks",
    "failed": "%%sky_broadcast\nif rank == 2:\n    raise ValueError('bad batch')",
    "defines": "%%sky_broadcast\nimport os\nimport numpy as np\nrank = int(os.environ['RANK'])\nbatch = np.full((64, 10), rank)\nlr = 0.01",
    "variables": "%sky_vars",
    "status": "%sky_status",
    "busy": "%%sky_broadcast -a\nwhile rank == 1:\n    pass\nopen('gate').read()",
    "measured": COUNTS.format(rest=False, words="measured"),
    "at rest": COUNTS.format(rest=True, words="idle"),
    "typed": "%sky_pool x --pro",
    "again": "%load_ext skymagic\n%sky_pool --ranks 2",
    "after": "%%sky_broadcast --only all\nprint('ready')",
    "loaded anew": "%%sky_broadcast -a\nopen('gate').read()",
    "plain": "%config SkyMagic.buttons = False\n%config SkyMagic.view_after = 0.3",
    "amid": BLOCKS.replace("\n", "\nimport time\n", 1),
}
CLEAR = "() => window.jupyterapp.commands.execute('notebook:clear-cell-output')"
SELECT = "(index) => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = index; }"
INDEX = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A notebook whose pool has started."""
    folder = tmp_path_factory.mktemp("browser")
    os.mkfifo(folder / "gate")
    with opened(folder, list(CELLS.values())) as one:
        one.run(INDEX["pool"])
        yield one


def gone(browser: Browser) -> None:
    """Nothing of what is shown is only a promise."""
    expect(
        browser.page.get_by_text(
            re.compile("model not found|Loading widget|Error displaying widget")
        )
    ).to_have_count(0)


def test_a_start_ends_as_one_line(browser: Browser) -> None:
    shown = browser.outputs(INDEX["pool"])
    expect(shown).to_contain_text(re.compile(r"main · local · 4 ranks on \S+ · ready in \d+\.\d s"))
    expect(shown).not_to_contain_text("starting")
    browser.run(INDEX["repr"])
    for rank in range(4):
        cell = browser.outputs(INDEX["repr"]).get_by_title(
            re.compile(rf"rank {rank} on \S+: ready")
        )
        expect(cell).to_be_visible()
    browser.shot("pool")


def test_a_training_moves_and_one_line_stays(browser: Browser) -> None:
    browser.start(INDEX["training"])
    shown = browser.outputs(INDEX["training"])
    expect(shown).to_contain_text(
        re.compile(r"4 ranks · 0:0\d · [3-9]\d% .* steps/s · loss 0\.\d+ \(0\.\d+–0\.\d+\) █")
    )
    expect(shown.locator("progress")).to_be_visible()
    browser.shot("training")
    expect(shown).to_contain_text(
        re.compile(r"4 ranks · \d+\.\d s · loss 0\.112 .* · results → `results`")
    )
    expect(shown).to_contain_text("100/100")
    kinds = browser.saved(INDEX["training"])
    assert kinds == ["display_data", "display_data"], (
        "the bar goes on below the line, and nothing of it stays above"
    )
    expect(shown.locator("progress")).to_have_count(0)
    browser.shot("trained")


def test_pulled_results_are_a_table_and_a_curve(browser: Browser) -> None:
    shown = browser.run(INDEX["results"])
    expect(shown.get_by_role("row")).to_have_count(5)
    expect(shown.get_by_role("row").nth(3)).to_contain_text(
        re.compile(r"2\s*dict\s*\{'rank': 2, 'loss': 0\.137\}")
    )
    expect(browser.run(INDEX["curve"]).get_by_role("img")).to_be_visible()
    expect(browser.run(INDEX["figure"]).get_by_role("img")).to_be_visible()
    browser.shot("curve")


def test_straggler_is_named_and_toolbar_button_stops_the_cell(browser: Browser) -> None:
    browser.start(INDEX["straggler"])
    shown = browser.outputs(INDEX["straggler"])
    expect(shown).to_contain_text(re.compile(r"rank 2 is \d+ steps behind"))
    browser.shot("straggler")
    browser.interrupt()
    expect(shown).to_contain_text(
        re.compile(r"4 ranks · \d+\.\d s · interrupted .*rank 2 was \d+ steps behind")
    )
    expect(shown).to_contain_text("interrupted on ranks 0–3")
    browser.shot("interrupted")


def test_buttons_inspect_and_stop_a_blocking_cell(
    browser: Browser,
) -> None:
    shown = browser.look_into(INDEX["blocks"], "ranks 0–3 in load_batch, line 3")
    browser.shot("buttons")
    shown.get_by_role("button", name="ranks").click()
    cell = shown.get_by_title(
        re.compile(r"rank 1 on \S+: running; CPU \d+%, memory \d+\.\d MB of ")
    )
    expect(cell).to_be_visible()
    browser.shot("ranks")
    shown.get_by_role("button", name="ranks").click()
    expect(cell).to_have_count(0)
    shown.get_by_role("button", name="stop").click()
    expect(shown).to_contain_text(re.compile(r"4 ranks · \d+\.\d s · interrupted"))
    expect(shown).to_contain_text("RunInterrupted")
    expect(shown.get_by_role("button")).to_have_count(0)


def test_buttons_inspect_and_stop_a_background_cell(
    browser: Browser,
) -> None:
    browser.run(INDEX["beside"])
    shown = browser.outputs(INDEX["beside"])
    button = shown.get_by_role("button", name="stop")
    expect(button).to_be_visible()
    expect(shown).to_contain_text("[3] there")
    expect(shown).to_contain_text(re.compile("(running|waiting) for"))
    expect(browser.run(INDEX["stacks"])).to_contain_text("ranks 0–3 at line 3")
    browser.shot("beside")
    button.click()
    expect(shown).to_contain_text(re.compile(r"cell \d+ on ranks 0–3: stopped after"))
    expect(button).to_have_count(0)
    browser.shot("stopped")


def test_a_failing_rank(browser: Browser) -> None:
    shown = browser.run(INDEX["failed"])
    expect(shown).to_contain_text("ValueError: bad batch")
    expect(shown).to_contain_text("rank 2 of 4 on")
    browser.shot("failed")


def test_variables_and_status(browser: Browser) -> None:
    browser.run(INDEX["defines"])
    said = re.compile(r"batch +ndarray +\(64, 10\) int64 +all, values differ")
    expect(browser.run(INDEX["variables"])).to_contain_text(said)
    shown = browser.run(INDEX["status"])
    expect(shown.get_by_title(re.compile(r"rank 3 on \S+: ready"))).to_be_visible()
    shown.get_by_text("processes").click()
    expect(shown.locator("pre").filter(has_text="pid")).to_be_visible()
    browser.shot("status")


def test_resource_use_is_measured_while_shown(browser: Browser) -> None:
    shown = browser.run(INDEX["busy"])
    shown.get_by_role("button", name="ranks").click()
    busy = shown.get_by_title(
        re.compile(r"rank 1 on \S+: running; CPU [1-9]\d*%, memory \d+\.\d MB of ")
    )
    expect(busy).to_be_visible()
    browser.shot("busy")
    expect(browser.run(INDEX["measured"])).to_contain_text("measured")
    shown.get_by_role("button", name="ranks").click()
    expect(busy).to_have_count(0)
    expect(browser.run(INDEX["at rest"])).to_contain_text("idle")
    browser.page.evaluate(SELECT, INDEX["busy"])
    browser.page.evaluate(CLEAR)  # its cell goes on, and its widget must not be saved


def test_tab_completes_an_option_and_its_value(browser: Browser) -> None:
    browser.page.wait_for_function(IDLE)
    line = (
        browser.page.locator(".jp-Notebook .jp-CodeCell").nth(INDEX["typed"]).locator(".cm-content")
    )
    line.click()
    line.press("End")
    offered = browser.page.locator(".jp-Completer")
    line.press("Tab")
    expect(offered.get_by_text("--procs-per-node", exact=True)).to_be_visible()
    browser.shot("completer")
    offered.get_by_text("--provider", exact=True).click()
    expect(line).to_have_text("%sky_pool x --provider")
    line.press_sequentially(" ")
    line.press("Tab")
    offered.get_by_text("local", exact=True).click()
    expect(line).to_have_text("%sky_pool x --provider local")


def test_reloaded_page_shows_the_running_cells_line_and_end(
    browser: Browser,
) -> None:
    button = browser.run(INDEX["loaded anew"]).get_by_role("button", name="stop")
    expect(button).to_be_visible()
    browser.save()
    browser.open()
    expect(button).to_be_visible()
    button.click()
    shown = browser.outputs(INDEX["loaded anew"])
    expect(shown).to_contain_text(re.compile(r"cell \d+ on ranks 0–3: stopped after"))
    expect(button).to_have_count(0)
    gone(browser)
    browser.page.evaluate(SELECT, INDEX["loaded anew"])
    browser.page.evaluate(CLEAR)  # to this page it is a widget for good


def test_restart_leaves_a_line_without_dead_buttons(browser: Browser) -> None:
    shown = browser.run(INDEX["loaded anew"])
    button = shown.get_by_role("button", name="stop")
    expect(button).to_be_visible()
    browser.restart()
    expect(button).to_be_hidden()
    expect(shown).to_contain_text(re.compile("(running|waiting) for"))
    dead = shown.locator(".jupyter-widgets-disconnected")
    expect(dead.first).to_be_visible()
    icons = dead.evaluate_all(
        "(all) => all.map((each) => getComputedStyle(each, '::before').content)"
    )
    assert {*icons} == {"none"}, "no icon of a broken link"
    texts = shown.locator("div").evaluate_all(
        "(all) => all.map((each) => getComputedStyle(each, '::after').content)"
    )
    assert sum("disconnected" in text for text in texts) == 1
    browser.shot("dead-buttons")
    browser.page.evaluate(SELECT, INDEX["loaded anew"])
    browser.page.evaluate(CLEAR)


def test_kernel_restarted_during_a_cell_starts_a_new_pool(browser: Browser) -> None:
    browser.restart()
    expect(browser.outputs(INDEX["training"])).to_contain_text("loss 0.112")
    expect(browser.run(INDEX["again"])).to_contain_text(re.compile(r"2 ranks on \S+ · ready in"))
    expect(browser.run(INDEX["after"])).to_contain_text("[1] ready")
    browser.shot("restarted")


def test_notebook_saved_during_a_cell_has_the_whole_line(browser: Browser) -> None:
    browser.run(INDEX["plain"])
    browser.start(INDEX["amid"])
    shown = browser.outputs(INDEX["amid"])
    expect(shown).to_contain_text("begun")
    expect(shown).to_contain_text("press ■ to stop")
    saved = browser.save()["cells"][INDEX["amid"]]["outputs"]
    assert {kind for output in saved for kind in output.get("data", {})} == {
        "text/plain",
        "text/html",
    }
    browser.restart()
    expect(browser.run(INDEX["again"])).to_contain_text(re.compile(r"2 ranks on \S+ · ready in"))
    expect(browser.run(INDEX["after"])).to_contain_text("[1] ready")


def test_saved_output_is_shown_after_reopening(browser: Browser) -> None:
    saved = browser.save()
    widgets = saved["metadata"].get("widgets")
    assert widgets is None or "state" in widgets["application/vnd.jupyter.widget-state+json"]
    kinds = {
        kind
        for cell in saved["cells"]
        for output in cell["outputs"]
        for kind in output.get("data", {})
    }
    assert "application/vnd.jupyter.widget-view+json" not in kinds
    (line,) = (
        one["data"]
        for one in saved["cells"][INDEX["blocks"]]["outputs"]
        if one["output_type"] == "display_data"
    )
    assert line.keys() == {"text/plain", "text/html"}
    browser.open()
    expect(browser.outputs(INDEX["pool"])).to_contain_text("ready in", timeout=DEADLINE * 1000)
    expect(browser.outputs(INDEX["training"])).to_contain_text("results → `results`")
    expect(browser.outputs(INDEX["blocks"])).to_contain_text("interrupted")
    expect(browser.outputs(INDEX["beside"])).to_contain_text("stopped after")
    expect(browser.outputs(INDEX["amid"])).to_contain_text("press ■ to stop")
    expect(browser.outputs(INDEX["curve"]).get_by_role("img")).to_be_visible()
    gone(browser)
    browser.shot("reopened")
