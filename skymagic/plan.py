"""From a request to a plan: what users ask for, the units they write it in, and what will run; pure values.

Nothing here touches a machine. A provider describes what there is as an `Inventory`, `plan` answers with a `Plan`
or with every reason why not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal

from skymagic.accelerators import (
    Accelerator as Accelerator,
)  # part of the requests; accelerators knows its names
from skymagic.accelerators import matches
from skymagic.errors import RequestError
from skymagic.image import Image

PROVIDERS = ("auto", "local", "ssh", "aws", "slurm")

_SECRET = re.compile("token|secret|password|key", re.IGNORECASE)
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,9})?"
_INDEX = r"-?[0-9]{1,9}"


def duration(text: str) -> float:
    """Seconds of ``"90"``, ``"10m"``, ``"1h30m"``, ``"2d"`` or ``"0.5h"``; above 0.

    Raises:
        RequestError: not a duration.
    """
    compact = re.sub(r"\s+", "", text).lower()
    parts = re.fullmatch("".join(rf"(?:({_NUMBER}){unit})?" for unit in _UNITS), compact)
    if re.fullmatch(_NUMBER, compact):
        seconds = float(compact)
    elif parts and compact:
        seconds = sum(float(n) * size for n, size in zip(parts.groups("0"), _UNITS.values(), strict=True))
    else:
        raise RequestError(f"{text!r} is not a duration: write seconds (90) or units (10m, 1h30m, 2d)")
    if seconds <= 0:
        raise RequestError(f"a duration must be more than 0, not {text!r}")
    return seconds


def duration_text(seconds: float) -> str:
    """`seconds` as users write it; `duration` reads it back: ``5400.0`` is ``"1h30m"``."""
    whole = int(seconds)
    if whole != seconds or not whole:
        return f"{Decimal(repr(float(seconds))):f}s"
    text = ""
    for unit, size in _UNITS.items():
        count, whole = divmod(whole, size)
        text += f"{count}{unit}" if count else ""
    return text


@dataclass(frozen=True)
class AtLeast:
    """An amount per node: exactly `amount`, or with `or_more` at least that."""

    amount: float
    or_more: bool = False

    def met_by(self, value: float) -> bool:
        """Whether a machine with `value` gives it."""
        return value >= self.amount if self.or_more else value == self.amount

    def __str__(self) -> str:
        return f"{self.amount:.12g}{'+' if self.or_more else ''}"


def at_least(text: str, unit: str = "") -> AtLeast:
    """``"8+"`` or ``"8"`` as AtLeast; `unit` (``"GB"``) may follow the number.

    Raises:
        RequestError: not a number above 0.
    """
    ending = rf"\s*(?:{unit[:1]}i?{unit[1:]}|{unit[:1]})?" if unit else ""
    found = re.fullmatch(rf"({_NUMBER}){ending}\s*(\+?)", text.strip(), re.IGNORECASE)
    if found is None or not float(found[1]):
        raise RequestError(
            f"{text!r} is not an amount: write 8 or 8+ for at least 8" + (f", in {unit}" if unit else "")
        )
    return AtLeast(float(found[1]), bool(found[2]))


def memory(text: str) -> AtLeast:
    """``"32"``, ``"32+"`` or ``"32GB+"`` as AtLeast in GB. Raises RequestError as `at_least` does."""
    return at_least(text, "GB")


@dataclass(frozen=True)
class Only:
    """Some of a pool's ranks, chosen before their number is known: ``head``, ``all``, ``0,2``, ``0:4``, ``::2``, ``-1``.

    Args:
        text: the choice; kept without blanks, so that equal choices compare equal. It is all there is, so
            ``Only(only.text)`` brings one back from JSON.

    Raises:
        RequestError: not such a choice.
    """

    text: str = "head"

    def __post_init__(self) -> None:
        text = re.sub(r"\s+", "", self.text).lower()
        piece = rf"(?:{_INDEX}|(?:{_INDEX})?:(?:{_INDEX})?(?::(?:-?0*[1-9][0-9]{{0,8}})?)?)"
        if text not in ("head", "all") and not re.fullmatch(rf"{piece}(?:,{piece})*", text):
            raise RequestError(f"{self.text!r} names no ranks: write head, all, 0,2 or 0:4")
        object.__setattr__(self, "text", text)

    @classmethod
    def of(cls, choice: Only | str | int | Iterable[int]) -> Only:
        """Any of the forms that Python code uses: a text, one rank, several. Raises RequestError for none of them."""
        if isinstance(choice, Only):
            return choice
        if isinstance(choice, str):
            return cls(choice)
        return cls(str(choice) if isinstance(choice, int) else ",".join(map(str, choice)))

    def ranks(self, world_size: int) -> tuple[int, ...]:
        """The ranks in ascending order, each once.

        Raises:
            RequestError: a rank, or an end of a slice, that a pool of `world_size` ranks does not have.
        """
        if self.text in ("head", "all"):
            return tuple(range(world_size if self.text == "all" else 1))
        there = f"this pool has {world_size} rank{'s' * (world_size != 1)} (0 to {world_size - 1})"
        chosen: set[int] = set()
        for piece in self.text.split(","):
            ends = [int(end) if end else None for end in piece.split(":")]
            beyond = [
                end
                for end, most in zip(ends, (world_size - 1, world_size), strict=False)
                if end is not None and not -world_size <= end <= most
            ]
            if len(ends) == 1 and ends[0] is not None:
                picked: Iterable[int] = [ends[0] % world_size]
            else:
                picked = range(world_size)[slice(*ends)]
            if beyond or not picked:
                what = (
                    f"{piece} goes beyond the pool"
                    if beyond and len(ends) > 1
                    else f"there is no rank {piece}"
                )
                raise RequestError(f"{what}: {there}")
            chosen.update(picked)
        return tuple(sorted(chosen))

    def __str__(self) -> str:
        return self.text


def ranks(text: str, world_size: int) -> tuple[int, ...]:
    """The ranks that `text` names in a pool of `world_size`; see `Only` for the forms and the errors."""
    return Only(text).ranks(world_size)


@dataclass(frozen=True)
class PluginSpec:
    """A plugin by name, with options as they were written; a secret among them is not shown."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        shown = (f"{k}={'…' if _SECRET.search(k) else v}" for k, v in self.options.items())
        return ":".join(filter(None, (self.name, ",".join(shown))))

    def __repr__(self) -> str:
        return f"PluginSpec({str(self)!r})"


