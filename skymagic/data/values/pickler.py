"""The pickler: cloudpickle with custom handling of the notebook's functions, classes and memory."""

from __future__ import annotations

import enum
import functools
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
from cloudpickle import cloudpickle as _cloud

from skymagic.data.capture.code import code_names, own_annotations, value_names
from skymagic.data.capture.modules import locate
from skymagic.data.namespace import Namespace
from skymagic.data.values import (
    arrays,
    enums,
    hooks,
    rebuild,
    reducers,
    registrations,
    shards,
    singletons,
    worlds,
)
from skymagic.data.values.exceptions import reduce_exception
from skymagic.data.values.kinds import changeable, is_a, is_slot_or_cache
from skymagic.data.values.memory import Layout, Tracker
from skymagic.data.values.pickled import MANY, Buffers, Pickled, PickleLinks, StreamPieces
from skymagic.data.values.reducers import recognise
from skymagic.data.values.shards import REFUSED, Shards


class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that handles the notebook's functions, classes and memory specially."""

    before: object = None
    parts: Shards = REFUSED

    def __init__(self, namespace: Namespace, folder: str | None, tracker: Tracker) -> None:
        # Nothing here may refer back to the pickler: it holds the value, which must be freed as
        # soon as the cell is done.
        self._out = StreamPieces()
        self._buffers = Buffers()
        super().__init__(self._out, protocol=5, buffer_callback=self._buffers.add)
        self.namespace = namespace
        self.folder = folder
        self.tracker = tracker
        self.referred: set[str] = set()
        self.required: set[str] = set()
        self.uses: dict[str, str] = {}
        self.hints: dict[str, str] = {}
        self.attributes: set[str] = set()
        self.files: set[str] = set()
        self.marks: set[int] = set()
        self.code = self.wrappers = self.active = False
        self._kinds: dict[type, Callable[[ValuePickler, Any], Any] | None] = {}
        self._listed = False
        self.steady = True

    def result(self, value: object) -> Pickled:
        pieces = self._out.pieces()
        # Objects of very large pickles are not listed: that would take too long.
        self._listed = sum(len(piece) for piece in pieces) < MANY
        local = {
            name
            for name in self.referred
            if self.folder is not None and locate(name, self.folder) is not None
        }
        if self.tracker.between_ranks:
            local = self.referred
        # The pickler's memo keeps all objects alive, and thus marks and spans valid.
        return Pickled(
            pieces=pieces,
            buffers=tuple(self._buffers.kept),
            modules=frozenset(local),
            packages=frozenset(name.partition(".")[0] for name in self.referred - local),
            required=frozenset(self.required - local),
            uses=self.uses,
            hints=self.hints,
            attributes=frozenset(self.attributes),
            files=frozenset(self.files),
            marks=None,
            spans=tuple(self.tracker.spans),
            keep=(self, value),
            code=self.code,
            wrappers=self.wrappers,
            active=self.active and bool(self.uses),
            steady=self.steady,
        )

    def mutable_identities(self, value: object) -> frozenset[int]:
        """Return the identities of the mutable objects in the pickled value.

        Computed on demand: values that stay where they are never need it.
        """
        if self._listed:
            objects = [obj for _, obj in self.memo.copy().values()]
            kinds = {kind for kind in set(map(type, objects)) if changeable(kind)}
            self.marks.update(id(obj) for obj in objects if type(obj) in kinds)
        if changeable(type(value)):
            self.marks.add(id(value))
        self.marks -= self.tracker.private
        # The memo does not change after `dump`, so it is searched once.
        self._listed = False
        return frozenset(self.marks)

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        # Chosen once per pickler, not per process: the choice also records packages and flags of
        # this value.
        try:
            reduce = self._kinds[kind]
        except KeyError:
            reduce = self._kinds[kind] = self._reducer(kind)
        return NotImplemented if reduce is None else reduce(self, obj)

    def _reducer(self, kind: type) -> Callable[[ValuePickler, Any], Any] | None:
        if issubclass(kind, type):
            return ValuePickler._class
        if issubclass(kind, enum.Enum) and not _cloud._should_pickle_by_reference(kind):
            self.active = True
            return lambda pickler, member: enums.reduce_member(member)
        own = _REDUCERS.get(kind)
        if own is not None:
            return own
        if issubclass(kind, types.ModuleType):
            return ValuePickler._module
        # Only on the way from the notebook: `folder` is None on a rank, and empty where a value is
        # only taken apart to hash it.
        knows_world = worlds.check_for(kind) if self.folder else None
        if knows_world is None:
            return self._reducer_of_process(kind)
        plain = self._reducer_of_process(kind)

        def reduce_checked(pickler: ValuePickler, obj: Any) -> Any:
            if knows_world(obj):
                raise worlds.WorldError(obj)
            return NotImplemented if plain is None else plain(pickler, obj)

        return reduce_checked

    def _reducer_of_process(self, kind: type) -> Callable[[ValuePickler, Any], Any] | None:
        """Return the reducer for a type that may have a singleton in each process."""
        if singletons.replaces_module(kind):
            return ValuePickler._module_replacement
        if registrations.is_custom_op(kind):
            self._refer("torch")
            return lambda pickler, op: pickler._part(registrations.reduce_custom_op(op), op)
        single = singletons.reducer_for(kind)
        if single is None:
            return self._plain_reducer(kind)
        self._need(kind)
        copied = self._plain_reducer(kind)

        def reduce_single(pickler: ValuePickler, obj: Any) -> Any:
            reduced = single(obj)
            if reduced is NotImplemented:
                return NotImplemented if copied is None else copied(pickler, obj)
            return pickler._reduce_to_name(reduced, obj)

        return reduce_single

    def _plain_reducer(self, kind: type) -> Callable[[ValuePickler, Any], Any] | None:
        """Return the reducer for types that may have any number of instances."""
        memory = arrays.reducer_for(kind)
        # The class's own code may decide what is pickled, and may decide otherwise the next time.
        if changeable(kind) and (
            memory is None or kind.__module__.partition(".")[0] not in ("numpy", "torch")
        ):
            self.steady = False
        reduce = reducers.reducer_for(kind)
        if reduce is not None:
            return lambda pickler, obj: reduce(obj)
        if issubclass(kind, BaseException):
            self.active = True
            return lambda pickler, obj: reduce_exception(obj)
        if is_a(kind, "triton.runtime", "JITFunction"):
            return ValuePickler._triton
        if is_a(kind, "IPython", "InteractiveShell"):
            return lambda pickler, obj: (rebuild.shell, ())
        self._need(kind)
        if self.tracker.between_ranks and is_a(
            kind, "torch.nn.parallel", "DistributedDataParallel"
        ):
            return ValuePickler._wrapper
        if self.tracker.between_ranks and is_a(
            kind, "torch.distributed.fsdp", "FullyShardedDataParallel"
        ):
            return ValuePickler._shard
        if self.tracker.between_ranks and is_a(kind, "torch.distributed.fsdp", "FSDPModule"):
            return ValuePickler._shard
        if is_a(kind, "torch.nn.parallel", "DistributedDataParallel"):
            # The wrapper belongs to a process group; only the user's own module travels.
            return lambda pickler, obj: (rebuild.same, (obj.module,))
        if not self.tracker.between_ranks and (sharded := shards.reducer(kind)) is not None:
            return lambda pickler, obj: pickler._reduce_sharded(sharded(obj, pickler.parts), obj)
        # Rebuilding may run the class's own code, so the order of rebuilding matters.
        self.active = self.active or (memory is None and kind not in _INERT)
        if memory is not None:
            tracker = self.tracker
            return lambda pickler, obj: memory(tracker, obj)
        special = reducers.instance_reducer_for(kind)
        if special is not None:
            return lambda pickler, obj: pickler._part(special(obj), obj)
        if kind is types.BuiltinFunctionType or kind.__name__ == "cython_function_or_method":
            return ValuePickler._reduce_compiled
        if is_a(kind, "numpy", "dtype"):
            return ValuePickler._dtype
        if is_a(kind, "pandas", "NDFrame"):
            return ValuePickler._frame
        if hooks.reducer_for(kind) is not None:
            return ValuePickler._reduce_by_hook
        if reducers.may_be_sentinel(kind):
            return ValuePickler._single
        if not changeable(kind):
            return None
        return (
            ValuePickler._reduce_by_class if self._reduces_itself(kind) else ValuePickler._instance
        )

    def _reduces_itself(self, kind: type) -> bool:
        """Return True if the object's own class defines how it is reduced."""
        if kind in self.dispatch_table:
            return False
        return any(
            getattr(kind, method) is not getattr(object, method)
            for method in ("__reduce_ex__", "__reduce__")
        )

    def _reduce_sharded(self, reduced: Any, obj: Any) -> Any:
        if reduced is NotImplemented and hooks.reducer_for(type(obj)) is not None:
            return self._reduce_by_hook(obj)
        return self._part(reduced, obj)

    def _reduce_by_hook(self, obj: Any) -> Any:
        reduce = hooks.reducer_for(type(obj))
        reduced = NotImplemented if reduce is None else reduce(obj)
        return self._instance(obj) if reduced is NotImplemented else self._part(reduced, obj)

    def _reduce_compiled(self, function: Any) -> Any:
        """Reduce a function of an extension module, which pickles by name.

        Its module is recorded, because a dispatch table may depend on another package.
        """
        self._refer(getattr(function, "__module__", None))
        return self._instance(function) if changeable(type(function)) else NotImplemented

    def _reduce_by_class(self, obj: Any) -> Any:
        """Reduce an object as its class does: to a singleton's name (`pandas.NA`) or to parts."""
        reduced = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(reduced, str):
            return self._reduce_to_name(reduced, obj)
        self.marks.add(id(obj))
        return reduced

    def _reduce_to_name(self, reduced: Any, obj: Any) -> Any:
        """Record that an object travels as a name that the rank resolves to its own object.

        Two values that refer to it therefore share nothing that has to travel together.
        """
        self.tracker.private.add(id(obj))
        return reduced

    def _instance(self, obj: Any) -> Any:
        self.marks.add(id(obj))
        return NotImplemented

    def _dtype(self, dtype: Any) -> Any:
        """Reduce a dtype.

        The dict of fields of a structured dtype never changes, so arrays that have it in common do
        not count as sharing an object.
        """
        reduced = dtype.__reduce__()
        if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], tuple):
            self.tracker.private.update(id(part) for part in reduced[2] if type(part) is dict)
        return reduced

    def _frame(self, obj: Any) -> Any:
        # All frames of a class have one `_metadata` list in common.
        self.tracker.private.add(id(getattr(type(obj), "_metadata", None)))
        return self._instance(obj)

    def _single(self, obj: Any) -> Any:
        reduced = reducers.reduce_sentinel(obj)
        if reduced is NotImplemented:
            return self._instance(obj) if changeable(type(obj)) else NotImplemented
        return self._reduce_to_name(reduced, obj) if reduced[0] is getattr else reduced

    def _part(self, reduced: Any, obj: Any) -> Any:
        self.active = True
        self.marks.add(id(obj))
        return reduced

    def _wrapper(self, obj: Any) -> Any:
        """Reduce a wrapper around a module, for another rank.

        The wrapper itself knows how to rebuild around that rank's default process group.
        """
        self.wrappers = True
        return self._instance(obj)

    def _shard(self, obj: Any) -> Any:
        raise pickle.PicklingError(
            "an FSDP module holds this rank's own part of the model: make it again on all ranks"
        )

    def _refer(self, module: str | None) -> None:
        if module and not module.startswith("skymagic."):
            self.referred.add(module)
            self.required.add(module)

    def _need(self, kind: type) -> None:
        """Require the package of an object's class.

        The pickle does not always name it: not for memory of arrays, `torch.float32`, or
        `pandas.NA`.
        """
        top = str(kind.__module__).partition(".")[0]
        if top not in sys.stdlib_module_names and _cloud._should_pickle_by_reference(kind):
            self._refer(kind.__module__)

    def _class(self, cls: type) -> Any:
        # On a rank: equal classes from all ranks must become one class in the notebook.
        if self.folder is None and cls.__module__ == self.namespace.get("__name__"):
            recognise(cls)
        if not _cloud._should_pickle_by_reference(cls):
            array = reducers.reduce_ctype(cls)
            if array is not None:
                return array
        is_enum = issubclass(cls, enum.Enum) and not _cloud._should_pickle_by_reference(cls)
        reduced = _enum_class(cls) if is_enum else _cloud._class_reduce(cls)
        if reduced is NotImplemented:
            self._refer(cls.__module__)
            return NotImplemented
        # cloudpickle reduces types without a public name to a call: `type(None)` and the like.
        if len(reduced) != 6:
            return reduced
        if cls.__module__ == self.namespace.get("__name__"):
            self._annotated(cls)
        _, args, (members, slots), *_ = reduced
        members = {
            name: value for name, value in members.items() if not is_slot_or_cache(name, value, cls)
        }
        if "__annotate_func__" in vars(cls):
            # cloudpickle leaves it out, because its closure holds the namespace of the class.
            members["__annotations_cache__"] = own_annotations(cls)
        registered = registrations.find(cls)
        for _, _, arguments in registered:
            self.active = self.active or bool(arguments)
        state = (members, slots, registered) if registered else (members, slots)
        if is_enum:
            return enums.new_enum, args, state, None, None, enums.fill_enum
        meta, name, bases, first, tracker, _ = args
        if "__slots__" in vars(cls) and not issubclass(cls, tuple):
            # Slots take effect only when the class is created.
            first = {**first, "__slots__": _slots(cls)}
        return (
            rebuild.new_class,
            (tracker, meta, name, bases, first),
            state,
            None,
            None,
            rebuild.fill_class,
        )

    def _annotated(self, value: types.FunctionType | type) -> None:
        for name in sorted(value_names(value, self.namespace)):
            self.hints.setdefault(name, value.__qualname__)

    def _function(self, function: types.FunctionType) -> Any:
        # Decided by the globals: `functools.wraps` copies `__module__` from the function that it
        # wraps.
        is_notebook_function = function.__globals__ is self.namespace
        if not is_notebook_function and _cloud._should_pickle_by_reference(function):
            self._refer(function.__module__)
            return NotImplemented
        self.code = True
        module = None if is_notebook_function else _module_of(function.__globals__)
        if not is_notebook_function and module is None:
            # The globals belong to no module, as in code run by `exec`: leave it to cloudpickle.
            return self._dynamic_function_reduce(function)
        code = function.__code__
        if "<locals>" in function.__qualname__ or "." not in function.__qualname__:
            self.marks.add(id(function))  # methods travel with their class and are not marked
        if is_notebook_function:
            self.files.add(code.co_filename)
            # Record the names that the function uses: they are sent by name, not with the function.
            names = code_names(code)
            self.attributes |= names.attributes
            self.referred |= names.imports
            self.required |= names.required
            for name in sorted(names.loads):
                self.uses.setdefault(name, function.__qualname__)
            for name in sorted(names.sets - names.loads):
                self.hints.setdefault(name, function.__qualname__)
            self._annotated(function)
        else:
            self._refer(module)
        args = (code, module, function.__name__, function.__closure__)
        state = rebuild.function_state(function)
        if (
            is_notebook_function
            and self.folder is None
            and (imports := rebuild.imports(names.loads, self.namespace))
        ):
            state["__imports__"] = imports
        return rebuild.function, args, state, None, None, rebuild.fill_function

    def _module(self, module: types.ModuleType) -> Any:
        path = rebuild.module_path(module)
        if path is None or _cloud._is_registered_pickle_by_value(module):
            # cloudpickle rebuilds a dynamic module of exactly this class, and knows no subclass of
            # it.
            if type(module) is types.ModuleType:
                return NotImplemented
            return self._part(singletons.reduce_module(module), module)
        module_name, attribute = path
        self._refer(module_name)
        return (rebuild.attribute, path) if attribute else (rebuild.module, (module_name,))

    def _module_replacement(self, value: Any) -> Any:
        reduced = singletons.reduce_replacement(value)
        if reduced is not NotImplemented:
            self._refer(reduced[1][0])
            return self._reduce_to_name(reduced, value)
        reduce = self._plain_reducer(type(value))
        return NotImplemented if reduce is None else reduce(self, value)

    def _triton(self, kernel: Any) -> Any:
        """Reduce a `triton.jit` function to its source.

        The other side compiles it again, because compiled kernels belong to one device.
        """
        function = kernel.fn
        module = sys.modules.get(function.__module__)
        if (
            function.__globals__ is not self.namespace
            and getattr(module, function.__qualname__, None) is kernel
        ):
            return getattr, (module, function.__qualname__)
        self.marks.add(id(kernel))
        self._refer("triton")
        options = {
            name: getattr(kernel, attribute, None) for name, attribute in rebuild.TRITON.items()
        }
        return rebuild.triton_kernel, (
            function,
            {name: value for name, value in options.items() if value is not None},
        )

    def _reduce_cached(self, function: Any) -> Any:
        module = sys.modules.get(function.__module__)
        inner = function.__wrapped__
        if getattr(inner, "__globals__", None) is not self.namespace and module is not None:
            # `lru_cache` reduces itself to its qualified name, which the other side can import.
            return NotImplemented
        parameters = function.cache_parameters()
        return rebuild.cached, (inner, parameters["maxsize"], parameters["typed"])


