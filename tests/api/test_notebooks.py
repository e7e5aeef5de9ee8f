"""Notebook jobs: papermill on a pool's head, started, left, followed, stopped, fetched and refused."""

from __future__ import annotations

import json
import os
import re
import signal
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
    for cell in (one for one in notebook.cells if one.cell_type == "code"):
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
                long = written(
                    folder,
                    LOAD,
                    "%%sky_broadcast\nimport os\nrank = int(os.environ['RANK'])",
                    "print(6 * 7)\nimport time\nprint('at work', flush=True)\ntime.sleep(600)",
                )
                assert desk.ran("run", long, "--pool", name, "--detach")[0] == 0
                shown = notebook.start(f"%sky_logs --pool {name} --follow")
                notebook.watch(shown, lambda seen: "at work" in seen.stdout)
                assert desk.ran("cancel", name)[0] == 0
                shown = notebook.finish(shown)
                assert "42" in shown.stdout.splitlines()
                assert "[train.ipynb was stopped]" in shown.stdout
                notebook.run(f"%sky_attach {name}")
                notebook.run("%%sky_broadcast -o kept\nrank")  # what the job has left on the ranks
                assert notebook.value("kept") == [0, 1]
                notebook.run(f"%sky_down {name}")


def fetched(desk: Desk, name: str) -> Path:
    """The executed notebook, as `skymagic get` fetches it."""
    target = desk.folder / f"fetched-{os.urandom(2).hex()}.ipynb"
    if not (desk.folder / name).exists():  # on this machine it is beside the notebook
        assert desk.ran("get", desk.pool, name, target)[0] == 0
        return target
    return desk.folder / name


def test_job_continues_without_its_client(desk: Desk) -> None:
    """The client of `skymagic run` is killed and interrupted; the job on the head continues."""
    notebook = written(desk.folder, *CELLS)
    code, out, err = desk.ran("run", notebook, "--pool", desk.pool, "-p", "epochs=3")
    assert code == 0, err
    assert f"skymagic get {desk.pool} train.executed.ipynb" in err
    assert {"epochs 3", "[0] epoch 2", "[1] epoch 2", "[train.ipynb has finished]"} <= {
        *out.splitlines()
    }
    expected = said(fetched(desk, "train.executed.ipynb"))
    gate = desk.folder / "gate"
    line = ("run", notebook, "--pool", desk.pool, "-p", "epochs=3", "-p", f"gate={gate}")
    first = desk.program(*line)
    says(first, "epoch 1")
    first.kill()
    first.communicate()
    code, out, err = desk.ran("run", notebook, "--pool", desk.pool)
    assert code == 2
    assert "train.ipynb" in err
    assert said(fetched(desk, "train.executed.ipynb"))[4] == ["epochs 3"], "saved after each cell"
    second = desk.program("logs", desk.pool, "-f")
    says(second, "epoch 1")
    second.send_signal(signal.SIGINT)
    second.communicate(timeout=60)
    assert second.returncode == 130
    gate.write_text("")
    code, out, err = desk.ran("logs", desk.pool, "-f")
    assert code == 0, err
    executed = said(fetched(desk, "train.executed.ipynb"))
    lines = sorted(f"[{rank}] epoch {epoch}" for rank in (0, 1) for epoch in range(3))
    assert (
        executed[4:]
        == expected[4:]
        == [["epochs 3"], lines, ["[0.0, 0.3333333333333333]"], ["'after'"]]
    )
    assert desk.ran("logs", desk.pool, "--json")[1].count('"status": "done"') == 1


@HERE
def test_a_failed_cell(desk: Desk) -> None:
    notebook = written(
        desk.folder, LOAD, "kept = 1", "%%sky_broadcast\n1 / 0", "never", name="fails.ipynb"
    )
    process = desk.program("run", notebook, "--pool", desk.pool, "--detach")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, ""), err
    code, out, err = desk.ran("logs", desk.pool, "--follow")
    assert code == 3
    assert "ZeroDivisionError: division by zero" in out
    assert out.splitlines()[-1].startswith("[fails.ipynb has failed: ZeroDivisionError")
    assert ["ZeroDivisionError"] in said(fetched(desk, "fails.executed.ipynb"))
    assert desk.ran("logs", desk.pool)[0] == 3
    assert desk.ran("cancel", desk.pool)[0] == 2


@HERE
def test_stopped(desk: Desk) -> None:
    notebook = written(
        desk.folder, "import time\nprint('at work', flush=True)\ntime.sleep(600)", name="long.ipynb"
    )
    process = desk.program("run", notebook, "--pool", desk.pool)
    says(process, "at work")
    assert desk.ran("cancel", desk.pool, "--json")[0] == 0
    process.communicate(timeout=60)
    assert process.returncode == 4
    assert said(fetched(desk, "long.executed.ipynb"))[1] == ["at work", "KeyboardInterrupt"]


