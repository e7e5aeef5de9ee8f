"""Convert a line to tokens, and tokens to values by option.

Quotes and comments are handled, nothing is evaluated, and all mistakes are collected.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.errors import RequestError
from skymagic.magics.arguments.options import MAGICS, REFUSED, Arity, Magic, Option
from skymagic.magics.arguments.readers import Reader, pool_name
from skymagic.magics.arguments.removed import REMOVED_OPTIONS
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import is_number, is_unit

TIME = "TIME"
"""Value of `Option.metavar` for options that take a duration."""
CODE_BELOW = "write the code on the lines below %%{magic}, not on that line"


@dataclass(frozen=True)
class Token:
    """A word of the line; a quoted word is never an option."""

    text: str
    quoted: bool = False

    @property
    def is_option(self) -> bool:
        """True if it starts like an option; ``-1`` is a value."""
        return not self.quoted and re.match(r"-[^\d.:]", self.text) is not None


def split(line: str) -> tuple[list[Token], list[str]]:
    """Return (tokens, mistakes) of a line.

    Quotes work as in a shell, ``#`` at a token's start begins a comment, a final ``;`` is dropped.
    A backslash only escapes a blank, a quote, ``#`` or itself, so that Windows paths stay intact.
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
    """Return (token, its end), or (None, position of the quote that is not closed)."""
    text, quote, quote_at = "", "", position
    quoted = line[position] in "'\""
    while position < len(line):
        character, following = line[position], line[position + 1 : position + 2]
        if (
            character == "\\"
            and quote != "'"
            and following
            and (following in "\"'\\#" or following.isspace())
        ):
            text, position = text + following, position + 1
        elif quote:
            text, quote = (text, "") if character == quote else (text + character, quote)
        elif character in "'\"":
            quote, quote_at = character, position
        elif character.isspace():
            break
        else:
            text += character
        position += 1
    return (None, quote_at) if quote else (Token(text, quoted), position)


@dataclass(frozen=True)
class ParsedOption:
    """An option on the line, with its name as the user wrote it, and its value's text or None.

    `items` are values that are converted already: those of a TOML table.
    """

    option: Option
    label: str
    text: str | None
    items: tuple[Any, ...] = ()


def scan(magic: Magic, tokens: Sequence[Token]) -> tuple[list[ParsedOption], list[str], list[str]]:
    """Return (options, words that belong to no option, mistakes)."""
    known_options = {name: option for option in magic.accepted for name in option.spellings}
    options: list[ParsedOption] = []
    words: list[str] = []
    mistakes: list[str] = []
    remaining = list(tokens)
    while remaining:
        token = remaining.pop(0)
        if not token.is_option:
            words.append(token.text)
            continue
        option, label, text = _match(token.text, known_options)
        if option is None:
            reason = REMOVED_OPTIONS.get(label) or REFUSED.get(label)
            if not reason:
                reason = f"no such option{did_you_mean(label, known_options)}"
            mistakes.append(f"{label}: {reason}")
            if (
                remaining
                and not remaining[0].is_option
                and text is None
                and (not magic.positional or magic.takes_pool)
            ):
                remaining.pop(0)  # most likely its value, and not another mistake
            continue
        if option.read is None and text is not None:
            mistakes.append(f"{label} takes no value, not {text!r}")
        elif option.read is not None:
            text = _value_of(option, text, remaining)
            if text is None and option.arity is not Arity.OPTIONAL:
                hint = (
                    f"; {remaining[0].text!r} is read as an option: quote it to use it as the value"
                    if remaining
                    else ""
                )
                mistakes.append(f"{label} needs {option.metavar}{hint}")
                continue
        options.append(ParsedOption(option, label, text))
    return options, words, mistakes


def _match(text: str, options: Mapping[str, Option]) -> tuple[Option | None, str, str | None]:
    """Return (option or None, its name as written, value in the same token or None)."""
    name, equals, value = text.partition("=")
    short = options.get(text[:2])
    # A value may follow a short option at once: -n20. A long option with one dash is a mistake
    # instead, of which the message suggests the right spelling: -pool is not -p ool.
    if (
        name not in options
        and f"-{name}" not in options
        and short is not None
        and short.read is not None
    ):
        return short, text[:2], text[2:].removeprefix("=")
    return options.get(name), name, value if equals else None