class _LinkedPickler(ValuePickler):
    """Pickler that refers to objects which the other side already has."""

    def __init__(
        self, namespace: Namespace, folder: str | None, tracker: Tracker, links: PickleLinks
    ) -> None:
        super().__init__(namespace, folder, tracker)
        self.links = links

    # In a separate class, because a pickler with this method calls it for each object.
    def persistent_id(self, obj: object) -> int | None:
        return self.links.number(obj)


def pickler_for(
    namespace: Namespace,
    folder: str | None,
    links: PickleLinks | None,
    shared: Layout | None,
    between_ranks: bool,
) -> ValuePickler:
    memory = links.memory if links is not None else None
    tracker = Tracker(
        shared, between_ranks=between_ranks, leaves_only=folder is not None, linked=memory
    )
    if links is None:
        return ValuePickler(namespace, folder, tracker)
    # `dumps` may pickle a value twice: only the links of the last pass count.
    links.used.clear()
    return _LinkedPickler(namespace, folder, tracker, links)


def _enum_class(cls: type[enum.Enum]) -> tuple[Any, ...]:
    """Reduce an enumeration class as cloudpickle does, but with its members unchanged."""
    tracker = _cloud._get_or_create_tracker_id(cls)
    arguments, state = enums.class_arguments(cls, tracker), enums.class_state(cls)
    return enums.new_enum, arguments, state, None, None, enums.fill_enum