@HERE
def test_the_page(desk: Desk) -> None:
    page = (ROOT / "docs" / "how-to" / "long-runs.md").read_text()
    cells = re.findall(r"<!-- tested: notebook -->\n```python\n(.*?)\n```", page, re.DOTALL)
    written(desk.folder, *cells)
    (expected,) = re.findall(r"<!-- tested: notebook run -->\n```text\n(.*?)```", page, re.DOTALL)
    lines = re.findall(r"^\$ skymagic ((?:run|logs) .*)$", page, re.MULTILINE)
    for line in lines[:2]:
        code, out, err = desk.ran(*line.replace("lab", desk.pool).split())
        assert code == 0, (line, err)
        if line.startswith("logs"):
            shown = re.sub(r"(?m)^(Input|Output) Notebook.*\n|^Working directory.*\n", "", out)
            shown = re.sub(r"(?m)^attached to.*", "attached to pool 'lab' on gpu1 in 0.8 s", shown)
            # printed by ipykernel if a message arrives while it shuts down
            shown = re.sub(
                r"^ERROR:tornado\..*?^zmq\.error\.[^\n]*\n", "", shown, flags=re.M | re.S
            )
            kept = [line for line in shown.splitlines() if " ranks · " not in line]
            assert expected.splitlines() == kept


@HERE
def test_the_notebook_ends_its_pool_itself(desk: Desk) -> None:
    made = desk.made.replace(desk.pool, f"{desk.pool}b")
    with desk.notebook(made):
        pass
    again, down = f"%sky_attach {desk.pool}b", f"%sky_down {desk.pool}b"
    notebook = written(
        desk.folder, "%load_ext skymagic", again, down, "import time\ntime.sleep(7)\nprint('over')"
    )
    code, out, err = desk.ran("run", notebook, "--pool", f"{desk.pool}b")
    assert (code, "over" in out) == (0, True), out + err


@HERE
def test_papermill_is_installed_where_it_is_missing(desk: Desk) -> None:
    uv, found, lacks = (desk.folder / name for name in ("uv", "found", "lacks"))
    uv.write_text(f"#!/bin/sh\nprintf '%s ' \"$@\" >{found}\n")
    uv.chmod(0o755)
    lacks.mkdir()
    (lacks / "papermill.py").write_text(  # found once, before it is installed
        f"import sys\nsys.path.remove({str(lacks)!r})\ndel sys.modules['papermill']\nraise ImportError\n"
    )
    folders = {"PATH": f"{desk.folder}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{lacks}"}
    notebook = written(desk.folder, "print('over')", name="lacks.ipynb")
    process = desk.program("run", notebook, "--pool", desk.pool, env=folders)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, "over" in out.splitlines()) == (0, True), out + err
    target = re.findall(r"installing papermill into (\S+) …", out)
    assert f"--target {target[0]} papermill" in found.read_text()
    assert found.read_text().startswith(f"pip install --python {sys.executable} ")
    assert (desk.folder / "lacks.executed.ipynb").stat().st_mode & 0o777 == 0o600


@HERE
def test_its_pool_is_ended(desk: Desk) -> None:
    notebook = written(
        desk.folder, "import time\nprint('at work', flush=True)\ntime.sleep(600)", name="lost.ipynb"
    )
    process = desk.program("run", notebook, "--pool", desk.pool)
    says(process, "at work")
    assert desk.ran("down", desk.pool)[0] == 0
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 5
    assert out.splitlines()[-1].startswith("[lost.ipynb ")
    assert said(desk.folder / "lost.executed.ipynb")[-1] == ["at work", "KeyboardInterrupt"]


def test_refused_before_anything_starts(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "%sky_pool gone")
    (tmp_path / "text.ipynb").write_text("no notebook")
    (tmp_path / "notes.ipynb").write_text(json.dumps({"cells": {}, "nbformat": 5}))
    (tmp_path / "bytes.ipynb").write_bytes(b"\xff\xfe")
    for name, words in {
        "none.ipynb": "No such file",
        "text.ipynb": "is not a notebook",
        "notes.ipynb": "is not a notebook",
        "bytes.ipynb": "can't decode",
    }.items():
        code, out, err = desk.ran("run", name, "--pool", "gone", "-p", "epochs", "-p", "2=3")
        assert (code, out) == (2, "")
        for part in (
            words,
            "-p epochs: write -p NAME=VALUE",
            "-p 2=3: write -p NAME=VALUE",
            "'gone'",
        ):
            assert part in err
    notebook = written(tmp_path, "1", "epochs = 1")
    code, out, err = desk.ran("run", notebook, "--pool", "gone", "-p", "epoch=3", "-p", "seed=1")
    assert (code, out) == (2, "")
    for name, known in {"epoch": "'epochs'?", "seed": " epochs"}.items():
        (line,) = [line for line in err.splitlines() if f"-p {name}: " in line]
        assert known in line
    assert "'gone'" in err


def test_parameters() -> None:
    typed = {"3": 3, "1e-3": 0.001, "True": True, "None": None, "abc": "abc", "1_000": 1000, "": ""}
    assert {text: parameters.value(text) for text in typed} == typed
    assert parameters.assigned(["a=b=c", "n="]) == {"a": "b=c", "n": ""}
    cell = {"cell_type": "code", "metadata": {}, "source": ["a = 1\n", "b = 2"]}
    content = {"cells": [cell], "nbformat": 4, "nbformat_minor": 5, "metadata": {}}
    untagged = parameters.NotebookDocument.parse(json.dumps(content), "one.ipynb")
    assert "tagged" in parameters.mistakes(untagged, ["a"])[0]
    cell["metadata"] = {"tags": ["parameters"]}
    tagged = parameters.NotebookDocument.parse(json.dumps(content), "one.ipynb")
    assert parameters.mistakes(tagged, ["a", "b"]) == []
