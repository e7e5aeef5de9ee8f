"""Pass wheels to several similar hosts: the first fetches them, the others get them from it.

::

    package index, or notebook → host 0    install.sh, which keeps the wheels
    host 0 ⇢ host 1 ⇢ host 2 ⇢ …           wheels, uv and skymagic's code (`content`)
    host 1, host 2, …                      install.sh, which finds them in its upload folder

A host that does not receive them is set up as a single host. This way the notebook's connection and
the hosts' package index carry each wheel only once, and similar hosts have the same builds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from shlex import quote

from skymagic.bootstrap.builds import backend_for, download_bytes, shortage_of
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.install import WHEELS
from skymagic.bootstrap.provision import Supply
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import NoWheels, fetch, kind, request_for
from skymagic.content.remote.bare_hosts import BareHost, BareHosts
from skymagic.display.panel import StartStep
from skymagic.errors import HostError
from skymagic.ssh.host import HostConnection
from skymagic.wire.threads import run_all

logger = logging.getLogger(__name__)

# from this many bytes of wheels on, passing them is faster than one download per host
WORTH_BYTES = 50_000_000


@dataclass(frozen=True)
class HostPlan:
    """A host that gets an environment.

    Attributes:
        name: host name as users write it.
        facts: results of the inspection.
        python: an interpreter on the host that can run a value server; "" without one.
    """

    name: str
    host: HostConnection
    facts: HostFacts
    python: str


# -- Groups of hosts -------------------------------------------------------------------------------


def groups(
    targets: Sequence[HostPlan], requirements: Requirements, *, alone: bool = False
) -> list[list[HostPlan]]:
    """Group similar hosts, whose first member gets the wheels for all. Pure.

    A host that shares with no other is a group of one.

    Args:
        alone: True if each host that reaches an index downloads for itself.
    """
    kinds: dict[object, list[HostPlan]] = {}
    for target in targets:
        host_kind = (
            kind(target.facts),
            backend_for(requirements, target.facts),
            target.facts.env,
            target.facts.without_index,
        )
        shares = _shares(target, requirements) and (target.facts.without_index or not alone)
        kinds.setdefault(host_kind if shares else target.name, []).append(target)
    result = []
    for group in kinds.values():
        result += (
            [group]
            if len(group) > 1 and share_private_network([target.facts for target in group])
            else [[target] for target in group]
        )
    return result


def _shares(target: HostPlan, requirements: Requirements) -> bool:
    """Return True if a host can use another host's wheels and passing them is worthwhile."""
    facts = target.facts
    # environments over an image hold little, and wheels for one image need not fit another
    if requirements.prepared or requirements.base or facts.ready or not target.python:
        return False
    if facts.without_index:
        return True
    nbytes = download_bytes(requirements, facts)
    return not requirements.scoped and nbytes >= WORTH_BYTES and not shortage_of(nbytes, facts)


def share_private_network(hosts: Sequence[HostFacts]) -> bool:
    """Return True if hosts seem to reach each other, judging by their interfaces. Pure.

    A wrong guess costs a few seconds: a host that cannot reach the others is set up as a single
    host. The addresses that they do use are those that answer (`content.chain`).
    """
    if len({(host.boot, host.addresses) for host in hosts}) == 1 and hosts[0].boot:
        # several accounts on one machine; containers on it would have different addresses
        return True
    addresses_by_host = [_private(host) for host in hosts]
    for length in (24, 16, 8):
        for network in dict.fromkeys(
            ipaddress.ip_network(f"{address}/{length}", strict=False)
            for address in addresses_by_host[0]
        ):
            in_network = [
                [address for address in addresses if address in network]
                for addresses in addresses_by_host
            ]
            if all(in_network) and len({address[0] for address in in_network}) == len(hosts):
                return True
    return False


def _private(facts: HostFacts) -> list[ipaddress.IPv4Address]:
    """Return a host's private IPv4 addresses, without those of container and VM bridges.

    Nothing listens on a public address.
    """
    own = ("docker", "virbr", "br-", "veth", "cni", "podman", "lo")
    usable_addresses = []
    for interface, text in facts.addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        usable = address.is_private and not address.is_loopback and not address.is_link_local
        if isinstance(address, ipaddress.IPv4Address) and usable and not interface.startswith(own):
            usable_addresses.append(address)
    return usable_addresses


