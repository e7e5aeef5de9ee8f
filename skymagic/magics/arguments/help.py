"""Help text of a magic, ``--help`` on its line, and completion at the cursor."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.magics.arguments.options import MAGICS, PLUGINS, Arity, Option
from skymagic.magics.arguments.parsing import Token, split
from skymagic.plan.accelerators import NAMES as GPU_NAMES
from skymagic.plan.requests import PROVIDERS, REGIONS, SSH_CLIENTS


def help_text(magic: str) -> str:
    """Return the help of a magic, used as its docstring: summary, examples, options."""
    spec = MAGICS[magic]
    mark = "%%" if spec.cell else "%"
    lines = [
        spec.summary,
        "",
        f"{mark}{magic} "
        f"{' '.join(filter(None, (spec.positional, '[options]' * bool(spec.options))))}".rstrip(),
    ]
    if spec.examples:
        lines += [
            "",
            "Examples:",
            *(f"    {line}" for example in spec.examples for line in example.splitlines()),
        ]
    if options := [option for option in spec.options if option.common]:
        rows = [
            (f"{', '.join(option.names)} {option.metavar}".rstrip(), option.help)
            for option in options
        ]
        lines += ["", "Options:"]
        lines += [
            f"    {option_names:<32} {description}"
            if len(option_names) <= 32
            else f"    {option_names}\n{'':37}{description}"
            for option_names, description in rows
        ]
    if more := [option.names[-1] for option in spec.options if not option.common]:
        lines += [
            "",
            (
                f"More: {', '.join(more)}, and the options of %sky_pool. "
                "docs/reference/magics.md describes them."
            ),
        ]
    return "\n".join(lines) + "\n"


def asks_for_help(line: str) -> bool:
    """Return True if a magic's line contains ``--help`` or ``-h``."""
    tokens, _ = split(line)
    return any(token.is_option and token.text in ("--help", "-h") for token in tokens)


def help_alone(lines: list[str]) -> list[str]:
    """Input transformer that makes ``%%sky_sh --help`` work without a body.

    It calls the magic directly, because IPython refuses a cell magic without a body.
    """
    first = next((line for line in lines if line.strip()), "")
    magic = re.match(r"(%%?)(sky_\w+)[ \t]+(.*)", first)
    if magic is None or magic[2] not in MAGICS or not asks_for_help(magic[3]):
        return lines
    if magic[1] == "%" and not MAGICS[magic[2]].cell:
        return lines
    name = magic[2]
    call = (
        f"cell_magic({name!r}, '--help', 'pass')"
        if MAGICS[name].cell
        else f"line_magic({name!r}, '--help')"
    )
    return [f"get_ipython().run_{call}\n"]


def with_help(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a magic so that ``--help`` on its line prints its help and does nothing else."""

    @functools.wraps(method)
    def magic(line: str, *body: str) -> Any:
        return print(help_text(name), end="") if asks_for_help(line) else method(line, *body)

    magic.__doc__ = help_text(name)
    return magic


@dataclass(frozen=True)
class CompletionNames:
    """Names that exist at the moment, for completion."""

    pools: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    rank_variables: tuple[str, ...] = ()
    """Variables of the ranks."""
    gathered: tuple[str, ...] = ()
    """Variables that a cell may fetch: those of the ranks, those it sets, and those it sends."""
    hosts: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    """Variables of the notebook's environment."""
    plugins: tuple[str, ...] = PLUGINS
    plugin_options: Callable[[str], Sequence[str]] = lambda name: ()
    """Returns the options that may follow a plugin's name and a colon."""
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
    leftovers: tuple[str, ...] = ()
    """Pools of other notebooks."""


def complete(magic: str, text: str, names: CompletionNames | None = None) -> list[str]:
    """Return the words that may replace the last word of `text`, the line up to the cursor.

    `text` starts after the magic's name; `magic` is without ``%``. The results are whole words, for
    what follows the last blank, ``=`` or ``,``; none within a comment or an open quote. Options
    come in the order of their table, the common ones first; everything else is sorted
    alphabetically.
    """
    spec, names = MAGICS[magic], names or CompletionNames()
    options = {name: option for option in spec.accepted for name in option.spellings}
    tokens, unclosed = split(text)
    if unclosed or re.search(r"(^|\s)#", text):
        return []
    last = tokens.pop() if tokens and not text[-1].isspace() else Token("")
    option, word = _completing(options, tokens), last.text
    name, equals, value = word.partition("=")
    if equals and name in options:
        option, word = options[name], value
    elif last.is_option or (option is None and word == "-"):
        used = {options[token.text].field for token in tokens if token.text in options}
        several = {item.field for item in spec.accepted if item.arity is not Arity.ONE}
        unused = (
            item
            for item in options
            if item in options[item].names and options[item].field not in used - several
        )
        return [item for item in unused if item.casefold().startswith(word.casefold())]
    if option is None and spec.positional.startswith("RANKS") and not tokens:
        return []  # ranks come before names
    choices, word = (
        (option.choices if option else spec.choices) or "nothing",
        word.split(",")[-1],
    )
    plugin, colon, _ = word.partition(":")
    if choices == "plugins" and colon and plugin in names.plugins:
        return _starting((f"{plugin}:{key}=" for key in names.plugin_options(plugin)), word)
    return _starting(getattr(names, choices, ()), word)


def _completing(options: Mapping[str, Option], before: Sequence[Token]) -> Option | None:
    """Return the option whose value comes next, or None if a word without an option does."""
    for distance, token in enumerate(reversed(before)):
        if token.is_option:
            option = options.get(token.text)
            takes_one_word = option is not None and option.arity in (Arity.ONE, Arity.LIST)
            return (
                None
                if option is None or option.read is None or (distance and takes_one_word)
                else option
            )
    return None


def _starting(choices: Iterable[str], word: str) -> list[str]:
    return sorted(choice for choice in choices if choice.casefold().startswith(word.casefold()))
