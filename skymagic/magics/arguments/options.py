"""Tables: every option once, and each magic's options, words and examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from skymagic.magics.arguments import readers
from skymagic.magics.arguments.readers import Reader
from skymagic.plan.accelerators import read_gpus
from skymagic.plan.container import read_bind, read_container
from skymagic.plan.requests import SSH_CLIENTS, plugin_specs
from skymagic.plan.units import Selection, at_least, memory

PLUGINS = ("torch", "jax", "keras", "huggingface", "accelerate", "joblib", "sklearn")


class Arity(Enum):
    """Number of values that an option takes."""

    ONE = 1
    LIST = 2
    """A list: the option is repeated, or its value has commas."""
    WORDS = 3
    """A list that may also be separated by blanks."""
    OPTIONAL = 4
    """As `WORDS`, and the option may stand alone."""


@dataclass(frozen=True)
class Option:
    """An option of a magic.

    Attributes:
        names: as users write it; messages and help use the first.
        also: other accepted spellings, neither shown nor completed.
        field: field of the request that it sets.
        read: converts a value's text to the field's value; None for an option without a value.
        arity: how many values it takes.
        choices: attribute of `CompletionNames` that completes its value.
        common: gets a line in ``--help``; the other options of a run are listed there by name only.
    """

    names: tuple[str, ...]
    field: str
    read: Reader | None = None
    metavar: str = ""
    help: str = ""
    arity: Arity = Arity.ONE
    choices: str = ""
    common: bool = True
    also: tuple[str, ...] = ()

    @property
    def spellings(self) -> tuple[str, ...]:
        """Accepted names."""
        return (*self.names, *self.also)


REFUSED = {
    "--image-id": "a setting for all pools: %config SkyMagic.aws = {'image_id': 'ami-…'}, "
    "or sky.AWS(image_id='ami-…')"
}
"""Options that people may look for and that are left out on purpose.

