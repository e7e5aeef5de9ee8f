"""Copy one environment to several similar hosts: the first builds it, the others pass it along.

::

    package index, or notebook → host 0    install.sh, as for a single host
    host 0 → host 1 → host 2 → …           its environment and skymagic's code (`bootstrap.copying`)
    host 1, host 2, …                      install.sh, which finds both in its upload folder

A host that does not receive them is set up as a single host. This way the notebook's connection and
the hosts' package index carry each wheel only once, and similar hosts have the same builds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from shlex import quote
from typing import cast

from skymagic.bootstrap import copying
from skymagic.bootstrap.builds import choose, download_bytes, shortage_of
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.provision import Supply
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import NoWheels, WheelRequest, fetch, kind
from skymagic.display.panel import StartStep
from skymagic.errors import HostError
from skymagic.ssh.host import HostConnection
from skymagic.ssh.process import Process
from skymagic.wire import tls
from skymagic.wire.threads import run_all

# from this many bytes of wheels on, copying is faster than one download per host
WORTH_BYTES = 50_000_000
_END_SECONDS = 15.0


@dataclass(frozen=True)
class HostPlan:
    """A host that receives an environment.

    Attributes:
        name: host name as users write it.
        facts: results of the inspection.
        python: an interpreter on the host that can create environments; "" if it has none.
    """

    name: str
    host: HostConnection
    facts: HostFacts
    python: str


# -- Groups of hosts -------------------------------------------------------------------------------


def groups(
    targets: Sequence[HostPlan], requirements: Requirements, *, alone: bool = False
) -> list[list[HostPlan]]:
    """Group similar hosts, whose first member builds the environment for all. Pure.

    A host that shares with no other is a group of one.

    Args:
        alone: True if each host that reaches an index downloads for itself.
    """
    kinds: dict[object, list[HostPlan]] = {}
    for target in targets:
        host_kind = (
            kind(target.facts),
            choose(requirements, target.facts),
            target.facts.env,
            target.facts.without_index,
        )
        shares = _shares(target, requirements) and (target.facts.without_index or not alone)
        kinds.setdefault(host_kind if shares else target.name, []).append(target)
    result = []
    for group in kinds.values():
        result += (
            [group]
            if len(group) > 1 and common_private_network([target.facts for target in group])
            else [[target] for target in group]
        )
    return result


def _shares(target: HostPlan, requirements: Requirements) -> bool:
    """Return True if a host can use another host's environment and the copy is worthwhile."""
    facts = target.facts
    if requirements.prepared or requirements.base or facts.ready or not target.python:
        return False
    if facts.without_index:
        return True
    nbytes = download_bytes(requirements, facts)
    # commands of plugins may not run twice in an environment
    return not requirements.commands and nbytes >= WORTH_BYTES and not shortage_of(nbytes, facts)


def common_private_network(hosts: Sequence[HostFacts]) -> list[str] | None:
    """Return addresses that let the hosts reach each other, judging by their interfaces. Pure.

    Returns None if they share no private network. A wrong guess costs a few seconds: a host that
    cannot reach its predecessor is set up as a single host.
    """
    if len({(host.boot, host.addresses) for host in hosts}) == 1 and hosts[0].boot:
        # several accounts on one machine; containers on it would have different addresses
        return ["127.0.0.1"] * len(hosts)
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
                return [str(address[0]) for address in in_network]
    return None


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


# -- Copying ---------------------------------------------------------------------------------


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
    request = WheelRequest(
        (*requirements.packages, *(() if facts.uv else ("uv",))),
        requirements.minor,
        requirements.preferences,
        indexes=requirements.every_index,
        paths=tuple(path for path in requirements.uploads if path.endswith(".whl")),
        backend=requirements.backend,
    )
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
def replicate_environment(
    host_plans: Sequence[HostPlan], requirements: Requirements, say: Callable[[str], None]
) -> Iterator[Mapping[str, Supply]]:
    """Copy the environment of a group's first host to the others, which install from it.

    They install while the block runs. Copies that no host has installed from are removed at the
    end.

    Yields:
        Supplies by host name. A host that received nothing is missing.
    """
    first, *receivers = host_plans
    say(
        _step(
            f"{first.name} passes its environment on to "
            f"{', '.join(target.name for target in receivers)}",
            host_plans,
        )
    )
    chain = CopyChain(host_plans, requirements)
    unused: Sequence[HostPlan] = host_plans
    try:
        supplies = chain.run()
        if without_copy := [target.name for target in receivers if target.name not in supplies]:
            how = (
                "sending the packages from here"
                if first.facts.without_index
                else "downloading the packages there"
            )
            say(
                f"{', '.join(without_copy)}: the environment could not be copied from "
                f"{first.name}; {how}"
            )
        chain.discard(
            [
                target
                for target in host_plans
                if target.name not in supplies or not supplies[target.name].copied
            ]
        )
        unused = [target for target in receivers if target.name in supplies]
        yield supplies
        unused = ()  # install.sh has removed the copies it installed from
    finally:
        if unused:
            chain.discard(unused)


