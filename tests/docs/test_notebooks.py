"""The notebooks run as their readers run them: nbclient, nbconvert, papermill; and a failure stops all of these."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

from notebooks import show

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MACHINE = re.compile(
    r"/(?:home|root|Users|work)/|/tmp/tmp\w|\.venv|site-packages|WARNING|[Dd]eprecat"
)
"""What a saved notebook does not say."""
WIDGETS = "application/vnd.jupyter.widget"
IPYKERNEL_ENDS = re.compile(
    r"ERROR:tornado\.general:Uncaught exception in ZMQStream callback\n"
    r".*?_publish_status.*?zmq\.error\.ZMQError: Socket operation on non-socket\n"
    r"|Assertion failed: pfd\.revents & POLLIN \(src/signaler\.cpp:\d+\)\n",
    re.DOTALL,
)
"""A kernel that ends sometimes says "idle" on its control thread after, or while, it closes the socket: ipykernel's, and harmless."""


def environment(folder: Path) -> dict[str, str]:
    """What a person's terminal has, and all warnings."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, "IPYTHONDIR": str(folder / ".ipython"), "PYTHONWARNINGS": "default"}


def call(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run one of Python's modules or scripts in a folder, as a person does in a terminal."""
    env = {**os.environ, **environment(folder)}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=270,
    )


def outputs(notebook: Any) -> list[Any]:
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


def text(notebook: Any) -> str:
    """All that a reader without widgets sees below the cells."""
    found = []
    for output in outputs(notebook):
        found += [output.text] if output.output_type == "stream" else []
        found += [output.data.get("text/plain", "")] if "data" in output else []
        found += output.get("traceback", [])
    return "\n".join(found)


def check_quickstart(path: Path) -> None:
    """The notebook tells a whole story: a loss that falls, a result of both ranks, and the same weights on them."""
    notebook = nbformat.read(path, as_version=4)
    shown = text(notebook)
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", shown)]
    assert len(losses) >= 2
    assert losses[-1] < losses[0]
    assert "'rank': 0" in shown
    assert "'rank': 1" in shown
    sums = re.findall(r"\[\d\] rank \d of 2: sum of weights (\S+)", shown)
    assert len(sums) == 2
    assert len(set(sums)) == 1
    assert "is down" in shown
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert WIDGETS not in path.read_text()


def check_mingpt(path: Path) -> None:
    """torchrun trains on both nodes, and trains on where the first training ended; test_mingpt.py does it on machines of their own."""
    shown = text(nbformat.read(path, as_version=4))
    losses = [
        float(loss)
        for loss in re.findall(r"\[rank 0 on node 0\] epoch \d .* test loss ([\d.]+)", shown)
    ]
    assert len(losses) == 3
    assert losses[2] < losses[0]
    for node in (0, 1):  # in a rendezvous, torchrun's first node need not be the pool's
        assert re.search(
            rf"\[{node}\] \[rank \d on node \d\] resumed from \S+ after epoch 2", shown
        )
    assert shown.count("status=0, stopped=False") == 2


def check_keras(path: Path) -> None:
    """Keras on JAX trains one model on parts of the data: the weights are the same on both ranks, and it has learnt."""
    shown = text(nbformat.read(path, as_version=4))
    assert "jax, 2 devices, 256 pictures" in shown
    assert re.search(r"\d+ weights, the same", shown)
    (right,) = re.findall(r"([\d.]+) % of the test pictures right", shown)
    assert float(right) > 60, "33 in 100 by chance"


def check_kaggle(path: Path) -> None:
    """Both ranks train one model on half of the pictures each, and the model that comes back has learnt."""
    shown = text(nbformat.read(path, as_version=4))
    weights = re.findall(r"'device': '[^']+', 'pictures': 1792, 'weights': (-?[\d.]+)", shown)
    assert len(weights) >= 2
    assert len(set(weights)) == 1
    (right,) = re.findall(r"([\d.]+) % of the pictures that it has not seen are right", shown)
    assert float(right) > 80, "10 in 100 by chance"


CHECKS = {
    "quickstart.ipynb": check_quickstart,
    "kaggle_two_gpus.ipynb": check_kaggle,
    "mingpt_torchrun.ipynb": check_mingpt,
    "keras_training.ipynb": check_keras,
}
"""What a notebook promises besides."""

# ------------------------------------------------------------------------------------------ as they lie there


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_saved_notebooks_are_valid_and_readable(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "widgets" not in notebook.metadata
    assert WIDGETS not in path.read_text()
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert all("text/plain" in output.data for output in outputs(notebook) if "data" in output)
    assert not MACHINE.search(path.read_text()), "nothing of the machine on which it ran"
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), (
        "as it ran, from above to below"
    )
    assert not [cell for cell in code if "execution" in cell.metadata]
    for source in [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]:
        for name in re.findall(r"\]\(([\w./-]+)\)", source):
            assert (path.parent / name).is_file(), name
    first = code[0]
    assert first.source.startswith("%load_ext skymagic")
    assert notebook.cells[0].cell_type == "markdown", "it begins by saying what it is"


