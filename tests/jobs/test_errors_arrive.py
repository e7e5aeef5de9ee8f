"""Exceptions arrive whole: what a cell would raise here is what it raises when it is broadcast, with the rank in its notes."""

from __future__ import annotations

import socket

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

HOST = socket.gethostname()

notebook = borrowed("--ranks 2", "import sys\nfrom skymagic.errors import RankError")


def both(notebook: Notebook, body: str, expression: str) -> tuple[object, object]:
    """`expression` about `e`, what the cell raises: here, and on the ranks; there it is also an instance of the class from here."""
    seen = []
    for magic in ("", "%%sky_broadcast\n"):
        notebook.run("sys.last_value = None")
        notebook.fail(magic + body)
        notebook.run("e = sys.last_value")
        seen.append(notebook.value(expression))
        notebook.run("kind = kind if isinstance(e, RankError) else type(e)")
    assert notebook.value("isinstance(e, RankError), isinstance(e, kind)") == (True, True)
    return seen[0], seen[1]


CLASSES = """
class Refused(Exception):
    def __init__(self, code, *, extra):
        super().__init__(f"code {code}")
        self.code, self.extra = code, extra
class Renamed(OSError):
    def __init__(self, rank, message): self.rank, self.message = rank, message
    def __str__(self): return f"{self.message} by {self.rank}"
class Both(KeyError, AttributeError): pass
class Picky(Exception):
    def __new__(cls, code): return super().__new__(cls, code)
class Slotted(Exception):
    __slots__ = ("size",)
    def __init__(self, size): self.size = size
class Reduced(Exception):
    def __init__(self, a, b): self.a, self.b = a, b
    def __reduce__(self): return Reduced, (self.a, self.b)
import dataclasses
@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    n: int
"""
WHOLE = {
    "os error": ("open('/no/such/file')", "(e.errno, e.filename, e.strerror)"),
    "import error": ("import nowhere_at_all", "(e.name, e.path, e.msg)"),
    "from import": ("from os import nothing_such", "(e.name, e.path)"),
    "name error": ("no_such_name", "e.name"),
    "attribute error": ("(1).no_such", "e.name"),
    "key error": ("{}['k']", "e.args[0]"),
    "unicode": ("b'\\xff'.decode()", "(e.object, e.start, e.reason)"),
    "json": ("import json; json.loads('{')", "(e.pos, e.lineno, e.doc)"),
    "process": (
        "import subprocess; subprocess.run(['false'], check=True)",
        "(e.returncode, e.cmd)",
    ),
    "stop iteration": ("raise StopIteration(5)", "e.value"),
    "no message": ("raise ValueError", "e.args"),
    "several arguments": ("raise ValueError('a', 2, [3])", "e.args"),
    "two words": ("raise ValueError('one\\ntwo')", "e.args"),
    "notes": ("p = ValueError('x'); p.add_note('mine'); raise p", "e.__notes__[0]"),
    "own": ("raise Refused(7, extra=[8])", "(e.code, e.extra)"),
    "own names": ("raise Renamed(77, 'mine')", "(e.rank, e.message)"),
    "two bases": ("raise Both('k')", "e.args"),
    "own new": ("raise Picky(3)", "e.args"),
    "slots": ("raise Slotted(9)", "e.size"),
    "own reduce": ("raise Reduced(1, 2)", "(e.a, e.b)"),
    "frozen": ("raise Frozen(4)", "e.n"),
    "group": (
        "raise ExceptionGroup('g', [ValueError(1), TypeError(2)])",
        "(e.message, repr(e.exceptions))",
    ),
    "keyboard interrupt": ("raise KeyboardInterrupt('k')", "isinstance(e, KeyboardInterrupt)"),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_exception_is_the_same_as_in_a_plain_cell(notebook: Notebook, kind: str) -> None:
    body, fields = WHOLE[kind]
    notebook.run(CLASSES)
    here, there = both(
        notebook, body, f"(type(e).__name__, type(e).__module__, str(e), repr(e.args), {fields})"
    )
    assert there == here
    rank = f"[rank {notebook.value('e._report.rank')} of 2 on {HOST}]"
    assert any(note.startswith(rank) for note in notebook.value("e.__notes__"))


def test_a_group_is_caught_by_its_parts(notebook: Notebook) -> None:
    notebook.run(
        "seen = []\ntry:\n    get_ipython().run_cell_magic('sky_broadcast', '',\n"
        '        \'raise ExceptionGroup("g", [ValueError(1), OSError(2, "m"), ExceptionGroup("h", [ValueError(3)])])\')\n'
        "except* ValueError as part:\n    seen.append([type(each).__name__ for each in part.exceptions])\n"
        "except* OSError as part:\n    seen.append(part.exceptions[0].errno)"
    )
    assert notebook.value("seen") == [["ValueError", "ExceptionGroup"], 2]


LEAVING = {
    "SystemExit": ("sys.exit(3)", "e.code", 3),
    "GeneratorExit": ("raise GeneratorExit(1)", "e.args", (1,)),
}


@pytest.mark.parametrize("name", LEAVING)
def test_exit_exceptions_keep_their_name(notebook: Notebook, name: str) -> None:
    body, field, value = LEAVING[name]
    error = notebook.fail(f"%%sky_broadcast\nimport sys\n{body}")
    assert error.ename == name
    notebook.run("e = sys.last_value")
    assert notebook.value(f"{field}, isinstance(e, {name})") == (value, False)


def test_a_syntax_error_shows_the_ranks_traceback(notebook: Notebook) -> None:
    error = notebook.fail("%%sky_broadcast\nx = 1\nexec('a b')")
    assert (error.ename, error.evalue) == ("SyntaxError", "invalid syntax (<string>, line 1)")
    assert ", line 3\n    exec('a b')" in error.text
    notebook.run("e = sys.last_value")
    assert notebook.value("e.lineno, e.text") == (1, "a b\n")


def test_notes_are_shown_once(notebook: Notebook) -> None:
    error = notebook.fail("%%sky_broadcast\np = ValueError('x')\np.add_note('there')\nraise p")
    assert error.text.splitlines().count("there") == error.text.count(f" of 2 on {HOST}]") == 1
    error = notebook.fail("e = sys.last_value\ne.add_note('here')\nraise e")
    assert error.text.splitlines().count("there") == error.text.splitlines().count("here") == 1


def test_exception_arrives_with_its_cause(notebook: Notebook) -> None:
    body = (
        "try:\n    try:\n        {}['a']\n    except KeyError as inner:\n        inner.add_note('n')\n"
        "        raise ValueError('b') from inner\nexcept ValueError:\n    raise OSError(2, 'c', 'file')"
    )
    chain = (
        "[repr({0}.__context__), repr({0}.__cause__), repr({0}.__context__.__cause__), {0}.__context__.__cause__.__notes__,"
        " {0}.__context__.__suppress_context__]"
    )
    notebook.fail(body)
    notebook.run("e = sys.last_value")
    here = notebook.value(chain.format("e"))
    notebook.fail(f"%%sky_broadcast\n{body}")
    notebook.run("e = sys.last_value")
    assert notebook.value(chain.format("e.__cause__")) == here
    assert notebook.value("type(e.__cause__) is FileNotFoundError")


def test_a_part_that_cannot_travel_is_left_out(notebook: Notebook) -> None:
    notebook.run(
        "import threading\nclass Holds(Exception):\n    def __init__(self, n):\n        super().__init__(n, threading.Lock())\n"
        "        self.n, self.lock = n, threading.Lock()"
    )
    notebook.run(
        "try:\n    get_ipython().run_cell_magic('sky_broadcast', '', 'raise Holds(5) from Holds(6)')\n"
        "except Holds as e:\n    seen = e.n, e.args[0], hasattr(e, 'lock'), e.__cause__.__cause__.n"
    )
    assert notebook.value("seen") == (5, 5, False, 6)


def test_object_of_an_attribute_error_is_not_sent(notebook: Notebook) -> None:
    error = notebook.fail("%%sky_broadcast\nimport threading\nthreading.Lock().missing")
    assert error.ename == "AttributeError"
    notebook.run("e = sys.last_value")
    assert notebook.value("e.name, e.__cause__.name") == ("missing", "missing")


def test_exceptions_are_values_too(notebook: Notebook) -> None:
    notebook.run(
        "def made():\n    try:\n        try:\n            open('/no/such')\n        except OSError as e:\n            e.add_note('n')\n"
        "            raise NameError('x', name='y') from e\n    except NameError as e:\n        return e\nvalue = made()"
    )
    check = "[value.name, value.__cause__.filename, value.__context__ is value.__cause__, value.__cause__.__notes__]"
    notebook.run(
        f"%%sky_broadcast -o back\nassert {check} == ['y', '/no/such', True, ['n']]\nmade()"
    )
    notebook.run("value = back[1]")
    assert notebook.value(check) == ["y", "/no/such", True, ["n"]]
