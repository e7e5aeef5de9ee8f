"""Classes keep their identity between a notebook and its ranks."""

from __future__ import annotations

from tests.data.far import Notebook, ranks

notebook = ranks(1)


def test_ipython_is_the_other_sides(notebook: Notebook) -> None:
    notebook.ranks[0].run(
        "from IPython.core.interactiveshell import InteractiveShell\n"
        "from traitlets.config import Config\n"
        "from skymagic.data.values import pickling\n"
        "ip = InteractiveShell.instance(config=Config({'HistoryManager': {'enabled': False}}))\n"
        "pickled = pickling.dumps({'ip': ip}, globals())\n"
        "same = pickling.loads(pickled.pieces, [], globals())['ip'] is ip"
    )
    assert notebook.values("same") == [True]


# classes: there and back again

CLASSES = """
import abc, collections, dataclasses, enum, functools, typing

class Colour(enum.Enum):
    RED = 1
    BLUE = "b"
    def shout(self): return self.name + "!"

class Flags(enum.IntFlag):
    A = 1
    B = 2

@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: list = dataclasses.field(default_factory=list)

@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    a: int = 1

Pair = collections.namedtuple("Pair", "left right")

class Typed(typing.NamedTuple):
    n: int
    s: str = "x"

class Base(abc.ABC):
    @abc.abstractmethod
    def area(self): ...

class Square(Base):
    def __init__(self, side): self.side = side
    def area(self): return scale * self.side ** 2
    def __eq__(self, other): return type(other) is type(self) and other.side == self.side
    __hash__ = None

class Slotted:
    __slots__ = ("a", "__b")
    def __init__(self): self.a, self.__b = 1, 2
    def b(self): return self.__b

T = typing.TypeVar("T")
class Box(typing.Generic[T]):
    def __init__(self, item): self.item = item

class Meta(type):
    def __new__(mcls, name, bases, members):
        members["made_by"] = mcls.__name__
        return super().__new__(mcls, name, bases, members)
    def __len__(cls): return 42
class Made(metaclass=Meta):
    pass

class Node:
    kinds = {}
    def __init__(self): self.me = self
    def __init_subclass__(cls): Node.kinds[cls.__name__] = cls
class Leaf(Node):
    def who(self): return super().__init_subclass__ is not None and __class__ is type(self)

class Plugin:
    known = {}
    def __init_subclass__(cls, *, name, **options):
        super().__init_subclass__(**options)
        Plugin.known[name] = cls.kind
class Fast(Plugin, name="fast"):
    kind = "quick"

class Strict(type):
    def __new__(mcls, name, bases, members):
        members["checked"] = members["needed"] + 1
        return super().__new__(mcls, name, bases, members)
    def __init__(cls, *more): Strict.count = getattr(Strict, "count", 0) + 1
class Checked(metaclass=Strict):
    needed = 4
class StrictABC(Strict, abc.ABCMeta): pass
class AbstractChecked(metaclass=StrictABC):
    needed = 5
    @abc.abstractmethod
    def f(self): ...

@functools.singledispatch
def describe(x): return "something"
@describe.register
def _int(x: int): return "int"

class Lazy:
    @functools.cached_property
    def value(self): return 7

UserId = typing.NewType("UserId", int)
class Outer:
    class Inner:
        def f(self): return Outer.Inner
class Error(Exception):
    def __init__(self, code): super().__init__(f"code {code}"); self.code = code

scale = 10
values = [
    Colour.RED, Colour.BLUE, Flags.A | Flags.B, Point(1, [2]), Fixed(3), Pair(1, 2), Typed(4), Square(3), Slotted(),
    Box(5), Box[int], Made(), Node(), Leaf(), Lazy(), Outer.Inner(), Error(3), UserId, Meta, Point,
    Fast(), Checked(), AbstractChecked, describe,
]
"""

CHECK = """
a = values
ok = [
    a[0] is Colour.RED and a[0].shout() == "RED!" and Colour("b") is a[1], a[2] == Flags.A | Flags.B and type(a[2]) is Flags,
    a[3] == Point(1, [2]) and Point(1) < Point(2), a[4] == Fixed(3) and not hasattr(a[4], "__dict__"),
    isinstance(a[5], Pair) and a[5].right == 2, type(a[6]) is Typed and a[6].s == "x",
    isinstance(a[7], Base) and a[7].area() == 90, a[8].b() == 2 and not hasattr(a[8], "__dict__"),
    type(a[9]) is Box, a[10] == Box[int], type(a[11]) is Made and Made.made_by == "Meta" and len(Made) == 42,
    a[12].me is a[12], a[13].who() and isinstance(a[13], Leaf), a[14].value == 7, a[15].f() is Outer.Inner,
    a[16].code == 3 and str(a[16]) == "code 3", a[17](5) == 5, isinstance(Made, a[18]), a[19] is Point,
    type(a[20]) is Fast and Plugin.known == {"fast": "quick"}, a[21].checked == 5 and Strict.count == 2,
    a[22].checked == 6 and a[22].__abstractmethods__ == {"f"} and Base.__abstractmethods__ == {"area"}, a[23](1) == "int" and a[23]("x") == "something",
]
"""


def test_classes_keep_their_identity_in_a_round_trip(notebook: Notebook) -> None:
    notebook.here(CLASSES)
    notebook.there(CHECK)
    assert notebook.values("ok") == [[True] * 23]
    before = dict(vars(notebook.namespace["Square"]))
    notebook.namespace["values"] = notebook.fetch("values")
    notebook.here(CHECK)
    assert notebook.namespace["ok"] == [True] * 23
    assert dict(vars(notebook.namespace["Square"])) == before


def test_class_from_a_rank_keeps_its_identity(notebook: Notebook) -> None:
    notebook.there(
        "class Local:\n  def hi(self): return greeting\nvalue = Local()\ngreeting = 'there'"
    )
    notebook.here("greeting = 'here'")
    notebook.namespace["mine"] = notebook.fetch("value")
    assert notebook.namespace["mine"].hi() == "here"
    assert type(notebook.fetch("value")) is type(notebook.namespace["mine"])
    notebook.there("back = isinstance(mine, Local)")
    assert notebook.values("back") == [True]


def test_class_change_in_the_notebook_reaches_the_ranks(notebook: Notebook) -> None:
    notebook.here("class Net:\n  def f(self): return 1\nnet = Net()")
    notebook.there("one = net.f()")
    notebook.here("Net.f = lambda self: 2")
    notebook.there("two = net.f(), type(net) is Net")
    assert notebook.values("[one, *two]") == [[1, 2, True]]


def test_redefined_class_is_another_class(notebook: Notebook) -> None:
    cell = "class Net:\n  def f(self): return 1\n"
    notebook.here(cell + "net = Net()")
    notebook.there("a = isinstance(net, Net)")
    notebook.here(cell)
    notebook.there("b = isinstance(net, Net)")
    assert notebook.values("[a, b]") == [[True, False]]


def test_instance_of_a_rank_does_not_overwrite_the_class_here(notebook: Notebook) -> None:
    notebook.here("class Net:\n  k = 1\nnet = Net()")
    notebook.there("Net.k = 99\nnet.k")
    back = notebook.fetch("net")
    assert type(back) is notebook.namespace["Net"]
    assert notebook.namespace["Net"].k == 1
