"""One notebook, run in six ways, says the same: by nbconvert, by papermill, by a terminal's IPython, in Notebook 7, by Jupyter's server
without a browser, and by marimo, which has no magics, through IPython's shell; what is saved of it keeps the rules by which GitHub shows notebooks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest

from skymagic.magics import server_note
from tests.docs.test_readme import shape
from tests.lab import browser
from tests.lab.notebook import ROOT, own_folders
from tests.lab.servers import TIMEOUT, needed, server

CELLS = (
    "%load_ext skymagic\n%config SkyMagic.view_after = 0.1\n%sky_pool --ranks 2",
    "%%sky_broadcast -o results\nimport os, time\nimport skymagic as sky\nrank = int(os.environ['RANK'])\n"
    "for step in range(4):\n    time.sleep(0.1)\n    sky.report(step=step, total=4, loss=1 / (step + 1))\n"
    "print('trained')\n{'rank': rank};",
    "%config SkyMagic.view_after = 600\nresults",  # how long the others take depends on the machine
    "%%sky_broadcast --only all -g weights\nweights = list(range(1000))\nprint('rank', rank)",
    "weights",
    "%sky_status",
    "%%sky_broadcast\nif rank == 1:\n    raise ValueError('bad batch')",
    "%sky_down",
)
FAILS = next(number for number, cell in enumerate(CELLS) if "raise" in cell)
IN_TERMINAL = """
import json, sys
from IPython.terminal.interactiveshell import TerminalInteractiveShell
shell = TerminalInteractiveShell.instance(colors="nocolor", simple_prompt=True)
for cell in json.load(sys.stdin):
    shell.run_cell(cell, store_history=True)
    print("\\f", flush=True)
"""
MARIMO = ROOT / "build" / "marimo"
IN_MARIMO = """
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("marimo", run_name="__main__", alter_sys=True)
"""
"""After the environment's own packages: ranks do not see it."""
MARIMO_SHELL = """
@app.cell
def _():
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance(colors="nocolor")
    return (shell,)
"""
MARIMO_CELL = """
@app.cell
def _(shell):
    done = shell.run_cell({}, store_history=True)
    return
"""
LARGEST_BYTES = 100_000
"""Of an output's HTML: GitHub gives up on notebooks of some megabytes."""

Outputs = Sequence[Mapping[str, Any]]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **own_folders(folder), "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def said(outputs: Outputs) -> str:
    """What a cell has shown, as text."""
    parts = []
    for output in outputs:
        kind = output["output_type"]
        parts.append(
            output["text"]
            if kind == "stream"
            else "\n".join(output["traceback"])
            if kind == "error"
            else output["data"]["text/plain"]
        )
    return "\n".join(parts)


def given(folder: Path) -> None:
    """The notebook, written to its file."""
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    cells[FAILS].metadata["tags"] = ["raises-exception"]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "given.ipynb")


def lines(text: str) -> list[str]:
    """Its lines in any order."""
    return sorted(shape(text))


def by_nbconvert(folder: Path) -> list[Outputs]:
    given(folder)
    command = [
        sys.executable,
        "-m",
        "nbconvert",
        "--execute",
        "--to",
        "notebook",
        "--output",
        "saved.ipynb",
        "given.ipynb",
    ]
    subprocess.run(command, check=True, cwd=folder, env=environment(folder), timeout=TIMEOUT)
    return [cell.outputs for cell in nbformat.read(folder / "saved.ipynb", as_version=4).cells]


def in_notebook_7(folder: Path) -> list[Outputs]:
    with browser.opened(folder, CELLS, "notebook") as front:
        for number in range(len(CELLS)):
            front.run(number)
        return [
            cell["outputs"] for cell in nbformat.reads(json.dumps(front.save()), as_version=4).cells
        ]


def by_papermill(folder: Path) -> tuple[nbformat.NotebookNode, str]:
    """The notebook that it saves, and its log: what a person reads while it runs."""
    given(folder)
    command = [
        sys.executable,
        "-m",
        "papermill",
        "--no-progress-bar",
        "--log-output",
        "given.ipynb",
        "done.ipynb",
    ]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=folder, env=environment(folder), timeout=TIMEOUT
    )  # fmt: skip
    assert done.returncode == 1, (
        "a failure is one for papermill, also where a cell says that it raises"
    )
    assert "ValueError: bad batch" in done.stderr
    return nbformat.read(folder / "done.ipynb", as_version=4), done.stderr


