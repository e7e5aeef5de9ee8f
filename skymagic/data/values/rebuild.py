"""How functions, classes and what belongs to them are made again on the other side.

The names in here stand in pickles: a process can read what another has written when both have the same version.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import typing
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

from cloudpickle import cloudpickle as _cloud

from skymagic.data.values import registrations
from skymagic.data.values.memory import writable
from skymagic.runtime.on_import import wraps


class RebuildContext(threading.local):
    """Where values are rebuilt: the global names that rebuilt functions use."""

    namespace: dict[str, Any] | None = None
    lent: Sequence[tuple[str, Any]] = ()
    """Names that are bound until the value is there."""
    same_files: bool = False
    """Whether what is pickled goes to processes that see the same files."""
    weak: Sequence[tuple[Any, list[Any]]] = ()
    """Weak collections that were rebuilt, and what is in them, until the value is there."""
    function_made: Callable[[types.CodeType], object] = staticmethod(lambda code: None)
    """Called with the code of each function that gets this side's global names."""
    class_hash: Callable[[type, Any], str | None] = staticmethod(lambda cls, state: None)
    """What the members contain that come for a class, as one hash; None where nobody can say."""


here = RebuildContext()


def namespace() -> dict[str, Any]:
    """The global names of this side."""
    if here.namespace is None:
        raise RuntimeError(
            "a function of a notebook is rebuilt by skymagic.data.values.pickling.loads only"
        )
    return here.namespace


def module(name: str) -> types.ModuleType:
    """Import a module, inner ones too."""
    __import__(name)
    return sys.modules[name]


def attribute(where: str, path: str) -> Any:
    """Return what a dotted path leads to in a module, which is imported for it."""
    value: Any = module(where)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def module_name(module: types.ModuleType) -> str:
    """Return a module's name without running its own `__getattribute__`, which may import what it stands for."""
    name = types.ModuleType.__getattribute__(module, "__dict__").get("__name__")
    return name if isinstance(name, str) else ""


def module_path(module: types.ModuleType) -> tuple[str, str] | None:
    """Return an importable module, and the dotted attribute of it that is `module` (empty for the module itself).

    Subclasses of `ModuleType` replace entries of `sys.modules` (`torch.backends.cudnn`, transformers), are registered
    under a name that is not their `__name__`, or are attributes only (`torch.ops.aten`). None if it is none of these.
    """
    name = module_name(module)
    if sys.modules.get(name) is module:
        return (name, "") if name != "__main__" else None
    if type(module) is not types.ModuleType:
        for registered, other in list(sys.modules.items()):
            if other is module and registered != "__main__":
                return registered, ""
        parent, _, path = name.rpartition(".")
        while parent:
            if parent in sys.modules and attribute_of(sys.modules[parent], path) is module:
                return parent, path
            parent, _, last = parent.rpartition(".")
            path = f"{last}.{path}"
    # an older object of a module that was imported again, or whose entry was replaced: the name is what is meant
    return (name, "") if name in sys.modules and name != "__main__" else None


def attribute_of(value: object, path: str) -> Any:
    """Return what a dotted path leads to from an object, or None."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def new_module(kind: type[types.ModuleType], name: str) -> types.ModuleType:
    """Return an empty module of this class, without a call of its own `__init__`."""
    made = types.ModuleType.__new__(kind)
    types.ModuleType.__init__(made, name)
    return made


def fill_module(module: types.ModuleType, state: dict[str, Any]) -> None:
    """Set a module's attributes; separate, so that a module may hold itself."""
    types.ModuleType.__getattribute__(module, "__dict__").update(state)


_SAME = (
    "version",
    "do_not_specialize",
    "do_not_specialize_on_alignment",
    "debug",
    "noinline",
    "launch_metadata",
)
TRITON = {**dict(zip(_SAME, _SAME, strict=True)), "repr": "_repr"}
"""What `triton.jit` is called with → attributes of what it makes."""


def triton_kernel(function: types.FunctionType, options: dict[str, Any]) -> Any:
    """A kernel, decorated again: triton reads the function's source, which is a cell's."""
    return module("triton").jit(function, **options)


def shell() -> Any:
    """This side's IPython."""
    return module("IPython").get_ipython()


def same(value: Any) -> Any:
    """The value itself."""
    return value


def bound(name: str, value: Any) -> Any:
    """The value, which has its name from now on."""
    namespace()[name] = value
    return value


def lent(name: str, value: Any) -> None:
    """Let code that rebuilds other values use this name, where this side has none of it."""
    if name not in namespace():
        namespace()[name] = value
        here.lent = [*here.lent, (name, value)]


