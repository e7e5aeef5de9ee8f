"""Cells for `both_ways`: small families over the constructs of the language and the values that notebooks have.

Each family is one text of cases, separated by blank lines. A case is ``setup ---- cell``: the setup is a plain cell of the
notebook, ``%%%`` separates several cells that follow each other.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """Cells to run, after a plain cell; files lie beside the notebook."""

    cell: str
    setup: str = "pass"
    files: Mapping[str, str] = field(default_factory=dict)


CASES: dict[str, Case] = {}

FILES = {
    "module_beside.py": "number = 7\n_hidden = 1\ndef twice(x): return 2 * x\nclass Box:\n    def __init__(self, n): self.n = n\n",
    "made.txt": "content\n",
    "reads_beside.py": "def train(): return lr\nprint(train())\n",
    "script_beside.py": "made = [1, 2]\nclass Made:\n    x = 3\nprint('script ran')\n",
}


def family(name: str, cases: str | Iterable[str], setup: str = "pass") -> None:
    """Add cases; those of a text are separated by blank lines."""
    listed = cases.strip("\n").split("\n\n") if isinstance(cases, str) else list(cases)
    for number, case in enumerate(listed):
        before, dashes, cell = case.rpartition("\n----\n")
        words = " ".join(cell.replace("__import__", "").split())
        CASES[f"{name} {number}: {words[:50]}"] = Case(cell, before if dashes else setup, FILES)


# -- names that are bound ------------------------------------------------------------------------------------------------

OLD = "data = ['old']\nother = [1, 2, 3]\ntable = {'k': [1]}"
family(
    "binding",
    """
data = ['new']

data, other = other, data

(data, [*other]), table = ([1], [2, 3]), None

*data, last = range(4)

data: list = ['annotated']

data: list

data = other = []

data += ['more']

if (data := other):
    pass

[data := each for each in other]

for data in other:
    pass

for data in []:
    pass

for data, *rest in [(1, 2, 3)]:
    pass

for other[0] in (5, 6):
    pass

for table['new'] in 'ab':
    pass

while other:
    data = other.pop()

import contextlib
with contextlib.nullcontext(5) as data:
    pass

import contextlib
with contextlib.nullcontext((1, 2)) as (data, other), contextlib.nullcontext() as table:
    pass

try:
    1 / 0
except ZeroDivisionError as data:
    said = str(data)

try:
    raise ExceptionGroup('g', [ValueError(1), KeyError(2)])
except* ValueError as data:
    said = len(data.exceptions)
except* KeyError:
    pass

match other:
    case [data, *rest]:
        pass

match table:
    case {'k': data, **rest}:
        pass

match other:
    case [_, _, 3] as data:
        pass

match 5:
    case int(data) | data:
        pass

import json as data

from json import dumps as data

import os.path

from module_beside import *

import module_beside
data = module_beside.twice(3)

from module_beside import Box as data
box = data(4)

def data():
    return other

class data:
    kind = 1

async def data():
    return 1

del data

del data, other[0], table['k']

del other[:]

globals()['data'] = 'set'

globals().update(data=1, fresh=2)

exec('data = 5; made = 6')

exec('data = 5', globals())

exec('inner = 5', {})

eval('(data := 8)')

import sys
setattr(sys.modules['__main__'], 'data', 'set')

import __main__
__main__.data = other

locals()['data'] = 'local'

vars()['data'] = 'vars'

globals().pop('data')

def change():
    global data, fresh
    data = 'changed'
    fresh = 1
change()

def change():
    global data
    data = 'never'

def change():
    global data
    del data
change()

class Change:
    global data
    data = 'from a class body'

lambda: (data := 1)

data = 1 if other else 2

False and (data := 1)

data = data

data = None

data = 1; data = 2; data = 3

if False:
    data = 1

try:
    pass
finally:
    data = 'finally'

try:
    data = int('x')
except ValueError:
    pass
else:
    data = 1

type_of = type(data); data = type_of()
""",
    OLD,
)
family("augmented", [f"x = {x}\n----\nx {op}= {y}\nx" for x, ops, y in (
    ("7", "+ - * / // % ** << >> & | ^".split(), "2"),
    ("[1, 2]", "+".split(), "[3]"),
    ("{1, 2}", "| & - ^".split(), "{2, 3}"),
    ("{'a': 1}", "|".split(), "{'b': 2}"),
    ("'ab'", "+ %".split(), "'c'"),
    ("(1,)", "+ *".split(), "(2,)"),
    ("__import__('numpy').arange(3)", "+ - * // %".split(), "2"),
    ("__import__('numpy').eye(2)", "@".split(), "__import__('numpy').ones((2, 2))"),
) for op in ops])  # fmt: skip
family(
    "in place",
    """
other.append(4); other

other[0] = 9; other

other[1:] = [7]; other

other.sort(reverse=True); other

table['k'].append(2); table

table.setdefault('z', []).append(1); table

table.clear(); table

table.pop('k'); other.remove(2)

data.extend(other); data is data

alias = other; alias.append(5); other

a = b = []; a.append(1); a is b, b

other += [4]; other

holder = {'list': other}; holder['list'].append(9); other is holder['list']

def grow(x): x.append('g')
grow(data); data

class Holder: pass
h = Holder(); h.data = data; h.data.append(1); data

import copy
deep = copy.deepcopy(table); deep['k'].append(9); table

nested = [other, other]; nested[0].append(1); nested

setattr(type('T', (), {}), 'x', 1)

box.n = 5; box.n, box

box.items.append(1); vars(box)

del box.n; hasattr(box, 'n')