def plugin_specs(text: str) -> tuple[PluginSpec, ...]:
    """``"torch:backend=gloo,cuda=cu124,jax"``: a piece with ``=`` is an option of the plugin before it.

    A piece that starts like a version constraint goes on with the value before it (``version=>=2.3,<2.5``).

    Raises:
        RequestError: an option without a plugin, an option twice, no name.
    """
    found: list[tuple[str, dict[str, str]]] = []
    mistakes: list[str] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        options = found[-1][1] if found else {}
        if options and re.match(r"[<>=!~]", piece):
            options[next(reversed(options))] += f",{piece}"
            continue
        option = piece
        if ":" in piece.partition("=")[0] or "=" not in piece:
            name, colon, option = piece.partition(":")
            found.append((name.strip(), {}))
            if not re.fullmatch(r"\w[\w.-]*", name.strip()):
                mistakes.append(f"{piece!r} has no name: write NAME or NAME:option=value")
            if not colon:
                continue
        key, equals, value = (part.strip() for part in option.partition("="))
        if not found:
            mistakes.append(f"{piece!r} belongs to no plugin: write NAME:{piece}")
        elif not key or not equals:
            mistakes.append(f"{piece!r} has no value: write NAME:option=value")
        elif key in found[-1][1]:
            mistakes.append(f"{found[-1][0]}: {key} is given twice")
        else:
            found[-1][1][key] = value
    if not found and not mistakes:
        mistakes.append("a plugin's name is missing: write NAME or NAME:option=value")
    if mistakes:
        raise RequestError(mistakes)
    return tuple(PluginSpec(name, options) for name, options in found)