def accompanied(*values: Any) -> Any:
    """The last of them, which the others have served."""
    return values[-1]


# -- functions -----------------------------------------------------------------------------------------------------------


ANNOTATIONS = "__annotate__" if sys.version_info >= (3, 14) else "__annotations__"
"""What has a function's annotations: since Python 3.14 a function that evaluates them, for they may name what does not exist yet."""


def function(
    code: types.CodeType, where: str | None, name: str, closure: Any
) -> types.FunctionType:
    """A function without its state, with the globals of a module, or of this side's notebook."""
    space = namespace() if where is None else vars(module(where))
    if where is None:
        here.function_made(code)
    return types.FunctionType(code, space, name, None, closure)


def function_state(function: types.FunctionType) -> dict[str, Any]:
    """What a function has beside its code, closure and globals."""
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
    state[ANNOTATIONS] = getattr(function, ANNOTATIONS)
    return {name: value for name, value in state.items() if value}


def imports(names: Iterable[str], space: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Names that an import has bound, among `names`: name → (module, name in it; empty for the module itself)."""
    found = {}
    for name in sorted(names):
        value = space.get(name)
        if isinstance(value, types.ModuleType):
            if (path := module_path(value)) is not None:
                found[name] = path
            continue
        where, what = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not (isinstance(where, str) and isinstance(what, str) and what.isidentifier()):
            continue
        known = sys.modules.get(where)
        if vars(known or object).get(what) is value and vars(known) is not space:
            found[name] = (where, what)
    return found


def _import(space: dict[str, Any], found: dict[str, tuple[str, str]]) -> None:
    """Import what this side has not; a package that is missing here is missed when the function is called."""
    for name, (where, what) in found.items():
        if name not in space:
            with suppress(Exception):
                space[name] = attribute(where, what) if what else module(where)


def fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Set the state; separate, so that a function may hold itself."""
    _import(function.__globals__, state.pop("__imports__", {}))
    vars(function).update(state.pop("__dict__", {}))
    for name, value in state.items():
        setattr(function, name, value)


def fill_cell(cell: types.CellType, contents: tuple[Any]) -> None:
    """Set a closure's variable; separate, so that it may be the function itself."""
    cell.cell_contents = contents[0]


def cached(function: Any, parameters: dict[str, Any]) -> Any:
    """A function with an empty ``lru_cache``."""
    return functools.lru_cache(**parameters)(function)


def cached_property(function: Any, name: str) -> Any:
    """A ``cached_property`` that knows its name."""
    prop = functools.cached_property(function)
    prop.__set_name__(object, name)
    return prop


# -- classes -------------------------------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    """A class that another process defined, as it came last."""

    members: frozenset[str] = frozenset()
    """The names of the members that it had there."""
    contents: str | None = None
    """The hash of a class's members; None where nobody can say what they contain."""


_arrived: weakref.WeakKeyDictionary[type, Arrived] = weakref.WeakKeyDictionary()


def known_class(tracker: str) -> type | None:
    """The class with this identity, if this process has it."""
    return cast("type | None", _cloud._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker))


def new_class(
    tracker: str, meta: type, name: str, bases: tuple[Any, ...], members: dict[str, Any]
) -> type:
    """A class without its members; one that is known stays as it is.

    ``__init_subclass__`` and the metaclass ran where the class was defined, and left their traces in what follows as
    state: those of the notebook are not run again, on a class that has nothing yet.
    """
    known = known_class(tracker)
    if known is not None:
        return known
    resolved = types.resolve_bases(bases)
    with quiet(resolved):
        if _dynamic(meta):
            inner = next(each for each in meta.__mro__ if not _dynamic(each))
            cls: type = inner.__new__(meta, name, resolved, members)
        else:
            cls = types.new_class(
                name, bases, {"metaclass": meta}, lambda space: space.update(members)
            )
    return track(_cloud._lookup_class_or_track(tracker, cls))


def fill_class(cls: type, state: Any, setter: Callable[[Any, Any], object] | None = None) -> None:
    """Set a class's members, but not those of a class that was defined here and has come back.

    A class comes with each of its instances. What was changed in it here stays, until it is another one where it was defined.
    """
    if cls in _arrived:
        known, now = _arrived[cls], Arrived(frozenset(state[0]), here.class_hash(cls, state))
        if known.contents is not None and known == now:
            return
        for name in known.members - now.members:  # deleted there
            if name in vars(cls):
                type.__delattr__(cls, name)
        _arrived[cls] = now
        (setter or _cloud._class_setstate)(cls, state[:2])
        registrations.repeat(cls, state[2] if len(state) > 2 else [])


