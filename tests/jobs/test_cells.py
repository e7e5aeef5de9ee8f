"""Cells on the ranks are IPython cells: their syntax, their displays, their errors' lines, and what they find from the notebook."""

from __future__ import annotations

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")


def values(notebook: Notebook, body: str, options: str = "", then: str = "r") -> object:
    """What `-o r` holds after a broadcast cell."""
    notebook.run(f"%%sky_broadcast -o r {options}\n{body}")
    return notebook.value(then)


RANK = "import os\nrank = int(os.environ['RANK'])\n"


# ------------------------------------------------------------------------------------------ IPython's syntax


def test_magic_that_does_not_exist(notebook: Notebook) -> None:
    shown = notebook.finish(notebook.start("%%sky_broadcast\n%no_such_magic 3"))
    assert shown.text == ""
    assert "`%no_such_magic` not found" in shown.failure.text
    assert len(shown.failure.text.splitlines()) == 2


def test_help_on_a_rank(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast\ndef documented():\n    'what it says'\ndocumented?")
    assert "what it says" in shown.text + "".join(data["text/plain"] for data in shown.rich)


def test_a_cell_that_is_indented_as_a_whole(notebook: Notebook) -> None:
    assert values(notebook, "    a = 1\n    if a:\n        a += 1\n    a") == [2, 2]


def test_text_within_quotes_that_looks_like_magic_stays(notebook: Notebook) -> None:
    assert (
        values(notebook, 'text = """\n%time\n!ls\n{rank} $HOME"""\ntext')
        == ["\n%time\n!ls\n{rank} $HOME"] * 2
    )


def test_python_expressions_expand_on_the_magic_line_only(notebook: Notebook) -> None:
    notebook.run("where = 'expanded'\nwhich = 1")
    notebook.run("%%sky_broadcast -o {where} -t $which\n'{where} $which'")
    assert notebook.value("expanded") == ["{where} $which"]


# ------------------------------------------------------------------------------------------ the last expression


def test_last_expression_is_displayed_from_the_head(notebook: Notebook) -> None:
    shown = notebook.run(f"%%sky_broadcast\n{RANK}[rank, 'x']")
    assert [data["text/plain"] for data in shown.rich] == ["[0, 'x']"]


def test_a_semicolon_silences_and_the_value_is_kept(notebook: Notebook) -> None:
    assert notebook.run("%%sky_broadcast\n42  # not the end;").rich
    assert notebook.run("%%sky_broadcast -o r\n41 + 1;").outputs == []
    assert notebook.value("r") == [42, 42]


# ------------------------------------------------------------------------------------------ rich display


def test_figure_and_table_from_the_head_in_order(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast -t 0\n%matplotlib inline\nimport matplotlib.pyplot as plt\nimport pandas as pd\n"
        "print('before')\nplt.plot([1, 2])\nplt.show()\nprint('between')\npd.DataFrame({'column': [7]})"
    )
    assert shown.kinds == ["stdout", "display_data", "stdout", "display_data"]
    figure, table = shown.rich
    assert figure["image/png"].startswith("iVBORw0KGgo")  # the signature of PNG files, as base64
    assert "column" in table["text/html"]
    assert "column" in table["text/plain"]
    assert shown.stdout == "before\nbetween\n"


def test_figure_left_open_is_shown_at_the_end(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast -t 0\n%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);"
    )
    assert [list(data) for data in shown.rich if "image/png" in data]


def test_rich_output_of_several_ranks_is_labelled(notebook: Notebook) -> None:
    shown = notebook.run(
        f"%%sky_broadcast --only all\n{RANK}from IPython.display import HTML\nHTML(f'<b>{{rank}}</b>')"
    )
    assert sorted(data["text/html"] for data in shown.rich) == ["<b>0</b>", "<b>1</b>"]
    assert sorted(shown.lines) == ["[0]", "[1]"]


def test_display_is_updated_and_cleared(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\nfrom IPython.display import clear_output\nprint('gone')\nclear_output()\n"
        "shown = display('first', display_id=True)\nshown.update('second')"
    )
    assert shown.stdout == ""
    assert [data["text/plain"] for data in shown.rich] == ["'second'"]


def test_failing_repr_is_reported_and_fails_nothing(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast -o r\nclass Shy:\n    def __repr__(self): return 1 / 0\ndisplay(Shy())\n5"
    )
    assert "ZeroDivisionError" in shown.stderr
    assert notebook.value("r") == [5, 5]