@dataclass(frozen=True)
class PoolRequest:
    """A pool as it was asked for; None and empty where nothing was said.

    Attributes:
        cpus, memory: per node, memory in GB.
        procs_per_node: ranks on each node; None for one per GPU asked for, else 1.
        secrets: names only; values come from the notebook's environment and never stand here.
        max_price: dollars per hour for the whole pool.
        idle, max_lifetime: seconds.
        image: what `pip` and `env` are added to.
        stated: fields that the user wrote, where the others hold configured defaults; None when what differs
            from the dataclass's own defaults was written.
    """

    name: str | None = None
    provider: str = "auto"
    nodes: int | None = None
    gpu: Accelerator | None = None
    cpus: AtLeast | None = None
    memory: AtLeast | None = None
    procs_per_node: int | None = None
    plugins: tuple[PluginSpec, ...] = ()
    pip: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    region: str | None = None
    spot: bool = False
    max_price: float | None = None
    idle: float | None = None
    max_lifetime: float | None = None
    yes: bool = False
    dry_run: bool = False
    image: Image = field(default_factory=Image)
    stated: frozenset[str] | None = field(default=None, compare=False, repr=False)

    def given(self) -> frozenset[str]:
        """Which fields the user stated of the pool itself: not its name, and not how to go about it."""
        blank = PoolRequest()
        differ = {f.name for f in fields(self) if getattr(self, f.name) != getattr(blank, f.name)}
        return frozenset(differ if self.stated is None else self.stated) - {
            "name",
            "yes",
            "dry_run",
            "stated",
        }

    def whole_image(self) -> Image:
        """`image` with `pip` and `env` added. Raises RequestError when they contradict each other."""
        return self.image.merge(Image(pip=self.pip, env=dict(self.env)))


@dataclass(frozen=True)
class RunRequest:
    """A cell as it is to be run.

    Attributes:
        pool: its name from --pool; `given()` is empty when no option of a pool was used.
        output: the variable that takes the values of the last expression, by rank.
        head: take the first rank's value alone: rank 0's, unless `targets` leaves it out.
        gather: variables that are brought back by name.
        only: whose output is shown. targets: who runs it; None for all ranks (for one rank: round robin).
        no_push: True when nothing travels, or the names that do not.
        timeout: seconds.
    """

    pool: PoolRequest = field(default_factory=PoolRequest)
    output: str | None = None
    gather: tuple[str, ...] = ()
    head: bool = False
    only: Only = field(default_factory=Only)
    targets: Only | None = None
    push: tuple[str, ...] = ()
    no_push: bool | tuple[str, ...] = False
    timeout: float | None = None
    noblock: bool = False
    fresh: bool = False
    dry_run: bool = False

    def who(self, world_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ranks that take part, those of them whose output is shown); the head is the first that takes part.

        Raises:
            RequestError: ranks that a pool of `world_size` does not have, in `targets` and in `only` at once.
        """
        mistakes: list[str] = []

        def resolve(option: str, choice: Only) -> tuple[int, ...]:
            try:
                return choice.ranks(world_size)
            except RequestError as wrong:
                mistakes.extend(f"{option}: {mistake}" for mistake in wrong.mistakes)
                return ()

        part = resolve("--targets", self.targets or Only("all"))
        shown = part[:1] if self.only.text == "head" else resolve("--only", self.only)
        if mistakes:
            raise RequestError(mistakes)
        return part, tuple(rank for rank in shown if rank in part)


@dataclass(frozen=True)
class Defaults:
    """What holds where a line says nothing; users change it with ``%config SkyMagic.…``.

    Attributes:
        timeout, idle, max_lifetime: seconds, None for no limit.
        stall_after: seconds without progress until one line says who waits for whom.
        grace: seconds that an interrupted rank has before it is ended.
        screen_limit: bytes of output that one cell may show; the logs hold all of it.
    """

    provider: str = "auto"
    plugins: tuple[PluginSpec, ...] = ()
    only: Only = field(default_factory=Only)
    timeout: float | None = None
    idle: float | None = None
    max_lifetime: float | None = None
    stall_after: float = 30.0
    grace: float = 2.0
    screen_limit: int = 1_000_000


@dataclass(frozen=True)
class Topology:
    """How many ranks, and where: ranks of a node are neighbours."""

    nodes: int
    procs_per_node: int

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.procs_per_node

    def node_of(self, rank: int) -> int:
        """The node that `rank` runs on."""
        return rank // self.procs_per_node

    def local_rank(self, rank: int) -> int:
        """The place of `rank` among the ranks of its node."""
        return rank % self.procs_per_node

    def ranks_on(self, node: int) -> range:
        """The ranks of `node`."""
        return range(node * self.procs_per_node, (node + 1) * self.procs_per_node)


def topology(request: PoolRequest) -> Topology:
    """The ranks that `request` asks for: 1 node unless said, one rank per GPU asked for, else 1."""
    return Topology(request.nodes or 1, request.procs_per_node or (request.gpu.count if request.gpu else 1))


@dataclass(frozen=True)
class Inventory:
    """What a machine has; `gpus` are the names that its driver gives, in the order of its devices."""

    hostname: str
    cpus: int
    memory_gb: float
    gpus: tuple[str, ...] = ()
    python: str = ""


@dataclass(frozen=True)
class Plan:
    """What will run: a value that prints, compares and is carried out as it stands.

    Attributes:
        request: what it answers.
        devices: for each node, the indices of the GPUs that it takes; empty when none were asked for.
        cpus: CPU cores that a node may use. memory_gb: its memory.
        price: dollars per hour for the whole pool.
    """

    provider: str
    request: PoolRequest
    topology: Topology
    image: Image
    hosts: tuple[str, ...]
    cpus: int
    memory_gb: float
    devices: tuple[tuple[int, ...], ...] = ()
    price: float = 0.0

    def devices_of(self, rank: int) -> tuple[int, ...]:
        """The GPUs of `rank`: an equal share of its node's, as indices of devices on its machine."""
        if not self.devices:
            return ()
        share = len(self.devices[0]) // self.topology.procs_per_node
        first = self.topology.local_rank(rank) * share
        return self.devices[self.topology.node_of(rank)][first : first + share]

    def text(self) -> str:
        """The plan as --dry-run prints it, without values of variables."""
        asked, shape = self.request, self.topology
        limits = [
            f"after {duration_text(asked.idle)} without a cell" if asked.idle else "",
            f"after {duration_text(asked.max_lifetime)}" if asked.max_lifetime else "",
        ]
        rows = {
            "where": f"{self.provider}: {', '.join(self.hosts)}",
            "ranks": f"{shape.world_size} ({shape.nodes} × {shape.procs_per_node}: nodes × ranks on each)",
            "GPUs": f"{asked.gpu.count} × {asked.gpu.name} on each node" if asked.gpu else "none asked for",
            "machine": f"{self.cpus} CPUs and {self.memory_gb:.12g} GB",
            "plugins": ", ".join(map(str, asked.plugins)),
            "packages": ", ".join(self.image.pip),
            "note": "; ".join(self.image.repeated()),
            "variables": ", ".join([*self.image.env, *(f"{name} (secret)" for name in asked.secrets)]),
            "ends": " or ".join(filter(None, limits)) or "with the notebook, or by %sky_down",
            "price": f"${self.price:.2f} per hour",
        }
        title = f"Plan of pool {asked.name!r}" if asked.name else "Plan of a pool"
        return "\n".join([title, *(f"  {key:<10} {value}" for key, value in rows.items() if value)])


