"""Enumerations of the notebook arrive whole, and each member is one object on each side."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "import dataclasses, datetime, enum", scope="function")

DEFINITIONS = {
    # name: (definition, expression that is True on the notebook and on the ranks)
    "attributes set by __init__": (
        """
class E(enum.Enum):
    S = (128, 4)
    L = (512, 8)
    def __init__(self, width, heads):
        self.width, self.heads = width, heads
    @property
    def per_head(self): return self.width // self.heads
""",
        "E.L.per_head == 64 and E((512, 8)) is E.L and E.L.value == (512, 8)",
    ),
    "own __new__": (
        """
class E(str, enum.Enum):
    A = ("a", 1)
    B = ("b", 2)
    def __new__(cls, text, number):
        self = str.__new__(cls, text)
        self._value_ = text
        self.number = number
        return self
""",
        "E('b') is E.B and E.B.number == 2 and E.B == 'b' and E.B.upper() == 'B'",
    ),
    "counted by __new__": (
        """
class E(enum.Enum):
    def __new__(cls, label):
        self = object.__new__(cls)
        self._value_ = len(cls.__members__) + 1
        self.label = label
        return self
    A = "first"
    B = "second"
""",
        "E(2) is E.B and E.B.label == 'second' and [e.value for e in E] == [1, 2]",
    ),
    "aliases": (
        "class E(enum.Enum):\n    RED = 1\n    CRIMSON = 1\n    BLUE = 2",
        "E.CRIMSON is E.RED and list(E.__members__) == ['RED', 'CRIMSON', 'BLUE'] and len(E) == 2",
    ),
    "composite flags": (
        "class E(enum.Flag):\n    R = 1\n    W = 2\n    X = 4\n    RW = 3\n    NONE = 0",
        "E.RW is (E.R | E.W) and E['NONE'].value == 0 and ~E.R == E.W | E.X and (E.R | E.X) in (E(5),)",
    ),
    "int flag without a single bit": (
        "class E(enum.IntFlag):\n    A = 11",
        "E.A == 11 and E(11) is E.A",
    ),
    "int flag": (
        "class E(enum.IntFlag, boundary=enum.KEEP):\n    A = 1\n    B = 2",
        "E(9) == 9 and (E.A | E.B) == 3 and E(3) is E.A | E.B",
    ),
    "auto": (
        """
class E(enum.StrEnum):
    @staticmethod
    def _generate_next_value_(name, start, count, last): return name.lower() + '!'
    ONE = enum.auto()
    TWO = enum.auto()
""",
        "E.TWO == 'two!' and E('one!') is E.ONE",
    ),
    "functional": (
        "E = enum.IntEnum('E', 'A B C', start=5)",
        "E.C == 7 and E['A'] is E(5) and [1] * E.A == [1] * 5",
    ),
    "missing": (
        """
class E(enum.Enum):
    A = "a"
    @classmethod
    def _missing_(cls, value): return cls(value.lower()) if value.isupper() else None
""",
        "E('A') is E.A",
    ),
    "dataclass members": (
        """
@dataclasses.dataclass(frozen=True)
class Spec:
    layers: int
    width: int = 8
class E(Spec, enum.Enum):
    SMALL = 2, 16
    LARGE = 4, 32
""",
        "E.LARGE.layers == 4 and E.LARGE.width == 32 and dataclasses.is_dataclass(E.SMALL)",
    ),
    "unhashable values": (
        "class E(enum.Enum):\n    A = [1, 2]\n    B = {'x': 1}",
        "E([1, 2]) is E.A and E.B.value == {'x': 1}",
    ),
    "date members": (
        "class E(datetime.date, enum.Enum):\n    A = 2020, 1, 2\n    B = 2021, 1, 2",
        "E.B.year == 2021 and E.A < E.B",
    ),
    "members that are functions": (
        "class E(enum.Enum):\n    HALF = enum.member(lambda self: self / 2)\n    def __call__(self, x): return self.value(x)",
        "E.HALF(4) == 2",
    ),
    "what is set in the class later": (
        "class E(enum.Enum):\n    A = 1\n    B = 2\nE.LABELS = {E.A: 'a', E.B: 'b'}\nE.default = E.B",
        "E.LABELS[E.A] == 'a' and E.default is E.B and len(E) == 2",
    ),
    "base with methods": (
        """
class Base(enum.Enum):
    def hello(self): return f"{type(self).__name__}.{self.name}"
    @classmethod
    def default(cls): return next(iter(cls))
class E(Base):
    A = 1
    B = 2
