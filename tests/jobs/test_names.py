"""Names that a plain cell finds, a broadcast cell finds too: in strings, in annotations, in files, and those that IPython binds."""

from __future__ import annotations

import sys

import IPython
import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, seen
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")


# ------------------------------------------------------------------------------------------- names in strings


def test_a_name_in_a_string(notebook: Notebook) -> None:
    """A separate name for each way to read one, so that no way makes another one pass. tests/data/test_capture.py has all ways."""
    notebook.run("one, two, three = 1, 2, 3")
    cell = "vars()['one'], get_ipython().user_ns['two'], globals()['three'] if 'three' in globals() else 'absent'"
    assert seen(notebook, cell) == [(1, 2, 3)] * 2


def test_a_name_in_a_line_that_ipython_expands(notebook: Notebook) -> None:
    notebook.run(
        "inner = 'here'\ndef read():\n    return get_ipython().getoutput('echo {inner} $inner')"
    )
    assert seen(notebook, "read()[0]") == ["here here"] * 2
    if IPython.version_info < (8,) and sys.version_info >= (3, 12):
        pytest.skip("IPython 7 reads no assignment from ! with Python 3.12, in plain cells neither")
    notebook.run("outer = 'there'")
    notebook.run("%%sky_broadcast\nsaid = !echo $outer {outer.upper()}")
    assert seen(notebook, "said[0]") == ["there THERE"] * 2


def test_globals_alone_bring_nothing(notebook: Notebook) -> None:
    notebook.run("alone = 'here'")
    shown = notebook.run("%%sky_broadcast --dry-run\nfor name in globals(): pass\nvars(), locals()")
    assert "alone" not in shown.text
    assert seen(notebook, "'al' + 'one' in globals()") == [False] * 2


# ---------------------------------------------------------------------------------- names that IPython binds


def test_underscores_are_outputs_of_plain_cells(golden: Golden, notebook: Notebook) -> None:
    notebook.run("import sys")
    notebook.run("'shown'")
    assert seen(notebook, "_ + '!'") == ["shown!"] * 2
    notebook.run("'first'")
    number = notebook.value("len(In) - 1")
    notebook.run("'second'")
    assert seen(notebook, f"_{number}, __, _") == [("first", "first", "second")] * 2
    assert seen(notebook, f"Out[{number}], _oh[{number}], len(Out)") == [("first", "first", 0)] * 2
    notebook.run("%%sky_broadcast\n'theirs'")
    own = notebook.value("len(In) - 1")
    failed = notebook.fail(f"%%sky_broadcast\nOut[{own}]")
    golden.line(failed.text, f"Out[{own}]: ", hide=[rf"\[{own}\]"])
    assert seen(notebook, "_") == ["theirs"] * 2


def test_an_underscore_of_the_ranks_stays_theirs(notebook: Notebook) -> None:
    notebook.run("['shown']")
    notebook.run("%%sky_broadcast\n_ = ['theirs']")
    assert seen(notebook, "_") == [["theirs"]] * 2
    notebook.run("['shown again']")
    assert seen(notebook, "_") == [["shown again"]] * 2
    notebook.run("%%sky_broadcast\nfor _ in range(3): pass")
    assert seen(notebook, "_") == [2, 2]


def test_underscore_is_the_last_output_known_to_ranks(
    notebook: Notebook,
) -> None:
    notebook.run("'shown'")
    notebook.run("%%sky_broadcast\nx = _")
    notebook.run("%%sky_broadcast\n'later'")
    assert seen(notebook, "_") == ["later"] * 2
    notebook.run("'here'")
    notebook.run("%%sky_broadcast\nNone if _ else ''\n5")
    notebook.run("'again'")
    notebook.run("%%sky_broadcast\n5")  # the very object that `_` is on the ranks
    assert seen(notebook, "_") == [5] * 2


def test_a_rank_lets_go_of_the_results_of_its_cells(notebook: Notebook) -> None:
    """Only the last three stay, as `_`, `__` and `___`; otherwise GPU memory would be held."""
    notebook.run(
        "%%sky_broadcast\nimport weakref\nclass Result: pass\nlast = Result(); kept = weakref.ref(last)"
    )
    notebook.run("%%sky_broadcast\nresult, last = last, None\nresult")
    notebook.run("%%sky_broadcast\ndel result\n1")
    assert seen(notebook, "kept() is not None and kept() is __") == [True] * 2
    for number in range(3):
        notebook.run(f"%%sky_broadcast\n{number}")
    assert seen(notebook, "kept(), len(Out)") == [(None, 0)] * 2


def test_underscore_assigned_by_the_notebook_is_kept(notebook: Notebook) -> None:
    notebook.run("_ = str.upper")
    assert seen(notebook, "_('a')") == ["A"] * 2
    assert seen(notebook, "_('b')") == ["B"] * 2
    notebook.run("del _\nget_ipython().push({'_': get_ipython().displayhook._}, interactive=False)")


def test_dunder_names_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("__version__ = '1.2'\n__seed__ = 7\ndef about(): return __version__")
    assert (
        seen(notebook, "__version__, __seed__, about(), __name__")
        == [("1.2", 7, "1.2", "__main__")] * 2
    )


# ---------------------------------------------------------------------------------------------- annotations