def plan(request: PoolRequest, inventory: Inventory) -> Plan:
    """How `request` is met on the machine that `inventory` describes; nodes are groups of ranks on it.

    Raises:
        RequestError: every reason why it cannot be, in words, with what to add.
    """
    shape = topology(request)
    devices, mistakes = _devices(request, shape, inventory)
    mistakes += [*_elsewhere(request), *_too_small(request, shape, inventory)]
    image = request.image
    try:
        image = request.whole_image()
    except RequestError as wrong:
        mistakes += wrong.mistakes
    python = image.python or ""
    if inventory.python and python and python.split(".")[:2] != inventory.python.split(".")[:2]:
        mistakes.append(
            f"Python {python} is asked for and this notebook runs {inventory.python}, as its ranks will"
        )
    if mistakes:
        raise RequestError(mistakes)
    return Plan(
        provider="local",
        request=request,
        topology=shape,
        image=image,
        hosts=(inventory.hostname,),
        cpus=inventory.cpus,
        memory_gb=inventory.memory_gb,
        devices=devices,
    )


def _devices(
    request: PoolRequest, shape: Topology, inventory: Inventory
) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """(devices of each node, mistakes)."""
    gpu = request.gpu
    if gpu is None:
        return (), []
    mistakes = []
    if gpu.count % shape.procs_per_node:
        mistakes.append(
            f"{gpu.count} GPUs per node cannot be shared by {shape.procs_per_node} ranks per node equally; "
            "leave --procs-per-node out for one rank per GPU"
        )
    here = [index for index, name in enumerate(inventory.gpus) if matches(gpu.name, name)]
    if len(here) < shape.nodes * gpu.count:
        has = f"no {gpu.name}" if not here else f"{len(here)} {gpu.name} of {shape.nodes * gpu.count}"
        there = ", ".join(inventory.gpus) or "none"
        mistakes.append(f"this machine has {has} (it has: {there}); add hosts with --provider ssh --hosts …")
    nodes = range(0, shape.nodes * gpu.count, gpu.count)
    return tuple(tuple(here[first : first + gpu.count]) for first in nodes), mistakes


