"""A line becomes tokens, quotes and comments understood and nothing evaluated; tokens become values by option; all mistakes are collected."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.errors import RequestError
from skymagic.magics.arguments.options import MAGICS, REFUSED, Magic, Option
from skymagic.magics.arguments.readers import Reader, pool_name
from skymagic.magics.arguments.removed import REMOVED_OPTIONS
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import is_number, is_unit

TIME = "TIME"
"""What `Option.metavar` says of options that take a duration."""
CODE_BELOW = "code stands on the lines below %%{magic}, and nothing of it on its own line"


@dataclass(frozen=True)
class Token:
    """A word of the line; a quoted one is never an option."""

    text: str
    quoted: bool = False

    @property
    def is_option(self) -> bool:
        """Whether it starts as an option does; ``-1`` is a value."""
        return not self.quoted and re.match(r"-[^\d.:]", self.text) is not None


def split(line: str) -> tuple[list[Token], list[str]]:
    """(tokens, mistakes) of a line: quotes as in a shell, ``#`` at a token's start ends it, a last ``;`` is dropped.

    A backslash only escapes a blank, a quote, ``#`` or itself, so that paths of Windows stay whole.
    """
    tokens: list[Token] = []
    position, end = 0, len(line)
    while position < end:
        if line[position].isspace():
            position += 1
        elif line[position] == "#":
            break
        else:
            token, position = _token(line, position)
            if token is None:
                return tokens, [f"a quote is not closed: {line[position:].strip()}"]
            tokens.append(token)
    if tokens and not tokens[-1].quoted and tokens[-1].text.endswith(";"):
        last = tokens.pop().text.rstrip(";")
        tokens += [Token(last)] if last else []
    return tokens, []


def _token(line: str, position: int) -> tuple[Token | None, int]:
    """(token, where it ends), or (None, where the quote is that has no end)."""
    text, opened, opens_at = "", "", position
    quoted = line[position] in "'\""
    while position < len(line):
        here, following = line[position], line[position + 1 : position + 2]
        if (
            here == "\\"
            and opened != "'"
            and following
            and (following in "\"'\\#" or following.isspace())
        ):
            text, position = text + following, position + 1
        elif opened:
            text, opened = (text, "") if here == opened else (text + here, opened)
        elif here in "'\"":
            opened, opens_at = here, position
        elif here.isspace():
            break
        else:
            text += here
        position += 1
    return (None, opens_at) if opened else (Token(text, quoted), position)


@dataclass(frozen=True)
class ParsedOption:
    """An option as it was given: how the user wrote its name, and its value's text (None: without one).

    `items` are values that need no reading: those of a TOML table.
    """

    option: Option
    label: str
    text: str | None
    items: tuple[Any, ...] = ()


def scan(magic: Magic, tokens: Sequence[Token]) -> tuple[list[ParsedOption], list[str], list[str]]:
    """(options given, words that belong to none, mistakes)."""
    known = {name: option for option in magic.accepted for name in option.spellings}
    given: list[ParsedOption] = []
    words: list[str] = []
    mistakes: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.is_option:
            words.append(token.text)
            continue
        option, label, text = _match(token.text, known)
        if option is None:
            mistakes.append(
                f"{label}: {REMOVED_OPTIONS.get(label) or REFUSED.get(label) or f'no such option{did_you_mean(label, known)}'}"
            )
            if (
                rest
                and not rest[0].is_option
                and text is None
                and (not magic.words or magic.takes_pool)
            ):
                rest.pop(0)  # most likely its value, and not a mistake of its own
            continue
        if option.read is None and text is not None:
            mistakes.append(f"{label} takes no value, not {text!r}")
        elif option.read is not None:
            text = _value_of(option, text, rest)
            if text is None and option.takes != "maybe":
                after = (
                    f"; {rest[0].text!r} after it is an option, unless you quote it" if rest else ""
                )
                mistakes.append(f"{label} needs {option.metavar}{after}")
                continue
        given.append(ParsedOption(option, label, text))
    return given, words, mistakes


def _match(text: str, known: Mapping[str, Option]) -> tuple[Option | None, str, str | None]:
    """(option or None, its name as written, value in the same token)."""
    name, equals, value = text.partition("=")
    short = known.get(text[:2])
    if (
        name not in known
        and f"-{name}" not in known
        and short is not None
        and short.read is not None
    ):
        return short, text[:2], text[2:].removeprefix("=")
    return known.get(name), name, value if equals else None


def _value_of(option: Option, text: str | None, rest: list[Token]) -> str | None:
    """The option's value: what came with it, else the tokens that follow and are no options; ``5 min`` is one value."""
    parts = [] if text is None else [text]
    while rest and not rest[0].is_option:
        all_of_them = option.takes in ("names", "maybe") and text is None
        comma = (
            option.takes != "one"
            and parts
            and (parts[-1].endswith(",") or rest[0].text.startswith(","))
        )
        unit = (
            option.metavar == TIME
            and len(parts) == 1
            and is_number(parts[0])
            and is_unit(rest[0].text)
            and not rest[0].quoted
        )
        if parts and not all_of_them and not comma and not unit:
            break
        parts.append(rest.pop(0).text)
    return " ".join(parts) if parts else None


