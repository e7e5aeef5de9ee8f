"""What a cell shows while it runs and when it is over: open lines of several ranks, bars and widgets, shipping, tracebacks."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import ipywidgets
import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Failed, Notebook, Shown
from tests.lab.pools import borrowed

HOST = socket.gethostname()
SETUP = "%%sky_broadcast\nimport os, sys, time\nrank = int(os.environ['RANK']);"

notebook = borrowed("--ranks 2", "import sys", SETUP)


def gate(notebook: Notebook) -> Path:
    """A file that cells wait for."""
    return notebook.folder / f"gate-{os.urandom(4).hex()}"


def waiting(gate: Path) -> str:
    """Code of a cell that waits until the gate is there."""
    return f"while not os.path.exists({str(gate)!r}): time.sleep(0.01)"


def plain(shown: Shown) -> list[str]:
    """Lines of what was displayed as text."""
    return "\n".join(data["text/plain"] for data in shown.rich).splitlines()


# ------------------------------------------------------------------------------------------ open lines of several ranks


def test_dots_of_several_ranks_are_shown_live(notebook: Notebook) -> None:
    first, second = gate(notebook), gate(notebook)
    shown = notebook.start(
        f"%%sky_broadcast --only all\nprint('dots ..', end='')\n{waiting(first)}\n"
        f"print('..', end='')\n{waiting(second)}\nprint(' done')\nprint('next')"
    )
    notebook.watch(shown, lambda cell: plain(cell) == ["[0] dots ..", "[1] dots .."])
    first.touch()
    notebook.watch(shown, lambda cell: plain(cell) == ["[0] dots ....", "[1] dots ...."])
    assert not shown.done
    second.touch()
    notebook.finish(shown)
    assert plain(shown) == ["[0] dots .... done", "[1] dots .... done"]
    assert sorted(shown.lines) == ["[0] next", "[1] next"]
    assert shown.kinds == ["display_data", "stdout"]


def test_bars_of_several_ranks_move_in_their_place(notebook: Notebook) -> None:
    half = gate(notebook)
    shown = notebook.start(
        "%%sky_broadcast --only 0,1\nfrom tqdm import tqdm\n"
        f"for i in tqdm(range(8), desc='train', mininterval=0):\n    if i == 4:\n        {waiting(half)}"
    )
    notebook.watch(
        shown,
        lambda cell: len(plain(cell)) == 2 and all("train:  50%" in line for line in plain(cell)),
    )
    assert [line[:10] for line in plain(shown)] == ["[0] train:", "[1] train:"]
    half.touch()
    notebook.finish(shown)
    assert [line[:16] for line in plain(shown)] == ["[0] train: 100%|", "[1] train: 100%|"]
    assert shown.text == "", "what has moved is said once"


def test_nested_bars_of_several_ranks(notebook: Notebook) -> None:
    gates = [gate(notebook), gate(notebook)]
    shown = notebook.start(
        "%%sky_broadcast --only all\nfrom tqdm import tqdm\n"
        "for epoch in tqdm(range(2), desc='epochs', mininterval=0):\n"
        "    for i in tqdm(range(50), desc='steps', leave=False, mininterval=0):\n"
        f"        if i == 25:\n            while not os.path.exists({[str(one) for one in gates]!r}[epoch]): time.sleep(0.01)\n"
        "    print('loss', epoch)"
    )
    for number, one in enumerate(gates):
        notebook.watch(
            shown,
            lambda cell, n=number: sum("steps:  50%" in line for line in plain(cell)) == 2,  # type: ignore[misc]
        )
        assert [line[:11] for line in plain(shown)] == ["[0] steps: ", "[1] steps: "]
        one.touch()
    notebook.finish(shown)
    assert [line[:17] for line in plain(shown)] == ["[0] epochs: 100%|", "[1] epochs: 100%|"]
    assert sorted(shown.lines) == ["[0] loss 0", "[0] loss 1", "[1] loss 0", "[1] loss 1"]
    assert shown.stderr == ""


def test_rich_bars_are_shown_once_below_prints(notebook: Notebook) -> None:
    pytest.importorskip("rich")
    shown = notebook.run(
        "%%sky_broadcast --only all\nfrom rich.progress import Progress\n"
        "with Progress('{task.description} {task.percentage:.0f}%') as bars:\n"
        "    outer, inner = bars.add_task('outer', total=2), bars.add_task('inner', total=20)\n"
        "    for epoch in range(2):\n        bars.reset(inner)\n"
        "        for _ in range(20):\n            time.sleep(0.02); bars.update(inner, advance=1)\n"
        "        bars.update(outer, advance=1); bars.console.out('loss', epoch, highlight=False)\n"
        "print('over')"
    )
    for rank in (0, 1):
        lines = [line for line in shown.lines if line.startswith(f"[{rank}]")]
        texts = [line.removeprefix(f"[{rank}]").strip() for line in lines]
        assert [text for text in texts if text] == [  # rich may end with an empty line
            *("loss 0", "loss 1", "outer 100%", "inner 100%", "over")
        ]


def test_epoch_bars_stay_above_later_output(notebook: Notebook) -> None:
    gates = [gate(notebook), gate(notebook)]
    shown = notebook.start(
        "%%sky_broadcast --only all\nfrom tqdm import tqdm\nfor epoch in range(2):\n"
        "    for i in tqdm(range(4), desc=f'epoch {epoch}', mininterval=0):\n"
        f"        while not os.path.exists({[str(one) for one in gates]!r}[epoch]): time.sleep(0.01)\n"
        "    print('loss', epoch)"
    )
    for number, one in enumerate(gates):
        notebook.watch(
            shown,
            lambda cell, n=number: sum(f"epoch {n}:   0%" in line for line in plain(cell)) == 2,  # type: ignore[misc]
        )
        one.touch()
    notebook.finish(shown)
    assert [line[:17] for line in plain(shown)] == [
        f"[{rank}] epoch {epoch}: 100%" for epoch in (0, 1) for rank in (0, 1)
    ]
    assert shown.kinds == ["display_data", "stdout", "display_data", "stdout"]


def test_lines_that_end_at_once_are_plain_text(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast --only all\nfor i in range(50):\n    print(i, end=' ')\n    print('whole')"
    )
    assert set(shown.kinds) == {"stdout"}
    assert len(shown.lines) == 100


# ------------------------------------------------------------------------------------------ tracebacks


def frames(error: Failed) -> list[str]:
    """The headings of a traceback's frames."""
    return [line for line in error.text.splitlines() if line.startswith(("Cell In", "File "))]