def _elsewhere(request: PoolRequest) -> list[str]:
    """What has no meaning on the notebook's own machine."""
    mistakes = []
    if request.provider not in ("auto", "local"):
        mistakes.append(f"this machine is --provider local, and --provider {request.provider} is asked for")
    if request.hosts:
        mistakes.append("--hosts is for other machines: add --provider ssh")
    if request.region:
        mistakes.append("--region is for rented machines: add --provider aws")
    if request.spot:
        mistakes.append("--spot is for rented machines: add --provider aws")
    return mistakes


def _too_small(request: PoolRequest, shape: Topology, inventory: Inventory) -> list[str]:
    nodes = f" on each of {shape.nodes} nodes" if shape.nodes > 1 else ""
    wanted = (
        ("--cpus", request.cpus, inventory.cpus, "CPUs"),
        ("--memory", request.memory, inventory.memory_gb, "GB"),
    )
    return [
        f"{option} {asked}{nodes} needs more than this machine has ({has:.12g} {unit}); ask for less, "
        "or add hosts with --provider ssh --hosts …"
        for option, asked, has, unit in wanted
        # nodes share the machine; more than the amount asked for is never in the way of a local pool
        if asked is not None and asked.amount * shape.nodes > has
    ]


def fits(request: PoolRequest, running: Plan) -> list[str]:
    """Why the pool that `running` describes does not serve `request`; empty when it does.

    Only what the user stated counts: a request without options fits every pool.
    """
    given, made, shape, wanted = request.given(), running.request, running.topology, topology(request)
    reasons = []

    def differs(name: str, here: object, asked: object, words: str) -> None:
        if name in given and here != asked:
            reasons.append(words.format(here=here, asked=asked))

    if request.provider != "auto":
        differs("provider", running.provider, request.provider, "it is a {here} pool, not {asked}")
    differs("nodes", shape.nodes, wanted.nodes, "it has {here} nodes, not {asked}")
    differs(
        "procs_per_node",
        shape.procs_per_node,
        wanted.procs_per_node,
        "it has {here} ranks per node, not {asked}",
    )
    differs("gpu", made.gpu or "no GPU", request.gpu, "it was made with {here}, not {asked}")
    for name, has in (("cpus", running.cpus), ("memory", running.memory_gb)):
        asked = getattr(request, name)
        if name in given and asked is not None and asked.amount > has:
            reasons.append(f"its nodes have {has:.12g} {'CPUs' if name == 'cpus' else 'GB'}, not {asked}")
    reasons += _lacks(request, running)
    for name in ("hosts", "region", "spot", "idle", "max_lifetime"):
        differs(
            name,
            getattr(made, name),
            getattr(request, name),
            f"its {name.replace('_', ' ')} is {{here}}, not {{asked}}",
        )
    if request.max_price is not None and running.price > request.max_price:
        reasons.append(f"it costs ${running.price:.2f} per hour, more than ${request.max_price:.2f}")
    return reasons


def _lacks(request: PoolRequest, running: Plan) -> list[str]:
    """What a request adds that a pool was made without."""
    given, made = request.given(), running.request
    reasons = []
    if "plugins" in given:
        has = {spec.name: spec for spec in made.plugins}
        for spec in request.plugins:
            if spec.name not in has:
                reasons.append(f"it was made without the plugin {spec.name}")
            elif has[spec.name] != spec:
                reasons.append(f"its plugin is {has[spec.name]}, not {spec}")
    if given & {"pip", "env", "image"}:
        asked = request.whole_image()
        reasons += [
            f"it was made without the package {item}" for item in asked.pip if item not in running.image.pip
        ]
        reasons += [
            f"it was made without this value of {name}"
            for name, value in asked.env.items()
            if running.image.env.get(name) != value
        ]
    reasons += [
        f"it was made without the secret {name}" for name in request.secrets if name not in made.secrets
    ]
    return reasons
