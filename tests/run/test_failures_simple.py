"""A rank that fails: what the notebook raises, in every way that a cell can go wrong without blocking anybody."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Failed, Notebook
from tests.lab.pools import borrowed

SETUP = "%%sky_broadcast\nimport os, sys\nrank = int(os.environ['RANK']);"
HOST = socket.gethostname()

notebook = borrowed("--ranks 3", "import sys", SETUP)


@pytest.fixture(autouse=True)
def every_rank_goes_on(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.run(SETUP)
    notebook.run("%%sky_broadcast -o alive\nrank")
    assert notebook.value("alive") == [0, 1, 2]


@pytest.fixture
def patient(notebook: Notebook) -> Iterator[Notebook]:
    """Where all ranks fail by themselves, each has the time for it: on a busy machine one may be stopped before."""
    notebook.run(
        "from skymagic.run import run as running\nbefore, running.OTHERS_FAIL_TIME = running.OTHERS_FAIL_TIME, 30.0"
    )
    yield notebook
    notebook.run("running.OTHERS_FAIL_TIME = before")


def caught(notebook: Notebook, body: str, expression: str, options: str = "") -> object:
    """`expression` about `e`, what the cell raised."""
    notebook.fail(f"%%sky_broadcast {options}\n{body}")
    notebook.run("e = sys.last_value")
    return notebook.value(expression)


def internal(error: Failed) -> list[str]:
    """Lines of a traceback that tell of the machinery instead of the user's code."""
    return [
        line for line in error.text.splitlines() if "skymagic" in line or "interactiveshell" in line
    ]


# ------------------------------------------------------------------------------------------ what is raised


def test_error_gives_cause_and_place(notebook: Notebook) -> None:
    error = notebook.fail("%%sky_broadcast\nx = 1\nif rank == 1:\n    raise ValueError('planted')")
    assert error.ename == "ValueError"
    assert "planted" in error.evalue
    assert "----> 4     raise ValueError('planted')" in error.text
    assert f"[rank 1 of 3 on {HOST}]" in error.text
    assert internal(error) == []


def test_the_error_has_rank_host_name_traceback_and_cause(notebook: Notebook) -> None:
    body = "if rank == 2:\n    {}['missing']"
    assert caught(notebook, body, "e.rank, e.hostname, e.ename, e.evalue") == (
        2,
        HOST,
        "KeyError",
        "'missing'",
    )
    assert notebook.value("type(e.__cause__).__name__, e.__cause__.args") == (
        "KeyError",
        ("missing",),
    )
    assert "missing" in notebook.value("'\\n'.join(e.traceback)")
    assert notebook.value("len(e.failures), e.failures[0].rank") == (1, 2)


# ------------------------------------------------------------------------------------------ several ranks


def test_same_error_on_all_ranks_is_shown_once(golden: Golden, patient: Notebook) -> None:
    error = patient.fail("%%sky_broadcast\nraise RuntimeError('all alike')")
    assert error.text.count("RuntimeError: all alike") == 1
    golden.line(error.text, f"[rank 0 of 3 on {HOST}] ", hide=[re.escape(HOST)])


def test_different_errors_are_summed_up_under_the_first(patient: Notebook) -> None:
    error = patient.fail("%%sky_broadcast\nif rank == 1:\n    1 / 0\nif rank == 2:\n    {}['key']")
    assert error.ename == "ZeroDivisionError"
    assert error.text.count("Traceback") == 1
    assert error.text.startswith(f"[rank 1 of 3 on {HOST}]\n")
    assert error.text.endswith("\nrank 2: KeyError: 'key'\nZeroDivisionError: division by zero")
    assert caught(
        patient, "raise ValueError(rank)", "[(f.rank, f.evalue) for f in e.failures]"
    ) == [
        (0, "0"),
        (1, "1"),
        (2, "2"),
    ]


