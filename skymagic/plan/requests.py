"""Requests of users before anything is known of machines: pools, runs, plugins, and defaults."""

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
"""SSH clients; auto is paramiko, or OpenSSH if paramiko cannot log in."""
COMPOSITE = re.compile(r"(cpu|cuda|xpu|mps|hpu):\w+(,(cpu|cuda|xpu|mps|hpu):\w+)*")
"""Torch's backends by device, a value that contains commas."""


REGIONS = (
    "af-south-1",
    "ap-east-1",
    "ap-east-2",
    "ap-northeast-1",
    "ap-northeast-2",
    "ap-northeast-3",
    "ap-south-1",
    "ap-south-2",
    "ap-southeast-1",
    "ap-southeast-2",
    "ap-southeast-3",
    "ap-southeast-4",
    "ap-southeast-5",
    "ap-southeast-6",
    "ap-southeast-7",
    "ca-central-1",
    "ca-west-1",
    "eu-central-1",
    "eu-central-2",
    "eu-north-1",
    "eu-south-1",
    "eu-south-2",
    "eu-west-1",
    "eu-west-2",
    "eu-west-3",
    "il-central-1",
    "me-central-1",
    "me-south-1",
    "mx-central-1",
    "sa-east-1",
    "us-east-1",
    "us-east-2",
    "us-west-1",
    "us-west-2",
)
"""EC2's regions (2026-11), for completion without a request to AWS.

Other regions are accepted too.
"""


@dataclass(frozen=True)
class CloudSettings:
    """EC2 settings that a user makes once.

    Attributes:
        profile: profile of the AWS configuration; None for the environment's.
        subnet: ``subnet-…`` of the machines; None for the default one of each zone.
        use_private_ips: connect to private addresses, and give the machines no public ones.
        ssh_port: port of their sshd.
        user: login name, the default user of the image.
        ssh_from: ``"203.0.113.0/24"``: addresses that may connect; None for this machine's only.
        image_id: ``ami-…``; None for Ubuntu, with NVIDIA's driver on machines with GPUs.
        disk: GB of each machine's disk.
        endpoint_url: alternative address of AWS's services.
        deadline_factor: factor for all deadlines and pauses with AWS.
        via: ``"ann@bastion"``, a jump host, to reach machines without public addresses.
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
    """Return settings from a dictionary. Raises RequestError for unknown names."""
    if not values:  # the usual case, and this is called for each cell
        return CloudSettings()
    try:
        check_keywords(
            "SkyMagic.aws", values, [setting.name for setting in fields(CloudSettings)], {}
        )
    except TypeError as wrong:
        raise RequestError(str(wrong)) from None
    return CloudSettings(**values)


@dataclass(frozen=True)
class PluginSpec:
    """A plugin by name, with its options as written; secret options are not shown."""

    name: str
    options: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        shown = (f"{k}={'…' if is_secret_name(k) else v}" for k, v in self.options.items())
        return ":".join(filter(None, (self.name, ",".join(shown))))

    def __repr__(self) -> str:
        return f"PluginSpec({str(self)!r})"


def plugin_specs(text: str) -> tuple[PluginSpec, ...]:
    """Parse ``"torch:backend=gloo,cuda=cu124,jax"``.

    A piece with ``=`` is an option of the plugin before it. A piece that starts like a version
    constraint continues the value before it (``version=>=2.3,<2.5``), and so does a piece of a
    composite backend (``backend=cpu:gloo,cuda:nccl``).

    Raises RequestError for an option without a plugin, a repeated option, or a missing name, with
    all mistakes at once.
    """
    plugins: list[tuple[str, dict[str, str]]] = []
    mistakes: list[str] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        options = plugins[-1][1] if plugins else {}
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
            plugins.append((name.strip(), {}))
            if not re.fullmatch(r"\w[\w.-]*", name.strip()):
                mistakes.append(f"{piece!r} has no name: write NAME or NAME:option=value")
            if not colon:
                continue
        key, equals, value = (part.strip() for part in option.partition("="))
        if not plugins:
            mistakes.append(f"{piece!r} belongs to no plugin: write NAME:{piece}")
        elif not key or not equals:
            mistakes.append(f"{piece!r} has no value: write NAME:option=value")
        elif key in plugins[-1][1]:
            mistakes.append(f"{plugins[-1][0]}: {key} is given twice")
        else:
            plugins[-1][1][key] = value
    if not plugins and not mistakes:
        mistakes.append("a plugin's name is missing: write NAME or NAME:option=value")
    if mistakes:
        raise RequestError(mistakes)
    return tuple(PluginSpec(name, options) for name, options in plugins)


def no_provider(name: str, providers: Iterable[str]) -> str:
    """Return a message that no provider has this name, with a suggestion.

    `providers` are the existing names.
    """
    nearest = did_you_mean(name, providers) or f"; available: {', '.join(providers)}"
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
    "container": ("ssh", "slurm", "kubernetes"),
    "binds": ("ssh", "slurm"),
}
"""Maps a field of a request to the providers that accept it; all others refuse it.

