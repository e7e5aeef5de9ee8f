"""Rebuild functions, classes and related objects on the receiving side.

Pickles refer to the functions in this module by name: both processes need the same version.
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

from skymagic.data.namespace import Namespace
from skymagic.data.values import registrations
from skymagic.data.values.memory import writable
from skymagic.runtime.on_import import wraps


class RebuildContext(threading.local):
    """State of the thread that rebuilds values: the global names that rebuilt functions use."""

    namespace: Namespace | None = None
    lent: Sequence[tuple[str, Any]] = ()
    """Names that are bound only until the whole value is rebuilt."""
    same_files: bool = False
    """True if pickles go to processes that see the same file system."""
    weak: Sequence[tuple[Any, list[Any]]] = ()
    """Rebuilt weak collections with their members, until the whole value is rebuilt."""
    function_made: Callable[[types.CodeType], object] = staticmethod(lambda code: None)
    """Callback, called with the code of each function that gets this side's global names."""
    class_hash: Callable[[type, Any], str | None] = staticmethod(lambda cls, state: None)
    """Callback that hashes the members received for a class, or returns None if it cannot."""


current_context = RebuildContext()


def namespace() -> Namespace:
    """Return the global names of this side."""
    if current_context.namespace is None:
        raise RuntimeError(
            "a function of a notebook is rebuilt by skymagic.data.values.pickling.loads only"
        )
    return current_context.namespace


def module(name: str) -> types.ModuleType:
    """Import a module by its dotted name and return it."""
    # `__import__` returns the top-level package, so look up the module itself.
    __import__(name)
    return sys.modules[name]


def attribute(module_path: str, path: str) -> Any:
    """Import a module and resolve a dotted attribute path in it."""
    value: Any = module(module_path)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def module_name(module: types.ModuleType) -> str:
    """Return a module's name without running its own `__getattribute__`.

    A lazy module may import its target when an attribute is read.
    """
    name = types.ModuleType.__getattribute__(module, "__dict__").get("__name__")
    return name if isinstance(name, str) else ""


def module_path(module: types.ModuleType) -> tuple[str, str] | None:
    """Return the importable module and dotted attribute path that lead to `module`.

    The path is empty for the module itself. Subclasses of `ModuleType` replace entries of
    `sys.modules` (`torch.backends.cudnn`, transformers), are registered under a name that is not
    their `__name__`, or exist only as attributes (`torch.ops.aten`). Return None in all other
    cases.
    """
    name = module_name(module)
    if sys.modules.get(name) is module:
        return (name, "") if name != "__main__" else None
    if type(module) is not types.ModuleType:
        # A copy, because another thread may import a module meanwhile.
        for registered, other in list(sys.modules.items()):
            if other is module and registered != "__main__":
                return registered, ""
        parent, _, path = name.rpartition(".")
        while parent:
            if parent in sys.modules and attribute_of(sys.modules[parent], path) is module:
                return parent, path
            parent, _, last = parent.rpartition(".")
            path = f"{last}.{path}"
    # An older object of a module that was imported again, or whose entry was replaced: refer to the
    # module that now has the name.
    return (name, "") if name in sys.modules and name != "__main__" else None


def attribute_of(value: object, path: str) -> Any:
    """Resolve a dotted attribute path from an object, or return None."""
    for name in path.split("."):
        value = getattr(value, name, None)
    return value


def new_module(kind: type[types.ModuleType], name: str) -> types.ModuleType:
    """Return an empty module of the given class, without calling the class's `__init__`."""
    created = types.ModuleType.__new__(kind)
    types.ModuleType.__init__(created, name)
    return created


def fill_module(module: types.ModuleType, state: dict[str, object]) -> None:
    """Set a module's attributes, in a second step because a module may hold itself."""
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
"""Maps options of `triton.jit` to attributes of the kernel object."""