def number_of(notebook: Notebook) -> int:
    """The number of the cell that runs next."""
    return int(notebook.value("get_ipython().execution_count"))


def test_code_of_a_notebook_cell_is_shown_as_that_cell(notebook: Notebook) -> None:
    defined = number_of(notebook)
    notebook.run(
        "class Net:\n    def forward(self, x):\n        return self.divide(x)\n\n    def divide(self, x):\n        return 1 / x"
    )
    error = notebook.fail("%%sky_broadcast\nNet().forward(0)")
    assert frames(error) == [
        f"Cell In[{defined + 1}], line 2",
        f"Cell In[{defined}], line 3, in Net.forward(self, x)",
        f"Cell In[{defined}], line 6, in Net.divide(self, x)",
    ]
    assert re.search(r"^-+> 6 +return 1 / x$", error.text, re.MULTILINE)


def test_a_generator_expression_shows_its_own_line(notebook: Notebook) -> None:
    error = notebook.fail(
        "%%sky_broadcast\nitems = [1, 0]\ntotal = sum(\n    1 / item\n    for item in items\n)"
    )
    outer, inner = error.text.split("Cell In")[1:]
    assert "----> 3 total = sum(" in outer
    assert "----> 4     1 / item" in inner
    assert "# %%sky_broadcast" not in inner.partition("----> ")[2]


