"""What users ask for, before anything is known of machines: a pool, a run, a plugin, and what holds unsaid."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from skymagic.errors import RequestError
from skymagic.plan import masking
from skymagic.plan.accelerators import Accelerator, GpuChoice
from skymagic.plan.image import Image
from skymagic.plan.masking import is_secret_name
from skymagic.plan.suggest import check_keywords, did_you_mean
from skymagic.plan.units import AtLeast, Selection

AUTO = "auto"
PROVIDERS = (AUTO, "local", "ssh", "aws", "slurm", "kubernetes", "ray")
SSH_CLIENTS = ("auto", "paramiko", "openssh")
"""Who speaks SSH; auto: paramiko, and OpenSSH where that cannot log in."""
COMPOSITE = re.compile(r"(cpu|cuda|xpu|mps|hpu):\w+(,(cpu|cuda|xpu|mps|hpu):\w+)*")
"""Torch's backends by device: a value with a comma in it."""


# fmt: off
REGIONS = (
    "af-south-1", "ap-east-1", "ap-east-2", "ap-northeast-1", "ap-northeast-2", "ap-northeast-3", "ap-south-1", "ap-south-2",
    "ap-southeast-1", "ap-southeast-2", "ap-southeast-3", "ap-southeast-4", "ap-southeast-5", "ap-southeast-6", "ap-southeast-7",
    "ca-central-1", "ca-west-1", "eu-central-1", "eu-central-2", "eu-north-1", "eu-south-1", "eu-south-2", "eu-west-1", "eu-west-2",
    "eu-west-3", "il-central-1", "me-central-1", "me-south-1", "mx-central-1", "sa-east-1", "us-east-1", "us-east-2", "us-west-1",
    "us-west-2",
)
# fmt: on
"""EC2's regions (2026-11) for completion, which asks nobody; others are taken as well."""


@dataclass(frozen=True)
class CloudSettings:
    """Settings of EC2 that a user makes once.

    Attributes:
        profile: of the AWS configuration; None for what the environment says.
        subnet: ``subnet-…`` that the machines are in; None for the default one of each zone.
        use_private_ips: connect to private addresses, and give the machines no public ones.
        ssh_port: where their sshd listens. user: whom one logs in as: the image's own user.
        ssh_from: ``"203.0.113.0/24"``: addresses that may connect; None: only this machine's.
        image_id: ``ami-…``; None for Ubuntu, with NVIDIA's driver where there are GPUs.
        disk: GB of each machine's disk.
        endpoint_url: another address of AWS's services.
        deadline_factor: of all deadlines and pauses for AWS.
        via: ``"ann@bastion"``, a jump host: the way to machines without public addresses.
    """

    profile: str | None = None
    subnet: str | None = None
    use_private_ips: bool = False
    ssh_port: int = 22
    user: str = "ubuntu"
    ssh_from: str | None = None
    image_id: str | None = None
    disk: int = 100
    endpoint_url: str | None = None
    deadline_factor: float = 1.0
    via: str | None = None

    def __post_init__(self) -> None:
        if self.via:
            object.__setattr__(self, "use_private_ips", True)


def cloud_settings(values: Mapping[str, Any]) -> CloudSettings:
    """Settings as a dictionary has them. Raises RequestError for names that are none."""
    if not values:  # as nearly always, and asked for with each cell
        return CloudSettings()
    try:
        check_keywords("SkyMagic.aws", values, [one.name for one in fields(CloudSettings)], {})
    except TypeError as wrong:
        raise RequestError(str(wrong)) from None
    return CloudSettings(**values)


