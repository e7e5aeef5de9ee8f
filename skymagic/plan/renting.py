"""Plan a pool on rented machines: machines, place, cost, and the question to confirm; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skymagic.errors import RequestError, collect_mistakes
from skymagic.plan import gpus
from skymagic.plan.image import Image
from skymagic.plan.plans import Plan, cost_words, topology
from skymagic.plan.requests import PoolRequest, unsupported_options
from skymagic.plan.units import duration_text

IDLE, MAX_LIFETIME = 1800.0, 86400.0
"""Default limits of rented machines in seconds.

They bound the bill for a forgotten pool.
"""
REPLACING = "lost machines are replaced without asking, at the current price (--replace)"


@dataclass(frozen=True)
class Rental:
    """Machines to rent for a pool.

    Attributes:
        machine: one machine as text: "p4d.24xlarge (8 × A100)".
        location: their location: "us-east-1b, on demand".
        cpus, memory_gb, gpus: of one machine.
        price: dollars per hour for all machines; None if unknown.
        priced: source of the price.
        most: dollars per hour if only another type, or another place, is available; None if
            unknown.
        notes: further notes.
    """

    provider: str
    machine: str
    location: str
    region: str
    cpus: int
    memory_gb: float
    gpus: int = 0
    price: float | None = None
    priced: str = ""
    most: float | None = None
    notes: tuple[str, ...] = ()


def with_bounds(request: PoolRequest) -> PoolRequest:
    """Return the request with the default limits of rented machines, if the user set none."""
    stated = request.stated or frozenset()
    limits = {"idle": IDLE, "max_lifetime": MAX_LIFETIME}
    defaults = {
        name: limit
        for name, limit in limits.items()
        if getattr(request, name) is None and name not in stated
    }
    if not defaults:
        return request
    # assumed limits must not count as stated by the user
    return replace(request, **defaults, stated=request.stated_fields())  # type: ignore[arg-type]


def plan_rented(request: PoolRequest, rental: Rental) -> Plan:
    """Plan `request` on rented machines; the plan's question is their cost, unless -y was given.

    Raises RequestError with every reason why it is impossible.
    """
    request = with_bounds(request)
    shape = topology(request)
    mistakes = unsupported_options(request, "aws")
    if request.gpu is not None and request.accelerator is None and str(request.gpu) != "none":
        mistakes.append(
            f"--gpu {request.gpu} does not say which GPU to rent: write its name, as in "
            "--gpu A100:8"
        )
    if request.accelerator is not None and request.accelerator.count % shape.procs_per_node:
        mistakes.append(gpus.explain_uneven(request.accelerator.count, shape.procs_per_node))
    image = Image()
    with collect_mistakes(mistakes):
        image = request.whole_image()
    if mistakes:
        raise RequestError(mistakes)
    machines = f"{shape.nodes} × {rental.machine} in {rental.location}"
    accelerator = request.accelerator
    return Plan(
        provider=rental.provider,
        request=request,
        topology=shape,
        image=image,
        hosts=(machines,),
        cpus=rental.cpus,
        memory_gb=rental.memory_gb,
        devices=(gpus.devices_by_name(*[accelerator.name] * accelerator.count),) * shape.nodes
        if accelerator
        else (),
        price=rental.price,
        remote=True,
        question="" if request.yes else question(request, machines, rental),
        priced=rental.priced,
        region=rental.region,
        notes=(
            *rental.notes,
            *_unused(request, rental),
            *_endless(request),
            *([REPLACING] if request.replace else []),
        ),
    )


def question(request: PoolRequest, machines: str, rental: Rental) -> str:
    """Return the question before renting: machines, place, cost, and the latest end."""
    cost = cost_words(rental.price, rental.priced)
    if rental.price is not None and rental.most is not None and rental.most > rental.price + 0.005:
        cost += f", elsewhere up to ${rental.most:.2f}"
    return f"{machines}: {cost}, {until(request)}"


def until(request: PoolRequest) -> str:
    """Return how long a pool is paid for, as text."""
    return (
        f"for {duration_text(request.max_lifetime)} at most"
        if request.max_lifetime
        else "without an end"
    )


def _unused(request: PoolRequest, rental: Rental) -> list[str]:
    gpu = request.accelerator
    if gpu is None or rental.gpus <= gpu.count:
        return []
    return [
        f"each machine has {rental.gpus} {gpu.name} and {gpu.count} of them are asked for: "
        f"--gpu {gpu.name}:{rental.gpus} uses all"
    ]


def _endless(request: PoolRequest) -> list[str]:
    limits = (
        ("--max-lifetime", request.max_lifetime, "you pay for it until %sky_down"),
        ("--idle", request.idle, "you pay for it even while nothing runs"),
    )
    return [
        f"{option} is none: {consequence}" for option, limit, consequence in limits if limit is None
    ]
