"""What a cell takes from outside: statically, checked against what it really does."""

from __future__ import annotations
import __future__

import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skymagic.data.capture.names import cell_names, is_interactive_name, needed_names, with_scripts
from skymagic.data.values import pickling

BUILTIN = set(dir(__builtins__) if not isinstance(__builtins__, dict) else __builtins__)


def loads(source: str) -> set[str]:
    """Names that a cell takes, without builtins."""
    return set(cell_names(source).loads) - BUILTIN


CASES: dict[str, str] = {
    "": "",
    "x": "x",
    "x = 1; x": "",
    "x; x = 1": "x",
    "x += 1": "x",
    "x: int = y": "y",
    "x: T": "T",
    "from __future__ import annotations\nx: T = 1": "",
    "a, (b, *c) = d": "d",
    "a.b = c; d[e] = f": "a c d e f",
    "x = 1; del x; x": "x",
    "del x": "x",
    "import a.b; a.b.c": "",
    "import a.b as c; c; a": "a",
    "from a import b as c; c; b": "b",
    "from a import *; b": "b",
    "(y := x) + y": "x",
    "a and (b := 1); b": "a b",
    "(b := 1) and a; b": "a",
    "x if c else y": "x c y",
    "f'{a!r:>{w}} {b:%Y}'": "a w b",
    "print(f'{x=}')": "x",
    "await f(x)": "f x",
    "async for i in s: i": "s",
    "async with a as b: b": "a",
    "[i async for i in s if await f(i)]": "s f",
    # branches
    "if c: x = 1\nx": "c x",
    "if c: x = 1\nelse: x = 2\nx": "c",
    "if c: x = 1\nelif d: x = 2\nelse: raise E\nx": "c d E",
    "for i in r: x = i\ni, x": "r i x",
    "for i in r:\n  if i: break\nelse: x = 1\nx": "r x",
    "while c: x = 1\nx": "c x",
    "b = 1\nfor i in r:\n  a = b\n  b = 0; del b": "r b",
    "for i in r:\n  if i: continue\n  else: y = 1\n  y": "r",
    "try: x = f()\nexcept E: x = 0\nx": "f E",
    "try: x = f()\nexcept E: pass\nx": "f E x",
    "try: x = f()\nexcept E: raise\nx": "f E",
    "try: x = f()\nfinally: y = 1\nx, y": "f",
    "try: x = f()\nfinally: x": "f x",
    "try: f()\nexcept E as e: e\ne": "f E e",
    "try:\n  a = 1\n  b = f()\nexcept E: print(a)": "f E a",
    "try: a = 1\nexcept E: a = 2\nelse: b = a\na, b": "E b",
    "try: f()\nexcept* E as e: e": "f E",
    "with a as b, c(b) as d: x = d\nx": "a c",
    "with suppress(E): x = f()\nx": "suppress E f x",
    "with contextlib.suppress(E): x = f()\nx": "contextlib E f x",
    "assert a, b": "a b",
    "match p:\n  case 1: x = 1\nx": "p x",
    "match p:\n  case 1: x = 1\n  case _: x = 2\nx": "p",
    "match p:\n  case C(a=q) if q > k: q\n  case {'k': v, **rest}: v, rest\n  case [h, *t]: h, t\n  case A.B: pass": "p C k A",
    # comprehensions
    "[i * w for i in r if i > t]": "w r t",
    "[i for i in i]": "i",
    "{k: v for k, v in d.items()}": "d",
    "[(i, j) for i in a for j in i.f(b)]": "a b",
    "i = 1; [i for i in r]; i": "r",
    "[y := f(i) for i in r]; y": "f r y",
    "sum(x for x in xs)": "xs",
    "[[j for j in i] for i in g]": "g",
    "[lambda: (i, q) for i in r]": "q r",
    # functions
    "def f(): return x": "x",
    "def f(): return x\nx = 1": "",
    "def f(): return x\nx = 1\nf()": "",
    "def f(): return x\nf()\nx = 1": "x",
    "def f(): return x\ng = f\nx = 1": "x",
    "def f(): return g()\ndef g(): return x\nf()\nx = 1": "x",
    "def f(): return g()\ndef g(): return x\nx = 1\nf()": "",
    "def f(a, *b, c=d, **e): return a, b, c, e": "d",
    "def f(a: A, b=B) -> R: pass": "A B R",
    "from __future__ import annotations\ndef f(a: A): pass": "",
    "@dec(o)\ndef f(): return x\nx = 1": "dec o x",
    "def f():\n  x = 1\n  def g(): return x, y\n  return g": "y",
    "def f():\n  def g():\n    nonlocal n; n += 1\n  n = 0": "",
    "def f():\n  global x\n  x = 1\nf()": "",
    "def f():\n  global x\n  x += 1\nf()": "x",
    "def f():\n  import m\n  return m.x": "",
    "def f():\n  for i in r: pass\n  return [i for i in q]": "r q",
    "def f():\n  try: pass\n  except E as e: e": "E",
    "def f():\n  return (lambda a, b=k: a + b + c)": "k c",
    "def f():\n  class A(B):\n    c = d\n    def m(self): return c, e\n  return A": "B d c e",
    "def f(): return f": "",
    "def f(): x: T = y": "y",
    "async def f():\n  async with a: await b": "a b",
    "lambda: x": "x",
    "f = lambda: x\nx = 1\nf()": "",
    "f = lambda: x\nf()\nx = 1": "x",
    "f = lambda a=b: a": "b",
    "sorted(r, key=lambda i: k[i])": "r k",
    # classes
    "class A: pass": "",
    "class A(B, metaclass=M, k=v):\n  x: T = y\n  z = x\n  def m(self, d=D) -> R: return w": "B M v T y D R w",
    "class A:\n  x = 1\n  def m(self): return x": "x",
    "class A:\n  y = [x for _ in r]\nx = 1": "x r",
    "class A:\n  def m(self): return x\nx = 1\nA().m()": "",
    "class A:\n  def m(self): return x\nA().m()\nx = 1": "x",
    "@dec\nclass A:\n  def m(self): return x\nx = 1": "dec x",
    "class A:\n  def m(self): return A": "",
    "class A:\n  def f(): return q\n  y = f()": "q",
    "class A:\n  x = x": "x",
    "class A:\n  def m(self): return super().m(), __class__": "__class__",
    # strings
    "get_ipython().system('echo {a.b} $c $$d {{e}} {f(g)}')": "get_ipython a c f g",
    "get_ipython().getoutput('awk \\'{print $1}\\' $p')": "get_ipython p",
    "get_ipython().system('cp $src.name x')": "get_ipython src",
    "get_ipython().run_line_magic('timeit', '-n 10 -r3 f(x)')": "get_ipython f x",
    "get_ipython().run_line_magic('cd', '$where')": "get_ipython where",
    "get_ipython().run_cell_magic('time', '', 'y = g(z)\\ny')": "get_ipython g z",
    "get_ipython().run_cell_magic('bash', '', 'echo {q}')": "get_ipython",
    "get_ipython().run_line_magic('run', 'script.py'); d.get('@v')": "get_ipython d",
    "df.query('a > @limit')": "df limit",
    "def f(limit):\n  return df.query('a > @limit + @other')": "df other limit",
    "def f():\n  get_ipython().system('echo {a} $b')": "get_ipython a b",
    "globals(); vars(); locals(); dict(globals()); f(**globals())": "f",
    "for k in globals(): globals()[k]; globals()['a' + k]": "",
    "eval('a'); '{b}'.format(**globals()); '%(c)s' % vars()": "",
    "'x'.format(y)": "y",
}