Box.kind = 'changed'; box.kind

box.__class__ = Other; type(box).__name__

box.__dict__.update(n=8, m=9); box.n + box.m

counter.update('aab'); counter

queue.appendleft(0); queue.rotate(1); list(queue)

buffer[0:2] = b'zz'; bytes(buffer)

ordered.move_to_end('a'); list(ordered)

default['new'].append(1); dict(default)

stream.write('more'); stream.getvalue()
""",
    OLD
    + """
import collections, io
class Other: kind = 'other'
class Box:
    kind = 'box'
    def __init__(self): self.n, self.items = 1, []
box = Box()
counter = collections.Counter('ab')
queue = collections.deque([1, 2, 3])
buffer = bytearray(b'abcd')
ordered = collections.OrderedDict(a=1, b=2)
default = collections.defaultdict(list)
stream = io.StringIO()""",
)

# -- functions and classes -----------------------------------------------------------------------------------------------

family(
    "functions",
    """
def f(a, b=2, *args, c, d=4, **kwargs): return a, b, args, c, d, kwargs
f(1, c=3, e=5), f(1, 2, 3, c=4)

def f(a, /, b, *, c): return a + b + c
f(1, 2, c=3)

def f(x=scale): return x * scale
f(), f(3)

def f():
    def g(): return scale
    return g()
f()

def counter():
    n = 0
    def step():
        nonlocal n
        n += 1
        return n
    return step
step = counter(); step(), step()

f = lambda x, y=scale: x + y; f(1)

def f(n): return 1 if n < 2 else n * f(n - 1)
f(10)

def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
even(10), odd(7)

def f(): 'doc'; return 1
f.extra = 5; f.__doc__, f.extra, f.__name__

def f(x: int, y: 'list[str]' = None) -> dict[str, int]: ...
f.__annotations__

def gen():
    got = yield 1
    yield got
g = gen(); next(g), g.send(5)

def gen():
    try: yield 1
    finally: log.append('closed')
g = gen(); next(g); g.close(); log

def outer(): result = yield from [1, 2]; return 3
list(outer())

import functools
@functools.lru_cache
def f(x): log.append(x); return x
f(1); f(1); log

import functools
@functools.wraps(helper)
def f(x): return helper(x) + 1
f(1), f.__name__

def deco(f): return lambda *a: f(*a) * 10
@deco
@deco
def f(x): return x
f(1)

import functools
p = functools.partial(helper, 5); p()

import functools
functools.reduce(lambda a, b: a + b, map(helper, range(4)))

fs = [lambda i=i: i for i in range(3)]; [f() for f in fs]

fs = [lambda: i for i in range(3)]; [f() for f in fs]

helper(3), helper.__name__, helper.__defaults__

compose = lambda *fs: lambda x: [f(x) for f in fs]
compose(helper, str)(2)

import inspect
str(inspect.signature(helper))

import inspect
def here(): return 5
inspect.getsource(here)

def f():
    x = 1
    del x
    return x
f()

def f(): return undefined_name
f()

import typing
def f(x: 'Later') -> 'Later': ...
class Later: ...
typing.get_type_hints(f)

@staticmethod
def f(): return 1
f()

def f(): global made; made = 1
f(); made

import functools
@functools.singledispatch
def show(x): return 'any'
@show.register
def _(x: int): return 'int'
show(1), show('a')

import contextlib
@contextlib.contextmanager
def ctx():
    log.append('in'); yield 7; log.append('out')
with ctx() as x: log.append(x)
log

def f(*, x, **k): return locals()
f(x=1, y=2)

def f(): return sorted(globals())[:0]
f()
""",
    "scale = 3\nlog = []\ndef helper(x, y=1): return x * scale + y",
)
family(
    "classes",
    """
class A: x = 1
A().x, A.__name__, A.__module__

class A:
    def __init__(self, n): self.n = n
    def __repr__(self): return f'A({self.n})'
    def __eq__(self, o): return self.n == o.n
    def __hash__(self): return self.n
A(1), A(1) == A(1), {A(1), A(1)}

class B(Base):
    def hello(self): return 'B' + super().hello()
B().hello()

class B(Base, list): pass
b = B(); b.append(1); b, [c.__name__ for c in B.__mro__]

class A:
    __slots__ = ('x', 'y')
a = A(); a.x = 1; a.x, hasattr(a, '__dict__')

class A:
    @property
    def p(self): return self._p
    @p.setter
    def p(self, v): self._p = v * 2
a = A(); a.p = 4; a.p

class A:
    @classmethod
    def make(cls): return cls()
    @staticmethod
    def plain(): return 5
A.make().plain()

class Meta(type):
    def __new__(m, name, bases, ns, **k): return super().__new__(m, name, bases, {**ns, 'tag': k})
class A(metaclass=Meta, flag=1): pass
A.tag

class A:
    def __init_subclass__(cls, **k): log.append((cls.__name__, k))
class B(A, kind='k'): pass
log

class A:
    def __set_name__(self, owner, name): self.name = name
class B: field = A()
B.field.name

class A:
    def __getattr__(self, n): return n.upper()
A().missing

class A:
    def __call__(self, x): return x + 1
A()(1)

class A:
    def __enter__(self): return self
    def __exit__(self, *e): log.append(e[0].__name__); return True
with A(): 1 / 0
log

class A:
    def __iter__(self): return iter([1, 2])
    def __len__(self): return 2
    def __getitem__(self, i): return i
    def __contains__(self, i): return True
list(A()), len(A()), A()['k'], 5 in A()

class A:
    class Inner: x = 1
A.Inner.x, A.Inner.__qualname__