def in_terminal(folder: Path) -> list[str]:
    command = [sys.executable, "-c", IN_TERMINAL]
    done = subprocess.run(
        command, input=json.dumps(CELLS), capture_output=True, text=True, cwd=folder, env=environment(folder), timeout=TIMEOUT
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [re.sub(r"Out\[\d+\]:\s", "", text) for text in done.stdout.split("\f\n")]


def by_marimo(folder: Path) -> list[str]:
    cells = MARIMO_SHELL + "".join(
        MARIMO_CELL.replace("done", f"_{n}").format(repr(cell)) for n, cell in enumerate(CELLS)
    )
    (folder / "given.py").write_text(f"import marimo\n\napp = marimo.App()\n{cells}")
    command = [
        sys.executable,
        "-c",
        IN_MARIMO,
        str(MARIMO),
        "export",
        "ipynb",
        "given.py",
        "-o",
        "done.ipynb",
        "--include-outputs",
    ]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        cwd=folder,
        env=environment(folder),
        timeout=TIMEOUT,
    )
    _, *done = nbformat.read(folder / "done.ipynb", as_version=4).cells
    return [re.sub(r"Out\[\d+\]:\s", "", said(cell.outputs)) for cell in done]


def by_server(folder: Path) -> list[Outputs]:
    with server(folder, {**environment(folder), "USER": "ann"}) as served:
        return [served.run(cell) for cell in CELLS]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outputs]]:
    folder = tmp_path_factory.mktemp("saved")
    outputs = by_nbconvert(folder)
    return folder / "saved.ipynb", outputs


def test_terminal_prints_as_a_notebook(saved: tuple[Path, list[Outputs]], tmp_path: Path) -> None:
    for cell, here, there in zip(CELLS, saved[1], in_terminal(tmp_path), strict=False):
        assert lines(there) == lines(said(here)), cell


@pytest.mark.skipif(
    not MARIMO.exists(), reason="marimo is not in build/marimo: make test installs it"
)
def test_marimo_prints_as_a_notebook(saved: tuple[Path, list[Outputs]], tmp_path: Path) -> None:
    for cell, here, there in zip(CELLS, saved[1], by_marimo(tmp_path), strict=True):
        assert lines(there) == lines(said(here)), cell


@pytest.mark.needs("chromium")
def test_notebook_7_prints_as_nbconvert(saved: tuple[Path, list[Outputs]], tmp_path: Path) -> None:
    pytest.importorskip("notebook")
    for cell, here, there in zip(CELLS, saved[1], in_notebook_7(tmp_path), strict=True):
        assert lines(said(there)) == lines(said(here)), cell


def test_server_without_a_browser_prints_as_a_notebook(
    saved: tuple[Path, list[Outputs]], tmp_path: Path
) -> None:
    needed()
    first, *rest = by_server(tmp_path)
    told = [one for one in first if server_note.SERVED in str(one.get("text"))]
    assert len(told) == 1, first
    first = [
        one
        if one is not told[0]
        else {**one, "text": one["text"].replace(f"{server_note.SERVED}\n", "")}
        for one in first
    ]
    for cell, here, there in zip(CELLS, saved[1], [first, *rest], strict=True):
        assert lines(said(there)) == lines(said(here)), cell


def test_papermill_prints_as_a_notebook_and_logs_live(
    saved: tuple[Path, list[Outputs]], tmp_path: Path
) -> None:
    notebook, log = by_papermill(tmp_path)
    cells = [
        cell for cell in notebook.cells if cell.cell_type == "code"
    ]  # beside those that papermill adds
    for cell, here, there in zip(CELLS, saved[1], cells, strict=True):
        assert lines(said(there.outputs)) == lines(said(here)), cell
    assert "widget" not in nbformat.writes(notebook)
    phases = ("starting 2 ranks", "ready in", "trained", "results → `results`", "rank 0", "is down")
    places = [log.find(phase) for phase in phases]
    assert -1 not in places, f"{phases} {places}\n{log}"
    assert places == sorted(places)


class Tags(HTMLParser):
    """The elements of HTML."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")], "a script in an attribute"


def test_saved_html_follows_githubs_rules(saved: tuple[Path, list[Outputs]]) -> None:
    notebook = nbformat.read(saved[0], as_version=4)
    nbformat.validate(notebook)
    widgets = notebook.metadata.get("widgets")
    assert widgets is None or "state" in widgets["application/vnd.jupyter.widget-state+json"]
    bundles = [
        output["data"] for cell in notebook.cells for output in cell.outputs if "data" in output
    ]
    assert len([data for data in bundles if "text/html" in data]) >= 4
    for data in bundles:
        tags = Tags()
        tags.feed(data.get("text/html", ""))
        assert data["text/plain"]
        assert not tags.found & {"script", "style", "iframe", "link", "object", "form"}
        assert len(data.get("text/html", "")) < LARGEST_BYTES
    assert saved[0].stat().st_size < LARGEST_BYTES
