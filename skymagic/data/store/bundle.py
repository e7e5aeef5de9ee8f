"""The format of a bundle, the same on the way out and back: where the parts of one pickle are.

Each part is either inline, as base64 text, or ``[file, offset, length]`` in a file of a store. A bundle says so as plain
values, the parts of the pickle stream under ``header`` and the out-of-band ones under ``buffers``::

    {"header": ["gASV…"], "buffers": [[0, 0, 400000000], [0, 400000000, 2400]]}
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skymagic.data.store.base import Buffer, Content

INLINE = 64 << 10
"""Parts that are together shorter than this many bytes are inline."""

_ALIGN = 64

Location = str | list[int]


def inline(part: Content) -> str:
    """The location of a part that needs no file."""
    return base64.b64encode(bytes(part)).decode()


def align(parts: Sequence[Content]) -> tuple[list[Content], list[int], int]:
    """Parts one after the other in a file, each at a multiple of 64 bytes, as vector instructions and torch like it.

    Returns:
        What to write, the offset of each part, and the length of all in bytes.
    """
    pieces: list[Content] = []
    offsets: list[int] = []
    nbytes = 0
    for part in parts:
        offsets.append(nbytes)
        padding = -len(part) % _ALIGN
        pieces += [part, bytes(padding)]
        nbytes += len(part) + padding
    return pieces, offsets, nbytes


def write_parts(
    parts: Sequence[Content], give: Callable[[list[Content], int], str]
) -> tuple[str | None, list[Location]]:
    """Write what is not inline into one file.

    Args:
        give: writes pieces of a length in all, and says the file's name.

    Returns:
        The file's name, None where none was needed, and the location of each part.
    """
    short = [len(part) < INLINE for part in parts]
    if sum(len(part) for part, is_short in zip(parts, short, strict=True) if is_short) >= INLINE:
        short = [False] * len(parts)
    filed = [part for part, is_short in zip(parts, short, strict=True) if not is_short]
    pieces, offsets, nbytes = align(filed)
    name = give(pieces, nbytes) if filed else None
    rest = iter(offsets)
    return name, [
        inline(part) if is_short else [0, next(rest), len(part)] for part, is_short in zip(parts, short, strict=True)
    ]


def part_fields(locations: Sequence[Location], header_parts: int) -> dict[str, Any]:
    """The bundle of parts at these locations, of which so many are the pickle stream."""
    return {"header": list(locations[:header_parts]), "buffers": list(locations[header_parts:])}


def read_parts(bundle: Mapping[str, Any], open_file: Callable[[int], memoryview]) -> tuple[list[Buffer], list[Buffer]]:
    """Header and buffers of a bundle.

    Args:
        open_file: the bytes of the file with this number, as new memory at each call.
    """
    files: dict[int, memoryview] = {}
    used: set[tuple[int, int]] = set()

    def part(location: Location) -> Buffer:
        if isinstance(location, str):
            return bytearray(base64.b64decode(location))
        number, offset, nbytes = location
        # Equal arrays lie in one place; each gets memory of its own, for they are not the same array.
        if number not in files or (number, offset) in used:
            files[number] = open_file(number)
        used.add((number, offset))
        return files[number][offset : offset + nbytes]

    return [part(each) for each in bundle["header"]], [part(each) for each in bundle["buffers"]]
