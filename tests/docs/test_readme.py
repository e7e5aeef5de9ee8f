"""What the README and the docs show is what happens: their cells run in order in a notebook, their outputs are compared."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.desk import killed, nothing_left
from tests.lab.notebook import ANSI, ROOT, Notebook, opened, own_folders
from tests.lab.pools import KERNEL, Pools

pytest.importorskip("torch")

BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
# Pages with tests of their own: test_containers_page.py, test_offers_page.py, test_plugins_page.py, test_ssh_page.py
ELSEWHERE = {"containers.md", "offers.md", "plugins.md", "ssh.md"}
TESTED = {
    "long-runs.md": {"notebook": "api/test_notebooks.py", "notebook run": "api/test_notebooks.py"},
    "shell.md": {
        **dict.fromkeys(
            ("torchrun", "rendezvous", "accelerate", "trainer", "one process", "deepspeed"),
            "programs/test_launchers.py",
        ),
        **dict.fromkeys(("mingpt", "mingpt-rendezvous"), "docs/test_mingpt.py"),
    },
}
"""Page → mark of a block (``<!-- tested: MARK -->``) → the test that takes it from there."""
HOW_TO = ROOT / "docs" / "how-to"
# They begin with the same pool, and share it
RECIPES = (
    "sweep.md",
    "optuna.md",
    "batch-inference.md",
    "fsdp.md",
    "lora.md",
    "profiling.md",
    "jax.md",
)
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts]
PAGES = [ROOT / "README.md", *(page for page in DOCS if page.name not in {*ELSEWHERE, *RECIPES})]


@dataclass
class Example:
    """A cell, the error that it is to end with, and what the page shows of its output.

    Attributes:
        killed: its kernel is killed when it has shown so much; what follows on the page runs in another one.
        restarted: its kernel is restarted then, as the menu does it.
    """

    source: str
    fails: str = ""
    shown: str = ""
    killed: bool = False
    restarted: bool = False


def examples(page: Path) -> list[Example]:
    """The cells of a page (blocks of kind ``python``), each with the ``text`` block that follows it."""
    found: list[Example] = []
    for block in BLOCK.finditer(page.read_text()):
        mark = block["mark"] or ""
        if mark.startswith("tested: "):  # by a test with the block's files, which `TESTED` names
            continue
        if block["kind"] == "python":
            fails = mark.removeprefix("fails: ") if mark.startswith("fails: ") else ""
            found.append(
                Example(
                    block["text"], fails, killed=mark == "killed", restarted=mark == "restarted"
                )
            )
        elif block["kind"] == "text" and found and mark != "not compared":
            found[-1].shown = block["text"]
    return found


def shape(text: str) -> list[str]:
    """The lines without what differs between runs and machines: numbers, host names, paths, dashes, whether a run has ended yet."""
    lines = [
        re.sub(r"\S*…?/[\w./-]+", "PATH", re.sub(r"on \S+", "on HOST", line.rstrip()))
        for line in ANSI.sub("", text).splitlines()
    ]
    lines = [
        re.sub(r"-[0-9a-f]{8}\b|\d+(\.\d+)?", "0", line).replace(" had ended", " is still running")
        for line in lines
    ]
    return [" ".join(line.split()) for line in lines if line.strip() and not set(line) <= set("- ")]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """One notebook for all recipes, with one pool."""
    with opened(tmp_path_factory.mktemp("recipes")) as notebook:
        yield notebook


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str, recipes: Notebook) -> None:
    for library in re.findall(
        r"^(?:from|import) (optuna|peft|transformers|jax)\b",
        (HOW_TO / name).read_text(),
        re.MULTILINE,
    ):
        pytest.importorskip(library)
    for example in examples(HOW_TO / name):
        follow(recipes, example)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if examples(page)], ids=lambda page: page.name
)
def test_page(page: Path, tmp_path: Path, shared_pools: Pools) -> None:
    """Pages that kill their kernel, and the README, get their own; the others share one that has imported torch."""
    cells = examples(page)
    outlives = any(cell.killed or cell.restarted for cell in cells)
    kernel = opened(tmp_path) if outlives or page.name == "README.md" else shared_pools.lent(KERNEL)
    with (
        nothing_left(own_folders(tmp_path)) if outlives else contextlib.nullcontext(),
        kernel as notebook,
    ):
        for example in cells:
            follow(notebook, example)


def follow(notebook: Notebook, example: Example) -> str:
    """Run a cell, hold what it shows against the page, and tell it."""
    cell = notebook.start(example.source)
    if example.killed or example.restarted:
        notebook.watch(cell, lambda seen: seen.stdout.count("\n") >= example.shown.count("\n"))
        if example.killed:
            killed(notebook)
        notebook.restart()
    else:
        notebook.finish(cell)
    ename = cell.error.ename if cell.error else ""
    assert ename == example.fails, (
        f"{example.source}\n{cell.text}{cell.error.text if cell.error else ''}"
    )
    rich = "\n".join(data.get("text/plain", "") for data in cell.rich)
    shown = cell.text + rich + (cell.error.text if cell.error else "")
    missing = [line for line in shape(example.shown) if line not in shape(shown)]
    assert not missing, f"the page shows {missing}, and the cell showed:\n{shown}"
    return shown


def test_every_page_with_cells_is_run() -> None:
    assert [page.name for page in PAGES if examples(page)][0] == "README.md"


def test_no_block_is_left_out() -> None:
    """Each Python block runs with its page, or belongs to another test."""
    for page in PAGES:
        marks = {block["mark"] or "" for block in BLOCK.finditer(page.read_text())}
        assert "not run" not in marks, page.name
        tested = {mark.removeprefix("tested: ") for mark in marks if mark.startswith("tested: ")}
        assert tested == {*TESTED.get(page.name, ())}, page.name
        for mark, test in TESTED.get(page.name, {}).items():
            source = (ROOT / "tests" / test).read_text()
            assert f"tested: {mark}" in source or page.name in source, mark


def test_each_picture_is_shown_on_a_page_and_small() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in [ROOT / "README.md", *DOCS]
        for target in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
    }
    assert shown == set((ROOT / "docs" / "pictures").iterdir())
    assert all(path.stat().st_size < 150_000 for path in shown)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
