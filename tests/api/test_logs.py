"""Logs: of one run or cell, of lines that match, followed to a run's end; and what stays of a pool that has ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import IPython
import pytest

from skymagic.api.logs import lines_of_runs
from skymagic.pool import records
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, opened
from tests.lab.waiting import until


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """Two ranks; `first` and `second` are the numbers of cells, the first of which has had two runs; the last test ends the pool."""
    with opened(tmp_path_factory.mktemp("logs"), "%sky_pool logged --ranks 2") as one:
        one.run(
            "import skymagic as sky, os\n@sky.function\ndef say(word):\n    print(word, 'from', os.environ['RANK'])"
        )
        one.run(
            "from skymagic.jobs.cell import cell_number\nfirst = cell_number(get_ipython())\npool = sky.find('logged')\nsay('one') @ pool; say('two') @ pool;"
        )
        one.run(
            "%%sky_broadcast\nfor step in range(200):\n    print('step', step, 'loss', step / 2)"
        )
        yield one


def numbers(notebook: Notebook) -> tuple[int, int]:
    """Of the cell with two runs, and of the one after it."""
    first = notebook.value("first")
    return first, first + 1


def test_one_run_and_one_cell(notebook: Notebook) -> None:
    first, second = numbers(notebook)
    said = ["[0] one from 0", "[0] two from 0", "[1] one from 1", "[1] two from 1"]
    assert notebook.run(f"%sky_logs --cell {first}").lines == said
    assert notebook.run("%sky_logs --rank 1 --run 2").lines == ["two from 1"]
    assert notebook.run(f"%sky_logs --rank 1 --run 2 --cell {first}").lines == ["two from 1"]
    lines = notebook.run(f"%sky_logs --rank 0 --cell {second} -n 500").lines
    assert lines == [f"step {step} loss {step / 2}" for step in range(200)]


def test_lines_that_match(notebook: Notebook) -> None:
    assert notebook.run(r"%sky_logs --grep 'step 1\d7 ' --rank 1 -n 3").lines == [
        f"step {step} loss {step / 2}" for step in (177, 187, 197)
    ]
    assert notebook.run("%sky_logs --run 1 --grep from").lines == [
        "[0] one from 0",
        "[1] one from 1",
    ]
    assert notebook.run("%sky_logs --grep nowhere").lines == []
    notebook.run(
        "%%sky_broadcast\nfor step in range(9):\n    print('bar', step, end='\\r')\nprint()"
    )
    assert notebook.run("%sky_logs --rank 0 --grep 'bar [38]'").lines == ["bar 8"]


def test_logs_are_an_object_with_text_html_and_completion(notebook: Notebook) -> None:
    first, _ = numbers(notebook)
    (shown,) = notebook.run(f"said = pool.logs(cell={first})\nsaid").rich
    assert shown["text/plain"].splitlines() == notebook.run(f"%sky_logs --cell {first}").lines
    assert (
        "<summary>rank 1 · 2 lines</summary><pre>one from 1\ntwo from 1</pre>" in shown["text/html"]
    )
    assert notebook.value("said[1]") == "one from 1\ntwo from 1"
    assert notebook.value("dict(pool.logs(1, 1, grep='from'))") == {1: "two from 1"}
    assert "no rank 7" in notebook.fail("pool.logs(7)").text
    assert (
        notebook.run(f"%sky_logs --cell {first} -o kept").lines == shown["text/plain"].splitlines()
    )
    assert notebook.value("kept == said and type(kept).__name__") == "Logs"
    offered = "[one.text for one in get_ipython().Completer.completions({0!r}, len({0!r}))]"
    notebook.run("import warnings; warnings.simplefilter('ignore')")
    if IPython.version_info >= (8,):  # IPython 7 completes no numbers
        assert notebook.value(offered.format("said[")) == ["0", "1"]
    assert notebook.value(offered.format("pool.metr")) == ["metrics"]
    assert notebook.value(offered.format("pool.worl")) == ["world_size"]


def test_all_mistakes_at_once_and_nothing_is_shown(golden: Golden, notebook: Notebook) -> None:
    failed = notebook.finish(notebook.start("%sky_logs --rank 7 --run 99 --grep '(loss'"))
    assert failed.stdout == ""
    assert failed.error is not None
    for part in (
        "there is no rank 7",
        "the log has no run 99; there are runs 1",
        "'(loss' is not a regular expression",
    ):
        assert part in failed.error.evalue
    for options in ("--cell 999", "--run 1 --cell 999"):
        golden(notebook.fail(f"%sky_logs {options}").evalue, hide=["there are cells .*"])


def test_a_run_is_followed_to_its_end(notebook: Notebook) -> None:
    gate = notebook.folder / "gate"
    os.mkfifo(gate)
    body = f"print('loss', 1, flush=True)\nif os.environ['RANK'] == '0': open({str(gate)!r}).read()\nprint('loss 2\\nother\\nloss 3', end='')"
    notebook.run("number = cell_number(get_ipython())")
    cell = notebook.value("number") + 1
    notebook.run(f"%%sky_broadcast -a --only 1\n{body}")
    following = notebook.start(f"%sky_logs --rank 0 --cell {cell} --grep loss -f")
    notebook.watch(following, lambda seen: seen.lines == ["loss 1"])
    gate.write_text("go")
    assert notebook.finish(following).lines == ["loss 1", "loss 2", "loss 3"]
    assert notebook.run(f"%sky_logs --cell {cell} --grep other -f").lines == [
        "[0] other",
        "[1] other",
    ]


def test_a_line_is_followed_from_its_first_half(notebook: Notebook) -> None:
    gate = notebook.folder / "half"
    os.mkfifo(gate)
    notebook.run("number = cell_number(get_ipython())")
    cell = notebook.value("number") + 1
    notebook.run(
        f"%%sky_broadcast -a --only 0\nprint('whole\\nha', end='', flush=True)\n"
        f"open({str(gate)!r}).read()\nprint('lf')"
    )
    with gate.open("w"):  # opens once the rank reads, and so has printed
        logs = f"%sky_logs --rank 0 --cell {cell}"
        until(lambda: notebook.run(logs).lines == ["whole", "ha"])
        following = notebook.start(f"{logs} -f")
        notebook.watch(following, lambda seen: "whole" in seen.lines)
    assert notebook.finish(following).lines == ["whole", "half"]


def test_follow_shows_a_waiting_run_once_it_begins(golden: Golden, notebook: Notebook) -> None:
    gate = notebook.folder / "before"
    os.mkfifo(gate)
    notebook.run(
        f"%%sky_broadcast -a --only 1\nif os.environ['RANK'] == '0': open({str(gate)!r}).read()"
    )
    notebook.run("number = cell_number(get_ipython())")
    cell = notebook.value("number") + 1
    notebook.run("%%sky_broadcast -a --only 1\nprint('begun')")
    golden(notebook.fail(f"%sky_logs --cell {cell}").evalue, hide=[rf"\b{cell}\b", "there are .*"])
    following = notebook.start(f"%sky_logs --rank 0 --cell {cell} -f")
    gate.write_text("go")
    assert notebook.finish(following).lines == ["begun"]


def test_ended_pool_keeps_logs_and_costs(golden: Golden, notebook: Notebook) -> None:
    first, _ = numbers(notebook)
    job = notebook.value("pool.job_id")
    notebook.run("%sky_down")
    assert notebook.run(f"%sky_logs --rank 0 --cell {first}").lines[:-1] == [
        "one from 0",
        "two from 0",
    ]
    golden(notebook.fail("%sky_logs --run 99").evalue, hide=["there are .*"])
    state = {"XDG_STATE_HOME": str(notebook.folder / ".state")}
    kept = notebook.folder / ".state" / "skymagic" / "logs" / f"{job}.log"
    assert kept.stat().st_mode & 0o777 == 0o600
    other = notebook.folder / "other"
    other.mkdir()
    with opened(other, env=state) as later:
        for name in ("logged", job):
            *lines, last = later.run(f"%sky_logs --pool {name} --cell {first} --grep from").lines
            assert lines == ["one from 0", "two from 0"]
            golden(last, hide=[job, r"\d{4}-\d\d-\d\d \d\d:\d\d"])
        golden(later.fail("%sky_logs --pool logged --rank 1").evalue)
        golden(later.fail("%sky_logs --pool nobody").evalue, hide=["; available: .*"])


def test_only_the_last_few_logs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for number in range(records.KEPT_LOGS + 3):
        records.keep_log("same", f"job-{number}", f"text {number}\r\n")
        os.utime(tmp_path / "skymagic" / "logs" / f"job-{number}.log", (number, number))
    records.keep_log("same", "nothing", "")
    assert len(list((tmp_path / "skymagic" / "logs").iterdir())) == records.KEPT_LOGS
    newest = records.kept_log("same")
    assert newest is not None
    assert (newest.job_id, newest.text) == (
        f"job-{records.KEPT_LOGS + 2}",
        f"text {records.KEPT_LOGS + 2}\r\n",
    )
    (tmp_path / "skymagic" / "logs" / f"{newest.job_id}.log").write_bytes(b"\xff not ours")
    before = records.kept_log("same")
    assert before is not None
    assert before.job_id == f"job-{records.KEPT_LOGS + 1}"
    assert records.kept_log("job-0") is None


def test_lines_of_runs_in_a_log_of_another_version() -> None:
    lines = [
        "before",
        "── cell 3, 10:00:00 ──",
        "old",
        "── cell 4, run 7, 10:00:01 ──",
        "new",
        "more",
    ]
    assert list(lines_of_runs(lines, {7})) == ["new", "more"]
