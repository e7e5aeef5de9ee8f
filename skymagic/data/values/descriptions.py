"""What values are, in words: types, shapes, and checksums, without a call of the user's code; a rank's names are described so while its cell runs."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import zlib
from collections.abc import Callable
from typing import Any

CHECKED_BYTES = 64 << 20
"""Bytes of arrays and texts of which a checksum is made, of all names together: that takes about 50 ms."""
SHOWN_CHARACTERS = 40
"""Most characters of a text."""
LONGEST_INTEGER_BITS = 128
"""Numbers that are longer are told by their length: Python refuses to print very long ones."""

Description = dict[str, str]
"""``type``; ``is``: its size or shape, or the value of a number, a text, None; ``checksum`` where one could be made."""


def described(namespace: dict[str, Any], hidden: Any = ()) -> dict[str, Description]:
    """The user's names, modules left out.

    No code of the user's is called for it: it would run beside the cell.

    Args:
        hidden: names that are IPython's.
    """
    budget = _Budget(CHECKED_BYTES)
    found: dict[str, Description] = {}
    for name, value in list(namespace.items()):
        if not (name.startswith("_") or name in hidden or isinstance(value, types.ModuleType)):
            found[name] = describe(value, budget)
    return found


class _Budget:
    """How many bytes may still be read for checksums."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def checksum(self, data: bytes | memoryview) -> str:
        """In hexadecimal; empty when that is too much."""
        if len(data) > self.left:
            return ""
        self.left -= len(data)
        return f"{zlib.crc32(data):08x}"


def describe(value: object, budget: _Budget | None = None) -> Description:
    """One value; what cannot be looked at, such as one that changes meanwhile, by its type alone.

    Args:
        budget: for checksums; without one there are none of large values.
    """
    budget = budget or _Budget(0)
    kind = type(value)
    about: Description = {"type": kind.__name__}
    with contextlib.suppress(Exception):
        for handles, look in _LOOKS:
            if handles(value):
                about |= look(value, budget)
                break
    return about


def _number(value: Any, budget: _Budget) -> Description:
    if type(value) is int and value.bit_length() > LONGEST_INTEGER_BITS:
        return {
            "is": f"{value.bit_length()} bits",
            "checksum": budget.checksum(value.to_bytes(value.bit_length() // 8 + 1, signed=True)),
        }
    return {"is": repr(value), "checksum": repr(value)}


def _text(value: str, budget: _Budget) -> Description:
    shown = (
        repr(value)
        if len(value) <= SHOWN_CHARACTERS
        else f"{value[:SHOWN_CHARACTERS]!r} … {len(value):,} characters"
    )
    return {"is": shown, "checksum": budget.checksum(value.encode(errors="surrogatepass"))}


def _bytes(value: Any, budget: _Budget) -> Description:
    return {"is": f"{len(value):,} bytes", "checksum": budget.checksum(value)}


def _container(value: Any, _: _Budget) -> Description:
    return {"is": "1 item" if len(value) == 1 else f"{len(value):,} items"}


def _array(value: Any, budget: _Budget) -> Description:
    about = {"is": f"{_shape(value.shape)} {value.dtype}"}
    if not value.dtype.hasobject and value.flags.c_contiguous and value.nbytes <= budget.left:
        about["checksum"] = budget.checksum(memoryview(value.reshape(-1).view("u1")))
    return about


def _tensor(value: Any, budget: _Budget) -> Description:
    """On a GPU it is not read: that would wait for what runs there."""
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    about = {"is": f"{_shape(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"}
    plain = type(value).__module__ in (
        "torch",
        "torch.nn.parameter",
    )  # another's may have no memory of its own
    if plain and not where and value.is_contiguous() and value.nbytes <= budget.left:
        flat = value.detach().reshape(-1).view(sys.modules["torch"].uint8)
        about["checksum"] = budget.checksum(memoryview(flat.numpy()))
    return about


def _network(value: Any, _: _Budget) -> Description:
    return {"is": f"{sum(each.numel() for each in value.parameters()):,} parameters"}


def _shaped(value: Any, _: _Budget) -> Description:
    return {"is": " ".join(filter(None, (_shape(value.shape), str(getattr(value, "dtype", "")))))}


def _shape(shape: Any) -> str:
    return str(tuple(shape))


def _is(module: str, name: str, value: object) -> bool:
    """Whether a value is of a class of a module that may not be imported: then it is not."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _of(*kinds: type) -> Callable[[object], bool]:
    return lambda value: type(value) in kinds


_LOOKS: tuple[tuple[Callable[[object], bool], Callable[[Any, _Budget], Description]], ...] = (
    (_of(bool, int, float, complex, type(None)), _number),
    (_of(str), _text),
    (_of(bytes, bytearray), _bytes),
    (_of(list, tuple, dict, set, frozenset), _container),
    (functools.partial(_is, "numpy", "ndarray"), _array),
    (functools.partial(_is, "torch", "Tensor"), _tensor),
    (functools.partial(_is, "torch.nn", "Module"), _network),
    (functools.partial(_is, "pandas", "DataFrame"), _shaped),
    (functools.partial(_is, "pandas", "Series"), _shaped),
    (functools.partial(_is, "jax", "Array"), _shaped),
)
"""What tells a kind of values, and what describes it; the first that fits."""
