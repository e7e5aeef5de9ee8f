"""The magics of one line: looking, variables, files, lifecycle; a small request for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.api.ending import DownRequest
from skymagic.api.logs import LogsRequest
from skymagic.api.places import StatusRequest, place_mistakes
from skymagic.errors import RequestError, noted_in
from skymagic.magics.arguments.readers import identifiers, one_of, packages
from skymagic.magics.arguments.reading import ParsedLine
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.units import Selection


@dataclass(frozen=True)
class RanksRequest:
    """%sky_stacks, %sky_vars and %sky_restart: which ranks, None for all."""

    ranks: Selection | None = None
    pool: str | None = None


@dataclass(frozen=True)
class NamesRequest:
    """%sky_push and %sky_pull: variables, ranks (None: all), and for a pull the variable that takes the values."""

    names: tuple[str, ...] = ()
    targets: Selection | None = None
    output: str | None = None
    head: bool = False
    pool: str | None = None


@dataclass(frozen=True)
class CloneRequest:
    """%sky_clone: the ranks that get variables, and the rank that has them."""

    targets: Selection
    source: int
    names: tuple[str, ...] = ()
    pool: str | None = None


@dataclass(frozen=True)
class FilesRequest:
    """%sky_put and %sky_get: from where to where, which nodes take part (None: all for a put, the head for a get), and whether links that
    lead out are followed."""

    source: str = ""
    target: str = ""
    nodes: Selection | None = None
    pool: str | None = None
    follow: bool = False

    @property
    def what(self) -> tuple[str, str, Selection | None]:
        """From where to where, and which nodes."""
        return self.source, self.target, self.nodes


@dataclass(frozen=True)
class ForwardRequest:
    """%sky_forward: ports, and of which nodes (None: the head)."""

    ports: tuple[int, ...]
    nodes: Selection | None = None
    pool: str | None = None


@dataclass(frozen=True)
class PipRequest:
    """%sky_pip: packages to install, none to list what is there; in one pool, the current one (None), or in all."""

    packages: tuple[str, ...] = ()
    pool: str | None = None
    all: bool = False


@dataclass(frozen=True)
class AttachRequest:
    """%sky_attach: a pool by name or job id, None for which there are; whether a notebook that is alive may lose it; of Slurm's
    the login node that knows it."""

    name: str | None = None
    take_over: bool = False
    provider: str | None = None
    login: str | None = None


@dataclass(frozen=True)
class GpusRequest:
    """%sky_gpus: one kind of GPU or all; with how many machines, where, and how they are rented; the variable that keeps the offers."""

    gpu: Accelerator | None = None
    nodes: int | None = None
    region: str | None = None
    spot: bool = False
    output: str | None = None

    @property
    def rented(self) -> bool:
        """Whether it says something of renting."""
        return self.nodes is not None or self.region is not None or self.spot


def parse_check(line: str) -> str | None:
    """``%sky_check [NAME]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_check", line)
    parsed.done()
    return parsed.values.get("name")


def parse_gpus(line: str) -> GpusRequest:
    """``%sky_gpus [NAME[:COUNT]] [--nodes N] [--region NAMES] [--spot] [-o NAME]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_gpus", line)
    gpu: Accelerator | None = parsed.word("accelerator", Accelerator.parse)
    parsed.check(gpu is None and parsed.values, "name the GPU to rent: %sky_gpus A100:8 --spot")
    parsed.done()
    return GpusRequest(gpu, **parsed.values)


def parse_logs(line: str) -> LogsRequest:
    """``%sky_logs [NAME] [-t RANKS] [--run ID] [--cell N] [--grep RE] [-n LINES] [-f] [-o NAME]``. Raises RequestError with all mistakes."""
    return LogsRequest(**_fields(ParsedLine("sky_logs", line), targets="rank"))


def parse_ranks(magic: str, line: str) -> RanksRequest:
    """``%sky_stacks [NAME] [-t RANKS]``, and ``%sky_vars`` and ``%sky_restart`` likewise. Raises RequestError with all mistakes."""
    return RanksRequest(**_fields(ParsedLine(magic, line), targets="ranks"))


def parse_names(magic: str, line: str) -> NamesRequest:
    """``%sky_push NAMES [-t RANKS]``, ``%sky_pull NAMES [-o NAME] [--head] [-t RANKS]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine(magic, line)
    names = _identifiers(parsed, magic, parsed.words)
    several = parsed.values.get("output") and len(names) > 1
    parsed.check(several, f"-o holds one variable's values, and {len(names)} are named")
    return NamesRequest(names, **_fields(parsed))


