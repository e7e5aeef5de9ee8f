"""A first try with a real AWS account: rents a small pool, runs on it, gives everything back, and looks whether anything is left.

    python benchmarks/try_aws.py --limit 2                           plans, says what it would cost, rents nothing
    python benchmarks/try_aws.py --limit 2 --rent                    does it
    python benchmarks/try_aws.py --limit 20 --gpu A10G --spot --rent

``--limit`` is the most that it may cost, in dollars: without it nothing is done, and what may cost more is refused. The machines end
themselves after ``--minutes``, whatever becomes of this program. No real account was used while skymagic was built, so what this says is
worth a report, above all where it fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import skymagic as sky
from skymagic.api.specs import request_of
from skymagic.errors import SkyError
from skymagic.plan.plans import Plan
from skymagic.plan.requests import cloud_settings
from skymagic.plan.units import duration_text
from skymagic.pool import launch
from skymagic.providers import Choice

DISKS_AND_ADDRESSES = 0.02
"""Dollars per hour and machine beside its own price, about."""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for; exits where that is not clear."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--limit", type=float, required=True, metavar="DOLLARS", help="the most that it may cost"
    )
    parser.add_argument("--rent", action="store_true", help="do it; without this it only plans")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="after which the machines end themselves (30)"
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpu", metavar="NAME[:COUNT]", help="machines without a GPU unless said")
    parser.add_argument("--spot", action="store_true")
    for name in ("--region", "--profile", "--subnet"):
        parser.add_argument(name)
    # an imitation of EC2 in the place of AWS, and machines that are reached otherwise
    parser.add_argument("--settings", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--python", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if not asked.limit > 0:
        parser.error("--limit: dollars above 0")
    if asked.minutes < 10 or asked.nodes < 1:
        parser.error("--minutes: at least 10; --nodes: at least 1")
    return asked


def keywords(asked: argparse.Namespace) -> dict[str, Any]:
    """The pool, as keywords of `sky.Compute`."""
    cloud = cloud_settings({"profile": asked.profile, "subnet": asked.subnet, **asked.settings})
    fields = {
        "region": asked.region,
        "spot": asked.spot,
        "max_price": asked.limit * 60 / asked.minutes,
        "cloud": cloud,
    }
    return {
        "provider": Choice("aws", {name: value for name, value in fields.items() if value}),
        "nodes": asked.nodes, "accelerator": asked.gpu, "image": sky.Image(python=asked.python),
        "idle": asked.minutes * 60, "max_lifetime": asked.minutes * 60,
    }  # fmt: skip


def most(plan: Plan, asked: argparse.Namespace) -> float | None:
    """Dollars that it costs if everything goes wrong and the machines end themselves; None where no price is known."""
    return (
        None
        if plan.price is None
        else (plan.price + DISKS_AND_ADDRESSES * asked.nodes) * asked.minutes / 60
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, and do it where that was said; 0 where all went well, 1 where something failed or is left, 2 where it was refused."""
    asked = arguments(argv)
    try:
        plan = launch.plan_of(request_of(keywords(asked)), print)
    except SkyError as problem:
        print(f"no plan: {problem}")
        return 2
    print(plan.text())
    cost = most(plan, asked)
    if cost is None:
        print(
            "refused: no price is known of these machines, so no limit can be kept (pricing:GetProducts, --region)"
        )
        return 2
    print(
        f"at most ${cost:.2f} within {duration_text(asked.minutes * 60)}, and the limit is ${asked.limit:.2f}"
    )
    if cost > asked.limit:
        print("refused: that is more than the limit; fewer --nodes or --minutes, or another --gpu")
        return 2
    if not asked.rent:
        print("nothing was rented: --rent does it")
        return 0
    return rent(asked)


def rent(asked: argparse.Namespace) -> int:
    """Do it, a step after the other; whatever happens, give back and look."""
    failed: list[str] = []
    pool = sky.Compute(**keywords(asked), name="try-aws", console=True)
    try:
        step("rent and reach", pool.start, failed)
        if not failed:
            step("a cell on every rank", lambda: hello() @ pool, failed)
            step("a sum over all ranks", lambda: check_sum(asked.nodes, pool), failed)
    finally:
        step("give back", pool.stop, failed)
        step("is anything left?", lambda: look(asked), failed)
    print(f"failed: {', '.join(failed)}" if failed else "all of it went well")
    print("what it has cost: skymagic status --cost; on the bill it stands a day later")
    return 1 if failed else 0


def step(name: str, do: Callable[[], Any], failed: list[str]) -> None:
    """Do something and say how it went."""
    begun = time.monotonic()
    try:
        found = do()
    except Exception as problem:
        failed.append(name)
        print(f"✗ {name}: {type(problem).__name__}: {problem}")
    else:
        print(
            f"✓ {name}: {time.monotonic() - begun:.1f} s{f', {found}' if isinstance(found, list) else ''}"
        )


@sky.function
def hello() -> str:
    """Where a rank is."""
    import socket

    return f"{sky.instance_info().rank}: {socket.gethostname()}"


@sky.function
def rank() -> int:
    """Its number."""
    return sky.instance_info().rank


def check_sum(nodes: int, pool: sky.Compute) -> None:
    """The ranks are there, each once."""
    found = rank() @ pool
    if sorted(found) != list(range(len(found))) or len(found) < nodes:
        raise RuntimeError(f"the ranks say that they are {found}")


def look(asked: argparse.Namespace) -> None:
    """Raise RuntimeError where something of this account's skymagic is left, in any region."""
    from skymagic.providers.aws import sweep
    from skymagic.providers.aws.clients import AwsClients

    cloud = cloud_settings({"profile": asked.profile, **asked.settings})
    found, unseen = sweep.find_everything(
        AwsClients(cloud.profile, cloud.endpoint_url, cloud.deadline_factor)
    )
    if found or unseen:
        raise RuntimeError(
            f"left: {found}; not seen: {unseen}; `skymagic down --all` ends all that you have rented"
        )


if __name__ == "__main__":
    sys.exit(main())