_REPEATABLE = (
    "hosts",
    "plugins",
)  # one host may be two nodes; a plugin given twice is a mistake, met later


def read(given: Iterable[ParsedOption], mistakes: list[str]) -> dict[str, Any]:
    """The fields that options fill; what cannot be read is added to `mistakes`."""
    values: dict[str, Any] = {}
    first: dict[str, ParsedOption] = {}
    for item in given:
        option, before = item.option, first.setdefault(item.option.field, item)
        if before is not item and option.read is not None and option.takes == "one":
            both = f"{before.label} is given twice"
            if item.label != before.label:
                both = f"{before.label} and {item.label} are the same option"
            mistakes.append(f"{both} ({before.text} and {item.text}); keep one of them")
            continue
        value: Any = item.items or True
        if option.read is not None and item.text is not None:
            try:
                value = option.read(item.text)
            except RequestError as wrong:
                mistakes += [f"{item.label}: {mistake}" for mistake in wrong.mistakes]
                continue
        if isinstance(value, tuple):
            before_it = values.get(option.field)
            value = (before_it if isinstance(before_it, tuple) else ()) + value
            value = value if option.field in _REPEATABLE else tuple(dict.fromkeys(value))
        values[option.field] = value
    return values


def is_code(line: str, words: Sequence[str]) -> bool:
    """Return whether the words of a line that belong to no option are most likely Python code: ``print(x)``, ``import torch``.

    Args:
        line: the whole line, whose quotes are still there.
    """
    if len(words) == 1:
        return re.search(r"[(=\[]", words[0]) is not None
    return len(words) > 1 and any(
        keyword.iskeyword(word) or "=" in word or "(" in word for word in words
    )


class ParsedLine:
    """A line on its way to a request: values read, words left, mistakes met."""

    def __init__(
        self, magic: str, line: str, more: Iterable[ParsedOption] = (), words: Iterable[str] = ()
    ) -> None:
        tokens, self.mistakes = split(line)
        given, self.words, unknown = scan(MAGICS[magic], tokens)
        self.words += [word for word in words if word not in self.words]
        self.mistakes += unknown
        given += more
        self.labels = {item.option.field: item.label for item in given}
        self.values = read(given, self.mistakes)
        if MAGICS[magic].takes_pool and MAGICS[magic].cell and is_code(line, self.words):
            self.mistakes.append(f"{' '.join(self.words)!r}: {CODE_BELOW.format(magic=magic)}")
        elif MAGICS[magic].takes_pool:
            self._name_pool()
        elif self.words and not MAGICS[magic].words:
            self.mistakes.append(f"{' '.join(self.words)!r} belongs to no option of %{magic}")

    def _name_pool(self) -> None:
        """A pool's name stands alone or after ``--pool``: it fills the field `name` either way."""
        name = self.word("name of a pool", pool_name)
        if name is not None and self.values.setdefault("name", name) != name:
            self.mistakes.append(
                f"{name} and --pool {self.values['name']} are two pools; keep one of them"
            )

    def check(self, wrong: object, mistake: str) -> None:
        """Note a mistake when `wrong`."""
        if wrong:
            self.mistakes.append(mistake)

    def word(self, what: str, reader: Reader) -> Any:
        """The one word that may stand without an option, or None."""
        if len(self.words) > 1:
            self.mistakes.append(
                f"one {what}, not {len(self.words)} ({', '.join(map(repr, self.words))})"
            )
        elif self.words:
            try:
                return reader(self.words[0])
            except RequestError as wrong:
                self.mistakes += wrong.mistakes
        return None

    def done(self) -> None:
        """Raise RequestError when there are mistakes."""
        if self.mistakes:
            raise RequestError(list(dict.fromkeys(self.mistakes)))
