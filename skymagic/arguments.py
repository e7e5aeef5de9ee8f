"""A magic's line becomes a request: tables of options, a reader for each kind of value, all mistakes at once.

Nothing on a line is evaluated. IPython has expanded ``{expr}`` and ``$var`` before; a trailing ``# comment``, quotes
and a trailing ``;`` are understood here. Each ``parse_…`` raises RequestError with every mistake of its line.
"""

from __future__ import annotations

import keyword
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from skymagic.accelerators import NAMES as GPU_NAMES
from skymagic.accelerators import Accelerator, canonical, did_you_mean
from skymagic.errors import RequestError
from skymagic.image import Image
from skymagic.plan import (
    PROVIDERS,
    Defaults,
    Only,
    PluginSpec,
    PoolRequest,
    RunRequest,
    at_least,
    duration,
    memory,
    plugin_specs,
)

PLUGINS = ("torch", "jax", "keras", "huggingface", "joblib", "sklearn")

Reader = Callable[[str], Any]
_NOTHING_SET = Defaults()
_R = TypeVar("_R")


# ------------------------------------------------------------------------------------ requests of small magics


@dataclass(frozen=True)
class ShellRequest:
    """%%sky_sh: a folder that goes along, or None; whether it runs on without the notebook; the pool's name."""

    workdir: str | None = None
    detach: bool = False
    pool: str | None = None


@dataclass(frozen=True)
class LogsRequest:
    """%sky_logs: whose log (None: every rank's), how many of its last lines, whether to go on as it grows."""

    rank: Only | None = None
    lines: int = 50
    follow: bool = False
    pool: str | None = None


@dataclass(frozen=True)
class NamesRequest:
    """%sky_push and %sky_pull: variables, ranks (None: all), and for a pull the variable that takes the values."""

    names: tuple[str, ...] = ()
    targets: Only | None = None
    output: str | None = None
    head: bool = False
    pool: str | None = None


@dataclass(frozen=True)
class FilesRequest:
    """%sky_put and %sky_get: from where to where."""

    source: str = ""
    target: str = ""
    pool: str | None = None


@dataclass(frozen=True)
class RestartRequest:
    """%sky_restart: which ranks, None for all."""

    ranks: Only | None = None
    pool: str | None = None


@dataclass(frozen=True)
class DownRequest:
    """%sky_down: one pool by name, the current one (None), or all of them."""

    name: str | None = None
    all: bool = False


# --------------------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class Option:
    """One option of a magic.

    Attributes:
        names: as users write it; the first is the one that messages and help use.
        field: what it fills in the request.
        read: turns a value's text into what the field holds; None for an option without a value.
        takes: "one" value, a "list" (repeated, or with commas), "names" (a list that may also be blank-separated),
            or "maybe" a list of names.
    """

    names: tuple[str, ...]
    field: str
    read: Reader | None = None
    metavar: str = ""
    help: str = ""
    takes: str = "one"
    choices: str = ""


@dataclass(frozen=True)
class Given:
    """An option as it was given: how the user wrote its name, and its value's text (None: without one).

    `items` are values that need no reading: those of a TOML table.
    """

    option: Option
    label: str
    text: str | None
    items: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Token:
    """A word of the line; a quoted one is never an option."""

    text: str
    quoted: bool = False

    @property
    def is_option(self) -> bool:
        """Whether it starts as an option does, also with a dash that a word processor made; ``-1`` is a value."""
        return not self.quoted and re.match(r"[-–—][^\d.:]", self.text) is not None


def _number(least: int) -> Reader:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,9}", text):
            raise RequestError(f"{text!r} is not a whole number")
        if int(text) < least:
            raise RequestError(f"must be at least {least}, not {text}")
        return int(text)

    return read


def _procs(text: str) -> int | None:
    return None if text == "auto" else int(_number(1)(text))


def _limit(text: str) -> float | None:
    """A duration, or ``none`` against a configured default."""
    return None if text == "none" else duration(text)


def _dollars(text: str) -> float:
    if not re.fullmatch(r"\$?[0-9]{1,9}(\.[0-9]{1,9})?", text) or not float(text.lstrip("$")):
        raise RequestError(f"{text!r} is not a price: write dollars per hour for the whole pool, as in 12.50")
    return float(text.lstrip("$"))