class A:
    def _private(self): return 1
    def __mangled(self): return 2
    def f(self): return self._private() + self.__mangled()
A().f()

import dataclasses
@dataclasses.dataclass
class D:
    x: int
    y: list = dataclasses.field(default_factory=list)
D(1), D(1) == D(1), dataclasses.asdict(D(2, [3]))

import dataclasses
@dataclasses.dataclass(frozen=True, order=True)
class D: x: int = 0
sorted([D(2), D(1)]), hash(D(1)) == hash(D(1))

import dataclasses
@dataclasses.dataclass(slots=True, kw_only=True)
class D: x: int
d = D(x=1); dataclasses.replace(d, x=2)

import dataclasses
@dataclasses.dataclass(frozen=True)
class D: x: int
D(1).x = 2

import enum
class E(enum.Enum): A = 1; B = 2
E.A, E(2), E['B'].value, list(E)

import enum
class E(enum.IntFlag): A = 1; B = 2
E.A | E.B

import enum
class E(str, enum.Enum):
    A = enum.auto()
    def shout(self): return self.name
E.A.shout()

from typing import NamedTuple
class P(NamedTuple):
    x: int
    y: int = 2
P(1), P(1)._replace(y=5)

import collections
P = collections.namedtuple('P', 'x y'); p = P(1, 2); p.x, p

from typing import TypedDict
class T(TypedDict): x: int
T(x=1)

from typing import Generic, TypeVar
T = TypeVar('T')
class Stack(Generic[T]):
    def __init__(self): self.items: list[T] = []
Stack[int]().items

