"""Cells on the ranks are IPython cells: their syntax, their displays, their errors' lines, and what they find from the notebook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import Pools


@pytest.fixture(scope="module")
def notebook(shared_pools: Pools) -> Iterator[Notebook]:
    with shared_pools.lent("--ranks 2") as one:
        yield one


def values(notebook: Notebook, body: str, options: str = "", then: str = "r") -> object:
    """What `-o r` holds after a broadcast cell."""
    notebook.run(f"%%sky_broadcast -o r {options}\n{body}")
    return notebook.value(then)


RANK = "import os\nrank = int(os.environ['RANK'])\n"


# ------------------------------------------------------------------------------------------ IPython's syntax


def test_top_level_await(notebook: Notebook) -> None:
    assert values(
        notebook, "import asyncio\nasync def f(): return 5\nx = await f()\nawait asyncio.sleep(0, x + 1)"
    ) == [6, 6]


def test_awaiting_something_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("async def slow(x):\n    import asyncio\n    await asyncio.sleep(0)\n    return 2 * x")
    assert values(notebook, "await slow(4)") == [8, 8]


def test_shell_command(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast --only all\n!echo from the shell of $RANK")
    assert sorted(shown.lines) == ["[0] from the shell of 0", "[1] from the shell of 1"]


def test_shell_command_with_a_variable_and_its_output(notebook: Notebook) -> None:
    assert values(notebook, f"{RANK}word = f'r{{rank}}'\nlines = !echo {{word}}; echo two\nlist(lines)") == [
        ["r0", "two"],
        ["r1", "two"],
    ]


def test_line_magic(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast -o r\n%time z = 1\nhere = %pwd\nz, here")
    assert "Wall time" in shown.stdout
    assert notebook.value("r") == [(1, notebook.value("__import__('os').getcwd()"))] * 2


def test_cell_magic_in_the_body(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast\n%%bash\necho from bash, rank $RANK")
    assert shown.stdout == "from bash, rank 0\n"


def test_capture_in_the_body(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\n%%capture seen\nprint('hidden')")
    assert values(notebook, "seen.stdout") == ["hidden\n"] * 2


def test_timeit_in_the_body_uses_the_notebooks_values(notebook: Notebook) -> None:
    notebook.run("factor = 3")
    assert "loop" in notebook.run("%%sky_broadcast\n%timeit -n1 -r1 factor * 2").stdout


def test_magic_that_does_not_exist(notebook: Notebook) -> None:
    shown = notebook.finish(notebook.start("%%sky_broadcast\n%no_such_magic 3"))
    assert shown.error is not None
    assert shown.text == ""
    assert "`%no_such_magic` not found" in shown.error.text
    assert len(shown.error.text.splitlines()) == 2


def test_help_on_a_rank(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast\ndef documented():\n    'what it says'\ndocumented?")
    assert "what it says" in shown.text + "".join(data["text/plain"] for data in shown.rich)


def test_comments_and_blank_lines_only(notebook: Notebook) -> None:
    assert values(notebook, "\n# nothing to do\n\n") == [None, None]


def test_a_cell_that_is_indented_as_a_whole(notebook: Notebook) -> None:
    assert values(notebook, "    a = 1\n    if a:\n        a += 1\n    a") == [2, 2]


def test_text_within_quotes_that_looks_like_magic_stays(notebook: Notebook) -> None:
    assert values(notebook, 'text = """\n%time\n!ls\n{rank} $HOME"""\ntext') == ["\n%time\n!ls\n{rank} $HOME"] * 2


def test_comment_and_quotes_on_the_magic_line(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -o 'quoted'   # where the values go\n1")
    assert notebook.value("quoted") == [1, 1]


def test_python_expressions_expand_on_the_magic_line_only(notebook: Notebook) -> None:
    notebook.run("where = 'expanded'\nwhich = 1")
    notebook.run("%%sky_broadcast -o {where} -t $which\n'{where} $which'")
    assert notebook.value("expanded") == ["{where} $which"]


# ------------------------------------------------------------------------------------------ the last expression


def test_last_expression_is_displayed_from_the_head(notebook: Notebook) -> None:
    shown = notebook.run(f"%%sky_broadcast\n{RANK}[rank, 'x']")
    assert [data["text/plain"] for data in shown.rich] == ["[0, 'x']"]


def test_semicolon_silences_and_the_value_is_kept(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast -o r\n41 + 1;")
    assert shown.outputs == []
    assert notebook.value("r") == [42, 42]


def test_semicolon_within_a_comment_does_not_silence(notebook: Notebook) -> None:
    assert notebook.run("%%sky_broadcast\n42  # not the end;").rich


def test_assignment_and_statement_have_no_value(notebook: Notebook) -> None:
    assert values(notebook, "5\nx = 6") == [None, None]
    assert values(notebook, "5\nfor i in range(2):\n    i") == [None, None]


def test_a_value_of_an_earlier_cell_does_not_come_back(notebook: Notebook) -> None:
    assert values(notebook, "'first'") == ["first"] * 2
    assert values(notebook, "pass") == [None, None]


def test_the_value_of_an_awaited_last_line(notebook: Notebook) -> None:
    assert values(notebook, "import asyncio\nawait asyncio.sleep(0, 'slept');") == ["slept"] * 2


# ------------------------------------------------------------------------------------------ rich display


def test_figure_and_table_from_the_head_in_order(notebook: Notebook) -> None:
    shown = notebook.run(
        "%%sky_broadcast\n%matplotlib inline\nimport matplotlib.pyplot as plt\nimport pandas as pd\n"
        "print('before')\nplt.plot([1, 2])\nplt.show()\nprint('between')\npd.DataFrame({'column': [7]})"
    )
    assert shown.kinds == ["stdout", "display_data", "stdout", "display_data"]
    figure, table = shown.rich
    assert figure["image/png"].startswith("iVBORw0KGgo")  # the signature of PNG files, as base64
    assert "column" in table["text/html"]
    assert "column" in table["text/plain"]
    assert shown.stdout == "before\nbetween\n"


def test_figure_left_open_is_shown_at_the_end(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast\n%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1, 2]);")
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


def test_what_cannot_show_itself_says_so_and_fails_nothing(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast -o r\nclass Shy:\n    def __repr__(self): return 1 / 0\ndisplay(Shy())\n5")
    assert "ZeroDivisionError" in shown.stderr
    assert notebook.value("r") == [5, 5]


def test_widgets_are_shown_as_text(notebook: Notebook) -> None:
    shown = notebook.run("%%sky_broadcast\nimport ipywidgets\nipywidgets.IntSlider(3)")
    assert [list(data) for data in shown.rich] == [["text/plain"]]
    assert "IntSlider(value=3)" in shown.rich[0]["text/plain"]


# ------------------------------------------------------------------------------------------ lines of errors


def test_errors_name_the_line_that_the_user_sees(notebook: Notebook) -> None:
    error = notebook.fail("%%sky_broadcast\na = 1\n\n# a comment\na / 0\nb = 2")
    assert "----> 5 a / 0" in error.text
    assert "skymagic" not in error.text


def test_lines_count_from_the_top_of_the_whole_cell(notebook: Notebook) -> None:
    error = notebook.fail("\n\n%%sky_broadcast\n\n1 / 0")
    assert "----> 5 1 / 0" in error.text


def test_lines_after_magics_and_commands_in_the_body(notebook: Notebook) -> None:
    error = notebook.fail("%%sky_broadcast\n!true\n%time x = 1\nawait __import__('asyncio').sleep(0)\n1 / 0")
    assert "----> 5 1 / 0" in error.text


def test_function_of_an_earlier_cell_on_the_ranks(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\ndef outer(x):\n    y = x\n    return y / 0")
    error = notebook.fail("%%sky_broadcast\nouter(3)")
    assert "----> 2 outer(3)" in error.text
    assert "----> 4     return y / 0" in error.text


def test_function_of_the_notebook_shows_its_own_lines(notebook: Notebook) -> None:
    notebook.run("def fails(x):\n    # one\n    return x / 0")
    error = notebook.fail("%%sky_broadcast\nfails(3)")
    assert "----> 3     return x / 0" in error.text


def test_syntax_error_names_the_line_that_the_user_sees(notebook: Notebook) -> None:
    error = notebook.fail("%%sky_broadcast\na = 1\ndef f(:\n    pass")
    assert error.ename == "CellSyntaxError"
    assert "line 3 of the cell" in error.text
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
    notebook.run(f"%%sky_broadcast\n{RANK}kept = [rank]")
    notebook.run("%%sky_broadcast\nkept.append('again')")
    assert values(notebook, "kept") == [[0, "again"], [1, "again"]]
    assert notebook.value("'kept' in globals()") is False


def test_state_of_an_object_is_not_replaced(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast\nthing = object(); first = id(thing)")
    assert values(notebook, "id(thing) == first") == [True, True]


def test_a_rank_keeps_its_binding_until_the_notebooks_value_changes(notebook: Notebook) -> None:
    notebook.run("step = 1")
    assert values(notebook, "step += 10\nstep") == [11, 11]
    assert values(notebook, "step += 10\nstep") == [21, 21]
    notebook.run("step = 2")
    assert values(notebook, "step") == [2, 2]


def test_a_change_in_place_is_seen(notebook: Notebook) -> None:
    notebook.run("import numpy as np\narray = np.zeros(300_000); table = {'a': [1]}")
    assert values(notebook, "float(array.sum()), table") == [(0.0, {"a": [1]})] * 2
    notebook.run("array[5] = 3; table['a'].append(2)")
    assert values(notebook, "float(array.sum()), table") == [(3.0, {"a": [1, 2]})] * 2


def test_deleting_a_name_on_the_ranks(notebook: Notebook) -> None:
    notebook.run("deleted = 'here'")
    notebook.run("%%sky_broadcast\ndeleted\ndel deleted")
    assert values(notebook, "deleted") == ["here", "here"]


def test_the_ranks_variables_do_not_leak_into_the_notebook(notebook: Notebook) -> None:
    notebook.run("mine = 'notebook'")
    notebook.run("%%sky_broadcast\nmine = 'rank'")
    assert notebook.value("mine") == "notebook"
    assert values(notebook, "mine") == ["rank", "rank"]


# ------------------------------------------------------------------------------------------ functions and classes


def test_functions_reach_what_they_use(notebook: Notebook) -> None:
    notebook.run(
        "import math\noffset = 100\n"
        "def deep(x): return math.floor(x) + offset\n"
        "def decorate(f):\n    return lambda x: f(x) * 2\n"
        "default = 7\n"
        "@decorate\ndef top(x, y=default): return deep(x) + y\n"
        "def closure(n):\n    def inner(x): return top(x) + n\n    return inner\nadded = closure(0.5)"
    )
    assert values(notebook, "[added(i) for i in (1.5, 2.5)]") == [[216.5, 218.5]] * 2


def test_names_in_comprehensions_annotations_and_class_bodies(notebook: Notebook) -> None:
    notebook.run(
        "from dataclasses import dataclass\nbase = 3\ndef times(x): return x * base\nkinds = (int, float)\n"
        "class Holder:\n    table = {i: times(i) for i in range(3)}\n    def read(self, *, of: kinds[0] = base) -> kinds[1]:\n        return self.table[2] + of\n"
        "@dataclass\nclass Settings:\n    size: kinds[0] = base\n    def values(self): return [times(x) for x in range(self.size) if times(x)]"
    )
    notebook.run(
        "%%sky_broadcast -o r\nimport typing\n(Holder().read(), Settings().values(), [f(2) for f in [lambda y: times(y)]], {k: times(v) for k, v in {'a': 1}.items()},\n"
        " typing.get_type_hints(Holder.read)['return'].__name__, Settings.__dataclass_fields__['size'].type.__name__)"
    )
    assert notebook.value("r") == [(9, [3, 6], [6], {"a": 3}, "float", "int")] * 2


def test_changed_function_is_sent_again(notebook: Notebook) -> None:
    notebook.run("def version(): return 1\ndef user(): return version()")
    assert values(notebook, "user()") == [1, 1]
    notebook.run("def version(): return 2")
    assert values(notebook, "user()") == [2, 2]


def test_changed_global_below_a_function_is_seen(notebook: Notebook) -> None:
    notebook.run("level = 1\ndef reads(): return level")
    assert values(notebook, "reads()") == [1, 1]
    notebook.run("level = 2")
    assert values(notebook, "reads()") == [2, 2]


def test_recursion_and_mutual_recursion(notebook: Notebook) -> None:
    notebook.run("def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return n != 0 and even(n - 1)")
    assert values(notebook, "even(10), odd(10)") == [(True, False)] * 2


def test_a_function_that_sets_a_global(notebook: Notebook) -> None:
    notebook.run("count = 0\ndef bump():\n    global count\n    count += 1\n    return count")
    assert values(notebook, "bump(); bump()") == [2, 2]
    assert values(notebook, "bump()") == [3, 3]
    assert notebook.value("count") == 0


def test_classes_with_bases_metaclass_super_and_properties(notebook: Notebook) -> None:
    notebook.run(
        "class Meta(type):\n    def __new__(cls, *a): made = super().__new__(cls, *a); made.tag = 'm'; return made\n"
        "class Base(metaclass=Meta):\n    def __init__(self, x): self.x = x\n    def get(self): return self.x\n"
        "class Child(Base):\n    __slots__ = ('y',)\n    def __init__(self, x): super().__init__(x); self.y = 1\n"
        "    @property\n    def both(self): return self.get() + self.y\n    @classmethod\n    def make(cls): return cls(41)\n"
        "    @staticmethod\n    def s(): return 's'"
    )
    assert values(notebook, "c = Child.make()\nc.both, Child.s(), Child.tag") == [(42, "s", "m")] * 2


def test_instances_that_come_back_are_instances_here(notebook: Notebook) -> None:
    notebook.run(
        "from dataclasses import dataclass, field\nfrom enum import Enum, Flag\nfrom typing import NamedTuple\n"
        "class Colour(Enum):\n    RED = 1\n    BLUE = 2\n"
        "class Way(Flag):\n    UP = 1\n    DOWN = 2\n"
        "@dataclass(frozen=True)\nclass Config:\n    lr: float\n    colour: Colour = Colour.RED\n    sizes: list[int] = field(default_factory=list)\n"
        "class Point(NamedTuple):\n    x: int\n    y: int = 2\n"
        "class Plain:\n    pass"
    )
    notebook.run(
        "%%sky_broadcast -o r\n(Config(0.1, Colour.BLUE, [1]), Colour.RED, Way.UP | Way.DOWN, Point(1), Plain(), Config);"
    )
    assert (
        notebook.value(
            "[(isinstance(a, Config), a == Config(0.1, Colour.BLUE, [1]), b is Colour.RED, c == Way.UP | Way.DOWN,"
            " d == Point(1) and isinstance(d, Point), type(e) is Plain, f is Config) for a, b, c, d, e, f in r]"
        )
        == [(True,) * 7] * 2
    )


def test_instances_that_went_are_instances_there(notebook: Notebook) -> None:
    notebook.run(
        "class Here:\n    pass\nmade = Here()\nfrom enum import Enum\nclass Kind(Enum):\n    A = 1\nkind = Kind.A"
    )
    assert values(notebook, "isinstance(made, Here), kind is Kind.A, type(kind) is Kind") == [(True,) * 3] * 2


def test_an_instance_kept_on_the_ranks_is_still_of_its_class(notebook: Notebook) -> None:
    notebook.run("class Model:\n    def f(self): return 1")
    notebook.run("%%sky_broadcast\nm = Model()")
    notebook.run("other = 1")
    assert values(notebook, "isinstance(m, Model), other, m.f()") == [(True, 1, 1)] * 2


def test_a_class_defined_on_the_ranks_comes_back_as_value(notebook: Notebook) -> None:
    notebook.run("%%sky_broadcast -o r\nclass There:\n    def f(self): return 'there'\nThere()")
    assert notebook.value("[x.f() for x in r]") == ["there", "there"]


def test_unused_names_do_not_travel(notebook: Notebook) -> None:
    notebook.run("import threading\nlock = threading.Lock(); heavy = bytes(10**7); used = 1")
    shown = notebook.run("%%sky_broadcast --dry-run\nused + 1")
    assert "used" in shown.stdout
    assert "heavy" not in shown.stdout
    found = "used, [name for name in ('heavy', 'lock') if name in globals()]"
    assert values(notebook, found) == [(1, [])] * 2


def test_modules_travel_as_imports(notebook: Notebook) -> None:
    notebook.run("import json as j\nimport os.path\nfrom collections import OrderedDict as OD")
    assert values(notebook, "j.dumps(OD(a=1)), os.path.basename('a/b')") == [('{"a": 1}', "b")] * 2


# ------------------------------------------------------------------------------------------ the notebook's folder


def test_local_module_also_when_edited(notebook: Notebook) -> None:
    (notebook.folder / "mymod.py").write_text("BASE = 1\ndef f(x): return x + BASE\nclass K:\n    v = 'one'\n")
    notebook.run("import mymod\nfrom mymod import f, K")
    assert values(notebook, "mymod.f(1), f(1), K.v, isinstance(K(), mymod.K)") == [(2, 2, "one", True)] * 2
    (notebook.folder / "mymod.py").write_text("BASE = 10\ndef f(x): return x + BASE\nclass K:\n    v = 'two'\n")
    notebook.run("import importlib\nimportlib.reload(mymod)\nfrom mymod import f, K")
    assert values(notebook, "mymod.f(1), f(1), K.v, isinstance(K(), mymod.K)") == [(11, 11, "two", True)] * 2


def test_module_edited_without_reload_is_taken_as_it_is_on_disk(notebook: Notebook) -> None:
    (notebook.folder / "fresh.py").write_text("def f(): return 'old'\n")
    assert values(notebook, "import fresh\nfresh.f()") == ["old", "old"]
    (notebook.folder / "fresh.py").write_text("def f(): return 'new and longer'\n")
    assert values(notebook, "import fresh\nfresh.f()") == ["new and longer"] * 2


def test_local_package_with_relative_imports(notebook: Notebook) -> None:
    package = notebook.folder / "pkg"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("from .a import A\n")
    (package / "a.py").write_text("from . import sub\nfrom .sub.b import B\nclass A:\n    b = B\n")
    (package / "sub" / "__init__.py").write_text("")
    (package / "sub" / "b.py").write_text("B = 'from b'\n")
    assert values(notebook, "from pkg import A\nimport pkg.sub.b\nA.b, pkg.sub.b.B") == [("from b", "from b")] * 2
    notebook.run("from pkg import A\nalso = A()")
    assert values(notebook, "isinstance(also, A)") == [True, True]


def test_import_of_a_module_that_is_not_there_fails_on_its_line(notebook: Notebook) -> None:
    error = notebook.fail("%%sky_broadcast\nx = 1\nimport there_is_no_such_module")
    assert error.ename == "ModuleNotFoundError"
    assert "----> 3 import there_is_no_such_module" in error.text


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
    assert notebook.value("one == other, type(one) is type(other), kind is other_kind") == (True, True, True)
    assert notebook.value("type(mine) is type(other_mine), mine.place, other_mine.place") == (False, 0, 1)
    notebook.run("first = one")
    notebook.run(POINT.replace("x: int", "x: float"))
    assert notebook.value("points[0][0] == points[1][0], type(points[0][0]) is type(first)") == (True, False)
    notebook.run("%%sky_broadcast -o same\none == Point(1), type(one) is Point")
    assert notebook.value("same") == [(False, False)] * 2