def test_ranks_that_fail_alike_share_a_line(golden: Golden, patient: Notebook) -> None:
    error = patient.fail("%%sky_broadcast\nif rank:\n    {}['key']\n1 / 0")
    assert error.text.endswith("\nranks 1, 2: KeyError: 'key'\nZeroDivisionError: division by zero")
    error = patient.fail("%%sky_broadcast -o r\n(i for i in ())")
    golden.line(error.evalue, "ranks 0–2: ")


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("-g rows\nrows = (i for i in ())", "rows: a generator cannot be sent to the notebook; end the cell with rows = list(rows)"),
        ("-o r\nasync def f():\n    yield 1\nf()", "an asynchronous generator cannot be sent to the notebook; collect its items: [item async for item in …]"),
        ("-o r\n{'a': [i for i in ()], 'b': (i for i in ())}", "cannot pickle 'generator' object; put list(…) in its place"),
    ],
    ids=["variable", "asynchronous", "nested"],
)  # fmt: skip
def test_value_that_cannot_be_sent_is_named(notebook: Notebook, cell: str, said: str) -> None:
    failed = notebook.fail(f"%%sky_broadcast {cell}")
    assert failed.ename == "ResultError"
    assert said in failed.evalue


def test_a_name_that_is_misspelt_gets_the_nearest(golden: Golden, notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nbatches = 3")
    lines = notebook.fail("%%sky_broadcast\nbacthes + 1").text.splitlines()
    golden(lines[-2:])
    golden(notebook.fail("%sky_pull bathces").evalue)
    lines = notebook.fail("%%sky_broadcast\nbatch = statistics.mean([1])").text.splitlines()
    golden(lines[-2:])


def test_later_failures_do_not_mention_interrupts(
    notebook: Notebook,
) -> None:
    body = "import json, time\ntime.sleep(0.095 * (rank > 0))\njson.loads('{' * 5)"  # others are interrupted after 0.1 s
    for _ in range(3):
        shown = notebook.finish(notebook.start(f"%%sky_broadcast --only all\n{body}"))
        assert shown.failure.ename == "JSONDecodeError"
        assert shown.text == ""


def test_values_are_not_touched_by_a_cell_that_fails(notebook: Notebook) -> None:
    notebook.run("kept = 'before'")
    notebook.fail("%%sky_broadcast -o kept\n1 / (rank - 1)")
    assert notebook.value("kept") == "before"


# ------------------------------------------------------------------------------------------ kinds of exceptions


KINDS = {
    "cancelled": ("import asyncio; raise asyncio.CancelledError('why')", "CancelledError", "why"),
    "long": ("raise ValueError('m' * 100_000)", "ValueError", "m" * 1000),
    "own base": ("class Own(BaseException): pass\nraise Own('base')", "Own", "base"),
    "recursion": ("def again(): again()\nagain()", "RecursionError", "maximum recursion depth"),
}
"""Those of which `tests/jobs/test_errors_arrive.py` and the cells that run both ways have none, or whose text is special."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_any_kind_fails_the_cell(notebook: Notebook, kind: str) -> None:
    body, ename, text = KINDS[kind]
    error = notebook.fail(f"%%sky_broadcast\n{body}")
    assert f"{ename}" in error.text
    assert text in error.text
    # any rank may be the first, for some errors take long to be formatted
    assert re.search(
        rf" of 3 on {re.escape(HOST)}\] .*\branks? ", error.text
    )  # one of them may be stopped before it fails
    notebook.run("e = sys.last_value")
    assert notebook.value("e.ename, type(e.__cause__).__name__") == (ename, ename)


def test_exception_that_raises_when_it_is_rebuilt(notebook: Notebook) -> None:
    body = "class Bad(Exception):\n    def __reduce__(self): return (eval, ('1/0',))\nraise Bad('original')"
    assert caught(notebook, body, "e.ename, e.evalue, e.__cause__") == ("Bad", "original", None)


def test_exception_with_failing_str(notebook: Notebook) -> None:
    error = notebook.fail(
        "%%sky_broadcast\nclass Mute(Exception):\n    def __str__(self): return 1 / 0\nraise Mute"
    )
    assert "----> 4 raise Mute" in error.text
    notebook.run("e = sys.last_value")
    assert notebook.value("e.ename") == "Mute"


def test_exception_group(notebook: Notebook) -> None:
    shown = notebook.finish(
        notebook.start(
            "%%sky_broadcast\nx = 1\nraise ExceptionGroup('several', [ValueError('a'), TypeError('b')])"
        )
    )
    assert shown.text == "", "the traceback is the error's, not text beside it"
    assert "line 3" in shown.failure.text
    assert "ValueError: a" in shown.failure.text
    assert "TypeError: b" in shown.failure.text
    assert internal(shown.failure) == []
    notebook.run("e = sys.last_value")
    assert notebook.value("e.ename, [type(x).__name__ for x in e.__cause__.exceptions]") == (
        "ExceptionGroup",
        ["ValueError", "TypeError"],
    )


def test_a_shell_without_colours_shows_none(notebook: Notebook) -> None:
    before = notebook.value("get_ipython().colors")
    coloured = []
    for colours in ("nocolor", before):
        notebook.run(f"get_ipython().colors = {colours!r}")
        shown = notebook.finish(notebook.start("%%sky_broadcast\n1 / 0"))
        coloured.append("\x1b" in "".join(shown.outputs[-1]["traceback"]))
    assert coloured == [False, True]


def test_the_error_survives_pickling(notebook: Notebook) -> None:
    notebook.fail("%%sky_broadcast\n1 / 0")
    notebook.run("import pickle\ncopy = pickle.loads(pickle.dumps(sys.last_value))")
    assert notebook.value(
        "copy.rank, copy.ename, copy.evalue, str(copy) == str(sys.last_value)"
    ) == (
        0,
        "ZeroDivisionError",
        "division by zero",
        True,
    )


# ------------------------------------------------------------------------------------------ leaving


def test_leaving_ends_the_cell_and_not_the_rank(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -o before\nos.getpid()")
    for leave in (
        "sys.exit()",
        "sys.exit(3)",
        "sys.exit('words')",
        "exit()",
        "quit()",
        "raise SystemExit",
    ):
        shown = notebook.finish(notebook.start(f"%%sky_broadcast --only all\nx = 1\n{leave}"))
        assert shown.text == "", "no advice of IPython's how to leave"
        assert f"----> 3 {leave}" in shown.failure.text
        notebook.run("e = sys.last_value")
        assert notebook.value("e.ename, isinstance(e, SystemExit)") == ("SystemExit", False)
    notebook.run("%%sky_broadcast -o after\nos.getpid()")
    assert notebook.value("before == after") is True


def test_hard_exit_of_a_rank(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nonly_there = rank\nprint('earlier')")
    error = notebook.fail("%%sky_broadcast\nif rank == 1:\n    print('at last')\n    os._exit(3)")
    assert error.ename == "RankDied"
    assert f"rank 1 on {HOST} died: exit code 3" in error.text
    assert "restarted" in error.text
    assert "at last" in error.text
    assert "earlier" not in error.text
    notebook.run("e = sys.last_value")
    assert notebook.value("e.rank, e.hostname, e.status") == (1, HOST, 3)
    notebook.run("%%sky_broadcast -o r\n'only_there' in globals()")
    assert notebook.value("r") == [True, False, True]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import ctypes; ctypes.string_at(0)", "SIGSEGV: a segmentation fault"),
        ("os.abort()", "SIGABRT: native code called abort()"),
    ],
)
def test_death_by_a_signal(notebook: Notebook, body: str, words: str) -> None:
    error = notebook.fail(f"%%sky_broadcast\nif rank == 2:\n    {body}")
    assert f"rank 2 on {HOST} died: {words}" in error.text
    notebook.run("e = sys.last_value")
    assert notebook.value("e.rank, e.status < 0") == (2, True)


# ------------------------------------------------------------------------------------------ asking


ASKS = {
    **dict.fromkeys(["input()", "input('name? ')", "import getpass; getpass.getpass()"], "input() cannot ask from a rank"),
    **dict.fromkeys(
        ["breakpoint()", "import pdb; pdb.set_trace()", "pdb.Pdb().set_trace()",
         "from IPython.core.debugger import set_trace; set_trace()"],
        "cannot ask from a rank: print what you want to see",
    ),
}  # fmt: skip


def test_asking_and_debuggers_are_refused_in_words(patient: Notebook) -> None:
    patient.run("%%sky_broadcast\nimport pdb")
    for ask, words in ASKS.items():
        error = patient.fail(f"%%sky_broadcast\n{ask}\nx = 1")
        assert words in error.evalue, ask
        assert f"----> 2 {ask}" in error.text or "set_trace" in ask or ask == "breakpoint()"
        assert f"[rank 0 of 3 on {HOST}]" in error.text, ask
        assert "ranks 1, 2" in error.text, ask
        assert internal(error) == [], ask


MAGICS = {
    **dict.fromkeys(["%pdb", "%pdb on", "%debug", "%%debug\n1 / 0"], "cannot ask from a rank: print what you want to see"),
    **dict.fromkeys(
        ["%sky_pool --nodes 2", "%sky_down", "%sky_broadcast x = 1", "%%sky_broadcast\nx = 1", "%load_ext skymagic",
         "%reload_ext skymagic  # so"],
        "belongs in a cell of the notebook: this one already runs on the ranks of a pool",
    ),
}  # fmt: skip


def test_magics_of_the_notebook_are_refused_in_a_line(patient: Notebook) -> None:
    patient.fail("%%sky_broadcast\n1 / 0")
    for magic, words in MAGICS.items():
        last = patient.fail(f"%%sky_broadcast\n{magic}").text.splitlines()[-1]
        assert last.startswith(f"UsageError: {magic.split()[0]}"), magic
        assert words in last, magic


def test_other_magics_and_extensions_stay_as_they_are(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -o r\n%load_ext storemagic\ny = 5\n%time x = y\nx")
    assert notebook.value("r") == [5] * 3


def test_reading_standard_input_finds_its_end(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -o r\nsys.stdin.read(), os.read(0, 1)")
    assert notebook.value("r") == [("", b"")] * 3


# ------------------------------------------------------------------------------------------ interrupt


def test_interrupt_of_ranks_that_ignore_it_kills_them_at_last(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.grace = 0.2")
    shown = notebook.start(
        "%%sky_broadcast --only all\nimport signal\nold = signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
        "import time\nwhile True:\n    time.sleep(1)"
    )
    notebook.watch(shown, lambda cell: cell.stdout.count("deaf") == 3)
    notebook.interrupt()
    notebook.finish(shown)
    notebook.run("%config SkyMagic.grace = 2.0")
    assert shown.failure.ename == "RunInterrupted"
    assert "restarted" in shown.failure.text


# ------------------------------------------------------------------------------------------ what is left


def test_values_of_successful_ranks_leave_shared_memory(notebook: Notebook) -> None:
    notebook.run(
        "import glob, os, skymagic\n[store] = glob.glob(f'/dev/shm/skymagic-{skymagic.find().pool.job_id}-*')\n"
        "def files(): return sorted(name for name in os.listdir(store) if not name.endswith('.part'))\nthere = files()"
    )
    body = "if rank == 1:\n    while files() == there: pass\n    raise ValueError('planted')\nbytes(2_000_000)"
    assert "planted" in notebook.fail(f"%%sky_broadcast -o large\n{body}").evalue
    assert notebook.value("files() == there") is True