def track(cls: type) -> type:
    """Note that another process has defined this class."""
    _arrived[cls] = Arrived()
    return cls


def forget_classes() -> None:
    """Let the members of all classes that come again be set as they come."""
    for cls in list(_arrived):
        _arrived[cls] = _arrived[cls]._replace(contents=None)


def _dynamic(cls: type) -> bool:
    """Whether a class travels by value."""
    return cls in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS


@contextmanager
def quiet(bases: Sequence[Any]) -> Iterator[None]:
    """Let the notebook's own ``__init_subclass__`` do nothing."""
    classes = {each for base in bases for each in getattr(base, "__mro__", ())}
    hooks = [
        (each, vars(each)["__init_subclass__"])
        for each in classes
        if "__init_subclass__" in vars(each)
    ]
    hooks = [(each, hook) for each, hook in hooks if _dynamic(each)]
    for each, _ in hooks:
        type.__setattr__(each, "__init_subclass__", classmethod(lambda cls, **options: None))
    try:
        yield
    finally:
        for each, hook in hooks:
            type.__setattr__(each, "__init_subclass__", hook)


# -- others --------------------------------------------------------------------------------------------------------------


def new_type(name: str, base: Any, module: str) -> Any:
    """A ``typing.NewType`` of this module."""
    made: Any = typing.NewType(name, base)  # type: ignore[misc]
    made.__module__ = module
    return made


def type_parameter(tracker: str, kind: Any, name: str, module: str, bound: Any) -> Any:
    """A ``ParamSpec`` or ``TypeVarTuple``, or the one that this process has of it."""
    made = kind(name) if bound is None else kind(name, bound=bound)
    made.__module__ = module
    return _cloud._lookup_class_or_track(tracker, made)


def weak(kind: Callable[[Any], Any], contents: Any) -> Any:
    """A collection with weak references to its keys, values or members, which live until the whole value is there."""
    made = kind(contents)
    here.weak = [
        *here.weak,
        (made, list(made.values() if kind is weakref.WeakValueDictionary else made)),
    ]
    contents.clear()  # the unpickler holds it
    return made


def hold(numbered: bool) -> None:
    """Let weak collections keep what nothing else holds on this side: it would be gone at once, and its holder is elsewhere.

    Args:
        numbered: whether each object of the value is held once more, by its number.
    """
    alone = _references([object()])[0] + numbered
    for made, members in here.weak:
        kept = [
            each
            for each, count in zip(members, _references(members), strict=True)
            if count <= alone
        ]
        members.clear()
        if kept:
            weakref.finalize(made, kept.clear).atexit = False


def _references(objects: list[Any]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


def fill_instance(value: Any, parts: tuple[Any, list[Any], dict[Any, Any]]) -> None:
    """Set the items of a list or dict past its class's own methods, then an object's attributes."""
    state, items, pairs = parts
    if items:
        list.extend(value, items)
    setter: Any = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
    for key, each in pairs.items():
        setter(value, key, each)
    if hasattr(type(value), "__setstate__"):
        if state is not None:
            value.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        object.__getattribute__(value, "__dict__").update(attributes)
    for name, each in (slots or {}).items():
        object.__setattr__(value, name, each)


def fill_scheduler(scheduler: Any, parts: tuple[Any, bool | None]) -> None:
    """Set the state of one of torch's schedulers, and mark its optimizer's ``step`` as its ``__init__`` has done."""
    state, stepped = parts
    if hasattr(scheduler, "__setstate__"):
        scheduler.__setstate__(state)
    else:
        vars(scheduler).update(state)
    optimizer = vars(scheduler).get("optimizer")
    if stepped is None or optimizer is None or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    owner, step = weakref.ref(optimizer), optimizer.step.__func__

    @wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        mine: Any = owner()
        mine._opt_called = True
        return step(mine, *args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked
    optimizer._opt_called = stepped or getattr(optimizer, "_opt_called", False)


def part(
    whole: Any, offset: int, nbytes: int, format: str, shape: tuple[int, ...], readonly: bool
) -> memoryview:
    """A view of a part of a bytearray or an array of Python's."""
    made = view(memoryview(whole).cast("B")[offset : offset + nbytes], format, shape)
    return made.toreadonly() if readonly else made


def view(buffer: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    """A memoryview of this format."""
    made = writable(buffer).cast("B")
    return cast(memoryview, made.cast(format, shape) if shape else made.cast(format))  # type: ignore[call-overload]