@dataclass(frozen=True)
class PluginSpec:
    """A plugin by name, with options as they were written; a secret among them is not shown."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        shown = (f"{k}={'…' if is_secret_name(k) else v}" for k, v in self.options.items())
        return ":".join(filter(None, (self.name, ",".join(shown))))

    def __repr__(self) -> str:
        return f"PluginSpec({str(self)!r})"


def plugin_specs(text: str) -> tuple[PluginSpec, ...]:
    """``"torch:backend=gloo,cuda=cu124,jax"``: a piece with ``=`` is an option of the plugin before it.

    A piece that starts like a version constraint goes on with the value before it (``version=>=2.3,<2.5``), and so does one of a
    composite backend (``backend=cpu:gloo,cuda:nccl``).
    Raises RequestError for an option without a plugin, an option twice, and no name; all at once.
    """
    found: list[tuple[str, dict[str, str]]] = []
    mistakes: list[str] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        options = found[-1][1] if found else {}
        if options and re.match(r"[<>=!~]", piece):
            options[next(reversed(options))] += f",{piece}"
            continue
        if (
            options
            and COMPOSITE.fullmatch(options[last := next(reversed(options))])
            and COMPOSITE.fullmatch(piece)
        ):
            options[last] += f",{piece}"  # cpu:gloo,cuda:nccl
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


def no_provider(name: str, known: Iterable[str]) -> str:
    """Why there is no provider of this name, with what there is; `known` are the names that exist."""
    nearest = did_you_mean(name, known) or f"; available: {', '.join(known)}"
    return f"no provider is called {name!r}{nearest}"


TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "hosts": ("ssh",),
    "ssh": ("ssh", "slurm"),
    "region": ("aws",),
    "spot": ("aws",),
    "replace": ("aws", "slurm"),
    "max_price": ("aws", "local", "ssh"),
    "login": ("slurm",),
    "slurm": ("slurm",),
    "kubernetes": ("kubernetes",),
    "address": ("ray",),
}
"""Field of a request → the providers that take it, the one that it is for first; all others refuse it."""
_FOR = {
    "ssh": "machines reached over SSH", "aws": "rented machines", "slurm": "Slurm", "kubernetes": "Kubernetes", "ray": "Ray",
}  # fmt: skip


NO_IMAGE = Image()
"""What a request has of which nothing is said: each cell makes one."""


@dataclass(frozen=True)
class PoolRequest:
    """A pool as it was asked for; None and empty where nothing was said.

    Attributes:
        gpu: of each node; None for those that are free there, where a plugin uses GPUs.
        cpus, memory: per node, memory in GB.
        procs_per_node: ranks on each node; None for one per GPU, else 1.
        secrets: names only; values come from the notebook's environment and never stand here.
        ssh: one of `SSH_CLIENTS`.
        region: where to rent, or several with commas between, the best liked first.
        replace: rent another machine in the place of one that is lost; of Slurm: queue a job that follows this one.
        max_price: dollars per hour for the whole pool.
        address: of a Ray cluster: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``.
        slurm: options of sbatch by their long names, each with its value: "" for one without, "none" to leave one of ours out.
        kubernetes: image, namespace, context, pod-template and pods, as far as they are given.
        login: login node of a Slurm cluster, reached over SSH; None where Slurm's programs are on this machine.
        idle, max_lifetime: seconds.
        detached: on this machine: the pool outlives its notebook, as one on other machines does.
        max_away: seconds for which a cell may go on without its notebook, where the pool outlives that.
        lazy: declare the pool, and make it at its first cell; again after it has ended by itself.
        image: what `python`, `pip` and `env` are added to.
        cloud: how rented machines are reached.
        imports: dotted names of modules that the notebook uses: other machines get the distributions that they are from, in
            the notebook's versions.
        resizes: job id of the pool that runs and gets this size; "" for another one.
        stated: fields that the user wrote, where the others hold configured defaults; None when what differs
            from the dataclass's own defaults was written.
    """

    name: str | None = None
    provider: str = "auto"
    nodes: int | None = None
    gpu: Accelerator | GpuChoice | None = None
    cpus: AtLeast | None = None
    memory: AtLeast | None = None
    procs_per_node: int | None = None
    plugins: tuple[PluginSpec, ...] = ()
    python: str | None = None
    pip: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    secrets: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    ssh: str = "auto"
    region: str | None = None
    spot: bool = False
    replace: bool = False
    slurm: tuple[tuple[str, str], ...] = ()
    kubernetes: tuple[tuple[str, str], ...] = ()
    address: str | None = None
    login: str | None = None
    max_price: float | None = None
    idle: float | None = None
    max_lifetime: float | None = None
    max_away: float | None = 86_400.0
    detached: bool = False
    lazy: bool = False
    yes: bool = False
    dry_run: bool = False
    image: Image = NO_IMAGE
    cloud: CloudSettings = field(default_factory=CloudSettings, repr=False)
    imports: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    resizes: str = field(default="", compare=False, repr=False)
    stated: frozenset[str] | None = field(default=None, compare=False, repr=False)

    def given(self) -> frozenset[str]:
        """Which fields the user stated of the pool itself: not its name, and not how to go about it."""
        blank = PoolRequest()
        differ = {f.name for f in fields(self) if getattr(self, f.name) != getattr(blank, f.name)}
        return frozenset(differ if self.stated is None else self.stated) - {
            "name",
            "lazy",
            "yes",
            "dry_run",
            "stated",
            "imports",
            "cloud",
            "resizes",
        }

    @property
    def accelerator(self) -> Accelerator | None:
        """The kind of GPU that it asks for; None where it asks for none, or for any kind."""
        return self.gpu if isinstance(self.gpu, Accelerator) else None

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions to rent in; empty for the one that the configuration names."""
        return tuple(dict.fromkeys(filter(None, (self.region or "").split(","))))

    def secret_values(self, environ: Mapping[str, str]) -> frozenset[str]:
        """What no message may show: values of secrets, and of variables and plugins' options that are named like one."""
        options = {name: value for plugin in self.plugins for name, value in plugin.options.items()}
        variables = {**environ, **self.image.env, **dict(self.env)}
        return masking.secret_values(self.secrets, variables) | masking.secret_values((), options)

    @property
    def here(self) -> bool:
        """Whether it asks for this machine."""
        return self.provider == "local" or (self.provider == "auto" and not self.hosts)

    def ranks_mistakes(self, label: str = "--ranks") -> list[str]:
        """Why ranks cannot be counted as those of one node (`label`); empty on this machine, where no nodes are asked for."""
        if not self.here:
            where = "of hosts" if self.provider == "auto" else f"of --provider {self.provider}"
            return [
                f"{label} counts ranks of this machine; a pool {where} is counted in nodes: write --nodes, and --procs-per-node"
            ]
        if self.nodes is None:
            return []
        return [
            f"{label} is one node of so many ranks, and --nodes {self.nodes} makes several: keep one of them, or write "
            f"--nodes {self.nodes} --procs-per-node N for N ranks on each"
        ]

    def whole_image(self) -> Image:
        """`image` with `python`, `pip` and `env` added. Raises RequestError when they contradict each other."""
        return self.image.merge(Image(python=self.python, pip=self.pip, env=dict(self.env)))


