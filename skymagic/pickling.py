"""Values as a pickle and its buffers; functions of the notebook travel without the notebook's variables.

A function defined in a cell is rebuilt with the *other side's* namespace as its globals: the names that it uses
travel as names. A class defined in a cell travels by value and keeps its identity: what comes back to where the class
was defined is an instance of that very class, and does not change it.
"""

from __future__ import annotations

import enum
import functools
import io
import linecache
import pickle
import sys
import threading
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
from cloudpickle import cloudpickle as _cloud

from skymagic.arrays import SMALL, Span, Tracker, layout, reducer_for, writable
from skymagic.modules import is_local
from skymagic.scopes import code_names
from skymagic.store import LARGE, Buffer

_MANY = 1 << 20
"""Bytes of a pickle above which its objects are not listed one by one to find shared ones."""


class Pickled(NamedTuple):
    """A value ready to be written: the pickle's pieces, then the buffers that it refers to."""

    pieces: tuple[Buffer, ...]
    """The pickle stream; large byte strings by reference."""
    buffers: tuple[memoryview, ...]
    """Out-of-band memory, 1-dimensional bytes, in the order of the pickle."""
    modules: frozenset[str] = frozenset()
    """Modules of the notebook's folder that it refers to."""
    packages: frozenset[str] = frozenset()
    """Top-level packages that it refers to."""
    uses: Mapping[str, str] = types.MappingProxyType({})
    """Names of the namespace that its functions use, with the name of a function that does."""
    attributes: frozenset[str] = frozenset()
    """Attribute names in its functions' code."""
    files: frozenset[str] = frozenset()
    """File names of its functions' code."""
    marks: frozenset[int] = frozenset()
    """Identities of the changeable objects in it, as long as ``keep`` lives."""
    spans: tuple[Span, ...] = ()
    """Memory that it looks at."""
    keep: object = None
    """Holds everything that the pickle refers to."""
    plain: bool = False
    """Whether it is small and consists of Python's own containers, numbers and strings alone."""

    @property
    def header(self) -> bytes:
        """The whole pickle stream in one piece."""
        return b"".join(bytes(piece) for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Length of pickle and buffers, in bytes."""
        return sum(map(len, self.pieces)) + sum(map(len, self.buffers))


def dumps(value: object, namespace: dict[str, Any], *, folder: str | None = None) -> Pickled:
    """Pickle a value.

    Args:
        namespace: the notebook's or the rank's global names; functions defined there do not take them along.
        folder: the notebook's folder; modules in it are recorded.

    Raises:
        Exception: whatever the value's own reduction raises; pickle.PicklingError and TypeError most often.
    """
    plain = _plainly(value)
    if plain is not None:
        return plain
    first = _Pickler(namespace, folder, Tracker())
    first.dump(value)
    shared = layout(first.tracker.spans, first.tracker.whole)
    if shared is None:
        return first.result(value)
    second = _Pickler(namespace, folder, Tracker(shared))
    second.before = first  # its objects live on, so that no address means two things
    second.dump(value)
    return second.result(value)


def loads(header: Buffer | Sequence[Buffer], buffers: Iterable[Buffer], namespace: dict[str, Any]) -> Any:
    """Rebuild a value; its functions get ``namespace`` as their globals.

    Args:
        header: the pickle stream, or its pieces.
    """
    before = getattr(_local, "namespace", None)
    _local.namespace = namespace
    try:
        if isinstance(header, bytes | bytearray | memoryview):
            return pickle.loads(header, buffers=buffers)
        return pickle.Unpickler(_Rope(header), buffers=buffers).load()
    finally:
        _local.namespace = before


_local = threading.local()


class _NotPlain(Exception):
    """There is something in the value that Python does not pickle all by itself."""


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        raise _NotPlain


_CONTAINERS = (list, dict, set, bytearray)
_PLAIN = (*_CONTAINERS, int, float, str, bytes, bool, type(None), tuple, frozenset)


def _plainly(value: object) -> Pickled | None:
    """The short way for the values that notebooks have most of: numbers, strings, and lists and dicts of them."""
    if type(value) not in _PLAIN:
        return None
    out = _Pieces()
    pickler = _PlainPickler(out, 5)
    try:
        pickler.dump(value)
    except _NotPlain:
        return None
    pieces = out.pieces()
    marks: Iterable[int] = ()
    if sum(map(len, pieces)) < _MANY:
        marks = [number for number, (_, each) in pickler.memo.copy().items() if type(each) in _CONTAINERS]
    elif type(value) in _CONTAINERS:
        marks = (id(value),)
    small = len(pieces) == 1 and len(pieces[0]) < SMALL
    return Pickled(pieces, (), marks=frozenset(marks), keep=value, plain=small)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle with the notebook's functions, classes and memory done differently."""

    before: object = None

    def __init__(self, namespace: dict[str, Any], folder: str | None, tracker: Tracker) -> None:
        # Nothing here may refer back to the pickler: it holds the value, which must go when the cell is done.
        self._out = _Pieces()
        self._buffers = _Buffers()
        super().__init__(self._out, protocol=5, buffer_callback=self._buffers.add)
        self.namespace = namespace
        self.folder = folder
        self.tracker = tracker
        self.referred: set[str] = set()
        self.uses: dict[str, str] = {}
        self.attributes: set[str] = set()
        self.files: set[str] = set()
        self.marks: set[int] = set()
        self._kinds: dict[type, Callable[[_Pickler, Any], Any] | None] = {}

    def result(self, value: object) -> Pickled:
        pieces = self._out.pieces()
        if sum(len(piece) for piece in pieces) < _MANY:
            objects = [each for _, each in self.memo.copy().values()]
            changeable = {kind for kind in set(map(type, objects)) if _changeable_type(kind)}
            self.marks.update(id(each) for each in objects if type(each) in changeable)
        if _changeable_type(type(value)):
            self.marks.add(id(value))
        local = {name for name in self.referred if self.folder is not None and is_local(name, self.folder)}
        return Pickled(
            pieces=pieces,
            buffers=tuple(self._buffers.kept),
            modules=frozenset(local),
            packages=frozenset(name.partition(".")[0] for name in self.referred - local),
            uses=self.uses,
            attributes=frozenset(self.attributes),
            files=frozenset(self.files),
            marks=frozenset(self.marks),
            spans=tuple(self.tracker.spans),
            keep=(self, value),
        )

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        try:
            reduce = self._kinds[kind]
        except KeyError:
            reduce = self._kinds[kind] = self._reducer(kind)
        return NotImplemented if reduce is None else reduce(self, obj)

    def _reducer(self, kind: type) -> Callable[[_Pickler, Any], Any] | None:
        if issubclass(kind, type):
            return _Pickler._class
        if kind in (type(sys.stdout), type(sys.stderr), type(sys.stdin)):
            return _Pickler._stream
        own = _REDUCERS.get(kind)
        if own is not None:
            return own
        if issubclass(kind, BaseException) and _skips_init(kind):
            return _Pickler._exception
        memory = reducer_for(kind)
        if memory is not None:
            return lambda pickler, obj: memory(pickler.tracker, obj)
        return _Pickler._instance if _changeable_type(kind) else None

    def _instance(self, obj: Any) -> Any:
        self.marks.add(id(obj))
        return NotImplemented

    def _refer(self, module: str | None) -> None:
        if module:
            self.referred.add(module)

    def _class(self, cls: type) -> Any:
        reduced = _cloud._class_reduce(cls)
        if reduced is NotImplemented:
            self._refer(cls.__module__)
            return NotImplemented
        if len(reduced) != 6:
            return reduced
        maker, args, (members, slots), *_ = reduced
        members = {name: value for name, value in members.items() if not _made_by_python(name, value, cls)}
        if "__slots__" in vars(cls) and not issubclass(cls, enum.Enum | tuple):
            args = (*args[:3], {**args[3], "__slots__": _slots(cls)}, *args[4:])
        return _new_class, (maker, args), (members, slots), None, None, _fill_class

    def _function(self, function: types.FunctionType) -> Any:
        here = function.__globals__ is self.namespace
        if not here and _cloud._should_pickle_by_reference(function):
            self._refer(function.__module__)
            return NotImplemented
        where = None if here else _module_of(function.__globals__)
        if not here and where is None:
            return self._dynamic_function_reduce(function)
        code = function.__code__
        if "<locals>" in function.__qualname__ or "." not in function.__qualname__:
            self.marks.add(id(function))  # but not of methods, which come with their class
        if here:
            self.files.add(code.co_filename)
            names = code_names(code)
            self.attributes |= names.attributes
            self.referred |= names.imports
            for name in sorted(names.loads):
                self.uses.setdefault(name, function.__qualname__)
        else:
            self._refer(where)
        args = (code, where, function.__name__, function.__closure__)
        return _new_function, args, _function_state(function), None, None, _fill_function

    def _module(self, module: types.ModuleType) -> Any:
        if not _cloud._should_pickle_by_reference(module):
            return NotImplemented
        self._refer(module.__name__)
        return _import, (module.__name__,)

    def _cell(self, cell: types.CellType) -> Any:
        try:
            contents = (cell.cell_contents,)
        except ValueError:
            return types.CellType, ()
        return types.CellType, (), contents, None, None, _fill_cell

    def _cached(self, function: Any) -> Any:
        module = sys.modules.get(function.__module__)
        inner = function.__wrapped__
        if getattr(inner, "__globals__", None) is not self.namespace and module is not None:
            return NotImplemented
        return _cached, (inner, function.cache_parameters())

    def _cached_property(self, prop: Any) -> Any:
        return _cached_property, (prop.func, prop.attrname)

    def _stream(self, file: Any) -> Any:
        """The standard streams are the other side's own; no other file travels, not even its text."""
        for name in ("stdout", "stderr", "stdin"):
            if file is getattr(sys, name):
                return getattr, (sys, name)
        raise pickle.PicklingError(f"cannot pickle {type(file).__name__!r} object")

    def _memoryview(self, view: memoryview) -> Any:
        if not view.c_contiguous:
            return NotImplemented
        return _memoryview, (pickle.PickleBuffer(view), view.format, view.shape)

    def _exception(self, problem: BaseException) -> Any:
        """Without ``__init__``, whose arguments need not be the exception's ``args``."""
        return _exception, (type(problem), problem.args), vars(problem) or None

    def _weak_keys(self, mapping: Any) -> Any:
        return weakref.WeakKeyDictionary, (dict(mapping),)

    def _new_type(self, kind: Any) -> Any:
        return typing.NewType, (kind.__name__, kind.__supertype__)


_REDUCERS: dict[type, Callable[[_Pickler, Any], Any]] = {
    types.FunctionType: _Pickler._function,
    types.ModuleType: _Pickler._module,
    types.CellType: _Pickler._cell,
    functools._lru_cache_wrapper: _Pickler._cached,
    functools.cached_property: _Pickler._cached_property,
    io.TextIOWrapper: _Pickler._stream,
    memoryview: _Pickler._memoryview,
    weakref.WeakKeyDictionary: _Pickler._weak_keys,
    typing.NewType: _Pickler._new_type,
}


class _Buffers:
    """Out-of-band buffers in the order of the pickle; small ones stay in it."""

    def __init__(self) -> None:
        self.kept: list[memoryview] = []

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < SMALL:
            return True
        self.kept.append(raw)
        return False


class _Pieces:
    """A file for the pickler to write to, which keeps large byte strings as they are."""

    def __init__(self) -> None:
        self._parts: list[Buffer] = []

    def write(self, part: Buffer) -> int:
        self._parts.append(part)
        return len(part)

    def pieces(self) -> tuple[Buffer, ...]:
        if len(self._parts) == 1:
            return (self._parts[0],)
        joined: list[Buffer] = []
        small: list[Buffer] = []
        for part in self._parts:
            if len(part) >= LARGE:
                joined += [b"".join(small), part]
                small = []
            else:
                small.append(part)
        return tuple(part for part in (*joined, b"".join(small)) if part)


class _Rope(io.RawIOBase):
    """Reads pieces as one stream, without joining them."""

    def __init__(self, pieces: Sequence[Buffer]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        done = 0
        while self._pieces and done < view.nbytes:
            part = self._pieces[0][: view.nbytes - done]
            view[done : done + part.nbytes] = part
            done += part.nbytes
            rest = self._pieces[0][part.nbytes :]
            self._pieces[:1] = [rest] if rest else []
        return done

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            size = sum(piece.nbytes for piece in self._pieces)
        data = bytearray(min(size, sum(piece.nbytes for piece in self._pieces)))
        self.readinto(data)
        return bytes(data)

    def readable(self) -> bool:
        return True


# What a rebuilt value consists of -------------------------------------------------------------------------------------


def _new_function(code: types.CodeType, where: str | None, name: str, closure: Any) -> types.FunctionType:
    space = _local.namespace if where is None else vars(_import(where))
    return types.FunctionType(code, space, name, None, closure)


def _function_state(function: types.FunctionType) -> dict[str, Any]:
    state: dict[str, Any] = {
        "__qualname__": function.__qualname__,
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__module__": function.__module__,
        "__doc__": function.__doc__,
        "__dict__": dict(vars(function)),
    }
    if sys.version_info >= (3, 12):
        state["__type_params__"] = function.__type_params__
    if sys.version_info >= (3, 14):  # evaluated on demand: they may name what does not exist yet
        state["__annotate__"] = function.__annotate__
    else:
        state["__annotations__"] = function.__annotations__
    return {name: value for name, value in state.items() if value}


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    vars(function).update(state.pop("__dict__", {}))
    for name, value in state.items():
        setattr(function, name, value)


def _fill_cell(cell: types.CellType, contents: tuple[Any]) -> None:
    cell.cell_contents = contents[0]


_arrived: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that another process defined."""


def _new_class(maker: Callable[..., type], args: tuple[Any, ...]) -> type:
    known = _cloud._DYNAMIC_CLASS_TRACKER_BY_ID.get(args[-2])
    if known is not None:
        return typing.cast(type, known)
    cls = maker(*args)
    _arrived.add(cls)
    return cls


def _fill_class(cls: type, state: Any) -> None:
    if cls in _arrived:  # a class defined here has come back: here is where it is changed
        _cloud._class_setstate(cls, state)


def _import(name: str) -> types.ModuleType:
    __import__(name)
    return sys.modules[name]


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Any, name: str) -> Any:
    prop = functools.cached_property(function)
    prop.__set_name__(object, name)
    return prop


def _skips_init(kind: type[BaseException]) -> bool:
    """Whether an exception class has its own ``__init__``, and nothing but ``args`` below it."""
    base = next(each for each in kind.__mro__ if each.__module__ == "builtins")
    plain = base.__basicsize__ == BaseException.__basicsize__ and kind.__reduce__ is BaseException.__reduce__
    return plain and isinstance(kind.__init__, types.FunctionType)


def _exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    problem = kind.__new__(kind, *args)
    problem.args = args
    return problem


def _memoryview(buffer: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    return writable(buffer).cast("B").cast(format, shape) if shape else writable(buffer)  # type: ignore[call-overload]


# What the pickler asks about objects ----------------------------------------------------------------------------------

_FIXED = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    tuple,
    frozenset,
    range,
    slice,
    type(None),
    type,
    types.ModuleType,
    types.CodeType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MemberDescriptorType,
    property,
    staticmethod,
    classmethod,
    enum.Enum,
    pickle.PickleBuffer,
    types.MappingProxyType,
)


def _changeable_type(kind: type) -> bool:
    """Whether objects of a type can change, so that it matters whether two names hold the same one."""
    if issubclass(kind, _FIXED):
        return False
    return (kind.__module__, kind.__name__.partition("[")[0]) not in _FIXED_NAMES and not _is_dtype(kind)


_FIXED_NAMES = {
    *(("datetime", name) for name in ("datetime", "date", "time", "timedelta", "timezone")),
    *(("torch", name) for name in ("dtype", "device", "Size", "layout", "memory_format")),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("uuid", "UUID"),
    ("re", "Pattern"),
    ("numpy", "ufunc"),
}


def type_name(value: object) -> str:
    """A value's type as a user knows it: without ``builtins`` and ``__main__``."""
    kind = type(value)
    module = kind.__module__.lstrip("_")
    return kind.__qualname__ if module in ("builtins", "main__") else f"{module}.{kind.__qualname__}"


def _is_dtype(kind: type) -> bool:
    return any(base.__name__ == "dtype" and base.__module__ == "numpy" for base in kind.__mro__)


def _module_of(namespace: dict[str, Any]) -> str | None:
    """The importable module that these globals belong to."""
    name = namespace.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) and name != "__main__" else None
    return name if module is not None and getattr(module, "__dict__", None) is namespace else None


def _made_by_python(name: str, value: object, cls: type) -> bool:
    """Whether a class has this member from its slots, or got it when somebody looked."""
    if isinstance(value, types.MemberDescriptorType):
        return value.__objclass__ is cls
    return name == "__slotnames__" or (name == "__annotations__" and not value)


def _slots(cls: type) -> Any:
    slots = vars(cls)["__slots__"]
    return slots if isinstance(slots, str) else tuple(slots)


def cell_sources(files: Iterable[str]) -> dict[str, str]:
    """The text of code that exists in memory alone, by file name: cells, for tracebacks and ``inspect``."""
    found = {}
    for name in files:
        entry = linecache.cache.get(name)
        if entry is not None and len(entry) == 4 and entry[1] is None:
            found[name] = "".join(entry[2])
    return found
