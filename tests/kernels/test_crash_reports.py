"""A process of a rank that crashes: the cell shows the user's frames, and the log all that Python reports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from skymagic.kernels.agent.crash_reports import BEGIN, CrashFilter
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")

CELL = "%%sky_broadcast\nimport ctypes, json, multiprocessing, os, sys\n"

CRASH = "def crash():\n    ctypes.string_at(0)\n"
CRASHED = "line 4 of the cell, in crash"
HEADING = "(most recent call first):"
"""Of Python's list of frames."""
FIRST = "if os.environ['RANK'] == '0':\n    "
MODULE = f"import ctypes\n{CRASH}"
DIES = {
    "cell": (
        f"{CRASH}{FIRST}crash()",
        [CRASHED, "line 6 of the cell, in <module>"],
    ),
    "module": (f"import crashing\n{FIRST}crashing.crash()", ['crashing.py", line 3 in crash']),
    "below a library": (
        f"{CRASH}json.JSONEncoder.default = lambda self, x: crash()\n{FIRST}json.dumps(object())",
        [CRASHED, "line 5 of the cell, in <lambda>"],
    ),
    "fatal error": (
        f"{FIRST}ctypes.pythonapi.Py_FatalError(b'broken')",
        ["line 4 of the cell, in <module>"],
    ),
    "recursion": (
        f"def f(n):\n    ctypes.string_at(0) if n == 0 else f(n - 1)\n{FIRST}f(90)",
        ["line 4 of the cell, in f"],
    ),
}


def only_users_frames(stderr: str) -> None:
    assert HEADING not in stderr
    assert "Extension modules" not in stderr
    assert "/lib/python" not in stderr
    assert "skymagic/kernels" not in stderr
    assert stderr.count("\n") < 12


@pytest.mark.parametrize("case", DIES)
def test_cell_shows_only_the_users_frames(notebook: Notebook, case: str) -> None:
    body, frames = DIES[case]
    (notebook.folder / "crashing.py").write_text(MODULE)
    shown = notebook.finish(notebook.start(f"{CELL}{body}"))
    assert shown.failure.ename == "RankDied"
    assert BEGIN.decode() in shown.stderr
    for frame in frames:
        assert frame in shown.stderr
    only_users_frames(shown.stderr)
    logged = notebook.run("%sky_logs --rank 0 -n 200").said
    assert HEADING in logged
    assert "ctypes/__init__.py" in logged or case == "fatal error"


def test_child_that_crashes_is_shown_likewise(notebook: Notebook) -> None:
    shown = notebook.run(
        f"{CELL}{CRASH}child = multiprocessing.get_context('fork').Process(target=crash)\n"
        "child.start(); child.join()\n"
        "print('child:', child.exitcode)\nprint('after', file=sys.stderr)\nos.write(2, b'raw\\n');"
    )
    assert "child: -11" in shown.stdout
    assert CRASHED in shown.stderr
    assert "after\n" in shown.stderr
    assert "raw\n" in shown.stderr
    only_users_frames(shown.stderr)


def pieces(data: bytes, size: int) -> list[bytes]:
    """The text as it may be read: in pieces, but what begins a report is whole."""
    cut, parts = 0, []
    while cut < len(data):
        end, begin = cut + size, data.find(BEGIN, cut)
        if cut <= begin < end < begin + len(BEGIN):
            end = begin or len(BEGIN)
            end = end if end > cut else begin + len(BEGIN)
        parts.append(data[cut:end])
        cut = end
    return parts


@pytest.mark.parametrize("size", [1, 2, 7, 30, 1000, 100_000])
def test_pieces_of_a_report_do_not_matter(size: int) -> None:
    code = "import ctypes, json\njson.JSONEncoder.default = lambda self, x: ctypes.string_at(0)\njson.dumps(object())"
    report = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, check=False
    ).stderr
    assert report.startswith(BEGIN)
    shortened = report.split(b"\n")[0] + b"\n" + b'  File "<string>", line 2 in <lambda>\n'
    shortened += b'  File "<string>", line 3 in <module>\n'
    whole = b"before\n50%" + report + b"after\n\n  File of mine\n" + report + b"end"
    expected = b"before\n50%" + shortened + b"after\n\n  File of mine\n" + shortened + b"end"
    crashes = CrashFilter()
    assert b"".join(map(crashes.feed, pieces(whole, size))) + crashes.end() == expected


def test_text_that_is_no_report_is_shown_at_once() -> None:
    crashes = CrashFilter()
    for text in (b"Fatal", b"  File", b" 50%|##", b"\r 60%", b"\n\n"):
        assert crashes.feed(text) == text