import abc
class A(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
A()

from typing import Protocol, runtime_checkable
@runtime_checkable
class P(Protocol):
    def hello(self): ...
isinstance(base, P)

base.hello(), type(base).__name__, isinstance(base, Base)

class Base: pass
isinstance(base, Base)

T = type('T', (Base,), {'x': 1}); T().hello(), T.x

class MyError(ValueError):
    def __init__(self, a, b): super().__init__(a); self.b = b
try: raise MyError(1, 2)
except MyError as e: got = e.args, e.b

class MyError(ValueError): pass
raise MyError('own', 5)

class A:
    def __reduce__(self): return A, ()
A()

class A: pass
a = A(); a.self = a; a.self is a

class A:
    count = 0
    def __init__(self): A.count += 1
A(); A(); A.count

class A:
    def __init__(self): self.f = lambda: scale
A().f()

class Node:
    def __init__(self, n): self.next = Node(n - 1) if n else None
Node(3).next.next.next.next

import functools
@functools.total_ordering
class A:
    def __init__(self, n): self.n = n
    def __lt__(self, o): return self.n < o.n
    def __eq__(self, o): return self.n == o.n
A(2) >= A(1)

import functools
class A:
    @functools.cached_property
    def p(self): log.append('once'); return 1
a = A(); a.p, a.p, log

import weakref
w = weakref.ref(base); w() is base
""",
    "scale = 3\nlog = []\nclass Base:\n    def hello(self): return 'base'\nbase = Base()",
)
family(
    "expressions",
    """
[x * 2 for x in items if x > 1]

{x: x * x for x in items}

{x % 2 for x in items}

sum(x for x in items)

[[y for y in range(x)] for x in items]

[(x, y) for x in items for y in items if x != y]

[x for x in items], x_of_outside

f'{items[0]!r:>5}|{items!s}|{items[1]=}|{3.14159:.2f}|{"n" * 2}'

f'{items[0]:{items[1]}d}'

f'''{
    items
}'''

'%s %d %r' % (items, 1, 'a')

'{x} {0}'.format(1, x=items)

b'bytes' + bytes(items)

items[::-1], items[-1], items[1:2]

1 < items[0] < 5, not items, items or 1, items and 2

a = b = c = 5; (a, b, c)

(lambda *a, **k: (a, k))(*items, **{'z': 1})

print(*items, sep='-', end='!\\n')

print('a', 'b'); print('c')

import sys; print('err', file=sys.stderr); sys.stdout.write('w\\n')

... , Ellipsis is ...

1_000 + 0x1f + 0b11 + 0o7 + 1e3, 2j * 2j

"implicit" 'concat' '''three'''

r'\\n', '\\n', '\\u00e9', '\\N{SNOWMAN}'

items[
    0
] + \\
    1

x = (1 +
     2); x

größe = 5; größe * 2

变量 = [1]; 变量

ﬁ = 3; fi

any(x > 2 for x in items) and all(items)

max(items, key=lambda x: -x), min(items)

sorted(items, reverse=True), list(reversed(items)), list(zip(items, items))

dict(zip('abc', items)), list(enumerate(items)), list(map(str, items))

isinstance(items, list), callable(print), hash('a') == hash('a'), id(items) == id(items)

int('5') + float('1.5'), complex('1j'), bool([]), str(5), repr('a')

assert items, 'there'

assert not items, 'message'

5;

None

pass

# a comment alone

'a string alone'

items

x = 5
x

if items:
    items[0]

for i in range(3): pass
i

1; 2; 3

import this_is_not_there

from json import not_there

__name__

__doc__ is None or True

type(items)(items)

memoryview(b'abc')[1]

getattr(items, 'append').__name__

import tempfile; file = tempfile.TemporaryFile('w+'); file.write('text'); file.seek(0); text = file.read(); del file; text

import os; os.path.basename(os.getcwd()) == os.path.basename(os.path.abspath('.'))

breakpoint_is = 5; breakpoint_is

list = [1]; list

print = str; print(5)

sum = 5; max = 6; sum + max

del items; items

items = 5; del items

print(end='')

print('tab\\tand\\x1b[31mcolour\\x1b[0m')

print('x' * 10000)

for i in range(50): print(i)
""",
    "items = [1, 2, 3]\nx_of_outside = 9",
)
family(
    "await",
    """
import asyncio
await asyncio.sleep(0)

import asyncio
async def f(x): await asyncio.sleep(0); return x * 2
y = await f(4); y

import asyncio
await asyncio.gather(*[asyncio.sleep(0, i) for i in range(3)])

async def agen():
    for i in range(3): yield i
[i async for i in agen()]

async def agen():
    for i in range(3): yield i
async for i in agen(): last = i
last

import contextlib
@contextlib.asynccontextmanager
async def ctx(): yield 5
async with ctx() as x: pass
x

import asyncio
async def f(): raise ValueError('async', 1)
await f()

import asyncio
t = asyncio.ensure_future(asyncio.sleep(0, 'task')); r = await t; del t; r

import asyncio
async def f():
    async with asyncio.timeout(5): return 'in time'
await f()

import asyncio
await asyncio.wait_for(asyncio.sleep(5), 0.01)
""",
)

# -- values out and back -------------------------------------------------------------------------------------------------

VALUES = """
1
-5
10 ** 40
1.5
float('inf')
1j
True
None
...
NotImplemented
'text'
'x' * 100_000
'\\ud800'
b'bytes'
bytearray(b'ab')
memoryview(b'abc').tolist()
(1, 'a', None)
()
[[], [[]]]
{'a': {'b': [1]}}
{1, 2, 3}
frozenset('ab')
range(2, 9, 3)
slice(1, None, 2)
int
list[int]
type(None)
len
str.upper
'abc'.upper
[].append
print
ValueError
ValueError('a', 1)
KeyError('k')
OSError(2, 'not there', 'file')
UnicodeDecodeError('utf-8', b'x', 0, 1, 'why')
ExceptionGroup('g', [ValueError(1), TypeError(2)])
__import__('datetime').datetime(2024, 1, 2, 3, 4)
__import__('datetime').timedelta(days=1, seconds=5)
__import__('datetime').timezone.utc
__import__('zoneinfo').ZoneInfo('UTC')
__import__('decimal').Decimal('1.10')
__import__('fractions').Fraction(1, 3)
__import__('uuid').UUID(int=5)
__import__('pathlib').Path('a/b')
__import__('re').compile('a+', 2)
__import__('collections').Counter('aab')
__import__('collections').deque([1, 2], maxlen=3)
__import__('collections').OrderedDict(a=1)
__import__('collections').defaultdict(int, a=1)
__import__('collections').ChainMap({'a': 1}, {'b': 2})
__import__('types').SimpleNamespace(a=1, b=[2])
__import__('types').MappingProxyType({'a': 1})
__import__('array').array('d', [1.0, 2.0])
__import__('ipaddress').ip_address('10.0.0.1')
__import__('enum').Enum('E', 'A B')
__import__('enum').Enum('E', 'A B').A
__import__('functools').partial(int, base=2)
__import__('operator').itemgetter(1)
__import__('operator').attrgetter('a.b')
__import__('itertools').chain
__import__('string').Template('$a')
__import__('random').Random(5).random()
__import__('math')
__import__('os').path
__import__('json').dumps
__import__('io').StringIO('text').getvalue()
__import__('io').BytesIO(b'bytes')
__import__('struct').pack('<i', 5)
__import__('typing').Optional[int]
__import__('typing').Callable[[int], str]
__import__('statistics').mean
__import__('numpy').float32(1.5)
__import__('numpy').arange(5)
__import__('numpy').arange(6).reshape(2, 3).T
__import__('numpy').zeros((0, 3))
__import__('numpy').array(5)
__import__('numpy').array(['a', 'bc'])
__import__('numpy').array([1, 'a', None], dtype=object)
__import__('numpy').array([(1, 2.0)], dtype=[('a', int), ('b', float)])
__import__('numpy').array(['2024-01-01'], dtype='datetime64[D]')
__import__('numpy').ma.array([1, 2], mask=[0, 1])
__import__('numpy').dtype('f4')
__import__('numpy').float64
__import__('numpy').sin
__import__('numpy').nan
__import__('numpy').arange(10)[::2]
__import__('numpy').asfortranarray(__import__('numpy').ones((2, 3)))
__import__('numpy').random.default_rng(5).integers(10, size=3)
__import__('numpy').random.default_rng(5)
__import__('numpy').matrix([[1, 2]])
__import__('numpy').poly1d([1, 2])
__import__('pandas').DataFrame({'a': [1, 2], 'b': ['x', None]})
__import__('pandas').Series([1.0, 2.0], name='s', index=['p', 'q'])
__import__('pandas').date_range('2024-01-01', periods=3, tz='UTC')
__import__('pandas').Timestamp('2024-01-01', tz='Europe/Berlin')
__import__('pandas').Timedelta('1D')
__import__('pandas').period_range('2024-01', periods=2, freq='M')
__import__('pandas').Categorical(['a', 'b', 'a'])
__import__('pandas').MultiIndex.from_product([[1, 2], ['a']])
__import__('pandas').DataFrame({'t': __import__('pandas').to_datetime(['2024-01-01'])})
__import__('pandas').array([1, None], dtype='Int64')
__import__('pandas').interval_range(0, 3)
__import__('pandas').NA
__import__('pandas').NaT
__import__('torch').arange(4)
__import__('torch').ones(2, 3, dtype=__import__('torch').bfloat16)
__import__('torch').ones(2, requires_grad=True)
__import__('torch').tensor(5)
__import__('torch').tensor([True, False])
__import__('torch').zeros(0)
__import__('torch').eye(3).to_sparse()
__import__('torch').arange(6).reshape(2, 3).t()
__import__('torch').float32
__import__('torch').device('cpu')
__import__('torch').Size([1, 2])
__import__('torch').nn.Parameter(__import__('torch').ones(2))
__import__('torch').nn.Linear(2, 1).state_dict().keys().__class__.__name__
__import__('torch').nn.ReLU()
__import__('torch').Generator().initial_seed() * 0
__import__('torch').complex(__import__('torch').ones(1), __import__('torch').ones(1))
__import__('torch').quantize_per_tensor(__import__('torch').ones(2), 0.1, 0, __import__('torch').qint8)
__import__('torch').nested.nested_tensor([__import__('torch').ones(1), __import__('torch').ones(2)]).size(0)
""".strip().splitlines()
family("value", [f"v = {value}\n----\nw = v; made = {value}\nmade" for value in VALUES])

# -- libraries -----------------------------------------------------------------------------------------------------------

family(
    "numpy",
    """
a[0] = 9; a

a *= 2; a

b = a; b += 1; a

v = a[1:]; v[0] = 5; a, v.base is a

a.resize(5); a

a.sort(); a[::-1]

a.shape = (1, 3); a

np.add(a, 1, out=a); a

m[m > 1] = 0; m

m @ m, m.sum(axis=0), m.mean()

a.astype(float) / 0

np.linalg.inv(np.zeros((2, 2)))

np.reshape(a, (2, 2))

a[10]

with np.errstate(all='ignore'): r = a / 0
r.shape

np.concatenate([a, a]), np.where(a > 1, a, -a)

a.flags.writeable = False; a[0] = 1

np.vectorize(lambda x: x + 1)(a)

np.array([a, a]).tolist()

[x.item() for x in a]
""",
    "import numpy as np\na = np.array([3, 1, 2])\nm = np.arange(4).reshape(2, 2)",
)
family(
    "pandas",
    """
df['c'] = df.a * 2; df

df.loc[0, 'a'] = 9; df

df.drop(columns='b', inplace=True); df

df = df[df.a > 1]; df

df.groupby('b').a.sum()

df.sort_values('a', ascending=False).reset_index(drop=True)

df.merge(df, on='a')

df.apply(lambda r: r.a + 1, axis=1)

df.to_dict('records')

df.a.iloc[7]

df['missing']

s = df.a; s.name = 'renamed'; s

df.index = ['p', 'q', 'r']; df

df.columns = ['x', 'y']; df.dtypes

pd.concat([df, df], ignore_index=True)

df.describe().loc['mean']

df.b.astype('category').cat.codes

df.a.rolling(2).mean()

df.to_csv(index=False)

df.query('a > @limit')

t = pd.to_datetime(pd.Series(['2024-01-02'])); t.dt.day

df.assign(n=lambda d: d.a + limit)
""",
    "import pandas as pd\ndf = pd.DataFrame({'a': [1, 2, 3], 'b': ['x', 'y', 'x']})\nlimit = 1",
)
family(
    "torch",
    """
t.add_(1); t

t[0] = 9; t

u = t.view(1, 3); u[0, 0] = 7; t

(t * 2).sum().item()

w.sum().backward(); w.grad

loss = (w * 3).sum(); loss.backward(); w.grad

opt.zero_grad(); net(x).sum().backward(); opt.step(); [p.detach() for p in net.parameters()]

net.eval(); net.training

with torch.no_grad(): net.weight.zero_()
net.weight

class M(torch.nn.Module):
    def __init__(self): super().__init__(); self.l = torch.nn.Linear(2, 1)
    def forward(self, x): return self.l(x)
torch.manual_seed(0); m = M(); m(x).shape

torch.manual_seed(0); torch.rand(2)

t.numpy()

torch.stack([t, t]).sum(0)

torch.ones(2) @ torch.ones(3)

t.reshape(2, 2)

net(torch.ones(1, 5))

net.state_dict()

net.load_state_dict({k: v * 0 for k, v in net.state_dict().items()})

torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=1).batch_size