def triton_kernel(function: types.FunctionType, options: dict[str, object]) -> Any:
    """Decorate a kernel again: triton reads the function's source from its cell."""
    return module("triton").jit(function, **options)


def shell() -> Any:
    """Return this side's IPython shell."""
    return module("IPython").get_ipython()


def same(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def bound(name: str, value: Any) -> Any:
    """Bind a value to its name and return it."""
    namespace()[name] = value
    return value


def lent(name: str, value: Any) -> None:
    """Bind a name temporarily for code that rebuilds other values, unless it is bound already."""
    if name not in namespace():
        namespace()[name] = value
        current_context.lent = [*current_context.lent, (name, value)]


def accompanied(*values: Any) -> Any:
    """Return the last value; the others were only needed to rebuild it."""
    return values[-1]


# -- functions -------------------------------------------------------------------------------------


ANNOTATIONS = "__annotate__" if sys.version_info >= (3, 14) else "__annotations__"
"""Attribute that holds a function's annotations.

Since Python 3.14 it is a function that evaluates them, because they may use names that do not exist
yet.
"""


def function(
    code: types.CodeType, module_path: str | None, name: str, closure: Any
) -> types.FunctionType:
    """Create a function without its state, with the globals of a module or of the notebook."""
    space = namespace() if module_path is None else vars(module(module_path))
    if module_path is None:
        current_context.function_made(code)
    return types.FunctionType(code, space, name, None, closure)


def function_state(function: types.FunctionType) -> dict[str, object]:
    """Return a function's attributes, without its code, closure and globals."""
    state: dict[str, object] = {
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


def imports(names: Iterable[str], space: Namespace) -> dict[str, tuple[str, str]]:
    """Find which of `names` were bound by an import.

    Returns:
        Maps each name to its module and the name there, which is empty for the module itself.
    """
    sources = {}
    for name in sorted(names):
        value = space.get(name)
        if isinstance(value, types.ModuleType):
            if (path := module_path(value)) is not None:
                sources[name] = path
            continue
        source, what = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if not (isinstance(source, str) and isinstance(what, str) and what.isidentifier()):
            continue
        loaded = sys.modules.get(source)
        # Names that the notebook defines are not imports, even if its namespace is a module's.
        if vars(loaded or object).get(what) is value and vars(loaded) is not space:
            sources[name] = (source, what)
    return sources


def _import(space: Namespace, sources: dict[str, tuple[str, str]]) -> None:
    """Import names that this side does not have.

    A package that is missing here raises only when the function is called.
    """
    for name, (module_name, attribute_name) in sources.items():
        if name not in space:
            with suppress(Exception):
                space[name] = (
                    attribute(module_name, attribute_name)
                    if attribute_name
                    else module(module_name)
                )


def fill_function(function: types.FunctionType, state: dict[str, object]) -> None:
    """Set a function's state, in a second step because a function may hold itself."""
    sources: Any = state.pop("__imports__", {})
    attributes: Any = state.pop("__dict__", {})
    _import(function.__globals__, sources)
    vars(function).update(attributes)
    for name, value in state.items():
        setattr(function, name, value)


def fill_cell(cell: types.CellType, contents: tuple[Any]) -> None:
    """Set a closure variable, in a second step because it may be the function itself."""
    cell.cell_contents = contents[0]


def cached(function: Any, maxsize: int | None, typed: bool) -> Any:
    """Wrap a function in an empty `lru_cache`."""
    return functools.lru_cache(maxsize=maxsize, typed=typed)(function)


def cached_property(function: Any, name: str) -> Any:
    """Create a `cached_property` that knows its name."""
    prop = functools.cached_property(function)
    # The owner does not matter: `__set_name__` records the name alone.
    prop.__set_name__(object, name)
    return prop


# -- classes ---------------------------------------------------------------------------------------


class Arrived(NamedTuple):
    """The last received version of a class that another process defines."""

    members: frozenset[str] = frozenset()
    """Names of the members it had in the defining process."""
    contents: str | None = None
    """Hash of the class's members, or None if they cannot be hashed."""


_arrived: weakref.WeakKeyDictionary[type, Arrived] = weakref.WeakKeyDictionary()


def known_class(tracker: str) -> type | None:
    """Return the class with this identity if this process has it."""
    return cast("type | None", _cloud._DYNAMIC_CLASS_TRACKER_BY_ID.get(tracker))


def new_class(
    tracker: str, meta: type, name: str, bases: tuple[Any, ...], members: dict[str, object]
) -> type:
    """Create a class without its members, or return the known one unchanged.

    `__init_subclass__` and the metaclass ran where the class was defined, and their effects arrive
    as state. The notebook's own are not run again, on a class that has no members yet.
    """
    existing = known_class(tracker)
    if existing is not None:
        return existing
    resolved = types.resolve_bases(bases)
    with quiet(resolved):
        if _dynamic(meta):
            # Bypass `__new__` of metaclasses defined in the notebook.
            inner = next(base for base in meta.__mro__ if not _dynamic(base))
            cls: type = inner.__new__(meta, name, resolved, members)
        else:
            cls = types.new_class(
                name, bases, {"metaclass": meta}, lambda space: space.update(members)
            )
    # Another thread may have created the class meanwhile: all use the first one.
    return track(_cloud._lookup_class_or_track(tracker, cls))


def fill_class(cls: type, state: Any, setter: Callable[[Any, Any], object] | None = None) -> None:
    """Set a class's members, unless the class was defined in this process.

    A class travels with each of its instances, and may return to where it was defined. Local
    changes to a received class stay until the defining process changes it.
    """
    if cls in _arrived:
        previous, current = (
            _arrived[cls],
            Arrived(frozenset(state[0]), current_context.class_hash(cls, state)),
        )
        # Unchanged in the defining process since it last arrived: keep local changes.
        if previous.contents is not None and previous == current:
            return
        for name in previous.members - current.members:  # deleted in the defining process
            if name in vars(cls):
                # Bypass a metaclass's own `__delattr__`.
                type.__delattr__(cls, name)
        _arrived[cls] = current
        (setter or _cloud._class_setstate)(cls, state[:2])
        registrations.repeat(cls, state[2] if len(state) > 2 else [])


def track(cls: type) -> type:
    """Record that another process defined this class."""
    _arrived[cls] = Arrived()
    return cls


def forget_classes() -> None:
    """Make the next version of every received class replace its members."""
    for cls in list(_arrived):
        _arrived[cls] = _arrived[cls]._replace(contents=None)


def _dynamic(cls: type) -> bool:
    """Return True if a class travels by value."""
    return cls in _cloud._DYNAMIC_CLASS_TRACKER_BY_CLASS


@contextmanager
def quiet(bases: Sequence[Any]) -> Iterator[None]:
    """Disable `__init_subclass__` of classes defined in the notebook."""
    classes = {cls for base in bases for cls in getattr(base, "__mro__", ())}
    hooks = [
        (cls, vars(cls)["__init_subclass__"]) for cls in classes if "__init_subclass__" in vars(cls)
    ]
    hooks = [(cls, hook) for cls, hook in hooks if _dynamic(cls)]
    for cls, _ in hooks:
        type.__setattr__(cls, "__init_subclass__", classmethod(lambda cls, **options: None))
    try:
        yield
    finally:
        for cls, hook in hooks:
            type.__setattr__(cls, "__init_subclass__", hook)


# -- others ----------------------------------------------------------------------------------------


def new_type(name: str, base: Any, module: str) -> Any:
    """Create a `typing.NewType` that belongs to the given module."""
    created: Any = typing.NewType(name, base)  # type: ignore[misc]
    # `typing` would record the module of this frame.
    created.__module__ = module
    return created


def type_parameter(tracker: str, kind: Any, name: str, module: str, bound: Any) -> Any:
    """Create a `ParamSpec` or `TypeVarTuple`, or return the one this process has already."""
    parameter = kind(name) if bound is None else kind(name, bound=bound)
    # As for `NewType`.
    parameter.__module__ = module
    return _cloud._lookup_class_or_track(tracker, parameter)


def weak(kind: Callable[[Any], Any], contents: Any) -> Any:
    """Create a collection with weak references to its keys, values or members.

    The members are kept alive until the whole value is rebuilt.
    """
    collection = kind(contents)
    current_context.weak = [
        *current_context.weak,
        (
            collection,
            list(collection.values() if kind is weakref.WeakValueDictionary else collection),
        ),
    ]
    contents.clear()  # the unpickler still refers to it
    return collection


def hold(numbered: bool) -> None:
    """Keep alive the members of weak collections that nothing else on this side holds.

    They would disappear at once, because their holder is on the other side.

    Args:
        numbered: True if each object is also held by a table of numbered objects.
    """
    # The reference count of an object that nothing but its list refers to.
    unshared_count = _references([object()])[0] + numbered
    for collection, members in current_context.weak:
        orphans = [
            member
            for member, count in zip(members, _references(members), strict=True)
            if count <= unshared_count
        ]
        members.clear()
        if orphans:
            # Orphans live as long as the collection. Nothing needs to be cleared at exit.
            weakref.finalize(collection, orphans.clear).atexit = False


def _references(objects: list[Any]) -> list[int]:
    # Counts include the references of this comprehension, as does the one that `hold` compares
    # with.
    return [sys.getrefcount(obj) for obj in objects]


def fill_instance(value: Any, parts: tuple[Any, list[Any], dict[Any, Any]]) -> None:
    """Set the items of a list or dict and the attributes of an object.

    The class's own methods for adding items are bypassed.
    """
    state, items, pairs = parts
    if items:
        list.extend(value, items)
    # `dict.__setitem__` would leave the key out of the order that an OrderedDict keeps.
    setter: Any = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
    for key, item in pairs.items():
        setter(value, key, item)
    if hasattr(type(value), "__setstate__"):
        if state is not None:
            value.__setstate__(state)
        return
    # The state of an instance with slots is a pair: its `__dict__`, or None, and the slots.
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    if attributes:
        object.__getattribute__(value, "__dict__").update(attributes)
    for name, item in (slots or {}).items():
        object.__setattr__(value, name, item)


def fill_scheduler(scheduler: Any, parts: tuple[Any, bool | None]) -> None:
    """Set the state of a torch LR scheduler and mark its optimizer's `step`.

    The mark is what the scheduler's `__init__` would have set.
    """
    state, stepped = parts
    if hasattr(scheduler, "__setstate__"):
        scheduler.__setstate__(state)
    else:
        vars(scheduler).update(state)
    optimizer = vars(scheduler).get("optimizer")
    if stepped is None or optimizer is None or hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return
    # A weak reference, because the optimizer itself refers to this function.
    owner, step = weakref.ref(optimizer), optimizer.step.__func__

    @wraps(step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        live_optimizer: Any = owner()
        live_optimizer._opt_called = True
        return step(live_optimizer, *args, **kwargs)

    marked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked
    optimizer._opt_called = stepped or getattr(optimizer, "_opt_called", False)


def part(
    base: Any, offset: int, nbytes: int, format: str, shape: tuple[int, ...], readonly: bool
) -> memoryview:
    """Return a view of a part of a bytearray or `array.array`."""
    piece = view(memoryview(base).cast("B")[offset : offset + nbytes], format, shape)
    return piece.toreadonly() if readonly else piece


def view(buffer: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    """Return a memoryview with the given format."""
    piece = writable(buffer).cast("B")
    return cast(
        memoryview,
        piece.cast(format, shape) if shape else piece.cast(format),  # type: ignore[call-overload]
    )
