"""Values that a plain cell takes as they are: what rebuilds itself, memory maps, and words of a notebook."""

from __future__ import annotations

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import ANSI, Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2")


def there_and_back(notebook: Notebook, check: str, name: str = "value") -> None:
    """`check` holds for the value here, on both ranks, and for both that come back."""
    assert notebook.value(f"bool({check})")
    notebook.run(f"%%sky_broadcast -o back\nassert {check}\n{name}")
    for rank in range(2):
        notebook.run(f"kept, {name} = {name}, back[{rank}]")
        assert notebook.value(f"bool({check})"), f"from rank {rank}"
        notebook.run(f"{name} = kept")


# ------------------------------------------------------------------- values that use the notebook's names when rebuilt

REOPENS = """
import pathlib
pathlib.Path('some.txt').write_text('contents')
suffix = '.txt'
def a_reader(path): return pathlib.Path(path + suffix).read_text()
def z_opened(path): return a_reader(path)
class Dataset:
    def __init__(self, path): self.path, self.text = path, z_opened(path)
    def __getstate__(self): return {'path': self.path}
    def __setstate__(self, state): self.__init__(state['path'])
value = {'train': Dataset('some')}
"""
IN_REDUCE = """
offset = 10
def z_made(n): return Counted(plus(n))
def plus(n): return n + offset
class Counted:
    def __init__(self, n): self.n = n
    def __reduce__(self): return z_made, (self.n - offset,)
value = [Counted(15)]
"""
IN_HASH = """
def z_key(it): return it.n % modulus
modulus = 7
class Key:
    def __init__(self, n): self.n = n
    def __hash__(self): return z_key(self)
    def __eq__(self, other): return z_key(self) == z_key(other)
value = {Key(1): 'a', Key(2): 'b', Key(8): 'c'}
"""
SHARES = """
def z_helper(n): return n * factor
factor = 3
class Holder:
    def __init__(self, n): self.n, self.use = n, z_helper
    def __getstate__(self): return (self.n, self.use)
    def __setstate__(self, state): self.n, self.use = state; self.thrice = z_helper(self.n)
a_holder = Holder(4)
a_holder.thrice = 12
value = a_holder
"""
USES_ANOTHER = """
class Config:
    def __init__(self, **all): self.all = all
    def __setstate__(self, state): self.all = checked(state['all'])
def checked(all): return dict(all)
z_config = Config(n=5)
class Reader:
    def __getstate__(self): return {'k': 1}
    def __setstate__(self, state): self.n = z_config.all['n']
value = Reader()
value.n = 5
"""
REBUILT = {
    "__setstate__": (REOPENS, "value['train'].text == 'contents'"),
    "__reduce__": (IN_REDUCE, "value[0].n == 15"),
    "__hash__ and __eq__": (
        IN_HASH,
        "len(value) == 2 and value[Key(1)] == 'c' and value[Key(9)] == 'b'",
    ),
    "an object in common with its helper": (SHARES, "value.thrice == 12 and value.use(1) == 3"),
    "another such value": (USES_ANOTHER, "value.n == 5"),
}


@pytest.mark.parametrize("kind", REBUILT)
def test_value_uses_names_of_the_notebook_to_rebuild(notebook: Notebook, kind: str) -> None:
    cell, check = REBUILT[kind]
    notebook.run(cell)
    there_and_back(notebook, check)


def test_it_uses_the_new_names_when_they_change_with_it(notebook: Notebook) -> None:
    notebook.run(REOPENS)
    there_and_back(notebook, "value['train'].text == 'contents'")
    notebook.run("def a_reader(path): return 'new ' + path\nvalue = {'train': Dataset('other')}")
    there_and_back(notebook, "value['train'].text == 'new other'")


