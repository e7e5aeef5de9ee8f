"""Environments other than the one of these tests: without ipywidgets, where all is text and HTML, and with ipykernel's other major version."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import IPython
import pytest

from tests.lab.notebook import ROOT, Notebook, Shown, buttons, has_buttons, opened

WIDGETS = "application/vnd.jupyter.widget"
NO_WIDGETS = '''\
import sys


class Absent:
    """Python's own word for a package that is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ipywidgets", "jupyterlab_widgets", "widgetsnbextension"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())
'''
"""What every Python process of the notebook, and of its ranks, runs first."""


def line(shown: Shown) -> str:
    """The cell's line as it is now; "" where it has none."""
    found = [
        data["text/plain"] for data in shown.rich if re.match(r"\d+ ranks? · ", data["text/plain"])
    ]
    return found[0] if found else ""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook that somebody looks at, in an environment without ipywidgets, with a pool of two ranks."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "early").mkdir()
    (folder / "early" / "sitecustomize.py").write_text(NO_WIDGETS)
    env = {"PYTHONPATH": os.pathsep.join([str(folder / "early"), str(ROOT)])}
    with opened(folder, env=env, view_after=0.2, watched=True) as notebook:
        assert "No module named 'ipywidgets'" in notebook.fail("import ipywidgets").text
        yield notebook


def test_without_ipywidgets_a_pool_starts_and_is_shown(without: Notebook) -> None:
    start, pool = without.run("pool = %sky_pool --ranks 2\npool").rich
    assert "ready in" in start["text/html"]
    assert pool["text/html"].count(": ready") == 2
    assert "No module named 'ipywidgets'" in without.fail("%%sky_broadcast\nimport ipywidgets").text


def test_without_ipywidgets_the_line_moves_and_hints_at_stop(
    without: Notebook,
) -> None:
    cell = without.start(
        "%%sky_broadcast -o found\nimport time\nimport skymagic as sky\nfrom tqdm.auto import tqdm\n"
        "for step in tqdm(range(4)):\n    sky.report(step=step, total=4, loss=1 / (step + 1))\ntime.sleep(600)"
    )
    without.watch(cell, lambda shown: "loss 0.25" in line(shown))
    assert line(cell).endswith(" · press ■ to stop")
    without.interrupt()
    without.finish(cell)
    assert re.fullmatch(
        r"2 ranks · \d+\.\d s · interrupted · (?:\d+%, )?step \d+.* · loss 0\.25.*", line(cell)
    )
    assert cell.kinds[-1] == "error"
    assert WIDGETS not in str(cell.rich)


def test_without_ipywidgets_status_and_background_cells_work(without: Notebook) -> None:
    (status,) = without.run("%sky_status").rich
    assert "<details>" in status["text/html"]
    assert "rank 0 of 2" in without.fail("%%sky_broadcast\n1 / 0").text
    beside = without.run("%%sky_broadcast -a\nimport time\ntime.sleep(600)")
    without.watch(beside, lambda shown: ": running" in shown.rich[0]["text/plain"])
    without.run("_.cancel()")
    without.watch(beside, lambda shown: ": stopped after" in shown.rich[0]["text/plain"])
    assert not without.widgets


# ------------------------------------------------------------------------------------------ ipykernel's other major version

INSTALLED = int(metadata.version("ipykernel").partition(".")[0])
OTHER = {6: ("ipykernel>=7,<8",), 7: ("ipykernel>=6.29,<7", "nest-asyncio>=1.4")}
"""Of the two that are supported, the one that these tests do not run with, by the one that they do: with what it alone needs."""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook that somebody looks at, whose kernel and ranks have the other ipykernel, with a pool of two ranks."""
    if IPython.version_info < (8,):
        pytest.skip("ipykernel 7 needs jupyter_client 8, which is not installed beside IPython 7")
    folder = tmp_path_factory.mktemp("other")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
    ]
    got = subprocess.run(
        [*pip, "--target", str(folder / "packages"), *OTHER[INSTALLED]],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if got.returncode:
        absent = f"{OTHER[INSTALLED][0]} could not be installed from an index: {got.stderr.strip().splitlines()[-1]}"
        pytest.fail(absent) if os.environ.get("CI", "").lower() in ("1", "true") else pytest.skip(
            absent
        )
    env = {"PYTHONPATH": os.pathsep.join([str(folder / "packages"), str(ROOT)])}
    with opened(folder, "%sky_pool --ranks 2", env=env, view_after=0.2, watched=True) as notebook:
        yield notebook


def test_the_quickstart_runs_with_the_other_ipykernel(other: Notebook) -> None:
    version = "__import__('ipykernel').version_info[0]"
    assert other.value(version) == {6: 7, 7: 6}[INSTALLED]
    other.run("import numpy as np\ntable = np.arange(8.0).reshape(4, 2)\nimport ipykernel, os")
    other.run(
        "%%sky_broadcast -o found -g part\nimport skymagic as sky\nrank = int(os.environ['RANK'])\n"
        "part = sky.shard(table)\n(rank, ipykernel.version_info[0], float(part.sum()));"
    )
    assert other.value("found") == [
        (0, other.value(version), 10.0),
        (1, other.value(version), 18.0),
    ]
    assert other.value("[each.shape for each in part]") == [(2, 2), (2, 2)]
    assert other.run("%%sky_broadcast --only all\nprint('rank', rank)").text.count("rank") == 2
    assert "----> 2 1 / (1 - rank)" in other.fail("%%sky_broadcast\n1 / (1 - rank)").text
    figure = other.run(
        "%%sky_broadcast\nimport matplotlib.pyplot as plt\nplt.plot([4, 2, 1]);"
    ).rich
    assert "image/png" in figure[-1]


def test_toolbar_button_stops_a_cell_with_other_ipykernel(other: Notebook) -> None:
    cell = other.start("%%sky_broadcast\nimport time\ntime.sleep(600)")
    other.watch(cell, lambda shown: line(shown) != "")
    other.interrupt()
    assert other.finish(cell).error is not None
    assert "interrupted" in line(cell)
    assert other.run("%%sky_broadcast\nprint('on')").stdout == "on\n"


def test_buttons_work_with_the_other_ipykernel(other: Notebook) -> None:
    cell = other.start("%%sky_broadcast\ntime.sleep(600)")
    found = buttons(other, cell)
    other.click(found["where is it?"])
    other.watch(
        cell,
        lambda _: any("ranks 0, 1 at line 2" in w.get("value", "") for w in other.widgets.values()),
    )
    other.click(found["stop"])
    other.finish(cell)
    assert cell.failure.ename == "RunInterrupted"
    assert not has_buttons(other)
    other.click(found["stop"])  # too late: the next cell is not stopped
    assert other.run("%%sky_broadcast -o found\nrank").error is None


def test_other_ipykernel_restarts(other: Notebook) -> None:
    other.restart()
    other.run("%load_ext skymagic\n%sky_pool --ranks 2")
    assert other.run("%%sky_broadcast\nprint('anew')").stdout == "anew\n"