def _code(pickler: ValuePickler, code: types.CodeType) -> Any:
    """Reduce a code object, keeping its file name for tracebacks and `inspect`."""
    make, values = _cloud._code_reduce(code)
    # cloudpickle 3.1.3 replaces the name by a constant, so that equal functions pickle equally.
    return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in values)


_REDUCERS: dict[type, Callable[[ValuePickler, Any], Any]] = {
    types.CodeType: _code,
    types.FunctionType: ValuePickler._function,
    types.ModuleType: ValuePickler._module,
    enum.property: lambda pickler, prop: enums.reduce_property(prop),
    functools._lru_cache_wrapper: ValuePickler._reduce_cached,
}


_INERT = {
    property,
    staticmethod,
    classmethod,
    functools.partial,
    types.MethodType,
    types.BuiltinFunctionType,
    types.SimpleNamespace,
}
"""Types that run no code when they are rebuilt."""


def _module_of(namespace: Namespace) -> str | None:
    """Return the name of the importable module that owns these globals, or None."""
    name = namespace.get("__name__")
    if not isinstance(name, str) or name == "__main__":
        return None
    return name if getattr(sys.modules.get(name), "__dict__", None) is namespace else None


def _slots(cls: type) -> Any:
    slots = vars(cls)["__slots__"]
    return slots if isinstance(slots, str) else tuple(slots)