def for_others(request: PoolRequest, provider: str) -> list[str]:
    """A sentence for each option that the user wrote and that this provider does not take; another package's takes what SSH does."""
    blank, given, mistakes = PoolRequest(), request.given(), []
    taker = provider if provider in PROVIDERS else "ssh"
    for name, takers in TAKEN_BY.items():
        value = getattr(request, name)
        if taker in takers or name not in given or value == getattr(blank, name):
            continue
        labels = (
            [option for option, _ in value]
            if name in ("slurm", "kubernetes")
            else [name.replace("_", "-")]
        )
        mistakes += [
            f"--{label} is for {_FOR[takers[0]]}: write --provider {takers[0]}, or leave it out"
            for label in labels
        ]
    return mistakes


@dataclass(frozen=True)
class RunRequest:
    """A cell as it is to be run.

    Attributes:
        pool: its name from --pool; `given()` is empty when no option of a pool was used.
        output: the variable that takes the values of the last expression, by rank.
        head: take the first rank's value alone: rank 0's, unless `targets` leaves it out.
        gather: variables that are brought back by name.
        only: whose output is shown. targets: who runs it; None for all ranks.
        no_push: True when nothing travels, or the names that do not.
        timeout: seconds.
        busy: what becomes of it where another cell is running on its ranks: it waits ("wait"), or is refused ("refuse").
        profile: who profiles it; None for nobody.
    """

    pool: PoolRequest = field(default_factory=PoolRequest)
    output: str | None = None
    gather: tuple[str, ...] = ()
    head: bool = False
    only: Selection = field(default_factory=Selection)
    targets: Selection | None = None
    push: tuple[str, ...] = ()
    no_push: bool | tuple[str, ...] = False
    timeout: float | None = None
    noblock: bool = False
    busy: str = "wait"
    fresh: bool = False
    dry_run: bool = False
    profile: Selection | None = None

    def who(
        self, world_size: int, noun: str = "rank", option: str = "--targets"
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(ranks that take part, those of them whose output is shown); the head is the first that takes part.

        Args:
            noun: what is counted, for messages. option: what the user writes for `targets`.

        Raises RequestError for ranks that a pool of `world_size` does not have, in `targets` and in `only` at once.
        """
        mistakes: list[str] = []

        def resolve(option: str, choice: Selection) -> tuple[int, ...]:
            try:
                return choice.ranks(world_size, noun)
            except RequestError as wrong:
                mistakes.extend(f"{option}: {mistake}" for mistake in wrong.mistakes)
                return ()

        part = resolve(option, self.targets or Selection("all"))
        shown = part[:1] if self.only.text == "head" else resolve("--only", self.only)
        if mistakes:
            raise RequestError(mistakes)
        return part, tuple(rank for rank in shown if rank in part)


@dataclass(frozen=True)
class Defaults:
    """What holds where a line says nothing; users change it with ``%config SkyMagic.…``.

    Attributes:
        timeout, idle, max_lifetime: seconds, None for no limit.
        max_price: dollars per hour that a rented pool may cost, None for no limit.
        away: seconds that nodes on other machines wait for a notebook that has gone, once their cells have ended.
        stall_after: seconds without progress until one line says who waits for whom.
        view_after: seconds after which a cell that goes on has a line that says how it is.
        buttons: whether that line has buttons, which are widgets, where the front end shows such.
        grace: seconds that an interrupted rank has before it is ended.
        screen_limit: bytes of output that one cell may show; the logs hold all of it.
        log_limit: bytes that the log of one rank may have on its node; of a longer one the beginning is dropped.
        packages: what is done where a node of another machine lacks a package that a cell needs: "sync" installs it, "ask" says how,
            "off" leaves it to the cell to fail.
        aws: how rented machines are reached.
        busy: what becomes of a cell while another is running on its ranks: "wait" or "refuse".
    """

    provider: str = "auto"
    plugins: tuple[PluginSpec, ...] = ()
    only: Selection = field(default_factory=Selection)
    timeout: float | None = None
    idle: float | None = None
    max_lifetime: float | None = None
    max_price: float | None = None
    away: float | None = 1800.0
    stall_after: float = 30.0
    view_after: float = 1.0
    buttons: bool = True
    grace: float = 2.0
    screen_limit: int = 1_000_000
    log_limit: int = 1_000_000_000
    packages: str = "sync"
    aws: CloudSettings = field(default_factory=CloudSettings)
    busy: str = "wait"


@dataclass(frozen=True)
class ShellRequest:
    """%%sky_sh: a script as it is to be run, once on each node.

    Attributes:
        workdir: a folder that goes along, or None.
        detach: return at once, and go on without the notebook; for pools that outlive it.
        pool: its name, None for the latest one.
        env: environment variables of the script. secrets: names only; the notebook's environment holds the values.
        nodes: the nodes that run it; None for all. only: the nodes whose output is shown.
        rank: the one rank on whose node it runs, with the rank's environment; None to run it as the nodes' own.
        output: the variable that takes exit codes and last lines, by node.
        timeout: seconds.
        busy: as of a cell.
    """

    workdir: str | None = None
    detach: bool = False
    pool: str | None = None
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    secrets: tuple[str, ...] = ()
    timeout: float | None = None
    nodes: Selection | None = None
    rank: Selection | None = None
    only: Selection = field(default_factory=Selection)
    output: str | None = None
    noblock: bool = False
    busy: str = "wait"


def missing_secrets(names: Iterable[str], environ: Mapping[str, str]) -> list[str]:
    """A sentence for each secret that the notebook's environment does not hold."""
    return [
        f"--secret {name}: the notebook's environment has no such variable"
        for name in names
        if name not in environ
    ]
