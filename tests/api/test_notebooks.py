"""A whole notebook as a job on a pool's head: begun, left, followed, stopped, taken, and refused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import psutil
import pytest

from skymagic.plan import parameters
from tests.lab.desk import Desk, nothing_left
from tests.lab.hosts import loopback, still_there
from tests.lab.notebook import ROOT, opened
from tests.lab.places import home_that_knows
from tests.lab.shells import pip_settings
from tests.lab.waiting import says

LOAD = "%load_ext skymagic\n%config SkyMagic.view_after = 600"
"""No line with the time that a cell took."""
CELLS = [
    LOAD,
    "epochs, gate = 1, ''",
    "print('epochs', epochs)",
    "%%sky_broadcast -o losses --only all\nimport os, time\nrank = int(os.environ['RANK'])\nfor epoch in range(epochs):\n"
    "    print('epoch', epoch, flush=True)\n    while epoch == 1 and gate and not os.path.exists(gate): time.sleep(0.02)\n"
    "rank / epochs;",
    "losses",
    "from IPython.display import display\nshown = display('before', display_id=True)\nshown.update('after')",
]


def written(folder: Path, *cells: str, name: str = "train.ipynb") -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    if len(cells) > 1:
        notebook.cells[1].metadata["tags"] = ["parameters"]
    path = folder / name
    nbformat.write(notebook, path)
    return path


def said(path: Path) -> list[list[str]]:
    """What each code cell of an executed notebook shows: lines in order of the alphabet, for ranks write as they come; data; errors' names."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    found = []
    for cell in notebook.cells:
        text = "".join(one.text for one in cell.outputs if one.output_type == "stream")
        rich = [
            one.data["text/plain"] if "data" in one else one.ename
            for one in cell.outputs
            if one.output_type != "stream"
        ]
        found.append([*sorted(text.splitlines()), *rich])
    return found


HERE = pytest.mark.parametrize("desk", ["local"], indirect=True)


@pytest.fixture(
    scope="module", params=["local", pytest.param("ssh", marks=pytest.mark.needs("sshd"))]
)
def desk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("notebooks")
    name = f"lab{os.urandom(4).hex()}"
    env = {"XDG_STATE_HOME": str(folder / "state"), "IPYTHONDIR": str(folder / ".ipython")}
    if request.param == "local":
        made = f"%sky_pool {name} --ranks 2 --detached"
        with left(folder, env, made):
            yield Desk(folder, made, env)
        return
    with loopback(folder / "hosts", 2, env=pip_settings()) as hosts:
        env["HOME"] = str(home_that_knows(hosts, folder / "client"))
        made = f"%sky_pool {name} --provider ssh --hosts h[1-2] --python {sys.executable}"
        with left(folder, env, made):
            yield Desk(folder, made, env)


@contextmanager
def left(folder: Path, env: dict[str, str], made: str) -> Iterator[None]:
    """A pool whose notebook was killed; another attaches to it at the end, unless it has ended."""
    for name in ("first", "last"):
        (folder / name).mkdir()
    with nothing_left(env):
        with opened(folder / "first", made, env=env) as notebook:
            process = psutil.Process(notebook.pid)
            process.kill()
            assert still_there([process]) == []
        yield
        name = made.split()[1]
        with opened(folder / "last", env=env) as notebook:
            if f"{name} (" in notebook.run("%sky_attach").stdout:
                desk = Desk(folder, made, env)
                assert (
                    desk.ran("run", written(folder, "print(6 * 7)"), "--pool", name, "--detach")[0]
                    == 0
                )
                shown = notebook.run(f"%sky_attach {name}")
                assert "42" in shown.stdout.splitlines()
                assert "train.ipynb has finished" in shown.text
                notebook.run(f"%sky_attach {name}")
                notebook.run("%%sky_broadcast -o kept\nrank")  # what the job has left on the ranks
                assert notebook.value("kept") == [0, 1]
                notebook.run(f"%sky_down {name}")


def test_it_goes_on_without_its_client(desk: Desk) -> None:
    notebook = written(desk.folder, *CELLS)
    undisturbed = desk.folder / "undisturbed.ipynb"
    code, out, err = desk.ran(
        "run", notebook, "--pool", desk.pool, "-p", "epochs", 3, "-o", undisturbed
    )
    assert code == 0, err
    assert "has finished" in err
    assert {"epochs 3", "[0] epoch 2", "[1] epoch 2"} <= {*out.splitlines()}
    gate = desk.folder / "gate"
    line = ("run", notebook, "--pool", desk.pool, "-p", "epochs", 3, "-p", "gate", gate, "--json")
    first = desk.program(*line)
    says(first, "epoch 1")
    first.kill()
    first.communicate()
    code, out, err = desk.ran("run", notebook, "--pool", desk.pool)
    assert code == 2
    assert f"skymagic attach {desk.pool}" in err
    second = desk.program("attach", desk.pool)
    says(second, "epoch 1")
    second.send_signal(signal.SIGINT)
    out, err = second.communicate(timeout=60)
    assert (second.returncode, f"skymagic attach {desk.pool}" in err) == (130, True)
    gate.write_text("")
    code, out, err = desk.ran("attach", desk.pool)
    assert code == 0, err
    executed, expected = said(desk.folder / "train.executed.ipynb"), said(undisturbed)
    lines = sorted(f"[{rank}] epoch {epoch}" for rank in (0, 1) for epoch in range(3))
    assert (
        executed[3:]
        == expected[3:]
        == [["epochs 3"], lines, ["[0.0, 0.3333333333333333]"], ["'after'"]]
    )