def test_each_chained_exception_shows_its_line(notebook: Notebook) -> None:
    error = notebook.fail(
        "%%sky_broadcast\ntry:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e"
    )
    assert "----> 3     {}['a']" in error.text
    assert "----> 5     raise ValueError('b') from e" in error.text


@pytest.mark.parametrize(
    "body",
    [
        "import skymagic as sky\nsky.shard(5)",
        "import skymagic as sky\nf = sky.silent(lambda: 1 / 0)\nf()",
        "input('?')",
        "import skymagic as sky\ntry:\n    sky.shard(5)\nexcept TypeError as e:\n    raise ValueError('b') from e",
        "import skymagic as sky\ntry:\n    sky.shard(5)\nexcept TypeError as e:\n    raise ExceptionGroup('many', [e])",
        "%time 1 / 0",
    ],
)
def test_no_frame_of_the_product_is_shown(notebook: Notebook, body: str) -> None:
    error = notebook.fail(f"%%sky_broadcast\n{body}")
    shown = error.text.replace("import skymagic as sky", "")
    assert "Cell In" in shown
    assert not [
        line
        for line in shown.splitlines()
        if "skymagic" in line or "ipykernel" in line or "IPython/" in line
    ]


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_call_of_a_function_shows_the_functions_own_lines(notebook: Notebook, kind: str) -> None:
    defined = number_of(notebook)
    notebook.run(
        f"import skymagic as sky\n@sky.function\n{kind} ratio(x):\n    print('called')\n    return 1 / x"
    )
    error = notebook.fail("ratio(0) @ sky.find('main')")
    assert frames(error) == [f"Cell In[{defined}], line 5, in ratio(x)"]
    assert "_sky" not in error.text
    called = number_of(
        notebook
    )  # of a call that fails, a rank may be stopped before it has printed anything
    notebook.run("ratio(1) @ sky.find('main')")
    assert f"── cell {called}, " in notebook.run("%sky_logs --rank 1 -n 2").stdout


def test_torchs_call_wrappers_fold(notebook: Notebook) -> None:
    body = "import torch\nnet = torch.nn.Sequential(torch.nn.Linear(2, 2))\nnet(torch.ones(3, 3))"
    error = notebook.fail(f"%%sky_broadcast -t 0\n{body}")
    assert [line.rpartition("in ")[2] for line in frames(error)[1:]] == [
        "Linear.forward(self, input)"
    ]


def test_of_libraries_the_frame_that_raised_is_shown_alone(
    golden: Golden, notebook: Notebook
) -> None:
    called = number_of(notebook)
    error = notebook.fail("%%sky_broadcast -t 0\nimport json\njson.loads('{')")
    cell, raised = frames(error)
    assert cell == f"Cell In[{called}], line 3"
    assert re.search(r"json/decoder\.py:\d+, in JSONDecoder\.raw_decode", raised)
    *_, hidden, last = error.text.splitlines()
    golden(hidden)
    assert last.startswith("JSONDecodeError: ")
    error = notebook.fail(
        "%%sky_broadcast -t 0\ndef mine(value):\n    return 1 / 0\njson.dumps({1}, default=mine)"
    )
    assert frames(error) == [
        f"Cell In[{called + 1}], line 4",
        f"Cell In[{called + 1}], line 3, in mine(value)",
    ]
    golden.line(error.text, "; %debug ", hide=[r"\d+ frames?"])


# ------------------------------------------------------------------------------------------ shipping


