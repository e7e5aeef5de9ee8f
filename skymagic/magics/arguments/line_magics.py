"""Parse the line magics (inspection, variables, files, lifecycle) to a small request each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skymagic.api.logs import LogsRequest
from skymagic.api.pool_listing import StatusRequest, location_mistakes
from skymagic.api.stopping import DownRequest
from skymagic.errors import RequestError, collect_mistakes
from skymagic.magics.arguments.parsing import ParsedLine
from skymagic.magics.arguments.readers import identifiers, one_of, packages
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.units import Selection


@dataclass(frozen=True)
class RanksRequest:
    """%sky_stacks, %sky_vars and %sky_restart: ranks, None for all."""

    ranks: Selection | None = None
    pool: str | None = None


@dataclass(frozen=True)
class NamesRequest:
    """%sky_push and %sky_pull: variables, ranks (None: all), and the output variable of a pull."""

    names: tuple[str, ...] = ()
    targets: Selection | None = None
    output: str | None = None
    head: bool = False
    pool: str | None = None


@dataclass(frozen=True)
class CloneRequest:
    """%sky_clone: the ranks that receive variables, and the rank to copy from."""

    targets: Selection
    source: int
    names: tuple[str, ...] = ()
    pool: str | None = None


@dataclass(frozen=True)
class FilesRequest:
    """%sky_put and %sky_get: source, target, nodes, and whether links that lead out are followed.

    Nodes are None for all with a put, and for the head with a get.
    """

    source: str = ""
    target: str = ""
    nodes: Selection | None = None
    pool: str | None = None
    follow: bool = False

    @property
    def source_target_nodes(self) -> tuple[str, str, Selection | None]:
        """Source, target and nodes."""
        return self.source, self.target, self.nodes


@dataclass(frozen=True)
class ForwardRequest:
    """%sky_forward: ports, and their nodes (None: the head)."""

    ports: tuple[int, ...]
    nodes: Selection | None = None
    pool: str | None = None


@dataclass(frozen=True)
class PipRequest:
    """%sky_pip: packages to install, or none to list the installed ones.

    Applies to one pool, the current one (None), or all.
    """

    packages: tuple[str, ...] = ()
    pool: str | None = None
    all: bool = False


@dataclass(frozen=True)
class AttachRequest:
    """%sky_attach: a pool by name or job id, or None to list the pools.

    `take_over` takes it from a notebook that is alive; `login` is the Slurm login node that lists
    it.
    """

    name: str | None = None
    take_over: bool = False
    provider: str | None = None
    login: str | None = None


@dataclass(frozen=True)
class GpusRequest:
    """%sky_gpus: one kind of GPU or all, and options for renting them.

    These are the number of machines, the region, and whether they are spot machines. `output` is
    the variable that receives the offers.
    """

    gpu: Accelerator | None = None
    nodes: int | None = None
    region: str | None = None
    spot: bool = False
    output: str | None = None

    @property
    def rented(self) -> bool:
        """True if an option about renting is set."""
        return self.nodes is not None or self.region is not None or self.spot


def parse_check(line: str) -> str | None:
    """Parse ``%sky_check [NAME]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_check", line)
    parsed.raise_mistakes()
    return parsed.values.get("name")


def parse_gpus(line: str) -> GpusRequest:
    """Parse ``%sky_gpus [NAME[:COUNT]] [--nodes N] [--region NAMES] [--spot] [-o NAME]``.

    Raises RequestError with all mistakes.
    """
    parsed = ParsedLine("sky_gpus", line)
    gpu: Accelerator | None = parsed.word("accelerator", Accelerator.parse)
    parsed.check(gpu is None and parsed.values, "name the GPU to rent: %sky_gpus A100:8 --spot")
    parsed.raise_mistakes()
    return GpusRequest(gpu, **parsed.values)


def parse_logs(line: str) -> LogsRequest:
    """Parse a line of ``%sky_logs``.

    The grammar is ``[NAME] [-t RANKS] [--run ID] [--cell N] [--grep RE] [-n LINES] [-f] [-o
    NAME]``. Raises RequestError with all mistakes.
    """
    return LogsRequest(**_fields(ParsedLine("sky_logs", line), targets="rank"))


def parse_ranks(magic: str, line: str) -> RanksRequest:
    """Parse ``%sky_stacks [NAME] [-t RANKS]``, ``%sky_vars`` or ``%sky_restart``.

    Raises RequestError with all mistakes.
    """
    return RanksRequest(**_fields(ParsedLine(magic, line), targets="ranks"))