def test_the_index_leads_through_all_of_them() -> None:
    first = nbformat.read(ROOT / "notebooks" / "index.ipynb", as_version=4).cells[0].source
    listed = re.findall(r"^\| (\d+) \| \[(\w+)\]\((\w+)\.ipynb\)", first, re.MULTILINE)
    assert [number for number, _, _ in listed] == [
        str(number) for number in range(1, len(listed) + 1)
    ]
    assert all(name == target for _, name, target in listed)
    assert {name for _, name, _ in listed} == {path.stem for path in NOTEBOOKS} - {"index"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_every_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first ones with other tools, the others with notebooks/show.py."""
    needed = nbformat.read(path, as_version=4).metadata.get("skymagic", {}).get("needs", [])
    if missing := [name for name in needed if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    saved = tmp_path / "saved.ipynb"
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    if path.stem == "quickstart":
        words = ("--to", "notebook", "--execute", "--output-dir", ".", "--output", "saved")
        result = call("-m", "nbconvert", *words, path, folder=tmp_path)
        assert result.returncode == 0, result.stdout + result.stderr
    elif path.stem == "index":
        papermill.execute_notebook(path, saved, progress_bar=False, cwd=tmp_path)
    else:
        assert show.execute(path, saved, timeout=250) == 0
        out, err = capfd.readouterr()
        assert IPYKERNEL_ENDS.sub("", err) == ""
        assert re.search("%%sky_(broadcast|sh)", out)
    executed = nbformat.read(saved, as_version=4)
    assert all(cell.execution_count for cell in executed.cells if cell.cell_type == "code")
    assert WIDGETS not in saved.read_text()
    if check := CHECKS.get(path.name):
        check(saved)


# ------------------------------------------------------------------------------------------ failures stop them


def written(folder: Path, *cells: str) -> Path:
    """A notebook of these cells, between loading and a last cell that must not run."""
    sources = ["%load_ext skymagic", *cells, "open('went-on', 'w').close()"]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources],
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
        },
    )
    path = folder / "written.ipynb"
    nbformat.write(notebook, path)
    return path


FAILURES = {
    "%%sky_broadcast\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError('planted')": ["ValueError", "planted", "rank 1 of 2"],
    "%%sky_broadcast\nimport os\nos._exit(3)": ["RankDied", "exit code 3"],
    "%%sky_broadcast -o r\n(i for i in ())": ["ResultError", "generator"],
}  # fmt: skip
"""Cells that fail, and words of the error that each leaves: papermill fails when a notebook has one at its end."""


def failed(folder: Path, *cells: str, tagged: Sequence[str] = ()) -> Any:
    """What papermill saves of a notebook that it fails on; those of its cells that are `tagged` stop nothing before its end."""
    path = written(folder, *cells)
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata["tags"] = ["raises-exception"] * (cell.source in tagged)
    nbformat.write(notebook, path)
    with pytest.raises(papermill.PapermillExecutionError):
        papermill.execute_notebook(path, folder / "done.ipynb", progress_bar=False, cwd=folder)
    return nbformat.read(folder / "done.ipynb", as_version=4)


def test_a_failing_cell_makes_papermill_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    saved = failed(tmp_path, "%sky_pool --nodes 2", *FAILURES, tagged=[*FAILURES])
    for source, words in FAILURES.items():
        (cell,) = (cell for cell in saved.cells if cell.source == source)
        assert [output.output_type for output in cell.outputs].count("error") == 1
        assert not [
            word for word in words if word not in text(nbformat.v4.new_notebook(cells=[cell]))
        ]


def test_a_line_that_is_wrong_makes_papermill_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert "--nodse" in text(failed(tmp_path, "%sky_pool --nodse 2"))
    assert not (tmp_path / "went-on").exists()


def test_a_failing_cell_makes_show_fail_unless_it_is_tagged(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "%sky_pool --nodes 1",
        "%%sky_broadcast\n1 / 0",
        "%%sky_broadcast -o r\n'goes on'",
        "%sky_pull r",
    )
    notebook = json.loads(path.read_text())
    notebook["cells"][2]["metadata"]["tags"] = ["raises-exception"]
    path.write_text(json.dumps(notebook))
    result = call(ROOT / "notebooks" / "show.py", path, "--save", "done.ipynb", folder=tmp_path)
    assert result.returncode == 1
    assert "----> 2 1 / 0" in result.stdout
    assert re.search("ResultError.*: r ", result.stdout), "the cell after the tagged one ran"
    assert not (tmp_path / "went-on").exists()