[b[0].shape for b in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=1)]

torch.autograd.grad((w ** 2).sum(), w)

p = net.weight; p is net.weight, opt.param_groups[0]['params'][0] is p

import copy; n2 = copy.deepcopy(net); n2.weight is net.weight

torch.jit.is_scripting(), torch.is_tensor(t)

torch.einsum('i,i->', t.float(), t.float())

sched = torch.optim.lr_scheduler.StepLR(opt, 1); opt.step(); sched.step(); opt.param_groups[0]['lr']

torch.nn.functional.relu(torch.tensor([-1.0, 2.0]))

net.register_buffer('buf', torch.ones(1)); list(dict(net.named_buffers()))

h = net.register_forward_hook(lambda m, i, o: o * 0); net(x)
""",
    "import torch\ntorch.manual_seed(1)\nt = torch.arange(3)\nx = torch.ones(2, 2)\nw = torch.ones(2, requires_grad=True)\n"
    "net = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(net.parameters(), lr=0.5)",
)

# -- exceptions ----------------------------------------------------------------------------------------------------------

_ARGUMENTS = {
    "UnicodeDecodeError": "'utf-8', b'a', 0, 1, 'why'",
    "UnicodeEncodeError": "'utf-8', 'a', 0, 1, 'why'",
    "UnicodeTranslateError": "'a', 0, 1, 'why'",
    "BaseExceptionGroup": "'g', [KeyboardInterrupt()]",
    "ExceptionGroup": "'g', [ValueError(1)]",
}
_ERRORS = sorted(
    name
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, BaseException) and value.__name__ == name
)
family("raise", [f"raise {name}({_ARGUMENTS.get(name, '1, 2')})" for name in _ERRORS])
family(
    "failing",
    """
