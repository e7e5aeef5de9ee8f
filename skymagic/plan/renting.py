"""The plan of a pool on machines that are rented for it: what will run, where, what it costs, and what has to be confirmed; pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skymagic.errors import RequestError, noted_in
from skymagic.plan import gpus
from skymagic.plan.image import Image
from skymagic.plan.plans import Plan, cost_words, topology
from skymagic.plan.requests import PoolRequest, for_others
from skymagic.plan.units import duration_text

IDLE, MAX_LIFETIME = 1800.0, 86400.0
"""Seconds after which rented machines end where nobody has said when: a bill for a forgotten pool has an end."""
REPLACING = "lost machines are replaced without asking, at the current price (--replace)"


@dataclass(frozen=True)
class Rental:
    """What the machines of a pool are to be.

    Attributes:
        machine: one of them in words: "p4d.24xlarge (8 × A100)". place: where: "us-east-1b, on demand".
        cpus, memory_gb, gpus: of one of them.
        price: dollars per hour for all of them; None where nobody tells. priced: where that is from.
        most: dollars per hour where they are had only as another type, or elsewhere; None where nobody tells.
        notes: what else is worth knowing.
    """

    provider: str
    machine: str
    place: str
    region: str
    cpus: int
    memory_gb: float
    gpus: int = 0
    price: float | None = None
    priced: str = ""
    most: float | None = None
    notes: tuple[str, ...] = ()


def bounded(request: PoolRequest) -> PoolRequest:
    """The request with an end: the limits of rented machines where nothing else was said."""
    stated = request.stated or frozenset()
    limits = {"idle": IDLE, "max_lifetime": MAX_LIFETIME}
    unsaid = {
        name: most
        for name, most in limits.items()
        if getattr(request, name) is None and name not in stated
    }
    # what is only assumed is not what the user states of the pool
    return replace(request, **unsaid, stated=request.given()) if unsaid else request  # type: ignore[arg-type]


def plan_rented(request: PoolRequest, rental: Rental) -> Plan:
    """How `request` is met on machines that are rented for it; its question is what they cost, unless -y was said.

    Raises RequestError with every reason why it cannot be.
    """
    request = bounded(request)
    shape = topology(request)
    mistakes = for_others(request, "aws")
    if request.gpu is not None and request.accelerator is None and str(request.gpu) != "none":
        mistakes.append(
            f"--gpu {request.gpu} does not say which GPU to rent: write its name, as in --gpu A100:8"
        )
    if request.accelerator is not None and request.accelerator.count % shape.procs_per_node:
        mistakes.append(gpus.uneven(request.accelerator.count, shape.procs_per_node))
    image = Image()
    with noted_in(mistakes):
        image = request.whole_image()
    if mistakes:
        raise RequestError(mistakes)
    machines = f"{shape.nodes} × {rental.machine} in {rental.place}"
    wanted = request.accelerator
    return Plan(
        provider=rental.provider, request=request, topology=shape, image=image, hosts=(machines,), cpus=rental.cpus,
        memory_gb=rental.memory_gb, devices=(gpus.named(*[wanted.name] * wanted.count),) * shape.nodes if wanted else (),
        price=rental.price,
        remote=True,
        question="" if request.yes else question(request, machines, rental),
        priced=rental.priced,
        region=rental.region,
        notes=(*rental.notes, *_unused(request, rental), *_endless(request), *([REPLACING] if request.replace else [])),
    )  # fmt: skip


def question(request: PoolRequest, machines: str, rental: Rental) -> str:
    """What is asked before anything is rented: what, where, for how much, and until when at the latest."""
    cost = cost_words(rental.price, rental.priced)
    if rental.price is not None and rental.most is not None and rental.most > rental.price + 0.005:
        cost += f", elsewhere up to ${rental.most:.2f}"
    return f"{machines}: {cost}, {until(request)}"


def until(request: PoolRequest) -> str:
    """How long a pool is paid for, in words."""
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
        f"each machine has {rental.gpus} {gpu.name} and {gpu.count} of them are asked for: --gpu {gpu.name}:{rental.gpus} uses all"
    ]


def _endless(request: PoolRequest) -> list[str]:
    limits = (
        ("--max-lifetime", request.max_lifetime, "you pay for it until %sky_down"),
        ("--idle", request.idle, "you pay for it even while nothing runs"),
    )
    return [f"{option} is none: {what}" for option, limit, what in limits if limit is None]
