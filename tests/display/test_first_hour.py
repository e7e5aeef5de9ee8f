"""A newcomer's first hour in JupyterLab, in Chromium: the README's cells from start to failure, and what people try next."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, expect

from tests.docs.test_readme import examples
from tests.lab.browser import Browser, opened
from tests.lab.desk import nothing_left
from tests.lab.notebook import ROOT, own_folders

pytest.importorskip("torch")
pytestmark = [pytest.mark.needs("chromium"), pytest.mark.in_order]

START, DEFINE, TRAIN, RESULTS, KILLED = [
    example.source.rstrip() for example in examples(ROOT / "README.md")
]
CELLS = {
    "start": START,
    "define": DEFINE,
    "train": TRAIN,
    "results": RESULTS,
    "failed": "%%sky_broadcast\nif dist.get_rank() == 1:\n    raise ValueError('bad batch')\ndist.barrier()",
    "killed": KILLED,
    "cloned": "%sky_clone 1 --from 0 model optimizer dist",
    "plain": "model(x)",
    "back": "%sky_pull model --head",
    "evaluated": "model.eval()\naccuracy = (model(x).argmax(1) == dataset.tensors[1]).float().mean().item()\n"
    "type(model).__name__, accuracy > 0.5",
    "continued": "%%sky_broadcast\ninputs, labels = dataset[:64]\nfor group in optimizer.param_groups:\n    group['lr'] = 0.01\n"
    "for step in range(5):\n    optimizer.zero_grad()\n    nn.functional.cross_entropy(model(inputs), labels).backward()\n"
    "    optimizer.step()\nprint('learning rate', optimizer.param_groups[0]['lr'])",
    "stopped": "%%sky_broadcast\nimport time\nfrom tqdm import tqdm\nfor step in tqdm(range(100_000)):\n    time.sleep(0.02)",
    "still there": "%%sky_broadcast -o kept\nlen(list(model.parameters()))",
    "kept": "kept",
    "straggler": "%%sky_broadcast\nimport time\nimport skymagic as sky\ndef load_batch():\n    time.sleep(0.4 if dist.get_rank() else 0.004)\n"
    "for step in range(100_000):\n    load_batch()\n    sky.report(step=step, total=100_000)",
    "background": "%%sky_broadcast -a\nimport os\nwhile not os.path.exists('gate'):\n    time.sleep(0.05)\ndist.get_rank() * 10",
    "meanwhile": "run = _\nprint('meanwhile', run.status)",
    "result": "open('gate', 'w').close()\nprint(run.result())",
    "put": "with open('notes.txt', 'w') as file:\n    print('lr 0.01', file=file)\n%sky_put notes.txt kept/",
    "on the ranks": "%%sky_broadcast -t 0\nprint(open('kept/notes.txt').read())\nprint('from rank 0', file=open('kept/answer.txt', 'w'))",
    "get": "%sky_get kept results\nprint(open('results/answer.txt').read())",
    "night": "%sky_pool night --ranks 2 --detach",
    "overnight": "%%sky_broadcast --pool night -a -o answers\nimport os, time\nwhile not os.path.exists('morning'):\n    time.sleep(0.05)\n"
    "print('trained')\nint(os.environ['RANK'])",
    "lost": "%load_ext skymagic\n%sky_attach main",
    "attached": "open('morning', 'w').close()\n%sky_attach night",
    "answers": "answers",
    "down": "%sky_down --all",
}
INDEX = {name: number for number, name in enumerate(CELLS)}
SEEN = """(index) => {
    const area = document.querySelectorAll('.jp-Notebook .jp-CodeCell')[index].querySelector('.jp-Cell-outputArea');
    window.seen = [];
    new MutationObserver(() => {
        const text = area.innerText;
        if (text.trim() && window.seen.at(-1) !== text) window.seen.push(text);
    }).observe(area, {childList: true, subtree: true, characterData: true});
}"""
"""Keeps each state of a cell's output."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("first-hour")
    with nothing_left(own_folders(folder)), opened(folder, list(CELLS.values())) as one:
        yield one


def run(browser: Browser, name: str) -> Locator:
    return browser.run(INDEX[name])