before = 1; 1 / 0; after = 2

[][1]

{}['k']

int('x')

'a' + 1

None.attribute

undefined

raise

raise ValueError

raise ValueError('a') from KeyError('b')

try:
    1 / 0
except ZeroDivisionError:
    raise KeyError('during')

try:
    1 / 0
finally:
    cleaned = True

import json; json.loads('{')

open('/nowhere/at/all')

import os; os.rmdir('/nowhere/at/all')

import subprocess; subprocess.run(['false'], check=True)

next(iter([]))

raise ExceptionGroup('g', [ValueError(1), OSError(2, 'x')])

class E(Exception):
    def __str__(self): return 'own words'
raise E(1)

class E(Exception):
    def __init__(self, code): self.code = code
raise E(5)

e = ValueError('noted'); e.add_note('a note'); raise e

import sys; sys.exit(3)

import sys; sys.exit('words')

assert 1 == 2, [1, 2]

(lambda: 1 / 0)()

[1 / x for x in (1, 0)]

class A:
    x = 1 / 0

import decimal; decimal.Decimal('x')

import re; re.compile('(')

import struct; struct.unpack('i', b'')

5()

for x in 5: pass

a, b = 1

a, b = 1, 2, 3

(1).real = 5

import threading; threading.Lock().release()

'{'.format()

b'\\xff'.decode()

'\\ud800'.encode()

list(range(3)).index(9)

isinstance(1, 'a')

sorted([1, 'a'])

object.__new__(5)

made = [1]; made.append(undefined); made

partial = [1]; partial.append(2); raise ValueError('after')

x = 1
del x
x
""",
)
family(
    "syntax",
    """
x = = 1