# -- Passing -----------------------------------------------------------------------------------


def fetch_wheels_locally(
    group: Sequence[HostPlan], requirements: Requirements, say: Callable[[str], None]
) -> Supply:
    """Fetch wheels on the notebook's machine for similar hosts that reach no index.

    Raises:
        HostError: a wheel does not exist, or a host has no room for them.
    """
    facts, names = group[0].facts, ", ".join(target.name for target in group)
    how = (
        "no package index can be reached from there; the packages are fetched here, "
        f"for {facts.system} {facts.machine}, and sent"
    )
    say(_step(f"{names}: {how}", group))
    request = request_for(requirements, ("pip",))
    try:
        wheelhouse = fetch(request, facts, lambda message: None)
    except NoWheels as problem:
        reason = (
            "it reaches no package index, and its packages could not be fetched here either:\n"
            f"{problem}"
        )
        raise HostError(
            group[0].name,
            reason,
            "Fix what that says, or let the host reach an index.",
            code="setup-packages",
        ) from None
    for target in group:
        if shortage := shortage_of(wheelhouse.nbytes, target.facts):
            raise HostError(target.name, f"it cannot be set up: {shortage}", code="setup")
    return Supply(wheelhouse)


@contextlib.contextmanager
def pass_wheels(
    host_plans: Sequence[HostPlan], requirements: Requirements, say: Callable[[str], None]
) -> Iterator[Mapping[str, Supply]]:
    """Pass the wheels of a group's first host to the others, which install from them.

    All of them install while the block runs. Afterwards, no wheels stay on the hosts.

    Yields:
        Supplies by host name. A host that received nothing is missing.
    """
    first, *receivers = host_plans
    say(
        _step(
            f"{first.name} passes its packages on to "
            f"{', '.join(target.name for target in receivers)}",
            host_plans,
        )
    )
    wheels, code = f"{WHEELS}/{first.facts.env}", f"code/{requirements.code}"
    remove = f"rm -rf {quote(f'{first.facts.folder}/{wheels}')}"
    with contextlib.ExitStack() as stack:
        # By `run_all`, which raises nothing: the host may be gone by then.
        stack.callback(run_all, [partial(first.host.run, remove, timeout=20.0)])
        ready = run_all([partial(_is_present, target) for target in receivers])
        present = {
            target.name: Supply()
            for target, is_ready in zip(receivers, ready, strict=True)
            if is_ready is True
        }
        sharing = [target for target in host_plans if target.name not in present]
        hosts = [
            BareHost(target.name, target.host, target.python, target.facts.folder)
            for target in sharing
        ]
        stores = stack.enter_context(BareHosts(hosts, say))
        try:
            copies = stores.share([wheels, code]) if len(hosts) > 1 else [""]
        except (OSError, HostError) as problem:
            logger.warning("wheels are not passed on: host=%s reason=%s", first.name, problem)
            copies = [""] * len(hosts)
        finally:
            stores.store.close()
        supplies = present | {
            target.name: Supply(copied=folder)
            for target, folder in zip(sharing, copies, strict=True)
            if folder
        }
        if without_copy := [target.name for target in receivers if target.name not in supplies]:
            how = (
                "sending the packages from here"
                if first.facts.without_index
                else "downloading the packages there"
            )
            say(
                f"{', '.join(without_copy)}: the packages could not be passed on from "
                f"{first.name}; {how}"
            )
        yield supplies


def _is_present(target: HostPlan) -> bool:
    """Return True if a host has the environment by now, because it shares a home with the first."""
    ready = f"{target.facts.folder}/env/{target.facts.env}/.ready"
    return target.host.run(f"[ -f {quote(ready)} ]", timeout=20.0).status == 0


def _step(text: str, targets: Sequence[HostPlan]) -> StartStep:
    return StartStep(text, "environment", [target.name for target in targets], None)