@pytest.mark.parametrize("source", CASES)
def test_loads(source: str) -> None:
    assert loads(source) == set(CASES[source].split())


KEYS = {
    "'x' in globals(); 'y' not in vars(); 'z' in d": "x y",
    "globals()['x']; globals()['y'] = 1; d['z']": "x y",
    "globals().get('x', z); locals().pop('y'); vars().setdefault('w', 1); d.get('v')": "x y w",
    "vars()['x'], locals()['y'], vars(z)['w']": "x y",
    "get_ipython().user_ns['x']": "x",
    "def f(x): return globals()['a'], 'b' in globals()": "a b",
    "'w' in globals() and w": "",
}


@pytest.mark.parametrize("source", KEYS)
def test_names_looked_up_in_globals_are_probes(source: str) -> None:
    assert set(cell_names(source).probes) == set(KEYS[source].split())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="PEP 695")
def test_type_parameters_are_not_loads() -> None:
    assert loads("def f[T: B](x: T) -> T: return x") == {"B"}
    assert loads("class A[T](Base[T]):\n  x: T\n  def m(self) -> T: return k") == {"Base", "k"}
    assert loads("type X[T] = list[T] | Y") == {"Y"}


class Watched(MutableMapping[str, Any]):
    """Cell-level names that notes what is taken before it was made."""

    def __init__(self, outside: set[str]) -> None:
        self.outside = outside
        self.made: dict[str, Any] = {}
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if name in self.made:
            return self.made[name]
        if name not in self.outside:
            raise KeyError(name)
        self.taken.add(name)
        return 1

    def __setitem__(self, name: str, value: Any) -> None:
        self.made[name] = value

    def __delitem__(self, name: str) -> None:
        del self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.made)

    def __len__(self) -> int:
        return len(self.made)