The first provider is the one that the field is intended for.
"""
_LABELS = {"binds": "bind"}
"""Names of options that are not those of their fields."""
_FOR = {
    "ssh": "machines reached over SSH",
    "aws": "rented machines",
    "slurm": "Slurm",
    "kubernetes": "Kubernetes",
    "ray": "Ray",
}


NO_IMAGE = Image()
"""Default image of requests, created once because every cell creates a request."""


@dataclass(frozen=True)
class PoolRequest:
    """A request for a pool; unset fields are None or empty.

    Attributes:
        gpu: GPUs of each node; None for its free GPUs if a plugin uses GPUs.
        cpus, memory: per node, memory in GB.
        procs_per_node: ranks on each node; None for one per GPU, else 1.
        secrets: names only; values come from the notebook's environment and are never stored here.
        ssh: one of `SSH_CLIENTS`.
        region: region to rent in, or several with commas between them, in order of preference.
        replace: rent a replacement for a lost machine; with Slurm: queue a job that follows this
            one.
        max_price: dollars per hour for the whole pool.
        address: address of a Ray cluster: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``.
        slurm: options of sbatch by their long names, each with its value: "" for an option without
            a value, "none" to omit one of skymagic's.
        kubernetes: image, namespace, context, pod-template and pods, if set.
        container: container that the nodes' processes run in, as ``IMAGE`` or ``ENGINE:IMAGE``.
        binds: folders of a node that its container shows, besides the usual ones.
        login: login node of a Slurm cluster, reached over SSH; None if Slurm's programs are on this
            machine.
        idle, max_lifetime: seconds.
        detached: on this machine: the pool outlives its notebook, as pools on other machines do.
        max_away: seconds that a cell may continue without its notebook, if the pool outlives the
            notebook.
        lazy: declare the pool, and start it at its first cell, and again after it has ended by
            itself.
        image: base to which `python`, `pip` and `env` are added.
        cloud: settings to reach rented machines.
        imports: dotted names of modules that the notebook uses: other machines get their
            distributions, in the notebook's versions.
        resizes: job id of the running pool that changes to this size; "" for a new pool.
        stated: fields that the user wrote, while the others hold configured defaults; None if the
            written fields are those that differ from the dataclass's own defaults.
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
    container: str | None = None
    binds: tuple[str, ...] = ()
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

    def stated_fields(self) -> frozenset[str]:
        """Return the fields of the pool itself that the user stated.

        The name, and options about how to start the pool, are not included.
        """
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
        """The requested kind of GPU; None for no GPU, or for any kind."""
        return self.gpu if isinstance(self.gpu, Accelerator) else None

    @property
    def regions(self) -> tuple[str, ...]:
        """The regions to rent in; empty for the configured one."""
        return tuple(dict.fromkeys(filter(None, (self.region or "").split(","))))

    def secret_values(self, environ: Mapping[str, str]) -> frozenset[str]:
        """Return the values that no message may show.

        These are values of secrets, and of variables and plugin options with secret names.
        """
        options = {
            name: str(value) for plugin in self.plugins for name, value in plugin.options.items()
        }
        variables = {**environ, **self.image.env, **dict(self.env)}
        return masking.secret_values(self.secrets, variables) | masking.secret_values((), options)

    @property
    def is_here(self) -> bool:
        """True if it requests this machine."""
        return self.provider == "local" or (self.provider == "auto" and not self.hosts)

    def ranks_mistakes(self, label: str = "--ranks") -> list[str]:
        """Return why the size cannot be given in ranks of one node (`label`), or [].

        This is possible on this machine only, without a number of nodes.
        """
        if not self.is_here:
            kind = "of hosts" if self.provider == "auto" else f"of --provider {self.provider}"
            return [
                f"{label} counts ranks of this machine; a pool {kind} is counted in nodes: "
                "write --nodes, and --procs-per-node"
            ]
        if self.nodes is None:
            return []
        return [
            f"{label} is one node of so many ranks, and --nodes {self.nodes} makes several: "
            "keep one of them, or write "
            f"--nodes {self.nodes} --procs-per-node N for N ranks on each"
        ]

    def whole_image(self) -> Image:
        """Return `image` with `python`, `pip` and `env` added.

        Raises RequestError if they contradict each other.
        """
        return self.image.merge(Image(python=self.python, pip=self.pip, env=dict(self.env)))