Maps each to the reason, or to its replacement.
"""

_SECRET = Option(
    ("--secret",),
    "secrets",
    readers.list_of(readers.variable),
    "NAME",
    "pass this variable of the notebook's environment; its value is never shown",
    Arity.LIST,
    "environment",
    also=("--secrets",),
)
POOL: tuple[Option, ...] = (
    Option(
        ("--provider",),
        "provider",
        str,
        "NAME",
        "where to run: auto, local (this "
        "machine), ssh (your own machines), slurm, kubernetes or ray (a cluster), aws "
        "(rented machines)",
        choices="providers",
    ),
    Option(
        ("-n", "--nodes"),
        "nodes",
        readers.number(1),
        "N",
        "number of machines; on this machine: simulated nodes, each with its own GPUs",
        also=("--num-nodes",),
    ),
    Option(
        ("--ranks",),
        "procs_per_node",
        readers.number(1),
        "N",
        "on this machine: one node of N ranks, one GPU each if there are GPUs",
    ),
    Option(
        ("--gpu",),
        "gpu",
        read_gpus,
        "WHICH",
        "GPUs per node: A100, A100:4, 4, 0,2, GPU-uuid, all or none",
        choices="gpus",
        also=("--gpus",),
    ),
    Option(("--cpus",), "cpus", at_least, "N[+]", "CPU cores per node; 8+ means at least 8"),
    Option(("--memory",), "memory", memory, "GB[+]", "memory per node"),
    Option(
        ("--procs-per-node",),
        "procs_per_node",
        readers.procs,
        "N|auto",
        "ranks per node; auto: one per GPU, or 1 without GPUs",
        choices="auto",
    ),
    Option(
        ("--plugin",),
        "plugins",
        plugin_specs,
        "NAME[:k=v,…]",
        "framework to set up, with options",
        Arity.LIST,
        "plugins",
        also=("--plugins",),
    ),
    Option(
        ("--python",),
        "python",
        readers.interpreter,
        "VERSION|PATH",
        "Python version of the nodes, or the path of an interpreter to use with its packages",
    ),
    Option(
        ("--container",),
        "container",
        read_container,
        "IMAGE",
        "run the nodes' processes in a container of this image: ENGINE:IMAGE names apptainer, "
        "podman, charliecloud or pyxis",
    ),
    Option(
        ("--bind",),
        "binds",
        readers.list_of(read_bind),
        "FOLDERS",
        "with --container: further folders of the nodes to show in it",
        Arity.LIST,
    ),
    Option(("--pip",), "pip", readers.packages, "PACKAGES", "install these packages", Arity.LIST),
    Option(
        ("--env",),
        "env",
        readers.pair,
        "NAME=VALUE",
        "set an environment variable on the ranks",
        Arity.LIST,
    ),
    _SECRET,
    Option(
        ("--hosts",),
        "hosts",
        readers.list_of(readers.host, rf"{readers.OUTSIDE_BRACKETS}|\s+"),
        "HOSTS",
        "machines for --provider ssh",
        Arity.LIST,
        "hosts",
    ),
    Option(
        ("--ssh",),
        "ssh",
        readers.one_of(*SSH_CLIENTS),
        "CLIENT",
        "who speaks SSH: "
        "paramiko, openssh (your ssh program: one-time codes, Kerberos, hardware keys), or auto",
        choices="ssh",
    ),
    Option(
        ("--region",),
        "region",
        readers.region,
        "NAME",
        "region to rent in, or several",
        choices="regions",
    ),
    Option(("--spot",), "spot", help="rent spot machines: cheaper, but EC2 may reclaim them"),
    Option(
        ("--replace",), "replace", help="replace lost machines as soon as capacity is available"
    ),
    Option(
        ("--login",),
        "login",
        readers.host,
        "HOST",
        "Slurm: reach the cluster over SSH, through this login node",
        choices="hosts",
    ),
    Option(
        ("--renew",),
        "replace",
        help="Slurm: continue in another job when this one "
        "reaches its limit or is preempted; ranks start without variables",
    ),
    Option(("--account",), "account", readers.directive, "NAME", "Slurm: account to charge"),
    Option(("--partition",), "partition", readers.directive, "NAME", "Slurm: partition"),
    Option(("--qos",), "qos", readers.directive, "NAME", "Slurm: quality of service"),
    Option(
        ("--time",),
        "time",
        readers.directive,
        "TIME",
        "Slurm: time limit of the job, for example 4h or 1-12:00:00",
    ),
    Option(
        ("--constraint",),
        "constraint",
        readers.directive,
        "FEATURES",
        "Slurm: features that nodes must have",
    ),
    Option(
        ("--gres",),
        "gres",
        readers.directive,
        "GRES",
        "Slurm: generic resources per node, in the site's names",
    ),
    Option(
        ("--reservation",), "reservation", readers.directive, "NAME", "Slurm: a reservation to take"
    ),
    Option(("--exclusive",), "exclusive", help="Slurm: whole nodes, not shared with other jobs"),
    Option(
        ("--slurm",),
        "slurm",
        readers.directives,
        "NAME=VALUE[,…]",
        "Slurm: other options of sbatch; NAME=none leaves one out",
        Arity.LIST,
    ),
    Option(
        ("--image",),
        "container_image",
        readers.directive,
        "NAME",
        "Kubernetes: image of the pods; default: python:3.X-slim",
    ),
    Option(
        ("--namespace",),
        "namespace",
        readers.directive,
        "NAME",
        "Kubernetes: namespace; default: the context's",
    ),
    Option(
        ("--context",),
        "context",
        readers.directive,
        "NAME",
        "Kubernetes: context of the kubeconfig; default: the current one",
    ),
    Option(
        ("--pod-template",),
        "pod_template",
        readers.directive,
        "FILE",
        "Kubernetes: YAML of a pod that the pool's pods are made from",
    ),
    Option(
        ("--pods",),
        "pods",
        readers.directive,
        "LABELS",
        "Kubernetes: use running pods that have these labels, for example app=train",
    ),
    Option(
        ("--address",),
        "address",
        readers.cluster,
        "auto|HOST:PORT|ray://…",
        "Ray: the cluster to use; default: RAY_ADDRESS, else the one on this machine",
    ),
    Option(
        ("--max-price",),
        "max_price",
        readers.dollars,
        "DOLLARS",
        "limit per hour for the whole pool",
    ),
    Option(
        ("--idle",),
        "idle",
        readers.limit,
        "TIME",
        "stop after this time without a cell, for example 30m",
    ),
    Option(
        ("--max-lifetime",),
        "max_lifetime",
        readers.limit,
        "TIME",
        "stop after this time in any case, for example 8h",
    ),
    Option(
        ("--max-away",),
        "max_away",
        readers.limit,
        "TIME",
        "stop a cell this long after "
        "its notebook is gone, if the pool outlives the notebook; default: 24h; none for no limit",
    ),
    Option(
        ("--detach",),
        "detached",
        help="on this machine: keep the ranks after the kernel exits, until %sky_down",
        also=("--detached",),
    ),
    Option(
        ("--lazy",),
        "lazy",
        help="start the pool at its first cell, and again after --idle has stopped it",
    ),
    Option(
        ("-y", "--yes"),
        "yes",
        help="answer yes to every question about prices and machines; SSH still asks for passwords",
    ),
)
DRY_RUN = Option(("--dry-run",), "dry_run", help="show the plan and do nothing")
_POOL_NAME = Option(
    ("--pool",),
    "name",
    readers.pool_name,
    "NAME",
    "pool to use; default: the latest one",
    choices="pools",
)
_OUTPUT = Option(
    ("-o", "--output"),
    "output",
    readers.identifier,
    "NAME",
    "store the value of the last expression from each rank in NAME",
    also=("--out",),
)
_KEEP = Option(
    ("-o", "--output"),
    "output",
    readers.identifier,
    "NAME",
    "store what is shown as an object in NAME",
    also=("--out",),
)
_TARGETS = Option(
    ("-t", "--targets"),
    "targets",
    Selection,
    "RANKS",
    "ranks: 0,2 or 0:4 or ::2; default: all",
    choices="ranks",
    also=("--rank", "--ranks"),
)
_RUN_TARGETS = replace(_TARGETS, also=("--rank",))  # --ranks is a size there
_HEAD = Option(("--head",), "head", help="store only the first rank's value, not a list")
_FROM = Option(("--from",), "source", readers.number(0), "R", "rank to copy from")
_NOBLOCK = Option(
    ("-a", "--noblock"), "noblock", help="return immediately; the cell runs in the background"
)
_BUSY = Option(
    ("--busy",),
    "busy",
    readers.one_of("wait", "refuse"),
    "wait|refuse",
    "if another cell runs on these ranks: wait for it, or fail",
    choices="busy",
)
_TIMEOUT = Option(("--timeout",), "timeout", readers.limit, "TIME", "time limit, for example 10m")
_SHIPPING: tuple[Option, ...] = (
    Option(
        ("--push",),
        "push",
        readers.identifiers,
        "NAMES",
        "also send these variables",
        Arity.WORDS,
        "variables",
        common=False,
    ),
    Option(
        ("--no-push",),
        "no_push",
        readers.identifiers,
        "NAMES",
        "do not send these variables; without names: send nothing",
        Arity.OPTIONAL,
        "variables",
    ),
    Option(("--fresh",), "fresh", help="send variables again even if unchanged", common=False),
)
RUN: tuple[Option, ...] = (  # the common ones first: completion keeps this order
    _OUTPUT,
    Option(
        ("--only",),
        "only",
        Selection,
        "RANKS",
        "show output of: head, all, 0,2 or 0:4",
        choices="ranks",
    ),
    Option(
        ("-g", "--gather"),
        "gather",
        readers.identifiers,
        "NAMES",
        "fetch these variables, as lists by rank",
        Arity.WORDS,
        "gathered",
    ),
    _HEAD,
    _RUN_TARGETS,
    _TIMEOUT,
    _NOBLOCK,
    _POOL_NAME,
    *_SHIPPING,
    replace(_BUSY, common=False),
    Option(
        ("--profile",),
        "profile",
        Selection,
        "RANKS",
        "torch's profiler around the "
        "cell, on the head by default: a trace beside the notebook, and the ten longest operations",
        Arity.OPTIONAL,
        "ranks",
    ),
    replace(DRY_RUN, common=False),
)
_WORKDIR = Option(
    ("--workdir",),
    "workdir",
    readers.path,
    "DIR",
    "folder to copy to the nodes and to run the script in",
)
_SH_ENV = Option(
    ("--env",),
    "env",
    readers.pair,
    "NAME=VALUE",
    "set an environment variable for the script",
    Arity.LIST,
)
_SH_RANK = Option(
    ("-t", "--targets"),
    "rank",
    Selection,
    "RANK",
    "run it once, on the node of this rank and with its environment",
    choices="ranks",
    also=("--rank",),
)
_SH_NODES = Option(
    ("-n", "--nodes"),
    "nodes",
    Selection,
    "NODES",
    "nodes to run on: 0,2 or 0:4 or ::2; default: all",
    choices="ranks",
    also=("--node",),
)
_SH_ONLY = Option(
    ("--only",),
    "only",
    Selection,
    "NODES",
    "show output of: head, all, 0,2 or 0:4",
    choices="ranks",
)
_SH_OUTPUT = Option(
    ("-o", "--output"),
    "output",
    readers.identifier,
    "NAME",
    "store exit codes and last lines by node in NAME",
    also=("--out",),
)
_SH_NOBLOCK = Option(
    ("-a", "--noblock"), "noblock", help="return immediately; the script runs in the background"
)
_DETACH = Option(
    ("--detach",),
    "detach",
    help="return immediately; the script keeps running without the notebook",
    also=("--detached",),
)
SH: tuple[Option, ...] = (
    _POOL_NAME,
    _WORKDIR,
    _SH_ENV,
    _SECRET,
    _SH_OUTPUT,
    _SH_ONLY,
    _SH_NODES,
    _SH_RANK,
    _TIMEOUT,
    _SH_NOBLOCK,
    _BUSY,
    _DETACH,
)
_LINES = Option(
    ("-n", "--lines"), "lines", readers.number(1), "LINES", "number of last lines; default: 50"
)
_FOLLOW = Option(("-f", "--follow"), "follow", help="follow the log until you press stop")
_RUN = Option(
    ("--run",),
    "run",
    readers.number(1),
    "ID",
    "output of one run; the log shows its number above its first line",
)
_CELL = Option(
    ("--cell",), "cell", readers.number(1), "N", "output of one cell, by its number in the notebook"
)
_DEBUG = Option(
    ("--debug",),
    "debug",
    help="show the debug logs of skymagic's own processes on all nodes instead",
)
_GREP = Option(("--grep",), "grep", str, "RE", "only lines that match a regular expression")
_NODES = Option(
    ("-n", "--nodes"),
    "nodes",
    Selection,
    "NODES",
    "nodes: all, head, 0,2 or 0:4",
    choices="ranks",
    also=("--node",),
)
_FOLLOW_LINKS = Option(
    ("--follow",),
    "follow",
    help="copy the targets of links that point "
    "outside SRC, and list them; by default these links are skipped",
)
_ALL = Option(("--all",), "all", help="all pools of this notebook")
_DOWN_ALL = Option(
    ("--all",),
    "all",
    help="all pools of this notebook and all machines you "
    "rented; with --hosts: all your pools there; with --clean: all files that no pool uses now",
)
_CLEAN = Option(
    ("--clean",),
    "clean",
    help="with --hosts: end no pool, and remove files "
    "from these hosts that no pool has used for 30 days",
)
_CLEAN_DRY_RUN = Option(("--dry-run",), "dry_run", help="with --clean: show what would be removed")
_AT_HOSTS = Option(
    ("--hosts",),
    "hosts",
    readers.list_of(readers.host, rf"{readers.OUTSIDE_BRACKETS}|\s+"),
    "HOSTS",
    "your pools on these machines, whichever notebook started them",
    Arity.LIST,
    "hosts",
)
_RENTED = Option(
    ("--provider",),
    "provider",
    readers.one_of("aws", "slurm", "kubernetes", "ray"),
    "aws|slurm|kubernetes|ray",
    "pools you rented, found by their tags, or jobs of a cluster, from any machine",
    choices="rented",
)
_LOGIN = Option(
    ("--login",),
    "login",
    readers.host,
    "HOST",
    "with --provider slurm: ask through this login node, over SSH",
    choices="hosts",
)
_OF_SLURM = Option(
    ("--provider",),
    "provider",
    readers.one_of("slurm"),
    "slurm",
    "with --login: a pool that a notebook on the login node made",
)
_COST = Option(
    ("--cost",),
    "cost",
    help="what your pools cost now, and have cost within a month, also those that are down",
)
_DISK = Option(("--disk",), "disk", help="with --hosts: show what skymagic stores on their disks")
_TO_RENT: tuple[Option, ...] = (
    Option(
        ("-n", "--nodes"),
        "nodes",
        readers.number(1),
        "N",
        "number of machines to rent",
        also=("--num-nodes",),
    ),
    Option(
        ("--region",),
        "region",
        readers.region,
        "NAMES",
        "regions, separated by commas: us-east-1,us-west-2",
        choices="regions",
    ),
    Option(("--spot",), "spot", help="spot prices: cheaper, but EC2 may reclaim the machines"),
)
_TAKE_OVER = Option(
    ("--take-over",), "take_over", help="take the pool from a notebook that is still running"
)


@dataclass(frozen=True)
class Magic:
    """A magic: its summary, its grammar and its examples.

    Attributes:
        options: options that its help and the reference list.
        positional: words on its line without an option's name, for help; empty if none are allowed.
            `NAME`: a pool.
        choices: attribute of `CompletionNames` that completes those words.
        cell: True if it is written with ``%%``.
        elsewhere: accepted options that another magic documents.
    """

    summary: str
    options: tuple[Option, ...] = ()
    positional: str = ""
    choices: str = ""
    examples: tuple[str, ...] = ()
    cell: bool = False
    elsewhere: tuple[Option, ...] = ()

    @property
    def accepted(self) -> tuple[Option, ...]:
        """Options that its line may have."""
        return (*self.options, *self.elsewhere)

    @property
    def takes_pool(self) -> bool:
        """True if a word without an option is a pool's name."""
        return self.positional == NAME


