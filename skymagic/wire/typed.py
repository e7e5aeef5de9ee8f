"""Dataclasses as JSON values, and back: checked against the annotations of their fields.

`plain` turns a dataclass into dictionaries, lists and scalars. `read` turns those into the
annotated type again, or raises ValueError: an annotation is what a receiver may rely on.
Supported are scalars, dataclasses, tuples, lists, dictionaries, unions with None, and ``Any``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Reader = Callable[[Any], Any]
JsonObject = dict[str, Any]
"""An object of JSON with contents that skymagic passes on and does not define.

For MIME bundles and headers of Jupyter, notebooks, and options of
plugins. What skymagic's own processes say to each other has a dataclass instead.
"""


def fields_of(value: object) -> JsonObject:
    """Return the fields of a dataclass by name, for `json.JSONEncoder.default`.

    Raises:
        TypeError: it is no dataclass, so its value does not belong in a message.
    """
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} is not a value of a message")
    # Not `dataclasses.asdict`, which would copy all that is nested, such as a listing of a million
    # files.
    return vars(value)


def plain(value: Any) -> Any:
    """Return a value with all dataclasses in it as dictionaries, for encoders that know none."""
    # First, because a str is a Sequence too.
    if isinstance(value, (str, int, float, type(None))):
        return value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return {name: plain(item) for name, item in fields_of(value).items()}


def read(kind: type[T], value: Any) -> T:
    """Return a value of JSON as an instance of a dataclass.

    Raises:
        ValueError: the value does not fit the annotations.
    """
    try:
        return reader(kind)(value)  # type: ignore[arg-type, no-any-return]
    except (TypeError, KeyError, ValueError) as problem:
        raise ValueError(f"not a {kind.__name__}: {problem}") from None


@functools.cache
def reader(annotation: Any) -> Reader:
    """Return the function that checks and converts values of JSON for an annotation.

    Cached, and made on the first use of a type: resolving the annotations of all types would take
    milliseconds of each process's start.
    """
    if annotation is Any or annotation is object:
        return _unchanged
    if is_dataclass(annotation):
        return _dataclass_reader(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return _union_reader(arguments)
    # One type for each position; `tuple[X, ...]` is a sequence.
    if origin is tuple and arguments[1:] != (...,):
        return _row_reader(arguments)
    if origin in (tuple, list, Sequence):
        return _sequence_reader(list if origin is list else tuple, arguments[0])
    if origin in (dict, Mapping):
        return _mapping_reader(*arguments)
    return _scalar_reader(annotation)


def _unchanged(value: Any) -> Any:
    return value


def _scalar_reader(kind: type) -> Reader:
    # JSON writes 1.0 as 1.0, but a float may have been assigned an int
    accepted = (int, float) if kind is float else kind

    def scalar(value: Any) -> Any:
        if not isinstance(value, accepted):
            raise TypeError(f"{value!r:.80} is not {kind.__name__}")
        return value

    return scalar


def _dataclass_reader(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    readers = {name: reader(hints[name]) for name in kind.__dataclass_fields__}

    def instance(values: Any) -> Any:
        if not isinstance(values, dict):
            raise TypeError(f"{values!r:.80} is no {kind.__name__}")
        # a missing or an unknown field raises TypeError or KeyError
        return kind(**{name: readers[name](value) for name, value in values.items()})

    return instance


def _union_reader(kinds: tuple[Any, ...]) -> Reader:
    kinds_besides_none = [kind for kind in kinds if kind is not types.NoneType]
    if len(kinds_besides_none) == 1:
        inner = reader(kinds_besides_none[0])
        return lambda value: None if value is None else inner(value)
    # Several kinds besides None are told apart by their Python types alone: no two dataclasses,
    # which are both objects in JSON.
    accepted = tuple(get_origin(kind) or kind for kind in kinds)

    def scalar(value: Any) -> Any:
        if not isinstance(value, accepted):
            raise TypeError(f"{value!r:.80} is none of {kinds}")
        return value

    return scalar


def _row_reader(kinds: tuple[Any, ...]) -> Reader:
    readers = tuple(map(reader, kinds))

    def row(values: Any) -> Any:
        # A row of another length raises ValueError.
        return tuple(read_field(value) for read_field, value in zip(readers, values, strict=True))

    return row


def _sequence_reader(result: type, item: Any) -> Reader:
    if item in (str, int, bool):
        # a listing has a million of them: look at their types in C
        def scalars(values: Any) -> Any:
            if not isinstance(values, (list, tuple)) or not {*map(type, values)} <= {item}:
                raise TypeError(f"not a list of {item.__name__}")
            return result(values)

        return scalars
    inner = reader(item)

    def items(values: Any) -> Any:
        if not isinstance(values, (list, tuple)):
            raise TypeError("not a list")
        return result(values) if inner is _unchanged else result(map(inner, values))

    return items


def _mapping_reader(key: Any, item: Any) -> Reader:
    inner = reader(item)
    to_key = int if key is int else _unchanged  # the keys of JSON are strings

    def mapping(values: Any) -> Any:
        if not isinstance(values, dict):
            raise TypeError("not an object")
        # as it is, also what is nested in it: its receiver checks it, or passes it on
        if inner is _unchanged and to_key is _unchanged:
            return values
        return {to_key(name): inner(value) for name, value in values.items()}

    return mapping