def test_string_annotations(notebook: Notebook) -> None:
    notebook.run(
        "import typing, dataclasses\nclass Config:\n    size: int\n"
        "@dataclasses.dataclass\nclass Job:\n    config: 'Config'\n    more: typing.Optional['Config'] = None\n"
        "def work(config: 'Config', jobs: list['Job']) -> 'typing.Any': pass"
    )
    assert seen(notebook, "typing.get_type_hints(work)['config'].__name__") == ["Config"] * 2
    assert (
        seen(notebook, "typing.get_type_hints(Job)['more'] == typing.Optional[Config]")
        == [True] * 2
    )
    assert seen(notebook, "Config.__annotations__ == {'size': int}") == [True] * 2


def test_an_annotation_that_cannot_travel_is_left_out(notebook: Notebook) -> None:
    notebook.run(
        "import threading\nclass Guarded:\n    lock = threading.Lock()\ndef guard(one: 'Guarded'): return 'ran'"
    )
    assert seen(notebook, "guard(None)") == ["ran"] * 2
    assert "Guarded (" in notebook.fail("%%sky_broadcast\nguard(Guarded())").evalue


# -------------------------------------------------------------------------------------------------- files


def test_names_of_a_file_that_runs_in_the_cell(notebook: Notebook) -> None:
    (notebook.folder / "uses_it.py").write_text("made = wanted + 1\n")
    notebook.run("wanted = 41")
    assert seen(notebook, "%run -i uses_it\nmade") == [42, 42]
    (notebook.folder / "uses_it.py").write_text("made = wanted + other\n")
    notebook.run("other = 8")
    assert seen(notebook, "%run -i uses_it.py\nmade") == [49, 49]


# ------------------------------------------------------------------------------- what cannot be seen in a text

DYNAMIC = {
    "globals": "globals()['hid' + 'den']",
    "eval": "eval('hid' + 'den')",
    "a template": "'{hidden}'.format(**globals())",
    "an old template": "'%(hidden)s' % globals()",
    "string.Template": "import string\nstring.Template('$hidden').substitute(vars())",
    "eval of a literal": "eval('hidden')",
    "__main__": "import __main__\n__main__.hidden",
    "a function": "def look(name):\n    return globals()[name]\nlook('hid' + 'den')",
}


@pytest.mark.parametrize("cell", DYNAMIC.values(), ids=DYNAMIC)
def test_a_name_that_the_notebook_has(notebook: Notebook, cell: str) -> None:
    notebook.run("hidden = 'here'")
    failed = notebook.fail(f"%%sky_broadcast\n{cell}")
    notebook.run("import sys\nnotes = sys.last_value.__notes__")
    (note,) = notebook.value("notes")[-1:]
    assert note.endswith("hidden: --push hidden")
    assert f"\n{note}" in failed.text
    notebook.run(f"%%sky_broadcast --push hidden\n{cell}\ndel hidden")


def test_no_push_is_mentioned(notebook: Notebook) -> None:
    notebook.run("held_back = 1")
    assert "--push held_back" in notebook.fail("%%sky_broadcast --no-push\nheld_back").text


NO_HINT = {
    "another dict's key": "{}['hidden']",
    "a module's own name": "import their_names",
    "a local variable": "def f():\n    hidden\n    hidden = 1\nf()",
    "deleted in the cell": "hidden\ndel hidden\nhidden",
    "nobody has it": "globals()['no' + 'body']",
}


@pytest.mark.parametrize("cell", NO_HINT.values(), ids=NO_HINT)
def test_no_hint_if_another_name_is_missing(notebook: Notebook, cell: str) -> None:
    (notebook.folder / "their_names.py").write_text("hidden\n")
    notebook.run("hidden = 'here'")
    assert "--push" not in notebook.fail(f"%%sky_broadcast\n{cell}").text


# ------------------------------------------------------------------------------------------------- modules


def test_a_helper_that_is_saved_with_a_mistake(golden: Golden, notebook: Notebook) -> None:
    helper = notebook.folder / "mistaken.py"
    helper.write_text("def f(): return 1\n")
    notebook.run("import mistaken")
    assert seen(notebook, "mistaken.f()") == [1, 1]
    helper.write_text("def f(): return 2\ndef g(:\n")
    failed = notebook.fail("%%sky_broadcast\nran = True\nmistaken.f()")
    assert (
        failed.evalue
        == f"1 module is not valid Python; nothing was run:\n  {helper}, line 2: invalid syntax"
    )
    helper.write_text("def f(): return 333\n")
    shown = notebook.run("%%sky_broadcast -o seen\nmistaken.f(), 'ran' in globals()")
    assert notebook.value("seen") == [(333, False)] * 2
    golden.line(shown.text, "mistaken.py ", hide=[helper])
    assert "mistaken" not in notebook.run("%%sky_broadcast\nmistaken.f();").text
    notebook.run("import importlib\nimportlib.reload(mistaken)")
    assert "mistaken" not in notebook.run("%%sky_broadcast\nmistaken.f();").text


# ---------------------------------------------------------------------------- flags of the notebook's compiler


def test_future_annotations_of_the_notebook_follow(notebook: Notebook) -> None:
    """Must be the last test: the flag stays set, as in every notebook."""
    notebook.run("from __future__ import annotations")
    notebook.run("import typing\nclass Config: pass\nclass Job:\n    config: Config")
    assert (
        seen(notebook, "def later(a: Nowhere | None): pass\nlater.__annotations__")
        == [{"a": "Nowhere | None"}] * 2
    )
    assert seen(notebook, "typing.get_type_hints(Job)['config'].__name__") == ["Config"] * 2
    assert (
        seen(notebook, "def use(a: Config): pass\ntyping.get_type_hints(use)['a'].__name__")
        == ["Config"] * 2
    )
