"""The help of a magic, who asks for it, and what may stand where the cursor is."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.magics.arguments.options import MAGICS, PLUGINS, Option
from skymagic.magics.arguments.reading import Token, split
from skymagic.plan.accelerators import NAMES as GPU_NAMES
from skymagic.plan.requests import PROVIDERS, REGIONS, SSH_CLIENTS


def help_text(magic: str) -> str:
    """The help of a magic, for its docstring: what it does, examples, options."""
    face = MAGICS[magic]
    mark = "%%" if face.cell else "%"
    lines = [
        face.summary,
        "",
        f"{mark}{magic} {' '.join(filter(None, (face.words, '[options]' * bool(face.options))))}".rstrip(),
    ]
    if face.examples:
        lines += [
            "",
            "Examples:",
            *(f"    {line}" for example in face.examples for line in example.splitlines()),
        ]
    if options := [option for option in face.options if option.common]:
        rows = [
            (f"{', '.join(option.names)} {option.metavar}".rstrip(), option.help)
            for option in options
        ]
        lines += ["", "Options:"]
        lines += [
            f"    {left:<32} {right}" if len(left) <= 32 else f"    {left}\n{'':37}{right}"
            for left, right in rows
        ]
    if more := [option.names[-1] for option in face.options if not option.common]:
        lines += [
            "",
            f"More: {', '.join(more)}, and the options of %sky_pool. docs/reference/magics.md describes them.",
        ]
    return "\n".join(lines) + "\n"


def asks_for_help(line: str) -> bool:
    """Whether ``--help`` or ``-h`` stands on a magic's line."""
    tokens, _ = split(line)
    return any(token.is_option and token.text in ("--help", "-h") for token in tokens)


def help_alone(lines: list[str]) -> list[str]:
    """An input transformer: ``%%sky_sh --help`` calls the magic as it can be called, for IPython refuses a cell without a body."""
    first = next((line for line in lines if line.strip()), "")
    found = re.match(r"(%%?)(sky_\w+)[ \t]+(.*)", first)
    if found is None or found[2] not in MAGICS or not asks_for_help(found[3]):
        return lines
    if found[1] == "%" and not MAGICS[found[2]].cell:
        return lines
    name = found[2]
    call = (
        f"cell_magic({name!r}, '--help', 'pass')"
        if MAGICS[name].cell
        else f"line_magic({name!r}, '--help')"
    )
    return [f"get_ipython().run_{call}\n"]


def with_help(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """A magic that prints its help where ``--help`` stands on its line, and does nothing else then."""

    @functools.wraps(method)
    def magic(line: str, *body: str) -> Any:
        return print(help_text(name), end="") if asks_for_help(line) else method(line, *body)

    magic.__doc__ = help_text(name)
    return magic


@dataclass(frozen=True)
class CompletionNames:
    """What exists at the moment, for completion."""

    pools: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    """Variables of the ranks."""
    gathered: tuple[str, ...] = ()
    """What a cell may bring back: those, what it sets, and what it takes along."""
    hosts: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    """Variables of the notebook's environment."""
    plugins: tuple[str, ...] = PLUGINS
    plugin_options: Callable[[str], Sequence[str]] = lambda name: ()
    """What may follow a plugin's name and a colon."""
    providers: tuple[str, ...] = PROVIDERS
    gpus: tuple[str, ...] = GPU_NAMES
    regions: tuple[str, ...] = REGIONS
    ranks: tuple[str, ...] = ("head", "all")
    switch: tuple[str, ...] = ("on", "off")
    pip: tuple[str, ...] = ("install", "list")
    busy: tuple[str, ...] = ("wait", "refuse")
    ssh: tuple[str, ...] = SSH_CLIENTS
    auto: tuple[str, ...] = ("auto",)
    rented: tuple[str, ...] = ("aws", "slurm", "kubernetes", "ray")
    left: tuple[str, ...] = ()
    """Pools of other notebooks."""


def complete(magic: str, text: str, names: CompletionNames | None = None) -> list[str]:
    """What may stand in place of the word that `text`, the line after the magic's name up to the cursor, ends in.

    Whole words, for what follows the last blank, ``=`` or ``,``; empty within a comment or an open quote. `magic` is
    without ``%``. Options come in the order of their table, the common ones first; all else by the alphabet.
    """
    face, names = MAGICS[magic], names or CompletionNames()
    known = {name: option for option in face.accepted for name in option.spellings}
    tokens, unclosed = split(text)
    if unclosed or re.search(r"(^|\s)#", text):
        return []
    last = tokens.pop() if tokens and not text[-1].isspace() else Token("")
    option, word = _completing(known, tokens), last.text
    name, equals, value = word.partition("=")
    if equals and name in known:
        option, word = known[name], value
    elif last.is_option or (option is None and word == "-"):
        used = {known[token.text].field for token in tokens if token.text in known}
        several = {item.field for item in face.accepted if item.takes != "one"}
        left = (
            item
            for item in known
            if item in known[item].names and known[item].field not in used - several
        )
        return [item for item in left if item.casefold().startswith(word.casefold())]
    if option is None and face.words.startswith("RANKS") and not tokens:
        return []  # ranks come first, and then names
    choices, word = (option.choices if option else face.choices) or "nothing", word.split(",")[-1]
    plugin, colon, _ = word.partition(":")
    if choices == "plugins" and colon and plugin in names.plugins:
        return _starting((f"{plugin}:{one}=" for one in names.plugin_options(plugin)), word)
    return _starting(getattr(names, choices, ()), word)


def _completing(known: Mapping[str, Option], before: Sequence[Token]) -> Option | None:
    """The option whose value comes next, None when a word without an option does."""
    for distance, token in enumerate(reversed(before)):
        if token.is_option:
            option = known.get(token.text)
            one_only = option is not None and option.takes in ("one", "list")
            return (
                None if option is None or option.read is None or (distance and one_only) else option
            )
    return None


def _starting(choices: Iterable[str], word: str) -> list[str]:
    return sorted(choice for choice in choices if choice.casefold().startswith(word.casefold()))