def parse_clone(line: str) -> CloneRequest:
    """``%sky_clone RANKS --from R NAMES``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_clone", line)
    parsed.check("source" not in parsed.labels, "say which rank has the variables: --from 0")
    targets = Selection("all")
    try:
        targets = Selection(parsed.words[0] if parsed.words else "")
    except RequestError:
        parsed.mistakes.append(
            "name the rank that gets the variables first: %sky_clone 2 --from 0 model"
        )
    names = _identifiers(parsed, "sky_clone", parsed.words[1:])
    return CloneRequest(targets, names=names, **_fields(parsed))


def parse_files(magic: str, line: str) -> FilesRequest:
    """``%sky_put SRC DST [--nodes NODES]``, ``%sky_get`` likewise. Raises RequestError with all mistakes."""
    parsed = ParsedLine(magic, line)
    parsed.check(len(parsed.words) != 2, f"%{magic} needs SRC and DST; quote a path with blanks")
    parsed.check("" in parsed.words, f"%{magic}: a path is empty")
    fields = _fields(parsed)
    source, target = parsed.words
    return FilesRequest(source, target, **fields)


def parse_forward(line: str) -> ForwardRequest:
    """``%sky_forward PORTS [--nodes NODES]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_forward", line)
    parsed.check(not parsed.words, "%sky_forward needs a port: %sky_forward 6006")
    for word in parsed.words:
        parsed.check(
            not (word.isdecimal() and 0 < int(word) < 1 << 16),
            f"{word} is not a port: give a number from 1 to 65535",
        )
    fields = _fields(parsed)
    return ForwardRequest(tuple(dict.fromkeys(map(int, parsed.words))), **fields)


def parse_status(line: str) -> StatusRequest:
    """``%sky_status [NAME] [-o NAME | --cost | --hosts HOSTS [--disk] | --provider aws]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_status", line)
    request = StatusRequest(**parsed.values)
    parsed.check(
        request.disk and not request.hosts, "--disk says what is on hosts: name them with --hosts"
    )
    for option in ("hosts", "provider", "cost"):
        parsed.check(
            request.output and option in parsed.values,
            f"-o keeps how this notebook's pools are: leave it out with --{option}",
        )
    parsed.mistakes += request.mistakes()
    parsed.done()
    return request


def parse_pip(line: str) -> PipRequest:
    """``%sky_pip install NAMES``, ``%sky_pip list``, each with ``--pool NAME`` or ``--all``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_pip", line)
    word, wanted, found = (parsed.words or [""])[0], parsed.words[1:], tuple[str, ...]()
    parsed.check(
        word not in ("install", "list"), "say what to do: %sky_pip install NAME or %sky_pip list"
    )
    parsed.check(word == "install" and not wanted, "%sky_pip install needs the names of packages")
    parsed.check(word == "list" and wanted, f"%sky_pip list takes no names ({' '.join(wanted)})")
    parsed.check(
        parsed.values.get("all") and parsed.values.get("name"), "say --pool NAME or --all, not both"
    )
    for text in wanted if word == "install" else ():
        with noted_in(parsed.mistakes):
            found += packages(text)
    return PipRequest(found, **_fields(parsed))


def parse_down(line: str) -> DownRequest:
    """``%sky_down [NAME | --all] [--hosts HOSTS | --provider aws]``, ``%sky_down --clean --hosts HOSTS [--all] [--dry-run]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_down", line)
    request = DownRequest(**parsed.values)
    parsed.mistakes += request.mistakes()
    parsed.done()
    return request


def parse_attach(line: str) -> AttachRequest:
    """``%sky_attach [NAME] [--take-over] [--provider slurm --login HOST]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_attach", line)
    request = AttachRequest(**parsed.values)
    parsed.check(request.take_over and request.name is None, "--take-over: say which pool")
    parsed.check(
        request.provider and not request.login, "--provider slurm: name the login node with --login"
    )
    parsed.mistakes += place_mistakes((), request.provider, request.login)
    parsed.done()
    return request


def parse_auto(line: str) -> bool:
    """``%sky_auto on|off``. Raises RequestError for anything else."""
    parsed = ParsedLine("sky_auto", line)
    switch = parsed.word("word, on or off", one_of("on", "off"))
    parsed.check(not parsed.words, "say on or off: %sky_auto on")
    parsed.done()
    return bool(switch == "on")


def _identifiers(parsed: ParsedLine, magic: str, words: Sequence[str]) -> tuple[str, ...]:
    """The variables that words name; none where one is no identifier, which is noted."""
    try:
        names: tuple[str, ...] = identifiers(" ".join(words))
    except RequestError as wrong:
        parsed.mistakes += [f"%{magic}: {mistake}" for mistake in wrong.mistakes]
        return ()
    return names


def _fields(parsed: ParsedLine, **renamed: str) -> dict[str, Any]:
    """The fields of a request that options fill; what ``--pool`` names is its `pool`. Raises RequestError with all mistakes."""
    parsed.done()
    return {
        {"name": "pool", **renamed}.get(key, key): value for key, value in parsed.values.items()
    }