def _value_of(option: Option, text: str | None, tokens: list[Token]) -> str | None:
    """Return an option's value: the rest of its token, or the tokens up to the next option.

    ``5 min`` is one value.
    """
    parts = [] if text is None else [text]
    while tokens and not tokens[0].is_option:
        takes_all = option.arity in (Arity.WORDS, Arity.OPTIONAL) and text is None
        continues_list = (
            option.arity is not Arity.ONE
            and parts
            and (parts[-1].endswith(",") or tokens[0].text.startswith(","))
        )
        is_time_unit = (
            option.metavar == TIME
            and len(parts) == 1
            and is_number(parts[0])
            and is_unit(tokens[0].text)
            and not tokens[0].quoted
        )
        if parts and not takes_all and not continues_list and not is_time_unit:
            break
        parts.append(tokens.pop(0).text)
    return " ".join(parts) if parts else None


# options that keep repeated values: a host given twice is two nodes, and a plugin given twice is a
# mistake that is reported later
_REPEATABLE = ("hosts", "plugins")


def convert_values(parsed: Iterable[ParsedOption], mistakes: list[str]) -> dict[str, Any]:
    """Return the values of options by field, and append invalid options' mistakes to `mistakes`."""
    values: dict[str, Any] = {}
    first_by_field: dict[str, ParsedOption] = {}
    for item in parsed:
        option, first = item.option, first_by_field.setdefault(item.option.field, item)
        if first is not item and option.read is not None and option.arity is Arity.ONE:
            problem = f"{first.label} is given twice"
            if item.label != first.label:
                problem = f"{first.label} and {item.label} are the same option"
            mistakes.append(f"{problem} ({first.text} and {item.text}); keep one of them")
            continue
        value: Any = item.items or True
        if option.read is not None and item.text is not None:
            try:
                value = option.read(item.text)
            except RequestError as error:
                mistakes += [f"{item.label}: {mistake}" for mistake in error.mistakes]
                continue
        if isinstance(value, tuple):
            previous = values.get(option.field)
            value = (previous if isinstance(previous, tuple) else ()) + value
            value = value if option.field in _REPEATABLE else tuple(dict.fromkeys(value))
        values[option.field] = value
    return values


def is_code(line: str, arguments: Sequence[str]) -> bool:
    """Return True if the words of a line that belong to no option are most likely Python code.

    Examples: ``print(x)``, ``import torch``.

    Args:
        line: the whole line, including quotes.
        arguments: words of the line that belong to no option.
    """
    if len(arguments) == 1:
        return re.search(r"[(=\[]", arguments[0]) is not None
    return len(arguments) > 1 and any(
        keyword.iskeyword(word) or "=" in word or "(" in word for word in arguments
    )


class ParsedLine:
    """A line being parsed to a request: values, remaining words, mistakes.

    Args:
        magic: name of the magic.
        line: text after the magic's name.
        more_options: further options, as of a TOML table below the line.
        more_words: further words without an option, as of such a table.
    """

    def __init__(
        self,
        magic: str,
        line: str,
        more_options: Iterable[ParsedOption] = (),
        more_words: Iterable[str] = (),
    ) -> None:
        tokens, self.mistakes = split(line)
        options, self.words, scan_mistakes = scan(MAGICS[magic], tokens)
        self.words += [word for word in more_words if word not in self.words]
        self.mistakes += scan_mistakes
        options += more_options
        self.labels = {item.option.field: item.label for item in options}
        self.values = convert_values(options, self.mistakes)
        if MAGICS[magic].takes_pool and MAGICS[magic].cell and is_code(line, self.words):
            self.mistakes.append(f"{' '.join(self.words)!r}: {CODE_BELOW.format(magic=magic)}")
        elif MAGICS[magic].takes_pool:
            self._name_pool()
        elif self.words and not MAGICS[magic].positional:
            self.mistakes.append(f"{' '.join(self.words)!r} belongs to no option of %{magic}")

    def _name_pool(self) -> None:
        """Set the field `name` from a pool's name, given alone or after ``--pool``."""
        name = self.word("pool name", pool_name)
        if name is not None and self.values.setdefault("name", name) != name:
            self.mistakes.append(
                f"{name} and --pool {self.values['name']} are two pools; keep one of them"
            )

    def check(self, wrong: object, mistake: str) -> None:
        """Add `mistake` to the mistakes if `wrong` is true."""
        if wrong:
            self.mistakes.append(mistake)

    def word(self, what: str, reader: Reader) -> Any:
        """Convert the only word without an option, or return None.

        Args:
            what: name of the word's value in messages: "pool name".
        """
        if len(self.words) > 1:
            self.mistakes.append(
                f"expected one {what}, got {len(self.words)}: {', '.join(map(repr, self.words))}"
            )
        elif self.words:
            try:
                return reader(self.words[0])
            except RequestError as error:
                self.mistakes += error.mistakes
        return None

    def raise_mistakes(self) -> None:
        """Raise RequestError if there are mistakes."""
        if self.mistakes:
            raise RequestError(list(dict.fromkeys(self.mistakes)))
