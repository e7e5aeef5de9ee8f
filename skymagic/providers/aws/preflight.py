"""Before the first cell: machines that have been rented are checked, and one that cannot be worked with is replaced, once.

The check needs an interpreter and no packages, so that it runs while these are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from skymagic.cluster import Node, checking
from skymagic.cluster.health import Findings
from skymagic.display.live import confirmed
from skymagic.display.screen import print_note
from skymagic.errors import ProvisionError
from skymagic.plan.units import agreeing
from skymagic.providers import ssh
from skymagic.providers.aws.launch import Instance
from skymagic.providers.aws.offer import Offer

ONE_FLOW = 5.0
"""Gbit/s that EC2 lets one connection have outside a placement group, whatever the machine's network."""


def during(
    install: Callable[[], None],
    machines: Sequence[ssh.Machine],
    instances: Sequence[Instance],
    offer: Offer,
    say: Callable[[str], None],
    deadline_factor: float,
) -> Findings:
    """Check machines while packages are installed on them. What may have been the installation's own doing is looked at again after it.

    Args:
        install: sets all of them up. Raises what it raises.
        deadline_factor: of the seconds for which a link is measured at most.
    """

    def beside() -> Findings | None:
        for one in machines:
            one.runnable.wait()
        return checked() if all(one.runs for one in machines) else None

    def checked() -> Findings:
        nodes = [one.node(index, "") for index, one in enumerate(machines)]
        return look(nodes, instances, offer, say, deadline_factor)

    _, found = ssh.side_by_side(lambda job: job(), [install, beside])
    return found if found is not None and not found.may_pass else checked()


def look(
    nodes: Sequence[Node],
    instances: Sequence[Instance],
    offer: Offer,
    say: Callable[[str], None],
    deadline_factor: float,
) -> Findings:
    """Check machines.

    Args:
        nodes: in the order of their instances; they need not have met.
        deadline_factor: of the seconds for which a link is measured at most.
    """
    placed = [replace(node, address=one.private) for node, one in zip(nodes, instances, strict=True)]
    rate = min(offer.network, ONE_FLOW) * 1e9 / 8
    extent = replace(checking.WHOLE, seconds=checking.WHOLE.seconds * deadline_factor)
    return checking.check(placed, {}, extent, expected=offer.gpus, rate=rate, say=say)


def tell(found: Findings) -> Findings:
    """Say what is worth knowing of machines, on the thread of a cell."""
    for one in found.verdicts:
        print_note(f"[{found.nodes[one.node].name}: {one.words}]")  # it stays when the start's own display has ended
    return found


def agreed(found: Findings, offer: Offer, yes: bool) -> None:
    """Go on to replace the machines that are broken, or end the start.

    Args:
        yes: whether the user has said yes to what is asked.

    Raises:
        ProvisionError: nobody has agreed; says what is wrong with them.
    """
    words, many = broken(found), len(found.broken)
    cost = "at an unknown price" if offer.price is None else f"for ${many * offer.price:.2f} per hour"
    others = f"{many} × {offer.instance_type} in {agreeing(many, 'its', 'their')} place {cost}, once {agreeing(many, 'it is', 'they are')} ended"
    if not (yes or confirmed(f"{words}: {others}")):
        raise ProvisionError(
            f"{words}; nothing else was rented in {agreeing(many, 'its', 'their')} place: add -y, or start again"
        )


def broken(found: Findings) -> str:
    """The machines that cannot be worked with, each with the reason."""
    return "; ".join(f"{found.nodes[one.node].name}: {one.words}" for one in found.verdicts if one.broken)