def test_1_start_shows_its_steps_from_the_beginning(browser: Browser) -> None:
    browser.page.evaluate(SEEN, INDEX["start"])
    expect(run(browser, "start")).to_contain_text(
        re.compile(r"main · local · 2 ranks on \S+ · torch · ready in \d+\.\d s")
    )
    seen = browser.page.evaluate("window.seen")
    phases = [
        "starting …",
        "starting the agents",
        "importing torch",
        "starting the ranks",
        "ready in",
    ]
    at = {phase: [number for number, text in enumerate(seen) if phase in text] for phase in phases}
    assert at["starting …"], seen
    assert at["ready in"], seen
    first = [
        numbers[0] for numbers in at.values() if numbers
    ]  # one that is over at once need not be drawn
    assert len(first) > 2, seen
    assert first == sorted(set(first)), f"{phases} {seen}"
    assert not any("main" in text for text in seen[: first[0]]), (
        "the phase is in what is shown of it first"
    )


def test_2_a_first_training(browser: Browser) -> None:
    run(browser, "define")
    shown = run(browser, "train")
    expect(shown).to_contain_text(
        re.compile(r"epoch 0: loss \d\.\d+\s+epoch 1: loss \d\.\d+\s+epoch 2: loss \d\.\d+")
    )
    expect(shown).to_contain_text(re.compile(r"2 ranks · \d+\.\d s · .*results → `results`"))
    table = run(browser, "results")
    expect(table.get_by_role("row")).to_have_count(3)
    expect(table).to_contain_text(re.compile(r"\{'rank': 1, 'loss': \d\.\d+\}"))


def test_3_a_rank_that_fails_and_one_that_dies(browser: Browser) -> None:
    shown = run(browser, "failed")
    expect(shown).to_contain_text(re.compile(r"rank 1 of 2 on \S+"))
    expect(shown).to_contain_text(re.compile(r"Cell In\[\d+\], line 3"))
    expect(shown).to_contain_text("ValueError: bad batch")
    expect(run(browser, "killed")).to_contain_text("RankDied: rank 1 on")
    expect(run(browser, "cloned")).to_contain_text("model")


def test_4_model_is_pulled_and_training_continues(browser: Browser) -> None:
    expect(run(browser, "plain")).to_contain_text(
        "model is on the ranks of pool 'main': %sky_pull model --head"
    )
    expect(run(browser, "back")).to_contain_text(
        "model → Sequential, from rank 0; DistributedDataParallel unwrapped"
    )
    expect(run(browser, "evaluated")).to_contain_text("('Sequential', True)")
    expect(run(browser, "continued")).to_contain_text("learning rate 0.01")


def test_5_the_stop_button_leaves_variables_where_they_are(browser: Browser) -> None:
    browser.start(INDEX["stopped"])
    shown = browser.outputs(INDEX["stopped"])
    expect(shown.locator("progress")).to_be_visible()
    browser.interrupt()
    expect(shown).to_contain_text(re.compile(r"2 ranks · \d+\.\d s · interrupted"))
    run(browser, "still there")
    expect(run(browser, "kept").get_by_role("row")).to_have_count(3)


def test_6_a_straggler_is_named_and_found(browser: Browser) -> None:
    browser.start(INDEX["straggler"])
    shown = browser.outputs(INDEX["straggler"])
    expect(shown).to_contain_text(re.compile(r"rank 1 is \d+ steps behind"))
    shown.get_by_role("button", name="where is it?").click()
    expect(shown).to_contain_text(re.compile(r"in load_batch, line 5"))
    shown.get_by_role("button", name="stop").click()
    expect(shown).to_contain_text(re.compile(r"2 ranks · \d+\.\d s · interrupted"))


def test_7_a_cell_in_the_background_and_its_result(browser: Browser) -> None:
    run(browser, "background")
    expect(run(browser, "meanwhile")).to_contain_text(
        re.compile("meanwhile (waiting|running)")
    )  # sent in the background: not begun yet, perhaps
    expect(run(browser, "result")).to_contain_text("[0, 10]")
    expect(browser.outputs(INDEX["background"])).to_contain_text(
        re.compile(r"cell \d+ on ranks 0, 1: done after")
    )


def test_8_files_are_copied_there_and_back(browser: Browser) -> None:
    expect(run(browser, "put")).to_contain_text(re.compile(r"1 file \(\d+ bytes\) to \S+ in"))
    expect(run(browser, "on the ranks")).to_contain_text("lr 0.01")
    expect(run(browser, "get")).to_contain_text("from rank 0")


def test_9_run_continues_while_its_notebook_restarts(browser: Browser) -> None:
    run(browser, "night")
    run(browser, "overnight")
    browser.restart()
    lost = "pool 'main' was on this machine and ended with its kernel"
    expect(run(browser, "lost")).to_contain_text(lost)
    expect(run(browser, "attached")).to_contain_text("trained")
    expect(run(browser, "answers").get_by_role("row")).to_have_text(
        ["ranktypeshape or value", "0int0", "1int1"]
    )
    run(browser, "down")
