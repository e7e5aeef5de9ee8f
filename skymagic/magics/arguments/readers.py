"""Readers that convert the text of a value to a field of a request.

They raise RequestError for invalid text.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any

from skymagic.errors import RequestError, collect_mistakes
from skymagic.plan.image import Image
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import duration

Reader = Callable[[str], Any]


def number(least: int) -> Reader:
    """Return a reader of integers that are at least `least`."""

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
            raise RequestError(f"{text!r} is not a whole number")
        if int(text) < least:
            raise RequestError(f"must be at least {least}, not {text}")
        return int(text)

    return read


def procs(text: str) -> int | None:
    """Read the number of ranks per node; None for ``auto``."""
    return None if text == "auto" else int(number(1)(text))


def limit(text: str) -> float | None:
    """Read a duration, or ``none`` to override a configured default."""
    return None if text == "none" else duration(text)


def dollars(text: str) -> float:
    """Read a positive price per hour, with or without ``$``."""
    if not re.fullmatch(r"\$?[0-9]{1,9}(\.[0-9]{1,9})?", text) or not float(text.lstrip("$")):
        raise RequestError(
            f"{text!r} is not a price: write dollars per hour for the whole pool, as in 12.50"
        )
    return float(text.lstrip("$"))


def identifier(text: str) -> str:
    """Read a name that is valid for a Python variable."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise RequestError(f"{text!r} is not a name for a variable")
    return text


def matching(pattern: str, refusal: str) -> Reader:
    """Return a reader of texts that match a pattern; the text is kept unchanged.

    `refusal` completes the message for any other text.
    """

    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise RequestError(f"{text!r} {refusal}")
        return text

    return read


_pool_name = matching(
    r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}",
    "is not a name for a pool: use letters, digits, - and _, at most 40",
)


def pool_name(text: str) -> str:
    """Read a pool's name, which is also part of file names.

    A number is refused, because it is meant as a number of ranks or as a rank.
    """
    if text.isdecimal():
        raise RequestError(
            f"{text!r} is a number, not a name for a pool: --ranks {text} makes a pool of that "
            "many ranks, and -t 0,1 selects ranks"
        )
    key, equals, value = text.partition("=")
    if equals and key.strip("-"):
        raise RequestError(
            f"{text!r} is not a name for a pool; write an option as --{key.strip('-')} {value}"
        )
    _pool_name(text)
    return text


_region = matching(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}", "is not a region: write one like eu-central-1")
path = matching(r"[^\0]+", "is not a path")  # the path need not exist
variable = matching(r"[A-Za-z_][A-Za-z0-9_]*", "is not a name for an environment variable")
host = matching(
    r"(?!-)(@\S+|[\w.@:%\[\],-]+)", "is not a host: write NAME, USER@NAME:PORT, NAME[1-8] or @FILE"
)
"""Reader of a host, a range of hosts or a file of hosts; never of a command's option."""


def interpreter(text: str) -> str:
    """Read a Python version, or the path of an interpreter."""
    Image(python=text)  # raises for anything else
    return text


def pair(text: str) -> tuple[tuple[str, str], ...]:
    """Read ``NAME=value`` as a list of one pair."""
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError(
            f"{text!r} has no value: write NAME=value, or --secret {text} for the notebook's own"
        )
    return ((variable(name), value),)


def list_of(read: Reader, separator: str = r"[,\s]+") -> Reader:
    """Return a reader of lists, which reports the mistakes of all items."""

    def read_all(text: str) -> tuple[Any, ...]:
        values: list[Any] = []
        mistakes: list[str] = []
        for item in filter(None, map(str.strip, re.split(separator, text))):
            with collect_mistakes(mistakes):
                values.append(read(item))
        if not values and not mistakes:
            mistakes.append("no name is given")
        if mistakes:
            raise RequestError(mistakes)
        return tuple(values)

    return read_all


# a comma inside brackets (jax[cuda,cpu], gpu[1,3]) or before a constraint (torch>=2,<3) belongs to
# the item
OUTSIDE_BRACKETS = r",(?![^\[\]]*\])"
identifiers = list_of(identifier)


def _package(text: str) -> str:
    try:
        return Image(pip=(text,)).pip[0]
    except RequestError as wrong:
        raise RequestError([mistake.removeprefix("pip: ") for mistake in wrong.mistakes]) from None


packages = list_of(_package, rf"{OUTSIDE_BRACKETS}(?=\s*[A-Za-z])")
"""Reader of requirements, as pip accepts them."""


def region(text: str) -> str:
    """Read a region, or several with commas between them, as text."""
    return ",".join(list_of(_region)(text))


def cluster(text: str) -> str:
    """Read the address of a Ray cluster: ``auto``, ``HOST:PORT``, ``ray://HOST:PORT``."""
    if text == "auto" or re.fullmatch(r"(ray://)?([\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}", text):
        return text
    raise RequestError(
        f"{text!r} is no address of a Ray cluster: write auto, HOST:6379 or ray://HOST:10001"
    )


def directive(text: str) -> str:
    """Read a value of a cluster's option."""
    if not text or not text.isprintable():
        raise RequestError(f"{text!r} is no value of an option of a cluster")
    return text


def directives(text: str) -> tuple[tuple[str, str], ...]:
    """Read options of sbatch: ``mem=0,hint=nomultithread,overcommit``.

    A piece that is not an option name belongs to the value before it.
    """
    options: list[tuple[str, str]] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        name, equals, value = piece.partition("=")
        if options and not equals and not re.fullmatch(r"[a-z][a-z-]+", name):
            options[-1] = (options[-1][0], f"{options[-1][1]},{piece}")
        else:
            options.append(
                (name.strip().removeprefix("--"), directive(value.strip()) if equals else "")
            )
    return tuple(options)


def one_of(*choices: str) -> Reader:
    """Return a reader of one of these words."""

    def read(text: str) -> str:
        if text not in choices:
            raise RequestError(
                f"{text!r} is not one of {', '.join(choices)}{did_you_mean(text, choices)}"
            )
        return text

    return read
