"""The texts that users see, each surface in a file of `tests/golden`. ``make golden`` writes them again; review the difference.

A text is built from values, without a pool. `tests/test_golden.py` compares.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skymagic import errors
from skymagic.api.command import _parser
from skymagic.display.panel import RankUse
from skymagic.display.status import PoolStatus, PoolStatuses, RankStatus
from skymagic.errors import HostError, SkyError
from skymagic.magics.arguments.help import help_text
from skymagic.magics.arguments.options import MAGICS
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.gpus import devices_by_name
from skymagic.plan.image import Image
from skymagic.plan.planning import plan
from skymagic.plan.plans import Inventory, Plan, Topology
from skymagic.plan.requests import PluginSpec, PoolRequest

FOLDER = Path(__file__).parent / "golden"


def section(title: str, text: str) -> str:
    """A text under its title."""
    return f"== {title}\n{text.rstrip()}\n"


def magics() -> str:
    """``--help`` of every magic."""
    return "\n".join(section(name, help_text(name)) for name in MAGICS)


def commands() -> str:
    """``--help`` of every command: its arguments, without argparse's layout, which depends on Python's version."""
    (subparsers,) = (
        action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return "\n".join(
        section(f"skymagic {name}", "\n".join(_arguments(parser)))
        for name, parser in subparsers.choices.items()
    )


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    if parser.description:
        yield parser.description
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
            names = ", ".join(action.option_strings) or action.metavar or action.dest
            yield f"{names}: {action.help or ''}"


KEY = HostError(
    "gpu1", "its host key is not known: ed25519 SHA256:abc", "ssh gpu1", code="host-key-unknown"
)
ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "RequestError": ((["--nodes: must be at least 1, not 0", "--idle: 'never' is not a duration"],), {}),
    "HostError": (("gpu1", "its host key is not known"), {"hint": "ssh gpu1", "code": "host-key-unknown"}),
    "HostGone": (("node7", "Slurm cancelled its job"), {}),
    "HostsError": (([KEY, HostError("gpu2", "it refused the connection")], 4), {}),
    "CloudError": (("in_use", "InvalidGroup.InUse", "the group is in use", "wait for its machines"), {}),
    "RankError": (("bad", ), {"rank": 1, "hostname": "gpu1", "ename": "ValueError", "heading": "rank 1 on gpu1 failed", "below": ["rank 0 was stopped"]}),
    "RankDied": (("rank 1 on gpu1 died: SIGKILL",), {"rank": 1, "hostname": "gpu1", "status": -9}),
    "ScriptError": (("node 1 (gpu2): exit code 3",), {"node": 1, "hostname": "gpu2", "status": 3}),
}  # fmt: skip
"""What the errors are made with that need more than a message."""
ORDINARY: dict[str, Any] = {
    "code": "no-pool", "rank": 2, "node": 1, "host": "gpu1", "names": ["main"], "hint": "%sky_status lists them",
}  # fmt: skip


def error_classes() -> list[type[SkyError]]:
    """All public classes of errors, in the order of the module."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [kind for kind in classes if issubclass(kind, SkyError) and kind.__name__[0] != "_"]


def samples() -> list[SkyError]:
    """An error of each class; those that take a message take all fields."""
    samples = []
    for kind in error_classes():
        arguments, fields = ARGUMENTS.get(kind.__name__, (("something happened",), {}))
        samples.append(kind(*arguments, **fields))
        if kind.__name__ not in ARGUMENTS:
            samples.append(kind("no pool is called 'main'", **ORDINARY))
    return samples


FIELDS = ("code", "rank", "node", "host", "names", "hint")


def error_messages() -> str:
    """What the notebook shows of an error of each class, and its fields."""
    return "\n".join(
        section(
            type(error).__name__,
            "\n".join(error._render_traceback_())
            + "\n-- "
            + " ".join(f"{name}={getattr(error, name)!r}" for name in FIELDS),
        )
        for error in samples()
    )


LAPTOP = Inventory("laptop", cpus=4, memory_gb=16.0, python="3.11")
BOX = Inventory(
    "box",
    cpus=64,
    memory_gb=512.0,
    gpus=devices_by_name(*["NVIDIA A100-SXM4-80GB"] * 8),
    python="3.11",
)
HOURS = 3600.0


def plans() -> dict[str, Plan]:
    """Plans by what they are an example of."""
    many = PoolRequest(name="train", nodes=4, procs_per_node=8, idle=2 * HOURS, max_price=90.0)
    return {
        "on this machine": plan(PoolRequest(name="lab", procs_per_node=2), LAPTOP),
        "two nodes with plugins and packages": plan(
            PoolRequest(
                nodes=2,
                procs_per_node=2,
                plugins=(PluginSpec("torch", {"backend": "gloo"}),),
                image=Image(pip=("einops",), env={"LEVEL": "3"}),
                secrets=("TOKEN",),
                max_lifetime=8 * HOURS,
            ),
            LAPTOP,
        ),
        "GPUs of this machine": plan(PoolRequest(name="lab", gpu=Accelerator("A100", 8)), BOX),
        "rented machines": Plan(
            "aws", many, Topology(4, 8), Image(), ("4 × p4d.24xlarge",), 96, 1152.0,
            price=87.83, priced="price list of 2026-11-22", region="us-east-1", remote=True,
            set_up="uv, Python 3.11, torch", installs=("torch 2.13.0 (cu124)", "numpy 2.4.6"),
            question="this costs $87.83 per hour", notes=("spot machines may be reclaimed",),
        ),
    }  # fmt: skip


def dry_runs() -> str:
    """What ``--dry-run`` shows."""
    return "\n".join(section(title, each.text()) for title, each in plans().items())


def status() -> str:
    """What ``%sky_status`` shows as text."""
    use = RankUse(1.1, 2e9, 64e9, 0.97, 31e9, 80e9)
    ranks = {
        0: RankStatus(0, 0, "gpu0", 4001, "running", use),
        1: RankStatus(1, 0, "gpu0", 4002, "running", RankUse(1.1, 2e9, 64e9)),
        2: RankStatus(2, 1, "gpu1", 4001, "ended"),
        3: RankStatus(3, 1, "gpu1", None, "starting"),
    }
    large = {
        rank: RankStatus(rank, rank // 64, f"gpu{rank // 64}", 4000 + rank, "ready")
        for rank in range(256)
    }
    shown = {
        "two nodes": PoolStatuses({"lab": PoolStatus("<Pool 'lab': 4 ranks>", ranks)}),
        "many ranks": PoolStatuses({"big": PoolStatus("<Pool 'big': 256 ranks>", large)}),
        "notes": PoolStatuses({}, ("pool 'old' has ended: recreate it with %sky_pool",)),
    }
    return "\n".join(section(title, repr(each)) for title, each in shown.items())


SURFACES: dict[str, Callable[[], str]] = {
    "magics.txt": magics,
    "commands.txt": commands,
    "errors.txt": error_messages,
    "dry_runs.txt": dry_runs,
    "status.txt": status,
}

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, surface in SURFACES.items():
        (FOLDER / name).write_text(surface())
