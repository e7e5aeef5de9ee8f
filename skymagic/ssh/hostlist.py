"""Host names and ranges as users write them: ``gpu[1-8]``, ``ubuntu@10.0.0.7:2222``, ``@file``.

An IPv6 address with a port is ``[fe80::1]:22``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from skymagic.errors import RequestError

MAX_HOSTS = 1024
"""Most hosts that one range may expand to; more is treated as a typing error."""
RANGE = re.compile(r"\[([0-9,\- ]*)\]")
HOST = re.compile(
    r"(?:(?P<user>[^\s]+)@)?"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[^\s:@\[\]]+))"
    r"(?::(?P<port>[^:]*))?"
)


UNSAFE = re.compile(r"""['"`$\\;&<>|(){}*?!#~^]|[^ -~\w]""")
"""Characters that OpenSSH refuses in names since CVE-2023-51385, and more.

A name goes into a ProxyCommand, which a shell interprets.
"""


@dataclass(frozen=True)
class HostSpec:
    """A host as written; an `Endpoint` is the host as resolved by ~/.ssh/config."""

    text: str
    """Text as the user wrote it, with ranges expanded; the host's label in all output."""
    name: str
    """Name or address to look up in ~/.ssh/config."""
    user: str | None = None
    port: int | None = None


def expand(expressions: Iterable[str]) -> tuple[HostSpec, ...]:
    """Expand host names, ranges and files of hosts, in order; a host named twice is two nodes.

    Args:
        expressions: each a host, a range of hosts, several separated by commas, or ``@FILE`` (one
            per line, # comments).

    Raises:
        RequestError: with all mistakes.
    """
    mistakes: list[str] = []
    specs = [spec for word in expressions for spec in _parse_word(word.strip(), mistakes)]
    if not specs and not mistakes:
        mistakes.append("no hosts: name some, for example gpu1,gpu2 or @hosts.txt")
    if mistakes:
        raise RequestError(mistakes)
    return tuple(specs)


def _parse_word(word: str, mistakes: list[str]) -> list[HostSpec]:
    if word.startswith("@"):
        return _read_file(word[1:], mistakes)
    return [
        spec
        for part in re.split(r",(?![^\[]*\])", word)  # at commas outside brackets
        if part
        for text in _expand_ranges(part, mistakes)
        for spec in _parse_host(text, mistakes)
    ]


def _read_file(name: str, mistakes: list[str]) -> list[HostSpec]:
    try:
        lines = Path(name).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not text"
        mistakes.append(f"the file of hosts {name!r} cannot be read: {reason}")
        return []
    specs: list[HostSpec] = []
    for number, line in enumerate(lines, 1):
        line_mistakes: list[str] = []
        for word in line.partition("#")[0].split():
            if word.startswith("@"):
                line_mistakes.append(f"{word!r}: a file of hosts cannot name another one")
            else:
                specs += _parse_word(word, line_mistakes)
        mistakes += [f"{name} line {number}: {mistake}" for mistake in line_mistakes]
    if not specs and not mistakes:
        mistakes.append(f"the file of hosts {name!r} names no host")
    return specs


def _expand_ranges(text: str, mistakes: list[str]) -> list[str]:
    """Expand the bracketed ranges of a name."""
    texts, remainder = [""], text
    while (match := RANGE.search(remainder)) is not None:
        numbers = _range_numbers(match[1])
        if numbers is None:
            mistakes.append(
                f"{text!r}: [{match[1]}] is not a range; write gpu[1-8] or gpu[01-08,11]"
            )
            return []
        if len(texts) * len(numbers) > MAX_HOSTS:
            mistakes.append(f"{text!r} means more than {MAX_HOSTS} hosts")
            return []
        texts = [head + remainder[: match.start()] + number for head in texts for number in numbers]
        remainder = remainder[match.end() :]
    return [head + remainder for head in texts]


def _range_numbers(text: str) -> list[str] | None:
    numbers: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            return None
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            return None
        width = len(first) if first.startswith("0") or len(first) == len(last) else 0
        end = min(int(last), int(first) + MAX_HOSTS) + 1
        numbers += [str(number).zfill(width) for number in range(int(first), end)]
    return numbers


def _parse_host(text: str, mistakes: list[str]) -> list[HostSpec]:
    match = HOST.fullmatch(text)
    if match is None or text.startswith("-"):
        hint = "; an IPv6 address stands in brackets: [fe80::1]:22" if text.count(":") > 1 else ""
        mistakes.append(f"{text!r} is not a host; write NAME, USER@NAME or USER@NAME:PORT{hint}")
        return []
    port = match["port"]
    if port is not None and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        mistakes.append(f"{text!r}: the port is a number from 1 to 65535, not {port!r}")
        return []
    name = match["ipv6"] or match["name"]
    if name.startswith("-") or (match["user"] or "").startswith("-"):
        mistakes.append(f"{text!r}: a name cannot begin with '-'")
        return []
    domain, _, user = (match["user"] or "").rpartition("\\")  # Windows accounts: DOMAIN\user
    if unsafe := UNSAFE.search(f"{domain}{user}{name}"):
        mistakes.append(f"{text!r}: a name cannot hold {unsafe[0]!r}")
        return []
    return [HostSpec(text, name, match["user"], int(port) if port else None)]