def test_unwatched_shipping_is_reported_once(notebook: Notebook) -> None:
    notebook.run(
        "from skymagic.display.screen import ShippingProgress\nbefore, ShippingProgress.DELAY = ShippingProgress.DELAY, -1"
    )
    notebook.run(
        "import numpy as np\nrows = np.ones(500_000)\ncolumns = [np.zeros(100_000), rows[:10].copy()]\nlittle = [1, 2]"
    )
    shown = notebook.run("%%sky_broadcast\nassert len(columns) + len(rows) + len(little)")
    again = notebook.run("%%sky_broadcast\nassert len(columns) + len(rows) + len(little)")
    notebook.run("ShippingProgress.DELAY = before")
    [line] = shown.lines
    assert re.fullmatch(
        r"\[shipped rows \(4\.0 MB\), columns \(800\.\d KB\) and 1 more in \d\.\d s\]", line
    )
    assert shown.kinds == ["stdout"]
    assert again.outputs == []


# ------------------------------------------------------------------------------------------ widgets of ranks


def test_a_notebook_bar_moves_and_ends(notebook: Notebook) -> None:
    half = gate(notebook)
    shown = notebook.start(
        "%%sky_broadcast\nfrom tqdm.notebook import tqdm\n"
        f"for i in tqdm(range(8), desc='train', mininterval=0):\n    if i == 4:\n        {waiting(half)}"
    )
    notebook.watch(shown, lambda cell: any(line.startswith("train:  50%|") for line in plain(cell)))
    half.touch()
    notebook.finish(shown)
    [line] = plain(shown)
    assert line.startswith("train: 100%|██████████| 8/8")
    assert shown.kinds == ["display_data"]


def test_nested_notebook_bars_of_several_ranks(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast --only all\nfrom tqdm.notebook import trange\nfor epoch in trange(2, desc='epochs'):\n"
        "    for i in trange(3, desc='steps', leave=False):\n        pass"
    )
    kept = [line for line in shown.said.splitlines() if line.strip("[01] ")]
    assert sorted(line[:16] for line in kept) == ["[0] epochs: 100%", "[1] epochs: 100%"]


def test_notebook_bars_that_follow_each_other_end_full(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\nfrom tqdm.notebook import tqdm\nfor epoch in range(3):\n"
        "    for i in tqdm(range(20), desc=f'epoch {epoch}'):\n        time.sleep(0.01)\n    print('loss', epoch)"
    )
    kept = [line for line in shown.said.splitlines() if line]
    assert [line[:15] for line in kept] == [
        words for epoch in range(3) for words in (f"epoch {epoch}: 100%|█", f"loss {epoch}")
    ]
    assert all("| 20/20 [" in line for line in kept[::2])


def test_notebook_bar_accepts_its_own_options(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\nfrom tqdm.notebook import tqdm, tnrange, tqdm_notebook\n"
        "bar = tqdm_notebook(tnrange(3, leave=False), desc='all', ncols='100%', display=False, colour='red')\n"
        "for _ in bar:\n    bar.set_postfix(loss=1)\nbar.close()"
    )
    assert re.search(r"all: +100%.* 3/3 .*loss=1", shown.said)


def test_widget_is_shown_once_as_its_text(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\nimport ipywidgets\nbar = ipywidgets.IntProgress(value=2, max=4)\ndisplay(bar)\nbar.value = 3"
    )
    assert plain(shown) == ["IntProgress(value=2, max=4)"]
    assert [kind for kind, _, _ in shown.messages if "display" in kind] == ["display_data"]


@pytest.mark.skipif(
    ipywidgets.__version__ < "8", reason="ipywidgets 7 displays widgets without their HTML"
)
def test_widget_with_html_is_shown_as_html(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\nimport ipywidgets\nclass Chart(ipywidgets.IntSlider):\n"
        "    def _repr_mimebundle_(self, **options):\n"
        "        return super()._repr_mimebundle_(**options) | {'text/html': '<b>3</b>'}\nChart(3)"
    )
    [data] = shown.rich
    assert data == {"text/plain": "Chart(value=3)", "text/html": "<b>3</b>"}