def f(:

if True:
x = 1

'open

x = (1

return 5

yield 5

break

f(a=1, a=2)

1 = x

import

class

    indented = 1
  wrong = 2

nonlocal x

def f(x, x): pass

print 5

x = 5 5

await = 5

{1: 2, **}

lambda x: yield x

f'{'
""",
)

# -- IPython -------------------------------------------------------------------------------------------------------------

family(
    "magics",
    """
%%time
made = sum(items)

%%time
made = 1
made

%time made = [1, 2]

%time made = [1]; other = 2

%%capture
made = 5
print('hidden')

%%capture --no-stderr
made = 5

%%timeit -n 1 -r 1
never = 1

%run script_beside.py

%run -i script_beside.py

here = %pwd
len(here) > 0

lines = !echo one; echo two
list(lines)

!echo shell

!echo {items[0]} $items

%env MADE_HERE=5

import os; os.environ['MADE_TOO'] = '1'; os.environ['MADE_TOO']

%%python -c pass
1

%%bash
echo from bash

%%writefile -a made.txt
content {items}

%load_ext not_an_extension

%not_a_magic

%%not_a_magic
x = 1

get_ipython().push({'pushed': [1]})

get_ipython().run_line_magic('time', 'made = 5')

assert get_ipython().run_cell('made = 6')

get_ipython().ex('made = 7')

get_ipython().ev('items[0]')

get_ipython().user_ns['made'] = 9

%precision 2
3.14159

%who_ls list

items?

%%html
<b>bold</b>

%matplotlib not_a_backend

%alias_magic t time

%%script bash
echo script

from IPython.display import display
display(5)

display(items)

from IPython.display import HTML
HTML('<b>x</b>')

%pinfo items

%%prun -q
made = 1

%cd .

%xmode Plain

made = %sx echo sx
list(made)
""",
    "items = [1, 2, 3]",
)
family(
    "several cells",
    """
a = [1]
%%%
a.append(2)
%%%
a

def f(): return g()
%%%
def g(): return 5
%%%
f()

class A: x = 1
a = A()
%%%
class A: x = 2
%%%
a.x, A.x, isinstance(a, A)

x = 5
%%%
del x
%%%
x

import numpy as np
%%%
np.ones(2)

raise ValueError('first')
%%%
recovered = 1

made = 1; 1 / 0
%%%
made

1 + 1
%%%
_ + 1

n = 0
%%%
n += 1
%%%
n += 1
%%%
n

items.append(4)
%%%
items

items = items + [4]
%%%
items

del items
%%%
made = 1

gen = (i for i in range(5))
%%%
next(gen)
%%%
list(gen)

f = open('several.txt', 'w')
%%%
_ = f.write('x'); f.close()
%%%
open('several.txt').read()

import threading; lock = threading.Lock()
%%%
with lock: made = 1
made

def f(x=[]): x.append(1); return x
%%%
f()
%%%
f()

import random; random.seed(5)
%%%
random.random()

from module_beside import twice
%%%
twice(4)

global_list = items
%%%
global_list is items, global_list.append(9)
%%%
items

x = 1
%%%
def show(): return x
%%%
x = 2
%%%
show()

try: 1 / 0
except ZeroDivisionError as e: kept = e
%%%
type(kept).__name__, kept.args

with open('ctx.txt', 'w') as handle: pass
%%%
handle.closed

print('a')
%%%
print('b')
""",
    "items = [1, 2, 3]",
)
# -- plain cells between broadcast ones: what ``%%local`` begins runs in the notebook both ways --------------------------

CHANGED = "\n%%%\n%%local\nlr = 0.5\n%%%\n"
family(
    "read by functions",
    [
        f"lr = 0.1\n----\n{made}{CHANGED}{call}"
        for made, call in [
            ("def train(): return lr\ntrain()", "train()"),
            ("train = lambda: lr\ntrain()", "train()"),
            ("import functools\ntrain = functools.partial(lambda x: lr, 1)\ntrain()", "train()"),
            (
                "import functools\n@functools.wraps(print)\ndef train(): return lr\ntrain()",
                "train()",
            ),
            (
                "import functools\n@functools.lru_cache\ndef train(n): return lr\ntrain(1)",
                "train(2), train(1)",
            ),
            ("class T:\n    def run(self): return lr\ntrain = T().run\ntrain()", "train()"),
            (
                "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x): return x * lr\nnet = Net()\nnet(2)",
                "net(2)",
            ),
            ("exec('def train(): return lr')\ntrain()", "train()"),
            ("hooks = []\n@hooks.append\ndef train(): return lr\nhooks[0]()", "hooks[0]()"),
            ("def low(): return lr\ndef train(): return [low() for _ in 'ab']\ntrain()", "train()"),
            (
                "def make():\n    def inner(): return lr\n    return inner\nlr; train = make()",
                "train()",
            ),
            ("get_ipython().run_cell('def train(): return lr')\ntrain()", "train()"),
            ("%run -i reads_beside.py", "train()"),
        ]
    ],
)
family(
    "helpers that change",
    """
def helper(): return 1
----
def train(): return helper()
train()
%%%
%%local
def helper(): return 2
%%%
train()

def helper(): return 1
----
train = helper
train()
%%%
%%local
def helper(): return 2
%%%
train(), helper()

class Helper:
    def __call__(self): return scale
scale = 1
----
made = Helper()
made()
%%%
%%local
scale = 3
%%%
made()

scale = {'a': [1]}
----
def train(): return scale['a']
train()
%%%
%%local
scale['a'].append(2)
%%%
train()
""",
)
CLASS = """class Item:
    count, all = 0, []
    def __init__(self, n): self.n = n
    def shown(self): return self.n
one = Item(1)"""
family(
    "state of classes",
    [
        f"{CLASS}\n----\nItem, one\n{change}\n%%%\n%%local\ntwo = Item(2)\n%%%\ngot = two.n, one.shown(), {expression}\ndel Item, one, two"
        for change, expression in [
            ("Item.count = 5", "two.count"),
            ("Item.count += 5", "Item.count"),
            ("Item.all.append(one.n)", "two.all"),
            ("Item.shown = lambda self: -self.n", "two.shown()"),
            ("Item.other = 'x'", "two.other"),
            ("del Item.count", "hasattr(two, 'count')"),
            ("Item.double = property(lambda self: 2 * self.n)", "two.double"),
            ("setattr(Item, 'count', 7)", "one.count"),
            ("type(one).count = 8", "type(two).count"),
            ("Item.__repr__ = lambda self: 'item'", "repr(two)"),
        ]
    ],
)
family(
    "assigned again",
    [
        f"{statement}\n----\n{change}\n%%%\n%%local\n{statement}\n%%%\n{expression}"
        for statement, change, expression in [
            ("losses = []; n = 0", "losses.append(1); n += 1", "losses, n"),
            ("n = None", "n = 5", "n"),
            ("n = True", "n = not n", "n"),
            ("name = 'text'", "name += '!'", "name"),
            ("def step(): return 1", "step = lambda: 2", "step()"),
            ("import json as tool", "tool = 5", "tool.dumps([1])"),
            ("import numpy as np\na = np.zeros(5)", "a[1] = 3", "a.sum()"),
            ("for n in range(3): pass\nn = 7", "n = 9", "n"),
            ("(n := 4)", "n = 9", "n"),
            ("n, (m, *rest) = 1, (2, 3)", "n, m, rest = 5, 6, 7", "n, m, rest"),
            ("state = {'step': 0}", "state['step'] += 1", "state"),
        ]
    ],
)
family(
    "typed after it came back",
    [
        f"{setup}\n----\n{there}\n%%%\n%%pull {name}\n%%%\n{later}\n%%%\n%%local\n{typed}\n%%%\n{name}"
        for setup, there, name, later, typed in [
            ("pass", "n = 3", "n", "n = 50", "n = 3"),
            ("pass", "n = True", "n", "n = False", "n = True"),
            ("pass", "n = None", "n", "n = 1", "n = None"),
            ("pass", "n = 'a'", "n", "n = 'b'", "n = 'a'"),
            ("pass", "n = 1.0", "n", "n = 2.0", "n = 3.0"),
            ("n = 3", "n = 3", "n", "n += 1", "n = 3"),
            ("b = 0", "b = 0", "b", "b = 5", "del b\nb = 0"),
            ("b = 0", "b += 1", "b", "b = 5", "b = 0"),
            ("pass", "n = ()", "n", "n = (1,)", "n = [2]"),
            ("pass", "n = [1]", "n", "n.append(2)", "n = []"),
        ]
    ],
)
family(
    "environment",
    [
        f"import os\n----\nos\n%%%\n%%local\n{change}\n%%%\n{expression}"
        for change, expression in [
            ("os.environ['V2_A'] = 'x'", "os.environ['V2_A']"),
            ("os.environ.update(V2_B='y')", "os.environ.get('V2_B')"),
            ("os.environ.setdefault('V2_C', 'z')", "os.getenv('V2_C')"),
            ("os.environ['V2_D'] = '1'; del os.environ['V2_D']", "'V2_D' in os.environ"),
            ("%env V2_E=e", "os.environ['V2_E']"),
            ("%set_env V2_F=f", "os.environ['V2_F']"),
            ("os.putenv('V2_G', 'g'); os.environ['V2_G'] = 'g'", "os.popen('echo $V2_G').read()"),
            ("os.environb[b'V2_H'] = b'h'", "os.environ['V2_H']"),
            ("os.environ |= {'V2_I': 'i'}", "os.environ['V2_I']"),
            ("os.environ['V2_J'] = 'ünï=1 2'", "os.environ['V2_J']"),
        ]
    ],
)
family(
    "what keeps its identity",
    [
        f"{setup}\n----\n{expression}"
        for setup, expression in [
            (
                "import argparse\nparser = argparse.ArgumentParser(add_help=False)\n_ = parser.add_argument('--x', default=argparse.SUPPRESS)",
                "parser.parse_args([]), parser.parse_args(['--x', '1'])",
            ),
            ("ba = bytearray(b'abc'); view = memoryview(ba)", "view[0] = 65; ba, view.obj is ba"),
            (
                "class Log(dict):\n    def __setitem__(self, k, v): super().__setitem__(k, [v])\nlog = Log(); log['a'] = 1",
                "log['b'] = 2; log, type(log) is Log",
            ),
            (
                "import typing\nUser = typing.NewType('User', int)",
                "User.__module__, User.__supertype__, User(3)",
            ),
            (
                "import weakref\nclass A: pass\na = A(); held = weakref.WeakSet([a])",
                "len(held), a in held",
            ),
            (
                "import dataclasses\nmissing = [dataclasses.MISSING]",
                "missing[0] is dataclasses.MISSING",
            ),
            (
                "import inspect\nempty = inspect.signature(lambda x: x)",
                "empty.parameters['x'].default is inspect.Parameter.empty",
            ),
            ("import enum\nclass C(enum.Enum):\n    A = 1\nc = [C.A]", "c[0] is C.A, C(1) is c[0]"),
            (
                "import pandas as pd\nmissing = {'a': pd.NA, 'b': pd.NaT}",
                "missing['a'] is pd.NA, missing['b'] is pd.NaT",
            ),
            ("import numpy as np\nm = [np.ma.masked]", "m[0] is np.ma.masked"),
            (
                "constants = [NotImplemented, ..., None, True]",
                "constants[0] is NotImplemented, constants[1] is ...",
            ),
            (
                "import unittest.mock\none = unittest.mock.sentinel.one",
                "one is unittest.mock.sentinel.one",
            ),
            (
                "import typing\nkinds = [typing.Any, typing.Optional[int]]",
                "kinds[0] is typing.Any, kinds[1] == typing.Optional[int]",
            ),
        ]
    ],
)
family(
    "changed right after a cell was sent",
    [
        f"{setup}\n----\n%%behind\nimport copy, time; time.sleep(0.05); was = copy.deepcopy(a)\n%%%\n%%local\n{change}\n%%%\ndel time, copy; a; was"
        for setup, change in [
            ("a = [1, 2]", "a.append(3)"),
            ("a = {'k': [1]}", "a['k'].append(2)"),
            ("a = {1, 2}", "a.add(3)"),
            ("a = bytearray(b'abc')", "a[0] = 65"),
            ("import numpy as np\na = np.zeros(1_000_000)", "a[:] = 1"),
            ("import numpy as np\na = [np.arange(4), {'b': np.ones(3)}]", "a[1]['b'] *= 5"),
            ("import torch\na = torch.ones(100_000)", "_ = a.add_(1)"),
            ("import pandas as pd\na = pd.DataFrame({'x': [1, 2]})", "a.loc[0, 'x'] = 9"),
            ("class Item: pass\na = Item(); a.n = 1", "a.n = 2"),
            ("import collections\na = collections.deque([1, 2])", "a.appendleft(0)"),
        ]
    ],
)
CASES["long: a thousand lines"] = Case("\n".join(f"x{i} = {i}" for i in range(1000)))
CASES["long: a thousand lines in one function"] = Case(
    "def f():\n" + "\n".join(f"    x = {i}" for i in range(1000)) + "\n    return x\nf()"
)
CASES["long: one line"] = Case("x = [" + ", ".join(map(str, range(5000))) + "]; sum(x)")
CASES["long: deep nesting"] = Case("x = " + "[" * 80 + "]" * 80 + "\nx")
CASES["long: a thousand names of the notebook"] = Case(
    "total = " + " + ".join(f"y{i}" for i in range(1000)) + "\ntotal",
    "\n".join(f"y{i} = {i}" for i in range(1000)),
)

KNOWN = {
    "expressions 37: 5;": "`-o` has the value of the last expression also where `;` keeps it from being shown",
    "numpy 4: a.resize(5); a": "an array that came from the notebook looks at mapped memory: `a.resize(5)` is refused",
    "magics 25: get_ipython().ev('items[0]')": "or in a text that code puts together does not travel",
    "magics 28: %who_ls list": "show the names that the rank's cells have used, not all of the notebook's",
    "magics 29: items?": "a name that stands only in a magic's words (`items?`, `%pinfo items`)",
    "magics 37: %pinfo items": "a name that stands only in a magic's words (`items?`, `%pinfo items`)",
    "torch 5: loss = (w * 3).sum()": "on its way back, its numbers",
    "torch 28: h = net.register_forward_hook": "on its way back, its numbers",
    "in place 29: stream.write('more')": "streams cannot travel, nor can one in memory (`io.StringIO`)",
}
"""Cases that differ, by their first words, with what docs/explanation/variables.md says of it."""