@HERE
def test_a_failed_cell(desk: Desk) -> None:
    notebook = written(
        desk.folder, LOAD, "kept = 1", "%%sky_broadcast\n1 / 0", "never", name="fails.ipynb"
    )
    process = desk.program("run", notebook, "--pool", desk.pool, "--detach")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, ""), out
    code, out, err = desk.ran("attach", desk.pool)
    assert code == 3
    assert "ZeroDivisionError" in err
    assert said(desk.folder / "fails.executed.ipynb") == [[], [], ["ZeroDivisionError"], []]
    code, _, err = desk.ran("attach", desk.pool)
    assert (code, err) == (0, f"[nothing runs on pool {desk.pool!r}]\n")


def test_stopped(desk: Desk) -> None:
    notebook = written(
        desk.folder, "import time\nprint('at work', flush=True)\ntime.sleep(600)", name="long.ipynb"
    )
    process = desk.program("run", notebook, "--pool", desk.pool)
    says(process, "at work")
    assert desk.ran("cancel", desk.pool, "--json")[0] == 0
    process.communicate(timeout=60)
    assert process.returncode == 4
    assert said(desk.folder / "long.executed.ipynb") == [["at work", "KeyboardInterrupt"]]
    assert desk.ran("stop", desk.pool)[0] == 1


@HERE
def test_the_page(desk: Desk) -> None:
    page = (ROOT / "docs" / "how-to" / "long-runs.md").read_text()
    notebook = written(
        desk.folder,
        *re.findall(r"<!-- tested: notebook -->\n```python\n(.*?)\n```", page, re.DOTALL),
    )
    (expected,) = re.findall(r"<!-- tested: notebook run -->\n```text\n(.*?)```", page, re.DOTALL)
    (line,) = re.findall(r"^\$ skymagic (run .*)$", page, re.MULTILINE)
    code, out, err = desk.ran(*line.replace("lab", desk.pool).split())
    assert code == 0, err
    lines = [
        *out.splitlines(),
        *err.replace(f"{notebook.parent}/", "").replace(socket.gethostname(), "gpu1").splitlines(),
    ]
    assert sorted(expected.splitlines()) == sorted(
        one for one in lines if " ranks · " not in one and one.strip()
    )


@HERE
def test_its_pool_is_ended(desk: Desk) -> None:
    notebook = written(
        desk.folder, "import time\nprint('at work', flush=True)\ntime.sleep(600)", name="lost.ipynb"
    )
    process = desk.program("run", notebook, "--pool", desk.pool, "--json")
    says(process, "at work")
    assert desk.ran("down", desk.pool)[0] == 0
    out, _ = process.communicate(timeout=60)
    end = json.loads(out.splitlines()[-1])
    assert (process.returncode, end["status"], end["problem"]) == (5, "lost", "the pool has ended")
    assert said(desk.folder / "lost.executed.ipynb") == [["at work", "KeyboardInterrupt"]]


def test_refused_before_anything_starts(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "%sky_pool gone")
    (tmp_path / "text.ipynb").write_text("no notebook")
    (tmp_path / "notes.ipynb").write_text(json.dumps({"cells": {}, "nbformat": 5}))
    for name, words in {
        "none.ipynb": "No such file",
        "text.ipynb": "is not a notebook",
        "notes.ipynb": "is not a notebook",
    }.items():
        code, out, err = desk.ran(
            "run",
            name,
            "--pool",
            "gone",
            "-o",
            tmp_path / "nowhere" / "out.ipynb",
            "--workdir",
            "none",
        )
        assert (code, out) == (2, "")
        for part in (
            words,
            "there is no folder",
            "there is no folder 'none' here",
            "no pool 'gone' was left from here",
        ):
            assert part in err
    code, out, err = desk.ran(
        "run", written(tmp_path, "1", "epochs = 1"), "-p", "epoch", 3, "-p", "seed", 1
    )
    assert (code, out) == (2, "")
    assert "-p epoch: the cell tagged 'parameters' sets no such name; did you mean 'epochs'?" in err
    assert "-p seed: the cell tagged 'parameters' sets no such name; it sets epochs" in err
    assert "choose a pool" in err


def test_parameters() -> None:
    typed = {"3": 3, "1e-3": 0.001, "True": True, "None": None, "abc": "abc", "1_000": 1000, "": ""}
    assert {text: parameters.value(text) for text in typed} == typed
    cells = [{"cell_type": "code", "metadata": {}, "source": ["a = 1\n", "b = 2"]}]
    notebook = {"cells": cells, "nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    assert "no cell of the notebook is tagged" in parameters.mistakes(notebook, ["a"])[0]
    cells[0]["metadata"] = {"tags": ["parameters"]}
    assert parameters.mistakes(notebook, ["a", "b"]) == []
    once = parameters.injected(notebook, {"a": float("inf"), "b": "it's"})
    assert [one["source"] for one in once["cells"][1:]] == [
        "# Parameters\na = float('inf')\nb = \"it's\""
    ]
    assert (
        len(parameters.injected(once, {"a": 1})["cells"]) == 2
    )  # takes the place of the one before
    assert notebook["cells"] == cells
