"""Short descriptions of values: types, shapes and checksums.

None of the user's code is called, because a rank's names are described while its cell runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import zlib
from collections.abc import Callable
from typing import Any

from skymagic.data.namespace import Namespace

CHECKED_BYTES = 64 << 20
"""Limit of array and text bytes to checksum, over all names: about 50 ms."""
SHOWN_CHARACTERS = 40
"""Most characters of a text that are shown."""
LONGEST_INTEGER_BITS = 128
"""Longer integers are described by their length: Python refuses to print very long ones."""

Description = dict[str, str]
"""Keys: `type`; `value`, the size or shape, or the value itself for a number, text or None;
`checksum`, if one could be computed.
"""


def described(namespace: Namespace, hidden: Any = ()) -> dict[str, Description]:
    """Describe the user's names, except modules.

    The user's code is never called: it would run concurrently with the cell.

    Args:
        hidden: names that belong to IPython.
    """
    budget = _Budget(CHECKED_BYTES)
    descriptions: dict[str, Description] = {}
    # A copy, because the cell may bind names at the same time.
    for name, value in list(namespace.items()):
        if not (name.startswith("_") or name in hidden or isinstance(value, types.ModuleType)):
            descriptions[name] = describe(value, budget)
    return descriptions


class _Budget:
    """Number of bytes that may still be read for checksums."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def checksum(self, data: bytes | memoryview) -> str:
        """Return the checksum in hexadecimal, or "" if the budget is exceeded."""
        if len(data) > self.left:
            return ""
        self.left -= len(data)
        return f"{zlib.crc32(data):08x}"


def describe(value: object, budget: _Budget | None = None) -> Description:
    """Describe one value, by its type alone if it cannot be inspected.

    That is the case, for example, if the value changes at the same time.

    Args:
        budget: for checksums; without it large values get none.
    """
    budget = budget or _Budget(0)
    kind = type(value)
    description: Description = {"type": kind.__name__}
    with contextlib.suppress(Exception):
        for handles, describe_kind in _LOOKS:
            if handles(value):
                description |= describe_kind(value, budget)
                break
    return description


def _number(value: Any, budget: _Budget) -> Description:
    if type(value) is int and value.bit_length() > LONGEST_INTEGER_BITS:
        return {
            "value": f"{value.bit_length()} bits",
            # One bit more than `bit_length`, for the sign.
            "checksum": budget.checksum(value.to_bytes(value.bit_length() // 8 + 1, signed=True)),
        }
    return {"value": repr(value), "checksum": repr(value)}


def _text(value: str, budget: _Budget) -> Description:
    shown = (
        repr(value)
        if len(value) <= SHOWN_CHARACTERS
        else f"{value[:SHOWN_CHARACTERS]!r} … {len(value):,} characters"
    )
    return {"value": shown, "checksum": budget.checksum(value.encode(errors="surrogatepass"))}


def _bytes(value: Any, budget: _Budget) -> Description:
    return {"value": f"{len(value):,} bytes", "checksum": budget.checksum(value)}


def _container(value: Any, _: _Budget) -> Description:
    return {"value": "1 item" if len(value) == 1 else f"{len(value):,} items"}


def _array(value: Any, budget: _Budget) -> Description:
    description = {"value": f"{_shape(value.shape)} {value.dtype}"}
    if not value.dtype.hasobject and value.flags.c_contiguous and value.nbytes <= budget.left:
        description["checksum"] = budget.checksum(memoryview(value.reshape(-1).view("u1")))
    return description


def _tensor(value: Any, budget: _Budget) -> Description:
    """Describe a tensor, without reading GPU memory: that would wait for running kernels."""
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    description = {
        "value": f"{_shape(value.shape)} {str(value.dtype).removeprefix('torch.')}{device}"
    }
    # Tensor subclasses of other packages may have no memory of their own.
    plain = type(value).__module__ in ("torch", "torch.nn.parameter")
    if plain and not device and value.is_contiguous() and value.nbytes <= budget.left:
        flat = value.detach().reshape(-1).view(sys.modules["torch"].uint8)
        description["checksum"] = budget.checksum(memoryview(flat.numpy()))
    return description


def _network(value: Any, _: _Budget) -> Description:
    return {"value": f"{sum(parameter.numel() for parameter in value.parameters()):,} parameters"}


def _array_like(value: Any, _: _Budget) -> Description:
    return {
        "value": " ".join(filter(None, (_shape(value.shape), str(getattr(value, "dtype", "")))))
    }


def _shape(shape: Any) -> str:
    return str(tuple(shape))


def _is_instance(module: str, name: str, value: object) -> bool:
    """Return True if a value is an instance of a class whose module may not be imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _of(*kinds: type) -> Callable[[object], bool]:
    # Exact types, because methods of a subclass may be the user's code.
    return lambda value: type(value) in kinds


_LOOKS: tuple[tuple[Callable[[object], bool], Callable[[Any, _Budget], Description]], ...] = (
    (_of(bool, int, float, complex, type(None)), _number),
    (_of(str), _text),
    (_of(bytes, bytearray), _bytes),
    (_of(list, tuple, dict, set, frozenset), _container),
    (functools.partial(_is_instance, "numpy", "ndarray"), _array),
    (functools.partial(_is_instance, "torch", "Tensor"), _tensor),
    (functools.partial(_is_instance, "torch.nn", "Module"), _network),
    (functools.partial(_is_instance, "pandas", "DataFrame"), _array_like),
    (functools.partial(_is_instance, "pandas", "Series"), _array_like),
    (functools.partial(_is_instance, "jax", "Array"), _array_like),
)
"""Pairs of a predicate and the function that describes matching values; the first match is used."""