NAME = "[NAME]"
_MORE = (replace(_POOL_NAME, help="the same as NAME"),)

_POOL_EXAMPLES = (
    "%sky_pool --plugin torch                              # one rank per GPU of this machine",
    "%sky_pool --ranks 2 --plugin torch                    # one node of two ranks on this machine",
    "%sky_pool train --nodes 4 --gpu A100:8 --plugin torch:backend=nccl --idle 30m",
    "%sky_pool train --nodes 4 --gpu A100:8 --dry-run      # the plan and its price",
    (
        "%sky_pool lab --ranks 2 --detach                      # after a kernel restart: "
        "%sky_attach lab"
    ),
    '%%sky_pool train\nnodes = 2\nplugins = ["torch"]\n[env]\nOMP_NUM_THREADS = "2"',
)
_BROADCAST_EXAMPLES = (
    "%%sky_broadcast -o results      # results[r] is rank r's last expression",
    "%%sky_broadcast -g loss,acc --only all",
    "%%sky_broadcast --nodes 2 --plugin torch -o result --head --timeout 10m",
    "%%sky_broadcast -t 0:2 --no-push",
)
_SH_EXAMPLES = (
    "%%sky_sh --workdir examples/mingpt\ntorchrun --nnodes=$SKYPILOT_NUM_NODES … main.py",
    "%%sky_sh -t 3      # on the node of rank 3, in its folder and environment\nnvidia-smi",
    (
        "%%sky_sh --only all --timeout 30m -o ends --env OMP_NUM_THREADS=2 --secret "
        "HF_TOKEN\npython train.py"
    ),
)
_PUT_EXAMPLES = (
    "%sky_put data ~/data                 # the folder, as ~/data or into it",
    "%sky_put data/ ~/corpus              # what is in it",
    "%sky_put *.yaml configs/ --nodes 0,2",
)
_GET_EXAMPLES = (
    "%sky_get ~/runs/model.pt .",
    "%sky_get runs/ results --nodes all   # results/node0/…, results/node1/…",
)
MAGICS: dict[str, Magic] = {
    "sky_pool": Magic(
        "Start a pool, or use the pool of this name if it fits.",
        (*POOL, DRY_RUN),
        NAME,
        "pools",
        _POOL_EXAMPLES,
        elsewhere=_MORE,
    ),
    "sky_broadcast": Magic(
        "Run the cell on every rank, or on those that you choose. With "
        "pool options it starts a pool first.",
        RUN,
        NAME,
        "pools",
        _BROADCAST_EXAMPLES,
        True,
        POOL,
    ),
    "sky_sh": Magic(
        "Run the cell as a shell script, once per node.", SH, NAME, "pools", _SH_EXAMPLES, True
    ),
    "sky_status": Magic(
        "Show pools, their ranks, what they use and what they cost.",
        (_KEEP, _COST, _AT_HOSTS, _RENTED, _LOGIN, _DISK),
        NAME,
        "pools",
        (
            "%sky_status",
            "%sky_status -o status                   # status['main'][3].state",
            "%sky_status --cost                  # what pools have cost within a month",
            "%sky_status --hosts gpu1,gpu2      # also pools left by other notebooks",
            "%sky_status --provider aws          # rented machines, from anywhere",
            "%sky_status --provider slurm        # jobs of a cluster, from any login node",
            "%sky_status --hosts gpu1,gpu2 --disk   # what skymagic stores there",
        ),
        elsewhere=_MORE,
    ),
    "sky_logs": Magic(
        "Show everything that ranks wrote, including output the cell did not show.",
        (_TARGETS, _RUN, _CELL, _GREP, _LINES, _FOLLOW, _DEBUG, _KEEP, _POOL_NAME),
        NAME,
        "pools",
        (
            "%sky_logs -t 1 -n 200",
            "%sky_logs -f",
            "%sky_logs --cell 5 --grep 'loss|nan' -o logs      # logs[1] is rank 1's",
            "%sky_logs --debug -n 200               # after %config SkyMagic.log_level = 'DEBUG'",
        ),
    ),
    "sky_stacks": Magic(
        "Show which line each rank executes now; works while a cell runs in the background (-a).",
        (_TARGETS, _POOL_NAME),
        NAME,
        "pools",
        ("%sky_stacks", "%sky_stacks -t 3"),
    ),
    "sky_vars": Magic(
        "Show the ranks' variables and which differ between ranks, without fetching them.",
        (_TARGETS, _POOL_NAME),
        NAME,
        "pools",
        ("%sky_vars", "%sky_vars -t 0,3"),
    ),
    "sky_push": Magic(
        "Send variables to the ranks.",
        (_TARGETS, _POOL_NAME),
        "NAMES",
        "variables",
        ("%sky_push model, data",),
    ),
    "sky_pull": Magic(
        "Fetch variables from the ranks, as lists by rank.",
        (_OUTPUT, _HEAD, _TARGETS, _POOL_NAME),
        "NAMES",
        "rank_variables",
        examples=("%sky_pull loss, accuracy", "%sky_pull model --head -o trained"),
    ),
    "sky_clone": Magic(
        "Copy variables from one rank to others, for example to a replaced one.",
        (_FROM, _POOL_NAME),
        "RANKS NAMES",
        "rank_variables",
        examples=("%sky_clone 2 --from 0 model optimizer",),
    ),
    "sky_put": Magic(
        "Copy a file or a folder to every node; only differences are sent.",
        (_NODES, _FOLLOW_LINKS, _POOL_NAME),
        "SRC DST",
        examples=_PUT_EXAMPLES,
    ),
    "sky_get": Magic(
        "Copy a file or a folder from the head; from several nodes into "
        "folders node0, node1, … in DST.",
        (_NODES, _FOLLOW_LINKS, _POOL_NAME),
        "SRC DST",
        examples=_GET_EXAMPLES,
    ),
    "sky_forward": Magic(
        "Open a port of a node as a link in the notebook: TensorBoard, a profiler, a dashboard.",
        (_NODES, _POOL_NAME),
        "PORTS",
        examples=("%sky_forward 6006", "%sky_forward 8265 --nodes 1"),
    ),
    "sky_pip": Magic(
        "Install packages on all nodes of a pool, or list them. Ranks can import them immediately.",
        (_POOL_NAME, _ALL),
        "install NAMES|list",
        "pip",
        examples=("%sky_pip install pandas pillow==12.0.0", "%sky_pip list"),
    ),
    "sky_gpus": Magic(
        "Show the GPUs of this machine, the names that --gpu accepts, and "
        "prices of rented machines.",
        (*_TO_RENT, _KEEP),
        "[GPU[:COUNT]]",
        "gpus",
        (
            "%sky_gpus",
            "%sky_gpus A100",
            "%sky_gpus A100:8 --nodes 4 --region us-east-1,us-west-2 --spot",
            "%sky_gpus A100:8 -o offers       # offers['p4d.24xlarge'][0].price",
        ),
    ),
    "sky_check": Magic(
        "Check the nodes of a pool: GPUs, hardware errors, disks and clocks.",
        (),
        NAME,
        "pools",
        ("%sky_check", "%sky_check train"),
        elsewhere=_MORE,
    ),
    "sky_restart": Magic(
        "Restart ranks. Their variables are lost.",
        (_TARGETS, _POOL_NAME),
        NAME,
        "pools",
        ("%sky_restart", "%sky_restart -t 2"),
    ),
    "sky_down": Magic(
        "End a pool and release its machines, or remove unused files from hosts.",
        (_DOWN_ALL, _AT_HOSTS, _RENTED, _LOGIN, _CLEAN, _CLEAN_DRY_RUN),
        NAME,
        "pools",
        (
            "%sky_down",
            "%sky_down train",
            "%sky_down --all",
            "%sky_down lab --hosts gpu1,gpu2    # of a notebook that is gone",
            "%sky_down train --provider aws     # rented from another machine",
            "%sky_down --clean --hosts gpu1,gpu2 --dry-run   # unused files of skymagic there",
        ),
        elsewhere=_MORE,
    ),
    "sky_attach": Magic(
        "Continue with a pool whose notebook is gone and show its output "
        "since then; without a name: list pools.",
        (_TAKE_OVER, _OF_SLURM, _LOGIN),
        NAME,
        "leftovers",
        (
            "%sky_attach",
            "%sky_attach lab",
            "%sky_attach lab --provider slurm --login me@cluster   # made on the login node",
        ),
        elsewhere=_MORE,
    ),
    "sky_auto": Magic(
        "Run every plain cell on the ranks, or stop doing so. Cells that "
        "begin with a magic or %%local run in the notebook.",
        (),
        "on|off",
        "switch",
        ("%sky_auto on",),
    ),
}