def _step(text: str, targets: Sequence[HostPlan]) -> StartStep:
    return StartStep(text, "environment", [target.name for target in targets], None)


class CopyChain:
    """Programs on several hosts, each copying the files of the previous host.

    Args:
        group: hosts with a Python each; the first has the environment.
    """

    def __init__(self, group: Sequence[HostPlan], requirements: Requirements) -> None:
        self.tokens = {target.name: secrets.token_hex(8) for target in group}
        """Name of each host's upload folder, by host name. Hosts may share a home."""
        self._group, self._requirements = group, requirements
        self._environment = f"env/{group[0].facts.env}"
        self._over = threading.Event()
        self._processes: list[Process] = []

    def run(self) -> dict[str, Supply]:
        """Copy the environment along the chain, and return supplies by host name.

        A host that already has the environment needs nothing.
        """
        addresses = common_private_network([target.facts for target in self._group])
        assert addresses is not None
        listen = partial(self._listen, tls.certificate())
        jobs = [
            _Job(partial(listen, *pair), self._over)
            for pair in zip(self._group, addresses, strict=True)
        ]
        try:
            answers = dict(zip((target.name for target in self._group), run_all(jobs), strict=True))
            links = [answer for answer in answers.values() if isinstance(answer, _Link)]
            if not links or links[0].target is not self._group[0]:
                return {}
            received = run_all(
                [
                    partial(self._take, *pair, links[-1])
                    for pair in zip([None, *links], links, strict=False)
                ]
            )
            already_present = {name: Supply() for name, answer in answers.items() if answer is None}
            return already_present | {
                link.target.name: Supply(copied=self.tokens[link.target.name])
                for link, succeeded in zip(links[1:], received[1:], strict=True)
                if succeeded is True
            }
        finally:
            self._over.set()
            for job in jobs:  # after this returns, nothing runs on the hosts any more
                job.ended.wait(_END_SECONDS)
            run_all([process.close for process in self._processes], timeout=_END_SECONDS)

    def _listen(self, pem: str, target: HostPlan, address: str) -> _Link | None:
        """Start a host's program.

        Returns None if the environment exists already, which happens when hosts share a home.
        """
        upload_folder = f"{target.facts.folder}/incoming/{self.tokens[target.name]}"
        if self._over.is_set():
            raise KeyboardInterrupt
        process = target.host.open(f"exec {quote(target.python)} -I -c {quote(copying.program())}")
        self._processes.append(process)
        ready = f"{target.facts.folder}/{self._environment}/.ready"
        unless = "" if target is self._group[0] else ready
        port = _answer(process, {"pem": pem, "address": address, "unless": unless})
        return (
            None
            if port is None
            else _Link(target, (address, cast("int", port)), process, upload_folder)
        )

    def _take(self, before: _Link | None, link: _Link, last: _Link) -> object:
        """Let a host send or receive, and return True once everything has arrived."""
        names = [self._environment, f"code/{self._requirements.code}"]
        request = {"folder": link.target.facts.folder, "names": names, "last": link is last}
        if before is not None:
            request |= {
                "upstream": before.address,
                "target": link.upload_folder,
                "source": self._group[0].facts.folder,
            }
        return _answer(link.process, request)

    def discard(self, targets: Sequence[HostPlan]) -> None:
        """Remove unused upload folders from the hosts that can be reached."""
        folders = [
            (target, f"{target.facts.folder}/incoming/{self.tokens[target.name]}")
            for target in targets
        ]
        jobs = [
            partial(target.host.run, f"rm -rf {quote(folder)}", timeout=20.0)
            for target, folder in folders
        ]
        run_all(jobs, timeout=25.0)


@dataclass(frozen=True)
class _Link:
    """A host's listening program.

    Attributes:
        address: address and port for the next host.
        upload_folder: upload folder of the host.
    """

    target: HostPlan
    address: tuple[str, int]
    process: Process
    upload_folder: str


class _Job:
    """A call that is skipped once `over` is set. `ended` is set unless the call is running."""

    def __init__(self, call: Callable[[], object], over: threading.Event) -> None:
        self._call, self._over, self.ended = call, over, threading.Event()
        self.ended.set()

    def __call__(self) -> object:
        self.ended.clear()
        try:
            if self._over.is_set():
                raise KeyboardInterrupt
            return self._call()
        finally:
            self.ended.set()


def _answer(process: Process, request: Mapping[str, object]) -> object:
    """Send a request to a program and return its answer. Raises HostError if it sends none."""
    with contextlib.suppress(BrokenPipeError):  # it has ended; its standard error has the reason
        process.write(json.dumps(request).encode() + b"\n")
    reply = b""
    while not reply.endswith(b"\n") and (data := process.read()):
        reply += data
    if not reply:
        raise HostError(
            process.host, f"it sent nothing: {process.complaint().splitlines()[-1:]}", code="setup"
        )
    return json.loads(reply)
