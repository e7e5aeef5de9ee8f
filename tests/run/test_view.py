"""The line of a running cell: what it says, when it is there, and the one line that stays of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.lab.golden import Golden
from tests.lab.notebook import ROOT, WIDGET_VIEW, Notebook, Shown, buttons, has_buttons
from tests.lab.pools import Pools
from tests.run.test_shown import gate, waiting

WIDGETS = "application/vnd.jupyter.widget"


# ------------------------------------------------------------------------------------------ in a notebook


NAMES = (
    "%%sky_broadcast\nimport os, sys, time\nimport skymagic as sky\nrank = int(os.environ['RANK']);"
)


@pytest.fixture(scope="module")
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    patient = "%config SkyMagic.grace = 30.0"  # no rank is killed, and loses its names, because the machine is busy
    with shared_pools.lent(
        "--ranks 2", patient, "pool = %sky_pool --ranks 2", NAMES, view_after=0.2, watched=True
    ) as one:
        yield one


def view(shown: Shown) -> str:
    """The cell's line as it is now; "" where it has none."""
    lines = [
        data["text/plain"] for data in shown.rich if re.match(r"\d+ ranks? · ", data["text/plain"])
    ]
    assert len(lines) <= 1
    return lines[0] if lines else ""


def test_a_loop_moves_the_line_and_one_line_stays(notebook: Notebook) -> None:
    half = gate(notebook)
    cell = notebook.start(
        "%%sky_broadcast -o found -g out\nfor step in range(10):\n    sky.report(step=step, total=10, loss=1 / (step + 1))\n"
        f"    if step == 4:\n        {waiting(half)}\nout = 1\nrank;"
    )
    notebook.watch(cell, lambda shown: "50%" in view(shown))
    assert "loss 0.2" in view(cell)
    assert "left" not in view(cell) or "0:0" in view(cell)
    half.touch()
    notebook.finish(cell)
    assert re.fullmatch(
        r"2 ranks · \d+\.\d s · loss 0\.1 [▁-█]+ · results → `found`, `out`", view(cell)
    )
    (bundle,) = cell.rich
    assert bundle.keys() == {"text/plain", "text/html"}
    assert "<progress" not in bundle["text/html"]
    assert notebook.value("found") == [0, 1]


@pytest.mark.parametrize(
    "loop",
    [
        "for step in range(10):\n    sky.report(step=step, total=10)",
        "from tqdm import tqdm\nfor step in tqdm(range(10), mininterval=0):\n    pass",
    ],
    ids=["report", "bar"],
)
def test_stopped_line_keeps_percent_and_step(notebook: Notebook, loop: str) -> None:
    cell = notebook.start(f"%%sky_broadcast\n{loop}\n    if step == 5: time.sleep(600)")
    notebook.watch(cell, lambda shown: re.search(r"[56]0%", view(shown)) is not None)
    notebook.interrupt()
    notebook.finish(cell)
    # a report comes after a step, a bar moves before one
    assert re.fullmatch(
        r"2 ranks · \d+\.\d s · interrupted · (50%, step 5|60%, step 6) of 10", view(cell)
    )


def test_all_that_was_reported_is_a_table(notebook: Notebook) -> None:
    pytest.importorskip("pandas")
    notebook.run(
        "%%sky_broadcast\nfor step in range(3000):\n    sky.report(step=step, total=3000, number=step + rank)"
    )
    frame = "pool.metrics.dropna(subset=['number'])"
    assert notebook.value(f"{frame}.shape[0]") == 6000
    assert notebook.value(f"{frame}.number.unstack().diff(axis=1)[1].unique().tolist()") == [1]
    assert notebook.value(f"list({frame}.index.names)") == ["step", "rank"]