""",
        "E.default() is E.A and E.B.hello() == 'E.B' and len(E.__mro__) == 4",
    ),
    "own metaclass": (
        """
class Meta(enum.EnumMeta):
    @property
    def labels(cls): return [e.name.title() for e in cls]
class E(enum.Enum, metaclass=Meta):
    ONE = 1
    TWO = 2
""",
        "E.labels == ['One', 'Two']",
    ),
    "named like a property": (
        "class E(enum.Enum):\n    name = 'n'\n    value = 'v'\n    A = 'a'",
        "E.A.name == 'A' and E('n').value == 'n' and E['value'].name == 'value'",
    ),
}


@pytest.mark.parametrize("case", DEFINITIONS)
def test_enum_survives_a_round_trip(notebook: Notebook, case: str) -> None:
    definition, expression = DEFINITIONS[case]
    notebook.run(definition)
    assert notebook.value(expression), "the test's expression is wrong"
    notebook.run("members = list(E)\nby_name = dict(E.__members__)\nkeyed = {e: e.name for e in E}")
    notebook.run(f"""%%sky_broadcast -g ok,back,lookup
ok = ({expression}), members == list(E), by_name == dict(E.__members__), all(a is b for a, b in zip(members, E))
back, lookup = list(E), [keyed[e] for e in E]""")
    assert notebook.value("ok") == [(True, True, True, True)] * 2
    assert notebook.value("[all(a is b for a, b in zip(each, E, strict=True)) for each in back]")
    assert notebook.value("lookup == [[e.name for e in E]] * 2")


@pytest.mark.parametrize("case", DEFINITIONS)
def test_enum_defined_on_ranks_is_pulled(notebook: Notebook, case: str) -> None:
    definition, expression = DEFINITIONS[case]
    notebook.run(f"%%sky_broadcast -g E,members\n{definition}\nmembers = list(E)")
    notebook.run("first, second = E\nE = first")
    assert notebook.value("first is second")
    assert notebook.value(expression)
    assert notebook.value("all(a is b for each in members for a, b in zip(each, E, strict=True))")


def test_composite_flags_travel_by_themselves(notebook: Notebook) -> None:
    notebook.run("class P(enum.Flag):\n    R = 1\n    W = 2\n    X = 4")
    notebook.run("both, inverse, nothing = P.R | P.X, ~P.R, P(0)")
    notebook.run("""%%sky_broadcast -g same,sent
same = both is (P.R | P.X), inverse is (P.W | P.X), nothing is P(0), P.R in both
sent = P.W | P.X""")
    assert notebook.value("same") == [(True,) * 4] * 2
    assert notebook.value("[each is (P.W | P.X) for each in sent]") == [True, True]


def test_redefined_enum_arrives(notebook: Notebook) -> None:
    notebook.run("class Mode(enum.Enum):\n    A = 1\ndef f(): return [e.name for e in Mode]")
    notebook.run("%%sky_broadcast -g names\nnames = f()")
    notebook.run("class Mode(enum.Enum):\n    A = 1\n    B = 2")
    notebook.run("%%sky_broadcast -g names\nnames = f()")
    assert notebook.value("names") == [["A", "B"]] * 2


def test_looking_at_an_enum_is_no_change(notebook: Notebook) -> None:
    notebook.run("class P(enum.Flag):\n    R = 1\n    W = 2\nvalue = [P.R]")
    notebook.run("%%sky_broadcast\nvalue.append(P.W | P.R); P.seen = True; P.R.mark = 5")
    notebook.run("P.R | P.W, ~P.R, P(0); other = P.W")
    notebook.run("%%sky_broadcast -g got\ngot = len(value), P.seen, P.R.mark, other is P.W")
    assert notebook.value("got") == [(2, True, 5, True)] * 2


def test_enum_in_a_class_and_in_a_function(notebook: Notebook) -> None:
    notebook.run("""
class Model:
    class Mode(enum.Enum):
        TRAIN = "t"
        EVAL = "e"
    def __init__(self, mode=Mode.EVAL): self.mode = mode
def make():
    class Inner(enum.IntEnum):
        A = 3
    return Inner
model, Inner = Model(), make()
x = Inner.A""")
    notebook.run("""%%sky_broadcast -g got,back
got = model.mode is Model.Mode.EVAL, Model().mode is Model.Mode.EVAL, x is Inner.A, x + 1
back = model.mode""")
    assert notebook.value("got") == [(True, True, True, 4)] * 2
    assert notebook.value("[each is Model.Mode.EVAL for each in back]") == [True, True]