def _identifier(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise RequestError(f"{text!r} is not a name for a variable")
    return text


def _pool_name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", text):
        raise RequestError(f"{text!r} is not a name for a pool: use letters, digits, - and _, at most 40")
    return text


def _region(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9-]{0,39}", text):
        raise RequestError(f"{text!r} is not a region: write one like eu-central-1")
    return text


def _path(text: str) -> str:
    if not text or "\0" in text:
        raise RequestError(f"{text!r} is not a path")
    return text


def _pair(text: str) -> tuple[tuple[str, str], ...]:
    name, equals, value = text.partition("=")
    if not equals:
        raise RequestError(
            f"{text!r} has no value: write NAME=value, or --secret {text} for the notebook's own"
        )
    return ((_variable(name), value),)


def _variable(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", text):
        raise RequestError(f"{text!r} is not a name for an environment variable")
    return text


def _host(text: str) -> str:
    if not re.fullmatch(r"@\S+|[\w.@:%\[\],-]+", text) or text.startswith("-"):
        raise RequestError(f"{text!r} is not a host: write NAME, USER@NAME:PORT, NAME[1-8] or @FILE")
    return text


def _many(read: Reader, separator: str = r"[,\s]+") -> Reader:
    """A reader of lists; its mistakes are those of all items."""

    def read_all(text: str) -> tuple[Any, ...]:
        values: list[Any] = []
        mistakes: list[str] = []
        for item in filter(None, map(str.strip, re.split(separator, text))):
            try:
                values.append(read(item))
            except RequestError as wrong:
                mistakes += wrong.mistakes
        if not values and not mistakes:
            mistakes.append("nothing is named")
        if mistakes:
            raise RequestError(mistakes)
        return tuple(values)

    return read_all


# a comma inside brackets belongs to the item (jax[cuda,cpu], gpu[1,3]), one before a constraint too (torch>=2,<3)
_OUTSIDE = r",(?![^\[\]]*\])"
_NAMES = _many(_identifier)


def _packages(text: str) -> tuple[str, ...]:
    return tuple(_many(_package, rf"{_OUTSIDE}(?=\s*[A-Za-z])")(text))


def _package(text: str) -> str:
    try:
        return Image(pip=(text,)).pip[0]
    except RequestError as wrong:
        raise RequestError([mistake.removeprefix("pip: ") for mistake in wrong.mistakes]) from None


def _one_of(*words: str) -> Reader:
    def read(text: str) -> str:
        if text not in words:
            raise RequestError(f"{text!r} is not one of {', '.join(words)}{did_you_mean(text, words)}")
        return text

    return read


# fmt: off
POOL: tuple[Option, ...] = (
    Option(("--provider",), "provider", str, "NAME", "where: auto, local, ssh, aws, slurm", choices="providers"),
    Option(("--nodes", "--num-nodes"), "nodes", _number(1), "N", "number of machines"),
    Option(("--gpu", "--gpus"), "gpu", Accelerator.parse, "NAME[:COUNT]", "accelerators of each node", choices="gpus"),
    Option(("--cpus",), "cpus", at_least, "N[+]", "CPU cores of each node, 8+ for at least 8"),
    Option(("--memory",), "memory", memory, "GB[+]", "memory of each node"),
    Option(("--procs-per-node",), "procs_per_node", _procs, "N|auto", "ranks of each node; auto: one per GPU, else 1"),
    Option(("--plugin", "--plugins"), "plugins", plugin_specs, "NAME[:k=v,…]", "frameworks to set up", "list", "plugins"),
    Option(("--pip",), "pip", _packages, "PACKAGES", "packages that the ranks need", "list"),
    Option(("--env",), "env", _pair, "NAME=VALUE", "an environment variable of the ranks", "list"),
    Option(("--secret", "--secrets"), "secrets", _many(_variable), "NAME", "a variable of the notebook's environment, kept out of sight", "list"),
    Option(("--hosts",), "hosts", _many(_host, rf"{_OUTSIDE}|\s+"), "HOSTS", "machines for --provider ssh", "list"),
    Option(("--region",), "region", _region, "NAME", "where to rent"),
    Option(("--spot",), "spot", help="rent spare capacity, which may be taken back"),
    Option(("--max-price",), "max_price", _dollars, "DOLLARS", "limit per hour for the whole pool"),
    Option(("--idle",), "idle", _limit, "TIME", "stop after so long without a cell, as in 30m"),
    Option(("--max-lifetime",), "max_lifetime", _limit, "TIME", "stop after so long, as in 8h"),
    Option(("-y", "--yes"), "yes", help="do not ask before money is spent"),
)
_DRY = Option(("--dry-run",), "dry_run", help="show what would happen, and do nothing")
_POOL_NAME = Option(("--pool",), "name", _pool_name, "NAME", "the pool to use; the latest one unless said", choices="pools")
_OUTPUT = Option(("-o", "--output"), "output", _identifier, "NAME", "keep the values of the last expression, by rank")
_TARGETS = Option(("-t", "--targets"), "targets", Only, "RANKS", "ranks that take part: 0,2 or 0:4 or ::2")
_HEAD = Option(("--head",), "head", help="keep the first rank's value alone instead of a list")
_RANK = Option(("--rank",), "targets", Only, "R", "one rank, or several: 0,2")
_NOBLOCK = Option(("-a", "--noblock"), "noblock", help="return at once; the cell goes on")
_CARGO: tuple[Option, ...] = (
    Option(("--push",), "push", _NAMES, "NAMES", "variables to send though the cell does not show them", "names", "variables"),
    Option(("--no-push",), "no_push", _NAMES, "NAMES", "variables not to send; alone: send nothing", "maybe", "variables"),
    Option(("--timeout",), "timeout", _limit, "TIME", "fail after so long, as in 10m"),
    Option(("--fresh",), "fresh", help="send variables again though they have not changed"),
)
RUN: tuple[Option, ...] = (
    _POOL_NAME,
    _OUTPUT,
    Option(("-g", "--gather"), "gather", _NAMES, "NAMES", "bring these variables back, by rank", "names"),
    _HEAD,
    Option(("--only",), "only", Only, "RANKS", "whose output is shown: head, all, 0,2 or 0:4", choices="ranks"),
    _TARGETS,
    *_CARGO,
    _NOBLOCK,
    _DRY,
)
_WORKDIR = Option(("--workdir",), "workdir", _path, "DIR", "a folder that goes along, and where the script runs")
_DETACH = Option(("--detach",), "detach", help="go on without the notebook")
_LINES = Option(("-n", "--lines"), "lines", _number(1), "LINES", "how many of the last lines; 50 unless said")
_FOLLOW = Option(("-f", "--follow"), "follow", help="go on as the log grows, until the stop button")
_ALL = Option(("--all",), "all", help="every pool of this notebook")
# fmt: on


@dataclass(frozen=True)
class Magic:
    """A magic's face.

    Attributes:
        words: what stands on its line without an option's name, for help; empty when nothing may.
        choices: which of `Names` completes those words.
        cell: whether it is written with ``%%``.
    """

    summary: str
    options: tuple[Option, ...] = ()
    words: str = ""
    choices: str = ""
    examples: tuple[str, ...] = ()
    cell: bool = False


_POOL_EXAMPLES = (
    "%sky_pool --nodes 2 --plugin torch",
    "%sky_pool train --nodes 4 --gpu A100:8 --plugin torch:backend=nccl --idle 30m",
    "%sky_pool train --nodes 4 --gpu A100:8 --dry-run      # the plan and its price",
    '%%sky_pool train\nnodes = 2\nplugins = ["torch"]\n[env]\nOMP_NUM_THREADS = "2"',
)
_BROADCAST_EXAMPLES = (
    "%%sky_broadcast -o results      # results[r] is rank r's last expression",
    "%%sky_broadcast -g loss,acc --only all",
    "%%sky_broadcast --nodes 2 --plugin torch -o result --head --timeout 10m",
    "%%sky_broadcast -t 0:2 --no-push",
)
_SH_EXAMPLES = ("%%sky_sh --workdir examples/mingpt\ntorchrun --nnodes=$SKYPILOT_NUM_NODES … main.py",)
# fmt: off
MAGICS: dict[str, Magic] = {
    "sky_pool": Magic("Make a pool ready, or use the one of this name when it fits.", (*POOL, _DRY), "[NAME]", "pools", _POOL_EXAMPLES),
    "sky_broadcast": Magic("Run the cell on every rank; without a pool, options of a pool make one.", (*RUN, *POOL), examples=_BROADCAST_EXAMPLES, cell=True),
    "sky_run": Magic("Run the cell on one rank: the next in turn unless --rank says which.", (_RANK, _POOL_NAME, _OUTPUT, *_CARGO, _NOBLOCK, _DRY), examples=("%%sky_run -o value", "%%sky_run --rank 1 --timeout 30s"), cell=True),
    "sky_sh": Magic("Run the cell as a shell script, once on each node.", (_WORKDIR, _DETACH, _POOL_NAME), examples=_SH_EXAMPLES, cell=True),
    "sky_status": Magic("Show the pools and what they do.", (), "[NAME]", "pools", ("%sky_status",)),
    "sky_logs": Magic("Show what ranks wrote, also what the cell did not show.", (_RANK, _LINES, _FOLLOW, _POOL_NAME), examples=("%sky_logs --rank 1 -n 200", "%sky_logs -f")),
    "sky_push": Magic("Send variables to the ranks.", (_TARGETS, _POOL_NAME), "NAMES", "variables", ("%sky_push model, data",)),
    "sky_pull": Magic("Bring variables back from the ranks, as a list by rank.", (_OUTPUT, _HEAD, _TARGETS, _POOL_NAME), "NAMES", examples=("%sky_pull loss, accuracy", "%sky_pull model --head -o trained")),
    "sky_put": Magic("Copy files to every node.", (_POOL_NAME,), "SRC DST", examples=("%sky_put data/ data/",)),
    "sky_get": Magic("Copy files from the head.", (_POOL_NAME,), "SRC DST", examples=("%sky_get out/ out/",)),
    "sky_gpus": Magic("List accelerators and where they are.", (), "[GPU]", "gpus", ("%sky_gpus", "%sky_gpus A100")),
    "sky_cost": Magic("Show what pools have cost, and cost now.", (), "[NAME]", "pools", ("%sky_cost",)),
    "sky_restart": Magic("Start ranks again; their variables are gone.", (_RANK, _POOL_NAME), examples=("%sky_restart", "%sky_restart --rank 2")),
    "sky_attach": Magic("Take up a pool that runs on without its notebook.", (), "[NAME]", "pools", ("%sky_attach train",)),
    "sky_down": Magic("Stop a pool and release its machines.", (_ALL,), "[NAME]", "pools", ("%sky_down", "%sky_down train", "%sky_down --all")),
    "sky_auto": Magic("Run every plain cell on the ranks, or no longer.", (), "on|off", "switch", ("%sky_auto on",)),
}
# fmt: on


# ------------------------------------------------------------------------------------------ from line to tokens


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
        if here == "\\" and opened != "'" and following and (following in "\"'\\#" or following.isspace()):
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


def scan(magic: Magic, tokens: Sequence[Token]) -> tuple[list[Given], list[str], list[str]]:
    """(options given, words that belong to none, mistakes)."""
    known = {name: option for option in magic.options for name in option.names}
    given: list[Given] = []
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
            mistakes.append(f"{label}: no such option{did_you_mean(label, known)}")
            if rest and not rest[0].is_option and text is None and not magic.words:
                rest.pop(0)  # most likely its value, and not a mistake of its own
            continue
        if option.read is None and text is not None:
            mistakes.append(f"{label} takes no value, not {text!r}")
        elif option.read is not None:
            text = _take(option, text, rest)
            if text is None and option.takes != "maybe":
                after = f"; {rest[0].text!r} after it is an option, unless you quote it" if rest else ""
                mistakes.append(f"{label} needs {option.metavar}{after}")
                continue
        given.append(Given(option, label, text))
    return given, words, mistakes


def _match(text: str, known: Mapping[str, Option]) -> tuple[Option | None, str, str | None]:
    """(option or None, its name as written, value in the same token)."""
    name, equals, value = text.partition("=")
    short = known.get(text[:2])
    if name not in known and f"-{name}" not in known and short is not None and short.read is not None:
        return short, text[:2], text[2:].removeprefix("=")
    return known.get(name), name, value if equals else None


def _take(option: Option, text: str | None, rest: list[Token]) -> str | None:
    """The option's value: what came with it, else the tokens that follow and are no options."""
    parts = [] if text is None else [text]
    while rest and not rest[0].is_option:
        all_of_them = option.takes in ("names", "maybe") and text is None
        comma = option.takes != "one" and parts and (parts[-1].endswith(",") or rest[0].text.startswith(","))
        if parts and not all_of_them and not comma:
            break
        parts.append(rest.pop(0).text)
    return " ".join(parts) if parts else None


# ------------------------------------------------------------------------------------------ from tokens to values


_REPEATABLE = ("hosts", "plugins")  # one host may be two nodes; a plugin given twice is a mistake, met later


def read(given: Iterable[Given], mistakes: list[str]) -> dict[str, Any]:
    """The fields that options fill; what cannot be read is added to `mistakes`."""
    values: dict[str, Any] = {}
    first: dict[str, Given] = {}
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


class _Line:
    """A line on its way to a request: values read, words left, mistakes met."""

    def __init__(self, magic: str, line: str, more: Iterable[Given] = ()) -> None:
        tokens, self.mistakes = split(line)
        given, self.words, unknown = scan(MAGICS[magic], tokens)
        self.mistakes += unknown
        given += more
        self.labels = {item.option.field: item.label for item in given}
        self.values = read(given, self.mistakes)
        if self.words and not MAGICS[magic].words:
            self.mistakes.append(f"{' '.join(self.words)!r} belongs to no option of %{magic}")

    def check(self, wrong: object, mistake: str) -> None:
        """Note a mistake when `wrong`."""
        if wrong:
            self.mistakes.append(mistake)

    def word(self, what: str, reader: Reader) -> Any:
        """The one word that may stand without an option, or None."""
        if len(self.words) > 1:
            self.mistakes.append(f"one {what}, not {len(self.words)} ({', '.join(map(repr, self.words))})")
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


_POOL_FIELDS = frozenset(option.field for option in POOL)


def _pool(
    line: _Line, defaults: Defaults, plugins: Collection[str], providers: Collection[str], *, name: str | None
) -> PoolRequest:
    """The pool of a line; what was said of it is checked against what is known, the rest is configured."""
    configured = {key: getattr(defaults, key) for key in ("provider", "plugins", "idle", "max_lifetime")}
    stated = {key: value for key, value in line.values.items() if key in _POOL_FIELDS}
    labels = {key: line.labels.get(key, f"%config SkyMagic.{key}") for key in ("provider", "plugins")}
    values = {**configured, **stated}
    line.mistakes += _unknown(
        labels["provider"], "provider", [values["provider"]], {"auto": 0, **dict.fromkeys(providers)}
    )
    names = [spec.name for spec in values["plugins"]]
    line.mistakes += _unknown(labels["plugins"], "plugin", names, plugins)
    line.mistakes += [
        f"{labels['plugins']}: {again} is given twice; keep one of them" for again in _repeated(names)
    ]
    keys = [key for key, _ in values.get("env", ())]
    line.mistakes += [
        f"{line.labels['env']}: {key} has several values; keep one of them" for key in _repeated(keys)
    ]
    for key in set(keys) & set(values.get("secrets", ())):
        line.mistakes.append(f"{key} is both an --env and a --secret; keep one of them")
    try:
        Image(pip=values.get("pip", ()))
    except RequestError as wrong:
        line.mistakes += [
            f"{line.labels['pip']}: {mistake.removeprefix('pip: ')}" for mistake in wrong.mistakes
        ]
    dry_run = bool(line.values.get("dry_run"))
    return PoolRequest(**values, name=name, dry_run=dry_run, stated=frozenset(stated))


def _unknown(label: str, what: str, names: Iterable[str], known: Collection[str]) -> list[str]:
    return [
        f"{label}: no {what} is called {name!r}"
        + (did_you_mean(name, known) or f"; known are {', '.join(known)}")
        for name in dict.fromkeys(names)
        if name not in known
    ]


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


# --------------------------------------------------------------------------------------------------- the magics


def parse_pool(
    line: str,
    defaults: Defaults = _NOTHING_SET,
    *,
    body: str | None = None,
    plugins: Collection[str] = PLUGINS,
    providers: Collection[str] = PROVIDERS,
) -> PoolRequest:
    """``%sky_pool [NAME] [options]``, and with `body` ``%%sky_pool``, whose TOML adds to the line.

    Args:
        line: what follows the magic's name.
        defaults: what holds where nothing is said.
        body: the cell of ``%%sky_pool``.
        plugins, providers: the names that exist.

    Raises:
        RequestError: all mistakes of line and body.
    """
    given, names, mistakes = _toml(body) if body else ([], [], [])
    parsed = _Line("sky_pool", line, given)
    parsed.mistakes += mistakes
    parsed.words += [name for name in names if name not in parsed.words]
    request = _pool(parsed, defaults, plugins, providers, name=parsed.word("name of a pool", _pool_name))
    parsed.done()
    return request


def parse_pool_toml(
    body: str,
    defaults: Defaults = _NOTHING_SET,
    *,
    plugins: Collection[str] = PLUGINS,
    providers: Collection[str] = PROVIDERS,
) -> PoolRequest:
    """The body of ``%%sky_pool`` alone: the options' long names as keys, ``[env]`` and ``[plugins.NAME]`` as tables.

    Raises:
        RequestError: all mistakes, each with its key.
    """
    return parse_pool("", defaults, body=body, plugins=plugins, providers=providers)


def parse_broadcast(
    line: str,
    defaults: Defaults = _NOTHING_SET,
    *,
    plugins: Collection[str] = PLUGINS,
    providers: Collection[str] = PROVIDERS,
) -> RunRequest:
    """``%%sky_broadcast [options of the run and of a pool]``. Raises RequestError with all mistakes."""
    parsed = _Line("sky_broadcast", line)
    values = parsed.values
    pool = _pool(parsed, defaults, plugins, providers, name=values.get("name"))
    parsed.check(
        values.get("head") and not parsed.labels.keys() & {"output", "gather"},
        "--head keeps one value of -o or -g: add -o NAME or -g NAMES",
    )
    return _run(parsed, pool, {"only": defaults.only, "timeout": defaults.timeout})


def parse_run(line: str, defaults: Defaults = _NOTHING_SET) -> RunRequest:
    """``%%sky_run [--rank R] [options]``: `targets` is that rank, None for the next in turn; its output is shown.

    Raises:
        RequestError: all mistakes.
    """
    parsed = _Line("sky_run", line)
    rank = parsed.values.get("targets")
    parsed.check(
        rank is not None and not re.fullmatch(r"-?\d+", rank.text),
        f"--rank: one rank's number, not {rank}; for several there is %%sky_broadcast -t {rank}",
    )
    pool = PoolRequest(name=parsed.values.get("name"), stated=frozenset())
    return _run(parsed, pool, {"only": Only("all"), "timeout": defaults.timeout, "head": True})


def _run(line: _Line, pool: PoolRequest, configured: Mapping[str, Any]) -> RunRequest:
    """The run of a line, after the checks that need several options."""
    values = {key: value for key, value in line.values.items() if key not in _POOL_FIELDS | {"name"}}
    push, held = values.get("push", ()), values.get("no_push", False)
    both = [name for name in push if isinstance(held, tuple) and name in held]
    line.check(both, f"{', '.join(both)}: named by --push and by --no-push; keep one of them")
    line.check(
        values.get("fresh") and held is True and not push, "--fresh sends again what --no-push does not send"
    )
    line.check(values.get("noblock") and values.get("dry_run"), "--noblock has no meaning with --dry-run")
    line.check(
        values.get("output") in values.get("gather", ()),
        f"{values.get('output')}: -o and -g would both set it; choose another name for -o",
    )
    line.done()
    return RunRequest(pool=pool, **{**configured, **values})


def parse_sh(line: str) -> ShellRequest:
    """``%%sky_sh [--workdir DIR] [--detach]``. Raises RequestError with all mistakes."""
    return _small("sky_sh", line, ShellRequest)


def parse_status(line: str) -> str | None:
    """``%sky_status [NAME]``: a pool's name or None."""
    return _named("sky_status", line)


def parse_cost(line: str) -> str | None:
    """``%sky_cost [NAME]``: a pool's name or None."""
    return _named("sky_cost", line)


def parse_attach(line: str) -> str | None:
    """``%sky_attach [NAME]``: a pool's name or None for the only one there is."""
    return _named("sky_attach", line)


def parse_gpus(line: str) -> str | None:
    """``%sky_gpus [NAME]``: an accelerator's canonical name or None."""
    return _named("sky_gpus", line, "accelerator", canonical)


def parse_logs(line: str) -> LogsRequest:
    """``%sky_logs [--rank R] [-n LINES] [-f]``. Raises RequestError with all mistakes."""
    return _small("sky_logs", line, LogsRequest, targets="rank")


def parse_restart(line: str) -> RestartRequest:
    """``%sky_restart [--rank R]``. Raises RequestError with all mistakes."""
    return _small("sky_restart", line, RestartRequest, targets="ranks")


def parse_push(line: str) -> NamesRequest:
    """``%sky_push NAMES [-t RANKS]``. Raises RequestError with all mistakes."""
    return _names("sky_push", line)


def parse_pull(line: str) -> NamesRequest:
    """``%sky_pull NAMES [-o NAME] [--head] [-t RANKS]``. Raises RequestError with all mistakes."""
    return _names("sky_pull", line)


def parse_put(line: str) -> FilesRequest:
    """``%sky_put SRC DST``. Raises RequestError with all mistakes."""
    return _files("sky_put", line)


def parse_get(line: str) -> FilesRequest:
    """``%sky_get SRC DST``. Raises RequestError with all mistakes."""
    return _files("sky_get", line)


def parse_down(line: str) -> DownRequest:
    """``%sky_down [NAME | --all]``. Raises RequestError with all mistakes."""
    parsed = _Line("sky_down", line)
    name = parsed.word("name of a pool", _pool_name)
    parsed.check(name and parsed.values.get("all"), f"say {name} or --all, not both")
    parsed.done()
    return DownRequest(name, bool(parsed.values.get("all")))


def parse_auto(line: str) -> bool:
    """``%sky_auto on|off``. Raises RequestError for anything else."""
    parsed = _Line("sky_auto", line)
    switch = parsed.word("word, on or off", _one_of("on", "off"))
    parsed.check(not parsed.words, "say on or off: %sky_auto on")
    parsed.done()
    return bool(switch == "on")


def _small(magic: str, line: str, request: Callable[..., _R], **renamed: str) -> _R:
    parsed = _Line(magic, line)
    parsed.done()
    return request(
        **{{"name": "pool", **renamed}.get(key, key): value for key, value in parsed.values.items()}
    )


def _named(magic: str, line: str, what: str = "name of a pool", reader: Reader = _pool_name) -> str | None:
    parsed = _Line(magic, line)
    name: str | None = parsed.word(what, reader)
    parsed.done()
    return name


def _names(magic: str, line: str) -> NamesRequest:
    parsed = _Line(magic, line)
    names: tuple[str, ...] = ()
    try:
        names = _NAMES(" ".join(parsed.words))
    except RequestError as wrong:
        parsed.mistakes += [f"%{magic}: {mistake}" for mistake in wrong.mistakes]
    values = parsed.values
    parsed.check(
        values.get("output") and len(names) > 1, f"-o holds one variable's values, and {len(names)} are named"
    )
    parsed.done()
    values["pool"] = values.pop("name", None)
    return NamesRequest(names, **values)


def _files(magic: str, line: str) -> FilesRequest:
    parsed = _Line(magic, line)
    parsed.check(len(parsed.words) != 2, f"%{magic} needs SRC and DST; quote a path with blanks")
    parsed.check("" in parsed.words, f"%{magic}: a path is empty")
    parsed.done()
    source, target = parsed.words
    return FilesRequest(source, target, pool=parsed.values.get("name"))


# --------------------------------------------------------------------------------------------------------- TOML


def _toml(body: str) -> tuple[list[Given], list[str], list[str]]:
    """(options given, the pool's name if it stands there, mistakes) of a TOML body."""
    try:
        table = tomllib.loads(body)
    except (ValueError, RecursionError) as wrong:  # a ValueError too where a number has thousands of digits
        return [], [], [f"the cell is not TOML: {wrong}"]
    known = {name.lstrip("-"): option for option in (*POOL, _DRY) for name in option.names}
    given: list[Given] = []
    mistakes: list[str] = []
    name = table.pop("name", "")
    if not isinstance(name, str):
        mistakes.append("name takes a string")
    for key, value in table.items():
        option = known.get(key.replace("_", "-"))
        if option is None:
            mistakes.append(f"{key}: no such key{did_you_mean(key, [*known, 'name'])}")
            continue
        try:
            given += _entry(option, key, value)
        except RequestError as wrong:
            mistakes += wrong.mistakes
    return given, [name] if name and isinstance(name, str) else [], mistakes


def _entry(option: Option, key: str, value: object) -> list[Given]:
    """What a TOML value says of its option. Raises RequestError when it is of a type that the option does not take."""
    several = option.takes != "one"
    text = _scalar(value)
    if option.read is None and isinstance(value, bool):
        return [Given(option, key, None)] if value else []
    if option.read is not None and text is not None and not isinstance(value, bool):
        return [Given(option, key, text)]
    if several and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [Given(option, key, item) for item in value]
    if option.field in _TABLES and isinstance(value, dict):
        return [
            Given(option, key, None, (_TABLES[option.field](f"{key}.{inner}", inner, value[inner]),))
            for inner in value
        ]
    takes = "a string or a list of strings" if several else "a string or a number"
    table = " or a table" if option.field in _TABLES else ""
    raise RequestError(f"{key} takes {'true or false' if option.read is None else takes}{table}")


def _env_entry(label: str, name: str, value: object) -> tuple[str, str]:
    text = _scalar(value)
    if text is None:
        raise RequestError(f"{label} takes a string")
    return _variable(name), text


def _plugin_entry(label: str, name: str, value: object) -> PluginSpec:
    options = {key: _scalar(inner) for key, inner in value.items()} if isinstance(value, dict) else None
    if options is None or None in options.values():
        raise RequestError(f"{label} takes a table of strings: [{label}]")
    return PluginSpec(name, {key: str(text) for key, text in options.items()})


_TABLES: dict[str, Callable[[str, str, object], Any]] = {"env": _env_entry, "plugins": _plugin_entry}


def _scalar(value: object) -> str | None:
    """A TOML string, number or truth value as text; None for anything else."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}" if value.bit_length() <= 64 else None  # thousands of digits have no text in Python
    return str(value) if isinstance(value, str | float) else None


# --------------------------------------------------------------------------------------------- help, completion


def usage(magic: str) -> str:
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
    if face.options:
        rows = [
            (f"{', '.join(option.names)} {option.metavar}".rstrip(), option.help) for option in face.options
        ]
        lines += ["", "Options:"]
        lines += [
            f"    {left:<32} {right}" if len(left) <= 32 else f"    {left}\n{'':37}{right}"
            for left, right in rows
        ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Names:
    """What exists at the moment, for completion."""

    pools: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    plugins: tuple[str, ...] = PLUGINS
    providers: tuple[str, ...] = PROVIDERS
    gpus: tuple[str, ...] = GPU_NAMES
    ranks: tuple[str, ...] = ("head", "all")
    switch: tuple[str, ...] = ("on", "off")


def complete(magic: str, text: str, names: Names | None = None) -> list[str]:
    """What may stand in place of the word that `text` ends in.

    Args:
        magic: its name without ``%``.
        text: the line after the magic's name, up to the cursor.
        names: what exists.

    Returns:
        Whole words, for what follows the last blank, ``=`` or ``,``; empty within a comment or an open quote.
    """
    face, names = MAGICS[magic], names or Names()
    known = {name: option for option in face.options for name in option.names}
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
        several = {item.field for item in face.options if item.takes != "one"}
        return _starting((item for item in known if known[item].field not in used - several), word)
    choices = (option.choices if option else face.choices) or "nothing"
    return _starting(getattr(names, choices, ()), word.split(",")[-1])


def _completing(known: Mapping[str, Option], before: Sequence[Token]) -> Option | None:
    """The option whose value comes next, None when a word without an option does."""
    for distance, token in enumerate(reversed(before)):
        if token.is_option:
            option = known.get(token.text)
            one_only = option is not None and option.takes in ("one", "list")
            return None if option is None or option.read is None or (distance and one_only) else option
    return None


def _starting(choices: Iterable[str], word: str) -> list[str]:
    return sorted(choice for choice in choices if choice.casefold().startswith(word.casefold()))