def test_short_cell_shows_only_its_output(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.view_after = 60")
    cell = notebook.run("%%sky_broadcast -o found\nprint('hello')\nsky.report(loss=1.0)\nrank;")
    notebook.run("%config SkyMagic.view_after = 0.2")
    assert cell.kinds == ["stdout"]


def test_output_of_the_first_moments_stands_below_the_line(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.view_after = 1.0")
    cell = notebook.run(
        "%%sky_broadcast\nfrom IPython.display import display\nprint('first')\ndisplay('rich')\n"
        "print('err', file=sys.stderr)\nfor step in range(15):\n    print('line', step)\n    time.sleep(0.1)"
    )
    notebook.run("%config SkyMagic.view_after = 0.2")
    assert re.fullmatch(r"2 ranks · \d+\.\d s", cell.rich[0]["text/plain"])
    assert cell.kinds == ["display_data", "stdout", "display_data", "stderr", "stdout"]
    lines = cell.lines
    assert lines.index("first") < lines.index("line 0")
    assert lines[-15:] == [f"line {step}" for step in range(15)]


def test_output_of_a_short_cell_has_no_line(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.view_after = 1.0")
    cell = notebook.run("%%sky_broadcast\nprint('hello')\nprint('err', file=sys.stderr)")
    failed = notebook.finish(notebook.start("%%sky_broadcast\nprint('before')\n1 / 0"))
    notebook.run("%config SkyMagic.view_after = 0.2")
    assert (cell.stdout, cell.stderr) == ("hello\n", "err\n")
    assert failed.stdout == "before\n"
    assert failed.failure.ename == "ZeroDivisionError"


def test_shipping_is_one_line_that_its_end_replaces(notebook: Notebook) -> None:
    notebook.run(
        "%config SkyMagic.view_after = 60\nfrom skymagic.display.screen import ShippingProgress\nShippingProgress.DELAY = -1"
    )
    notebook.run("import numpy as np\nrows = np.ones(500_000)")
    shown = notebook.run("%%sky_broadcast\nassert len(rows)")
    notebook.run("%config SkyMagic.view_after = 0.2\nShippingProgress.DELAY = 0.5")
    (line,) = shown.rich
    assert re.fullmatch(r"\[shipped rows \(4\.0 MB\) in \d\.\d s\]", line["text/plain"])
    assert shown.kinds == ["display_data"]


def test_tqdm_moves_the_line_and_leaves_no_bar(notebook: Notebook) -> None:
    pytest.importorskip("tqdm")
    go, half = gate(notebook), gate(notebook)
    cell = notebook.start(
        "%%sky_broadcast\nfrom tqdm import tqdm\nprint('before')\n"
        f"for i in tqdm(range(20), mininterval=0):\n    if i == 3:\n        {waiting(go)}\n    if i == 10:\n        {waiting(half)}"
    )
    notebook.watch(cell, lambda shown: "15%" in view(shown))
    go.touch()
    notebook.watch(cell, lambda shown: "50%" in view(shown))
    half.touch()
    notebook.finish(cell)
    assert sorted(cell.kinds) == ["display_data", "display_data", "stdout"], (
        "the line, and the bar below it"
    )
    assert "20/20" in cell.rich[-1]["text/plain"]
    assert re.fullmatch(r"2 ranks · \d+\.\d s", view(cell))


def test_a_rank_that_fails_is_in_the_line_that_stays(notebook: Notebook) -> None:
    late = gate(notebook)
    cell = notebook.start(
        f"%%sky_broadcast\n{waiting(late)}\nif rank == 1: raise ValueError('no')\ntime.sleep(600)"
    )
    notebook.watch(cell, lambda shown: view(shown) != "")
    late.touch()
    notebook.finish(cell)
    assert cell.error is not None
    assert re.fullmatch(r"2 ranks · \d+\.\d s · rank 1 failed", view(cell))
    assert cell.kinds[-1] == "error"


def test_buttons_work_while_a_cell_blocks_the_main_thread(notebook: Notebook) -> None:
    cell = notebook.start("%%sky_broadcast\ntime.sleep(600)")
    found = buttons(notebook, cell)
    notebook.click(found["where is it?"])
    notebook.watch(
        cell,
        lambda _: any(
            "ranks 0, 1 at line 2" in str(w.get("value")) for w in notebook.widgets.values()
        ),
    )
    notebook.click(found["stop"])
    notebook.finish(cell)
    assert cell.failure.ename == "RunInterrupted"
    assert re.fullmatch(r"2 ranks · \d+\.\d s · interrupted", view(cell))
    assert WIDGETS not in str(cell.rich), "the line that stays is none"
    assert not has_buttons(notebook)
    assert any("s · interrupted" in str(each.get("value")) for each in notebook.widgets.values()), (
        "for a page loaded anew"
    )
    notebook.click(found["stop"])  # too late: the next cell is not stopped
    assert notebook.run("%%sky_broadcast\nprint(rank)").stdout == "0\n"


def test_reopened_page_learns_where_the_full_output_is(
    notebook: Notebook,
) -> None:
    cell = notebook.start("%%sky_broadcast\ntime.sleep(600)")
    found = buttons(notebook, cell)
    notebook.page_opened()
    notebook.click(found["stop"])
    notebook.finish(cell)
    assert re.fullmatch(r".* · interrupted · .*: %sky_logs --cell \d+", view(cell))
    cell = notebook.start("%%sky_broadcast\ntime.sleep(600)")
    notebook.click(buttons(notebook, cell)["stop"])
    notebook.finish(cell)
    assert view(cell).endswith("interrupted"), "the next cell's output is whole"


def test_resource_use_is_shown_for_a_while(notebook: Notebook) -> None:
    def panels() -> list[str]:
        return [
            text
            for each in notebook.widgets.values()
            if "CPU" in (text := str(each.get("value", "")))
        ]

    notebook.run(
        "from skymagic.display import controls\ncontrols.RANKS_INTERVAL, controls.RANKS_SECONDS = 0.1, 1.0"
    )
    cell = notebook.start("%%sky_broadcast\ntime.sleep(600)")
    found = buttons(notebook, cell)
    notebook.click(found["ranks"])
    notebook.watch(cell, lambda _: bool(panels()))
    notebook.watch(cell, lambda _: not panels())  # nobody has pressed again
    notebook.click(found["ranks"])
    notebook.watch(cell, lambda _: bool(panels()))
    notebook.interrupt()
    notebook.finish(cell)
    assert not panels()
    notebook.run("controls.RANKS_INTERVAL, controls.RANKS_SECONDS = 1.0, 600.0")


def test_date_is_only_in_the_final_line(notebook: Notebook) -> None:
    """Without a displayed widget the text moves and has no date; otherwise the text is what is saved during the run."""
    cell = notebook.start("%%sky_broadcast\ntime.sleep(600)")
    lines: dict[str, None] = {}

    def moved(shown: Shown) -> bool:
        lines[view(shown)] = None
        return view(shown).startswith("2 ranks · 0:02")

    notebook.watch(cell, moved)
    assert len(lines) > 2
    assert "as of" not in str(lines)
    buttons(notebook, cell)
    notebook.watch(cell, lambda shown: "as of" in view(shown))
    assert WIDGET_VIEW in str(cell.rich)
    notebook.interrupt()
    notebook.finish(cell)
    assert "as of" not in view(cell)


def test_buttons_that_no_front_end_shows_are_withdrawn(notebook: Notebook) -> None:
    notebook.run("from skymagic.display import controls\ncontrols.DEADLINE = 0.5")
    cell = notebook.start("%%sky_broadcast\ntime.sleep(600)")
    notebook.watch(cell, lambda shown: WIDGET_VIEW in str(shown.rich))
    assert has_buttons(notebook)
    notebook.watch(cell, lambda shown: view(shown).endswith(" · press ■ to stop"))
    assert WIDGETS not in str(cell.rich), "the line moves on as text and HTML"
    notebook.watch(cell, lambda _: not has_buttons(notebook))
    notebook.interrupt()
    notebook.finish(cell)
    notebook.run("controls.DEADLINE = 10.0")
    assert re.fullmatch(r"2 ranks · \d+\.\d s · interrupted", view(cell))


def test_a_line_without_buttons_is_whole_at_every_moment(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.buttons = False")
    cell = notebook.start("%%sky_broadcast\ntime.sleep(600)")
    beside = notebook.start("%%sky_broadcast -a\n1")
    notebook.watch(cell, lambda shown: view(shown).endswith(" · press ■ to stop"))
    notebook.interrupt()
    notebook.finish(cell)
    notebook.finish(beside)
    notebook.run("Out[max(Out)].result()")
    assert re.fullmatch(r"2 ranks · \d+\.\d s · interrupted", view(cell))
    assert not has_buttons(notebook)
    assert WIDGETS not in str([cell.rich, beside.rich])
    notebook.run("%config SkyMagic.buttons = True")


def test_a_script_has_its_line_and_its_button(notebook: Notebook) -> None:
    cell = notebook.start("%%sky_sh\nsleep 600")
    notebook.watch(
        cell, lambda shown: any("1 node · " in data["text/plain"] for data in shown.rich)
    )
    found = buttons(notebook, cell)
    assert list(found) == ["stop"]
    notebook.click(found["stop"])
    notebook.finish(cell)
    assert cell.error is not None
    (line,) = (data["text/plain"] for data in cell.rich)
    assert re.fullmatch(r"1 node · \d+\.\d s · interrupted", line)


def test_a_call_has_its_line(notebook: Notebook) -> None:
    notebook.run(
        "import time\nimport skymagic as sky\n@sky.function\ndef slow():\n    time.sleep(600)"
    )
    cell = notebook.start("slow() @ pool")
    found = buttons(notebook, cell)
    notebook.click(found["stop"])
    notebook.finish(cell)
    assert re.fullmatch(r"2 ranks · \d+\.\d s · interrupted", view(cell))


def test_where_is_it_reacts_before_a_deaf_rank_answers(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.grace = 1.0")
    cell = notebook.start(
        "%%sky_broadcast\nif rank == 1:\n    sum(range(10**12))  # holds the interpreter"
    )
    found = buttons(notebook, cell)

    def is_shown(words: str) -> bool:
        return any(words in str(widget.get("value", "")) for widget in notebook.widgets.values())

    notebook.click(found["where is it?"])
    notebook.watch(cell, lambda _: is_shown("asking the ranks"))
    notebook.watch(cell, lambda _: is_shown("native code holds the interpreter"))
    notebook.click(found["stop"])
    notebook.finish(cell)
    assert cell.failure.ename == "RunInterrupted"
    assert "\nrank 1 did not stop and was killed\n" in cell.failure.evalue
    notebook.run("%config SkyMagic.grace = 30.0")
    notebook.run(NAMES)  # rank 1 is a new one


def test_background_cell_is_inspected_and_keeps_its_metrics(notebook: Notebook) -> None:
    end = gate(notebook)
    cell = notebook.start(
        f"%%sky_broadcast -a\nsky.report(step=4, total=10, loss=0.5)\n{waiting(end)}"
    )
    notebook.finish(cell)
    found = buttons(notebook, cell)

    def said(words: str) -> bool:
        return any(words in str(widget.get("value", "")) for widget in notebook.widgets.values())

    notebook.watch(
        cell, lambda _: said("loss 0.5")
    )  # pressed before, the button would say that it has not begun
    notebook.click(found["where is it?"])
    notebook.watch(cell, lambda _: said("at line 3"))
    end.touch()
    notebook.watch(
        cell, lambda shown: any("done after" in data["text/plain"] for data in shown.rich)
    )
    assert re.search(r"done after \d+\.\d s> · loss 0\.5$", cell.rich[0]["text/plain"])


def test_button_stops_a_background_cell_and_old_lines_are_freed(
    notebook: Notebook,
) -> None:
    notebook.run(
        "from skymagic.display import controls\nkept, controls.KEPT_CONTROLS = controls.KEPT_CONTROLS, 0"
    )
    others = set(notebook.widgets)  # of other tests: some of them show widgets of their own
    cell = notebook.finish(notebook.start("%%sky_broadcast -a\ntime.sleep(600)"))
    notebook.click(buttons(notebook, cell)["stop"])
    notebook.watch(cell, lambda shown: ": stopped after " in shown.rich[0]["text/plain"])
    assert cell.rich[0].keys() == {"text/plain", "text/html"}, "what is saved needs no widgets"
    notebook.watch(cell, lambda _: notebook.widgets.keys() <= others)
    notebook.run("controls.KEPT_CONTROLS = kept")


@pytest.mark.parametrize(
    ("condition", "words"), [("True", "on 2 ranks"), ("rank == 1", "on rank 1")]
)
def test_import_that_takes_long_is_in_the_line(
    notebook: Notebook, condition: str, words: str
) -> None:
    go = gate(notebook)
    package = f"slow_{words[-1]}"
    (notebook.folder / package).mkdir()
    # it stays an import of the package while a part of that is imported
    (notebook.folder / package / "__init__.py").write_text(f"from {package} import part\n")
    (notebook.folder / package / "part.py").write_text(f"import time, os\n{waiting(go)}\n")
    cell = notebook.start(f"%%sky_broadcast\nif {condition}: import {package}\ntime.sleep(600)")
    notebook.watch(cell, lambda shown: f" · importing {package} {words}" in view(shown))
    go.touch()
    notebook.watch(cell, lambda shown: "importing" not in view(shown))
    notebook.interrupt()
    notebook.finish(cell)
    assert "importing" not in view(cell)


def test_short_imports_are_not_in_the_line(notebook: Notebook) -> None:
    cell = notebook.start(
        "%%sky_broadcast\nimport importlib, json\nend = time.monotonic() + 4\n"
        "while time.monotonic() < end: importlib.reload(json)"
    )
    lines: dict[str, None] = {}

    def seen(shown: Shown) -> bool:
        lines[view(shown)] = None
        return view(shown).startswith("2 ranks · 0:03")

    notebook.watch(cell, seen)
    notebook.finish(cell)
    assert "importing" not in str(lines)


def test_a_rank_that_lags_is_in_the_line(notebook: Notebook) -> None:
    end = gate(notebook)
    cell = notebook.start(
        "%%sky_broadcast\nfor step in range(10_000):\n    sky.report(step=step, total=10_000, loss=1.0)\n"
        f"    time.sleep(0.3 if rank else 0.005)\n    if os.path.exists({str(end)!r}): break"
    )
    notebook.watch(cell, lambda shown: "rank 1 is" in view(shown))
    assert re.search(r"rank 1 is \d+ steps behind", view(cell))
    end.touch()
    notebook.finish(cell)
    assert re.search(r"rank 1 was \d+ steps behind$", view(cell))


def test_a_value_that_is_refused_fails_the_cell_at_its_line(
    golden: Golden, notebook: Notebook
) -> None:
    error = notebook.fail("%%sky_broadcast\nsky.report(loss='high')")
    golden(error.evalue)
    assert "line 2" in error.text or "----> 2" in error.text


# ------------------------------------------------------------------------------------------ where nobody looks


def test_unwatched_cell_has_only_a_final_line(tmp_path: Path) -> None:
    kernel = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "%load_ext skymagic\n%config SkyMagic.view_after = 0.1\n%sky_pool --ranks 2"
            ),
            nbformat.v4.new_code_cell(
                "%%sky_broadcast -o r\nimport sys, time\nimport skymagic as sky\n"
                "for step in range(4):\n    print('.', end='', file=sys.stderr)\n    time.sleep(0.1)\n"
                "    sky.report(step=step, total=4)\nstep;"
            ),
            nbformat.v4.new_code_cell("%sky_down"),
        ]
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / ".ipython")}
    NotebookClient(kernel, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute(
        env=env
    )
    outputs = kernel.cells[1].outputs
    *streams, last = outputs
    assert {output.output_type for output in streams} == {"stream"}
    assert "".join(output.text for output in streams) == "...."
    assert re.fullmatch(r"2 ranks · \d+\.\d s · results → `r`", last.data["text/plain"])
    assert WIDGETS not in nbformat.writes(kernel)
    assert "widgets" not in kernel.metadata


def test_cell_that_clears_output_keeps_line_and_buttons(notebook: Notebook) -> None:
    go = gate(notebook)
    cell = notebook.start(
        "%%sky_broadcast\nfrom IPython.display import clear_output, display\nfor step in range(3):\n"
        f"    clear_output(wait=True)\n    display(f'plot {{step}}')\n    if step:\n        {waiting(go)}"
    )
    notebook.watch(cell, lambda shown: view(shown) != "")
    assert "stop" in buttons(notebook, cell)
    go.touch()
    notebook.finish(cell)
    first, last = (data["text/plain"] for data in cell.rich)
    assert re.fullmatch(r"2 ranks · \d+\.\d s", first)
    assert last == "'plot 2'"