def parse_names(magic: str, line: str) -> NamesRequest:
    """Parse ``%sky_push NAMES [-t RANKS]`` or ``%sky_pull NAMES [-o NAME] [--head] [-t RANKS]``.

    Raises RequestError with all mistakes.
    """
    parsed = ParsedLine(magic, line)
    names = _identifiers(parsed, magic, parsed.words)
    several = parsed.values.get("output") and len(names) > 1
    parsed.check(several, f"-o holds one variable's values, and {len(names)} are named")
    return NamesRequest(names, **_fields(parsed))


def parse_clone(line: str) -> CloneRequest:
    """Parse ``%sky_clone RANKS --from R NAMES``. Raises RequestError with all mistakes."""
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
    """Parse ``%sky_put SRC DST [--nodes NODES]`` or ``%sky_get``.

    Raises RequestError with all mistakes.
    """
    parsed = ParsedLine(magic, line)
    example = "data.csv ~/data.csv" if magic == "sky_put" else "~/model.pt ."
    parsed.check(
        len(parsed.words) != 2,
        f"%{magic} needs SRC and DST, as in %{magic} {example}; quote a path with blanks",
    )
    parsed.check("" in parsed.words, f"%{magic}: a path is empty")
    fields = _fields(parsed)
    source, target = parsed.words
    return FilesRequest(source, target, **fields)


def parse_forward(line: str) -> ForwardRequest:
    """Parse ``%sky_forward PORTS [--nodes NODES]``. Raises RequestError with all mistakes."""
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
    """Parse ``%sky_status [NAME] [-o NAME | --cost | --hosts HOSTS [--disk] | --provider aws]``.

    Raises RequestError with all mistakes.
    """
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
    parsed.raise_mistakes()
    return request


def parse_pip(line: str) -> PipRequest:
    """Parse ``%sky_pip install NAMES`` or ``%sky_pip list``, with ``--pool NAME`` or ``--all``.

    Raises RequestError with all mistakes.
    """
    parsed = ParsedLine("sky_pip", line)
    action, requirements, names = (parsed.words or [""])[0], parsed.words[1:], tuple[str, ...]()
    parsed.check(
        action not in ("install", "list"), "say what to do: %sky_pip install NAME or %sky_pip list"
    )
    parsed.check(
        action == "install" and not requirements, "%sky_pip install needs the names of packages"
    )
    parsed.check(
        action == "list" and requirements,
        f"%sky_pip list takes no names ({' '.join(requirements)})",
    )
    parsed.check(
        parsed.values.get("all") and parsed.values.get("name"), "say --pool NAME or --all, not both"
    )
    for text in requirements if action == "install" else ():
        with collect_mistakes(parsed.mistakes):
            names += packages(text)
    return PipRequest(names, **_fields(parsed))


def parse_down(line: str) -> DownRequest:
    """Parse a line of ``%sky_down``.

    The grammar is ``[NAME | --all] [--hosts HOSTS | --provider aws]``, or ``--clean --hosts HOSTS
    [--all] [--dry-run]``. Raises RequestError with all mistakes.
    """
    parsed = ParsedLine("sky_down", line)
    request = DownRequest(**parsed.values)
    parsed.mistakes += request.mistakes()
    parsed.raise_mistakes()
    return request


def parse_attach(line: str) -> AttachRequest:
    """Parse ``%sky_attach [NAME] [--take-over] [--provider slurm --login HOST]``.

    Raises RequestError with all mistakes.
    """
    parsed = ParsedLine("sky_attach", line)
    request = AttachRequest(**parsed.values)
    parsed.check(request.take_over and request.name is None, "--take-over: say which pool")
    parsed.check(
        request.provider and not request.login, "--provider slurm: name the login node with --login"
    )
    parsed.mistakes += location_mistakes((), request.provider, request.login)
    parsed.raise_mistakes()
    return request


def parse_auto(line: str) -> bool:
    """Parse ``%sky_auto on|off``. Raises RequestError for anything else."""
    parsed = ParsedLine("sky_auto", line)
    switch = parsed.word("word (on or off)", one_of("on", "off"))
    parsed.check(not parsed.words, "say on or off: %sky_auto on")
    parsed.raise_mistakes()
    return bool(switch == "on")


def _identifiers(parsed: ParsedLine, magic: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the variables that words name.

    If one is not an identifier, note the mistake and return ().
    """
    try:
        names: tuple[str, ...] = identifiers(" ".join(arguments))
    except RequestError as wrong:
        parsed.mistakes += [f"%{magic}: {mistake}" for mistake in wrong.mistakes]
        return ()
    return names


def _fields(parsed: ParsedLine, **renamed: str) -> dict[str, Any]:
    """Return the request fields that options set; ``--pool`` sets `pool`.

    Raises RequestError with all mistakes.
    """
    parsed.raise_mistakes()
    return {
        {"name": "pool", **renamed}.get(key, key): value for key, value in parsed.values.items()
    }