def unsupported_options(request: PoolRequest, provider: str) -> list[str]:
    """Return a sentence for each option that the user wrote and this provider does not accept.

    Providers of other packages accept the options of SSH.
    """
    blank, stated, mistakes = PoolRequest(), request.stated_fields(), []
    role = provider if provider in PROVIDERS else "ssh"
    for name, takers in TAKEN_BY.items():
        value = getattr(request, name)
        if role in takers or name not in stated or value == getattr(blank, name):
            continue
        labels = (
            [option for option, _ in value]
            if name in ("slurm", "kubernetes")
            else [_LABELS.get(name, name.replace("_", "-"))]
        )
        mistakes += [
            f"--{label} is for {_FOR[takers[0]]}: write --provider {takers[0]}, or leave it out"
            for label in labels
        ]
    return mistakes


@dataclass(frozen=True)
class RunRequest:
    """A request to run a cell.

    Attributes:
        pool: its name from --pool; `stated_fields()` is empty if no option of a pool was used.
        output: variable that receives the values of the last expression, by rank.
        head: store only the first rank's value: rank 0's, unless `targets` excludes it.
        gather: names of variables to fetch.
        only: ranks whose output is shown.
        targets: ranks that run it; None for all ranks.
        no_push: True to send nothing, or the names that are not sent.
        timeout: seconds.
        busy: if another cell is running on its ranks, wait for it ("wait"), or refuse this one
            ("refuse").
        profile: ranks that profile it; None for none.
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

    def participants(
        self, world_size: int, noun: str = "rank", option: str = "--targets"
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return (participating ranks, those of them whose output is shown).

        The head is the first participating rank.

        Args:
            noun: counted unit, for messages.
            option: name of the option behind `targets`, for messages.

        Raises RequestError for ranks that a pool of `world_size` does not have, in `targets` and in
        `only` at once.
        """
        mistakes: list[str] = []

        def resolve(option: str, choice: Selection) -> tuple[int, ...]:
            try:
                return choice.ranks(world_size, noun)
            except RequestError as wrong:
                mistakes.extend(f"{option}: {mistake}" for mistake in wrong.mistakes)
                return ()

        participants = resolve(option, self.targets or Selection("all"))
        shown = participants[:1] if self.only.text == "head" else resolve("--only", self.only)
        if mistakes:
            raise RequestError(mistakes)
        return participants, tuple(rank for rank in shown if rank in participants)


@dataclass(frozen=True)
class Defaults:
    """Defaults for omitted options; users change them with ``%config SkyMagic.…``.

    Attributes:
        timeout, idle, max_lifetime: seconds; None for no limit.
        max_price: dollars per hour that a rented pool may cost; None for no limit.
        away: seconds that nodes on other machines wait for a lost notebook after their cells have
            ended.
        stall_after: seconds without progress after which a line names the waiting ranks and those
            they wait for.
        view_after: seconds after which a running cell shows its progress line.
        buttons: show buttons (widgets) in that line, if the front end supports them.
        grace: seconds between the interrupt of a rank and its end.
        screen_limit: bytes of output that one cell may show; the logs have all of it.
        log_limit: maximum bytes of one rank's log on its node; the beginning of a longer log is
            dropped.
        packages: action if a node of another machine lacks a package that a cell needs: "sync"
            installs it, "ask" explains how to, "off" lets the cell fail.
        aws: settings to reach rented machines.
        busy: handling of a cell while another is running on its ranks: "wait" or "refuse".
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
    """A request of %%sky_sh to run a script, once on each node.

    Attributes:
        workdir: folder to copy along, or None.
        detach: return immediately, and continue without the notebook; for pools that outlive it.
        pool: its name; None for the latest one.
        env: environment variables of the script.
        secrets: names only; the notebook's environment holds the values.
        nodes: nodes that run it; None for all.
        only: nodes whose output is shown.
        rank: single rank on whose node, and in whose environment, it runs; None to run it per node.
        output: variable that receives exit codes and last lines, by node.
        timeout: seconds.
        busy: as in `RunRequest`.
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
    """Return a sentence for each secret that is missing in the notebook's environment."""
    return [
        f"--secret {name}: the notebook's environment has no such variable"
        for name in names
        if name not in environ
    ]