NAMES = "abcd"
EXPRESSION = st.recursive(
    st.sampled_from(NAMES) | st.integers(0, 2).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("({0[0]} + {0[1]})".format),
        st.tuples(inner, inner).map("({0[0]} and {0[1]})".format),
        st.tuples(inner, inner, inner).map("({0[0]} if {0[1]} else {0[2]})".format),
        st.tuples(st.sampled_from(NAMES), inner).map("({0[0]} := {0[1]})".format),
        st.tuples(inner, st.sampled_from(NAMES)).map("sum([{0[0]} for {0[1]} in [1, 2]])".format),
    ),
    max_leaves=4,
)


def indent(lines: str) -> str:
    return "\n".join("  " + line for line in lines.split("\n"))


STATEMENT: st.SearchStrategy[str] = st.recursive(
    st.one_of(
        st.tuples(st.sampled_from(NAMES), EXPRESSION).map("{0[0]} = {0[1]}".format),
        st.tuples(st.sampled_from(NAMES), EXPRESSION).map("{0[0]} += {0[1]}".format),
        EXPRESSION,
        st.sampled_from(NAMES).map("{0} = 0; del {0}".format),
        EXPRESSION.map("if {0}: raise ValueError".format),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("\n".join),
        st.tuples(EXPRESSION, inner.map(indent), inner.map(indent)).map(
            "if {0[0]}:\n{0[1]}\nelse:\n{0[2]}".format
        ),
        st.tuples(st.sampled_from(NAMES), inner.map(indent)).map(
            "for {0[0]} in (0, 1):\n{0[1]}".format
        ),
        st.tuples(inner.map(indent), inner.map(indent)).map(
            "try:\n{0[0]}\nexcept ValueError:\n{0[1]}".format
        ),
        st.tuples(inner.map(indent), inner.map(indent)).map(
            "try:\n{0[0]}\nfinally:\n{0[1]}".format
        ),
        inner.map(lambda body: f"for _ in (0, 1):\n{indent(body)}\n  break"),
        inner.map(lambda body: f"class K:\n{indent(body)}"),
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(STATEMENT)
def test_whatever_a_cell_takes_when_it_runs_was_foreseen(source: str) -> None:
    watched = Watched(set(NAMES))
    try:
        code = compile(source, "<cell>", "exec", dont_inherit=True)
    except SyntaxError:  # := where a comprehension forbids it
        return
    try:
        exec(code, {}, watched)
    except (ValueError, TypeError, NameError):
        pass
    names = cell_names(source)
    assert watched.taken <= names.loads
    assert set(watched.made) <= names.stores


def test_stores() -> None:
    names = cell_names(
        "a = 1\nfor b in r: c = b\nimport d.e\ndef f():\n  global g\n  g = 1\nclass H: i = 1\n"
        "with x as j: pass\ndel k\nl = 1; del l\nm: int = 2\n[n := 1 for o in r]\ndel p; p = 1"
    )
    assert names.stores == set("a b c d f g H j l m n p".split())
    assert names.certain == set("a d f H j m p".split())


def test_imports_and_attributes() -> None:
    names = cell_names("import a.b as c\nfrom d import e\ndef f():\n  import g\n  return x.y.z")
    assert names.imports == {"a.b", "d", "d.e", "g"}
    assert names.attributes == {"y", "z"}


@pytest.mark.parametrize("source", ["x = ", "def f(:", "return 1", "'\0'", "x = '\ud800"])
def test_invalid_source_is_a_syntax_error(source: str) -> None:
    with pytest.raises(SyntaxError):
        cell_names(source)


def test_bad_escapes_do_not_warn() -> None:
    assert loads(r"'\d' + x") == {"x"}


def test_long_and_deep_cells() -> None:
    assert loads(" + ".join(f"x{n}" for n in range(1000))) == {f"x{n}" for n in range(1000)}
    nested = "f(" * 80 + "x" + ")" * 80
    assert loads(nested) == {"f", "x"}
    assert loads("s = '" + "a" * 5_000_000 + "'\nt") == {"t"}


# reach


def space(source: str) -> dict[str, Any]:
    """A namespace after a cell."""
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec", dont_inherit=True), made)
    return made


def reached(loads: set[str], names: dict[str, Any]) -> dict[str, str]:
    """What a cell needs that loads these names, by the pickles of their values."""

    def uses(name: str, value: object) -> dict[str, str]:
        made = pickling.dumps(value, names, folder="/nowhere")
        return {**made.hints, **made.uses}

    return needed_names(loads, names, uses)


def test_reach_follows_functions_and_classes() -> None:
    names = space(
        "import functools\n"
        "a = b = c = d = e = g = h = 1\n"
        "unused = 5\n"
        "def f(): return a + helper()\n"
        "def helper(x=lambda: b): return [c for _ in range(3)]\n"
        "class Base:\n  def m(self): return d\n"
        "class Net(Base):\n  @property\n  def p(self): return e\n"
        "net = Net()\n"
        "part = functools.partial(f)\n"
        "def deco(fn):\n  def inner(): return fn() + g\n  return inner\n"
        "@deco\ndef wrapped(): return h\n"
    )
    assert reached({"net"}, names) == {
        "net": "the cell",
        "d": "used by Base.m",
        "e": "used by Net.p",
    }
    assert set(reached({"part"}, names)) == {"part", "a", "b", "c", "helper"}
    assert set(reached({"wrapped"}, names)) == {"wrapped", "g", "h"}
    assert reached({"f"}, names)["b"] == "used by <lambda>"
    assert reached({"nothing"}, names) == {}


def test_reach_ends_in_circles() -> None:
    names = space("def f(): return g()\ndef g(): return f()\nlist_ = []\nlist_.append(list_)")
    assert set(reached({"f", "list_"}, names)) == {"f", "g", "list_"}


@pytest.mark.parametrize(
    "name",
    [
        "In",
        "Out",
        "_i",
        "_ii",
        "_i5",
        "_ih",
        "_oh",
        "_dh",
        "__name__",
        "__builtins__",
        "_exit_code",
    ],
)
def test_history_is_not_shipped(name: str) -> None:
    assert is_interactive_name(name, [1])


@pytest.mark.parametrize(
    "name",
    [
        "_private",
        "_x1",
        "__mangled",
        "_ix",
        "Inner",
        "open",
        "exit",
        "_",
        "__",
        "_7",
        "__version__",
        "__all__",
    ],
)
def test_names_of_the_user_are_not_interactive(name: str) -> None:
    assert not is_interactive_name(name, [1])


def test_builtins_are_not_shipped_unless_they_are_the_users() -> None:
    assert is_interactive_name("print", print)
    assert is_interactive_name("open", open)
    assert not is_interactive_name("sum", lambda x: x)


# annotations


HINTS: dict[str, tuple[str, str]] = {
    'def f(a: "A", *b: "B[C]", **c: list["D"]) -> "m.E": pass': ("list", "A B C D m"),
    'class A:\n  x: "B | None" = None': ("", "B"),
    'x: "A" = y': ("y", "A"),
    'class A: pass\ndef f(a: "A"): pass': ("", ""),
    'def f(a: "not python!", b: "Float[T, \'batch\']"): pass': ("", "Float T batch"),
    'def f(a: "Literal[\'train\']", b: t.Literal["x"]): pass': ("t", "Literal"),
    "from __future__ import annotations\ndef f(a: A) -> B: x: C": ("", "A B C"),
    "from __future__ import annotations\nx: A = y": ("y", "A"),
    "from __future__ import annotations\nclass A:\n  x: B\n  def m(self, a: A, b: 'C'): pass": (
        "",
        "B C",
    ),
}


@pytest.mark.parametrize("source", HINTS)
def test_names_in_annotations_that_are_not_evaluated(source: str) -> None:
    names = cell_names(source)
    found = " ".join(sorted(names.loads)), " ".join(sorted(names.hints - BUILTIN))
    assert found == HINTS[source]


def test_annotations_are_postponed_by_an_earlier_cell() -> None:
    flags = __future__.annotations.compiler_flag
    assert cell_names("def f(a: A): pass", flags).hints == {"A"}
    assert cell_names("def f(a: A): pass").loads == {"A"}


def test_only_types_travel_for_an_annotations_sake() -> None:
    text = "class Net: pass\nbatch = 1\ndef f(a: 'Net', b: 'T[batch]', c: Optional['Net']): pass"
    names = space(f"from typing import *\n{text}")
    # since Python 3.14 a function evaluates its annotations when it is asked for them
    assert set(reached({"f"}, names)) == {
        "f",
        "Net",
        *(["Optional"] if sys.version_info >= (3, 14) else []),
    }


# what a function mentions


def test_strings_in_a_function_that_is_compiled() -> None:
    source = "def f(y): return df.query('a > @w')\ndef g(): get_ipython().system('echo {x.y} $z')\ndef k(): return globals()['q']"
    names = space("x = y = z = w = q = df = 1")
    exec(compile(source, "<cell>", "exec"), names)
    assert set(reached({"f"}, names)) == {"f", "w", "df"}
    assert set(reached({"g"}, names)) == {"g", "x", "z"}
    assert set(reached({"k"}, names)) == {"k"}


# files


def test_names_of_a_file_that_a_cell_runs(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import helper\nprint(a, b)\nc = 1\nc.d")
    run = f"get_ipython().run_line_magic('run', '{{}} {path} c')"
    names = with_scripts(cell_names("b = 1\n" + run.format("-i")))
    assert (set(names.loads) - BUILTIN, set(names.imports)) == ({"get_ipython", "a"}, {"helper"})
    assert "d" in names.attributes
    names = with_scripts(cell_names(run.format("-n")))
    assert (set(names.loads) - BUILTIN, set(names.imports)) == ({"get_ipython"}, {"helper"})
    for line in ("-i -t -N 3 script", "script.py", "-i $name", "-m pkg -i", "", "-i"):
        with_scripts(cell_names(f"get_ipython().run_line_magic('run', '{line}')"))
    assert cell_names("get_ipython().run_line_magic('run', '-i -t -N 3 script')").scripts[0][
        :2
    ] == ("script.py", True)