def test_widgets_are_shown_as_text(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast -t 0\nimport ipywidgets\nipywidgets.IntSlider(3)")
    assert [list(data) for data in shown.rich] == [["text/plain"]]
    assert "IntSlider(value=3)" in shown.rich[0]["text/plain"]


# ------------------------------------------------------------------------------------------ lines of errors


LINES = {  # plain cell, broadcast cell, the one that fails → its lines
    "from the top of the whole cell": ((), "\n\n%%sky_broadcast\n\n1 / 0", ["----> 5 1 / 0"]),
    "after magics and commands": (
        (), "%%sky_broadcast\n!true\n%time x = 1\nawait __import__('asyncio').sleep(0)\n1 / 0", ["----> 5 1 / 0"],
    ),
    "of an earlier cell on the ranks": (
        ("%%sky_broadcast\ndef outer(x):\n    y = x\n    return y / 0",),
        "%%sky_broadcast\nouter(3)", ["----> 2 outer(3)", "----> 4     return y / 0"],
    ),
    "of the notebook": (
        ("def fails(x):\n    # one\n    return x / 0",), "%%sky_broadcast\nfails(3)", ["----> 3     return x / 0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", LINES)
def test_lines_of_errors_are_those_that_the_user_sees(notebook: Notebook, where: str) -> None:
    before, cell, lines = LINES[where]
    for each in before:
        notebook.run(each)
    failed = notebook.fail(cell)
    assert [line for line in lines if line not in failed.text] == []


def test_syntax_error_names_the_line_that_the_user_sees(golden: Golden, notebook: Notebook) -> None:
    error = notebook.fail("%%sky_broadcast\na = 1\ndef f(:\n    pass", "cell-syntax")
    assert "line 3 " in error.text
    assert "def f(:" in error.text


# ------------------------------------------------------------------------------------------ processes


def test_processes_of_user_code_end_quietly(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast --only all -o r\nimport multiprocessing, os, signal\nfrom concurrent.futures import ProcessPoolExecutor\ndef square(x): return x * x\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n    forked = pool.map(square, range(3))\n"
        "with ProcessPoolExecutor(1) as pool:\n    other = list(pool.map(square, [4]))\n"
        "child = multiprocessing.get_context('fork').Process(target=signal.pause); child.start(); child.terminate(); child.join()\n"
        "(forked, other, child.exitcode == -signal.SIGTERM);"
    )
    assert shown.outputs == []
    assert notebook.value("r") == [([0, 1, 4], [16], True)] * 2


# ------------------------------------------------------------------------------------------ state


def test_state_stays_between_cells_and_is_each_ranks_own(notebook: Notebook) -> None:
    notebook.run("mine = 'notebook'")
    notebook.run(f"%%sky_broadcast\n{RANK}kept, mine = [rank], 'rank'")
    notebook.run("%%sky_broadcast\nkept.append('again')")
    assert values(notebook, "kept, mine") == [([0, "again"], "rank"), ([1, "again"], "rank")]
    assert notebook.value("'kept' in globals(), mine") == (False, "notebook")


# ------------------------------------------------------------------------------------------ functions and classes


def test_an_instance_kept_on_the_ranks_is_still_of_its_class(notebook: Notebook) -> None:
    notebook.run("class Model:\n    def f(self): return 1")
    notebook.run("%%sky_broadcast\nm = Model()")
    notebook.run("other = 1")
    assert values(notebook, "isinstance(m, Model), other, m.f()") == [(True, 1, 1)] * 2


POINT = """%%sky_broadcast -o points
import dataclasses, enum, skymagic
rank = skymagic.instance_info().rank
@dataclasses.dataclass
class Point:
    x: int
    def near(self, others): return self.x in {'a', 'b', 1, 2.5} or [o for o in others if o == self]
class Kind(enum.Enum):
    FAR = 1
class Mine(Point):
    place = rank
Point(1), Kind.FAR, Mine(rank)"""


def test_a_class_of_a_broadcast_cell_is_one_class_on_all_ranks(notebook: Notebook) -> None:
    notebook.run(POINT)
    notebook.run("(one, kind, mine), (other, other_kind, other_mine) = points")
    assert notebook.value("one == other, type(one) is type(other), kind is other_kind") == (
        True,
        True,
        True,
    )
    assert notebook.value("type(mine) is type(other_mine), mine.place, other_mine.place") == (
        False,
        0,
        1,
    )
    notebook.run("first = one")
    notebook.run(POINT.replace("x: int", "x: float"))
    assert notebook.value("points[0][0] == points[1][0], type(points[0][0]) is type(first)") == (
        True,
        False,
    )
    notebook.run("%%sky_broadcast -o same\none == Point(1), type(one) is Point")
    assert notebook.value("same") == [(False, False)] * 2