@pytest.mark.parametrize(
    "kind", sorted(REBUILT.keys() - {"another such value"})
)  # code accompanies a value, other values do not
def test_value_of_a_class_defined_on_ranks_is_rebuilt_here(notebook: Notebook, kind: str) -> None:
    cell, check = REBUILT[kind]
    names = "suffix a_reader z_opened Dataset offset z_made plus Counted z_key modulus Key z_helper factor Holder a_holder"
    names += " Config checked z_config Reader value"
    for magic in ("", "%%sky_broadcast\n"):
        notebook.run(f"{magic}for name in {names!r}.split():\n    globals().pop(name, None)")
    notebook.run(f"%%sky_broadcast -o back\n{cell}\nvalue")
    notebook.run("value = back[1]")
    if (
        "Key" not in check and "z_helper" not in cell
    ):  # these call by name what this side has not got
        assert notebook.value(f"bool({check})")
    mine = [name for name in ("z_opened", "z_made", "z_key", "z_helper", "offset") if name in cell]
    assert not notebook.value(f"[name for name in {mine} if name in globals()]"), (
        "lent for the while of rebuilding"
    )


def test_a_value_that_cannot_be_rebuilt_binds_nothing(golden: Golden, notebook: Notebook) -> None:
    notebook.run(
        "class Broken:\n    def __setstate__(self, state): a_first['n'] / 0\na_first = {'n': 'new'}\nz_broken = Broken()\nz_broken.x = 1"
    )
    notebook.run("%%sky_broadcast --no-push\na_first = {'n': 'old'}")
    error = notebook.fail("%%sky_broadcast --fresh\na_first, z_broken")
    golden.line(error.text, "BindError: z_broken ")
    notebook.run("%%sky_broadcast --no-push -o seen\na_first['n'], 'z_broken' in globals()")
    assert notebook.value("seen") == [("old", False)] * 2


# ---------------------------------------------------------------------------------------------------- memory maps


def test_a_memory_map_is_one_of_the_same_file_on_this_machine(
    golden: Golden, notebook: Notebook
) -> None:
    notebook.run(
        "import numpy as np\n"
        "mapped = np.memmap('mapped.dat', dtype='f4', mode='w+', shape=(4, 3)); mapped[:] = 1\n"
        "later = np.memmap('mapped.dat', dtype='f4', mode='r', offset=8, shape=(5,), order='F')\n"
        "part, own = mapped[1:], np.memmap('mapped.dat', dtype='f4', mode='c', shape=(2,)); own[0] = 5"
    )
    notebook.run(
        "%%sky_broadcast -o seen\nfound = [(type(x).__name__, str(x.mode), float(x.sum())) for x in (mapped, later)]\n"
        "found, type(mapped.base).__name__, float(part.sum()), own.tolist()"
    )
    kinds = [("memmap", "r+", 12.0), ("memmap", "r", 5.0)]
    assert notebook.value("seen[0]") == (kinds, "mmap", 9.0, [5.0, 1.0])
    notebook.run("%%sky_broadcast -t 1\nmapped[3, 2] = 7")
    assert notebook.value("float(mapped[3, 2])") == 7.0
    notebook.run("import os\nos.remove('mapped.dat')")
    shown = notebook.run(
        "%%sky_broadcast --fresh -o seen\nfloat(mapped[3, 2]), float(own[0]), type(mapped).__name__"
    )
    assert notebook.value("seen") == [(7.0, 5.0, "ndarray")] * 2
    golden(shown.stderr, hide=["/.*/"])


# ------------------------------------------------------------------- words of a notebook


def test_usage_lines_and_magics_are_a_notebook_s(golden: Golden, notebook: Notebook) -> None:
    notebook.run(
        "%%sky_broadcast -o used\nimport argparse\nargparse.ArgumentParser().format_usage()"
    )
    assert {ANSI.sub("", each).split()[1] for each in notebook.value("used")} == {
        "ipykernel_launcher.py"
    }
    notebook.run(
        "from IPython.core.magic import register_line_magic\n@register_line_magic\ndef mine(line): return 5"
    )
    failed = notebook.fail("%%sky_broadcast\n%mine 3")
    assert "Line magic function `%mine` not found" in failed.text
    golden.line(failed.text, "%load_ext")
    assert "%load_ext" not in notebook.fail("%%sky_broadcast\n%nobodys 3").text
    notebook.run(
        "%%sky_broadcast -o made\n@get_ipython().register_magic_function\ndef mine(line): return int(line)\n%mine 3"
    )
    assert notebook.value("made") == [3] * len(notebook.value("made"))
